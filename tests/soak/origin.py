"""The upstream of a soak: each path is one thing that upstreams do, well or badly. It remembers nothing for long."""

import asyncio

import trustme

from tests.support.upstream import (
    Request,
    Upstream,
    Wire,
    chunk,
    hold,
    message,
    sends_then_closes,
    sends_then_resets,
    sse,
)
from tests.support.websocket import switched

BIG_BYTES = 2 << 20
FRAME = b"\x82\x10" + b"0123456789abcdef"
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


class Origin(Upstream):
    """Answers 401 to whoever does not carry one of the keys that were ever good."""

    def __init__(self, ca: trustme.CA) -> None:
        super().__init__(ca, tickets=2)
        self.keys: set[str] = set()
        self.strangers = 0
        """Requests that carried something else."""
        self.on("/small", self._small)
        self.on("/echo", self._count)
        self.on("/big", self._big)
        self.on("/ws", _websocket)
        self.on("/sse", sse([b"data: %d\n\n" % number for number in range(12)], gap_seconds=0.05))
        self.on("/sse-close", sse([b"data: %d\n\n" % number for number in range(5)], gap_seconds=0.02, chunked=False))
        self.on("/reset", sends_then_resets(_HEAD + b"x" * 5_000))
        self.on("/cut", sends_then_closes(_HEAD + b"x" * 5_000))
        self.on("/garbage", sends_then_closes(b"\x00\x01 this is not HTTP\r\n\r\n"))
        self.on("/silent", hold())
        self.on("/half", hold(_HEAD + b"x" * 100))

    def forget(self) -> None:
        """What it kept for tests that ask."""
        self.requests.clear()
        self.connections[:] = [connection for connection in self.connections if connection.closed_at is None]
        for connection in self.connections:
            connection.received.clear()

    async def _small(self, request: Request, wire: Wire) -> None:
        is_known = request.header("authorization").removeprefix("Bearer ") in self.keys
        self.strangers += not is_known
        await wire.write(message(b"ok", status="200 OK" if is_known else "401 Unauthorized"))

    async def _count(self, request: Request, wire: Wire) -> None:
        await wire.write(message(b"%d" % len(request.body)))

    async def _big(self, _request: Request, wire: Wire) -> None:
        await wire.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(BIG_BYTES // 65_536):
            await wire.write(chunk(bytes(65_536)))
        await wire.write(b"0\r\n\r\n")


async def _websocket(request: Request, wire: Wire) -> None:
    """Gives back each frame (of one size), until the other side goes."""
    await wire.write(switched(request))
    while True:
        await wire.write(await wire.exactly(len(FRAME)))
        await asyncio.sleep(0)
