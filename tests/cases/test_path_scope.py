"""A path scope is compared with the path every reader will see; a path two readers could see differently is refused.
Encoded slashes stay what they are where the whole host is covered: scoped npm packages need them.
"""

import pytest

from tests.support.api import Ticket
from tests.support.processes import Workspace
from tests.support.upstream import Upstream
from tests.support.ways import Kind, Way, way

TRAVERSALS = [
    "/v1/p/1/../2",
    "/v1/p/1/../../../v1/p/2",
    "/v1/p/1/%2e%2e/2",
    "/v1/p/1/%2E%2e/2",
    "/v1/p/1/.%2e/2",
    "/v1/p/1/%252e%252e/2",
    "/v1/p/1/%25252e%25252e/2",
    "/v1/p/1/..%2f2",
    "/v1/p/1/..%252f2",
    "/v1/p/1/..\\2",
    "/v1/p/1/..%5c2",
    "/v1/p/1/..;x/2",
    "/v1/p/1/;x=1/..;/2",
    "/v1/p/1//../2",
    "//v1/p/1/",
    "/v1//p/1/x",
    "/v1/p/1/%00/../2",
    "/v1/p/2",
    "/v1/p/1",
    "/v1/p/10/x",
    "/V1/p/1/x",
    "/v1/p/1%2fx",
]


@pytest.fixture
def scoped(workspace: Workspace, upstream: Upstream, secret: str, kind: Kind) -> Way:
    """A placeholder for `/v1/p/1/` alone."""
    workspace.credential("api", url=f"{upstream.url}/v1/p/1/", secret=secret)
    return way(workspace, upstream, workspace.ticket("api"), kind)


@pytest.mark.guards("control_plane/contract/destination.py", "if not is_plain_path(raw_path):", "if False:")
@pytest.mark.parametrize("path", TRAVERSALS)
def test_a_path_that_leaves_its_scope_is_refused(scoped: Way, upstream: Upstream, secret: str, path: str) -> None:
    response = scoped.ask("GET", path)

    assert response.status in (400, 403), response
    assert response.refusal
    assert upstream.requests == []
    assert secret.encode() not in response.head + response.body


def test_a_path_inside_its_scope_is_swapped(scoped: Way, upstream: Upstream, secret: str) -> None:
    response = scoped.ask("GET", "/v1/p/1/items?page=../2")

    (seen,) = upstream.requests
    assert response.status == 200
    assert seen.target == "/v1/p/1/items?page=../2"
    assert seen.header("authorization") == f"Bearer {secret}"


@pytest.mark.parametrize("path", ["/@scope%2fname", "/@scope%2Fname/-/name-1.0.tgz", "/a%20b/%7Euser;v=1"])
def test_a_host_wide_credential_passes_encoded_paths_byte_for_byte(
    through: Way, upstream: Upstream, secret: str, path: str
) -> None:
    response = through.ask("GET", path)

    (seen,) = upstream.requests
    assert response.status == 200
    assert seen.target == path
    assert seen.header("authorization") == f"Bearer {secret}"


@pytest.mark.guards("egress_proxy/core/decision.py", 'if climbs("/" + rest.decode("latin-1")):', "if False:")
@pytest.mark.parametrize(
    "climb", ["/../other/x", "/%2e%2e/other/x", "/%252e%252e/other/x", "/..%2fother", "/..\\other", "/..;/other", "/.."]
)
def test_a_reverse_path_that_climbs_out_of_its_route_is_refused(
    workspace: Workspace, upstream: Upstream, ticket: Ticket, climb: str
) -> None:
    response = way(workspace, upstream, ticket, Kind.REVERSE).ask("GET", climb)

    assert response.status in (400, 403), response
    assert upstream.requests == []
