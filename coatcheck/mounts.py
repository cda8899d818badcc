"""Where else a folder can be reached: a bind mount, a second mount of the same file system (proc_pid_mountinfo(5)).

Rule: hiding a folder at one path hides nothing while another path leads to it. Where the mount table cannot be read or
does not explain the folder, that is said (`None`), and nobody may rely on the folder being hidden.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TABLE: Final = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the table."""

    device: str
    """`major:minor`: equal for all mounts of one file system."""
    root: Path
    """Which folder (or file) of that file system is mounted."""
    point: Path


def mounts() -> list[Mount]:
    """The table as it is now; empty when it cannot be read."""
    try:
        lines = _TABLE.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    return list(parsed(lines))


def parsed(lines: Sequence[str]) -> Iterator[Mount]:
    for line in lines:
        fields = line.split(" ")
        if len(fields) > 4:
            yield Mount(fields[2], Path(_unescaped(fields[3])), Path(_unescaped(fields[4])))


def other_ways_to(place: Path, table: Sequence[Mount]) -> list[Path] | None:
    """Every path but `place` itself that leads to it, or into it. None when the table does not explain `place`."""
    holding = [mount for mount in table if _is_in(place, mount.point)]
    if not holding:
        return None
    # The deepest one; of several at the same point the last covers those before it.
    deepest = max(len(mount.point.parts) for mount in holding)
    own = [mount for mount in holding if len(mount.point.parts) == deepest][-1]
    inner = own.root / place.relative_to(own.point)
    found: dict[Path, None] = {}
    for mount in table:
        if mount.device != own.device:
            continue
        if _is_in(inner, mount.root):
            found.setdefault(mount.point / inner.relative_to(mount.root))
        elif _is_in(mount.root, inner):  # a part of it
            found.setdefault(mount.point)
    return [way for way in found if not _is_in(way, place)]


def leads_somewhere(way: Path) -> bool:
    """Whether there is anything at this path; one that another mount covers leads nowhere."""
    return os.path.lexists(way)


def _is_in(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _unescaped(field: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), field)
