"""How a secret gets in: typed without echo, piped, or from a file.

Rule: never as an argument. Arguments stand in the shell's history, in `ps`, and in the logs of whatever started us.
"""

import getpass
import sys
from pathlib import Path
from typing import Final

from coatcheck.terminal import CommandError
from control_plane.contract.secret import MAX_SECRET_BYTES, Secret, UnusableSecretError

STANDARD_INPUT: Final = Path("-")
NEVER_AN_ARGUMENT: Final = (
    "a secret is never an argument (other programs, and your shell's history, keep those); "
    "leave it out to type it unseen, pipe it in, or use --secret-file FILE"
)
OPTIONS_PEOPLE_TRY: Final = frozenset({"--secret", "--key", "--api-key", "--token", "--password", "--value"})


def read_secret(secret_file: Path | None, *, credential: str, is_a_document: bool = False) -> Secret:
    """The secret of a credential. Raises `CommandError`, which never quotes it.

    `is_a_document`: it may have several lines, as a key file has.
    """
    try:
        text = _read(secret_file, credential=credential)
        return Secret.document(text) if is_a_document else Secret.submitted(text)
    except UnusableSecretError as error:
        raise CommandError(str(error), "nothing was stored; give the key exactly as its provider shows it") from None


def _read(secret_file: Path | None, *, credential: str) -> str:
    if secret_file is not None and secret_file != STANDARD_INPUT:
        return _decoded(_file_content(secret_file), "the file that --secret-file names")
    if sys.stdin.isatty():
        return getpass.getpass(f"Secret for {credential} (not shown): ")
    piped = sys.stdin.buffer.read(MAX_SECRET_BYTES + 3)
    if not piped:
        raise CommandError("standard input holds no secret", "pipe it in, or use --secret-file FILE")
    return _decoded(piped, "standard input")


def _file_content(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_SECRET_BYTES + 3)
    except OSError as error:
        # Its name is not repeated: it may be the secret itself, typed in the wrong place.
        raise CommandError(
            f"cannot read the file that --secret-file names ({error.strerror})",
            "give the path of a file with the key in it",
        ) from None


def _decoded(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise CommandError(f"{source} is not text (UTF-8)", "give the key alone, as text") from None
