"""Wakes the event streams of every replica when the outbox grew (`ports.Wake`), by publish and subscribe.

Rule: a message says "look" and nothing else. What changed, and in which order, is read from the outbox, by its numbers:
a message that was lost is caught up with at the next look, one that was made up costs a look. However many come, there
is one look in `PAUSE_SECONDS`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import structlog
from redis.exceptions import RedisError

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.redis.connection import SharedRedis
from control_plane.faults import reach

PAUSE_SECONDS: Final = 0.02
AGAIN_SECONDS: Final = 1.0
_SILENCE_SECONDS: Final = 5.0

_log = structlog.get_logger("control_plane.redis")


class SharedWake:
    """`running` is what listens and tells, for as long as it is entered."""

    def __init__(self, redis: SharedRedis, local: LocalWake) -> None:
        self._redis = redis
        self._local = local
        self._channel = redis.key("outbox")
        self._grew = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._local.closed

    def announce(self) -> None:
        self._local.announce()
        self._grew.set()

    def listen(self) -> Callable[[float], Awaitable[None]]:
        return self._local.listen()

    def close(self) -> None:
        self._local.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(self._tell(), name="wake: tell"),
            asyncio.create_task(self._hear(), name="wake: hear"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _tell(self) -> None:
        while True:
            await self._grew.wait()
            self._grew.clear()
            await self._redis.ask(self._publish)
            reach("wake.told")
            await asyncio.sleep(PAUSE_SECONDS)

    async def _publish(self, client: Any) -> object:
        return await client.publish(self._channel, b"look")

    async def _hear(self) -> None:
        while True:
            try:
                await self._hear_until_it_ends()
            except (RedisError, OSError, TimeoutError) as error:
                _log.warning("redis_away", error=type(error).__name__)
            except Exception as error:  # border: an answer that the library did not expect
                _log.error("redis_unreadable", error=type(error).__name__)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _hear_until_it_ends(self) -> None:
        client = self._redis.listener()
        try:
            async with client.pubsub() as pubsub:
                await pubsub.subscribe(self._channel)
                while True:
                    # Also for the confirmation of a subscription: what was published before it is lost.
                    if await pubsub.get_message(timeout=_SILENCE_SECONDS) is not None:
                        self._local.announce()
                        await asyncio.sleep(PAUSE_SECONDS)
        finally:
            with suppress(RedisError, OSError):
                await client.aclose()
