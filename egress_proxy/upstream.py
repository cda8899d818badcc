"""Connections to upstreams: dialled to a checked address, verified, pooled, and handed to one exchange at a time.

Rules: the pool's key holds the tenant, the CAs and the checked address, so that neither a connection nor a TLS session
is shared across tenants or outlives what was judged; a connection
that is paused, has unread bytes, or got bytes nobody asked for is closed, never pooled; the certificate is verified
against the canonical host, always.
"""

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, cast
from weakref import WeakValueDictionary

from control_plane.contract.destination import Endpoint
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from egress_proxy.addresses import AddressBook, OwnListeners, check_addresses, judge
from egress_proxy.core.decision import Forward
from egress_proxy.metrics import Counters
from egress_proxy.outlet import Outlet, Turn
from egress_proxy.tls import Lower, TlsLayer

STAGGER_SECONDS: Final = 0.25
"""How long one address may take before the next is tried beside it (RFC 8305 §5)."""
WRITE_HIGH_WATER_BYTES: Final = 262_144
LINGER_SECONDS: Final = 2.0
"""How long the last bytes of a tunnel may take to arrive."""
MAX_OWN_CAS: Final = 256
SESSION_SECONDS: Final = 3600.0
"""How long a TLS session is gone on with before another is taken. CPython 3.11 loses some kilobytes whenever it hands
one out (`SSLObject.session` makes a copy and forgets it), so that one for each connection would fill the memory."""
MAX_SESSIONS: Final = 4096


_LaneKey = tuple[str, Endpoint, str | None]
_Session = tuple[ssl.SSLContext, ssl.SSLSession]
"""With the context that it belongs to."""


class Lane:
    """One tenant's way to one endpoint under one set of CAs: idle connections by checked address, and the TLS session
    to go on with. Never another tenant's."""

    __slots__ = ("__weakref__", "ca_pem", "endpoint", "idle", "session", "tenant")

    def __init__(self, tenant: str, endpoint: Endpoint, ca_pem: str | None = None) -> None:
        self.tenant = tenant
        self.endpoint = endpoint
        self.ca_pem = ca_pem
        """What alone is trusted there; None: what the proxy trusts."""
        self.idle: dict[str, list[UpstreamConnection]] = {}
        self.session: _Session | None = None


class Reader(Protocol):
    """Who gets what an upstream sends: the exchange that has the connection now."""

    def upstream_data(self, data: bytes) -> None: ...
    def upstream_ended(self, *, cleanly: bool) -> None:
        """The upstream sends no more. Not cleanly: reset, or TLS without close_notify."""

    def upstream_pause_writing(self) -> None: ...
    def upstream_resume_writing(self) -> None: ...


def upstream_tls_context(ca_files: tuple[Path, ...]) -> ssl.SSLContext:
    """Verifies against the system's roots and these, TLS ≥ 1.2, HTTP/1.1 only."""
    context = ssl.create_default_context()
    for file in ca_files:
        context.load_verify_locations(cafile=file)
    return _tls_context(context)


