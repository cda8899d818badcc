"""The database's connections: SQLite in a file, or PostgreSQL.

SQLite is spoken to on the event loop itself. A statement finds its pages in memory and appends to the write-ahead log:
some tens of microseconds, where going to a thread and back costs a hundred for each step of each statement. What would
keep the loop waiting is done elsewhere: the log is brought to the database's file by a thread, statements that touch
many rows run in one, and who finds another process writing waits without holding anything up. `bench/` measures it.

Rule: every transaction is a real one. SQLite begins explicitly (the driver's implicit transactions would let a read see
two states), writers with BEGIN IMMEDIATE so that they queue instead of failing half-way; PostgreSQL reads at REPEATABLE
READ, so that an answer and its outbox position are of one moment.
"""

import asyncio
import os
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from control_plane.adapters.sql.connections import as_sqlalchemy_says, driver_of

WRITER: Final = "coatcheck_writer"
"""Execution option of a connection that is going to write."""

WRITER_WAITS_SECONDS: Final = 10.0
LOOKS_AGAIN_SECONDS: Final = 0.01
COMMITS_IN_THE_LOG: Final = 250
_PAGES_IN_THE_LOG: Final = 20_000
_USED_AT: Final = "coatcheck_used_at"
_READER_WAITS_MILLISECONDS: Final = 250
"""Readers wait only while another process recovers or converts the file; the event loop waits with them."""

IDLE_SECONDS: Final = 5.0
"""A connection that was not used for so long is asked whether it is still there, before a transaction relies on it."""

