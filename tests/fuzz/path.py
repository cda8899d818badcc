"""The proxy's path in memory: its own client connection, exchange and upstream connection, between two made-up sockets.

Nothing of the path is replaced but the sockets, the control plane's answers (a view of dictionaries) and the dialling:
what a stream is cut into, what is pooled, and what leaves on either side are the proxy's own doing.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from control_plane.contract.destination import AllowRule, Endpoint
from control_plane.contract.wire import Ask
from egress_proxy.audit import AuditSpool
from egress_proxy.ca import LeafContexts
from egress_proxy.client import ClientConnection
from egress_proxy.config import AuditMode
from egress_proxy.core.decision import Mode
from egress_proxy.core.quota import Quotas
from egress_proxy.core.view import AskQuota
from egress_proxy.leaks import LeakWatch
from egress_proxy.load import Loads
from egress_proxy.metrics import Counters
from egress_proxy.outlet import Turn
from egress_proxy.preamble import preamble
from egress_proxy.services import Services
from egress_proxy.upstream import Lane, UpstreamConnection
from tests.egress_proxy.core.world import ALICE, NOW, World

HOST = "api.test"
ROUTE = "api"
SECRET = "sk-real-" + "9f1c2b7e5a" * 3


class Socket(asyncio.Transport):
    """A transport that keeps what is written to it, and how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_ended = False
        """Cleanly: the other side reads an end."""
        self.is_aborted = False

    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        if not self.is_closing():
            self.written += data

    def write_eof(self) -> None:
        self.is_ended = True

    def close(self) -> None:
        self.is_ended = True

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_ended or self.is_aborted

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@dataclass(slots=True)
class Dialled:
    """One connection of ours to an upstream."""

    connection: UpstreamConnection
    socket: Socket
    read: int = 0
    """How much of what was written to it the upstream has taken."""


