"""Whoever has not sent a whole head costs little: it may neither grow nor take for ever (RFC 6585 §5, RFC 9110)."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runtime.bootstrap import RunningRuntime, running
from runtime.config import Settings
from runtime.http import MAX_HEAD_BYTES
from tests.support.processes import private_file


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[RunningRuntime]:
    settings = Settings(
        listen=("127.0.0.1", 0),
        control_plane_url="http://127.0.0.1:9",
        client_id="runtime-1",
        client_secret_file=private_file(tmp_path / "secret", "client-secret\n"),
        model="coat-1",
        drain_grace_seconds=1,
    )
    async with running(settings) as started:
        yield started


@contextlib.asynccontextmanager
async def dialled(runtime: RunningRuntime) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", runtime.port)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.guards("runtime/http.py", "if self._head_bytes > MAX_HEAD_BYTES:", "if False:")
async def test_header_lines_without_end_are_cut_off_before_they_fill_the_memory(runtime: RunningRuntime) -> None:
    line = b"X-Filler: " + b"a" * 65_536 + b"\r\n"
    sent = 0
    async with dialled(runtime) as (_, writer):
        writer.write(b"POST /v1/turn HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(ConnectionError):
            while sent < 50_000_000:
                writer.write(line)
                await writer.drain()
                sent += len(line)

    assert sent < 20_000_000


async def test_a_head_that_is_too_large_is_431(runtime: RunningRuntime) -> None:
    async with dialled(runtime) as (reader, writer):
        writer.write(b"POST /v1/turn HTTP/1.1\r\nHost: x\r\nX-Filler: " + b"a" * MAX_HEAD_BYTES)
        answer = await reader.read()

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"coatcheck-refusal: headers_too_large" in head.lower()
    assert json.loads(body)["code"] == "headers_too_large"


async def test_a_large_head_within_the_bound_is_read_like_any_other(runtime: RunningRuntime) -> None:
    async with dialled(runtime) as (reader, writer):
        for piece in (b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"X-Filler: " + b"a" * 30_000 + b"\r\n", b"\r\n"):
            writer.write(piece)
            await writer.drain()
        answer = await reader.readline()

    assert answer == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.long
@pytest.mark.guards("runtime/http.py", "self.loop.call_later(HEAD_SECONDS,", "self.loop.call_later(600,")
async def test_a_head_that_does_not_come_is_408(runtime: RunningRuntime) -> None:
    async def answer_to(beginning: bytes) -> bytes:
        async with dialled(runtime) as (reader, writer):
            writer.write(beginning)
            return await asyncio.wait_for(reader.read(), 30)

    answers = await asyncio.gather(*map(answer_to, (b"", b"POST /v1/turn HTTP/1.1\r\nHos", b"GET /healthz HT")))

    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 408 ")
