"""A control plane on PostgreSQL and Valkey, each a process of its own that a test may kill where it likes.

Rule: what is true afterwards is read from the database itself. `faults` lists every statement about it that does not
hold: one version in use, every placeholder with its audit event, every ended session with nothing left on it.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import trustme
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.control_plane.postgresql import Logins, PostgreSql, database_with_two_logins, postgresql_server
from tests.control_plane.serving import ControlPlane, ManualClock, private_file, settings_in
from tests.control_plane.valkey import PASSWORD, Valkey, valkey
from tests.support.processes import ProcessEndedError, Served, clean_environment, free_port, wait_for
from tests.support.token_provider import TokenProvider
from tests.support.upstream import Request, Upstream, Wire, message

PROGRAM: Final = Path(__file__).parent / "programs" / "control_plane_at_fault_points.py"
ROOT: Final = Path(__file__).parents[2]


@dataclass
class Outside:
    """Servers of others that the control plane asks."""

    provider: TokenProvider
    hook: Upstream
    ca_file: Path
    hook_secrets: dict[str, str] = field(default_factory=dict)
    """By attempt: who is asked again answers with the same value."""

    async def answer_hook(self, request: Request, wire: Wire) -> None:
        attempt = json.loads(request.body)["attempt"]
        secret = self.hook_secrets.setdefault(attempt, f"made-for-{attempt}-0123456789")
        await wire.write(message(json.dumps({"secret": secret}).encode()))

    @property
    def allowed(self) -> str:
        return f"localhost:{self.provider.server.port},localhost:{self.hook.port}"


@dataclass
class Stand:
    """One replica under test, and the servers that it needs."""

    folder: Path
    database: PostgreSql
    hints: Valkey
    outside: Outside
    logins: Logins
    port: int = field(default_factory=free_port)
    served: Served | None = None
    plane: ControlPlane = field(init=False)

    def __post_init__(self) -> None:
        settings = settings_in(self.folder, database_url=self.logins.app)
        self.plane = ControlPlane(f"http://127.0.0.1:{self.port}", self.folder, settings, ManualClock(), self.kill)
        private_file(self.folder / "redis-password", PASSWORD)
        private_file(self.folder / "older-kek.hex", os.urandom(32).hex())

    # --- the replica

    def start(self) -> None:
        """Raises `ProcessEndedError`."""
        if self.served is not None and self.served.process.poll() is None:
            return
        own = {
            "LISTEN": f"127.0.0.1:{self.port}",
            "DATABASE_URL": self.logins.app,
            "MIGRATION_DATABASE_URL": self.logins.owner,
            "REDIS_URL": self.hints.url,
            "REDIS_PASSWORD_FILE": str(self.folder / "redis-password"),
            "KEK_FILES": f"{self.folder / 'kek.hex'},{self.folder / 'older-kek.hex'}",
            "SOURCES_FOLDER": str(self.folder / "sources"),
            "ADMIN_TOKEN_FILE": str(self.folder / "admin-token"),
            "CLIENTS_FILE": str(self.folder / "clients.json"),
            "OUTBOUND_ALLOW": self.outside.allowed,
            "OUTBOUND_CA_FILES": str(self.outside.ca_file),
            "PROXY_BASE_URL": "http://127.0.0.1:9",
            "LOG_LEVEL": "warning",
        }
        environment = clean_environment(
            **{f"COATCHECK_CONTROL_PLANE_{name}": value for name, value in own.items()}, PYTHONPATH=str(ROOT)
        )
        self.served = Served([sys.executable, str(PROGRAM), str(self.folder)], environment, cwd=ROOT)
        self.served.wait_until_listening()
        self.plane.http.close()
        self.plane.http = httpx.Client(base_url=self.plane.url, trust_env=False, timeout=30)

    def kill(self) -> None:
        if self.served is not None:
            self.served.kill()

    def has_died(self) -> bool:
        return self.served is None or self.served.process.poll() is not None

    # --- its fault points

    def arm(self, point: str, what: str) -> None:
        for left in ("waiting", "go_on"):
            (self.folder / left).unlink(missing_ok=True)
        (self.folder / "at.new").write_text(f"{point} {what}")
        (self.folder / "at.new").rename(self.folder / "at")

    def disarm(self) -> bool:
        """Whether it was still armed: the point was not reached."""
        armed = (self.folder / "at").exists()
        (self.folder / "at").unlink(missing_ok=True)
        return armed

    def waits(self) -> bool:
        return (self.folder / "waiting").exists()

    def go_on(self) -> None:
        (self.folder / "waiting").unlink()
        (self.folder / "go_on").touch()

    def reached(self) -> set[str]:
        """Every point since the last time that this was asked."""
        file = self.folder / "reached"
        names = set(file.read_text().split()) if file.exists() else set()
        file.unlink(missing_ok=True)
        return names

    # --- the database, behind its back

    def change(self, statement: str, **values: Any) -> None:
        async def write() -> None:
            engine = create_async_engine(self.logins.superuser)
            async with engine.begin() as connection:
                await connection.execute(text(statement), values)
            await engine.dispose()

        asyncio.run(write())

    def rows(self, statement: str, **values: Any) -> list[Any]:
        (found,) = self._found([(statement, values)])
        return found

    def faults(self) -> list[str]:
        """What is lost or doubled."""
        found = self._found([(query, {}) for query in CONSISTENT.values()])
        return [f"{what}: {rows[:3]}" for what, rows in zip(CONSISTENT, found, strict=True) if rows]

    def _found(self, queries: Sequence[tuple[str, dict[str, Any]]]) -> list[list[Any]]:
        async def ask() -> list[list[Any]]:
            engine = create_async_engine(self.logins.superuser)
            async with engine.connect() as connection:
                found = [list((await connection.execute(text(query), values)).all()) for query, values in queries]
            await engine.dispose()
            return found

        return asyncio.run(ask())


CONSISTENT: Final = {
    "a credential without exactly one version in use": """
        SELECT id FROM credentials WHERE 1 <> (SELECT count(*) FROM credential_versions AS v
            WHERE v.credential_id = credentials.id AND v.version = current_version AND v.state = 'active')
           OR 1 <> (SELECT count(*) FROM credential_versions AS v
            WHERE v.credential_id = credentials.id AND v.state = 'active')""",
    "an envelope of a version that is over, or none of one that is not": """
        SELECT credential_id, version, state FROM credential_versions
         WHERE (envelope IS NULL) <> (state IN ('retired', 'revoked'))""",
    "a placeholder without its one audit event": """
        SELECT id FROM tokens WHERE kind = 'placeholder' AND subject NOT LIKE 'cred%' AND 1 <> (
            SELECT count(*) FROM audit_events WHERE action IN ('exchange', 'placeholder.issue')
               AND code IS NULL AND record ->> 'placeholder_id' = tokens.id)""",
    "an exchange that gave nothing": """
        SELECT event_id FROM audit_events WHERE action = 'exchange' AND code IS NULL
           AND tenant IN (SELECT id FROM tenants)
           AND record ->> 'placeholder_id' NOT IN (SELECT id FROM tokens)""",
    "a session that was not opened exactly once": """
        SELECT id FROM sessions WHERE 1 <> (SELECT count(*) FROM audit_events
            WHERE action = 'session.open' AND record ->> 'session' = sessions.id)""",
    "a session that ended without its one event, or its one change": """
        SELECT id FROM sessions WHERE ended_at IS NOT NULL AND (
            1 <> (SELECT count(*) FROM audit_events WHERE action = 'session.end' AND record ->> 'session' = sessions.id)
         OR 1 <> (SELECT count(*) FROM outbox WHERE kind = 'session' AND revoked AND subject_id = sessions.id))""",
    "something alive on an ended session": """
        SELECT tokens.id FROM tokens JOIN sessions ON sessions.id = tokens.session
         WHERE sessions.ended_at IS NOT NULL AND tokens.revoked_at IS NULL
        UNION ALL SELECT allow_rules.id FROM allow_rules JOIN sessions ON sessions.id = allow_rules.session
         WHERE sessions.ended_at IS NOT NULL""",
    "a grant that went without telling anybody, or twice": """
        SELECT tenant FROM (
            SELECT tenant, count(*) AS events,
                   (SELECT count(*) FROM outbox WHERE kind = 'grant' AND outbox.tenant = audit_events.tenant) AS changes
              FROM audit_events WHERE action = 'grant.remove' GROUP BY tenant) AS told WHERE events <> changes""",
    "a live placeholder of a credential that nobody is granted": """
        SELECT id FROM tokens WHERE kind = 'placeholder' AND revoked_at IS NULL AND subject NOT LIKE 'cred%'
           AND NOT EXISTS (SELECT FROM grants WHERE grants.credential_id = tokens.credential_id)""",
    "own keys of one purpose that are not one": """
        SELECT purpose FROM own_keys GROUP BY purpose HAVING count(*) <> 1""",
    "a database with two epochs, or none": "SELECT 1 WHERE 1 <> (SELECT count(*) FROM meta WHERE name = 'epoch')",
    "a number of a change that was given twice": "SELECT sequence FROM outbox GROUP BY sequence HAVING count(*) > 1",
}


@contextmanager
def standing(folder: Path) -> Iterator[Stand]:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "outside-ca.pem"))
    with (
        postgresql_server() as database,
        valkey() as hints,
        TokenProvider(ca) as provider,
        Upstream(ca) as hook,
    ):
        outside = Outside(provider, hook, folder / "outside-ca.pem")
        hook.on("/hook", outside.answer_hook)
        stand = Stand(folder, database, hints, outside, asyncio.run(database_with_two_logins(database.url)))
        try:
            yield stand
        finally:
            stand.kill()
            stand.plane.http.close()


def fresh(stand: Stand) -> Stand:
    """Another replica's start: an empty database on the same servers."""
    folder = stand.folder / "fresh"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    logins = asyncio.run(database_with_two_logins(stand.database.url))
    return Stand(folder, stand.database, stand.hints, stand.outside, logins)


__all__ = ["ProcessEndedError", "Stand", "fresh", "standing", "wait_for"]