class Dialling:
    """A pool that dials in memory. What may be used again is the connection's to say, as in `upstream.Upstreams`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turn: Turn) -> None:
        self._loop = loop
        self._turn = turn
        self.dialled: list[Dialled] = []
        self.idle: list[UpstreamConnection] = []

    def lane(self, tenant: str, endpoint: Endpoint, ca_pem: str | None) -> Lane:
        return Lane(tenant, endpoint, ca_pem)

    def take(self, lane: Lane, *, allow_private: bool) -> UpstreamConnection | None:
        while self.idle:
            connection = self.idle.pop()
            if connection.is_reusable:
                connection.requests += 1
                return connection
        connection = UpstreamConnection(
            loop=self._loop, turn=self._turn, lane=lane, address="192.0.2.1", on_closed=self._forget
        )
        socket = Socket()
        connection.connection_made(socket)
        connection.requests = 1
        self.dialled.append(Dialled(connection, socket))
        return connection

    async def connect(self, lane: Lane, *, allow_private: bool, unopened: bool = False) -> UpstreamConnection:
        connection = self.take(lane, allow_private=allow_private)
        assert connection is not None
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        connection.reader = None
        if connection.is_reusable:
            self.idle.append(connection)
        else:
            connection.close()

    def _forget(self, connection: UpstreamConnection) -> None:
        if connection in self.idle:
            self.idle.remove(connection)


@dataclass
class Path:
    """One client connection and what it led to. `reply` is how the upstream answers each request."""

    mode: Mode = Mode.REVERSE
    reply: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    reply_cuts: Sequence[int] = ()
    reply_ends: bool = False
    """Whether the upstream hangs up behind a reply."""
    client_socket: Socket = field(default_factory=Socket)

    def __post_init__(self) -> None:
        self._loop = loop = _loop()
        turn = Turn(loop)
        self.world = World()
        credential = self.world.proxy_credential(ALICE)
        self.placeholder = self.world.credential(ALICE, f"https://{HOST}", name=ROUTE, secret=SECRET, prefix="sk-real-")
        if self.mode is Mode.FORWARD:
            self.world.allow(ALICE, AllowRule(HOST))
        self.pool = Dialling(loop, turn)
        self.services = _services(loop, turn, self.world, self.pool)
        self.client = ClientConnection(self.services, self.mode)
        self.client.connection_made(self.client_socket)
        self.client.data_received(preamble(credential.text))
        self._answered = 0

    # --- what tests do ---

    def send(self, stream: bytes, cuts: Iterable[int] = ()) -> None:
        """The client's bytes, in pieces, until the proxy reads no more; the upstream answers as soon as it may."""
        for piece in cut(stream, cuts):
            if self.client_socket.is_closing():
                return
            self.client.data_received(piece)
            self._go_on()

    @property
    def sent_upstream(self) -> list[bytes]:
        """What left, for each connection in the order of dialling."""
        return [bytes(dialled.socket.written) for dialled in self.pool.dialled]

    @property
    def requests(self) -> int:
        """How many were begun on an upstream connection."""
        counters = self.services.counters
        return counters.swaps + counters.forwards

    @property
    def replied(self) -> bytes:
        """What the client got."""
        return bytes(self.client_socket.written)

    # --- the upstream ---

    def _go_on(self) -> None:
        """Run what is due, and answer each request once all of it is there."""
        for _ in range(200):
            _run_what_is_due(self._loop)
            exchange = self.client.exchange
            if exchange is None or exchange.wants_body or exchange.status is not None:
                return
            dialled = next((each for each in self.pool.dialled if each.connection.reader is exchange), None)
            if dialled is None or len(dialled.socket.written) == dialled.read:
                return
            dialled.read = len(dialled.socket.written)
            self._answer(dialled)
        raise AssertionError("the exchange does not come to an end")

    def _answer(self, dialled: Dialled) -> None:
        connection, socket = dialled.connection, dialled.socket
        self._answered += 1
        for piece in cut(self.reply, self.reply_cuts):
            if socket.is_closing():
                return
            connection.data_received(piece)
            _run_what_is_due(self._loop)
        if self.reply_ends and not socket.is_closing():
            connection.eof_received()
            _run_what_is_due(self._loop)

    @property
    def answered(self) -> int:
        return self._answered

    def close(self) -> None:
        """Let go of what is pending, so that nothing of one path reaches the next."""
        self.client.connection_lost(None)
        _run_what_is_due(self._loop)


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """`data` in pieces. A place beyond its end is counted around it."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[one:other] for one, other in pairwise(edges)]


_LOOPS: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """One for all paths: making one costs more than a request."""
    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0]


def _run_what_is_due(loop: asyncio.AbstractEventLoop) -> None:
    for _ in range(2):
        loop.call_soon(loop.stop)
        loop.run_forever()


def _services(loop: asyncio.AbstractEventLoop, turn: Turn, world: World, pool: Dialling) -> Services:
    async def ask(question: Ask | AskQuota) -> None:
        raise AssertionError(f"all is known, yet it asks: {type(question).__name__}")

    async def deliver(_pieces: Sequence[bytes], _dropped: int) -> None: ...

    return Services(
        loop=loop,
        turn=turn,
        view=world,
        ask=ask,
        upstreams=pool,
        audit=AuditSpool(deliver, capacity=1000, mode=AuditMode.BEST_EFFORT),
        leaf_contexts=cast("LeafContexts", _NoCertificates()),
        counters=Counters(),
        clock=_at(NOW),
        proxy_id="proxy",
        quotas=Quotas(),
        leaks=LeakWatch(suspend=lambda _placeholder, _seconds: None),
        loads=Loads(requests_per_tenant=1000, connections_per_tenant=1000),
        client_limit=1000,
    )


def _at(now: float) -> Callable[[], float]:
    return lambda: now


class _NoCertificates:
    """A tunnel is answered, and nothing gets through TLS in it."""

    def cached(self, _host: str) -> ssl.SSLContext:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
