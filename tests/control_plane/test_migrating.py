"""Replicas that start at the same time, as processes: on an empty database and on one of an earlier release."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine

from control_plane.adapters.sql.engine import open_database
from control_plane.adapters.sql.migrate import migrate
from control_plane.adapters.sql.privileges import require_bound
from tests.control_plane.postgresql import Logins, database_with_two_logins
from tests.control_plane.serving import private_file
from tests.support.processes import clean_environment

pytestmark = pytest.mark.long

COMMAND: Final = Path(sys.executable).parent / "coatcheck"
MIGRATIONS: Final = Path(__file__).parents[2] / "control_plane" / "migrations"
BEFORE_ROW_SECURITY: Final = "0003"


def migrated_by_four(logins: Logins, folder: Path) -> list[str]:
    """What four processes wrote that all began at once; each must have ended well."""
    url = private_file(folder / "owner-url", logins.owner)
    environment = clean_environment(
        COATCHECK_CONTROL_PLANE_DATABASE_URL_FILE=str(url), PYTHONPATH=str(MIGRATIONS.parents[1])
    )
    running = [
        subprocess.Popen(
            [str(COMMAND), "serve", "migrate"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        )
        for _ in range(4)
    ]  # fmt: skip
    written = [process.communicate(timeout=90)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4, written
    return written


async def rows(url: str, statement: str) -> list[Any]:
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        found = (await connection.execute(text(statement))).all()
    await engine.dispose()
    return list(found)


async def test_four_that_start_on_an_empty_database_migrate_it_once(server: str, tmp_path: Path) -> None:
    logins = await database_with_two_logins(server)

    migrated_by_four(logins, tmp_path)

    assert len(await rows(logins.superuser, "SELECT * FROM alembic_version")) == 1
    assert len(await rows(logins.superuser, "SELECT value FROM meta WHERE name = 'epoch'")) == 1
    app = open_database(logins.app)
    await require_bound(app.engine, tables=True)
    await app.close()


async def test_four_that_start_on_an_old_database_keep_what_is_in_it(server: str, tmp_path: Path) -> None:
    logins = await database_with_two_logins(server)
    await older(logins.owner)
    await filled_before(logins.owner)

    migrated_by_four(logins, tmp_path)
    migrated_by_four(logins, tmp_path)

    app = open_database(logins.app)
    await require_bound(app.engine, tables=True)
    await app.close()
    assert [row.id for row in await rows(logins.superuser, "SELECT id FROM tenants ORDER BY id")] == ["acme", "evil"]
    assert await rows(logins.owner, "SELECT id FROM tenants") == []  # forced: the owner is bound as well


async def test_migrating_again_by_the_owner_changes_nothing(server: str) -> None:
    logins = await database_with_two_logins(server)
    owner = open_database(logins.owner)
    await migrate(owner.engine)
    before = await rows(logins.superuser, "SELECT value FROM meta")

    await migrate(owner.engine)

    assert await rows(logins.superuser, "SELECT value FROM meta") == before
    await owner.close()


async def older(url: str) -> None:
    """Brings a database to the tables of before row security."""

    def upgrade(connection: Connection) -> None:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, BEFORE_ROW_SECURITY)

    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(upgrade)
    await engine.dispose()


async def filled_before(url: str) -> None:
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.execute(text("INSERT INTO tenants (id, created_at) VALUES ('acme', 1), ('evil', 1)"))
        await connection.execute(text("INSERT INTO meta (name, value) VALUES ('epoch', 'of before')"))
    await engine.dispose()
