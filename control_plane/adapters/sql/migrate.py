"""Brings the database to the tables of this version.

Rule: one process migrates at a time, and a database of a newer version is left alone.
"""

import secrets
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from control_plane.adapters.sql.engine import WRITER

_MIGRATIONS: Final = Path(__file__).parents[2] / "migrations"
_MIGRATION_LOCK: Final = 0x636F6D69


async def migrate(engine: AsyncEngine) -> None:
    """Applies what is missing, and gives a new database its epoch. Raises SQLAlchemy's and Alembic's own errors."""
    writer = engine.execution_options(**{WRITER: True})
    async with writer.begin() as connection:
        if engine.dialect.name == "postgresql":
            await connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
        await connection.run_sync(_upgrade)
        await connection.execute(
            text("INSERT INTO meta (name, value) VALUES ('epoch', :epoch) ON CONFLICT (name) DO NOTHING"),
            {"epoch": secrets.token_hex(8)},
        )


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
