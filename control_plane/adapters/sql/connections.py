"""A connection that a transaction is open on, and statements that are put into the driver's words once.

What is asked thousands of times a second is rendered when it is first asked and then goes to the driver as it is: to
build, compile and wrap a statement anew costs several times what the driver itself takes (`bench/` measures it).
Everything else goes the ordinary way, on the same connection and in the same transaction.

Rule: whatever goes wrong at a driver is raised as SQLAlchemy would have raised it: who handles one, handles the other.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Protocol
from uuid import uuid4

import asyncpg
from sqlalchemy import JSON, Boolean, ColumnElement, Connection, CursorResult, Executable, bindparam, true
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

SCOPE_TENANT: Final = "scope_tenant"
"""The parameter that a scoped statement has for the tenant of its scope."""

_FLOAT8: Final = 701
"""PostgreSQL's number for the type of all our fractions (pg_type.dat); processors of no other type look at it."""

Mine = Callable[[ColumnElement[Any]], ColumnElement[bool]]


class Rendered:
    """A statement in one driver's words: its text, the order of its parameters, and what reads and writes values."""

    def __init__(self, statement: Any, dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect)
        assert isinstance(compiled, SQLCompiler)
        self.text = compiled.string
        names = compiled.positiontup or []
        self._constants = compiled.construct_params(_check=False)
        self._order = [
            (name, compiled.binds[name].type.dialect_impl(dialect).bind_processor(dialect)) for name in names
        ]
        columns = list(statement.exported_columns) if statement.is_select else []
        self._names = [column.key for column in columns]
        self._readers = [
            (column.key, reader)
            for column in columns
            if (reader := column.type.dialect_impl(dialect).result_processor(dialect, _FLOAT8)) is not None
        ]

    def arguments(self, parameters: Mapping[str, Any]) -> list[Any]:
        values = {**self._constants, **parameters}
        return [write(values[name]) if write else values[name] for name, write in self._order]

    def row(self, values: Sequence[Any]) -> dict[str, Any]:
        row = dict(zip(self._names, values, strict=True))
        for name, read in self._readers:
            row[name] = read(row[name])
        return row


class Scoped:
    """A statement that is built once, for either kind of scope: to build a large one costs more than to run it.

    `build` is given what `Transaction.mine` is; whatever else changes from one time to the next is a `bindparam`, and
    there is no list among them.
    """

    def __init__(self, build: Callable[[Mine], Any]) -> None:
        self._build = build
        self._rendered: dict[tuple[str, bool], Rendered] = {}

    def rendered(self, dialect: Dialect, *, for_tenant: bool) -> Rendered:
        key = dialect.name, for_tenant
        if key not in self._rendered:
            self._rendered[key] = Rendered(self._build(_tenant_only if for_tenant else _all_tenants), dialect)
        return self._rendered[key]


def _tenant_only(tenant: ColumnElement[Any]) -> ColumnElement[bool]:
    return tenant == bindparam(SCOPE_TENANT)


def _all_tenants(_tenant: ColumnElement[Any]) -> ColumnElement[bool]:
    return true()


class among(ColumnElement[bool]):  # noqa: N801 (reads as a condition)
    """That a column's text is one of a list's, which is one parameter however long it is."""

    inherit_cache = True
    type = Boolean()
    # SQLite has no booleans: otherwise it would be compared with 1 there, and no index be used.
    _is_implicitly_boolean = True

    def __init__(self, column: ColumnElement[Any], parameter: str) -> None:
        self.column = column
        self.texts = bindparam(parameter, type_=JSON())


@compiles(among, "sqlite")
def _among_on_sqlite(element: among, compiler: SQLCompiler, **how: Any) -> str:
    column, texts = (compiler.process(part, **how) for part in (element.column, element.texts))
    return f"({column} IN (SELECT value FROM json_each({texts})))"  # noqa: S608 (rendered parts, no values)


@compiles(among, "postgresql")
def _among_on_postgresql(element: among, compiler: SQLCompiler, **how: Any) -> str:
    column, texts = (compiler.process(part, **how) for part in (element.column, element.texts))
    return f"({column} = ANY (ARRAY(SELECT json_array_elements_text({texts}))))"


class OpenConnection(Protocol):
    """What a transaction speaks through."""

    @property
    def dialect(self) -> Dialect: ...
    async def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]: ...
    async def fetch(self, statement: Rendered, parameters: Mapping[str, Any]) -> list[dict[str, Any]]: ...
    async def run(self, statement: Rendered, parameters: Mapping[str, Any]) -> int:
        """How many rows it touched."""
        ...

    def begin_nested(self) -> Any: ...


