"""Libraries that block, in threads of their own, and their way back to the one outbound client.

Rule: a library asks the network through `Outbound` or not at all. The threads are ours: those of the event loop look
up names, and one that waits here for the loop must not be one that the loop waits for.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from control_plane.ports import Outbound, OutboundError, OutboundReply, OutboundRequest, SourceError, SourceFailure

T = TypeVar("T")

ASK_SECONDS: Final = 8.0
"""The longest wait for one answer: a login and a read, or one retry of a login."""
MAX_THREADS: Final = 16

_threads: Final = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="asking")


async def in_thread(work: Callable[[], T]) -> T:
    """Raises what `work` raises, and `SourceError(unavailable)` where it takes too long."""
    running = asyncio.get_running_loop().run_in_executor(_threads, contextvars.copy_context().run, work)
    try:
        async with asyncio.timeout(ASK_SECONDS):
            return await asyncio.shield(running)
    except TimeoutError:
        running.add_done_callback(_forget)
        raise SourceError(SourceFailure.UNAVAILABLE, "it did not answer in time") from None


class BlockingOutbound:
    """`Outbound` for a thread: asks on the event loop it was made on, and waits."""

    def __init__(self, outbound: Outbound) -> None:
        self._outbound = outbound
        self._loop = asyncio.get_running_loop()

    def send(self, request: OutboundRequest) -> OutboundReply:
        """Raises `OutboundError`."""
        return asyncio.run_coroutine_threadsafe(self._send(request), self._loop).result(ASK_SECONDS)

    async def _send(self, request: OutboundRequest) -> OutboundReply:
        return await self._outbound.send(request)


def why_not(error: OutboundError) -> SourceError:
    """In words an operator can act on."""
    return SourceError(SourceFailure.UNAVAILABLE, f"it cannot be asked ({error.failure.value})")


def _forget(late: "asyncio.Future[T]") -> None:
    if not late.cancelled():
        late.exception()  # nobody waits for it any more
