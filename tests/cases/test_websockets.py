"""WebSocket through the swap: the handshake carries the key, frames are opaque, and nobody switches unasked."""

import base64
import os
import secrets
import threading

import pytest

from tests.support.processes import Deployment, Workspace
from tests.support.raw_client import Line
from tests.support.upstream import Upstream, plain, sends
from tests.support.ways import Kind, Way, way
from tests.support.websocket import FIRST_FRAME, echoing

PING = b"\x89\x02hi"
CLOSE = b"\x88\x02\x03\xe8"
PIECE = 65_536
MEBIBYTE = 1024 * 1024


@pytest.fixture
def socket_way(workspace: Workspace, upstream: Upstream, secret: str, kind: Kind) -> Way:
    """Of a credential whose destination allows WebSockets."""
    workspace.credential("api", url=upstream.url, secret=secret, destination={"websocket": True})
    return way(workspace, upstream, workspace.ticket("api"), kind)


def handshake(through: Way) -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    asked = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")]
    return through.head("GET", "/socket", [*asked, ("Sec-WebSocket-Key", key)])


def opened(through: Way, line: Line) -> None:
    line.send(handshake(through))
    assert line.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")


def there_and_back(line: Line, sent: bytes) -> bytes:
    """In pieces: one TLS connection is not for two threads at once."""
    back = b""
    for begin in range(0, len(sent), PIECE):
        line.send(sent[begin : begin + PIECE])
        back += line.read_exactly(len(sent[begin : begin + PIECE]))
    return back


def test_a_frame_glued_to_the_101_and_a_mebibyte_each_way_arrive(
    socket_way: Way, upstream: Upstream, secret: str
) -> None:
    """The 101 was taken for an ordinary interim reply, and what came after it was lost."""
    upstream.on("/socket", echoing())
    sent = secrets.token_bytes(MEBIBYTE)

    with socket_way.open() as line:
        opened(socket_way, line)
        first = line.read_exactly(len(FIRST_FRAME))
        line.send(PING)
        ping = line.read_exactly(len(PING))
        back = there_and_back(line, sent)
        line.send(CLOSE)
        close = line.read_exactly(len(CLOSE))

    [seen] = upstream.seen("/socket")
    assert (first, ping, close) == (FIRST_FRAME, PING, CLOSE)
    assert back == sent
    assert seen.values("authorization") == [f"Bearer {secret}"]


@pytest.mark.parametrize("status", ["200 OK", "403 Forbidden", "426 Upgrade Required"])
def test_a_handshake_that_the_upstream_declines_passes_as_any_reply(
    socket_way: Way, upstream: Upstream, status: str
) -> None:
    upstream.on("/socket", plain(b"no sockets here", status=status))
    upstream.on("/next", plain(b"next"))

    with socket_way.open() as line:
        response = line.ask(handshake(socket_way))
        following = line.ask(socket_way.request("GET", "/next"))

    assert (response.status, response.body) == (int(status[:3]), b"no sockets here")
    assert following.body == b"next"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_101_that_nobody_asked_for_is_a_502(through: Way, upstream: Upstream, method: str) -> None:
    upstream.on(
        "/plain",
        sends(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n" + FIRST_FRAME),
    )

    response = through.ask(method, "/plain", body=b"{}" if method == "POST" else b"")

    assert (response.status, response.refusal) == (502, "upstream_protocol_error")
    assert FIRST_FRAME not in response.body


def test_a_placeholder_in_a_frame_is_text_and_never_becomes_the_key(
    socket_way: Way, upstream: Upstream, secret: str
) -> None:
    upstream.on("/socket", echoing(b""))
    frame = b"\x81\x7e\x00\x7e" + socket_way.ticket.placeholder.encode()

    with socket_way.open() as line:
        opened(socket_way, line)
        line.send(frame)
        back = line.read_exactly(len(frame))

    assert back == frame
    after = bytes(upstream.connections[-1].received).partition(b"\r\n\r\n")[2]
    assert after == frame
    assert secret.encode() not in after


def test_a_socket_that_says_nothing_for_long_is_not_cut(deployment: Deployment, workspace: Workspace) -> None:
    """Every limit but that of silence (a quarter of an hour) is far exceeded here."""
    proxy = deployment.start_proxy(
        HEADER_TIMEOUT_SECONDS="0.4", IDLE_TIMEOUT_SECONDS="0.4", UPSTREAM_IDLE_SECONDS="0.4"
    )
    try:
        with Upstream(deployment.upstream_ca) as upstream:
            upstream.on("/socket", echoing())
            workspace.credential("api", url=upstream.url, secret="sk-" + "w" * 40, destination={"websocket": True})
            through = Way(
                Kind.REVERSE, workspace.ticket("api"), upstream.authority, "api", proxy, deployment.client_context()
            )
            with through.open() as line:
                opened(through, line)
                line.read_exactly(len(FIRST_FRAME))
                threading.Event().wait(2.5)
                line.send(PING)
                back = line.read_exactly(len(PING))
    finally:
        deployment.proxies.remove(proxy)
        proxy.served.stop()

    assert back == PING
