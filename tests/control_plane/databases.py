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

BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
"""Where several write at once, the two databases differ."""

_names = count(1)


async def new_database(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of an empty database."""
    if kind == "sqlite":
        return f"sqlite+aiosqlite:///{folder / 'store.sqlite'}"
    server, name = request.getfixturevalue("server"), f"store_{next(_names)}"
    engine = create_async_engine(server + "postgres", isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE {name}"))
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
    """PostgreSQL takes a second to make: most of what is shown on both is shown on it by the long run."""
    if request.param == "sqlite":
        shutil.copy(migrated_file(), tmp_path / "store.sqlite")
        opened = open_database(f"sqlite+aiosqlite:///{tmp_path / 'store.sqlite'}")
    else:
        opened = open_database(await new_database(request.param, request, tmp_path))
        await migrate(opened.engine)
    yield opened
    await opened.close()
