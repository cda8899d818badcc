"""Databases for tests that go through the store: SQLite for every run, PostgreSQL where the two may differ."""

import asyncio
import atexit
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from control_plane.adapters.sql.engine import Database, open_database
from control_plane.adapters.sql.migrate import migrate
from tests.control_plane.postgresql import Logins, database_with_two_logins

BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
"""Where several write at once, the two databases differ."""

_names = count(1)


_templates: dict[str, str] = {}
"""By server: the database that those of `migrated_database` are copies of."""
_owned_templates: dict[str, str] = {}
"""Likewise for `migrated_by_owner`."""


async def new_database(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of an empty database."""
    if kind == "sqlite":
        return f"sqlite+aiosqlite:///{folder / 'store.sqlite'}"
    return await _created(request.getfixturevalue("server"))


async def migrated_database(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of a database that has its tables already: copied, which takes a tenth of migrating."""
    if kind == "sqlite":
        shutil.copy(migrated_file(), folder / "store.sqlite")
        return f"sqlite+aiosqlite:///{folder / 'store.sqlite'}"
    server: str = request.getfixturevalue("server")
    if server not in _templates:
        url = await _created(server)
        made = open_database(url)
        await migrate(made.engine)
        await made.close()
        _templates[server] = url.removeprefix(server)
    return await _created(server, like=_templates[server])


async def migrated_by_owner(server: str) -> Logins:
    """A database of its own with the documented logins, whose tables are the owner's."""
    if server not in _owned_templates:
        first = await database_with_two_logins(server)
        owner = open_database(first.owner)
        await migrate(owner.engine)
        await owner.close()
        _owned_templates[server] = first.owner.rpartition("/")[2]
    return await database_with_two_logins(server, like=_owned_templates[server])


async def _created(server: str, *, like: str = "template1") -> str:
    name = f"store_{next(_names)}"
    engine = create_async_engine(server + "postgres", isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {like}"))
    await engine.dispose()
    return f"{server}{name}"


@cache
def migrated_file() -> Path:
    """A database of SQLite that nothing is in yet: copying it takes a hundredth of making it."""
    folder = tempfile.TemporaryDirectory(prefix="coatcheck-migrated-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "store.sqlite"

    async def make() -> None:
        made = open_database(f"sqlite+aiosqlite:///{path}")
        await migrate(made.engine)
        await made.close()

    maker = threading.Thread(target=asyncio.run, args=[make()])  # who asks for it may be in a loop of their own
    maker.start()
    maker.join()
    return path


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """On PostgreSQL each takes longer: most of what is shown on both is shown on it by the long run."""
    opened = open_database(await migrated_database(request.param, request, tmp_path))
    yield opened
    await opened.close()


@pytest.fixture
def empty_postgresql(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database of its own, for a control plane with keys of its own."""
    return asyncio.run(new_database("postgresql", request, tmp_path))
