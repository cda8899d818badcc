"""When the client hangs up, the call it paid for ends: the upstream's connection closes and nothing is kept open."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.processes import Served, Workspace, wait_for
from tests.support.raw_client import Line
from tests.support.upstream import Connection, Request, Upstream, Wire, chunk, plain
from tests.support.ways import Kind, Way, way

CLOSED_WITHIN_SECONDS = 2.0
SETTLED_WITHIN_SECONDS = 10.0
CLOSE_WAIT = "08"  # include/net/tcp_states.h
SPARE_DESCRIPTORS = 2
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

Moment = Callable[[Way, Upstream, str], Line]
"""Opens a connection, brings the exchange for this path to some point, and gives the connection back."""


async def holds(request: Request, wire: Wire) -> None:
    """Begins a stream where one is asked for, and then waits for the other end to go."""
    if request.path.startswith("/stream"):
        await wire.write(SSE_HEAD + chunk(b"data: 1\n\n"))
    await wire.peer_gone.wait()


def after_the_head(through: Way, upstream: Upstream, name: str) -> Line:
    line = through.open()
    line.send(through.head("POST", f"/hold/{name}", [("Content-Length", "1000")]))
    carrying(upstream, name)
    return line


def waiting_for_the_first_byte(through: Way, upstream: Upstream, name: str) -> Line:
    line = through.open()
    line.send(through.request("GET", f"/hold/{name}"))
    upstream.wait_for(lambda u: u.seen(f"/hold/{name}"))
    return line


def mid_stream(through: Way, upstream: Upstream, name: str) -> Line:
    line = through.open()
    line.send(through.request("GET", f"/stream/{name}"))
    line.read_until(b"data: 1")
    return line


def mid_upload(through: Way, upstream: Upstream, name: str) -> Line:
    line = through.open()
    line.send(through.head("POST", f"/hold/{name}", [("Content-Length", "1000000")]) + b"x" * 100_000)
    held = carrying(upstream, name)
    wait_for(lambda: b"x" * 1000 in held.received)
    return line


def carrying(upstream: Upstream, name: str) -> Connection:
    """The upstream's connection on which this exchange runs."""
    return upstream.wait_for(lambda u: next((c for c in u.connections if f"/{name} ".encode() in c.received), None))


MOMENTS: list[Moment] = [after_the_head, waiting_for_the_first_byte, mid_stream, mid_upload]
DROPS = [Line.close, Line.reset]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: str(moment.__name__))
@pytest.mark.parametrize("repetitions", [2, pytest.param(50, marks=pytest.mark.long)])
def test_the_upstream_is_let_go_when_the_client_is_gone(
    through: Way, upstream: Upstream, moment: Moment, repetitions: int
) -> None:
    """Provider calls ran on, and were paid for, long after their caller had left."""
    served = through.proxy.served
    upstream.on("/warm", plain())
    upstream.default = holds
    assert through.ask("GET", "/warm").status == 200
    base = served.open_descriptors()

    for number in range(repetitions):
        line = moment(through, upstream, f"n{number}")
        held = carrying(upstream, f"n{number}")
        DROPS[number % len(DROPS)](line)

        wait_until_closed(held)

    assert_settled(served, base)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Accepts connections and never says a word: a dial that does not end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize("repetitions", [2, pytest.param(50, marks=pytest.mark.long)])
def test_a_dial_is_given_up_when_the_client_is_gone(
    workspace: Workspace, silent: socket.socket, secret: str, kind: Kind, repetitions: int
) -> None:
    authority = f"localhost:{silent.getsockname()[1]}"
    workspace.credential("api", url=f"https://{authority}", secret=secret)
    through = way(workspace, authority, workspace.ticket("api"), kind)
    base = through.proxy.served.open_descriptors()

    for number in range(repetitions):
        accepted = _accepting(silent)
        line = through.open()
        line.send(through.request("GET", "/"))
        peer = wait_for(lambda: accepted)[0]  # noqa: B023 - at once
        peer.settimeout(CLOSED_WITHIN_SECONDS)
        DROPS[number % len(DROPS)](line)

        # The proxy may hear of it before it has begun with TLS.
        assert _read_to_end(peer)[:2] in (b"", b"\x16\x03"), "at most a ClientHello, and then the end"
        peer.close()

    assert_settled(through.proxy.served, base)


def wait_until_closed(held: Connection) -> None:
    wait_for(lambda: held.closed_at is not None, timeout_seconds=CLOSED_WITHIN_SECONDS)


def assert_settled(served: Served, base: int) -> None:
    wait_for(
        lambda: served.open_descriptors() <= base + SPARE_DESCRIPTORS and not served.sockets_in_state(CLOSE_WAIT),
        timeout_seconds=SETTLED_WITHIN_SECONDS,
    )


def _accepting(listener: socket.socket) -> list[socket.socket]:
    accepted: list[socket.socket] = []

    def accept() -> None:
        accepted.append(listener.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    return accepted


def _read_to_end(peer: socket.socket) -> bytes:
    received = b""
    try:
        while data := peer.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received
