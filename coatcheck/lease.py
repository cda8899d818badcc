"""The placeholders of one run, renewed in place for as long as it lasts.

Rule: a renewal keeps every string, because a running child's environment cannot be changed. It is due after two thirds
of the shortest life, measured on the wall clock: the monotonic one stands still while a laptop sleeps.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from coatcheck.client import ControlPlane, Exchanged, RefusedCommandError
from coatcheck.terminal import CommandError

RENEW_AT: Final = 2 / 3
LONGEST_LOOK_SECONDS: Final = 2.0
"""How soon after a sleep the clock is looked at."""
WAY_OUT: Final = ""
"""Stands for the name of a credential, where a run has none: the proxy credential alone is kept alive."""
_RETRY_SECONDS: Final = 1.0


class Lease:
    """What one session was given for its credentials."""

    def __init__(
        self,
        control_plane: ControlPlane,
        exchanged: dict[str, Exchanged],
        *,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._control_plane = control_plane
        self._exchanged = exchanged
        self._clock = clock
        self._say = say
        self._renewing = asyncio.Lock()
        self._due = 0.0
        self.proxy_credential = ""
        self._taken(list(exchanged.values()))

    def placeholder(self, credential: str) -> str:
        return self._exchanged[credential].placeholder

    async def live_proxy_credential(self) -> str:
        """The proxy credential, renewed first when that is due (a laptop just woke up)."""
        if self._clock() >= self._due:
            await self.renew_if_due()
        return self.proxy_credential

    async def keep(self) -> None:
        """Renew, again and again, until cancelled."""
        while True:
            await asyncio.sleep(min(LONGEST_LOOK_SECONDS, max(0.05, self._due - self._clock())))
            await self.renew_if_due()

    async def renew_if_due(self) -> None:
        async with self._renewing:
            if self._clock() < self._due:
                return
            await asyncio.to_thread(self._renew)

    def _renew(self) -> None:
        renewed = []
        for name, exchanged in list(self._exchanged.items()):
            try:
                self._exchanged[name] = self._control_plane.renew(exchanged)
                renewed.append(self._exchanged[name])
            except RefusedCommandError as refused:
                if refused.status >= 500:
                    self._due = self._clock() + _RETRY_SECONDS
                    return
                del self._exchanged[name]
                what = "the way out" if name == WAY_OUT else f"the placeholder of {name}"
                self._say(f"{what} can no longer be renewed: {refused}")
            except CommandError:  # the control plane is away; what we hold stays good until it runs out
                self._due = self._clock() + _RETRY_SECONDS
                return
        self._taken(renewed)

    def _taken(self, exchanged: list[Exchanged]) -> None:
        if not exchanged:
            self._due = float("inf")
            return
        self.proxy_credential = exchanged[-1].proxy_credential
        self._due = self._clock() + RENEW_AT * min(each.expires_in for each in exchanged)
