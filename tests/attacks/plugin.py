"""A pytest plugin: the grid of attacks under the run's summary. A test tells its cells by `record_property`."""

import json
from collections import Counter
from typing import Any

import pytest

from tests.attacks import corpus

PROPERTY = "attacks"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    held: Counter[corpus.Cell] = Counter()
    tried: Counter[corpus.Cell] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", ()) if isinstance(report, pytest.TestReport) else ():
                if name == PROPERTY:
                    for kind, listener, direction, of_these, all_ in json.loads(value):
                        held[kind, listener, direction] += of_these
                        tried[kind, listener, direction] += all_
    if not tried:
        return
    terminalreporter.section("attacks")
    for line in corpus.grid(held, tried):
        terminalreporter.write_line(line)
