"""The audit trail's chain, in SQL (`ports.AuditChain`).

Rule: an event that was written is never written again. What links it stands in rows of its own; which events wait to be
linked is a queue that the database itself fills with every event (a trigger), so that none can be left out, however
late its transaction commits.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Table, Text, cast, delete, func, insert, select
from sqlalchemy.sql.elements import ColumnElement

from control_plane.adapters.sql.repositories import AUDIT, Transaction, table_of
from control_plane.adapters.sql.tables import AuditAnchorRow, AuditHeadRow, AuditUnchainedRow
from control_plane.core.chain import Anchor, Head
from control_plane.ports import StoredEvent, UnchainedEvent, UnchainedTail

HEADS: Final[Table] = table_of(AuditHeadRow)
ANCHORS: Final[Table] = table_of(AuditAnchorRow)
UNCHAINED: Final[Table] = table_of(AuditUnchainedRow)

_CHAIN_LOCK: Final = 0x636F6168
"""PostgreSQL: held by the one who links, for as long as its transaction lasts."""

_LEAF_BYTES: Final = 32
_BESIDE: Final = ("event_id", "at", "tenant", "request_id", "action", "code")
"""Columns that repeat what the record says, to be looked up by."""
_STORED: Final = [*(AUDIT.c[name] for name in _BESIDE), cast(AUDIT.c.record, Text).label("text")]
"""The record as text: one that is no longer JSON is a finding, not an error."""


class SqlAuditChain:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    # --- linking

    async def lease(self) -> bool:
        """SQLite has one writer at a time anyhow."""
        self._tx.require_mine(None)
        if not self._tx.is_postgresql:
            return True
        row = await self._tx.row(select(func.pg_try_advisory_xact_lock(_CHAIN_LOCK)))
        return row is not None and any(row.values())

    async def unchained(self, limit: int) -> Sequence[UnchainedEvent]:
        statement = (
            select(UNCHAINED.c.sequence, UNCHAINED.c.tenant.label("queued_for"), *_STORED)
            .select_from(UNCHAINED.outerjoin(AUDIT, AUDIT.c.sequence == UNCHAINED.c.sequence))
            .where(self._mine(UNCHAINED))
            .order_by(UNCHAINED.c.sequence)
            .limit(limit)
        )
        return [
            UnchainedEvent(row["sequence"], row["queued_for"], _stored(row)) for row in await self._tx.rows(statement)
        ]

    async def tail(self) -> UnchainedTail:
        statement: Any = select(func.count().label("events"), func.min(AUDIT.c.at).label("oldest")).select_from(
            UNCHAINED.outerjoin(AUDIT, AUDIT.c.sequence == UNCHAINED.c.sequence)
        )
        row = await self._tx.row(statement.where(self._mine(UNCHAINED)))
        assert row is not None
        return UnchainedTail(row["events"], row["oldest"])

    async def add(self, head: Head, sequences: Sequence[int]) -> None:
        self._tx.require_mine(None)
        await self._tx.change(
            insert(HEADS),
            {
                "trail": head.tenant or "",
                "number": head.number,
                "tenant": head.tenant,
                "first": head.first,
                "last": head.last,
                "leaves": bytes.fromhex("".join(head.leaves)),
                "sequences": list(sequences),
                "previous": head.previous,
                "at": head.at,
                "key_id": head.key_id,
                "signature": head.signature,
            },
        )
        await self._tx.change(delete(UNCHAINED).where(UNCHAINED.c.sequence.in_(list(sequences))))

    # --- reading

    async def last(self, tenant: str | None) -> Head | Anchor | None:
        statement = select(HEADS).where(HEADS.c.trail == (tenant or ""), self._mine(HEADS))
        row = await self._tx.row(statement.order_by(HEADS.c.number.desc()).limit(1))
        return _head(row) if row is not None else await self.anchor(tenant)

    async def ends_not_signed_by(self, key_ids: Sequence[str], *, limit: int) -> Sequence[Head | Anchor]:
        self._tx.require_mine(None)
        newest = select(HEADS.c.trail, func.max(HEADS.c.number).label("number")).group_by(HEADS.c.trail).subquery()
        heads = await self._tx.rows(
            select(HEADS)
            .join(newest, (HEADS.c.trail == newest.c.trail) & (HEADS.c.number == newest.c.number))
            .where(HEADS.c.key_id.not_in(key_ids))
            .limit(limit)
        )
        anchors = await self._tx.rows(select(ANCHORS).where(ANCHORS.c.key_id.not_in(key_ids)).limit(limit - len(heads)))
        return [*map(_head, heads), *map(_anchor, anchors)]

    async def anchor(self, tenant: str | None) -> Anchor | None:
        row = await self._tx.row(select(ANCHORS).where(ANCHORS.c.trail == (tenant or ""), self._mine(ANCHORS)))
        return _anchor(row) if row is not None else None

    async def heads(self, tenant: str | None, *, after_number: int, limit: int) -> Sequence[Head]:
        where = (HEADS.c.trail == (tenant or ""), HEADS.c.number > after_number, self._mine(HEADS))
        rows = await self._tx.rows(select(HEADS).where(*where).order_by(HEADS.c.number).limit(limit))
        return [_head(row) for row in rows]

    async def head_through(self, tenant: str | None, position: int) -> Head | None:
        where = (HEADS.c.trail == (tenant or ""), HEADS.c.last <= position, self._mine(HEADS))
        row = await self._tx.row(select(HEADS).where(*where).order_by(HEADS.c.number.desc()).limit(1))
        return _head(row) if row is not None else None

    async def events_of(self, head: Head) -> Sequence[StoredEvent | None]:
        where = (HEADS.c.trail == (head.tenant or ""), HEADS.c.number == head.number, self._mine(HEADS))
        row = await self._tx.row(select(HEADS.c.sequences).where(*where))
        sequences = _numbers(row["sequences"]) if row is not None else []
        found = await self._tx.rows(
            select(AUDIT.c.sequence, *_STORED).where(AUDIT.c.sequence.in_(sequences), self._mine(AUDIT))
        )
        by_sequence = {row["sequence"]: _stored(row) for row in found}
        return [by_sequence.get(sequence) for sequence in sequences]

    async def unchained_of(self, tenant: str | None, *, limit: int) -> Sequence[StoredEvent | None]:
        statement = (
            select(*_STORED)
            .select_from(UNCHAINED.outerjoin(AUDIT, AUDIT.c.sequence == UNCHAINED.c.sequence))
            .where(UNCHAINED.c.tenant == tenant if tenant is not None else UNCHAINED.c.tenant.is_(None))
            .where(self._mine(UNCHAINED))
            .order_by(UNCHAINED.c.sequence)
            .limit(limit)
        )
        return [_stored(row) for row in await self._tx.rows(statement)]

    async def tenants(self) -> Sequence[str | None]:
        of = [select(table.c.tenant).where(self._mine(table)) for table in (HEADS, ANCHORS, UNCHAINED)]
        rows = await self._tx.rows(select(of[0].union(*of[1:]).subquery().c.tenant))
        return sorted((row["tenant"] for row in rows), key=lambda tenant: tenant or "")

    # --- retention

    async def oldest(self, *, before: float, limit: int) -> Sequence[Head]:
        self._tx.require_mine(None)
        rows = await self._tx.rows(
            select(HEADS).where(HEADS.c.at < before).order_by(HEADS.c.trail, HEADS.c.number).limit(limit)
        )
        return [_head(row) for row in rows]

    async def forget(self, heads: Sequence[Head], anchor: Anchor) -> int:
        self._tx.require_mine(None)
        trail, removed = anchor.tenant or "", 0
        for head in heads:
            where = (HEADS.c.trail == trail, HEADS.c.number == head.number)
            row = await self._tx.row(select(HEADS.c.sequences).where(*where))
            if row is not None:
                sequences = _numbers(row["sequences"])
                removed += await self._tx.change(delete(AUDIT).where(AUDIT.c.sequence.in_(sequences)))
                await self._tx.change(delete(HEADS).where(*where))
        await self._tx.change(delete(ANCHORS).where(ANCHORS.c.trail == trail))
        await self._tx.change(
            insert(ANCHORS),
            {
                "trail": trail,
                "tenant": anchor.tenant,
                "number": anchor.number,
                "position": anchor.position,
                "head": anchor.head,
                "at": anchor.at,
                "key_id": anchor.key_id,
                "signature": anchor.signature,
            },
        )
        return removed

    def _mine(self, table: Table) -> ColumnElement[bool]:
        return self._tx.mine(table.c.tenant)


def _head(row: Any) -> Head:
    leaves = bytes(row["leaves"]).hex()
    return Head(
        tenant=row["tenant"],
        number=row["number"],
        first=row["first"],
        leaves=tuple(leaves[at : at + 2 * _LEAF_BYTES] for at in range(0, len(leaves), 2 * _LEAF_BYTES)),
        previous=row["previous"],
        at=row["at"],
        key_id=row["key_id"],
        signature=row["signature"],
    )


def _anchor(row: Any) -> Anchor:
    return Anchor(
        tenant=row["tenant"],
        number=row["number"],
        position=row["position"],
        head=row["head"],
        at=row["at"],
        key_id=row["key_id"],
        signature=row["signature"],
    )


def _stored(row: Any) -> StoredEvent | None:
    if row["text"] is None:
        return None
    try:
        record = json.loads(row["text"])
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        return StoredEvent({"unreadable": True}, differs=("record",))
    # A record leaves out what is empty: an event that belongs to no request has no request id there, and "" beside it.
    return StoredEvent(record, differs=tuple(name for name in _BESIDE if (row[name] or None) != record.get(name)))


def _numbers(value: Any) -> list[int]:
    """Rows of a head, as it says; an edited list of something else names none."""
    return [each for each in value if isinstance(each, int)] if isinstance(value, list) else []
