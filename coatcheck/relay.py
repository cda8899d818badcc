"""Listeners opened for one run: every connection to them is passed on to the proxy with the run's proxy credential.

Rule: the proxy credential is added here, outside the sandbox, so that CMD holds none and every client works; it is sent
to the stack of the run's own folder, or not at all. Nothing is
read or changed on the way; backpressure, half-closed connections and resets are passed on as they come, because a reply
that was cut off must not look like one that ended.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, cast

from coatcheck.terminal import CommandError
from egress_proxy.preamble import preamble

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST
_NO_PROXY_THERE: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"
    b"coatcheck: the local stack does not answer; see 'coatcheck status'\n"
)


@dataclass(slots=True)
class Way:
    """How connections of one listener reach the proxy."""

    port: Callable[[], int]
    """Asked anew for every connection: the stack may have been started again meanwhile. Raises `CommandError` when
    there is none of ours."""
    proxy_credential: Callable[[], Awaitable[str]]
    """May renew first, after a laptop's sleep."""
    connections: set["_FromClient"] = field(default_factory=set)


@contextlib.asynccontextmanager
async def relaying(listener: socket.socket, way: Way) -> AsyncIterator[None]:
    """Relay what connects to `listener`. At the end it is closed, and every connection cut."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _FromClient(way), sock=listener)
    try:
        yield
    finally:
        server.close()
        for connection in list(way.connections):
            connection.cut()


def loopback_listener() -> socket.socket:
    """Any free port of 127.0.0.1."""
    return socket.create_server(("127.0.0.1", 0), backlog=512)


class _End(asyncio.Protocol):
    """One side of a relayed connection. What it receives, its `peer` sends."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer: _End | None = None
        self._failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.write(data)

    def eof_received(self) -> bool:
        if self.peer is not None and self.peer.transport is not None and self.peer.transport.can_write_eof():
            with contextlib.suppress(OSError):  # it may be closed by now; connection_lost follows
                self.peer.transport.write_eof()
        return True  # half-closed: the other direction goes on

    def pause_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        peer, self.peer = self.peer, None
        self.transport = None
        if peer is not None:
            peer.end(reset=error is not None)

    def end(self, *, reset: bool) -> None:
        """The other side is gone."""
        transport, self.peer = self.transport, None
        if transport is None:
            return
        if reset:
            _reset(transport)
        else:
            transport.close()


class _FromClient(_End):
    """What CMD opened. What it says before its way to the proxy is open is kept for then."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self._way = way
        self._early = bytearray()
        self._ended_early = False
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._way.connections.add(self)
        self._opening = asyncio.get_running_loop().create_task(self._open())

    def data_received(self, data: bytes) -> None:
        if self.peer is not None:
            super().data_received(data)
            return
        self._early += data
        assert self.transport is not None
        # Not earlier: uvloop begins to read after connection_made, whatever was said in there.
        self.transport.pause_reading()

    def eof_received(self) -> bool:
        self._ended_early = self.peer is None
        return super().eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._way.connections.discard(self)
        if self._opening is not None:
            self._opening.cancel()
        super().connection_lost(error)

    def cut(self) -> None:
        if self.transport is not None:
            _reset(self.transport)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            credential = await self._way.proxy_credential()
            port = self._way.port()
            _, proxy_side = await loop.create_connection(_End, "127.0.0.1", port)
            self._require_unchanged(port, proxy_side)
        except (OSError, CommandError):
            if self.transport is not None:
                self.transport.write(_NO_PROXY_THERE)
                self.transport.close()
            return
        if self.transport is None or proxy_side.transport is None:  # the client, or the proxy, has gone meanwhile
            proxy_side.end(reset=False)
            self.end(reset=False)
            return
        self.peer, proxy_side.peer = proxy_side, self
        proxy_side.transport.write(preamble(credential) + bytes(self._early))
        if self._ended_early:
            proxy_side.transport.write_eof()
        if self._early:
            self._early.clear()
            self.transport.resume_reading()

    def _require_unchanged(self, port: int, proxy_side: _End) -> None:
        """Once connected: what listened may have been another's, if the stack has ended in between."""
        try:
            unchanged = self._way.port() == port
        except CommandError:
            unchanged = False
        if not unchanged:
            proxy_side.end(reset=True)
            raise ConnectionAbortedError


def _reset(transport: asyncio.Transport) -> None:
    found = transport.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()
