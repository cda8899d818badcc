"""The ring of key-encryption keys, read from files, newest first.

Rule: a key file that others could read is refused before it is read, and the ring is never empty.
"""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from control_plane.core.sealing import Kek

KEY_BYTES: Final = 32
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_OTHERS_AND_GROUP: Final = 0o077
_GROUP_READ: Final = 0o040


class KeyFileError(ValueError):
    """The key file cannot be used; the message names the file and what to do, never its content."""


def read_kek_files(paths: Sequence[Path]) -> tuple[Kek, ...]:
    """The ring. Raises `KeyFileError`."""
    if not paths:
        raise KeyFileError("no key-encryption key: COATCHECK_CONTROL_PLANE_KEK_FILES names at least one file")
    ring = tuple(_read(path) for path in paths)
    if len({kek.id for kek in ring}) != len(ring):
        raise KeyFileError("two key-encryption key files hold the same key")
    return ring


def generate_kek_file(path: Path, entropy: bytes) -> None:
    """A new key in a new file of mode 0600. Raises `FileExistsError`: a key is never overwritten."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(entropy[:KEY_BYTES].hex() + "\n")


def require_private(path: Path) -> None:
    """Raises `KeyFileError` unless the file is ours alone (mode 0600), or root's and lent to our group to read."""
    try:
        found = path.stat()
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"{path} is not a file")
    open_to = found.st_mode & _OTHERS_AND_GROUP
    # A Kubernetes Secret mounted with fsGroup is root's, mode 0440, and nobody can make it 0400.
    lent = open_to == _GROUP_READ and found.st_uid == 0 and os.geteuid() != 0
    if open_to and not lent:
        raise KeyFileError(f"{path} can be read by others; do: chmod 600 {path}")


def _read(path: Path) -> Kek:
    require_private(path)
    try:
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise KeyFileError(f"cannot read {path}") from None
    if not _HEX.fullmatch(text):
        raise KeyFileError(f"{path} does not hold a key: 64 hexadecimal digits are expected")
    return Kek.of(bytes.fromhex(text))
