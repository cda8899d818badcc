"""The forward listener and http:// URLs: no deadlock on a body, and no credential in clear text."""

import time

import pytest

from tests.support.api import Ticket
from tests.support.processes import Workspace
from tests.support.raw_client import Line, dial, proxy_authorization
from tests.support.upstream import Upstream, chunk, plain

CHUNKS = 10
CHUNK_GAP_SECONDS = 0.05


@pytest.fixture
def line(workspace: Workspace) -> Line:
    """A connection to the proxy's forward port."""
    return dial(workspace.deployment.proxy.forward_port)


def head(method: str, target: str, host: str, ticket: Ticket | None, more: str = "") -> bytes:
    proof = proxy_authorization(ticket.proxy_credential) if ticket else b""
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{more}".encode() + proof + b"\r\n"


@pytest.fixture
def allowed(workspace: Workspace, ticket: Ticket, plain_upstream: Upstream) -> Ticket:
    """The caller may reach the plain server, without a credential."""
    workspace.api.allow(workspace.tenant, "localhost", port=plain_upstream.port, allow_private=True)
    return ticket


def test_a_slow_chunked_upload_over_plain_http_arrives_whole(
    line: Line, allowed: Ticket, plain_upstream: Upstream
) -> None:
    """Proxies took the body for empty, and both ends waited for ever."""
    plain_upstream.on("/upload", plain(b"stored"))
    target = f"{plain_upstream.url}/upload"
    pieces = [b"%d" % number * 1000 for number in range(CHUNKS)]

    with line:
        line.send(head("POST", target, plain_upstream.authority, allowed, "Transfer-Encoding: chunked\r\n"))
        for piece in pieces:
            time.sleep(CHUNK_GAP_SECONDS)  # the pace is what is tested
            line.send(chunk(piece))
        line.send(b"0\r\n\r\n")
        response = line.read_response(method="POST", timeout_seconds=2)

    (seen,) = plain_upstream.requests
    assert (response.status, response.body) == (200, b"stored")
    assert seen.body == b"".join(pieces)
    assert b"proxy-authorization" not in seen.head.lower()
    assert seen.target == "/upload"


def test_plain_gets_share_a_connection(line: Line, allowed: Ticket, plain_upstream: Upstream) -> None:
    plain_upstream.default = plain(b"package list")

    with line:
        responses = [
            line.ask(head("GET", f"{plain_upstream.url}/dists/{number}", plain_upstream.authority, allowed))
            for number in range(3)
        ]

    assert [response.status for response in responses] == [200] * 3
    assert [seen.target for seen in plain_upstream.requests] == [f"/dists/{number}" for number in range(3)]


def test_a_placeholder_never_goes_over_plain_http_to_an_https_destination(
    line: Line, ticket: Ticket, upstream: Upstream, secret: str
) -> None:
    """Refused at two places, the proxy and the control plane: no single change lets it through."""
    bearer = f"Authorization: Bearer {ticket.placeholder}\r\n"

    with line:
        response = line.ask(head("GET", f"http://{upstream.authority}/", upstream.authority, ticket, bearer))

    assert (response.status, response.refusal) == (403, "plaintext_credential")
    assert upstream.accepted == 0


@pytest.mark.guards(
    "control_plane/contract/admission.py",
    'if endpoint.scheme == "http" and _has_credential(policy, endpoint.host):',
    "if False:",
)
def test_a_bare_plain_request_to_a_host_with_a_credential_is_refused(
    line: Line, ticket: Ticket, upstream: Upstream
) -> None:
    with line:
        response = line.ask(head("GET", f"http://{upstream.authority}/", upstream.authority, ticket))

    assert (response.status, response.refusal) == (403, "plaintext_credential")
    assert upstream.accepted == 0


def test_an_https_url_without_connect_is_refused(line: Line, ticket: Ticket, upstream: Upstream) -> None:
    with line:
        response = line.ask(head("GET", f"{upstream.url}/", upstream.authority, ticket), timeout_seconds=2)

    assert (response.status, response.refusal) == (400, "malformed_request")
    assert upstream.accepted == 0


def test_a_request_to_the_proxy_itself_is_refused_at_once(line: Line, ticket: Ticket, workspace: Workspace) -> None:
    own = f"127.0.0.1:{workspace.deployment.proxy.forward_port}"

    with line:
        response = line.ask(head("GET", "/", own, ticket), timeout_seconds=2)

    assert (response.status, response.refusal) == (400, "malformed_request")


@pytest.mark.guards("egress_proxy/core/decision.py", 'if method == "OPTIONS" and not path:', "if False:")
@pytest.mark.parametrize(
    ("method", "path", "goes_as"),
    [("OPTIONS", "", "*"), ("OPTIONS", "/", "/"), ("OPTIONS", "?a", "/?a"), ("GET", "", "/"), ("HEAD", "", "/")],
)
def test_a_url_without_a_path_goes_as_the_last_proxy_sends_it(
    line: Line, allowed: Ticket, plain_upstream: Upstream, method: str, path: str, goes_as: str
) -> None:
    """RFC 9112 §3.2.4: what OPTIONS asks of a URL without a path, it asks of the server."""
    plain_upstream.default = plain(b"", status="204 No Content")

    with line:
        response = line.ask(head(method, f"{plain_upstream.url}{path}", plain_upstream.authority, allowed))

    assert response.status == 204
    assert [request.target for request in plain_upstream.requests] == [goes_as]