# Names of prepared statements never meet another process's, so that no statement is ever run in another's place, also
# where a pooler was put before the server without our knowing. The driver's own cache counts its names: it is off.
_CONNECTING: Final[dict[str, Any]] = {
    "prepared_statement_name_func": lambda: f"coatcheck_{uuid.uuid4().hex}",
    "statement_cache_size": 0,
    "timeout": 10,
}
# Behind a transaction pooler (PgBouncer) the next transaction may run on another server connection, where a statement
# that was prepared here does not exist: nothing is kept, and nothing has a name, since it would be forgotten on that
# other one and stay on this one until the server has no memory left. Without a pooler, statements are prepared once a
# connection: half the processor time. The server plans them anew for each role, and its policies ask for the tenant as
# they run.
_FIT_FOR_A_POOLER: Final[dict[str, Any]] = {
    "prepared_statement_cache_size": 0,
    "prepared_statement_name_func": lambda: "",
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
    writer: "Writer | None" = None
    """SQLite: what transactions that write go through. The log is to be brought home after them (`Log`)."""
    log: "Log | None" = None
    is_pooled: bool = False
    """PostgreSQL: there may be a transaction pooler between, so that nothing is prepared."""
    idle: "Idle" = field(default_factory=lambda: Idle())

    async def close(self) -> None:
        await self.idle.close()
        if self.log is not None:
            await self.log.close()
        if self.writer is not None:
            self.writer.close()
        if self.reader is not None:
            self.reader.dispose()
        await self.engine.dispose()


class Writer:
    """SQLite: the one connection that writes, kept for it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        # There is one writer at a time: queueing here costs less than looking again and again.
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Who finds another process writing looks again, and holds nobody up meanwhile. Waiting here and waiting for
        the database are one wait. Raises `TimeoutError`, or `OperationalError` where it takes too long."""
        deadline = time.monotonic() + WRITER_WAITS_SECONDS
        async with asyncio.timeout(WRITER_WAITS_SECONDS):
            await self._turn.acquire()
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
            await begin_writing(driver_of(self._connection), deadline)
            try:
                yield self._connection
                _end(self._connection, "commit")
            except BaseException:
                self._undo(self._connection)
                raise
        finally:
            self._turn.release()

    def _undo(self, connection: Connection) -> None:
        try:
            _end(connection, "rollback")
        except DBAPIError:
            connection.invalidate()
            connection.close()
            self._connection = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._engine.dispose()


def _end(connection: Connection, how: Literal["commit", "rollback"]) -> None:
    """SQLAlchemy knows of the transaction where something went through it. Raises `DBAPIError`."""
    try:
        getattr(connection if connection.in_transaction() else driver_of(connection), how)()
    except sqlite3.Error as error:
        raise as_sqlalchemy_says(error) from error


@dataclass(slots=True)
class Idle:
    """PostgreSQL: connections that wait for their next transaction. To give one back to the pool and take it out again
    costs as much as a statement; the pool is asked where none waits, and bounds how many there are."""

    _connections: list[tuple[AsyncConnection, float]] = field(default_factory=list)
    _asking: int = 0

    async def take(self, engine: AsyncEngine) -> AsyncConnection:
        while self._connections:
            connection, since = self._connections.pop()
            if driver_of(connection.sync_connection).is_closed():
                await asyncio.shield(_discarded(connection))
                continue
            if time.monotonic() - since <= IDLE_SECONDS:
                return connection
            await asyncio.shield(connection.close())  # the pool asks whether it is still there
        self._asking += 1
        try:
            return await engine.connect()
        finally:
            self._asking -= 1

    async def give(self, connection: AsyncConnection) -> None:
        """With no transaction open on it. Whoever is cancelled meanwhile leaves it behind in good order."""
        if self._asking or connection.closed or connection.invalidated:
            await asyncio.shield(connection.close())  # somebody waits at the pool
        else:
            self._connections.append((connection, time.monotonic()))
        # The longest idle is the first of them: nobody took it, and the pool keeps no more than it is to keep.
        if self._connections and time.monotonic() - self._connections[0][1] > IDLE_SECONDS:
            await asyncio.shield(self._connections.pop(0)[0].close())

    async def close(self) -> None:
        while self._connections:
            await self._connections.pop()[0].close()


async def _discarded(connection: AsyncConnection) -> None:
    """The server ended it: a restart takes all of them along, and nobody's question is to find that out."""
    await connection.invalidate()
    await connection.close()


class Log:
    """Brings SQLite's write-ahead log into the database's file once in a while: in a thread, since the disk is slow."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._commits = 0
        self._task: asyncio.Task[None] | None = None

    def committed(self) -> None:
        """One more transaction is in the log."""
        self._commits += 1
        if self._commits >= COMMITS_IN_THE_LOG and (self._task is None or self._task.done()):
            self._commits = 0
            self._task = asyncio.create_task(self._bring_home(), name="sqlite log")

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _bring_home(self) -> None:
        try:
            async with self._engine.connect() as connection:
                await connection.exec_driver_sql("COMMIT")  # no transaction around it
                await connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")
                await connection.exec_driver_sql("BEGIN")
        except DBAPIError:
            return  # it stays in the log, which loses nothing; the next one brings it home


async def open_fitting(database_url: str) -> Database:
    """Opened as what is at the other end needs it: a server, or a pooler before one. Raises `UnsupportedDatabaseError`.

    A pooler gives its clients a process number of its own making; a server gives the one that it also answers with.
    """
    database = open_database(database_url, pooled=True)
    if database.reader is not None:
        return database
    try:
        async with database.engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            is_pooled = driver.get_server_pid() != await driver.fetchval("SELECT pg_backend_pid()")
    finally:
        await database.close()
    return open_database(database_url, pooled=is_pooled)


def open_database(database_url: str, *, pooled: bool = False) -> Database:
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
                pool_size=10,
                pool_timeout=WRITER_WAITS_SECONDS,
                connect_args=_CONNECTING | (_FIT_FOR_A_POOLER if pooled else {}),
            )
            event.listen(engine.sync_engine, "checkout", _ask_whether_it_is_there)
            event.listen(engine.sync_engine, "checkin", _note_when_it_was_used)
            return Database(engine, reader=None, is_pooled=pooled)
        case other:
            raise UnsupportedDatabaseError(f"{other} is no database that we run on; the URL is {DATABASE_URLS}")


def _ask_whether_it_is_there(connection: Any, record: Any, _proxy: Any) -> None:
    """Not each time: a busy one has answered just now, and the question costs a round trip."""
    if record.driver_connection.is_closed():
        raise DisconnectionError
    if time.monotonic() - record.info.get(_USED_AT, time.monotonic()) <= IDLE_SECONDS:
        return
    try:
        connection.ping()
    except Exception as error:  # whatever it is, this one is no good; the pool makes another
        raise DisconnectionError from error


def _note_when_it_was_used(_connection: Any, record: Any) -> None:
    record.info[_USED_AT] = time.monotonic()


def _open_sqlite(url: URL) -> Database:
    engine = create_async_engine(url, hide_parameters=True, pool_size=4, max_overflow=0)
    direct = url.set(drivername="sqlite")
    reader = create_engine(direct, hide_parameters=True, pool_size=4, max_overflow=-1)
    writer = create_engine(direct, hide_parameters=True, pool_size=1, max_overflow=0)
    for sync_engine, milliseconds in (
        (engine.sync_engine, int(WRITER_WAITS_SECONDS * 1000)),
        (reader, _READER_WAITS_MILLISECONDS),
        (writer, 0),
    ):
        event.listen(sync_engine, "connect", _preparing(milliseconds))
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    event.listen(reader, "begin", _begin_sqlite)
    return Database(engine, reader, Writer(writer), Log(engine))


async def begin_writing(driver: sqlite3.Connection, deadline: float) -> None:
    """Raises `OperationalError` where it is not done by the deadline (on the monotonic clock)."""
    while True:
        try:
            driver.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() >= deadline:
                raise as_sqlalchemy_says(error) from error
            await asyncio.sleep(LOOKS_AGAIN_SECONDS)
        else:
            return


def _is_busy(error: sqlite3.OperationalError) -> bool:
    """Another process writes. A full disk or a file that is gone does not go away by waiting."""
    # The low byte is the primary code (https://www.sqlite.org/rescode.html).
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


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
            # Who writes on the event loop leaves it to `Log`; this is for a log that nobody brings home.
            f"wal_autocheckpoint={_PAGES_IN_THE_LOG}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return prepare


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(WRITER, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
