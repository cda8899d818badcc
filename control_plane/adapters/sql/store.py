"""Transactions (`ports.Store`): opened with a scope, committed when the block ends, rolled back when it raises.

Rule: a database that does not answer is `store_unavailable`, never "not found".
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Final

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from control_plane.adapters.sql.connections import OnPostgresql, OnTheLoop, OpenConnection
from control_plane.adapters.sql.engine import Database, Log, Writer
from control_plane.adapters.sql.records import SqlRecords
from control_plane.adapters.sql.repositories import Transaction
from control_plane.adapters.sql.roles import PLATFORM_ROLE, TENANT_ROLE, TENANT_SETTING
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.faults import reach
from control_plane.ports import Clock, Scope, TenantScope, Wake

READ_SECONDS: Final = 10.0
WRITE_SECONDS: Final = 120.0
"""PostgreSQL: for so long a transaction may last. A server that is frozen, or behind a connection that leads nowhere
any more, says nothing, and nobody is to wait for it for ever. A write may be that of a great many rows."""
_ROLLBACK_SECONDS: Final = 2.0

_log = structlog.get_logger("control_plane.store")


class SqlStore:
    def __init__(self, database: Database, wake: Wake, *, time: Clock | None = None) -> None:
        """`time`: what stands in for the database's clock, where a test moves it."""
        self._wake = wake
        self._time = time
        self._sqlite = _Sqlite(database.reader, database.writer, database.log) if database.reader else None
        self._postgresql = _Postgresql(database)

    @asynccontextmanager
    async def read(self, scope: Scope) -> AsyncIterator[SqlRecords]:
        """One moment of the database, for looking only."""
        with _unavailable_when_away():
            if self._sqlite is not None:
                with self._sqlite.reading() as direct:
                    yield SqlRecords(Transaction(direct, scope, writes=False, time=self._time))
            else:
                async with asyncio.timeout(READ_SECONDS), self._postgresql.reading(scope) as connection:
                    yield SqlRecords(Transaction(connection, scope, writes=False, time=self._time))

    @asynccontextmanager
    async def write(self, scope: Scope) -> AsyncIterator[SqlRecords]:
        """A transaction; event streams are woken after its commit when it published anything."""
        with _unavailable_when_away():
            async with self._writing(scope) as connection:
                tx = Transaction(connection, scope, writes=True, time=self._time)
                yield SqlRecords(tx)
                reach("store.written")
                published = await tx.flush()
                reach("store.published")
            reach("store.committed")
            if published:
                self._wake.announce()

    @asynccontextmanager
    async def _writing(self, scope: Scope) -> AsyncIterator[OpenConnection]:
        if self._sqlite is not None:
            async with self._sqlite.writing() as direct:
                yield direct
        else:
            async with asyncio.timeout(WRITE_SECONDS), self._postgresql.writing(scope) as connection:
                yield connection


class _Sqlite:
    """Transactions of SQLite, on the event loop (see `engine`)."""

    def __init__(self, reader: Engine, writer: Writer | None, log: Log | None) -> None:
        assert writer is not None
        assert log is not None
        self._reader = reader
        self._writer = writer
        self._log = log

    @contextmanager
    def reading(self) -> Iterator[OnTheLoop]:
        with self._reader.connect() as connection, connection.begin():
            yield OnTheLoop(connection)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[OnTheLoop]:
        async with self._writer.transaction() as connection:
            yield OnTheLoop(connection)
        self._log.committed()


class _Postgresql:
    """Transactions of PostgreSQL. They begin in one trip, whose they are included, and end in one: asked for one by one
    by the driver's own means, beginning and ending cost more than all that is done between."""

    def __init__(self, database: Database) -> None:
        # No transaction but those that are begun here.
        self._engine = database.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._idle = database.idle
        self._prepares = not database.is_pooled

    def reading(self, scope: Scope) -> AbstractAsyncContextManager[OnPostgresql]:
        return self._transaction("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY", scope)

    def writing(self, scope: Scope) -> AbstractAsyncContextManager[OnPostgresql]:
        return self._transaction("BEGIN", scope)

    @asynccontextmanager
    async def _transaction(self, begin: str, scope: Scope) -> AsyncIterator[OnPostgresql]:
        connection = await self._idle.take(self._engine)
        try:
            opened = OnPostgresql(connection, prepares=self._prepares)
            try:
                await opened.command(f"{begin}; {_entering(scope)}")
                yield opened
                await _commit(opened)
            except BaseException as error:
                await _undo(opened, error)
                raise
        finally:
            await self._idle.give(connection)


async def _commit(opened: OnPostgresql) -> None:
    # A transaction in which a statement failed is rolled back by its COMMIT, without a word of complaint.
    if (ended := await opened.command("COMMIT")) != "COMMIT":
        raise OperationalError(None, None, RuntimeError(f"the transaction ended with {ended}"))


async def _undo(opened: OnPostgresql, error: BaseException) -> None:
    """The connection goes back with no transaction on it, or does not go back."""
    is_over = False
    try:
        # Whoever was cancelled may have left a statement under way.
        if isinstance(error, Exception) and not opened.driver.is_closed():
            with suppress(DBAPIError, TimeoutError, OSError):
                async with asyncio.timeout(_ROLLBACK_SECONDS):
                    await opened.command("ROLLBACK")
                    is_over = True
    finally:
        if not is_over:  # also whoever is cancelled in the middle of this
            opened.driver.terminate()
            await opened.connection.invalidate()


def _entering(scope: Scope) -> str:
    """From here to its end the transaction has the rights and sees the rows of its scope, and no others."""
    role, tenant = (TENANT_ROLE, scope.tenant) if isinstance(scope, TenantScope) else (PLATFORM_ROLE, "")
    # As digits, of which nothing can be made but the text that they stand for.
    text = f"convert_from(decode('{tenant.encode().hex()}', 'hex'), 'UTF8')"
    # Both end with the transaction (`true`), so that a connection goes back as nobody's: to our pool, or to a pooler
    # that gives it to another process next.
    return f"SELECT set_config('role', '{role}', true), set_config('{TENANT_SETTING}', {text}, true)"


class _unavailable_when_away:  # noqa: N801 (reads as a statement)
    """Turns "the database does not answer" into its refusal; everything else passes as it is."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and _is_away(error):
            _log.warning("store_unavailable", error=type(error).__name__)
            raise RefusedError(
                Refusal(
                    RefusalCode.STORE_UNAVAILABLE,
                    "the control plane's database does not answer",
                    "try again in a moment",
                    retry_after_seconds=1,
                )
            ) from error


def _is_away(error: BaseException) -> bool:
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    # A statement that was prepared before another replica's migration: it is prepared anew the next time.
    if type(getattr(error, "orig", None)).__name__ == "InvalidCachedStatementError":
        return True
    # A plain DBAPIError is what the driver has no class for: a refused password, a server that is shutting down.
    return type(error) is DBAPIError or isinstance(
        error, OperationalError | InterfaceError | PoolTimeoutError | OSError
    )
