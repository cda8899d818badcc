"""The secret is chosen by where the bytes go, and never by what a header says. CONNECT target, TLS server name and
`Host` must agree; the address of somebody else's server receives nothing.
"""

import ssl

import pytest

from tests.support.api import Ticket
from tests.support.processes import Workspace
from tests.support.raw_client import (
    Line,
    NoReplyError,
    Response,
    TunnelRefusedError,
    dial,
    proxy_authorization,
    request,
)
from tests.support.upstream import Upstream

REFUSED = (400, 403, 421)


@pytest.fixture
def lured(workspace: Workspace, ticket: Ticket, evil: Upstream) -> Ticket:
    """The attacker's server is even allowed to be reached, without a credential."""
    workspace.api.allow(workspace.tenant, evil.host, port=evil.port, allow_private=True)
    return ticket


def bearer(ticket: Ticket) -> dict[str, str]:
    return {"Authorization": f"Bearer {ticket.placeholder}"}


def assert_nothing_leaked(evil: Upstream, ticket: Ticket, secret: str) -> None:
    assert secret.encode() not in evil.received()
    assert ticket.placeholder.encode() not in evil.received()


@pytest.mark.guards("egress_proxy/core/decision.py", "if named != (expected.host, expected.port):", "if False:")
def test_a_host_field_inside_a_tunnel_to_somebody_else_is_refused(
    workspace: Workspace, lured: Ticket, upstream: Upstream, evil: Upstream, secret: str
) -> None:
    """The binding was chosen by `Host`, the bytes went where the client had dialled."""
    with workspace.tunnel(lured, f"{evil.host}:{evil.port}") as line:
        response = line.ask(request("GET", "/", upstream.authority, bearer(lured)))

    assert (response.status, response.refusal) == (421, "misdirected_request")
    assert evil.requests == []
    assert_nothing_leaked(evil, lured, secret)


def test_a_placeholder_for_another_host_is_refused(
    workspace: Workspace, lured: Ticket, evil: Upstream, secret: str
) -> None:
    """Refused at two places, the proxy and the control plane: no single change lets it through."""
    authority = f"{evil.host}:{evil.port}"

    with workspace.tunnel(lured, authority) as line:
        response = line.ask(request("GET", "/", authority, bearer(lured)))

    assert (response.status, response.refusal) == (403, "destination_denied")
    assert evil.requests == []
    assert_nothing_leaked(evil, lured, secret)


def test_a_tunnel_to_an_unknown_host_is_refused(workspace: Workspace, ticket: Ticket, evil: Upstream) -> None:
    with pytest.raises(TunnelRefusedError) as refused:
        workspace.connected(ticket, f"{evil.host}:{evil.port}")

    assert (refused.value.response.status, refused.value.response.refusal) == (403, "destination_denied")
    assert refused.value.response.reason.replace(" ", "_").lower().endswith("destination_denied")
    assert evil.accepted == 0


def test_the_right_names_on_the_wrong_address_are_refused(
    workspace: Workspace, lured: Ticket, upstream: Upstream, evil: Upstream, secret: str
) -> None:
    """CONNECT to the attacker's address; the TLS server name and `Host` say the upstream's name."""
    response: Response | None = None
    try:
        with workspace.tunnel(lured, f"{evil.host}:{evil.port}", server_name="localhost") as line:
            response = line.ask(request("GET", "/", upstream.authority, bearer(lured)))
    except (ssl.SSLError, OSError, NoReplyError):
        pass  # refused in the handshake: nothing was asked

    assert response is None or response.status in REFUSED
    assert evil.requests == []
    assert_nothing_leaked(evil, lured, secret)


def test_an_absolute_target_and_host_that_disagree_are_refused(
    workspace: Workspace, lured: Ticket, upstream: Upstream, evil: Upstream, secret: str
) -> None:
    line = dial(workspace.deployment.proxy.forward_port)
    head = request("GET", f"http://{evil.host}:{evil.port}/", upstream.authority, bearer(lured))
    proof = proxy_authorization(lured.proxy_credential)

    with line:
        response = line.ask(head.removesuffix(b"\r\n") + proof + b"\r\n")

    assert (response.status, response.refusal) == (421, "misdirected_request")
    assert evil.accepted == 0
    assert upstream.accepted == 0


def spelt(line: Line, host_lines: str, ticket: Ticket) -> Response:
    return line.ask(f"GET /spelt HTTP/1.1\r\n{host_lines}Authorization: Bearer {ticket.placeholder}\r\n\r\n".encode())


@pytest.mark.parametrize(
    "host_lines",
    [
        "Host: {good}\r\nHost: {bad}\r\n",
        "Host: {bad}\r\nHost: {good}\r\n",
        "Host: {good}\r\nHost: {good}\r\n",
        "Host: user@{good}\r\n",
        "Host: {good}@{bad}\r\n",
        "Host: {bad}\r\n",
        "Host: localhost:1\r\n",
        "Host: localhost\r\n",
        "Host: localhost.evil.test:{port}\r\n",
        "Host: {good}, {bad}\r\n",
        "Host: {good}/{bad}\r\n",
        "Host: {good}#{bad}\r\n",
        "Host: localhost\t:{port}\r\n",
        "Host: [localhost]:{port}\r\n",
        "Host: localhost..:{port}\r\n",
        "Host:\r\n",
        "",
    ],
)
def test_a_host_field_that_is_not_exactly_the_tunnels_is_refused(
    workspace: Workspace, lured: Ticket, upstream: Upstream, evil: Upstream, secret: str, host_lines: str
) -> None:
    text = host_lines.format(good=upstream.authority, bad=f"{evil.host}:{evil.port}", port=upstream.port)

    with workspace.tunnel(lured, upstream.authority) as line:
        response = spelt(line, text, lured)

    assert response.status in REFUSED, response
    assert response.refusal
    assert upstream.requests == []
    assert evil.accepted == 0


@pytest.mark.parametrize("spelling", ["LocalHost:{port}", "localhost.:{port}"])
def test_another_spelling_of_the_same_host_reaches_it_under_its_one_name(
    workspace: Workspace, ticket: Ticket, upstream: Upstream, secret: str, spelling: str
) -> None:
    with workspace.tunnel(ticket, upstream.authority) as line:
        response = spelt(line, f"Host: {spelling.format(port=upstream.port)}\r\n", ticket)

    (seen,) = upstream.requests
    assert response.status == 200
    assert seen.values("host") == [upstream.authority]
    assert seen.header("authorization") == f"Bearer {secret}"
