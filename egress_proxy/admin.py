"""The operators' listener: `/healthz`, `/readyz`, `/metrics`. Apart from the clients' listeners, and without secrets.

Ready means: the control plane has been heard since the start, a swap works (`probe`), and no drain has begun. It stays
ready through an outage of the control plane, which would otherwise take every proxy out at once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from control_plane.contract.refusal import RefusedError
from egress_proxy.core.http1 import parse_request_head

MAX_HEAD_BYTES: Final = 16_384
READ_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Page:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Pages = dict[str, Callable[[], Awaitable[Page]]]
"""By path."""


async def serve_pages(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pages: Pages) -> None:
    """One request a connection."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            page, is_head = await _page(await reader.readuntil(b"\r\n\r\n"), pages)
            head = (
                f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}\r\nContent-Type: {page.content_type}\r\n"
                f"Content-Length: {len(page.body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + (b"" if is_head else page.body))
            await writer.drain()
    except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.close()


async def _page(raw: bytes, pages: Pages) -> tuple[Page, bool]:
    try:
        head = parse_request_head(raw)
    except RefusedError as refused:
        return Page(refused.refusal.status, b"refused\n"), False
    if head.method not in ("GET", "HEAD"):
        return Page(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n"), False
    make = pages.get(head.target.partition(b"?")[0].decode("latin-1"))
    page = await make() if make is not None else Page(HTTPStatus.NOT_FOUND, b"/healthz, /readyz, /metrics\n")
    return page, head.method == "HEAD"
