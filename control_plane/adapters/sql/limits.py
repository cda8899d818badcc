"""Limits and what was given out of them, in SQL (`ports.Limits`).

Rule: what is given out is added to its row in one statement that holds the limit, so that no two proxies, on whatever
replicas, get the same units.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Table, delete, insert, select, update

from control_plane.adapters.sql.repositories import LIMITS, Transaction, table_of
from control_plane.adapters.sql.rows import to_columns, to_record, to_records
from control_plane.adapters.sql.tables import LimitUsageRow
from control_plane.contract.caller import TenantId
from control_plane.core.records import Limit

USAGE: Final[Table] = table_of(LimitUsageRow)


class SqlLimits:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, limit: Limit) -> None:
        self._tx.require_mine(limit.tenant)
        await self._tx.change(insert(LIMITS), to_columns(limit))

    async def get(self, limit_id: str) -> Limit | None:
        row = await self._tx.row(select(LIMITS).where(LIMITS.c.id == limit_id, self._tx.mine(LIMITS.c.tenant)))
        return to_record(Limit, row) if row else None

    async def list(self) -> Sequence[Limit]:
        statement = select(LIMITS).where(self._tx.mine(LIMITS.c.tenant)).order_by(LIMITS.c.created_at, LIMITS.c.id)
        return to_records(Limit, await self._tx.rows(statement))

    async def of_tenant(self, tenant: TenantId) -> Sequence[Limit]:
        where = (LIMITS.c.tenant == tenant, self._tx.mine(LIMITS.c.tenant))
        return to_records(Limit, await self._tx.rows(select(LIMITS).where(*where).order_by(LIMITS.c.id)))

    async def remove(self, limit_id: str) -> None:
        await self._tx.change(delete(LIMITS).where(LIMITS.c.id == limit_id, self._tx.mine(LIMITS.c.tenant)))

    async def take(self, limit: Limit, *, bucket: str, now: float, least: int, most: int) -> int:
        """At most `most`; at least `least` or as much as there is."""
        await self._ensured(limit, bucket, now)
        for wanted in (most, least):
            more = USAGE.c.granted + wanted <= limit.amount
            changed = update(USAGE).where(*self._here(limit, bucket, now), more)
            if await self._tx.change(changed.values(granted=USAGE.c.granted + wanted)):
                return wanted
        left = limit.amount - await self.granted(limit, bucket=bucket, now=now)
        if left <= 0:
            return 0
        still = update(USAGE).where(*self._here(limit, bucket, now), USAGE.c.granted == limit.amount - left)
        return left if await self._tx.change(still.values(granted=limit.amount)) else 0

    async def use(self, limit: Limit, *, bucket: str, now: float, amount: int) -> None:
        """More than was given: it is counted although there may be nothing left."""
        await self._ensured(limit, bucket, now)
        changed = update(USAGE).where(*self._here(limit, bucket, now))
        await self._tx.change(changed.values(granted=USAGE.c.granted + amount))

    async def give_back(self, limit: Limit, *, bucket: str, now: float, amount: int) -> None:
        """Never more than was given."""
        enough = USAGE.c.granted >= amount
        changed = update(USAGE).where(*self._here(limit, bucket, now), enough)
        await self._tx.change(changed.values(granted=USAGE.c.granted - amount))

    async def granted(self, limit: Limit, *, bucket: str, now: float) -> int:
        row = await self._tx.row(select(USAGE.c.granted).where(*self._here(limit, bucket, now)))
        return int(row["granted"]) if row else 0

    async def granted_now(self, limits: Sequence[Limit], *, now: float) -> Mapping[str, int]:
        """By limit, of all its buckets together, in the window that runs now."""
        totals: dict[str, int] = {}
        for limit in limits:
            where = (USAGE.c.limit_id == limit.id, USAGE.c.number == limit.window(now)[0])
            rows = await self._tx.rows(select(USAGE.c.granted).where(*where, self._tx.mine(USAGE.c.tenant)))
            totals[limit.id] = sum(int(row["granted"]) for row in rows)
        return totals

    async def purge(self, *, over_before: float, limit: int) -> int:
        self._tx.require_mine(None)
        keys = (USAGE.c.limit_id, USAGE.c.bucket, USAGE.c.number)
        some = await self._tx.rows(select(*keys).where(USAGE.c.over_at < over_before).limit(limit))
        for row in some:
            where = [column == row[column.name] for column in keys]
            await self._tx.change(delete(USAGE).where(*where))
        return len(some)

    async def _ensured(self, limit: Limit, bucket: str, now: float) -> None:
        window, ends_in = limit.window(now)
        row = {
            "limit_id": limit.id,
            "bucket": bucket,
            "number": window,
            "tenant": limit.tenant,
            "granted": 0,
            "over_at": now + ends_in,
        }
        self._tx.require_mine(limit.tenant)
        await self._tx.change(self._tx.insert_once(USAGE, by=("limit_id", "bucket", "number")), row)

    def _here(self, limit: Limit, bucket: str, now: float) -> tuple[Any, ...]:
        return (
            USAGE.c.limit_id == limit.id,
            USAGE.c.bucket == bucket,
            USAGE.c.number == limit.window(now)[0],
            self._tx.mine(USAGE.c.tenant),
        )
