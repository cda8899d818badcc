"""`python -m bench.control_plane`: what an exchange and a resolve cost the control plane, and what placeholders cost.

The control plane is one process, pinned to the core that proxies have elsewhere; load and PostgreSQL are on the other.
Every exchange is a whole one: a session token verified, a grant found, a placeholder and a proxy credential written
with their audit event in one transaction. On PostgreSQL what is committed is on the disk (fsync, synchronous commit).

What counts is our own process's processor time for a thousand of them; on a machine with little to do so do the rates.

    python -m bench.control_plane [--seconds 3] [--whole] [--update docs/performance.md]

Ends with one line of JSON.
"""

import argparse
import asyncio
import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from rich.console import Console
from rich.table import Table
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from bench.contestants import LOAD_CORE, PROXY_CORE, pin
from bench.load import Measured, Plan
from tests.control_plane.postgresql import database_with_two_logins, postgresql_server
from tests.support.api import JWT, TOKEN_EXCHANGE, ControlPlaneApi, RuntimeClient, Ticket
from tests.support.processes import Served, free_port, start_control_plane

CONNECTIONS: Final = 16
WARM_UP_SECONDS: Final = 1.0
PLACEHOLDERS: Final = (1_000, 100_000)
MANY_PLACEHOLDERS: Final = 1_000_000
GOAL_EXCHANGE: Final = 1.5
GOAL_RESOLVE: Final = 0.6
"""Seconds of processor time for a thousand."""
HOST: Final = "api.example.com"

