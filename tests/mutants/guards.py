"""What `@pytest.mark.guards(path, old, new)` says: the one-line change that turns a security test red.

Rule: `old` occurs exactly once in the file, so that nobody has to guess which line is meant.
"""

import ast
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

MARKER = "guards"


@dataclass(frozen=True, slots=True, order=True)
class Guard:
    """One change to one file, and the test that must notice it."""

    test: str
    """Its node id."""
    path: str
    """Relative to the project's root."""
    old: str
    new: str

    def fault(self, root: Path) -> str | None:
        """Why the change cannot be made, or None when it can."""
        file = root / self.path
        if not file.is_file():
            return f"{self.path} does not exist"
        text = file.read_text()
        if text.count(self.old) != 1:
            return f"{self.path} holds {self.old!r} {text.count(self.old)} times, not once"
        if self.old == self.new:
            return "the change changes nothing"
        if file.suffix == ".py" and not _parses(text.replace(self.old, self.new)):
            return f"{self.path} is no Python any more after the change to {self.new!r}"
        return None


def guards_of(items: Iterable[pytest.Item]) -> list[Guard]:
    """Every guard of every collected test, once for each test and change."""
    return sorted(
        {Guard(item.nodeid, *mark.args, **mark.kwargs) for item in items for mark in item.iter_markers(MARKER)}
    )


def write_guards(guards: Iterable[Guard], file: Path) -> None:
    file.write_text(json.dumps([asdict(guard) for guard in guards]))


def read_guards(file: Path) -> list[Guard]:
    return [Guard(**fields) for fields in json.loads(file.read_text())]


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
