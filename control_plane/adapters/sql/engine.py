"""The database connection: SQLite in a file, or PostgreSQL.

Rule: every transaction is a real one. SQLite begins explicitly (the driver's implicit transactions would let a read see
two states), writers with BEGIN IMMEDIATE so that they queue instead of failing half-way; PostgreSQL reads at REPEATABLE
READ, so that an answer and its outbox position are of one moment.
"""

import os
from pathlib import Path
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

WRITER: Final = "coatcheck_writer"
"""Execution option of a connection that is going to write."""

_BUSY_MILLISECONDS: Final = 10_000


class UnsupportedDatabaseError(ValueError):
    """The URL is of no database that we run on."""


def open_engine(database_url: str) -> AsyncEngine:
    """An engine. Raises `UnsupportedDatabaseError`; connects only when used."""
    url = make_url(database_url)
    match url.drivername:
        case "sqlite+aiosqlite":
            if not url.database or url.database == ":memory:":
                raise UnsupportedDatabaseError("SQLite needs a file: sqlite+aiosqlite:////path/to/file")
            _make_private_file(Path(url.database))
            engine = create_async_engine(url, hide_parameters=True, pool_size=8, max_overflow=0)
            event.listen(engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(engine.sync_engine, "begin", _begin_sqlite)
            return engine
        case "postgresql+asyncpg":
            return create_async_engine(
                url, hide_parameters=True, pool_pre_ping=True, pool_size=10, connect_args={"timeout": 10}
            )
        case other:
            raise UnsupportedDatabaseError(f"{other} is neither sqlite+aiosqlite nor postgresql+asyncpg")


def _make_private_file(path: Path) -> None:
    # SQLite gives its -wal and -shm files the mode of the database, so that it is enough to set it here.
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout={_BUSY_MILLISECONDS}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "foreign_keys=ON",
        "secure_delete=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(WRITER, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
