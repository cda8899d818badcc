"""A fake upstream: real TLS, programmable behaviour, and a log of every byte it ever received.

Rule: what a test says about "the upstream saw" is said of these bytes, not of a parsed view of them. Each connection
keeps its own log, from its first byte to its last, also of requests that were never finished.

    with Upstream(ca) as upstream:
        upstream.on("/v1/stream", sse([b"data: 1\\n\\n", b"data: 2\\n\\n"], gap_seconds=0.1))
        …
        assert secret in upstream.received()

It runs an event loop in a thread of its own, so that blocking test code can talk to it. A listener that must stay
silent is one of these too: `upstream.accepted` counts TCP connections, whether or not a handshake followed.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import trustme

T = TypeVar("T")

READ_BYTES = 65536
LOOPBACK_NAMES = ("localhost", "127.0.0.1")
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with a zero time-out: close() sends RST


@dataclass(slots=True)
class Connection:
    """One TCP connection, as the upstream saw it."""

    number: int
    opened_at: float
    received: bytearray = field(default_factory=bytearray)
    """Every decrypted byte."""
    closed_at: float | None = None
    """When the peer's end, or the reset, was seen (monotonic)."""
    server_name: str | None = None
    resumed: bool = False
    """Whether its TLS went on with an earlier session."""


@dataclass(slots=True)
class Request:
    """One request as it was received."""

    head: bytes
    """Raw, with the empty line."""
    connection: Connection
    raw_body: bytes = b""
    """As framed on the wire."""
    body: bytes = b""
    """Without chunk framing."""
    received_at: float = 0.0

    @property
    def method(self) -> str:
        return self.head.split(b" ", 1)[0].decode("latin-1")

    @property
    def target(self) -> str:
        return self.head.split(b" ", 2)[1].decode("latin-1")

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    @property
    def headers(self) -> list[tuple[str, str]]:
        """In order, names in lower case."""
        lines = self.head.decode("latin-1").split("\r\n")[1:-2]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name.lower()]

    def header(self, name: str, default: str = "") -> str:
        return next(iter(self.values(name)), default)


class PeerGoneError(Exception):
    """The other end closed or reset the connection."""


class Wire:
    """The upstream's end of one connection, for a behaviour to write to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection) -> None:
        self.connection = connection
        self.finished = False
        self.peer_gone = asyncio.Event()
        self._reader = reader
        self._writer = writer
        self._unread = bytearray()
        self._arrived = asyncio.Event()
        self._pump = asyncio.create_task(self._keep_reading())

    async def write(self, data: bytes) -> None:
        """Send these bytes now, in one piece. Raises `PeerGoneError`."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (ConnectionError, ssl.SSLError) as error:
            raise PeerGoneError from error

    async def close(self) -> None:
        """An orderly end: close_notify and FIN."""
        self.finished = True
        with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), 2)

    async def reset(self) -> None:
        """RST, after what was written has left."""
        self.finished = True
        await asyncio.sleep(0.05)  # lets the kernel hand over the bytes before the reset discards them
        transport = self._writer.transport
        raw_socket = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        transport.abort()

    async def until(self, end: bytes) -> bytes | None:
        """The bytes up to and including `end`; None when the peer goes away first."""
        while (at := self._unread.find(end)) < 0:
            if not await self._more():
                return None
        return self._take(at + len(end))

    async def exactly(self, count: int) -> bytes:
        """The next `count` bytes. Raises `PeerGoneError`."""
        while len(self._unread) < count:
            if not await self._more():
                raise PeerGoneError
        return self._take(count)

    async def stop(self) -> None:
        self._pump.cancel()
        await self.close()

    def _take(self, count: int) -> bytes:
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken

    async def _more(self) -> bool:
        if self.peer_gone.is_set():
            return False
        self._arrived.clear()
        await self._arrived.wait()
        return True

    async def _keep_reading(self) -> None:
        try:
            while data := await self._reader.read(READ_BYTES):
                self.connection.received += data
                self._unread += data
                self._arrived.set()
        except (ConnectionError, ssl.SSLError, TimeoutError):
            pass
        finally:
            self.connection.closed_at = time.monotonic()
            self.peer_gone.set()
            self._arrived.set()


Behaviour = Callable[[Request, Wire], Awaitable[None]]
"""What the upstream does with one request. The body has been read, unless it is registered with `before_body`."""


