"""Every security test names a change that can be made: `make mutants` then shows that the test notices it."""

from pathlib import Path

from tests.mutants.guards import Guard

ROOT = Path(__file__).parents[2]


def test_the_change_that_each_security_test_names_can_be_made(guards: list[Guard]) -> None:
    faults = [f"{guard.test}: {fault}" for guard in guards if (fault := guard.fault(ROOT))]

    assert faults == []
