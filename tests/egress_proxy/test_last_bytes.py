"""Where both sides are carried as they come, what a side sent before it ended arrives (RFC 9110 §9.3.6)."""

import base64
import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable

import pytest
import trustme

from egress_proxy.server import TICK_SECONDS
from tests.egress_proxy.world import World, get, proof, reverse_path
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import Line
from tests.support.upstream import Gate, PeerGoneError, Request, Upstream, Wire

EXCHANGE = "egress_proxy/exchange.py"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
SENT = os.urandom(6 * 1024 * 1024)
"""More than fits between the proxy and an upstream that reads nothing; the rest waits before the proxy."""
LOOKS_SECONDS = 3 * TICK_SECONDS
"""By then the proxy has looked for clients that hung up."""

Opened = Callable[[World, Upstream, trustme.CA], Line]


def handshake(path: str, host: str, ticket: Ticket) -> bytes:
    asked = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        "Authorization": ticket.bearer,
    }
    return get(path, host=host, headers=asked)


def a_websocket_by_a_route(world: World, upstream: Upstream, _: trustme.CA) -> Line:
    ticket = world.ticket(upstream.url, traits={"websocket": True})
    line = world.reverse()
    line.send(handshake(reverse_path(ticket, "/socket"), "proxy", ticket))
    line.read_until(b"\r\n\r\n")
    return line


def a_websocket_in_a_tunnel(world: World, upstream: Upstream, _: trustme.CA) -> Line:
    ticket = world.ticket(upstream.url, traits={"websocket": True})
    line = world.tunnel(ticket, upstream.authority)
    line.send(handshake("/socket", upstream.authority, ticket))
    line.read_until(b"\r\n\r\n")
    return line


def an_unopened_tunnel(world: World, upstream: Upstream, ca: trustme.CA) -> Line:
    ticket = world.ticket("https://elsewhere.test")
    world.control_plane.allow(ticket.caller.tenant, "localhost", upstream.port, allow_private=True, tunnel=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.configure_trust(context)
    line = world.tunnel(ticket, upstream.authority, context=context)
    line.send(get("/socket", host=upstream.authority))
    line.read_until(b"\r\n\r\n")
    return line


CARRIED: list[Opened] = [a_websocket_by_a_route, a_websocket_in_a_tunnel, an_unopened_tunnel]


@pytest.mark.guards(EXCHANGE, "if self._is_opaque and self._upstream is not None:", "if False:")
@pytest.mark.parametrize("opened", CARRIED, ids=lambda opened: str(opened.__name__))
@pytest.mark.parametrize("pace", ["at once", "after the client has gone"])
def test_what_a_client_sent_before_it_hung_up_reaches_the_upstream(
    world: World, upstream: Upstream, upstream_ca: trustme.CA, opened: Opened, pace: str
) -> None:
    gate, got = Gate(), bytearray()
    over = threading.Event()

    async def reads(_: Request, wire: Wire) -> None:
        await wire.write(SWITCHED)
        wire._writer.transport.pause_reading()  # type: ignore[attr-defined] # nothing is read until the gate opens
        await gate.opened()
        wire._writer.transport.resume_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(PeerGoneError):
            while True:
                got.extend(await wire.exactly(1) + wire._take(len(wire._unread)))
        over.set()
        wire.finished = True

    upstream._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    upstream.on("/socket", reads)
    line = opened(world, upstream, upstream_ca)
    if pace == "at once":
        gate.open()
    line.sock.settimeout(20)

    def send_and_end() -> None:
        line.send(SENT)
        line.sock.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send_and_end, daemon=True)
    sender.start()
    if pace != "at once":
        sender.join(5)
        threading.Event().wait(LOOKS_SECONDS)
        gate.open()
    sender.join(20)

    assert over.wait(20)
    assert bytes(got) == SENT
    line.close()


def test_what_an_upstream_sent_before_it_hung_up_reaches_a_client_that_still_sends(world: World) -> None:
    """Its bytes stand unread before the proxy, because the upstream takes no more: closed so, it would get a reset."""
    ticket, last = world.ticket("https://elsewhere.test"), os.urandom(200_000)
    with socket.create_server(("127.0.0.1", 0)) as listener, world.forward() as line:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        authority = f"localhost:{listener.getsockname()[1]}"
        port = int(authority.rpartition(":")[2])
        world.control_plane.allow(ticket.caller.tenant, "localhost", port, allow_private=True)
        line.send(
            handshake(f"http://{authority}/", authority, ticket)
            .replace(b"Authorization: " + ticket.bearer.encode() + b"\r\n", b"")
            .replace(b"\r\n\r\n", b"\r\n" + proof(ticket) + b"\r\n")
        )
        upstream, _ = listener.accept()
        with upstream:
            upstream.recv(65_536)
            upstream.sendall(SWITCHED)
            line.read_until(b"\r\n\r\n")
            sender = threading.Thread(target=lambda: line.send(SENT), daemon=True)
            sender.start()
            sender.join(2)

            upstream.sendall(last)
            upstream.shutdown(socket.SHUT_WR)
            received = line.read_exactly(len(last))

    assert received == last


def test_a_client_that_resets_takes_its_upstream_with_it_at_once(
    world: World, upstream: Upstream, upstream_ca: trustme.CA
) -> None:
    async def never_reads(_: Request, wire: Wire) -> None:
        await wire.write(SWITCHED)
        await wire.peer_gone.wait()

    upstream.on("/socket", never_reads)
    line = a_websocket_by_a_route(world, upstream, upstream_ca)

    line.reset()

    upstream.wait_for(lambda u: u.connections[-1].closed_at is not None, timeout_seconds=4)
