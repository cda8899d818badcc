"""Counts of all replicas together (`ports.Rates`): the arithmetic of `core.pace`, on the server, by its clock.

Rule: each replica counts by itself as well, and what either refuses is refused. Redis that is away, or was emptied,
lets through each replica's limit at most; what somebody wrote into it holds things up for a window at most.
"""

from typing import Any, Final

from control_plane.adapters.memory.rates import LocalRates
from control_plane.adapters.redis.connection import SharedRedis
from control_plane.contract.caller import TenantId
from control_plane.core.pace import Pace
from control_plane.ports import Taken

_TAKE: Final = """
local time = redis.call('TIME')
local now, limit = time[1] + time[2] / 1e6, tonumber(ARGV[1])
local window, amount = tonumber(ARGV[2]), tonumber(ARGV[3])
local used = tonumber(redis.call('GET', KEYS[1]) or '0') or 0
local ends = math.min(math.max(used, now), now + window) + amount * window / limit
local too_far = ends - (now + window)
if too_far > 1e-6 then return tostring(too_far) end
redis.call('SET', KEYS[1], string.format('%.6f', ends), 'PX', math.ceil((ends - now) * 1000) + 1000)
return '0'
"""


class SharedRates:
    def __init__(self, redis: SharedRedis, local: LocalRates) -> None:
        self._redis = redis
        self._local = local

    async def take(
        self, key: str, *, tenant: TenantId, limit: float, window_seconds: float, amount: float = 1.0
    ) -> Taken:
        pace = Pace(limit, window_seconds)
        own = self._local.take_now(key, tenant=tenant, pace=pace, amount=amount)
        if not own.allowed:
            return own
        name = self._redis.key("rate", tenant=tenant, name=key)

        async def ask(client: Any) -> float:
            return float(await client.eval(_TAKE, 1, name, limit, window_seconds, amount))

        wait = await self._redis.ask(ask)
        if wait is None or not wait > 0:
            return own
        self._local.give_back(key, tenant=tenant, pace=pace, amount=amount)
        return Taken(allowed=False, retry_after_seconds=min(wait, window_seconds + amount * window_seconds / limit))
