"""The ring of key-encryption keys, read from files, newest first.

Rule: a key file that others could read is refused before it is read, and the ring is never empty. A folder stands for
the files in it, newest first by their names (`10.hex` before `9.hex`), so that a key is added by putting a file there.
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
    ring = tuple(_read(file) for path in paths for file in _files(path))
    if not ring:
        raise KeyFileError("no key-encryption key: COATCHECK_CONTROL_PLANE_KEK_FILES names at least one file")
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


def _files(path: Path) -> Sequence[Path]:
    if not path.is_dir():
        return [path]
    # A Secret mounted by Kubernetes has folders of its own beside its keys: `..data`.
    named = [file for file in path.iterdir() if not file.name.startswith(".") and file.is_file()]
    return sorted(named, key=lambda file: _in_order(file.name), reverse=True)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Numbers in a name count as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _read(path: Path) -> Kek:
    require_private(path)
    try:
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise KeyFileError(f"cannot read {path}") from None
    if not _HEX.fullmatch(text):
        raise KeyFileError(f"{path} does not hold a key: 64 hexadecimal digits are expected")
    return Kek.of(bytes.fromhex(text), place=str(path))
