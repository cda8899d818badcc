"""Fault points: named once, and out of reach of everything but a test program."""

import re
from collections import Counter
from pathlib import Path

from control_plane import faults
from tests.support.fault_points import fault_points

CONTROL_PLANE = Path(faults.__file__).parent


def test_a_point_does_nothing_unless_a_test_armed_it() -> None:
    reached: list[str] = []

    faults.reach("a.point")
    with faults.armed(reached.append):
        faults.reach("another.point")
    faults.reach("a.point")

    assert reached == ["another.point"]


def test_each_point_is_named_once() -> None:
    times = Counter(fault_points())

    assert times
    assert [name for name, number in times.items() if number > 1] == []


def test_only_the_bootstraps_argument_arms_them() -> None:
    """No program that serves gives that argument, and no setting is read where it is given."""
    arming = re.compile(r"\barmed\(|\bat_fault_point\b")
    found = {
        str(file.relative_to(CONTROL_PLANE.parent)): arming.findall(file.read_text("utf-8"))
        for package in ("control_plane", "egress_proxy", "runtime", "coatcheck")
        for file in (CONTROL_PLANE.parent / package).rglob("*.py")
    }

    assert {file: uses for file, uses in found.items() if uses} == {
        "control_plane/faults.py": ["armed(", "armed("],
        "control_plane/bootstrap.py": ["at_fault_point", "armed(", "at_fault_point"],
    }
