"""Replies, as the upstream frames and breaks them, and as the client gets them."""

import pytest

from tests.egress_proxy.world import World, get, reverse_path
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import Response
from tests.support.upstream import (
    Behaviour,
    Gate,
    Request,
    Upstream,
    Wire,
    chunk,
    gated,
    message,
    plain,
    sends,
    sends_then_closes,
    sends_then_resets,
    sse,
)


def ask(world: World, ticket: Ticket, *, method: str = "GET", path: str = "/", swap: bool = True) -> Response:
    headers = {"Authorization": ticket.bearer} if swap else {}
    with world.reverse() as line:
        return line.ask(get(reverse_path(ticket, path), method=method, headers=headers))


# --- framing ----------------------------------------------------------------------------------------------------------


def test_a_chunked_reply_is_chunked_anew(world: World, upstream: Upstream) -> None:
    upstream.default = sends(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"5\r\nhel", b"lo\r\n3\r\n", b"abc\r\n0\r\n", b"\r\n"
    )

    response = ask(world, world.ticket(upstream.url))

    assert (response.body, response.complete) == (b"helloabc", True)


def test_a_reply_without_a_length_ends_with_a_last_chunk_and_the_connection_goes_on(
    world: World, upstream: Upstream
) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on("/close", sends_then_closes(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall ", b"of it"))

    with world.reverse() as line:
        first = line.ask(get(reverse_path(ticket, "/close"), headers={"Authorization": ticket.bearer}))
        second = line.ask(get(reverse_path(ticket, "/"), headers={"Authorization": ticket.bearer}))

    assert (first.body, first.complete, first.header("transfer-encoding")) == (b"all of it", True, "chunked")
    assert second.status == 200


@pytest.mark.parametrize(
    ("method", "reply"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 12345\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ],
)
def test_a_reply_without_a_body_ends_with_its_head(world: World, upstream: Upstream, method: str, reply: bytes) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on("/bare", sends(reply))

    with world.reverse() as line:
        first = line.ask(
            get(reverse_path(ticket, "/bare"), method=method, headers={"Authorization": ticket.bearer}),
            timeout_seconds=2,
        )
        second = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}), timeout_seconds=2)

    assert (first.body, second.status) == (b"", 200)
    assert first.header("content-length") == ("12345" if b"12345" in reply else "0" if b": 0" in reply else "")
    assert len(upstream.connections) == 1


def test_interim_replies_come_before_the_final_one(world: World, upstream: Upstream) -> None:
    upstream.default = sends(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n", message(b"done")
    )

    response = ask(world, world.ticket(upstream.url))

    assert (response.interim, response.status, response.body) == ((103, 103), 200, b"done")


def test_fields_keep_their_number_order_and_values(world: World, upstream: Upstream) -> None:
    fields = [
        ("Set-Cookie", "a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT"),
        ("Set-Cookie", "b=2"),
        ("WWW-Authenticate", "Basic realm=x"),
        ("set-cookie", "c=3"),
        ("WWW-Authenticate", "Bearer"),
    ]
    upstream.default = plain(b"x", headers=fields)

    response = ask(world, world.ticket(upstream.url))

    assert response.headers == (*((name.lower(), value) for name, value in fields), ("content-length", "1"))


def test_our_own_fields_and_hop_by_hop_fields_of_an_upstream_are_dropped(world: World, upstream: Upstream) -> None:
    fields = [
        ("Coatcheck-Refusal", "forbidden"),
        ("coatcheck-request-id", "x"),
        ("Connection", "keep-alive, X-Hop"),
        ("X-Hop", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Authenticate", "Basic"),
        ("X-Kept", "1"),
    ]
    upstream.default = plain(b"x", headers=fields)

    response = ask(world, world.ticket(upstream.url))

    assert response.headers == (("x-kept", "1"), ("content-length", "1"))


def test_trailers_are_dropped(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.default = sends(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n2\r\nok\r\n0\r\nX-T: "
        + ticket.secret.encode()
        + b"\r\n\r\n"
    )

    response = ask(world, ticket)

    assert (response.body, response.complete, response.trailers) == (b"ok", True, ())
    assert response.values("trailer") == []


# --- replies that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 40,
    ],
    ids=["unasked 101", "two lengths", "both framings", "gzip coding", "folded", "h2", "ssh", "huge", "bare LF", "1xx"],
)
def test_a_reply_with_any_doubt_about_it_is_a_502_of_ours(world: World, upstream: Upstream, reply: bytes) -> None:
    upstream.default = sends_then_closes(reply)

    response = ask(world, world.ticket(upstream.url))

    assert (response.status, response.refusal) == (502, "upstream_protocol_error")
    assert response.header("x-should-retry") == "false"


