"""A pytest plugin: which fault points the run hit, who died there, and in the middle of what, under its summary.

A test says it with `record_property`; the properties travel with its report, so the table is whole under pytest-xdist.
"""

from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        str(found["fault_point"]): (outcome, found)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport) and "fault_point" in (found := dict(report.user_properties))
    }
    if not rows:
        return
    terminalreporter.section("fault points")
    width = max(len(name) for name in rows) + 2
    for name, (outcome, found) in sorted(rows.items()):
        word = "hit" if outcome == "passed" else "FAILED"
        died, scenario = found["fault_victims"], found["fault_scenario"]
        terminalreporter.write_line(f"{name:<{width}}{word:<8}{scenario:<34}died: {died}")
    terminalreporter.write_line(f"{len(rows)} points")
