"""Every envelope of the database, and the key-encryption keys it is under (`ports.SealedRows`, `ports.Keks`).

Rule: an envelope is exchanged only for the one that was read (compare and swap), so that a re-wrap never undoes a
rotation, and two replicas that work on the same row do no harm.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Select,
    String,
    Table,
    and_,
    cast,
    func,
    insert,
    literal,
    or_,
    select,
    union_all,
    update,
)

from control_plane.adapters.sql.repositories import CREDENTIALS, KEYS, MINTED, VERSIONS, Transaction, table_of
from control_plane.adapters.sql.rows import to_columns, to_record
from control_plane.adapters.sql.sources import SOURCES
from control_plane.adapters.sql.tables import KekRow, RewrapRow
from control_plane.core.records import Credential, KnownKek, OwnKey, Rewrap, Source
from control_plane.core.sealing import credential_aad, minted_aad, own_key_aad, source_aad
from control_plane.ports import SealedRow, UnreadableRowError

KEKS, REWRAPS = table_of(KekRow), table_of(RewrapRow)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One table with envelopes: how its rows are found, ordered and named, and what each is sealed to."""

    name: str
    table: Table
    envelope_name: str
    key_names: tuple[str, ...]
    order: ColumnElement[Any]
    statement: Select[Any]
    describe: Callable[[Mapping[str, Any]], tuple[bytes, str | None, str]]
    """The AAD, the tenant, and a name for people. Raises `UnreadableRowError`."""
    can_be_empty: bool = False

    @property
    def envelope(self) -> ColumnElement[Any]:
        return self.table.c[self.envelope_name]

    @property
    def key(self) -> tuple[ColumnElement[Any], ...]:
        return tuple(self.table.c[name] for name in self.key_names)

    @property
    def kek_id(self) -> ColumnElement[Any]:
        return self.table.c.kek_id


def _of_version(row: Mapping[str, Any]) -> tuple[bytes, str | None, str]:
    credential = to_record(Credential, row, prefix="c_")
    return credential_aad(credential, version=row["version"]), credential.tenant, credential.name


def _of_minted(row: Mapping[str, Any]) -> tuple[bytes, str | None, str]:
    credential = to_record(Credential, row, prefix="c_")
    return (
        minted_aad(credential, version=row["version"], expires_at=row["expires_at"]),
        credential.tenant,
        credential.name,
    )


def _of_own_key(row: Mapping[str, Any]) -> tuple[bytes, str | None, str]:
    key = to_record(OwnKey, row)
    return own_key_aad(key_id=key.id, purpose=key.purpose), None, f"our own {key.purpose.value} key"


def _of_source(row: Mapping[str, Any]) -> tuple[bytes, str | None, str]:
    source = to_record(Source, row)
    return source_aad(source), None, f"source {source.name}"


def _numbered(table: Table) -> ColumnElement[Any]:
    """Rows of a credential in the order of their versions."""
    return table.c.credential_id + literal(" ") + func.substr(cast(table.c.version + 10**9, String), 2)


_CREDENTIAL_COLUMNS: Final = [column.label("c_" + column.name) for column in CREDENTIALS.c]

_KINDS: Final = (
    _Kind(
        name="credential",
        table=VERSIONS,
        envelope_name="envelope",
        key_names=("credential_id", "version"),
        order=_numbered(VERSIONS),
        statement=select(VERSIONS, *_CREDENTIAL_COLUMNS).join(
            CREDENTIALS, (CREDENTIALS.c.id == VERSIONS.c.credential_id) & (CREDENTIALS.c.tenant == VERSIONS.c.tenant)
        ),
        describe=_of_version,
        can_be_empty=True,
    ),
    _Kind(
        name="minted value",
        table=MINTED,
        envelope_name="envelope",
        key_names=("credential_id", "version"),
        order=_numbered(MINTED),
        statement=select(MINTED, *_CREDENTIAL_COLUMNS).join(
            CREDENTIALS, (CREDENTIALS.c.id == MINTED.c.credential_id) & (CREDENTIALS.c.tenant == MINTED.c.tenant)
        ),
        describe=_of_minted,
        can_be_empty=True,
    ),
    _Kind(
        name="own key",
        table=KEYS,
        envelope_name="envelope",
        key_names=("id",),
        order=KEYS.c.id,
        statement=select(KEYS),
        describe=_of_own_key,
    ),
    _Kind(
        name="source",
        table=SOURCES,
        envelope_name="seal",
        key_names=("name",),
        order=SOURCES.c.name,
        statement=select(SOURCES),
        describe=_of_source,
    ),
)


