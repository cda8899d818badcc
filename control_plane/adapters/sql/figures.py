"""What the database says about how things stand (`ports.Figures`): counts by an index, or of a small table."""

from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, case, func, select

from control_plane.adapters.sql.alarms import DELIVERIES
from control_plane.adapters.sql.chain import SqlAuditChain
from control_plane.adapters.sql.repositories import CREDENTIALS, OUTBOX, TENANTS, VERSIONS, Transaction, table_of
from control_plane.adapters.sql.sealed import SqlSealedRows
from control_plane.adapters.sql.tables import RotationScheduleRow
from control_plane.core.records import VersionState
from control_plane.ports import AGES, Figures

SCHEDULES = table_of(RotationScheduleRow)


async def figures(tx: Transaction, *, now: float) -> Figures:
    tx.require_mine(None)
    statement: Any = select(
        select(func.coalesce(func.max(OUTBOX.c.sequence), 0)).scalar_subquery().label("outbox_sequence"),
        select(func.count()).select_from(TENANTS).scalar_subquery().label("tenants"),
        select(func.count()).select_from(CREDENTIALS).scalar_subquery().label("credentials"),
        _scheduled(now, SCHEDULES.c.every_seconds).label("credentials_due"),
        _scheduled(now, SCHEDULES.c.every_seconds - SCHEDULES.c.remind_seconds).label("credentials_reminded"),
        select(func.count()).where(DELIVERIES.c.done_at.is_(None)).scalar_subquery().label("deliveries_open"),
    )
    row, tail = await tx.row(statement), await SqlAuditChain(tx).tail()
    assert row is not None
    return Figures(
        **row,
        **await _ages(tx, now),
        envelopes=await SqlSealedRows(tx).count_by_kek(),
        unchained_events=tail.events,
        unchained_since=tail.oldest_at,
    )


def _scheduled(now: float, age: ColumnElement[float]) -> ScalarSelect[Any]:
    """How many credentials with a schedule are at that age of it, or past it."""
    return (
        select(func.count())
        .select_from(SCHEDULES.join(VERSIONS, VERSIONS.c.credential_id == SCHEDULES.c.credential_id))
        .where(VERSIONS.c.state == VersionState.ACTIVE.value, VERSIONS.c.created_at + age <= now)
        .scalar_subquery()
    )


async def _ages(tx: Transaction, now: float) -> dict[str, Any]:
    """Of the versions in use. One that a faster clock dated into the future is as old as it can be: not at all."""
    age = case((VERSIONS.c.created_at < now, now - VERSIONS.c.created_at), else_=0.0)
    counts = [func.count(case((age <= limit, 1))).label(f"within_{limit:.0f}") for limit in AGES]
    sums: Any = select(*counts, func.count().label("all"), func.sum(age).label("sum"), func.max(age).label("oldest"))
    row = await tx.row(sums.where(VERSIONS.c.state == VersionState.ACTIVE.value))
    assert row is not None
    return {
        "ages": [row[count.name] for count in counts],
        "in_use": row["all"],
        "ages_seconds": row["sum"] or 0.0,
        "oldest_seconds": row["oldest"] or 0.0,
    }