@pytest.mark.guards("egress_proxy/exchange.py", "self._reply, self._is_opaque = None, False", "pass")
@pytest.mark.parametrize(
    "body",
    [
        b"2;ext=1\r\nok\r\n0\r\n\r\n",
        b"0x2\r\nok\r\n0\r\n\r\n",
        b"+2\r\nok\r\n0\r\n\r\n",
        b"2\nok\r\n0\r\n\r\n",
        b"2\r\nokX\r\n0\r\n\r\n",
        b"2 \r\nok\r\n0\r\n\r\n",
        b"FFFFFFFFFFFFFFFFF\r\n",
        b"\r\nok",
    ],
)
def test_a_chunked_reply_with_any_doubt_is_a_502_of_ours_and_its_connection_is_closed(
    world: World, upstream: Upstream, body: bytes
) -> None:
    """Nothing of it has gone to the client yet, so the client is told, and does not just find a closed connection."""
    upstream.default = sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)

    response = ask(world, world.ticket(upstream.url))

    assert (response.status, response.refusal) == (502, "upstream_protocol_error")
    upstream.wait_for(lambda u: u.connections[-1].closed_at is not None)


def test_a_doubt_that_comes_later_breaks_the_reply_off(world: World, upstream: Upstream) -> None:
    gate = Gate()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"
    upstream.default = gated(head, gate, b"2;ext=1\r\nok\r\n0\r\n\r\n")
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        line.read_until(b"ok\r\n")
        gate.open()
        rest = line.read_to_end()

    assert rest == b""


@pytest.mark.guards("egress_proxy/exchange.py", "and head.is_coded", "and False")
@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "x-own"])
def test_a_coded_reply_to_a_swapped_request_is_blocked(world: World, upstream: Upstream, coding: str) -> None:
    upstream.default = plain(b"\x1f\x8b-not-looked-at", headers=[("Content-Encoding", coding)])

    response = ask(world, world.ticket(upstream.url))

    assert upstream.requests[0].values("accept-encoding") == ["identity"]
    assert (response.status, response.refusal) == (502, "response_leak_blocked")
    assert b"not-looked-at" not in response.body


def test_a_coded_reply_to_a_bare_request_passes(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"\x1f\x8b-data", headers=[("Content-Encoding", "gzip")])

    response = ask(world, world.ticket(upstream.url), swap=False)

    assert (response.status, response.body) == (200, b"\x1f\x8b-data")


# --- replies that break off -------------------------------------------------------------------------------------------


def tls_cut(*pieces: bytes) -> Behaviour:
    """FIN without close_notify: what a cut in the middle of the path looks like."""

    async def behave(_: Request, wire: Wire) -> None:
        for piece in pieces:
            await wire.write(piece)
        transport = wire._writer.transport
        raw = transport.get_extra_info("socket")
        wire.finished = True
        import socket  # the upstream's own loop

        socket.socket(fileno=raw.dup().detach()).shutdown(socket.SHUT_WR) if hasattr(raw, "dup") else raw.shutdown(1)
        await wire.peer_gone.wait()

    return behave


@pytest.mark.parametrize("way", [sends_then_closes, sends_then_resets, tls_cut], ids=["FIN", "RST", "no close_notify"])
@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 400,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n9\r\nhal",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"7\r\ndata: x\r\n0\r\n",
    ],
    ids=["length", "chunked", "in a chunk", "before the end"],
)
def test_a_reply_that_breaks_off_never_ends_cleanly(
    world: World, upstream: Upstream, begun: bytes, way: object
) -> None:
    upstream.default = way(begun)  # type: ignore[operator]

    response = ask(world, world.ticket(upstream.url))

    assert response.status == 200
    assert not response.complete


