"""Counts of this process (`ports.Rates`): all there is where one process serves.

Rule: what is kept is bounded. What has not been taken from for a window is as if it had never been.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from control_plane.contract.caller import TenantId
from control_plane.core.pace import Pace
from control_plane.ports import Taken

MOST_KEPT: Final = 100_000


class LocalRates:
    def __init__(self, clock: Callable[[], float] = time.monotonic, *, most_kept: int = MOST_KEPT) -> None:
        self._clock = clock
        self._most_kept = most_kept
        self._used_up_to: OrderedDict[tuple[TenantId, str], float] = OrderedDict()

    async def take(
        self, key: str, *, tenant: TenantId, limit: float, window_seconds: float, amount: float = 1.0
    ) -> Taken:
        return self.take_now(key, tenant=tenant, pace=Pace(limit, window_seconds), amount=amount)

    def take_now(self, key: str, *, tenant: TenantId, pace: Pace, amount: float) -> Taken:
        now, name = self._clock(), (tenant, key)
        ends, wait = pace.after(self._used_up_to.get(name, 0.0), amount=amount, now=now)
        if ends is None:
            return Taken(allowed=False, retry_after_seconds=wait)
        self._used_up_to[name] = ends
        self._used_up_to.move_to_end(name)
        self._forget(now)
        return Taken(allowed=True, retry_after_seconds=0.0)

    def give_back(self, key: str, *, tenant: TenantId, pace: Pace, amount: float) -> None:
        """What was taken and then refused elsewhere."""
        if (tenant, key) in self._used_up_to:
            self._used_up_to[tenant, key] -= amount * pace.window_seconds / pace.limit

    def _forget(self, now: float) -> None:
        """The longest untouched first: over already, or one too many."""
        while self._used_up_to:
            _, ends = next(iter(self._used_up_to.items()))
            if ends > now and len(self._used_up_to) <= self._most_kept:
                return
            self._used_up_to.popitem(last=False)
