"""The control plane's periodic work: chores, each round after round. One of them forgets what is over: dead tokens,
ended sessions, changes that every proxy has long heard of.

Rule: a chore is bounded, and may be done by several replicas at once: what is to be done stands in the database.
Nothing is forgotten that could still be used, renewed or missed, and never the audit trail. Each round takes a bounded
number of rows in a transaction each, so that nobody waits long for the writer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from control_plane.contract.refusal import RefusedError
from control_plane.core.tokens import CLOCK_SKEW_SECONDS
from control_plane.ports import CrossTenantReason, PlatformScope, Store

TOKENS_KEPT_SECONDS: Final = 86_400
"""After its end a token is still told from one that never was."""
SESSIONS_KEPT_SECONDS: Final = 7 * 86_400
CHANGES_KEPT_SECONDS: Final = 86_400
CHANGES_KEPT: Final = 10_000
"""However old: a proxy that comes back reads on where it was."""
ROWS_AT_ONCE: Final = 1_000
ROUND_SECONDS: Final = 60.0

_log = structlog.get_logger("control_plane.upkeep")


@dataclass(frozen=True, slots=True)
class Chore:
    """One piece of periodic work."""

    name: str
    every_seconds: float
    once: Callable[[], Awaitable[object]]

    async def run(self) -> None:
        """Round after round, for ever."""
        while True:
            try:
                await self.once()
            except RefusedError:
                pass  # the store is away, and has said so
            except Exception as error:  # border: the next round begins anew
                _log.error("upkeep_failed", chore=self.name, error=type(error).__name__)
            await asyncio.sleep(self.every_seconds)


async def keep_up(chores: Sequence[Chore]) -> None:
    """All of them, side by side, for ever: one that takes long holds up no other."""
    async with asyncio.TaskGroup() as group:
        for chore in chores:
            group.create_task(chore.run(), name=f"upkeep: {chore.name}")


class Upkeep:
    """Forgets what is over."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def once(self) -> None:
        scope = PlatformScope(CrossTenantReason.UPKEEP)
        async with self._store.read(scope) as records:
            now = await records.now()  # a replica whose clock is ahead forgets nothing too soon
        async with self._store.write(scope) as records:
            await records.tokens.purge(dead_before=now - TOKENS_KEPT_SECONDS, limit=ROWS_AT_ONCE)
        async with self._store.write(scope) as records:
            await records.sessions.purge(over_before=now - SESSIONS_KEPT_SECONDS, limit=ROWS_AT_ONCE // 10)
        async with self._store.write(scope) as records:
            # A replica's clock may be behind the database's, and there the assertion is not over yet.
            over_before = now - CLOCK_SKEW_SECONDS
            await records.used_assertions.purge(over_before=over_before, limit=ROWS_AT_ONCE)
        async with self._store.write(scope) as records:
            await records.minted.purge(limit=ROWS_AT_ONCE)
        async with self._store.write(scope) as records:
            await records.outbox.purge(before=now - CHANGES_KEPT_SECONDS, keep=CHANGES_KEPT, limit=ROWS_AT_ONCE)
