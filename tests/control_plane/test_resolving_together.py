"""Questions of proxies that are looked for together: what is wrong with one of them is that one's alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from control_plane.adapters.sql.engine import open_database
from control_plane.adapters.sql.migrate import migrate
from control_plane.adapters.sql.records import SqlRecords
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.wire import AskCaller, ResolvedPlaceholder, ResolveRequest
from control_plane.ports import Scope, UnreadableRowError
from tests.control_plane.rotating import Replica


class Counted:
    """A store that counts how often it is looked at."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self.reads = 0

    @asynccontextmanager
    async def read(self, scope: Scope) -> AsyncIterator[SqlRecords]:
        self.reads += 1
        async with self._store.read(scope) as records:
            yield records


@pytest.mark.guards(
    "control_plane/resolution.py",
    "except (NotAtHandError, UnreadableRowError) as its_own",
    "except NotAtHandError as its_own",
)
async def test_a_row_that_was_edited_makes_nobody_look_again(tmp_path: Path) -> None:
    database = open_database(f"sqlite+aiosqlite:///{tmp_path}/control-plane.sqlite")
    await migrate(database.engine)
    replica = Replica(database)
    await replica.grant(await replica.add_credential(), "alice", "bob")
    async with database.engine.begin() as connection:
        edited = {"sha256": replica.tokens["alice"]}
        await connection.execute(text("UPDATE tokens SET kind = 'nonsense' WHERE sha256 = :sha256"), edited)
    counted = Counted(replica.store)
    replica.resolution._store = counted  # type: ignore[assignment]

    heard = await asyncio.gather(
        replica.resolution(ResolveRequest(AskCaller(replica.tokens["alice"]))),
        *(replica.resolve(replica.tokens["bob"], "bob") for _ in range(8)),
        return_exceptions=True,
    )
    await database.close()

    assert isinstance(heard[0], UnreadableRowError)
    assert all(isinstance(each, ResolvedPlaceholder) for each in heard[1:])
    assert counted.reads == 1