class SqlSealedRows:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def count_by_kek(self) -> Mapping[str, int]:
        self._tx.require_mine(None)
        every = union_all(*(select(kind.kek_id).where(kind.kek_id.is_not(None)) for kind in _KINDS)).subquery()
        rows = await self._tx.rows(select(every.c.kek_id, func.count().label("envelopes")).group_by(every.c.kek_id))
        return {row["kek_id"]: row["envelopes"] for row in rows}

    async def not_under(self, kek_id: str, *, after: str, limit: int) -> Sequence[SealedRow]:
        self._tx.require_mine(None)
        found: list[SealedRow] = []
        for number, kind in enumerate(_KINDS):
            rest = limit - len(found)
            seen, _, last = after.partition(" ")
            if rest <= 0 or (seen and int(seen) > number):
                continue
            statement = kind.statement.add_columns(kind.order.label("place")).where(
                kind.kek_id != kek_id, kind.envelope.is_not(None)
            )
            if seen and int(seen) == number:
                statement = statement.where(kind.order > last)
            for row in await self._tx.rows(statement.order_by(kind.order).limit(rest)):
                found.append(_sealed_row(number, kind, row))
        return found

    async def replace(self, row: SealedRow, *, envelope: bytes, kek_id: str) -> bool:
        return await self._exchange(row, {_kind(row).envelope_name: envelope, "kek_id": kek_id})

    async def forget(self, row: SealedRow) -> bool:
        if not _kind(row).can_be_empty:
            return False
        return await self._exchange(row, {_kind(row).envelope_name: None, "kek_id": None})

    async def _exchange(self, row: SealedRow, values: Mapping[str, Any]) -> bool:
        self._tx.require_mine(None)
        kind = _kind(row)
        where = [column == value for column, value in zip(kind.key, row.key, strict=True)]
        return await self._tx.change(update(kind.table).where(*where, kind.envelope == row.envelope).values(values)) > 0


def _sealed_row(number: int, kind: _Kind, row: Mapping[str, Any]) -> SealedRow:
    try:
        aad, tenant, label = kind.describe(row)
    except UnreadableRowError:
        # Nothing opens it: it is counted among those that stay as they are.
        aad, tenant, label = b"", None, f"an unreadable {kind.name}"
    return SealedRow(
        place=f"{number} {row['place']}",
        kind=kind.name,
        key=tuple(row[name] for name in kind.key_names),
        tenant=tenant,  # type: ignore[arg-type]
        label=label,
        aad=aad,
        kek_id=row["kek_id"],
        envelope=row[kind.envelope_name],
    )


def _kind(row: SealedRow) -> _Kind:
    return next(kind for kind in _KINDS if kind.name == row.kind)


class SqlKeks:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def see(self, kek: KnownKek) -> bool:
        self._tx.require_mine(None)
        return await self._tx.change(self._tx.insert_once(KEKS, by="id").values(to_columns(kek))) > 0

    async def place(self, kek_id: str, place: str) -> None:
        self._tx.require_mine(None)
        await self._tx.change(update(KEKS).where(KEKS.c.id == kek_id, KEKS.c.place != place).values(place=place))

    async def list(self) -> Sequence[KnownKek]:
        self._tx.require_mine(None)
        rows = await self._tx.rows(select(KEKS).order_by(KEKS.c.first_seen_at, KEKS.c.id))
        return [to_record(KnownKek, row) for row in rows]

    async def retire(self, kek_id: str, at: float) -> bool:
        self._tx.require_mine(None)
        where = (KEKS.c.id == kek_id, KEKS.c.retired_at.is_(None))
        return await self._tx.change(update(KEKS).where(*where).values(retired_at=at)) > 0

    async def start(self, rewrap: Rewrap) -> None:
        self._tx.require_mine(None)
        await self._tx.change(insert(REWRAPS), to_columns(rewrap))

    async def latest(self) -> Rewrap | None:
        self._tx.require_mine(None)
        unfinished_first = REWRAPS.c.finished_at.is_not(None)
        newest = select(REWRAPS).order_by(unfinished_first, REWRAPS.c.started_at.desc(), REWRAPS.c.id.desc())
        row = await self._tx.row(newest.limit(1))
        return to_record(Rewrap, row) if row else None

    async def claim(self, rewrap: str, *, runner: str, now: float, idle_since: float) -> bool:
        free = or_(REWRAPS.c.runner.is_(None), REWRAPS.c.runner == runner, REWRAPS.c.moved_at < idle_since)
        return await self._update(rewrap, free, {"runner": runner, "moved_at": now})

    async def move(self, rewrap: str, *, runner: str, rewrapped: int, now: float) -> bool:
        values = {"rewrapped": REWRAPS.c.rewrapped + rewrapped, "moved_at": now}
        return await self._update(rewrap, REWRAPS.c.runner == runner, values)

    async def finish(self, rewrap: str, *, runner: str, unopenable: int, now: float) -> bool:
        values = {"unopenable": unopenable, "moved_at": now, "finished_at": now}
        return await self._update(rewrap, REWRAPS.c.runner == runner, values)

    async def _update(self, rewrap: str, condition: ColumnElement[bool], values: Mapping[str, Any]) -> bool:
        self._tx.require_mine(None)
        where = and_(REWRAPS.c.id == rewrap, REWRAPS.c.finished_at.is_(None), condition)
        return await self._tx.change(update(REWRAPS).where(where).values(values)) > 0
