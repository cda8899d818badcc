"""The database's connections: SQLite in a file, or PostgreSQL.

SQLite is read on the event loop itself and written through the driver's threads. A read finds its pages in memory and
never waits for a writer (write-ahead log): some tens of microseconds, where going to a thread and back costs a hundred
for each step of each statement. A write may wait for the disk. `bench/` measures resolve; it is why this is so.

Rule: every transaction is a real one. SQLite begins explicitly (the driver's implicit transactions would let a read see
two states), writers with BEGIN IMMEDIATE so that they queue instead of failing half-way; PostgreSQL reads at REPEATABLE
READ, so that an answer and its outbox position are of one moment.
"""

import math
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

WRITER: Final = "coatcheck_writer"
"""Execution option of a connection that is going to write."""

WRITER_DEADLINE: Final = "coatcheck_writer_deadline"
"""And until when (on the monotonic clock) it waits for others to finish writing."""

WRITER_WAITS_SECONDS: Final = 10.0
_WAITS: Final = "coatcheck_waits_seconds"
_READER_WAITS_MILLISECONDS: Final = 250
"""Readers wait only while another process recovers or converts the file; the event loop waits with them."""


# Behind a transaction pooler (PgBouncer) the next transaction may run on another server connection, where a statement
# that was prepared here does not exist, or is another client's of the same name: nothing is kept, names never meet.
_FIT_FOR_A_POOLER: Final[dict[str, Any]] = {
    "statement_cache_size": 0,
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": lambda: f"coatcheck_{uuid.uuid4().hex}",
}

DATABASE_URLS: Final = "sqlite+aiosqlite:////path/to/file or postgresql+asyncpg://user:password@host/database"


class UnsupportedDatabaseError(ValueError):
    """The URL is of no database that we run on."""


@dataclass(frozen=True, slots=True)
class Database:
    """How the database is reached."""

    engine: AsyncEngine
    reader: Engine | None
    """SQLite: what reads go through."""

    async def close(self) -> None:
        await self.engine.dispose()
        if self.reader is not None:
            self.reader.dispose()


def open_database(database_url: str) -> Database:
    """Raises `UnsupportedDatabaseError`; connects only when used."""
    try:
        url = make_url(database_url)
    except (ArgumentError, ValueError):
        # Its own message quotes the URL, in which a password may be.
        raise UnsupportedDatabaseError(f"the database's URL cannot be read; it is {DATABASE_URLS}") from None
    match url.drivername:
        case "sqlite+aiosqlite":
            if not url.database or url.database == ":memory:":
                raise UnsupportedDatabaseError("SQLite needs a file: sqlite+aiosqlite:////path/to/file")
            _make_private_file(Path(url.database))
            return _open_sqlite(url)
        case "postgresql+asyncpg":
            engine = create_async_engine(
                url,
                hide_parameters=True,
                pool_pre_ping=True,
                pool_size=10,
                pool_timeout=WRITER_WAITS_SECONDS,
                connect_args=_FIT_FOR_A_POOLER | {"timeout": 10},
            )
            return Database(engine, reader=None)
        case other:
            raise UnsupportedDatabaseError(f"{other} is no database that we run on; the URL is {DATABASE_URLS}")


def _open_sqlite(url: URL) -> Database:
    engine = create_async_engine(url, hide_parameters=True, pool_size=4, max_overflow=0)
    reader = create_engine(url.set(drivername="sqlite"), hide_parameters=True, pool_size=4, max_overflow=-1)
    for sync_engine, milliseconds in (
        (engine.sync_engine, int(WRITER_WAITS_SECONDS * 1000)),
        (reader, _READER_WAITS_MILLISECONDS),
    ):
        event.listen(sync_engine, "connect", _preparing(milliseconds))
        event.listen(sync_engine, "begin", _begin_sqlite)
    return Database(engine, reader)


def _make_private_file(path: Path) -> None:
    # SQLite gives its -wal and -shm files the mode of the database, so that it is enough to set it here.
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _preparing(busy_milliseconds: int) -> Callable[[Any, Any], None]:
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout={busy_milliseconds}",
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
            "secure_delete=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return prepare


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    writes = options.get(WRITER, False)
    if (deadline := options.get(WRITER_DEADLINE)) is not None:
        _wait_until(connection, deadline)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _wait_until(connection: Connection, deadline: float) -> None:
    """Sets how long the database waits for another writer: for what is left of the time, in steps of a second."""
    seconds = max(0, math.ceil(deadline - time.monotonic()))
    if connection.info.get(_WAITS) != seconds:
        connection.exec_driver_sql(f"PRAGMA busy_timeout={seconds * 1000}")
        connection.info[_WAITS] = seconds