class OnTheLoop:
    """SQLite: statements run here and now (see `engine`)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._driver: sqlite3.Connection = driver_of(connection)
        self.dialect = connection.dialect

    async def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        return self._connection.execute(statement, parameters)

    async def fetch(self, statement: Rendered, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            rows = self._driver.execute(statement.text, statement.arguments(parameters)).fetchall()
        except sqlite3.Error as error:
            raise as_sqlalchemy_says(error) from error
        return [statement.row(row) for row in rows]

    async def run(self, statement: Rendered, parameters: Mapping[str, Any]) -> int:
        try:
            return self._driver.execute(statement.text, statement.arguments(parameters)).rowcount
        except sqlite3.Error as error:
            raise as_sqlalchemy_says(error) from error

    async def execute_elsewhere(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        """In a thread, for what takes long. Whoever is cancelled waits for its end: the connection is not shared."""
        running = asyncio.ensure_future(asyncio.to_thread(self._connection.execute, statement, parameters))
        try:
            return await asyncio.shield(running)
        finally:
            while not running.done():  # however often it is cancelled
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({running})

    @asynccontextmanager
    async def begin_nested(self) -> AsyncIterator[None]:
        with self._connection.begin_nested():
            yield


class OnPostgresql:
    """PostgreSQL: statements that are rendered are prepared once a connection. Behind a pooler, which gives the next
    transaction another connection of the server, they have no name: they would stay where nobody forgets them."""

    def __init__(self, connection: AsyncConnection, *, prepares: bool) -> None:
        self.connection = connection
        self.dialect = connection.dialect
        self.driver: asyncpg.Connection[Any] = driver_of(connection.sync_connection)
        assert connection.sync_connection is not None
        self._prepared: dict[str, Any] = connection.sync_connection.info.setdefault("coatcheck_prepared", {})
        self._prepares = prepares

    async def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        return await self.connection.execute(statement, parameters)

    async def fetch(self, statement: Rendered, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        arguments = statement.arguments(parameters)
        prepared = await self._ready(statement.text) if self._prepares else None
        try:
            rows = await (prepared.fetch(*arguments) if prepared else self.driver.fetch(statement.text, *arguments))
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise self._as_sqlalchemy_says(error) from error
        return [statement.row(row) for row in rows]

    async def run(self, statement: Rendered, parameters: Mapping[str, Any]) -> int:
        arguments = statement.arguments(parameters)
        prepared = await self._ready(statement.text) if self._prepares else None
        try:
            if prepared is None:
                said = await self.driver.execute(statement.text, *arguments)
            else:
                await prepared.fetch(*arguments)
                said = prepared.get_statusmsg()
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise self._as_sqlalchemy_says(error) from error
        return int(said.rpartition(" ")[2])

    async def command(self, text: str) -> str:
        """Several statements at once, without parameters; what the last one answers."""
        try:
            return str(await self.driver.execute(text))
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise self._as_sqlalchemy_says(error) from error

    async def _ready(self, text: str) -> Any:
        prepared = self._prepared.get(text)
        if prepared is None:
            try:
                # A name that no other process has, also where a pooler was put before the server without our knowing.
                prepared = await self.driver.prepare(text, name=f"coatcheck_{uuid4().hex}")
            except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                raise self._as_sqlalchemy_says(error) from error
            self._prepared[text] = prepared
        return prepared

    @asynccontextmanager
    async def begin_nested(self) -> AsyncIterator[None]:
        async with self.connection.begin_nested():
            yield

    def _as_sqlalchemy_says(self, error: Exception) -> DBAPIError:
        self._prepared.clear()  # one of them may be of tables that have changed since
        said = as_sqlalchemy_says(error)
        said.connection_invalidated = self.driver.is_closed()
        return said


_SAID: Final[Sequence[tuple[type[Exception], type[DBAPIError]]]] = (
    (sqlite3.IntegrityError, IntegrityError),
    (sqlite3.OperationalError, OperationalError),
    (sqlite3.ProgrammingError, ProgrammingError),
    (asyncpg.InvalidCachedStatementError, OperationalError),  # prepared before another replica's migration
    (asyncpg.IntegrityConstraintViolationError, IntegrityError),
    (asyncpg.SyntaxOrAccessError, ProgrammingError),
    (asyncpg.InterfaceError, InterfaceError),
)


def as_sqlalchemy_says(error: Exception) -> DBAPIError:
    """Of what the driver has no class for the plain one, as SQLAlchemy does: a server that shuts down, and the like."""
    said = next((said for of_driver, said in _SAID if isinstance(error, of_driver)), DBAPIError)
    return said(None, None, error, hide_parameters=True)


def driver_of(connection: Any) -> Any:
    driver = connection.connection.driver_connection
    assert driver is not None
    return driver
