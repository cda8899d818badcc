"""WebSocket (RFC 6455): the handshake is swapped like any request, frames are carried as they are, and only where it
was asked for and allowed does anybody switch protocols."""

import base64
import os
import secrets
import threading

import aiohttp
import pytest
from aiohttp import web

from tests.egress_proxy.world import World, get, reverse_path
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import Line
from tests.support.upstream import Gate, Request, Upstream, Wire, message, plain, sends
from tests.support.websocket import FIRST_FRAME, echoing

HTTP1 = "egress_proxy/core/http1.py"
DECISION = "egress_proxy/core/decision.py"
SWITCH = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}


def handshake(ticket: Ticket | None, path: str, **more: str) -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    authorization = {"Authorization": ticket.bearer} if ticket is not None else {}
    return get(path, headers={**SWITCH, "Sec-WebSocket-Key": key, **authorization, **more})


@pytest.fixture
def allowed(world: World, upstream: Upstream) -> Ticket:
    upstream.default = echoing()
    return world.ticket(upstream.url, traits={"websocket": True})


def open_websocket(line: Line, ticket: Ticket) -> bytes:
    """The reply's head."""
    line.send(handshake(ticket, reverse_path(ticket, "/socket")))
    return line.read_until(b"\r\n\r\n")


def test_a_handshake_is_swapped_and_what_follows_is_carried_both_ways(
    world: World, upstream: Upstream, allowed: Ticket
) -> None:
    with world.reverse() as line:
        head = open_websocket(line, allowed)
        first = line.read_exactly(len(FIRST_FRAME))
        sent = secrets.token_bytes(1_000_000)
        sender = threading.Thread(target=line.send, args=(sent,), daemon=True)
        sender.start()
        back = line.read_exactly(len(sent))

    seen = upstream.requests[0]
    assert head.startswith(b"HTTP/1.1 101 ")
    assert b"\r\nUpgrade: websocket\r\n" in head
    assert b"\r\nSec-WebSocket-Accept: " in head
    assert first == FIRST_FRAME
    assert back == sent
    assert seen.header("authorization") == f"Bearer {allowed.secret}"
    assert (seen.values("connection"), seen.values("upgrade")) == (["Upgrade"], ["websocket"])


def test_the_same_holds_inside_a_tunnel(world: World, upstream: Upstream, allowed: Ticket) -> None:
    with world.tunnel(allowed, upstream.authority) as line:
        line.send(handshake(allowed, "/socket", Host=upstream.authority).replace(b"Host: proxy\r\n", b""))
        head = line.read_until(b"\r\n\r\n")
        line.read_exactly(len(FIRST_FRAME))
        line.send(b"\x89\x80\x00\x00\x00\x00")
        back = line.read_exactly(6)

    assert head.startswith(b"HTTP/1.1 101 ")
    assert back == b"\x89\x80\x00\x00\x00\x00"


def test_frames_that_the_client_sends_before_the_answer_are_not_lost(world: World, upstream: Upstream) -> None:
    gate = Gate()

    async def behave(request: Request, wire: Wire) -> None:
        await gate.opened()
        await echoing(b"")(request, wire)

    upstream.default = behave
    ticket = world.ticket(upstream.url, traits={"websocket": True})

    with world.reverse() as line:
        line.send(handshake(ticket, reverse_path(ticket, "/socket")) + b"early")
        world.control_plane.wait_for(lambda _: upstream.requests)
        gate.open()
        line.read_until(b"\r\n\r\n")
        early = line.read_exactly(5)

    assert early == b"early"


@pytest.mark.guards(DECISION, "if head.opens_websocket and not handling.websocket:", "if False:")
def test_a_swapped_handshake_is_refused_where_no_websocket_is_allowed(world: World, upstream: Upstream) -> None:
    upstream.default = echoing()
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        response = line.ask(handshake(ticket, reverse_path(ticket, "/socket")))

    assert (response.status, response.refusal) == (505, "protocol_denied")
    assert not upstream.requests


