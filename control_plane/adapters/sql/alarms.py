"""Alarms, where they are told, and decoys, in SQL (`ports.Alarms`, `ports.Decoys`).

Rule: one alarm for each placeholder, caller and window, by a unique key: of replicas that see the same thing at once
one raises it and the others count. A delivery is claimed by moving its due time in one conditional update.
"""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Table, delete, exists, func, insert, or_, select, update

from control_plane.adapters.sql.repositories import Transaction, table_of
from control_plane.adapters.sql.rows import to_columns, to_record, to_records
from control_plane.adapters.sql.tables import (
    AlarmDeliveryRow,
    AlarmHookRow,
    AlarmRow,
    AlarmSettingsRow,
    DecoyRow,
)
from control_plane.contract.caller import TenantId
from control_plane.core.alarms import Alarm, AlarmHook, Decoy, Delivery, Sighting

ALARMS: Final[Table] = table_of(AlarmRow)
HOOKS: Final[Table] = table_of(AlarmHookRow)
DELIVERIES: Final[Table] = table_of(AlarmDeliveryRow)
SETTINGS: Final[Table] = table_of(AlarmSettingsRow)
DECOYS: Final[Table] = table_of(DecoyRow)

_ONE_ALARM: Final = ("placeholder_id", "caller_key", "window_number")


class SqlAlarms:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, alarm: Alarm) -> bool:
        self._tx.require_mine(alarm.tenant)
        columns = to_columns(alarm)
        columns["window_number"] = columns.pop("window")
        return await self._tx.change(self._tx.insert_once(ALARMS, by=_ONE_ALARM), columns) == 1

    async def again(self, sighting: Sighting, count: int) -> None:
        where = (
            ALARMS.c.placeholder_id == sighting.placeholder_id,
            ALARMS.c.caller_key == sighting.caller_key,
            ALARMS.c.window_number == sighting.window,
            self._tx.mine(ALARMS.c.tenant),
        )
        await self._tx.change(update(ALARMS).where(*where).values(count=ALARMS.c["count"] + count, last_at=sighting.at))

    async def mark_revoked(self, alarm: Alarm) -> None:
        where = (ALARMS.c.id == alarm.id, self._tx.mine(ALARMS.c.tenant))
        await self._tx.change(update(ALARMS).where(*where).values(revoked=True))

    async def get(self, alarm_id: str) -> Alarm | None:
        row = await self._tx.row(_ALARM.where(ALARMS.c.id == alarm_id, self._tx.mine(ALARMS.c.tenant)))
        return to_record(Alarm, row) if row else None

    async def list(self, *, limit: int) -> Sequence[Alarm]:
        statement = _ALARM.where(self._tx.mine(ALARMS.c.tenant)).order_by(ALARMS.c.first_at.desc(), ALARMS.c.id)
        return to_records(Alarm, await self._tx.rows(statement.limit(limit)))

    async def purge(self, *, before: float, limit: int) -> int:
        self._tx.require_mine(None)
        some = select(ALARMS.c.id).where(ALARMS.c.last_at < before).limit(limit)
        return await self._tx.change(delete(ALARMS).where(ALARMS.c.id.in_(some)))

    # --- where they are told

    async def add_hook(self, hook: AlarmHook) -> None:
        self._tx.require_mine(hook.tenant)
        await self._tx.change(insert(HOOKS), to_columns(hook))

    async def hook(self, hook_id: str) -> AlarmHook | None:
        row = await self._tx.row(select(HOOKS).where(HOOKS.c.id == hook_id, self._tx.mine(HOOKS.c.tenant)))
        return to_record(AlarmHook, row) if row else None

    async def hooks(self, tenant: TenantId | None) -> Sequence[AlarmHook]:
        of = HOOKS.c.tenant == tenant if tenant is not None else HOOKS.c.tenant.is_(None)
        statement = select(HOOKS).where(of, self._tx.mine(HOOKS.c.tenant)).order_by(HOOKS.c.created_at, HOOKS.c.id)
        return to_records(AlarmHook, await self._tx.rows(statement))

    async def hooks_for(self, tenant: TenantId) -> Sequence[AlarmHook]:
        self._tx.require_mine(None)
        of = or_(HOOKS.c.tenant == tenant, HOOKS.c.tenant.is_(None))
        return to_records(AlarmHook, await self._tx.rows(select(HOOKS).where(of).order_by(HOOKS.c.id)))

    async def remove_hook(self, hook_id: str) -> None:
        await self._tx.change(delete(HOOKS).where(HOOKS.c.id == hook_id, self._tx.mine(HOOKS.c.tenant)))

    async def revokes(self, tenant: TenantId) -> bool:
        where = (SETTINGS.c.tenant == tenant, self._tx.mine(SETTINGS.c.tenant))
        row = await self._tx.row(select(SETTINGS.c.revoke_on_mismatch).where(*where))
        return bool(row and row["revoke_on_mismatch"])

    async def set_revokes(self, tenant: TenantId, value: bool) -> None:
        self._tx.require_mine(tenant)
        row = {"tenant": tenant, "revoke_on_mismatch": value}
        new = self._tx.insert(SETTINGS).values(row)
        await self._tx.change(new.on_conflict_do_update(index_elements=["tenant"], set_=row))

    # --- on their way

    async def send(self, alarm: Alarm, hook: AlarmHook, *, at: float) -> None:
        self._tx.require_mine(None)
        row = {
            "alarm_id": alarm.id,
            "hook_id": hook.id,
            "tenant": alarm.tenant,
            "attempts": 0,
            "due_at": at,
            "done_at": None,
            "error": None,
        }
        await self._tx.change(insert(DELIVERIES), row)

    async def due(self, *, now: float, limit: int) -> Sequence[Delivery]:
        self._tx.require_mine(None)
        where = (DELIVERIES.c.done_at.is_(None), DELIVERIES.c.due_at <= now)
        # Of each tenant the first, then of each the second: whoever has thousands waiting holds up nobody else.
        turn = func.row_number().over(partition_by=DELIVERIES.c.tenant, order_by=DELIVERIES.c.due_at).label("turn")
        waiting = select(DELIVERIES, turn).where(*where).subquery()
        columns = [waiting.c[column.name] for column in DELIVERIES.c]
        statement = select(*columns).order_by(waiting.c.turn, waiting.c.due_at).limit(limit)
        return to_records(Delivery, await self._tx.rows(statement))

    async def claim(self, delivery: Delivery, *, until: float) -> bool:
        values = {"due_at": until, "attempts": delivery.attempts + 1}
        unclaimed = (DELIVERIES.c.attempts == delivery.attempts, DELIVERIES.c.done_at.is_(None))
        return await self._tx.change(update(DELIVERIES).where(*_key(delivery), *unclaimed).values(values)) == 1

    async def settle(self, delivery: Delivery, *, due_at: float, done_at: float | None, error: str | None) -> None:
        values = {"due_at": due_at, "done_at": done_at, "error": error}
        await self._tx.change(update(DELIVERIES).where(*_key(delivery)).values(values))

    async def deliveries(self, alarm_ids: Sequence[str]) -> Sequence[Delivery]:
        where = (DELIVERIES.c.alarm_id.in_(list(alarm_ids)), self._tx.mine(DELIVERIES.c.tenant))
        return to_records(Delivery, await self._tx.rows(select(DELIVERIES).where(*where)))


