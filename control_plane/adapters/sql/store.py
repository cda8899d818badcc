"""Transactions (`ports.Store`): opened with a scope, committed when the block ends, rolled back when it raises.

Rule: a database that does not answer is `store_unavailable`, never "not found".
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import structlog
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.adapters.sql.engine import WRITER_WAITS_SECONDS, Database, Log, begin_writing
from control_plane.adapters.sql.records import SqlRecords
from control_plane.adapters.sql.repositories import OnTheLoop, Transaction
from control_plane.adapters.sql.roles import PLATFORM_ROLE, TENANT_ROLE, TENANT_SETTING
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.faults import reach
from control_plane.ports import Clock, Scope, TenantScope, Wake

READ_SECONDS: Final = 10.0
WRITE_SECONDS: Final = 120.0
"""PostgreSQL: for so long a transaction may last. A server that is frozen, or behind a connection that leads nowhere
any more, says nothing, and nobody is to wait for it for ever. A write may be that of a great many rows."""

_log = structlog.get_logger("control_plane.store")

# Both end with the transaction (`true`), so that a connection goes back as nobody's: to our pool, or to a pooler that
# gives it to another process next.
_ENTER: Final = text("SELECT set_config('role', :role, true), set_config(:setting, :tenant, true)")


class SqlStore:
    def __init__(self, database: Database, wake: Wake, *, time: Clock | None = None) -> None:
        """`time`: what stands in for the database's clock, where a test moves it."""
        self._wake = wake
        self._time = time
        self._sqlite = _Sqlite(database.reader, database.writer, database.log) if database.reader else None
        self._reader = database.engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._writer = database.engine

    @asynccontextmanager
    async def read(self, scope: Scope) -> AsyncIterator[SqlRecords]:
        """One moment of the database, for looking only."""
        with _unavailable_when_away():
            if self._sqlite is not None:
                with self._sqlite.reading() as direct:
                    yield SqlRecords(Transaction(direct, scope, writes=False, time=self._time))
            else:
                async with asyncio.timeout(READ_SECONDS), self._reader.connect() as connection, connection.begin():
                    await _enter(connection, scope)
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
    async def _writing(self, scope: Scope) -> AsyncIterator[AsyncConnection | OnTheLoop]:
        if self._sqlite is not None:
            async with self._sqlite.writing() as direct:
                yield direct
        else:
            async with asyncio.timeout(WRITE_SECONDS), self._writer.connect() as connection, connection.begin():
                await _enter(connection, scope)
                yield connection


class _Sqlite:
    """Transactions of SQLite, on the event loop (see `engine`)."""

    def __init__(self, reader: Engine, writer: Engine | None, log: Log | None) -> None:
        assert writer is not None
        assert log is not None
        self._reader = reader
        self._writer = writer
        self._log = log
        # There is one writer at a time: queueing here costs less than looking again and again.
        self._one_writer = asyncio.Lock()

    @contextmanager
    def reading(self) -> Iterator[OnTheLoop]:
        with self._reader.connect() as connection, connection.begin():
            yield OnTheLoop(connection)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[OnTheLoop]:
        deadline = time.monotonic() + WRITER_WAITS_SECONDS
        async with self._turn(deadline):
            with self._writer.connect() as connection:
                await begin_writing(connection, deadline)
                yield OnTheLoop(connection)  # what raises is rolled back as the connection goes
                connection.commit()
        self._log.committed()

    @asynccontextmanager
    async def _turn(self, deadline: float) -> AsyncIterator[None]:
        """One writer at a time. Waiting here and waiting for the database are one wait. Raises `TimeoutError`."""
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await self._one_writer.acquire()
        try:
            yield
        finally:
            self._one_writer.release()


async def _enter(connection: AsyncConnection, scope: Scope) -> None:
    """PostgreSQL: from here to its end the transaction has the rights and sees the rows of its scope, and no others."""
    if isinstance(scope, TenantScope):
        as_whom = {"role": TENANT_ROLE, "tenant": scope.tenant}
    else:
        as_whom = {"role": PLATFORM_ROLE, "tenant": ""}
    await connection.execute(_ENTER, {"setting": TENANT_SETTING, **as_whom})


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
