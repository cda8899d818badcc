"""Two tenants at work on one database, as roughly as clients are: for tests of what a connection pool keeps.

    python -m tests.control_plane.pooling URL SECONDS TASKS      one process of several; prints what it saw as JSON

Rule: it counts what it saw of the other tenant. Any is one too many.
"""

import asyncio
import json
import random
import secrets
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.connections import OnPostgresql
from control_plane.adapters.sql.engine import Database, open_fitting
from control_plane.adapters.sql.repositories import Transaction
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.caller import SessionId, SubjectId, TenantId
from control_plane.contract.refusal import RefusedError
from control_plane.core.records import Session
from control_plane.ports import CrossTenantReason, PlatformScope, TenantScope
from tests.control_plane.test_store import session

TENANTS = (TenantId("acme"), TenantId("evil"))
AT_LEAST = 40
GRACE_SECONDS = 30.0
"""A machine that has no time for us does a few transactions in a few seconds: it is given this much more for them."""


@dataclass
class Seen:
    transactions: int = 0
    foreign_rows: int = 0
    rows_without_tenant: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> str:
        return json.dumps(
            {
                "transactions": self.transactions,
                "foreign_rows": self.foreign_rows,
                "rows_without_tenant": self.rows_without_tenant,
                "errors": dict(self.errors),
            }
        )


class OnPurposeError(Exception):
    """What a handler may raise in the middle of its transaction."""


async def work(database: Database, seconds: float, *, tasks_per_tenant: int = 8) -> Seen:
    """Both tenants, several tasks each, until the time is over and enough was done in it."""
    seen, store, ends = Seen(), SqlStore(database, LocalWake()), time.monotonic() + seconds
    dice = random.Random(7)

    def goes_on() -> bool:
        now = time.monotonic()
        return now < ends or (seen.transactions < AT_LEAST and now < ends + GRACE_SECONDS)

    async def of(tenant: TenantId) -> None:
        while goes_on():
            what = dice.random()
            try:
                async with asyncio.timeout(0.002 if what > 0.9 else 30):
                    await _one(store, tenant, seen, dice, fails=what < 0.1)
            except (OnPurposeError, TimeoutError):
                pass  # killed in the middle
            except RefusedError as refused:
                seen.errors[refused.refusal.code.value] += 1
            except Exception as error:  # what a pooler does to a driver that does not expect it
                seen.errors[type(error).__name__] += 1

    async def of_nobody() -> None:
        while goes_on():
            await database.idle.close()  # of those that wait for the store there may be no other
            with suppress(TimeoutError):
                async with asyncio.timeout(1), database.engine.connect() as connection, connection.begin():
                    await connection.execute(text("SELECT set_config('role', 'coatcheck_tenant', true)"))
                    rows = (await connection.execute(text("SELECT count(*) FROM sessions"))).scalar_one()
                    seen.rows_without_tenant += rows
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        for tenant in TENANTS:
            for _ in range(tasks_per_tenant):
                tasks.create_task(of(tenant))
        tasks.create_task(of_nobody())
    return seen


async def _one(store: SqlStore, tenant: TenantId, seen: Seen, dice: random.Random, *, fails: bool) -> None:
    scope = TenantScope(tenant)
    if dice.random() < 0.3:
        async with store.write(scope) as records:
            await records.sessions.add(_new(tenant))
            if fails:
                raise OnPurposeError
    else:
        async with store.read(scope) as records:
            _count(seen, tenant, [row.tenant for row in await records.credentials.list()])
            # A statement that forgot its tenant.
            found = await raw(records.tenants._tx).execute(text("SELECT tenant FROM sessions LIMIT 50"))
            _count(seen, tenant, list(found.scalars()))
            if fails:
                raise OnPurposeError
    if dice.random() < 0.05:
        async with store.read(PlatformScope(CrossTenantReason.UPKEEP)) as records:
            await records.outbox.position()
    seen.transactions += 1


def raw(tx: Transaction) -> AsyncConnection:
    """Past the repositories and their conditions."""
    connection = tx._connection
    assert isinstance(connection, OnPostgresql)
    return connection.connection


def _count(seen: Seen, tenant: TenantId, tenants: list[Any]) -> None:
    seen.foreign_rows += sum(found != tenant for found in tenants)


def _new(tenant: TenantId) -> Session:
    return session(tenant, id=SessionId(f"ses_{secrets.token_hex(16)}"), subject=SubjectId("alice"))


async def main(url: str, seconds: float, tasks_per_tenant: int) -> None:
    database = await open_fitting(url)
    print((await work(database, seconds, tasks_per_tenant=tasks_per_tenant)).to_json())
    await database.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
