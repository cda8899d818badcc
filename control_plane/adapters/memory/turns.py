"""Turns among the tasks of this process (`ports.Turns`): all there is where one process serves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from control_plane.contract.caller import TenantId


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted_by: int = 0


class LocalTurns:
    def __init__(self) -> None:
        self._turns: dict[tuple[TenantId | None, str], _Turn] = {}

    @asynccontextmanager
    async def turn(self, key: str, *, tenant: TenantId | None, seconds: float) -> AsyncIterator[None]:
        mine = self._turns.setdefault((tenant, key), _Turn())
        mine.wanted_by += 1
        got = False
        try:
            try:
                async with asyncio.timeout(seconds):
                    got = await mine.lock.acquire()
            except TimeoutError:
                pass  # whoever is inside takes too long to wait for
            yield
        finally:
            if got:
                mine.lock.release()
            mine.wanted_by -= 1
            if not mine.wanted_by:
                self._turns.pop((tenant, key), None)
