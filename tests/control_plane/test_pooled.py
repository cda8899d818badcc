"""A tenant's setting never leaks through a pool: PgBouncer in transaction mode, or one connection that tasks share."""

import asyncio
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.engine import Database, open_database, open_fitting
from control_plane.adapters.sql.migrate import migrate
from control_plane.adapters.sql.store import SqlStore
from control_plane.core.records import Tenant
from tests.control_plane.pooling import TENANTS, raw, work
from tests.control_plane.postgresql import Logins, database_with_two_logins, free_port
from tests.control_plane.test_store import PLATFORM, event, fill

ROOT: Final = Path(__file__).parents[2]
SERVER_CONNECTIONS: Final = 3


@pytest.fixture
async def logins(server: str) -> Logins:
    """With one of everything, of each tenant."""
    logins = await database_with_two_logins(server)
    owner = open_database(logins.owner)
    await migrate(owner.engine)
    await owner.close()
    app = open_database(logins.app)
    async with SqlStore(app, LocalWake()).write(PLATFORM) as records:
        for tenant in TENANTS:
            await records.tenants.add(Tenant(tenant, 1.5))
    for tenant in TENANTS:
        await fill(SqlStore(app, LocalWake()), tenant)
    await app.close()
    return logins


@contextmanager
def pgbouncer(logins: Logins) -> Iterator[dict[str, str]]:
    """In front of that database; the URLs of both logins through it."""
    folder = Path(tempfile.mkdtemp(prefix="coatcheck-pgbouncer-"))
    folder.chmod(0o755)
    port, target = free_port(), logins.app.rpartition("@")[2].partition("/")[0]
    users = {"coatcheck_app": "change-me-app", "coatcheck_owner": "change-me-owner"}
    (folder / "users.txt").write_text("".join(f'"{user}" "{password}"\n' for user, password in users.items()))
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={target.partition(':')[0]} port={target.partition(':')[2]}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = scram-sha-256\n"
        f"auth_file = {folder}/users.txt\npool_mode = transaction\ndefault_pool_size = {SERVER_CONNECTIONS}\n"
        "max_client_conn = 200\n"
    )
    process = subprocess.Popen(
        ["pgbouncer", "-q", str(folder / "pgbouncer.ini")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        **_unprivileged(),
    )
    try:
        urls = {user: _through(url, port) for user, url in (("app", logins.app), ("owner", logins.owner))}
        _wait_until_it_listens(port, process)
        yield urls
    finally:
        process.terminate()
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged() -> dict[str, Any]:
    """It refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _through(url: str, port: int) -> str:
    before, _, after = url.rpartition("@")
    return f"{before}@127.0.0.1:{port}/{after.partition('/')[2]}"


def _wait_until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        with subprocess.Popen(
            [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"],
            stderr=subprocess.DEVNULL,
        ) as probe:
            if probe.wait() == 0:
                return
        assert process.poll() is None, "PgBouncer ended"
        assert time.monotonic() < deadline, "PgBouncer did not start"


def in_two_processes(url: str, seconds: float, *, tasks_per_tenant: int = 8) -> list[dict[str, Any]]:
    """A driver's names of statements are counted in its process: one alone never meets another's."""
    command = [sys.executable, "-m", "tests.control_plane.pooling", url, str(seconds), str(tasks_per_tenant)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(2)]
    return [json.loads(process.communicate(timeout=seconds + 60)[0]) for process in running]


def check(seen: dict[str, Any]) -> None:
    assert seen["errors"] == {}
    assert (seen["foreign_rows"], seen["rows_without_tenant"]) == (0, 0)
    assert seen["transactions"] > 20


@pytest.mark.needs("pgbouncer")
async def test_behind_pgbouncer_no_row_of_the_other_tenant_and_no_lost_statement(logins: Logins) -> None:
    with pgbouncer(logins) as urls:
        for seen in in_two_processes(urls["app"], 2):
            check(seen)


@pytest.mark.needs("pgbouncer")
async def test_a_pooler_is_noticed_and_a_server_is_not_taken_for_one(logins: Logins) -> None:
    with pgbouncer(logins) as urls:
        for url, is_pooled in ((urls["app"], True), (logins.app, False)):
            database = await open_fitting(url)
            assert database.is_pooled == is_pooled
            await database.close()


@pytest.mark.guards(
    "control_plane/adapters/sql/connections.py",
    "rows = await (prepared.fetch(*arguments) if prepared else self.driver.fetch(statement.text, *arguments))",
    "rows = await (prepared or await self._ready(statement.text)).fetch(*arguments)",
)
@pytest.mark.guards("control_plane/adapters/sql/engine.py", """    "prepared_statement_name_func": lambda: "",\n""", "")
@pytest.mark.needs("pgbouncer")
async def test_behind_pgbouncer_no_statement_stays_with_the_server(logins: Logins) -> None:
    left: list[str] = []

    async def one(store: SqlStore, task: int) -> None:
        for number in range(20):
            async with store.write(PLATFORM) as records:
                await records.tenants.list()  # the ordinary way
                await records.outbox.position()  # in the driver's words, reading
                await records.audit.append([event(100 * task + number)])  # and writing

    with pgbouncer(logins) as urls:
        database = await open_fitting(urls["app"])
        store = SqlStore(database, LocalWake())
        await asyncio.gather(*(one(store, task) for task in range(SERVER_CONNECTIONS * 3)))
        for _ in range(20):
            async with store.read(PLATFORM) as records:
                found = await raw(records.tenants._tx).execute(text("SELECT statement FROM pg_prepared_statements"))
                left += list(found.scalars())
        await database.close()

    assert left == []


@pytest.mark.long
@pytest.mark.needs("pgbouncer")
async def test_behind_pgbouncer_for_longer(logins: Logins) -> None:
    with pgbouncer(logins) as urls:
        for seen in in_two_processes(urls["app"], 30, tasks_per_tenant=25):
            check(seen)


@pytest.mark.needs("pgbouncer")
async def test_behind_pgbouncer_the_owner_sees_nothing(logins: Logins) -> None:
    with pgbouncer(logins) as urls:
        owner = create_async_engine(urls["owner"], connect_args={"statement_cache_size": 0})
        async with owner.connect() as connection:
            rows = (await connection.execute(text("SELECT count(*) FROM sessions"))).scalar_one()
        await owner.dispose()

    assert rows == 0


@pytest.mark.guards(
    "control_plane/adapters/sql/store.py",
    "'{TENANT_SETTING}', {text}, true",
    "'{TENANT_SETTING}', {text}, false",
)
async def test_on_one_connection_that_all_tasks_share(logins: Logins) -> None:
    engine = create_async_engine(logins.app, pool_size=1, max_overflow=0, pool_timeout=30)
    database = Database(engine, reader=None)

    seen = await work(database, 2)

    await database.close()
    check(json.loads(seen.to_json()))