class SqlDecoys:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, decoy: Decoy) -> None:
        self._tx.require_mine(decoy.tenant)
        await self._tx.change(insert(DECOYS), to_columns(decoy))

    async def get(self, decoy_id: str) -> Decoy | None:
        row = await self._tx.row(select(DECOYS).where(DECOYS.c.id == decoy_id, self._tx.mine(DECOYS.c.tenant)))
        return to_record(Decoy, row) if row else None

    async def by_fingerprint(self, sha256: str) -> Decoy | None:
        row = await self._tx.row(select(DECOYS).where(DECOYS.c.sha256 == sha256, self._tx.mine(DECOYS.c.tenant)))
        return to_record(Decoy, row) if row else None

    async def list(self) -> Sequence[Decoy]:
        statement = select(DECOYS).where(self._tx.mine(DECOYS.c.tenant)).order_by(DECOYS.c.created_at, DECOYS.c.id)
        return to_records(Decoy, await self._tx.rows(statement))

    async def used(self, decoy_id: str, at: float) -> None:
        where = (DECOYS.c.id == decoy_id, self._tx.mine(DECOYS.c.tenant))
        await self._tx.change(update(DECOYS).where(*where).values(used_at=at))

    async def remove(self, decoy_id: str) -> None:
        await self._tx.change(delete(DECOYS).where(DECOYS.c.id == decoy_id, self._tx.mine(DECOYS.c.tenant)))

    async def any_from_before(self, created_before: float) -> bool:
        self._tx.require_mine(None)
        row = await self._tx.row(
            select(exists(select(DECOYS.c.id).where(DECOYS.c.created_at < created_before)).label("found"))
        )
        return row is not None and bool(row["found"])


_ALARM: Final = select(ALARMS, ALARMS.c.window_number.label("window"))


def _key(delivery: Delivery) -> tuple[Any, ...]:
    return DELIVERIES.c.alarm_id == delivery.alarm_id, DELIVERIES.c.hook_id == delivery.hook_id
