"""TLS inside a CONNECT: names that must agree, protocols that must be spoken, however the bytes come."""

import socket
import ssl

import pytest

from tests.egress_proxy.world import World, get
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import Line
from tests.support.upstream import Upstream


def unchecking(world: World) -> ssl.SSLContext:
    """A client that would talk to anybody: what an attacker uses."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.mark.guards(
    "egress_proxy/opening.py", "return canonical_host(hello.server_name) == self._endpoint.host", "return True"
)
def test_a_server_name_other_than_the_connect_host_is_misdirected(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.connected(ticket, upstream.authority) as line:
        line.start_tls(unchecking(world), "evil.test")
        response = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))

        assert (response.status, response.refusal) == (421, "misdirected_request")
        assert line.is_closed_by_peer()
    assert upstream.accepted == 0


@pytest.mark.guards("egress_proxy/opening.py", "return is_ip_literal(self._endpoint.host)", "return True")
def test_no_server_name_is_misdirected_for_a_name(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.connected(ticket, upstream.authority) as line:
        line.start_tls(unchecking(world), None)
        response = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert (response.status, response.refusal) == (421, "misdirected_request")
    assert upstream.accepted == 0


def test_an_address_needs_no_server_name(world: World, upstream: Upstream) -> None:
    authority = f"127.0.0.1:{upstream.port}"
    ticket = world.ticket(f"https://{authority}")

    with world.tunnel(ticket, authority) as line:
        response = line.ask(get("/", host=authority, headers={"Authorization": ticket.bearer}))

    assert response.status == 200


def test_a_name_as_server_name_of_an_address_is_misdirected(world: World, upstream: Upstream) -> None:
    authority = f"127.0.0.1:{upstream.port}"
    ticket = world.ticket(f"https://{authority}")

    with world.connected(ticket, authority) as line:
        line.start_tls(unchecking(world), "localhost")
        response = line.ask(get("/", host="localhost", headers={"Authorization": ticket.bearer}))

    assert (response.status, response.refusal) == (421, "misdirected_request")
    assert upstream.accepted == 0


def test_an_upper_case_host_is_the_same_host(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    shouted = f"LOCALHOST:{upstream.port}"

    with world.connected(ticket, shouted) as line:
        line.start_tls(world.client_context(), "LOCALHOST")
        response = line.ask(get("/", host=shouted, headers={"Authorization": ticket.bearer}))

    assert response.status == 200


def test_http_1_1_is_chosen_when_the_client_offers_more(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    context = world.client_context()
    context.set_alpn_protocols(["h2", "http/1.1"])

    with world.tunnel(ticket, upstream.authority, context=context) as line:
        assert isinstance(line.sock, ssl.SSLSocket)
        assert line.sock.selected_alpn_protocol() == "http/1.1"


def test_a_client_that_offers_only_h2_gets_an_alert(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    context = world.client_context()
    context.set_alpn_protocols(["h2"])

    with (
        world.connected(ticket, upstream.authority) as line,
        pytest.raises(ssl.SSLError, match="alert no application protocol"),
    ):
        line.start_tls(context, "localhost")


def test_a_client_hello_in_the_same_segment_as_the_connect_is_seen(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    warm = world.tunnel(ticket, upstream.authority)
    warm.close()

    with world.forward() as line:
        _tls_by_hand(world, ticket, upstream, line, together=True)


@pytest.mark.parametrize("step", [1, 7, 100])
def test_a_client_hello_in_pieces_is_seen(world: World, upstream: Upstream, step: int) -> None:
    ticket = world.ticket(upstream.url)

    with world.forward() as line:
        _tls_by_hand(world, ticket, upstream, line, together=False, step=step)


def _tls_by_hand(
    world: World, ticket: Ticket, upstream: Upstream, line: Line, *, together: bool, step: int = 65536
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = world.client_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()
    connect = get(
        upstream.authority,
        host=upstream.authority,
        method="CONNECT",
        headers={"Proxy-Authorization": f"Bearer {ticket.proxy_credential}"},
    )
    line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.send(connect + hello if together else connect)
    assert line.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    if not together:
        for at in range(0, len(hello), step):
            line.send(hello[at : at + step])
    request = get("/", host=upstream.authority, headers={"Authorization": ticket.bearer})
    data = line._take(len(line._unread))
    while True:
        incoming.write(data)
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            data = line.sock.recv(65536)
    client.write(request)
    # The end of the handshake and the request in one segment: the other trap.
    line.send(outgoing.read())
    reply = b""
    while b"\r\n\r\n" not in reply:
        try:
            reply += client.read(65536)
        except ssl.SSLWantReadError:
            incoming.write(line.sock.recv(65536))
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert ticket.secret.encode() in upstream.received()


@pytest.mark.parametrize("inside", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"SSH-2.0-x\r\n", b"\x00\x00\x00"])
def test_what_is_not_tls_inside_a_tunnel_is_refused(world: World, upstream: Upstream, inside: bytes) -> None:
    ticket = world.ticket(upstream.url)

    with world.connected(ticket, upstream.authority) as line:
        response = line.ask(inside)

        assert (response.status, response.refusal) == (400, "malformed_request")
        assert line.is_closed_by_peer()
    assert upstream.accepted == 0


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_of_tls_work(world: World, upstream: Upstream, version: ssl.TLSVersion) -> None:
    ticket = world.ticket(upstream.url)
    context = world.client_context()
    context.minimum_version = context.maximum_version = version

    with world.tunnel(ticket, upstream.authority, context=context) as line:
        response = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert response.status == 200


def test_a_client_that_does_not_trust_the_ca_gets_no_reply(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.connected(ticket, upstream.authority) as line, pytest.raises(ssl.SSLCertVerificationError):
        line.start_tls(ssl.create_default_context(), "localhost")

    assert upstream.accepted == 0


def test_an_http_1_0_connect_is_taken(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.forward() as line:
        connect = (
            f"CONNECT {upstream.authority} HTTP/1.0\r\nProxy-Authorization: Bearer {ticket.proxy_credential}\r\n\r\n"
        )
        assert line.ask(connect.encode()).status == 200
        line.start_tls(world.client_context(), "localhost")
        response = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert response.status == 200