def _tls_context(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


class UpstreamConnection(asyncio.Protocol):
    """One connection. `reader` is the exchange that has it; None while it is idle, and then any byte closes it."""

    __slots__ = (
        "_closed",
        "_established",
        "_is_paused",
        "_is_write_paused",
        "_loop",
        "_lower",
        "_on_closed",
        "_outlet",
        "_tls",
        "_turn",
        "address",
        "idle_since",
        "lane",
        "reader",
        "requests",
        "tls_context",
        "write",
    )

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        turn: Turn,
        lane: Lane,
        address: str,
        on_closed: Callable[["UpstreamConnection"], None],
    ) -> None:
        self._loop = loop
        self._turn = turn
        self._on_closed = on_closed
        self._outlet: Outlet | None = None
        self._tls: TlsLayer | None = None
        self._lower: Lower | None = None
        self._established: asyncio.Future[None] | None = None
        self._closed = False
        self._is_paused = False
        self._is_write_paused = False
        self.lane = lane
        self.address = address
        """The one that was judged and dialled."""
        self.reader: Reader | None = None
        self.write: Callable[[bytes], object] = _to_nobody
        """Toward the upstream: what is below, without a call between, until the connection is closed."""
        self.tls_context: ssl.SSLContext | None = None
        """By what its peer was verified; None where there is no TLS."""
        self.requests = 0
        self.idle_since = 0.0

    @property
    def is_reusable(self) -> bool:
        """Not when it is paused: a slow client's upstream may still be when the reply ends, and would hang the next."""
        if self._closed or self._is_paused or self._is_write_paused:
            return False
        return self._tls is None or not self._tls.has_unread

    def suits(self, forward: Forward) -> bool:
        """Whether it was dialled for this: same tenant and endpoint, and an address that may be private if it is."""
        lane = self.lane
        is_its_lane = (lane.tenant, lane.endpoint) == (forward.caller.tenant, forward.endpoint)
        is_its_lane = is_its_lane and lane.ca_pem == forward.handling.ca_pem
        return is_its_lane and (forward.allow_private or judge(self.address))

    @property
    def session(self) -> _Session | None:
        """The TLS session, for a next connection on the same lane to go on with (RFC 8446 §2.2)."""
        session = self._tls.session if self._tls is not None else None
        return (self._tls.context, session) if self._tls is not None and session is not None else None

    def _session_of(self, context: ssl.SSLContext) -> ssl.SSLSession | None:
        known = self.lane.session
        return known[1] if known is not None and known[0] is context else None

    @property
    def was_used(self) -> bool:
        """Whether it carried a request before this one: then it may have been closed at the other end just now."""
        return self.requests > 1

    # --- what the exchange does with it ---

    def pause_reading(self) -> None:
        if not self._is_paused and not self._closed and self._lower is not None:
            self._is_paused = True
            self._lower.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused and not self._closed and self._lower is not None:
            self._is_paused = False
            self._lower.resume_reading()

    def close(self) -> None:
        """At once: nothing more is wanted from it, and nothing that was not yet written is worth sending."""
        self._is_closed()
        self.reader = None
        if self._outlet is not None:
            self._outlet.abort()

    def end(self) -> None:
        """Nothing more is wanted from it, but what was written still arrives, within `LINGER_SECONDS`. What it sends
        until then is dropped: a socket that is closed with unread bytes is a reset to the other end."""
        outlet, lower = self._outlet, self._lower
        if self._closed or outlet is None or lower is None:
            self.close()
            return
        self.resume_reading()
        self._is_closed()
        tls, self.reader, self._tls = self._tls, None, None
        lower.write_eof()
        if tls is not None:
            tls.release()
        self._loop.call_later(LINGER_SECONDS, outlet.abort)

    # --- dialling ---

    async def secure(self, context: ssl.SSLContext, host: str) -> None:
        """TLS, verified for the host. Raises `ssl.SSLError` or `ConnectionError`."""
        if self._closed or self._outlet is None:
            raise ConnectionResetError("the upstream spoke, or hung up, before TLS")
        self.tls_context = context
        self._established = self._loop.create_future()
        self._tls = TlsLayer(
            loop=self._loop,
            lower=self._outlet,
            context=context,
            server_hostname=host,
            session=self._session_of(context),
            on_established=self._secured,
            on_data=self._decrypted,
            on_end=self._ended,
            on_failure=self._failed,
        )
        self._lower = self._tls
        self.write = self._tls.write
        self._tls.start()
        await self._established

    def _secured(self) -> None:
        if self._established is not None and not self._established.done():
            self._established.set_result(None)

    # --- what the transport calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop has classes of its own
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._outlet = self._lower = outlet = Outlet(transport, self._turn)
        self.write = outlet.write

    def data_received(self, data: bytes) -> None:
        if self._tls is not None:
            self._tls.feed(data)
        elif self.reader is not None:
            self.reader.upstream_data(data)
        else:
            self._unasked()

    def eof_received(self) -> bool:
        if self._closed:
            return False
        if self._tls is not None:
            self._tls.feed_eof()
        else:
            self._ended(True)
        return False  # the transport closes itself: a half-open upstream is of no use

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail_establishing(exc or ConnectionResetError("the upstream closed the connection"))
        reader, self.reader = self.reader, None
        self._is_closed()
        self._on_closed(self)
        if reader is not None:
            reader.upstream_ended(cleanly=False)
        if self._tls is not None:
            self._tls.release()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        if self.reader is not None:
            self.reader.upstream_pause_writing()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if self.reader is not None:
            self.reader.upstream_resume_writing()

    # --- one way for plain and TLS ---

    def _decrypted(self, data: bytes) -> None:
        if self.reader is not None:
            self.reader.upstream_data(data)
        else:
            self._unasked()

    def _unasked(self) -> None:
        if not self._closed:
            self.close()  # bytes that nobody asked for

    def _is_closed(self) -> None:
        self._closed = True
        self.write = _to_nobody

    def _ended(self, cleanly: bool) -> None:
        self._fail_establishing(ConnectionResetError("the upstream closed the connection"))
        reader, self.reader = self.reader, None
        self._is_closed()
        if reader is not None:
            reader.upstream_ended(cleanly=cleanly)
        if self._outlet is not None:
            self._outlet.abort()

    def _failed(self, error: ssl.SSLError) -> None:
        if self._outlet is not None:
            self._outlet.flush()  # the alert
        self._fail_establishing(error)
        self._ended(False)

    def _fail_establishing(self, error: Exception) -> None:
        if self._established is not None and not self._established.done():
            self._established.set_exception(error)


