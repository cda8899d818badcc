"""Pace: streams are not held back, slow readers and slow writers are waited for, Expect is not waited for."""

import socket
import threading
import time

import pytest

from tests.egress_proxy.world import World, get, reverse_path
from tests.support.upstream import (
    Behaviour,
    Gate,
    Request,
    Upstream,
    Wire,
    chunk,
    gated,
    hold,
    message,
    plain,
    read_body,
    sends,
)

BIG = 24 * 1024 * 1024


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("chunked", [True, False])
def test_each_event_arrives_as_soon_as_it_was_written(
    world: World, upstream: Upstream, mode: str, chunked: bool
) -> None:
    ticket = world.ticket(upstream.url)
    events = [b"event: ping\n\n", b": comment\n\n", b"data: 1234567890 real-\n\n", b"data: done\n\n"]
    gates = [Gate() for _ in events]

    async def behave(_: Request, wire: Wire) -> None:
        framing = "Transfer-Encoding: chunked" if chunked else "Connection: close"
        await wire.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n".encode())
        for gate, event in zip(gates, events, strict=True):
            await gate.opened()
            await wire.write(chunk(event) if chunked else event)
        if chunked:
            await wire.write(b"0\r\n\r\n")
        await wire.close()

    upstream.default = behave
    headers = {"Authorization": ticket.bearer}
    line = world.tunnel(ticket, upstream.authority) if mode == "forward" else world.reverse()
    with line:
        line.send(
            get("/", host=upstream.authority, headers=headers)
            if mode == "forward"
            else get(reverse_path(ticket), headers=headers)
        )
        line.read_until(b"\r\n\r\n")
        for gate, event in zip(gates, events, strict=True):
            began = time.monotonic()
            gate.open()
            assert line.read_until(event + b"\r\n").endswith(event + b"\r\n")
            assert time.monotonic() - began < 0.25


def test_a_small_request_works_after_a_large_reply_to_a_slow_reader(world: World) -> None:
    with Upstream(None) as upstream:
        ticket = world.ticket(upstream.url)
        upstream.default = plain(b"ok")
        # Which size leaves the upstream paused by its very last bytes depends on the machine's buffers.
        for size in range(200_000, 5_000_000, 200_000):
            written = Gate()
            upstream.on("/big", _tells_when_written(message(b"x" * size), written))
            with world.reverse() as line:
                line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
                line.send(get(reverse_path(ticket, "/big"), headers={"Authorization": ticket.bearer}))
                line.read_until(b"\r\n\r\n")
                written._open.wait(0.03)  # the client does not read meanwhile
                assert len(line.read_exactly(size)) == size
                small = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}), timeout_seconds=3)
                assert small.status == 200


def _tells_when_written(reply: bytes, written: Gate) -> Behaviour:
    async def behave(_: Request, wire: Wire) -> None:
        await wire.write(reply)
        written.open()

    return behave


