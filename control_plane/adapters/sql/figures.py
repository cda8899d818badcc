"""What the database says about how things stand (`ports.Figures`): counts by an index, or of a small table."""

from typing import Any

from sqlalchemy import func, select

from control_plane.adapters.sql.alarms import DELIVERIES
from control_plane.adapters.sql.chain import SqlAuditChain
from control_plane.adapters.sql.repositories import CREDENTIALS, OUTBOX, TENANTS, VERSIONS, Transaction, table_of
from control_plane.adapters.sql.tables import RotationScheduleRow
from control_plane.core.records import VersionState
from control_plane.ports import Figures

SCHEDULES = table_of(RotationScheduleRow)


async def figures(tx: Transaction, *, now: float) -> Figures:
    tx.require_mine(None)
    due = (
        select(func.count())
        .select_from(SCHEDULES.join(VERSIONS, VERSIONS.c.credential_id == SCHEDULES.c.credential_id))
        .where(VERSIONS.c.state == VersionState.ACTIVE.value, VERSIONS.c.created_at + SCHEDULES.c.every_seconds <= now)
    )
    statement: Any = select(
        select(func.coalesce(func.max(OUTBOX.c.sequence), 0)).scalar_subquery().label("outbox_sequence"),
        select(func.count()).select_from(TENANTS).scalar_subquery().label("tenants"),
        select(func.count()).select_from(CREDENTIALS).scalar_subquery().label("credentials"),
        due.scalar_subquery().label("credentials_due"),
        select(func.count()).where(DELIVERIES.c.done_at.is_(None)).scalar_subquery().label("deliveries_open"),
    )
    row, tail = await tx.row(statement), await SqlAuditChain(tx).tail()
    assert row is not None
    return Figures(**row, unchained_events=tail.events, unchained_since=tail.oldest_at)
