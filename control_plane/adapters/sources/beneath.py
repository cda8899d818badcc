"""Reads one file below a folder, and nothing else, whatever the name or the file system says.

Rule: every step is opened from the folder before it and never through a link (openat(2) with O_NOFOLLOW), so that
nothing can be exchanged between a check and its use. What is opened must be one regular file with one name, that not
everybody may read. A link, a second name or a pipe is refused, not followed.
"""

import os
import stat
from pathlib import Path
from typing import Final

_STEP: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER: Final = _STEP | os.O_DIRECTORY
_FILE: Final = _STEP | os.O_NONBLOCK  # a pipe would be waited for


class NotReadableError(Exception):
    """Says what is wrong with the file, in words that may be shown."""


class MissingFileError(NotReadableError):
    """There is nothing of that name."""


def read_beneath(root: Path, path: str, *, max_bytes: int) -> bytes:
    """The file `path` (segments separated by `/`) below `root`. Raises `NotReadableError`."""
    *folders, name = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in (*folders, name)):
        raise NotReadableError("its name leads elsewhere")
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        raise NotReadableError("the folder for such files is not there") from None
    try:
        for part in folders:
            inner = _opened(part, _FOLDER, folder)
            os.close(folder)
            folder = inner
        return _content(_opened(name, _FILE, folder), max_bytes)
    finally:
        os.close(folder)


def _opened(part: str, flags: int, folder: int) -> int:
    try:
        return os.open(part, flags, dir_fd=folder)
    except FileNotFoundError:
        raise MissingFileError("there is no such file") from None
    except OSError:
        # A link (ELOOP, or ENOTDIR where a folder is wanted), a socket (ENXIO), no permission.
        raise NotReadableError("it is a link, no plain file, or not ours to read") from None


def _content(file: int, max_bytes: int) -> bytes:
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise NotReadableError("it is no plain file")
        if found.st_nlink != 1:
            raise NotReadableError("it has a second name (a hard link)")
        if found.st_mode & stat.S_IROTH:
            raise NotReadableError("everybody on that machine may read it")
        content = _read(file, max_bytes + 1)
    finally:
        os.close(file)
    if len(content) > max_bytes:
        raise NotReadableError(f"it is longer than {max_bytes} bytes")
    return content


def _read(file: int, count: int) -> bytes:
    content = b""
    try:
        while len(content) < count and (part := os.read(file, count - len(content))):
            content += part
    except OSError:
        raise NotReadableError("it cannot be read") from None
    return content
