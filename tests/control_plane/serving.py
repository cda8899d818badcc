"""A control plane that listens on loopback: in a thread of its own, so that tests talk to it as anybody would.

Rule: what a test sees it sees through HTTP or by opening the database file itself.
"""

import asyncio
import json
import os
import shutil
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import uvloop
from sqlalchemy.ext.asyncio import create_async_engine

from control_plane.bootstrap import running
from control_plane.config import Settings
from tests.control_plane.databases import migrated_file

ADMIN_TOKEN = "admin-token-of-these-tests-0123456789abcdef"
PROXY_SECRET = "proxy-secret-of-these-tests-0123456789abcdef"
PROXY = ("test-proxy", PROXY_SECRET)
PROXY_BASE_URL = "http://127.0.0.1:8472"

TRUSTS_NOBODY: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For a client of plain HTTP: reading the system's authorities takes longer than most of the requests that follow."""


class ManualClock:
    """The time of a control plane under test: the real one, plus what the test added."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead

    def advance(self, seconds: float) -> None:
        self.ahead += seconds


@dataclass
class ControlPlane:
    url: str
    folder: Path
    settings: Settings
    clock: ManualClock
    stop: Callable[[], None]
    """Ends it, before the block does."""
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, verify=TRUSTS_NOBODY, trust_env=False, timeout=20)

    @property
    def database(self) -> Path:
        return self.folder / "control-plane.sqlite"

    def admin(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """As the administrator."""
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        return self.http.request(method, path, json=body, headers=headers, **options)

    def made(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """As the administrator, with success."""
        response = self.admin(method, path, body)
        assert response.is_success, response.text
        answer: dict[str, Any] = response.json() if response.content else {}
        return answer

    def edit(self, statement: str, *values: Any) -> int:
        """Changes the database behind the control plane's back; how many rows it changed."""
        if self.settings.database_url.startswith("postgresql"):
            return len(asyncio.run(self._ask_postgresql(f"{statement} RETURNING 1", values)))
        with closing(sqlite3.connect(self.database, timeout=10)) as connection, connection:
            return connection.execute(statement, values).rowcount

    def look(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Reads the database behind the control plane's back."""
        if self.settings.database_url.startswith("postgresql"):
            return asyncio.run(self._ask_postgresql(statement, values))
        with closing(sqlite3.connect(self.database, timeout=10)) as connection:
            return connection.execute(statement, values).fetchall()

    async def _ask_postgresql(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """As whoever owns the tables and no row security binds. Parameters are `?`, as SQLite has them."""
        parts = statement.split("?")
        numbered = "".join(f"{part}${number}" for number, part in enumerate(parts[:-1], start=1)) + parts[-1]
        engine = create_async_engine(self.settings.database_url)
        try:
            async with engine.begin() as connection:
                given = tuple(json.dumps(value) if isinstance(value, list | dict) else value for value in values)
                return [tuple(row) for row in await connection.exec_driver_sql(numbered, given)]
        finally:
            await engine.dispose()


def private_file(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def settings_in(folder: Path, **overrides: Any) -> Settings:
    """Settings with everything a control plane needs, its files in `folder`."""
    if not (folder / "kek.hex").exists():
        private_file(folder / "kek.hex", os.urandom(32).hex())
    private_file(folder / "admin-token", ADMIN_TOKEN)
    private_file(folder / "proxy-secret", PROXY_SECRET)
    clients: list[dict[str, Any]] = [
        {"id": PROXY[0], "kind": "egress_proxy", "tenant": None, "scopes": [], "secret_file": "proxy-secret"}
    ]
    (folder / "clients.json").write_text(json.dumps(clients))
    given: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "database_url": f"sqlite+aiosqlite:///{folder / 'control-plane.sqlite'}",
        "kek_files": (folder / "kek.hex",),
        "admin_token_file": folder / "admin-token",
        "clients_file": folder / "clients.json",
        "proxy_base_url": PROXY_BASE_URL,
        "log_level": "error",
        # Most tests have a PostgreSQL of their own with one login; transactions enter the two roles all the same.
        "unbound_database_login": "accepted-risk",
    }
    return Settings(**(given | overrides))


@contextmanager
def control_plane_in(folder: Path, **overrides: Any) -> Iterator[ControlPlane]:
    """A control plane that serves while the block runs. Raises what its start raised."""
    with control_plane_with(settings_in(folder, **overrides), folder) as control_plane:
        yield control_plane


@contextmanager
def control_plane_with(settings: Settings, folder: Path, *, moves_the_database: bool = True) -> Iterator[ControlPlane]:
    """As `control_plane_in`. Its clock is the database's too, unless it moves its own alone."""
    clock, database = ManualClock(), folder / "control-plane.sqlite"
    if str(database) in settings.database_url and not database.exists():
        shutil.copy(migrated_file(), database)
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("DELETE FROM meta WHERE name = 'epoch'")  # each draws its own
    with _in_a_thread(settings, clock, clock if moves_the_database else None) as (url, stop):
        control_plane = ControlPlane(url, folder, settings, clock, stop)
        with control_plane.http:
            yield control_plane


@contextmanager
def _in_a_thread(
    settings: Settings, clock: Callable[[], float], database_time: Callable[[], float] | None
) -> Iterator[tuple[str, Callable[[], None]]]:
    started, failure = threading.Event(), []
    state: dict[str, Any] = {}

    async def main() -> None:
        state["loop"], state["stop"] = asyncio.get_running_loop(), asyncio.Event()
        async with running(settings, clock=clock, database_time=database_time) as control_plane:
            state["url"] = control_plane.url
            started.set()
            await state["stop"].wait()

    def run() -> None:
        try:
            uvloop.run(main())
        except BaseException as error:
            failure.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="control plane", daemon=True)
    thread.start()
    started.wait()
    if failure:
        thread.join()
        raise failure[0]

    def stop() -> None:
        if thread.is_alive():
            state["loop"].call_soon_threadsafe(state["stop"].set)
            thread.join()

    try:
        yield state["url"], stop
    finally:
        stop()
    if failure:
        raise failure[0]
