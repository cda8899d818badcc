"""Turns among all replicas (`ports.Turns`): a key with an end, which only who set it takes away.

Rule: a key that does not go away costs the wait that was asked for, never more.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from control_plane.adapters.memory.turns import LocalTurns
from control_plane.adapters.redis.connection import SharedRedis
from control_plane.contract.caller import TenantId
from control_plane.ports import Entropy

LOOKS_AGAIN_SECONDS: Final = 0.05

# Not another's: ours may have ended, and the next one's begun.
_GIVE_BACK: Final = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


class SharedTurns:
    def __init__(self, redis: SharedRedis, *, entropy: Entropy) -> None:
        self._redis = redis
        self._entropy = entropy
        self._local = LocalTurns()

    @asynccontextmanager
    async def turn(self, key: str, *, tenant: TenantId | None, seconds: float) -> AsyncIterator[None]:
        deadline = time.monotonic() + seconds
        name, own = self._redis.key("turn", tenant=tenant, name=key), self._entropy(16).hex()
        # One of each replica asks; the others of it wait here.
        async with self._local.turn(key, tenant=tenant, seconds=seconds):
            await self._wait(name, own, seconds=seconds, deadline=deadline)
            try:
                yield
            finally:
                await self._redis.ask(lambda client: client.eval(_GIVE_BACK, 1, name, own))

    async def _wait(self, name: str, own: str, *, seconds: float, deadline: float) -> None:
        async def take(client: Any) -> bool:
            return bool(await client.set(name, own, nx=True, px=max(1, int(seconds * 1000))))

        # False: somebody has it. None: nobody can say, and nobody is waited for.
        while await self._redis.ask(take) is False:
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(LOOKS_AGAIN_SECONDS)
