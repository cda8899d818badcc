"""Brings the database to the tables of this version.

Rule: one process migrates at a time, and a database of a newer version is left alone. On PostgreSQL it is the tables'
owner who migrates, which is not the login that serves (ADR 0011).
"""

import secrets
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from control_plane.adapters.sql.engine import WRITER
from control_plane.adapters.sql.roles import PLATFORM_ROLE
from control_plane.faults import reach

_MIGRATIONS: Final = Path(__file__).parents[2] / "migrations"
_MIGRATION_LOCK: Final = 0x636F6D69


class NotMigratedError(RuntimeError):
    """The tables are not those of this version, and whoever serves may not change them."""


async def migrate(engine: AsyncEngine) -> None:
    """Applies what is missing, and gives a new database its epoch. Raises SQLAlchemy's and Alembic's own errors."""
    writer = engine.execution_options(**{WRITER: True})
    async with writer.begin() as connection:
        if engine.dialect.name == "postgresql":
            await connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
        await connection.run_sync(_upgrade)
        reach("migration.applied")
        await connection.execute(
            text("INSERT INTO meta (name, value) VALUES ('epoch', :epoch) ON CONFLICT (name) DO NOTHING"),
            {"epoch": secrets.token_hex(8)},
        )


async def require_migrated(engine: AsyncEngine) -> None:
    """PostgreSQL, for who serves but does not own the tables. Raises `NotMigratedError`."""
    async with engine.connect() as connection, connection.begin():
        present = (await connection.execute(_TABLE_OF_VERSIONS)).scalar_one()
        if present:
            await connection.execute(text("SELECT set_config('role', :role, true)"), {"role": PLATFORM_ROLE})
            present = (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar()
    if present != (wanted := ScriptDirectory.from_config(_config()).get_current_head()):
        raise NotMigratedError(
            f"the database's tables are of version {present or 'none'}, this release needs {wanted}: run "
            "'coatcheck serve migrate' with the owner's login in COATCHECK_CONTROL_PLANE_MIGRATION_DATABASE_URL_FILE"
        )


# A catalogue is read by everybody, whatever may be done with the table.
_TABLE_OF_VERSIONS: Final = text("SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'alembic_version')")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config


def _upgrade(connection: Connection) -> None:
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
