"""A listener opened for one run: it proves the caller, and is otherwise not there."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from coatcheck.relay import Way, loopback_listener, relaying
from coatcheck.terminal import CommandError
from egress_proxy.preamble import preamble

CREDENTIAL = "coatprx1" + "A" * 28
SECONDS = 5.0


@dataclass
class FakeProxy:
    """Takes connections; keeps what each of them said."""

    port: int = 0
    heard: list[bytearray] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    answer: bytes = b""
    reset: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = bytearray()
        self.heard.append(heard)
        while data := await reader.read(65536):
            heard += data
            if self.reset and heard.endswith(b"!"):
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                return
        self.ended.set()
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def relay(*, credential_delay: asyncio.Event | None = None) -> AsyncIterator[tuple[int, FakeProxy]]:
    proxy = FakeProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]

    async def credential() -> str:
        if credential_delay is not None:
            await credential_delay.wait()
        return CREDENTIAL

    listener = loopback_listener()
    async with server, relaying(listener, Way(lambda: proxy.port, credential)):
        yield listener.getsockname()[1], proxy


async def test_a_connection_begins_with_the_proof_of_its_caller_and_is_then_passed_on_as_it_is() -> None:
    async with relay() as (port, proxy), asyncio.timeout(SECONDS):
        proxy.answer = b"HTTP/1.1 200 OK\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        writer.write(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n\x16\x03\x01 \x00 bytes")
        writer.write_eof()
        answer = await reader.read()

        assert (
            bytes(proxy.heard[0])
            == preamble(CREDENTIAL) + b"CONNECT a.example:443 HTTP/1.1\r\n\r\n\x16\x03\x01 \x00 bytes"
        )
        assert answer == b"HTTP/1.1 200 OK\r\n\r\n"


async def test_what_a_client_says_before_its_way_is_open_is_kept() -> None:
    renewed = asyncio.Event()
    async with relay(credential_delay=renewed) as (port, proxy), asyncio.timeout(SECONDS):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"early ")
        writer.write_eof()
        await writer.drain()
        await asyncio.sleep(0.05)  # lets the relay read it; without that the test would only be weaker

        renewed.set()
        await proxy.ended.wait()

        assert bytes(proxy.heard[0]) == preamble(CREDENTIAL) + b"early "


async def test_a_half_closed_connection_still_gets_its_answer() -> None:
    async with relay() as (port, proxy), asyncio.timeout(SECONDS):
        proxy.answer = b"x" * 1_000_000
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        writer.write_eof()
        answer = await reader.read()

        assert len(answer) == 1_000_000


@pytest.mark.guards("coatcheck/relay.py", "peer.end(reset=error is not None)", "peer.end(reset=False)")
async def test_a_reply_that_was_reset_does_not_look_like_one_that_ended() -> None:
    async with relay() as (port, proxy), asyncio.timeout(SECONDS):
        proxy.reset = True
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        writer.write(b"!")

        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_without_a_proxy_the_client_gets_an_answer_that_says_what_to_do() -> None:
    async with relay() as (port, proxy), asyncio.timeout(SECONDS):
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            proxy.port = nobody.getsockname()[1]

            reader, _ = await asyncio.open_connection("127.0.0.1", port)
            answer = await reader.read()

        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"coatcheck status" in answer


@pytest.mark.guards("coatcheck/relay.py", "self._require_unchanged(port, proxy_side)", "pass")
async def test_a_port_that_is_no_longer_the_stacks_gets_no_credential() -> None:
    def port() -> int:
        if not asked:
            raise CommandError("the local stack has ended")
        return asked.pop()

    async def credential() -> str:
        return CREDENTIAL

    heard: list[bytes] = []

    async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            heard.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(strange, "127.0.0.1", 0)
    asked: list[int] = [server.sockets[0].getsockname()[1]]
    listener = loopback_listener()
    async with (
        server,
        asyncio.timeout(SECONDS),
        relaying(listener, Way(port, credential)),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await reader.read()

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"".join(heard) == b""


async def test_at_the_end_every_connection_is_cut() -> None:
    async with asyncio.timeout(SECONDS):
        async with relay() as (port, proxy):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hello")
            while not proxy.heard:
                await asyncio.sleep(0)

        with pytest.raises(ConnectionResetError):
            await reader.read()
