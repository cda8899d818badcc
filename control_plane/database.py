"""The database at start: brought to the tables of this release, and reached by a login that row security binds.

    async with opened(settings) as database: …     what the control plane starts with
    await migrate_once(settings)                    what `coatcheck serve migrate` does

Rule: on PostgreSQL the login that serves owns nothing (ADR 0011). Whoever owns the tables migrates, and is not kept.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import structlog

from control_plane.adapters.sql.engine import Database, open_database, open_fitting
from control_plane.adapters.sql.migrate import migrate, require_migrated
from control_plane.adapters.sql.privileges import UnboundLoginError, require_bound
from control_plane.clients_file import read_secret_file

_log = structlog.get_logger("control_plane.database")


class DatabaseSettings(Protocol):
    """Those of the settings that say where the database is."""

    @property
    def database_url(self) -> str: ...
    @property
    def database_url_file(self) -> Path | None: ...
    @property
    def migration_database_url(self) -> str: ...
    @property
    def migration_database_url_file(self) -> Path | None: ...
    @property
    def unbound_database_login(self) -> str: ...


@asynccontextmanager
async def opened(settings: DatabaseSettings) -> AsyncIterator[Database]:
    """Raises `UnboundLoginError`, `NotMigratedError`, `ClientsFileError`, `UnsupportedDatabaseError`."""
    database = await open_fitting(_url(settings.database_url, settings.database_url_file))
    try:
        await _prepare(settings, database)
        yield database
    finally:
        await database.close()


async def migrate_once(settings: DatabaseSettings) -> None:
    """By the owner's login where one is given, otherwise by the only one there is."""
    by_owner = settings.migration_database_url or settings.migration_database_url_file
    url = (
        _url(settings.migration_database_url, settings.migration_database_url_file)
        if by_owner
        else _url(settings.database_url, settings.database_url_file)
    )
    owner = open_database(url)
    try:
        await migrate(owner.engine)
    finally:
        await owner.close()


async def _prepare(settings: DatabaseSettings, database: Database) -> None:
    by_owner = settings.migration_database_url or settings.migration_database_url_file
    if database.reader is not None:  # SQLite has no logins
        if by_owner:
            raise UnboundLoginError(
                "SQLite has no logins: COATCHECK_CONTROL_PLANE_MIGRATION_DATABASE_URL is not for it"
            )
        await migrate(database.engine)
        return
    if by_owner:
        await migrate_once(settings)
    if settings.unbound_database_login == "accepted-risk":
        if not by_owner:
            await migrate(database.engine)
        _log.warning("database_login_unchecked", todo="give the control plane a login of its own: docs/postgresql.md")
        return
    # Before the tables: a superuser on an empty database is told that it is one, not that tables are missing.
    await require_bound(database.engine, tables=False)
    await require_migrated(database.engine)
    await require_bound(database.engine, tables=True)


def _url(value: str, file: Path | None) -> str:
    """Opened where it is used: it may hold a password. Raises `ClientsFileError` for a file that others could read."""
    return value if file is None else read_secret_file(file).reveal()