def test_a_reply_is_not_buffered_for_a_client_that_does_not_read(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    written = [0]

    async def endless(_: Request, wire: Wire) -> None:
        await wire.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not wire.peer_gone.is_set():
            await wire.write(chunk(b"x" * 65536))
            written[0] += 65536

    upstream.default = endless
    with world.reverse() as line:
        line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        line.read_until(b"\r\n\r\n")
        settled = _settled(written)

    assert settled < 20 * 1024 * 1024


async def never_reads(_: Request, wire: Wire) -> None:
    """Holds the request, and takes nothing more of its body."""
    wire._writer.transport.pause_reading()  # type: ignore[attr-defined]  # a reading transport, too
    await wire.peer_gone.wait()


def test_an_upload_is_not_buffered_for_an_upstream_that_does_not_read(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    upstream.on("/", never_reads, before_body=True)
    sent = [0]

    def upload() -> None:
        try:
            while True:
                sent[0] += line.sock.send(b"x" * 65536)
        except OSError:
            pass

    with world.reverse() as line:
        headers = {"Authorization": ticket.bearer, "Content-Length": str(2**40)}
        line.send(get(reverse_path(ticket), method="POST", headers=headers))
        line.sock.settimeout(3)
        thread = threading.Thread(target=upload, daemon=True)
        thread.start()
        settled = _settled(sent)
        line.reset()
        thread.join(5)

    assert settled < 40 * 1024 * 1024


def _settled(counter: list[int]) -> int:
    """The counter once it has stood still for half a second."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < 0.5:
        if counter[0] != last:
            last, since = counter[0], time.monotonic()
        time.sleep(0.02)
    return last


def test_refusals_are_not_buffered_for_a_client_that_does_not_read(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    refused = get(reverse_path(ticket), headers={"Authorization": f"Bearer {world.control_plane.forged()}"}) * 500
    sent = [0]

    def flood() -> None:
        try:
            while True:
                sent[0] += line.sock.send(refused)
        except OSError:
            pass

    with world.reverse() as line:
        line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.sock.settimeout(2)
        thread = threading.Thread(target=flood, daemon=True)
        thread.start()
        settled = _settled(sent)
        line.reset()
        thread.join(5)

    assert settled < 40 * 1024 * 1024


@pytest.mark.long
def test_a_client_that_reads_late_gets_every_refusal(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    refused = get(reverse_path(ticket), headers={"Authorization": f"Bearer {world.control_plane.forged()}"})
    count = 12_000
    sent = [0]

    def send_all() -> None:
        for _ in range(count // 100):
            line.send(refused * 100)
            sent[0] += 100

    with world.reverse() as line:
        sending = threading.Thread(target=send_all, daemon=True)
        sending.start()
        _settled(sent)
        statuses = [line.read_response().status for _ in range(count)]

    assert statuses == [403] * count


def test_a_large_upload_arrives_whole(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.default = sends(message(b"thanks"))
    body = bytes(range(256)) * (BIG // 256)

    with world.tunnel(ticket, upstream.authority) as line:
        headers = {"Authorization": ticket.bearer, "Content-Length": str(len(body))}
        line.send(get("/", method="PUT", host=upstream.authority, headers=headers))
        line.send(body)
        response = line.read_response()

    assert response.body == b"thanks"
    assert upstream.requests[0].body == body


def test_a_chunked_upload_is_chunked_anew_and_its_trailers_dropped(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        headers = {"Authorization": ticket.bearer, "Transfer-Encoding": "chunked"}
        line.send(get(reverse_path(ticket), method="POST", headers=headers))
        for piece in (b"5\r\nhel", b"lo\r\n", b"3\r\nabc\r\n0\r\nX-Trailer: 1\r\n", b"\r\n"):
            line.send(piece)
        first = line.read_response()
        second = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))

    assert (first.status, second.status) == (200, 200)
    assert upstream.requests[0].body == b"helloabc"
    assert b"X-Trailer" not in upstream.received()


# --- early replies, Expect --------------------------------------------------------------------------------------------


def test_an_early_reply_to_an_upload_is_delivered_and_the_connection_closed(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on("/", sends(message(b"too big", status="413 Content Too Large")), before_body=True)

    with world.reverse() as line:
        headers = {"Authorization": ticket.bearer, "Content-Length": str(BIG)}
        line.send(get(reverse_path(ticket), method="PUT", headers=headers))
        line.send(b"x" * 100_000)
        response = line.read_response()

        assert (response.status, response.body) == (413, b"too big")
        assert response.header("connection") == "close"
        assert line.is_closed_by_peer()


def expecting(world: World, upstream: Upstream, ticket: object) -> bytes:
    headers = {"Authorization": ticket.bearer, "Content-Length": "5", "Expect": "100-continue"}  # type: ignore[attr-defined]
    return get("/", method="PUT", host=upstream.authority, headers=headers)


def test_a_100_of_the_upstream_is_relayed(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    async def continues(request: Request, wire: Wire) -> None:
        await wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await read_body(request, wire)
        await wire.write(message(b"stored"))

    upstream.on("/", continues, before_body=True)
    with world.tunnel(ticket, upstream.authority) as line:
        began = time.monotonic()
        line.send(expecting(world, upstream, ticket))
        assert line.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        assert time.monotonic() - began < 1
        line.send(b"hello")
        response = line.read_response(method="PUT")

    assert (response.body, upstream.requests[0].body) == (b"stored", b"hello")
    assert upstream.requests[0].header("expect") == "100-continue"
    assert upstream.requests[0].header("authorization") == f"Bearer {ticket.secret}"


def test_a_refusal_instead_of_a_100_is_relayed_without_the_body(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on("/", sends(message(b"no", status="401 Unauthorized")), before_body=True)

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(expecting(world, upstream, ticket))

    assert (response.status, response.body, response.interim) == (401, b"no", ())


def test_an_upstream_that_ignores_expect_does_not_stall_the_client(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.default = sends(b"HTTP/1.1 100 Continue\r\n\r\n" + message(b"stored"))

    with world.tunnel(ticket, upstream.authority) as line:
        began = time.monotonic()
        line.send(expecting(world, upstream, ticket))
        assert line.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        assert time.monotonic() - began < 1
        line.send(b"hello")
        response = line.read_response(method="PUT")

    assert (response.body, response.interim) == (b"stored", ())


# --- a client that is gone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize(
    ("moment", "way"),
    [
        *((moment, way) for moment in ("waiting", "mid-reply", "mid-upload", "pipelining") for way in ("FIN", "RST")),
        # A FIN behind a full receive window has not left the client's machine: nobody can see it yet.
        ("paused upload", "RST"),
    ],
)
@pytest.mark.guards(
    "egress_proxy/client.py", "client_gone += 1\n            exchange.client_gone()", "client_gone += 1"
)
def test_the_upstream_is_let_go_when_the_client_is_gone(
    world: World, upstream: Upstream, mode: str, moment: str, way: str
) -> None:
    ticket = world.ticket(upstream.url)
    begun = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    behaviour = {"mid-reply": hold(begun), "paused upload": never_reads}.get(moment, hold())
    upstream.on("/x", behaviour, before_body=True)
    headers = {"Authorization": ticket.bearer}
    if "upload" in moment:
        headers["Content-Length"] = str(2**40)
    path = "/x" if mode == "forward" else reverse_path(ticket, "/x")
    host = upstream.authority if mode == "forward" else "proxy"
    request = get(path, method="PUT", host=host, headers=headers)

    line = world.tunnel(ticket, upstream.authority) if mode == "forward" else world.reverse()
    with line:
        line.send(request)
        if moment == "mid-upload":
            line.send(b"x" * 1000)
        if moment == "pipelining":
            line.send(request * 300)
        upstream.wait_for(lambda u: u.requests)
        if moment == "mid-reply":
            line.read_until(b"hello")
        if moment == "paused upload":
            _fill(line.sock)
        gone_at = time.monotonic()
        line.reset() if way == "RST" else line.close()

    if moment == "paused upload":  # an upstream that does not read sees no end either
        assert _until(lambda: world.metric("open_exchanges") == 0, timeout_seconds=2)
        assert world.metric("open_client_connections") == 0
    else:
        closed_at = upstream.wait_for(lambda u: u.connections[0].closed_at, timeout_seconds=5)
        assert closed_at - gone_at < 2


def _fill(sock: socket.socket) -> None:
    """Send until the other side takes no more for a while."""
    sock.settimeout(0.5)
    try:
        while True:
            sock.send(b"x" * 65536)
    except OSError:
        pass


def test_a_client_that_leaves_while_its_question_is_asked_leaves_no_request(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    world.control_plane.hold_answers.clear()
    try:
        with world.reverse() as line:
            line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
            world.control_plane.wait_for(lambda plane: plane.asked_for(ticket.proxy_credential))
        assert _until(lambda: world.metric("open_client_connections") == 0)
    finally:
        world.control_plane.hold_answers.set()

    with world.reverse() as line:
        assert line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer})).status == 200
    assert len(upstream.requests) == 1


def _until(fact: object, *, timeout_seconds: float = 5) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if fact():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def test_nothing_is_left_open_after_many_clients_left(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.default = hold()

    for _ in range(40):
        with world.reverse() as line:
            line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))

    assert _until(lambda: world.metric("open_exchanges") == 0 and world.metric("open_client_connections") == 0)
    assert _until(lambda: not upstream.open_connections())


def test_a_gate_holds_the_reply_without_ending_it(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    gate = Gate()
    upstream.default = gated(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab", gate, b"cd")

    with world.reverse() as line:
        line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        line.read_until(b"ab")
        gate.open()
        assert line.read_exactly(2) == b"cd"
