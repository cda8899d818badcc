"""Bytes on their way out: kept for the rest of the event loop's turn, then written one connection after the other.

Under load a turn reads from many connections. Writing to each between reading from two of them wakes a peer for every
write, and has the caches change between the kernel's code and ours twice a request: together a quarter of the
processor time (`make bench`). Where a turn has one event, its bytes leave as soon as its callbacks have returned.

Rules: large pieces, and many, wait for nothing; bytes keep their order; what was written before `close` or `write_eof`
leaves before the end does; what was written before `abort` need not leave.
"""

import asyncio
from typing import Final

import structlog

LARGE_BYTES: Final = 32_768
MOST_PIECES: Final = 16
"""A turn may read megabytes from one connection. They leave as they come: put together they would be copied into memory
that has to be found for them, and a slow client would be noticed too late."""

log = structlog.get_logger("egress_proxy")


class Turn:
    """One event loop's: the outlets that were written to since it last looked."""

    __slots__ = ("_loop", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.waiting: list[Outlet] = []

    def begin(self) -> None:
        """Something is about to wait."""
        self._loop.call_soon(self._end)

    def _end(self) -> None:
        waiting, self.waiting = self.waiting, []
        for outlet in waiting:
            outlet.flush()


class Outlet:
    """What is written to one transport. It is the lowest of the layers that a connection writes through."""

    __slots__ = ("_pieces", "_send", "_turn", "is_closing", "pause_reading", "resume_reading", "transport")

    def __init__(self, transport: asyncio.Transport, turn: Turn) -> None:
        self.transport = transport
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self._send = transport.write
        self._turn = turn
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        pieces = self._pieces
        if not pieces:
            turn = self._turn
            if not turn.waiting:
                turn.begin()
            turn.waiting.append(self)
        pieces.append(data)
        if len(data) >= LARGE_BYTES or len(pieces) >= MOST_PIECES:
            self.flush()

    def flush(self) -> None:
        """Hand over what waits, now."""
        pieces = self._pieces
        if not pieces:
            return
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self.is_closing():
            return
        try:
            self._send(data)
        except Exception as error:  # border: the others' bytes come after this connection's
            log.warning("write_failed", error=type(error).__name__)
            self.transport.abort()

    def write_eof(self) -> None:
        self.flush()
        self.transport.write_eof()

    def close(self) -> None:
        self.flush()
        self.transport.close()

    def abort(self) -> None:
        self._pieces.clear()
        self.transport.abort()