BEGIN: Final = "<!-- begin: measured by bench.control_plane -->"
END: Final = "<!-- end: measured by bench.control_plane -->"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the result."""

    database: str
    placeholders: int
    """Live ones in the database when it was measured."""
    what: str
    per_second: float
    p99_ms: float
    cpu_seconds_per_1000: float
    goal: float

    @property
    def is_met(self) -> bool:
        return self.cpu_seconds_per_1000 <= self.goal


@dataclass(frozen=True, slots=True)
class Cost:
    """Of ten thousand live placeholders, each with its proxy credential and its audit event."""

    database: str
    memory_mb: float
    """By which the process grew."""
    database_mb: float


@dataclass
class Stand:
    database: str
    served: Served
    api: ControlPlaneApi
    proxy_secret: str
    port: int
    url: str
    """Of the database, to write many rows at once and to ask how large it is."""

    def __post_init__(self) -> None:
        self.api.put_tenant("acme")
        self.client: RuntimeClient = self.api.add_client("acme-runtime", kind="runtime", tenant="acme")
        self.api.add_credential(
            "acme", "example", secret="sk-0123456789abcdef", destinations=[{"url": f"https://{HOST}"}]
        )
        self.api.add_grant("acme", "example", subject="alice")

    def session(self) -> dict[str, Any]:
        return self.api.open_session(runtime=self.client.id, tenant="acme", subject="alice")

    def ticket(self) -> Ticket:
        return self.api.exchange(self.client, session_token=self.session()["session_token"], audience="example")

    # --- what is asked

    def exchange(self) -> str:
        form = urlencode(
            {
                "grant_type": TOKEN_EXCHANGE,
                "subject_token": self.session()["session_token"],
                "subject_token_type": JWT,
                "audience": "example",
            }
        )
        return self._post("/oauth/token", form, "application/x-www-form-urlencoded", self.client.id, self.client.secret)

    def resolve(self) -> str:
        ticket = self.ticket()
        ask = {
            "kind": "placeholder",
            "placeholder_sha256": hashlib.sha256(ticket.placeholder.encode()).hexdigest(),
            "caller": {
                "client": self.client.id,
                "tenant": "acme",
                "subject": "alice",
                "session": ticket.answer["session_id"],
            },
            "endpoint": {"scheme": "https", "host": HOST, "port": 443},
        }
        body = json.dumps({"ask": ask})
        return self._post("/internal/resolve", body, "application/json", "proxy-1", self.proxy_secret)

    def _post(self, path: str, body: str, media_type: str, user: str, password: str) -> str:
        # RFC 6749 §2.3.1: both parts are form-encoded first.
        basic = base64.b64encode(f"{quote(user)}:{quote(password)}".encode()).decode()
        return (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Basic {basic}\r\n"
            f"Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        )

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.served.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) / 1024

    # --- the database

    def run(self, *statements: str) -> Any:
        """Raw statements; the first value of the last one."""

        async def work() -> Any:
            engine = create_async_engine(self.url, isolation_level="AUTOCOMMIT")
            async with engine.connect() as connection:
                for statement in statements:
                    result = await connection.execute(text(statement))
            found = result.scalar() if result.returns_rows else None
            await engine.dispose()
            return found

        return asyncio.run(work())

    def database_mb(self) -> float:
        if self.database == "PostgreSQL":
            return float(self.run("SELECT pg_database_size(current_database())")) / 2**20
        size = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
        return float(self.run("PRAGMA wal_checkpoint(TRUNCATE)", size)) / 2**20

    def placeholders(self) -> int:
        return int(self.run("SELECT count(*) FROM tokens WHERE kind = 'placeholder'"))

    def fill(self, placeholders: int) -> None:
        """As many live placeholders as that, of sessions of their own. What exchanges wrote before is taken out."""
        self.run("DELETE FROM tokens WHERE subject = 'alice'")
        there = self.placeholders()
        missing = placeholders - there
        assert missing > 0, "each number is larger than the one before"
        prefix, until = f"fill{there}_", time.time() + 86_400
        if self.database == "PostgreSQL":
            numbers, sha = "generate_series(1, {n}) AS i", f"encode(sha256(('{prefix}' || i)::bytea), 'hex')"
        else:
            numbers = "(WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {n}) SELECT i FROM n)"
            sha = "lower(hex(randomblob(32)))"
        sessions = max(1, missing // 10)
        rows = numbers.format(n=missing)
        self.run(
            "INSERT INTO sessions (id, tenant, subject, roles, runtime, created_at, not_after) "
            f"SELECT '{prefix}' || i, 'acme', 'subject-' || i, '[]', 'acme-runtime', 1, {until} "
            f"FROM {numbers.format(n=sessions)}",
            "INSERT INTO tokens (sha256, id, kind, tenant, subject, scope, act, session, client, credential_id, "
            "ttl_seconds, created_at, expires_at) "
            f"SELECT {sha}, '{prefix}ph_' || i, 'placeholder', 'acme', 'subject-' || (i % {sessions} + 1), '', '[]', "
            f"'{prefix}' || (i % {sessions} + 1), 'acme-runtime', (SELECT id FROM credentials LIMIT 1), 900, 1, "
            f"{until} "
            f"FROM {rows}",
            *(["VACUUM ANALYZE", "CHECKPOINT"] if self.database == "PostgreSQL" else ["ANALYZE"]),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.control_plane", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--whole", action="store_true", help="also with a million placeholders: minutes more")
    parser.add_argument("--update", metavar="FILE")
    options = parser.parse_args(arguments)
    console = Console(width=120)
    if len(os.sched_getaffinity(0)) < 2:
        console.print("two cores are needed: one for the control plane, one for the load and PostgreSQL")
        return 1
    pin(os.getpid(), LOAD_CORE)  # a thread here reads what the control plane logs
    before = round(os.getloadavg()[0], 2)
    lines: list[Line] = []
    costs: list[Cost] = []
    with tempfile.TemporaryDirectory(prefix="coatcheck-bench-") as folder:
        for opened in (embedded(Path(folder) / "sqlite"), on_postgresql(Path(folder) / "postgresql")):
            with opened as stand:
                costs.append(cost_of(stand, options.seconds))
                for number in (*PLACEHOLDERS, *([MANY_PLACEHOLDERS] if options.whole else [])):
                    stand.fill(number)
                    lines += [
                        measured(stand, number, "resolve", stand.resolve(), GOAL_RESOLVE, options.seconds),
                        measured(stand, number, "exchange", stand.exchange(), GOAL_EXCHANGE, options.seconds),
                    ]
    result = {
        "lines": [asdict(line) | {"met": line.is_met} for line in lines],
        "cost_per_10000_placeholders": [asdict(cost) for cost in costs],
        "load_average_before": before,
        "seconds": options.seconds,
        "connections": CONNECTIONS,
    }
    show(lines, costs, console)
    print(json.dumps({"control_plane": result}))
    if options.update:
        update(Path(options.update), lines, costs, before)
    return 0


@contextmanager
def embedded(folder: Path) -> Iterator[Stand]:
    folder.mkdir()
    with _stand(folder, "SQLite", f"sqlite+aiosqlite:///{folder / 'control-plane.sqlite'}") as stand:
        yield stand


@contextmanager
def on_postgresql(folder: Path) -> Iterator[Stand]:
    folder.mkdir()
    with postgresql_server(durable=True) as server:
        assert server.process is not None
        pin(server.process.pid, LOAD_CORE)
        logins = asyncio.run(database_with_two_logins(server.url))
        settings = {"DATABASE_URL": logins.app, "MIGRATION_DATABASE_URL": logins.owner}
        with _stand(folder, "PostgreSQL", logins.superuser, **settings) as stand:
            assert stand.run("SHOW fsync") == "on"
            assert stand.run("SHOW synchronous_commit") == "on"
            yield stand


@contextmanager
def _stand(folder: Path, database: str, url: str, **settings: str) -> Iterator[Stand]:
    port = free_port()
    served, admin_token = start_control_plane(
        folder, LISTEN=f"127.0.0.1:{port}", PROXY_BASE_URL="http://127.0.0.1:9", LOG_LEVEL="info", **settings
    )
    pin(served.pid, PROXY_CORE)
    api = ControlPlaneApi(f"http://127.0.0.1:{port}", admin_token)
    try:
        yield Stand(database, served, api, (folder / "proxy-secret").read_text(), port, url)
    finally:
        api.close()
        served.stop()


def cost_of(stand: Stand, seconds: float) -> Cost:
    """After a first round, in which the process grows to its size."""
    _drive(stand, stand.exchange(), seconds)
    memory, size, there = stand.memory_mb(), stand.database_mb(), stand.placeholders()
    _drive(stand, stand.exchange(), seconds)
    scale = 10_000 / (stand.placeholders() - there)
    return Cost(
        stand.database,
        memory_mb=max(0.0, stand.memory_mb() - memory) * scale,
        database_mb=max(0.0, stand.database_mb() - size) * scale,
    )


def measured(stand: Stand, placeholders: int, what: str, request: str, goal: float, seconds: float) -> Line:
    found = _drive(stand, request, seconds)
    return Line(
        stand.database,
        placeholders,
        what,
        per_second=found.requests_per_second,
        p99_ms=found.p99_microseconds / 1000,
        cpu_seconds_per_1000=found.cpu_microseconds_per_request / 1000,
        goal=goal,
    )


def _drive(stand: Stand, request: str, seconds: float) -> Measured:
    plan = Plan(
        "127.0.0.1", stand.port, request, connections=CONNECTIONS, warm_up_seconds=WARM_UP_SECONDS, seconds=seconds,
        watch_pids=[stand.served.pid],
    )  # fmt: skip
    done = subprocess.run(
        ["taskset", "-c", str(LOAD_CORE), sys.executable, "-m", "bench.load"],
        input=json.dumps(asdict(plan)),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=seconds + 60,
    )
    return Measured(**json.loads(done.stdout))


# --- what is shown ---------------------------------------------------------------------------------------------------


def show(lines: Sequence[Line], costs: Sequence[Cost], console: Console) -> None:
    table = Table(box=None)
    for column in ("database", "live placeholders", "", "a second", "p99 ms", "CPU s per 1,000", "goal"):
        table.add_column(column, justify="left" if column in ("database", "") else "right")
    for line in lines:
        table.add_row(*_cells(line))
    console.print(table)
    for cost in costs:
        console.print(_sentence(cost))


def update(document: Path, lines: Sequence[Line], costs: Sequence[Cost], load: float) -> None:
    """Replaces what stands between the markers. Raises `ValueError` without them."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no {BEGIN} … {END}")
    table = [
        "| database | live placeholders | | a second | p99 ms | CPU s per 1,000 | goal |",
        "|---|---:|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(_cells(line))} |" for line in lines),
        "",
        *(f"- {_sentence(cost)}" for cost in costs),
        "",
        f"Load average before it began: {load}.",
    ]
    document.write_text(f"{before}{BEGIN}\n\n" + "\n".join(table) + f"\n\n{END}{after}")


def _cells(line: Line) -> list[str]:
    return [
        line.database,
        f"{line.placeholders:,}",
        line.what,
        f"{line.per_second:,.0f}",
        f"{line.p99_ms:,.0f}",
        f"{line.cpu_seconds_per_1000:.2f}",
        f"{line.goal:g}: {'met' if line.is_met else 'missed'}",
    ]


def _sentence(cost: Cost) -> str:
    return (
        f"{cost.database}: 10,000 live placeholders, each with its proxy credential and its audit event, take "
        f"{cost.database_mb:.1f} MiB of the database and {cost.memory_mb:.1f} MiB of the process"
    )


if __name__ == "__main__":
    sys.exit(main())
