"""The main line: a placeholder goes in, the key goes out, nothing of it comes back. Both modes, every placement."""

import base64
import secrets

import pytest

from control_plane.contract.placement import BasicPlacement, HeaderPlacement, QueryPlacement
from egress_proxy.preamble import SIGNATURE, preamble
from tests.egress_proxy.world import World, get, proof, reverse_path
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import Line, connected
from tests.support.upstream import Upstream, mirror_headers, plain


def test_a_bearer_placeholder_is_swapped_in_forward_mode(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(get("/v1/x", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert response.status == 200
    assert f"Authorization: Bearer {ticket.secret}".encode() in upstream.received()
    assert ticket.placeholder.encode() not in upstream.received()
    assert ticket.secret.encode() not in line.received


def test_a_bearer_placeholder_is_swapped_in_reverse_mode(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        response = line.ask(get(reverse_path(ticket, "/v1/x?a=b"), headers={"Authorization": ticket.bearer}))

    assert response.status == 200
    assert upstream.requests[0].target == "/v1/x?a=b"
    assert upstream.requests[0].values("host") == [upstream.authority]
    assert upstream.requests[0].header("authorization") == f"Bearer {ticket.secret}"
    assert ticket.proxy_credential.encode() not in upstream.received()
    assert ticket.secret.encode() not in line.received


def test_a_named_header_with_a_format_is_swapped(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url, placements=(HeaderPlacement("x-api-key", "token {secret}"),))

    with world.tunnel(ticket, upstream.authority) as line:
        headers = {"X-Api-Key": f"token {ticket.placeholder}"}
        response = line.ask(get("/", host=upstream.authority, headers=headers))

    assert response.status == 200
    assert upstream.requests[0].header("x-api-key") == f"token {ticket.secret}"


def test_basic_credentials_are_swapped(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url, placements=(BasicPlacement("x-access-token"),))
    sent = base64.b64encode(f"anybody:{ticket.placeholder}".encode()).decode()

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(get("/", host=upstream.authority, headers={"Authorization": f"Basic {sent}"}))

    received = upstream.requests[0].header("authorization").removeprefix("Basic ")
    assert response.status == 200
    assert base64.b64decode(received).decode() == f"x-access-token:{ticket.secret}"
    assert received.encode() not in line.received
    assert ticket.secret.encode() not in line.received


def test_a_query_parameter_is_swapped(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url, placements=(QueryPlacement("key"),), secret="a&b=c#d/%2e")

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(get(f"/x?a=1&key={ticket.placeholder}&b=2", host=upstream.authority))

    assert response.status == 200
    assert upstream.requests[0].target == "/x?a=1&key=a%26b%3Dc%23d%2F%252e&b=2"


@pytest.mark.guards("egress_proxy/exchange.py", "return rendered if self._scrubber is None else", "return rendered or")
def test_a_secret_that_comes_back_in_a_head_is_overwritten(world: World, upstream: Upstream) -> None:
    upstream.default = mirror_headers()
    ticket = world.ticket(upstream.url)

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert response.header("x-mirror-authorization") == "Bearer " + "*" * len(ticket.secret)
    assert ticket.secret.encode() not in line.received


def test_a_swap_and_a_scrubbed_echo_are_audited_by_name(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.tunnel(ticket, upstream.authority) as line:
        line.ask(get("/v1/x?q=secret-query", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    def of_ticket(action: str) -> object:
        return world.control_plane.wait_for(
            lambda plane: next(
                (e for e in plane.audited if e.action == action and e.tenant == ticket.caller.tenant), None
            )
        )

    swap = of_ticket("swap")
    assert swap.placeholder_id == ticket.binding.placeholder_id  # type: ignore[attr-defined]
    assert (swap.host, swap.path, swap.method) == ("localhost", "/v1/x", "GET")  # type: ignore[attr-defined]
    assert of_ticket("leak_blocked") is not None
    assert ticket.secret not in repr(world.control_plane.audited)
    assert "secret-query" not in repr(world.control_plane.audited)


def bearer_proof(ticket: Ticket) -> bytes:
    return f"Proxy-Authorization: Bearer {ticket.proxy_credential}\r\n".encode()


@pytest.mark.parametrize("proven", [proof, bearer_proof], ids=["basic", "bearer"])
def test_the_caller_is_proven_by_proxy_authorization(world: World, upstream: Upstream, proven: object) -> None:
    ticket = world.ticket(upstream.url)
    line_of_proof = proven(ticket)  # type: ignore[operator]

    with world.reverse() as line:
        head = get(f"/{ticket.credential}/v1", headers={"Authorization": ticket.bearer})
        response = line.ask(head[:-2] + line_of_proof + b"\r\n")

    assert response.status == 200
    assert b"roxy-" not in upstream.received()


@pytest.mark.parametrize("cut", [1, 11, 12, 17, 40])
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_the_opener_of_a_sessions_listener_proves_the_caller(
    world: World, upstream: Upstream, mode: str, cut: int
) -> None:
    ticket = world.ticket(upstream.url)
    opening = preamble(ticket.proxy_credential)

    with world.forward() if mode == "forward" else world.reverse() as line:
        line.send(opening[:cut])
        line.send(opening[cut:])
        if mode == "forward":
            assert line.ask(get(upstream.authority, host=upstream.authority, method="CONNECT")).status == 200
            line.start_tls(world.client_context(), "localhost")
        path = "/v1" if mode == "forward" else f"/{ticket.credential}/v1"
        host = upstream.authority if mode == "forward" else "proxy"
        first = line.ask(get(path, host=host, headers={"Authorization": ticket.bearer}))
        second = line.ask(get(path, host=host, headers={"Authorization": ticket.bearer}))

    assert (first.status, second.status) == (200, 200)
    assert ticket.secret.encode() in upstream.received()


@pytest.mark.parametrize(
    "opening",
    [
        preamble("coatprx1" + "A" * 40),
        preamble("x" * 40),
        SIGNATURE + b"\x21\x11\x00\x0c\x7f\x00\x00\x01\x7f\x00\x00\x01\x00\x50\x00\x50",
    ],
    ids=["forged", "no token", "addresses"],
)
def test_an_opener_without_a_genuine_proxy_credential_is_refused(
    world: World, upstream: Upstream, opening: bytes
) -> None:
    ticket = world.ticket(upstream.url)

    with world.forward() as line:
        line.send(opening)
        response = line.ask(
            f"CONNECT {upstream.authority} HTTP/1.1\r\nHost: {upstream.authority}\r\n".encode()
            + proof(ticket)
            + b"\r\n"
        )

    assert response.status in (400, 407)
    assert response.refusal
    assert upstream.accepted == 0


def test_two_proofs_that_disagree_are_refused(world: World, upstream: Upstream) -> None:
    ticket, other = world.ticket(upstream.url), world.ticket(upstream.url)

    with world.reverse() as line:
        line.send(preamble(other.proxy_credential))
        response = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))

    assert (response.status, response.refusal) == (403, "caller_mismatch")
    assert upstream.accepted == 0


@pytest.mark.guards("egress_proxy/client.py", 'if head.method == "CONNECT" and (', "if False and (")
def test_a_tunnel_inside_a_tunnel_is_refused(world: World, upstream: Upstream, other_upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url, more_urls=(other_upstream.url,))

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(get(other_upstream.authority, host=other_upstream.authority, method="CONNECT"))

    assert (response.status, response.refusal) == (400, "malformed_request")


def test_the_reverse_listener_takes_no_connect(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        head = get(upstream.authority, host=upstream.authority, method="CONNECT")
        response = line.ask(head[:-2] + proof(ticket) + b"\r\n")

    assert (response.status, response.refusal) == (400, "malformed_request")


def test_requests_of_one_connection_are_decided_one_by_one(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    stolen = world.ticket(upstream.url)

    with world.tunnel(ticket, upstream.authority) as line:
        mine = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))
        theirs = line.ask(get("/", host=upstream.authority, headers={"Authorization": stolen.bearer}))
        mine_again = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert [mine.status, theirs.status, mine_again.status] == [200, 403, 200]
    assert theirs.refusal == "unknown_placeholder"
    assert stolen.secret.encode() not in upstream.received()


@pytest.mark.guards(
    "egress_proxy/upstream.py",
    "lane = self._lanes.get((tenant, endpoint, ca_pem))",
    "lane = next(iter(self._lanes.values()), None)",
)
def test_an_upstream_connection_is_never_shared_across_tenants(world: World, upstream: Upstream) -> None:
    one, two = world.ticket(upstream.url), world.ticket(upstream.url)

    for ticket in (one, two, one, two):
        with world.reverse() as line:
            line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))

    by_connection = [
        {secret for secret in (one.secret, two.secret) if secret.encode() in bytes(connection.received)}
        for connection in upstream.connections
    ]
    assert sorted(len(seen) for seen in by_connection) == [1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_how_the_bytes_of_requests_are_cut_changes_nothing(world: World, upstream: Upstream, seed: int) -> None:
    ticket = world.ticket(upstream.url)
    body = b"0123456789" * 20
    head = get(reverse_path(ticket), headers={"Authorization": ticket.bearer, "Content-Length": str(len(body))})
    plain = get(reverse_path(ticket), headers={"Authorization": ticket.bearer})
    whole = head + body + plain + head + body
    at = 0

    with world.reverse() as line:
        while at < len(whole):
            step = 1 + secrets.randbelow(7 + 200 * seed)
            line.send(whole[at : at + step])
            at += step
        responses = [line.read_response() for _ in range(3)]

    assert [response.status for response in responses] == [200, 200, 200]
    assert [request.body for request in upstream.requests] == [body, b"", body]


def test_pipelined_requests_are_answered_in_order(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    for number in range(20):
        upstream.on(f"/{number}", plain(b"%d" % number))

    with world.reverse() as line:
        line.send(
            b"".join(
                get(reverse_path(ticket, f"/{number}"), headers={"Authorization": ticket.bearer})
                for number in range(20)
            )
        )
        bodies = [line.read_response().body for _ in range(20)]

    assert bodies == [b"%d" % number for number in range(20)]


def test_a_bare_request_to_an_allowed_host_goes_as_it_is(world: World, upstream: Upstream) -> None:
    ticket = world.ticket("https://elsewhere.test")
    world.control_plane.allow(ticket.caller.tenant, "localhost", upstream.port, allow_private=True)

    with _tunnel_when_allowed(world, ticket, upstream) as line:
        line.start_tls(world.client_context(), "localhost")
        response = line.ask(get("/a%2fb?x=%20", host=upstream.authority, headers={"Accept-Encoding": "gzip"}))

    assert response.status == 200
    assert upstream.requests[0].target == "/a%2fb?x=%20"
    assert upstream.requests[0].header("accept-encoding") == "gzip"


def _tunnel_when_allowed(world: World, ticket: Ticket, upstream: Upstream) -> Line:
    return connected(world.forward_port, upstream.authority, proxy_credential=ticket.proxy_credential)