class Gate:
    """Holds a behaviour until the test opens it: order without sleeping."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def opened(self, timeout_seconds: float = 30) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not self._open.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.005)


class Upstream:
    """See the module."""

    def __init__(
        self,
        ca: trustme.CA | None,
        *,
        names: Sequence[str] = LOOPBACK_NAMES,
        host: str = "127.0.0.1",
        port: int = 0,
        alpn: Sequence[str] = (),
        tickets: int = 0,
    ) -> None:
        """`ca` None: plain HTTP. `tickets`: how many TLS sessions a client is given to go on with later."""
        self.accepted = 0
        self.connections: list[Connection] = []
        self.requests: list[Request] = []
        self.default: Behaviour = echo()
        self._routes: dict[str, Behaviour] = {}
        self._before_body: set[str] = set()
        self._changed = threading.Condition()
        self._context = _server_context(ca, names, alpn, tickets) if ca else None
        self._server_name: str | None = None
        if self._context:
            self._context.sni_callback = self._note_server_name
        self._listener = socket.create_server((host, port), backlog=256)
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=f"upstream-{self.port}", daemon=True)

    # --- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
        self._listener.close()

    def stop_listening(self) -> None:
        """New connections are refused from now on; open ones live on."""
        self._in_loop(self._close_listener())

    async def _close_listener(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()

    # --- what it should do --------------------------------------------------------------------------------------------

    def on(self, path: str, behaviour: Behaviour, *, before_body: bool = False) -> None:
        """Answer requests for this path so. `before_body`: as soon as the head is there."""
        self._routes[path] = behaviour
        (self._before_body.add if before_body else self._before_body.discard)(path)

    def drop_idle_connections(self) -> None:
        """Close every connection from this end, as servers do with idle ones."""

        async def drop() -> None:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._in_loop(drop())

    # --- what it saw --------------------------------------------------------------------------------------------------

    @property
    def authority(self) -> str:
        return f"localhost:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self._context else 'http'}://{self.authority}"

    def received(self) -> bytes:
        """All bytes of all connections."""
        return b"\n----\n".join(bytes(connection.received) for connection in list(self.connections))

    def heads(self) -> list[bytes]:
        return [request.head for request in list(self.requests)]

    def seen(self, path: str) -> list[Request]:
        return [request for request in list(self.requests) if request.path == path]

    def open_connections(self) -> list[Connection]:
        return [connection for connection in list(self.connections) if connection.closed_at is None]

    def wait_for(self, fact: Callable[["Upstream"], T | None], *, timeout_seconds: float = 10) -> T:
        """Wait until `fact(upstream)` is true, and give it back. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_seconds
        while not (found := fact(self)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not seen within {timeout_seconds} s; {len(self.requests)} requests were")
            with self._changed:
                self._changed.wait(0.02)
        return found

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_end([accepting, *self._tasks]))
            self._loop.close()

    def _in_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except (OSError, ValueError):
                return
            self.accepted += 1
            task = self._loop.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        reader = asyncio.StreamReader(limit=2**20)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._context)
        except (OSError, ssl.SSLError):
            return
        connection = Connection(len(self.connections), time.monotonic(), server_name=self._server_name)
        if (tls := transport.get_extra_info("ssl_object")) is not None:
            connection.resumed = tls.session_reused
        self.connections.append(connection)
        wire = Wire(reader, asyncio.StreamWriter(transport, protocol, reader, self._loop), connection)
        try:
            while not wire.finished and await self._answer_next(wire):
                pass
        except (PeerGoneError, ConnectionError, ssl.SSLError):
            pass
        finally:
            await wire.stop()

    async def _answer_next(self, wire: Wire) -> bool:
        head = await wire.until(b"\r\n\r\n")
        if head is None:
            return False
        request = Request(head, wire.connection, received_at=time.monotonic())
        early = request.path in self._before_body
        if not early:
            await read_body(request, wire)
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        await self._routes.get(request.path, self.default)(request, wire)
        if early and not wire.finished and not request.raw_body:
            await read_body(request, wire)
        return request.header("connection").lower() != "close"

    def _note_server_name(self, _: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        self._server_name = name


async def read_body(request: Request, wire: Wire) -> None:
    """Read the body that the head announces (RFC 9112 §6.3), and remember it raw and unframed."""
    if "chunked" in request.header("transfer-encoding").lower():
        while True:
            size_line = await wire.until(b"\r\n")
            if size_line is None:
                raise PeerGoneError
            size = int(size_line.split(b";")[0], 16)
            if size == 0:
                break
            chunk = await wire.exactly(size + 2)
            request.raw_body += size_line + chunk
            request.body += chunk[:-2]
        request.raw_body += size_line
        while (trailer := await wire.until(b"\r\n")) != b"\r\n":
            if trailer is None:
                raise PeerGoneError
            request.raw_body += trailer
        request.raw_body += b"\r\n"
    elif length := int(request.header("content-length", "0")):
        request.raw_body = request.body = await wire.exactly(length)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _server_context(ca: trustme.CA, names: Sequence[str], alpn: Sequence[str], tickets: int) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(*names).configure_cert(context)
    context.num_tickets = tickets
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


# --- behaviours -------------------------------------------------------------------------------------------------------


def message(
    body: bytes = b"", *, status: str = "200 OK", headers: Iterable[tuple[str, str]] = (), framed: bool = True
) -> bytes:
    """A whole reply in bytes; with `framed` it says how long its body is."""
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)]
    if framed:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(body: bytes = b"ok", *, status: str = "200 OK", headers: Iterable[tuple[str, str]] = ()) -> Behaviour:
    """One reply, whole, the connection kept."""
    whole = message(body, status=status, headers=headers)
    return sends(whole)