def _to_nobody(_data: bytes) -> None:
    pass


class Upstreams:
    """Gives each exchange a connection: an idle one at once, or a new one after a while."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        turn: Turn,
        book: AddressBook,
        own: OwnListeners,
        context: ssl.SSLContext,
        connect_timeout_seconds: float,
        idle_seconds: float,
        per_key: int,
        counters: Counters,
    ) -> None:
        self._loop = loop
        self._turn = turn
        self._book = book
        self._own = own
        self._context = context
        self._connect_timeout_seconds = connect_timeout_seconds
        self._idle_seconds = idle_seconds
        self._per_key = per_key
        self._counters = counters
        self._lanes: WeakValueDictionary[tuple[str, Endpoint, str | None], Lane] = WeakValueDictionary()
        self._all: set[UpstreamConnection] = set()
        self._own_cas: OrderedDict[str, ssl.SSLContext] = OrderedDict()
        self._sessions: OrderedDict[_LaneKey, tuple[float, _Session | None]] = OrderedDict()
        """When each lane's was taken, and what it was. They outlive their lanes, gone while nobody has one."""

    @property
    def open_count(self) -> int:
        return len(self._all)

    def lane(self, tenant: str, endpoint: Endpoint, ca_pem: str | None = None) -> Lane:
        """The tenant's way to the endpoint, the same for as long as anybody holds it or a connection is open on it."""
        lane = self._lanes.get((tenant, endpoint, ca_pem))
        if lane is None:
            lane = self._lanes[tenant, endpoint, ca_pem] = Lane(tenant, endpoint, ca_pem)
            _, lane.session = self._sessions.get((tenant, endpoint, ca_pem), (0.0, None))
        return lane

    def take(self, lane: Lane, *, allow_private: bool) -> UpstreamConnection | None:
        """An idle connection to an address that may be dialled for this request, or None."""
        for address in self._book.cached(lane.endpoint.host) or ():
            if not (allow_private or judge(address)):
                return None
            idle = lane.idle.get(address)
            while idle:
                connection = idle.pop()
                if connection.is_reusable:
                    connection.requests += 1
                    return connection
        return None

    async def connect(self, lane: Lane, *, allow_private: bool, unopened: bool = False) -> UpstreamConnection:
        """A new connection, verified unless somebody else speaks TLS over it. Raises `RefusedError`."""
        endpoint = lane.endpoint
        try:
            async with asyncio.timeout(self._connect_timeout_seconds):
                addresses = await self._book.look_up(endpoint.host)
                check_addresses(addresses, port=endpoint.port, allow_private=allow_private, own=self._own)
                connection = await self._first_to_answer(lane, addresses)
                if endpoint.scheme == "https" and not unopened:
                    await self._verified(connection, endpoint)
        except TimeoutError:
            raise RefusedError(
                Refusal(RefusalCode.UPSTREAM_TIMEOUT, "The destination did not answer in time.", "Try again shortly.")
            ) from None
        connection.requests += 1
        self._counters.upstream_connections += 1
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        """After a reply that was read to its end. Pools it, or closes it where it could be anything but idle."""
        connection.reader = None
        idle = connection.lane.idle.get(connection.address)
        if (
            not connection.is_reusable
            or not self._is_trusted_still(connection)
            or (idle is not None and len(idle) >= self._per_key)
        ):
            connection.close()
            return
        connection.idle_since = self._loop.time()
        if connection.requests == 1:
            self._remember_session(connection)
        if idle is None:
            connection.lane.idle[connection.address] = [connection]
        else:
            idle.append(connection)

    def trust(self, context: ssl.SSLContext) -> None:
        """Other CAs from now on: nothing that was verified by the old ones carries another request."""
        self._context = context
        for key in [key for key in self._sessions if key[2] is None]:
            del self._sessions[key]
        for lane in list(self._lanes.values()):
            if lane.ca_pem is not None:
                continue
            lane.session = None
            for connection in [each for idle in lane.idle.values() for each in idle]:
                connection.close()
            lane.idle.clear()

    def _is_trusted_still(self, connection: UpstreamConnection) -> bool:
        context = connection.tls_context
        return context is None or context is self._context or connection.lane.ca_pem is not None

    def tick(self, now: float) -> None:
        """Close what idled too long. Called now and then."""
        for lane in list(self._lanes.values()):
            for address, idle in list(lane.idle.items()):
                for connection in [each for each in idle if now - each.idle_since > self._idle_seconds]:
                    idle.remove(connection)
                    connection.close()
                if not idle:
                    del lane.idle[address]

    def close(self) -> None:
        for connection in list(self._all):
            connection.close()

    async def _first_to_answer(self, lane: Lane, addresses: tuple[str, ...]) -> UpstreamConnection:
        """Each address in turn, the next one beside it when one takes long; the first to answer wins."""
        attempts: set[asyncio.Task[UpstreamConnection]] = set()
        waiting = list(addresses)
        try:
            while waiting or attempts:
                if waiting:
                    attempts.add(asyncio.ensure_future(self._dial(lane, waiting.pop(0))))
                done, attempts = await asyncio.wait(
                    attempts, timeout=STAGGER_SECONDS if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                answered = [attempt.result() for attempt in done if attempt.exception() is None]
                for late in answered[1:]:
                    late.close()
                if answered:
                    return answered[0]
        finally:
            for attempt in attempts:
                attempt.cancel()
                attempt.add_done_callback(_close_late_winner)
        raise RefusedError(
            Refusal(
                RefusalCode.UPSTREAM_UNREACHABLE,
                "The destination refused the connection or cannot be reached.",
                "Check that the service is up, and that the proxy's machine may reach it.",
            )
        )

    async def _dial(self, lane: Lane, address: str) -> UpstreamConnection:
        connection = UpstreamConnection(
            loop=self._loop, turn=self._turn, lane=lane, address=address, on_closed=self._forget
        )
        await self._loop.create_connection(lambda: connection, address, lane.endpoint.port)
        self._all.add(connection)
        return connection

    async def _verified(self, connection: UpstreamConnection, endpoint: Endpoint) -> None:
        try:
            await connection.secure(self._context_for(connection.lane), endpoint.host)
        except ssl.SSLCertVerificationError:
            connection.close()
            raise RefusedError(
                Refusal(
                    RefusalCode.UPSTREAM_UNVERIFIED,
                    "The destination's certificate is not one that the proxy trusts for this host.",
                    "For a private CA, add its certificate to COATCHECK_PROXY_UPSTREAM_CA_FILES (--upstream-ca).",
                )
            ) from None
        except (ssl.SSLError, OSError):
            connection.close()
            raise RefusedError(
                Refusal(RefusalCode.UPSTREAM_UNREACHABLE, "TLS could not be agreed with the destination.")
            ) from None
        except BaseException:  # cancelled, or out of time
            connection.close()
            raise

    def _context_for(self, lane: Lane) -> ssl.SSLContext:
        """Raises `ssl.SSLError` for certificates that cannot be read."""
        if lane.ca_pem is None:
            return self._context
        context = self._own_cas.get(lane.ca_pem)
        if context is None:
            context = self._own_cas[lane.ca_pem] = _tls_context(ssl.create_default_context(cadata=lane.ca_pem))
            while len(self._own_cas) > MAX_OWN_CAS:
                self._own_cas.popitem(last=False)
        return context

    def _forget(self, connection: UpstreamConnection) -> None:
        self._remember_session(connection)
        self._all.discard(connection)
        idle = connection.lane.idle.get(connection.address)
        if idle and connection in idle:
            idle.remove(connection)

    def _remember_session(self, connection: UpstreamConnection) -> None:
        # TLS 1.3 sends its tickets after the handshake (RFC 8446 §4.6.1): after a reply they have come.
        lane, now = connection.lane, self._loop.time()
        if connection.tls_context is None or not self._is_trusted_still(connection):
            return
        key = (lane.tenant, lane.endpoint, lane.ca_pem)
        known = self._sessions.get(key)
        if known is not None and now - known[0] < SESSION_SECONDS:
            return
        lane.session = connection.session
        self._sessions[key] = (now, lane.session)
        self._sessions.move_to_end(key)
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


def _close_late_winner(attempt: "asyncio.Task[UpstreamConnection]") -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()
