"""A pytest plugin: the deployment that black-box tests share, and fresh things for each of them.

The processes are started once for each test worker; tests are kept apart as customers are, by tenants.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.api import Ticket
from tests.support.processes import Deployment, Workspace, start_deployment
from tests.support.upstream import Upstream
from tests.support.ways import Kind, Way, way


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A control plane and one proxy, as separate processes."""
    started = start_deployment(tmp_path_factory.mktemp("deployment"))
    yield started
    started.stop()


@pytest.fixture
def workspace(deployment: Deployment) -> Workspace:
    """A tenant nobody else has."""
    return deployment.workspace()


@pytest.fixture
def upstream(deployment: Deployment) -> Iterator[Upstream]:
    """Trusted by the proxy; echoes by default."""
    with Upstream(deployment.upstream_ca) as running:
        yield running


@pytest.fixture
def evil(deployment: Deployment) -> Iterator[Upstream]:
    """Also trusted by the proxy, on an address of its own: the listener that must stay silent."""
    with Upstream(deployment.upstream_ca, host="127.0.0.2", names=("127.0.0.2", "localhost")) as running:
        yield running


@pytest.fixture
def secret() -> str:
    """The real key: never seen before, so that finding it anywhere means something."""
    return f"sk-real-{secrets.token_hex(20)}"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder to be a user's home."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def plain_upstream() -> Iterator[Upstream]:
    """Speaks http://, not https://."""
    with Upstream(None) as running:
        yield running


@pytest.fixture
def ticket(workspace: Workspace, upstream: Upstream, secret: str) -> Ticket:
    """A placeholder of the credential `api`: a bearer for the upstream, any path."""
    workspace.credential("api", url=upstream.url, secret=secret)
    return workspace.ticket("api")


@pytest.fixture(params=list(Kind))
def kind(request: pytest.FixtureRequest) -> Kind:
    """The test runs once for each way through the proxy."""
    found: Kind = request.param
    return found


@pytest.fixture
def through(workspace: Workspace, upstream: Upstream, ticket: Ticket, kind: Kind) -> Way:
    """The ticket's way to the upstream."""
    return way(workspace, upstream, ticket, kind)
