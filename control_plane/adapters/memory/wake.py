"""Wakes the event streams of this process when the outbox grew (`ports.Wake`).

Rule: a wake-up is a hint. Other processes' streams find a change by looking once a heartbeat.
"""

import asyncio
from collections.abc import Awaitable, Callable


class LocalWake:
    def __init__(self) -> None:
        self._grew = asyncio.Event()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def announce(self) -> None:
        self._grew.set()
        if not self._closed:
            self._grew = asyncio.Event()

    def listen(self) -> Callable[[float], Awaitable[None]]:
        """Take this before looking: what is announced between the look and the wait is then not missed."""
        grew = self._grew

        async def wait(timeout_seconds: float) -> None:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await grew.wait()
            except TimeoutError:
                return

        return wait

    def close(self) -> None:
        """Ends every wait, now and later: the server is going."""
        self._closed = True
        self.announce()
