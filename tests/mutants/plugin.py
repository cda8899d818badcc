"""What pytest has to do for `make mutants`: tell what the collected tests guard, and not look for small examples."""

from pathlib import Path

import hypothesis
import pytest

from tests.mutants.guards import Guard, guards_of, write_guards

GUARDS = pytest.StashKey[list[Guard]]()

# A change that is noticed is noticed: shrinking the example would take minutes. The same examples each time, so that a
# test that notices by luck does not.
hypothesis.settings.register_profile(
    "mutants",
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    report_multiple_bugs=False,
    derandomize=True,
    database=None,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--guards-to", metavar="FILE", help="write what the collected tests guard as JSON")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """First, so that tests which `-m` leaves out are seen too."""
    found: list[Guard] = guards_of(items)
    config.stash[GUARDS] = found
    if file := config.getoption("--guards-to"):
        write_guards(found, Path(file))


@pytest.fixture
def guards(request: pytest.FixtureRequest) -> list[Guard]:
    """What the tests collected in this run guard."""
    return request.config.stash[GUARDS]