def sends(*pieces: bytes) -> Behaviour:
    """These bytes, one write each; the connection is kept."""

    async def behave(_: Request, wire: Wire) -> None:
        for piece in pieces:
            await wire.write(piece)

    return behave


def sends_then_closes(*pieces: bytes) -> Behaviour:
    """These bytes, then FIN."""

    async def behave(_: Request, wire: Wire) -> None:
        for piece in pieces:
            await wire.write(piece)
        await wire.close()

    return behave


def sends_then_resets(*pieces: bytes) -> Behaviour:
    """These bytes, then RST."""

    async def behave(_: Request, wire: Wire) -> None:
        for piece in pieces:
            await wire.write(piece)
        await wire.reset()

    return behave


def sse(events: Sequence[bytes], *, gap_seconds: float = 0.0, chunked: bool = True) -> Behaviour:
    """Server-sent events, each in its own write; without `chunked` the end of the connection ends them."""

    async def behave(_: Request, wire: Wire) -> None:
        framing = "Transfer-Encoding: chunked" if chunked else "Connection: close"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n"
        await wire.write(head.encode())
        for number, event in enumerate(events):
            if number:
                await asyncio.sleep(gap_seconds)
            await wire.write(chunk(event) if chunked else event)
        if chunked:
            await wire.write(b"0\r\n\r\n")
        else:
            await wire.close()

    return behave


def endless_sse(*, gap_seconds: float = 0.05) -> Behaviour:
    """A stream that ends only with its reader."""

    async def behave(_: Request, wire: Wire) -> None:
        await wire.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        number = 0
        while not wire.peer_gone.is_set():
            await wire.write(chunk(b"data: %d\n\n" % number))
            number += 1
            await asyncio.sleep(gap_seconds)

    return behave


def gated(before: bytes, gate: Gate, after: bytes) -> Behaviour:
    """The first bytes, a wait for the test, the rest."""

    async def behave(_: Request, wire: Wire) -> None:
        await wire.write(before)
        await gate.opened()
        await wire.write(after)

    return behave


def hold(*pieces: bytes) -> Behaviour:
    """These bytes, if any, and then nothing until the peer goes away."""

    async def behave(_: Request, wire: Wire) -> None:
        for piece in pieces:
            await wire.write(piece)
        await wire.peer_gone.wait()

    return behave


def echo(
    *, status: str = "200 OK", content_type: str = "text/plain", headers: Iterable[tuple[str, str]] = ()
) -> Behaviour:
    """The request itself, head and body, as the body of the reply: the worst a server can do with a key."""

    async def behave(request: Request, wire: Wire) -> None:
        body = b"" if request.method == "HEAD" else request.head + request.body
        await wire.write(message(body, status=status, headers=[("Content-Type", content_type), *headers]))

    return behave


def mirror_headers() -> Behaviour:
    """Every header of the request, as a header of the reply."""

    async def behave(request: Request, wire: Wire) -> None:
        mirrored = [(f"X-Mirror-{name}", value) for name, value in request.headers]
        await wire.write(message(b"mirrored", headers=mirrored))

    return behave