def test_a_bare_handshake_needs_no_trait_as_no_secret_is_in_it(world: World, upstream: Upstream) -> None:
    upstream.default = echoing()
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        line.send(handshake(None, reverse_path(ticket, "/socket")))
        head = line.read_until(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"Connection": "Upgrade", "Upgrade": "h2c"},
        {"Connection": "keep-alive", "Upgrade": "websocket"},
        {"Connection": "Upgrade"},
    ],
)
@pytest.mark.guards(HTTP1, "if status == 101 and not (websocket_asked and", "if status == 101 and not (True or")
def test_a_switch_that_was_not_asked_for_is_an_upstream_error(
    world: World, upstream: Upstream, asked: dict[str, str]
) -> None:
    upstream.default = sends(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    ticket = world.ticket(upstream.url, traits={"websocket": True})

    with world.reverse() as line:
        response = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer, **asked}))

    assert (response.status, response.refusal) == (502, "upstream_protocol_error")
    assert not upstream.requests[0].values("upgrade")


@pytest.mark.parametrize("status", [200, 400, 403])
def test_a_handshake_that_the_upstream_declines_is_an_ordinary_request(
    world: World, upstream: Upstream, status: int
) -> None:
    upstream.default = sends(message(b"no", status=f"{status} No"))
    ticket = world.ticket(upstream.url, traits={"websocket": True})

    with world.reverse() as line:
        declined = line.ask(handshake(ticket, reverse_path(ticket, "/socket")))
        upstream.default = plain(b"next")
        after = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))

    assert (declined.status, declined.body) == (status, b"no")
    assert (after.status, after.body) == (200, b"next")


def test_a_post_with_an_upgrade_keeps_its_body_and_loses_the_upgrade(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url, traits={"websocket": True})
    head = handshake(ticket, reverse_path(ticket), **{"Content-Length": "3"}).replace(b"GET ", b"POST ", 1)

    with world.reverse() as line:
        response = line.ask(head + b"abc")

    assert response.status == 200
    assert (upstream.requests[0].body, upstream.requests[0].values("upgrade")) == (b"abc", [])


def test_when_one_side_ends_so_does_the_other(world: World, upstream: Upstream, allowed: Ticket) -> None:
    with world.reverse() as line:
        open_websocket(line, allowed)
        line.read_exactly(len(FIRST_FRAME))
    world.control_plane.wait_for(lambda _: upstream.connections[0].closed_at is not None)

    with world.reverse() as line:
        open_websocket(line, allowed)
        line.read_exactly(len(FIRST_FRAME))
        upstream.drop_idle_connections()

        assert line.is_closed_by_peer()
    world.control_plane.wait_for(lambda _: world.metric("open_exchanges") == 0)


def test_a_websocket_is_cut_when_its_placeholder_is_revoked(world: World, upstream: Upstream, allowed: Ticket) -> None:
    with world.reverse() as line:
        open_websocket(line, allowed)
        line.read_exactly(len(FIRST_FRAME))

        world.control_plane.revoke(allowed)

        assert line.is_closed_by_peer()


def test_a_placeholder_in_a_frame_is_text_and_never_becomes_the_key(
    world: World, upstream: Upstream, allowed: Ticket
) -> None:
    text = allowed.placeholder.encode()

    with world.reverse() as line:
        open_websocket(line, allowed)
        line.read_exactly(len(FIRST_FRAME))
        line.send(text)
        back = line.read_exactly(len(text))

    assert back == text
    assert upstream.received().count(allowed.secret.encode()) == 1


async def test_a_real_client_speaks_with_a_real_server_through_it(world: World) -> None:
    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str(str(request.headers["Authorization"]))
        async for heard in socket:
            await socket.send_str(heard.data)
        return socket

    app = web.Application()
    app.router.add_get("/socket", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    ticket = world.ticket(f"http://127.0.0.1:{port}", traits={"websocket": True})
    url = f"http://127.0.0.1:{world.reverse_port}{reverse_path(ticket, '/socket')}"
    try:
        async with (
            aiohttp.ClientSession(trust_env=False) as session,
            session.ws_connect(url, headers={"Authorization": ticket.bearer}) as socket,
        ):
            told = await socket.receive_str()
            await socket.ping()
            await socket.send_str("x" * 100_000)
            echoed = await socket.receive_str()
    finally:
        await runner.cleanup()

    assert told == f"Bearer {ticket.secret}", "frames are not searched, which is why it has to be allowed"
    assert echoed == "x" * 100_000
