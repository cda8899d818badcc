"""The control plane's fault points, read from its sources."""

import re
from pathlib import Path
from typing import Final

_SOURCES: Final = Path(__file__).parents[2] / "control_plane"
_REACH: Final = re.compile(r"""^\s+reach\("([a-z_]+\.[a-z_]+)"\)""", re.MULTILINE)


def fault_points() -> list[str]:
    """Their names, in the order of the files; one that stands twice is there twice."""
    return [
        name
        for file in sorted(_SOURCES.rglob("*.py"))
        if file.name != "faults.py"
        for name in _REACH.findall(file.read_text("utf-8"))
    ]
