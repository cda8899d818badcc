"""Rotations and the replies that are counted while they last, in SQL (`ports.Rotations`).

Rule: as in `repositories`: no statement without the scope.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from sqlalchemy import ColumnElement, Table, and_, case, delete, distinct, func, or_, select

from control_plane.adapters.sql.rows import to_columns, to_record, to_records
from control_plane.adapters.sql.tables import RotationReplyRow, RotationRow, RotationScheduleRow
from control_plane.contract.caller import CredentialId
from control_plane.core.records import RUNNING_PHASES, Rotation, RotationSchedule
from control_plane.ports import ReplyCount

if TYPE_CHECKING:
    from control_plane.adapters.sql.repositories import Transaction

assert isinstance(RotationRow.__table__, Table)
assert isinstance(RotationReplyRow.__table__, Table)
assert isinstance(RotationScheduleRow.__table__, Table)
ROTATIONS: Final[Table] = RotationRow.__table__
REPLIES: Final[Table] = RotationReplyRow.__table__
SCHEDULES: Final[Table] = RotationScheduleRow.__table__


def is_running() -> ColumnElement[bool]:
    return or_(*(ROTATIONS.c.phase == phase for phase in sorted(phase.value for phase in RUNNING_PHASES)))


class SqlRotations:
    def __init__(self, tx: "Transaction") -> None:
        self._tx = tx

    async def put(self, rotation: Rotation) -> None:
        self._tx.require_mine(rotation.tenant)
        columns = to_columns(rotation)
        statement = self._tx.insert(ROTATIONS)
        await self._tx.change(statement.on_conflict_do_update(index_elements=["credential_id"], set_=columns), columns)

    async def of(self, credential: CredentialId) -> Rotation | None:
        where = (ROTATIONS.c.credential_id == credential, self._tx.mine(ROTATIONS.c.tenant))
        row = await self._tx.row(select(ROTATIONS).where(*where))
        return to_record(Rotation, row) if row else None

    async def due(self, now: float, *, limit: int) -> Sequence[Rotation]:
        return await self._many(or_(ROTATIONS.c.ends_at <= now, ROTATIONS.c.probe_due_at <= now), limit)

    async def running(self, *, limit: int) -> Sequence[Rotation]:
        return await self._many(None, limit)

    async def _many(self, condition: ColumnElement[bool] | None, limit: int) -> Sequence[Rotation]:
        where = [is_running(), self._tx.mine(ROTATIONS.c.tenant)]
        if condition is not None:
            where.append(condition)
        statement = select(ROTATIONS).where(and_(*where)).order_by(ROTATIONS.c.since).limit(limit)
        return to_records(Rotation, await self._tx.rows(statement))

    async def count(self, counts: Sequence[ReplyCount]) -> None:
        for each in counts:
            self._tx.require_mine(each.tenant)
        new = self._tx.insert(REPLIES)
        added = new.on_conflict_do_update(
            index_elements=["credential_id", "version", "subject_sha256", "bucket"],
            set_={
                "replies": REPLIES.c.replies + new.excluded.replies,
                "failures": REPLIES.c.failures + new.excluded.failures,
            },
        )
        # In one order everywhere, so that two reports at once do not wait for each other.
        ordered = sorted(counts, key=lambda each: (each.credential_id, each.version, each.subject_sha256, each.bucket))
        await self._tx.change_each(added, [asdict(each) for each in ordered])

    async def replies(self, credential: CredentialId, *, from_bucket: int) -> Mapping[int, tuple[int, int, int]]:
        failing = case((REPLIES.c.failures > 0, REPLIES.c.subject_sha256))
        statement = (
            select(
                REPLIES.c.version,
                func.sum(REPLIES.c.replies).label("replies"),
                func.sum(REPLIES.c.failures).label("failures"),
                func.count(distinct(failing)).label("subjects"),
            )
            .where(
                REPLIES.c.credential_id == credential,
                REPLIES.c.bucket >= from_bucket,
                self._tx.mine(REPLIES.c.tenant),
            )
            .group_by(REPLIES.c.version)
        )
        rows = await self._tx.rows(statement)
        return {row["version"]: (int(row["replies"]), int(row["failures"]), int(row["subjects"])) for row in rows}

    async def forget_replies(self, credential: CredentialId) -> None:
        where = (REPLIES.c.credential_id == credential, self._tx.mine(REPLIES.c.tenant))
        await self._tx.change(delete(REPLIES).where(*where))

    # --- schedules

    async def put_schedule(self, schedule: RotationSchedule) -> None:
        self._tx.require_mine(schedule.tenant)
        columns = to_columns(schedule)
        statement = self._tx.insert(SCHEDULES)
        await self._tx.change(statement.on_conflict_do_update(index_elements=["credential_id"], set_=columns), columns)

    async def schedule_of(self, credential: CredentialId) -> RotationSchedule | None:
        where = (SCHEDULES.c.credential_id == credential, self._tx.mine(SCHEDULES.c.tenant))
        row = await self._tx.row(select(SCHEDULES).where(*where))
        return to_record(RotationSchedule, row) if row else None

    async def remove_schedule(self, credential: CredentialId) -> bool:
        where = (SCHEDULES.c.credential_id == credential, self._tx.mine(SCHEDULES.c.tenant))
        return await self._tx.change(delete(SCHEDULES).where(*where)) > 0

    async def schedules_to_look_at(self, now: float, *, limit: int) -> Sequence[RotationSchedule]:
        where = (SCHEDULES.c.look_at <= now, self._tx.mine(SCHEDULES.c.tenant))
        rows = await self._tx.rows(select(SCHEDULES).where(*where).order_by(SCHEDULES.c.look_at).limit(limit))
        return to_records(RotationSchedule, rows)
