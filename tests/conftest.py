"""What every test gets: an environment without the machine's own proxies and certificates, and the guards' list."""

import os
from pathlib import Path

import pytest

from tests.mutants.guards import Guard, guards_of, write_guards

pytest_plugins = ("tests.support.client_table", "tests.support.fixtures")

GUARDS = pytest.StashKey[list[Guard]]()

AMBIENT = (
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE GIT_SSL_CAINFO AWS_CA_BUNDLE NODE_EXTRA_CA_CERTS "
    "NIX_SSL_CERT_FILE NODE_OPTIONS JAVA_TOOL_OPTIONS"
).split()
"""Variables with which a machine points its programs at its own proxy or certificates: clients under test obey them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--guards-to", metavar="FILE", help="write what the collected tests guard as JSON")


def pytest_configure(config: pytest.Config) -> None:
    for name in (*AMBIENT, *(name for name in os.environ if name.startswith("COATCHECK_"))):
        os.environ.pop(name, None)


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
