"""What a moment, an upstream or a client may not do to the proxy: races around a dial, replies that do not
end where they should, a connection that changes its meaning, a client that never reads."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from control_plane.contract.destination import parse_destination
from control_plane.contract.placeholder import fingerprint
from control_plane.contract.placement import HeaderPlacement
from egress_proxy.tls import TlsLayer
from tests.egress_proxy.world import World, get, proof, reverse_path
from tests.support.raw_client import Line, NoReplyError, proxy_authorization
from tests.support.upstream import Request, Upstream, Wire, endless_sse, message, plain, sends

CLIENT = "egress_proxy/client.py"
UPSTREAM = "egress_proxy/upstream.py"


def ask_bytes(path: str, headers: list[str]) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: proxy", *headers, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    "other", ["Authorization: Bearer foreign", "AUTHORIZATION: Bearer foreign", "authorization: foreign"]
)
def test_a_second_value_of_the_slot_does_not_go_upstream(world: World, upstream: Upstream, other: str) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        line.ask(ask_bytes(reverse_path(ticket), [f"Authorization: {ticket.bearer}", other]))

    assert all(request.values("authorization") == [f"Bearer {ticket.secret}"] for request in upstream.requests)
    assert b"foreign" not in upstream.received()


def test_a_second_value_of_a_named_header_does_not_go_upstream(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url, placements=(HeaderPlacement("x-api-key"),))

    with world.reverse() as line:
        line.ask(ask_bytes(reverse_path(ticket), ["X-Api-Key: foreign", f"x-api-key: {ticket.placeholder}"]))

    assert b"foreign" not in upstream.received()


@pytest.mark.guards(CLIENT, "if upstream is not None and upstream.suits(decision):", "if upstream is not None:")
def test_a_secret_never_goes_to_a_connection_that_was_dialled_for_another_destination(
    world: World, upstream: Upstream, other_upstream: Upstream
) -> None:
    plane = world.control_plane
    ticket = world.ticket(upstream.url)
    moved = (parse_destination(other_upstream.url, allow_private=True),)

    # a listener at the old destination whose handshake waits until the destination has moved
    inner = upstream._serve

    async def slow(sock: socket.socket) -> None:
        plane.change(ticket, destinations=moved)
        routes = plane._state.routes[ticket.caller]
        routes[0] = replace(routes[0], destinations=moved)
        plane.publish("credential", tenant=ticket.caller.tenant, id=ticket.binding.credential_id)
        await asyncio.sleep(0.5)
        await inner(sock)

    upstream._serve = slow  # type: ignore[method-assign] # the moment between accept and handshake
    with world.reverse() as line:
        line.ask(get(reverse_path(ticket, "/moved"), headers={"Authorization": ticket.bearer}))

    assert ticket.secret.encode() not in upstream.received()


@pytest.mark.guards(
    CLIENT,
    "meanwhile.\n                decision = self._decide(head)",
    "meanwhile.\n                decision = decision if is_retry else self._decide(head)",
)
def test_a_request_is_not_repeated_after_its_placeholder_was_revoked(world: World, upstream: Upstream) -> None:
    plane = world.control_plane
    ticket = world.ticket(upstream.url)
    inner = upstream._serve
    revoked = threading.Event()

    async def hang_up(_: Request, wire: Wire) -> None:
        await wire.close()

    with world.reverse() as line:
        assert line.ask(get(reverse_path(ticket, "/first"), headers={"Authorization": ticket.bearer})).status == 200

        async def slow(sock: socket.socket) -> None:
            plane.revoke(ticket)
            revoked.set()
            await asyncio.sleep(0.6)
            await inner(sock)

        upstream._serve = slow  # type: ignore[method-assign] # the moment between accept and handshake
        upstream.on("/second", hang_up)
        line.send(get(reverse_path(ticket, "/second"), headers={"Authorization": ticket.bearer}))
        assert revoked.wait(5)
        upstream.on("/second", plain(b"repeated"))
        response = line.read_response()

    seen = upstream.seen("/second")
    assert len(seen) == 1
    assert response.refusal == "revoked_placeholder"


def test_a_reply_whose_length_is_nominated_hop_by_hop_still_ends_for_the_client(
    world: World, upstream: Upstream
) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on(
        "/", sends(b"HTTP/1.1 200 OK\r\nConnection: keep-alive, content-length\r\nContent-Length: 5\r\n\r\nhello")
    )

    with world.reverse() as line:
        line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        head = line.read_until(b"\r\n\r\n")
    assert (
        b"content-length: 5" in head.lower()
        or b"chunked" in head.lower()
        or b"connection: close" in head.lower()
        or b" 502 " in head
    )


def test_after_a_refused_connect_with_a_body_the_connection_closes(world: World) -> None:
    with world.forward() as line:
        smuggled = b"GET http://smuggled.example/ HTTP/1.1\r\nHost: smuggled.example\r\n\r\n"
        first = line.ask(
            b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
            + smuggled
        )
        assert (first.status, first.refusal) == (400, "ambiguous_framing")
        with pytest.raises((NoReplyError, TimeoutError)):
            line.read_response(timeout_seconds=1)


def test_bytes_that_came_with_a_reply_are_never_the_next_replys(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    async def two(_: Request, wire: Wire) -> None:
        await wire.write(message(b"one") + message(b"FORGED"))

    upstream.on("/one", two)
    upstream.on("/two", plain(b"two"))
    with world.reverse() as line:
        line.send(
            get(reverse_path(ticket, "/one"), headers={"Authorization": ticket.bearer})
            + get(reverse_path(ticket, "/two"), headers={"Authorization": ticket.bearer})
        )
        first, second = line.read_response(), line.read_response()
    assert first.body == b"one"
    assert second.body == b"two"


def test_nothing_of_an_interim_reply_follows_a_refusal(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on(
        "/",
        sends(
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
        ),
    )

    with world.reverse() as line:
        response = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        assert response.refusal == "response_leak_blocked"
        line.sock.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            line._more()
        rest = bytes(line._unread)
    assert rest == b""


def test_an_interim_or_204_reply_carries_no_length(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on("/", sends(b"HTTP/1.1 103 E\r\nContent-Length: 7\r\n\r\nHTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n"))

    with world.reverse() as line:
        line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        got = bytes(line.received)
    assert b"content-length" not in got.lower()


@pytest.mark.guards(CLIENT, "self._prepared = None  # made of other facts", "pass")
def test_inside_a_tunnel_nothing_goes_by_what_was_decided_before_it(world: World, upstream: Upstream) -> None:
    plane = world.control_plane
    with Upstream(None) as plain_upstream:
        ticket = world.ticket(upstream.url)
        plane.allow(ticket.caller.tenant, "localhost", plain_upstream.port, allow_private=True)
        proofline = proxy_authorization(ticket.proxy_credential)
        place = f"localhost:{plain_upstream.port}"
        outer = f"GET http://{place}/x HTTP/1.1\r\nHost: {place}\r\n".encode() + proofline + b"\r\n"
        with world.tunnel(ticket, upstream.authority):
            pass
        with world.forward() as line:
            assert line.ask(outer).status == 200
            a = upstream.authority
            assert line.ask(f"CONNECT {a} HTTP/1.1\r\nHost: {a}\r\n".encode() + proofline + b"\r\n").status == 200
            line.start_tls(world.client_context(), "localhost")
            response = line.ask(outer)
        assert response.refusal != ""
        assert len(plain_upstream.requests) == 1


@pytest.mark.parametrize("spelt", ["{head}%{code}{tail}", "{head}/{first}{tail}", "{head}-{first}{tail}"])
def test_no_part_of_a_placeholder_in_a_path_is_recorded(world: World, upstream: Upstream, spelt: str) -> None:
    ticket = world.ticket(upstream.url)
    at = ticket.placeholder.index("coatchk1") + 8
    head, first, tail = ticket.placeholder[:at], ticket.placeholder[at], ticket.placeholder[at + 1 :]
    path = "/x/" + spelt.format(head=head, code=format(ord(first), "02x"), first=first, tail=tail)

    with world.reverse() as line:
        response = line.ask(get(reverse_path(ticket, path)))

    event = world.control_plane.audit_of(response.header("coatcheck-request-id"))
    assert tail not in (event.path or "")


def test_no_placeholder_in_a_host_is_recorded(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    host = f"{ticket.placeholder}.evil.example"

    with world.forward() as line:
        response = line.ask(
            b"GET http://%b/ HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (host.encode(), host.encode(), proof(ticket))
        )

    event = world.control_plane.audit_of(response.header("coatcheck-request-id"))
    assert ticket.placeholder.lower() not in (event.host or "").lower()


@pytest.mark.guards("egress_proxy/server.py", "event.id == credential.fingerprint", "False")
def test_a_revoked_proxy_credential_cuts_a_stream_that_it_opened_in_the_head(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on("/s", endless_sse())
    with world.reverse() as line:
        line.send(
            get(
                f"/{ticket.credential}/s",
                headers={"Authorization": ticket.bearer, "Proxy-Authorization": f"Bearer {ticket.proxy_credential}"},
            )
        )
        line.read_until(b"data: 1")
        world.control_plane.publish(
            "proxy_credential", tenant=ticket.caller.tenant, id=fingerprint(ticket.proxy_credential), revoked=True
        )
        assert ends(line, 5)


def ends(line: Line, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    line.sock.settimeout(1)
    while time.monotonic() < deadline:
        try:
            if not line._more():
                return True
        except TimeoutError:
            pass
    return False


def test_a_secret_in_bytes_after_a_swapped_reply_does_not_reach_the_next_request_unscrubbed(
    world: World, upstream: Upstream
) -> None:
    ticket = world.ticket(upstream.url)

    async def two(request: Request, wire: Wire) -> None:
        await wire.write(message(b"one") + message(request.head))

    upstream.on("/one", two)
    upstream.on("/two", plain(b"two"))
    with world.reverse() as line:
        line.send(
            get(reverse_path(ticket, "/one"), headers={"Authorization": ticket.bearer})
            + get(reverse_path(ticket, "/two"))
        )
        line.read_response()
        line.read_response()
    assert ticket.secret.encode() not in line.received


@pytest.mark.guards("egress_proxy/tls.py", "return self._incoming.pending > 0", "return False")
async def test_a_layer_knows_that_more_was_sent_than_it_has_handed_on(tmp_path: Path, upstream_ca: trustme.CA) -> None:
    loop = asyncio.get_running_loop()
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    upstream_ca.issue_cert("localhost").configure_cert(server_context)
    client_context = ssl.create_default_context()
    upstream_ca.configure_trust(client_context)
    seen: list[tuple[bytes, bool]] = []
    to_client, to_server = Recorded(), Recorded()
    server = layer(loop, to_client, server_context, None, lambda _: None)
    client = layer(loop, to_server, client_context, "localhost", lambda data: seen.append((data, client.has_unread)))
    client.start()
    for _ in range(3):
        server.feed(to_server.take())
        client.feed(to_client.take())

    server.write(b"one")
    server.write(b"two")
    client.feed(to_client.take())

    assert seen == [(b"one", True), (b"two", False)]


class Recorded:
    """What a layer writes, to be given to the other."""

    def __init__(self) -> None:
        self._written = b""

    def take(self) -> bytes:
        taken, self._written = self._written, b""
        return taken

    def write(self, data: bytes) -> None:
        self._written += data

    def is_closing(self) -> bool:
        return False

    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


def layer(
    loop: asyncio.AbstractEventLoop,
    lower: Recorded,
    context: ssl.SSLContext,
    server_hostname: str | None,
    on_data: Callable[[bytes], None],
) -> TlsLayer:
    return TlsLayer(
        loop=loop,
        lower=lower,
        context=context,
        server_hostname=server_hostname,
        on_established=lambda: None,
        on_data=on_data,
        on_end=lambda _: None,
        on_failure=lambda _: None,
    )
