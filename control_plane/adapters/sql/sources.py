"""Sources (`ports.Sources`): the platform's, so that a tenant's scope writes none of them."""

from collections.abc import Sequence

from sqlalchemy import delete, insert, select, update

from control_plane.adapters.sql.repositories import CREDENTIALS, Transaction, table_of
from control_plane.adapters.sql.rows import to_columns, to_record, to_records
from control_plane.adapters.sql.tables import SourceRow
from control_plane.core.records import Credential, Source

SOURCES = table_of(SourceRow)


class SqlSources:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, source: Source) -> None:
        self._tx.require_mine(None)
        await self._tx.change(insert(SOURCES), to_columns(source))

    async def replace(self, source: Source) -> None:
        self._tx.require_mine(None)
        await self._tx.change(update(SOURCES).where(SOURCES.c.name == source.name).values(to_columns(source)))

    async def get(self, name: str) -> Source | None:
        row = await self._tx.row(select(SOURCES).where(SOURCES.c.name == name))
        return to_record(Source, row) if row else None

    async def list(self) -> Sequence[Source]:
        return to_records(Source, await self._tx.rows(select(SOURCES).order_by(SOURCES.c.name)))

    async def remove(self, name: str) -> bool:
        self._tx.require_mine(None)
        return await self._tx.change(delete(SOURCES).where(SOURCES.c.name == name)) > 0

    async def users_of(self, name: str) -> Sequence[Credential]:
        mine = self._tx.mine(CREDENTIALS.c.tenant)
        rows = await self._tx.rows(select(CREDENTIALS).where(CREDENTIALS.c.secret_source.is_not(None), mine))
        found = to_records(Credential, rows)
        return [credential for credential in found if (credential.secret_source or {}).get("source") == name]
