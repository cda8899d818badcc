"""Files that hold what we show to a source: a Vault token, a projected service account token, AWS keys.

Rule: a source names them inside one folder that the operator of this process chose. Whoever administers sources can
so point at what was put there for them, and never at another file of ours.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from control_plane.contract.secret import Secret
from control_plane.ports import SourceError, SourceFailure

MAX_AUTH_FILE_BYTES: Final = 32_768
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

ReadAuthFile = Callable[[str], Secret]
"""A file's name into its text without white space around it. Raises `SourceError(misconfigured)`. Blocks."""


def read_auth_path(path: str) -> Secret:
    """One that the settings of this process name in full. Raises `SourceError(misconfigured)`. Blocks."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_AUTH_FILE_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise SourceError(SourceFailure.MISCONFIGURED, "the file that it is asked with cannot be read") from None
    if not text:
        raise SourceError(SourceFailure.MISCONFIGURED, "the file that it is asked with is empty")
    return Secret(text)


def auth_files_in(folder: Path | None) -> ReadAuthFile:
    """Read anew each time: such files are replaced while we run."""

    def read(name: str) -> Secret:
        if folder is None:
            raise SourceError(
                SourceFailure.MISCONFIGURED, "COATCHECK_CONTROL_PLANE_SOURCES_AUTH_FOLDER names no folder"
            )
        if not _NAME.fullmatch(name):
            raise SourceError(SourceFailure.MISCONFIGURED, "the file that it is asked with has no plain name")
        # A link in that folder is its owner's: the kubelet makes every file of a mounted Secret one.
        return read_auth_path(str(folder / name))

    return read