@pytest.mark.guards("egress_proxy/exchange.py", "Framing.UNTIL_CLOSE and cleanly:", "Framing.UNTIL_CLOSE:")
def test_a_reply_without_a_length_that_ends_without_close_notify_is_not_complete(
    world: World, upstream: Upstream
) -> None:
    upstream.default = tls_cut(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhalf of")

    response = ask(world, world.ticket(upstream.url))

    assert response.status == 200
    assert not response.complete


def test_a_cut_reply_in_a_tunnel_has_no_close_notify_either(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.default = sends_then_resets(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert not response.complete


@pytest.mark.parametrize("way", [sends_then_closes, sends_then_resets], ids=["FIN", "RST"])
def test_an_upstream_that_hangs_up_without_a_reply_is_a_502_of_ours(
    world: World, upstream: Upstream, way: object
) -> None:
    upstream.default = way()  # type: ignore[operator]

    response = ask(world, world.ticket(upstream.url), method="POST")

    assert (response.status, response.refusal) == (502, "upstream_protocol_error")
    assert response.header("x-should-retry") == "false"
    assert len(upstream.requests) == 1


# --- scrubbing a stream -----------------------------------------------------------------------------------------------


@pytest.mark.guards("egress_proxy/exchange.py", "body = self._scrubber.feed(body)\n", "pass\n")
@pytest.mark.parametrize("chunked", [True, False])
def test_a_secret_cut_over_pieces_of_a_stream_is_overwritten(world: World, upstream: Upstream, chunked: bool) -> None:
    ticket = world.ticket(upstream.url)
    secret = ticket.secret.encode()
    pieces = [b"data: " + secret[:5], secret[5:20], secret[20:-1], secret[-1:] + b"\n\n", b"data: end\n\n"]
    upstream.default = sse(pieces, gap_seconds=0.02, chunked=chunked)

    response = ask(world, ticket)

    # Five characters had passed before it could be told that they begin a secret; they are of no use to a guesser.
    assert response.body == b"data: " + secret[:5] + b"*" * (len(secret) - 5) + b"\n\ndata: end\n\n"
    assert response.complete


def test_a_secret_in_a_reply_with_a_length_keeps_the_length(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.default = plain(b"key=" + ticket.secret.encode() + b"&")

    response = ask(world, ticket)

    assert response.body == b"key=" + b"*" * len(ticket.secret) + b"&"
    assert response.complete


def test_the_beginning_of_a_secret_at_the_very_end_is_delivered(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    start = ticket.secret.encode()[:9]
    for reply in (
        message(b"tail " + start),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"tail " + start) + b"0\r\n\r\n",
    ):
        upstream.default = sends(reply)

        assert ask(world, ticket).body == b"tail " + start


# --- the connection to the upstream -----------------------------------------------------------------------------------


def test_an_upstream_connection_is_used_again(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url)

    for _ in range(5):
        assert ask(world, ticket).status == 200

    assert len(upstream.connections) == 1


@pytest.mark.parametrize(
    "reply",
    [message(b"a") + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison", message(b"a") + b"\r\n"],
    ids=["a second reply", "an empty line"],
)
@pytest.mark.guards("egress_proxy/exchange.py", "if data and self._upstream is not None:", "if False:")
def test_bytes_after_a_reply_close_the_connection(world: World, upstream: Upstream, reply: bytes) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on("/first", sends(reply))

    first = ask(world, ticket, path="/first")
    second = ask(world, ticket)

    assert (first.body, second.status) == (b"a", 200)
    assert b"poison" not in second.body
    assert len(upstream.connections) == 2


@pytest.mark.guards("egress_proxy/upstream.py", "self.close()  # bytes that nobody asked for", "pass")
def test_bytes_that_come_while_idle_close_the_connection(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    async def talkative(_: Request, wire: Wire) -> None:
        import asyncio

        await wire.write(message(b"a"))
        await asyncio.sleep(0.1)
        await wire.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")

    upstream.on("/first", talkative)

    first = ask(world, ticket, path="/first")
    upstream.wait_for(lambda u: u.connections[0].closed_at is not None)
    second = ask(world, ticket)

    assert (first.body, second.status) == (b"a", 200)
    assert len(upstream.connections) == 2


def test_a_get_on_a_connection_that_had_died_is_sent_again(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    died: list[int] = []

    async def dies_once(_: Request, wire: Wire) -> None:
        if wire.connection.number == 0 and len(upstream.requests) > 1:
            died.append(1)
            await wire.reset()
            return
        await wire.write(message(b"fine"))

    upstream.default = dies_once

    assert [ask(world, ticket).body for _ in range(2)] == [b"fine", b"fine"]
    assert died == [1]


@pytest.mark.guards(
    "egress_proxy/exchange.py",
    "return is_stale and head.method in _REPEATABLE",
    "return is_stale or head.method in _REPEATABLE",
)
def test_a_post_on_a_connection_that_dies_is_never_sent_again(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    async def dies_later(request: Request, wire: Wire) -> None:
        if request.method == "POST":
            await wire.reset()
            return
        await wire.write(message(b"fine"))

    upstream.default = dies_later

    assert ask(world, ticket).body == b"fine"
    response = ask(world, ticket, method="POST")

    assert (response.status, response.refusal) == (502, "upstream_protocol_error")
    assert [request.method for request in upstream.requests] == ["GET", "POST"]


def test_a_connection_that_the_upstream_closed_while_idle_is_not_used(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    ask(world, ticket, method="POST")
    upstream.drop_idle_connections()
    upstream.wait_for(lambda u: not u.open_connections())
    response = ask(world, ticket, method="POST")

    assert response.status == 200
    assert len(upstream.requests) == 2


def test_a_reply_head_that_comes_again_is_passed_on_alike(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    request = get(reverse_path(ticket), headers={"Authorization": ticket.bearer})
    upstream.default = sends(b"HTTP/1.1 200 OK\r\nX-A: 1\r\nAlt-Svc: h3\r\nContent-Length: 2\r\n\r\nok")

    with world.reverse() as line:
        replies = [line.ask(request) for _ in range(3)]
        upstream.default = sends(b"HTTP/1.1 404 No\r\nX-A: 2\r\nContent-Length: 3\r\n\r\nnot")
        other = line.ask(request)

    assert {(reply.status, reply.header("x-a"), reply.header("alt-svc"), reply.body) for reply in replies} == {
        (200, "1", "", b"ok")
    }
    assert (other.status, other.header("x-a"), other.body) == (404, "2", b"not")


@pytest.mark.guards("egress_proxy/exchange.py", "if rendered == unscrubbed and not", "if not")
def test_a_reply_head_with_the_secret_is_scrubbed_every_time(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    request = get(reverse_path(ticket), headers={"Authorization": ticket.bearer})
    upstream.default = sends(b"HTTP/1.1 200 OK\r\nX-A: %b\r\nContent-Length: 2\r\n\r\nok" % ticket.secret.encode())

    with world.reverse() as line:
        for _ in range(3):
            line.ask(request)

    assert ticket.secret.encode() not in line.received
    blocked = ("leak_blocked", ticket.caller.tenant)
    world.control_plane.wait_for(lambda plane: [(e.action, e.tenant) for e in plane.audited].count(blocked) == 3)


# --- where things are -------------------------------------------------------------------------------------------------


def test_in_reverse_mode_a_location_of_the_same_origin_is_one_that_the_client_can_follow(
    world: World, upstream: Upstream
) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on("/old", sends(message(status="302 Found", headers=[("Location", f"{upstream.url}/new?a=b")])))
    upstream.on("/new", plain(b"here"))

    with world.reverse() as line:
        moved = line.ask(get(reverse_path(ticket, "/old"), headers={"Authorization": ticket.bearer}))
        followed = line.ask(get(str(moved.header("location")), headers={"Authorization": ticket.bearer}))

    assert moved.header("location") == reverse_path(ticket, "/new?a=b")
    assert (followed.status, followed.body) == (200, b"here")


def test_in_forward_mode_a_location_is_passed_on_as_it_is(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.default = sends(message(status="302 Found", headers=[("Location", f"{upstream.url}/new")]))

    with world.tunnel(ticket, upstream.authority) as line:
        moved = line.ask(get("/old", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert moved.header("location") == f"{upstream.url}/new"
