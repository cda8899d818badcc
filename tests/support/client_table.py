"""A pytest plugin: what the run found about real clients, as a client × mode table under its summary.

A test says which cell it fills with `record_property("client", …)` and `record_property("mode", …)`; the properties
travel with its report, so the table is whole under pytest-xdist too.
"""

from typing import Any, Final

import pytest

WORDS: Final = {"passed": "ok", "failed": "FAILED", "error": "FAILED", "skipped": "skipped"}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    cells: dict[str, dict[str, str]] = {}
    for outcome, word in WORDS.items():
        for report in terminalreporter.stats.get(outcome, []):
            found = dict(getattr(report, "user_properties", ()))
            if isinstance(report, pytest.TestReport) and "client" in found:
                cells.setdefault(found["client"], {})[found["mode"]] = word
    if not cells:
        return
    modes = sorted({mode for row in cells.values() for mode in row})
    width = max(len(name) for name in cells) + 2
    terminalreporter.section("real clients")
    terminalreporter.write_line(" " * width + "".join(f"{mode:<10}" for mode in modes))
    for name, row in cells.items():
        terminalreporter.write_line(f"{name:<{width}}" + "".join(f"{row.get(mode, '–'):<10}" for mode in modes))
