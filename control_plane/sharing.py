"""What replicas share without relying on it: wake-ups, turns, counts. In this process alone, or through Redis.

Rule: Redis is a hint, never authority (ADR 0012). Without it everything works: a change of another replica is then seen
at the next heartbeat, and limits hold for each replica by itself.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from control_plane.adapters.memory.rates import LocalRates
from control_plane.adapters.memory.turns import LocalTurns
from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.redis.connection import SharedRedis
from control_plane.adapters.redis.rates import SharedRates
from control_plane.adapters.redis.turns import SharedTurns
from control_plane.adapters.redis.wake import SharedWake
from control_plane.adapters.sql.engine import Database
from control_plane.adapters.sql.store import SqlStore
from control_plane.clients_file import read_secret_file
from control_plane.config import Settings
from control_plane.contract.secret import Secret
from control_plane.ports import CrossTenantReason, PlatformScope, Rates, Turns, Wake


@dataclass(frozen=True, slots=True)
class Hints:
    wake: Wake
    turns: Turns
    rates: Rates


@asynccontextmanager
async def shared(settings: Settings, database: Database) -> AsyncIterator[Hints]:
    """Raises `ClientsFileError` for a password file that cannot be used. Redis itself may be away."""
    if not settings.redis_url:
        yield Hints(LocalWake(), LocalTurns(), LocalRates())
        return
    redis = SharedRedis(
        settings.redis_url,
        password=_password(settings.redis_password_file),
        ca_file=settings.redis_ca_file,
        namespace=await _epoch(database),
    )
    wake = SharedWake(redis, LocalWake())
    try:
        async with wake.running():
            yield Hints(wake, SharedTurns(redis, entropy=os.urandom), SharedRates(redis, LocalRates()))
    finally:
        await redis.close()


def _password(file: Path | None) -> Secret | None:
    # Not one of ours: how long it is was somebody else's decision.
    return read_secret_file(file, min_characters=1) if file is not None else None


async def _epoch(database: Database) -> str:
    """Replicas of one database have it in common, and installations that share a Redis do not."""
    async with SqlStore(database, LocalWake()).read(PlatformScope(CrossTenantReason.START)) as records:
        return (await records.outbox.position()).epoch
