"""Ciphertext moved between rows, as the upstream sees it: nothing. (Case C45)

Somebody with a hand in the database moves or changes what is sealed there, behind running processes. Whoever then uses
the row is refused at the proxy, the trail says so, every other row works on, and no process logs a key or a secret.
"""

import secrets
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import pytest

from tests.support.processes import Deployment, Workspace, wait_for
from tests.support.upstream import Upstream, plain
from tests.support.ways import Kind, Way, way

WRAPPED = 1 + 12 + 32 + 16
"""An envelope begins with its format and the wrapped data key; a nonce and the ciphertext follow."""


@dataclass(slots=True)
class Row:
    """One credential version as it lies in the database, and the way of somebody who uses it."""

    deployment: Deployment
    credential_id: str
    secret: str
    way: Way
    version: int = 1

    @property
    def envelope(self) -> bytes:
        ((found,),) = self._ask("SELECT envelope FROM credential_versions WHERE credential_id = ? AND version = ?")
        return bytes(found)

    @envelope.setter
    def envelope(self, envelope: bytes) -> None:
        self._ask("UPDATE credential_versions SET envelope = ? WHERE credential_id = ? AND version = ?", envelope)

    def is_served(self, upstream: Upstream) -> bool:
        """With its own secret, and no other one."""
        answer = self.way.ask("GET", f"/{self.credential_id}")
        seen = [request.header("authorization") for request in upstream.seen(f"/{self.credential_id}")]
        return answer.status == 200 and seen == [f"Bearer {self.secret}"]

    def _ask(self, statement: str, *values: bytes) -> list[tuple[bytes]]:
        (database,) = (file for file in self.deployment.database_files if file.suffix == ".sqlite")
        with closing(sqlite3.connect(database, timeout=10)) as connection, connection:
            return connection.execute(statement, (*values, self.credential_id, self.version)).fetchall()


@dataclass(slots=True)
class Rows:
    """Two credentials of one tenant, one of another tenant, and a fourth that nobody touches."""

    workspace: Workspace
    ours: Row
    second: Row
    theirs: Row
    untouched: Row


def row(workspace: Workspace, upstream: Upstream, name: str, kind: Kind) -> Row:
    key = f"sk-real-{secrets.token_hex(20)}"
    workspace.credential(name, url=upstream.url, secret=key)
    shown = workspace.api.ask("GET", f"/v1/tenants/{workspace.tenant}/credentials/{name}")
    through = way(workspace, upstream, workspace.ticket(name), kind, credential=name)
    return Row(workspace.deployment, shown["id"], key, through)


@pytest.fixture
def rows(deployment: Deployment, workspace: Workspace, upstream: Upstream, kind: Kind) -> Rows:
    upstream.default = plain(b"ok")
    other = deployment.workspace()
    ours, second, untouched = (row(workspace, upstream, name, kind) for name in ("api", "second", "untouched"))
    return Rows(workspace, ours, second, row(other, upstream, "api", kind), untouched)


def another_tenants(rows: Rows) -> list[Row]:
    rows.ours.envelope = rows.theirs.envelope
    return [rows.ours]


def two_of_one_tenant(rows: Rows) -> list[Row]:
    rows.ours.envelope, rows.second.envelope = rows.second.envelope, rows.ours.envelope
    return [rows.ours, rows.second]


def an_older_version(rows: Rows) -> list[Row]:
    old, rows.ours.version = rows.ours.envelope, 2
    rows.workspace.api.rotate(rows.workspace.tenant, "api", secret=f"sk-new-{secrets.token_hex(20)}")
    rows.ours.envelope = old
    return [rows.ours]


def wrapped_data_keys(rows: Rows) -> list[Row]:
    ours, second = rows.ours.envelope, rows.second.envelope
    rows.ours.envelope, rows.second.envelope = second[:WRAPPED] + ours[WRAPPED:], ours[:WRAPPED] + second[WRAPPED:]
    return [rows.ours, rows.second]


def one_bit(rows: Rows) -> list[Row]:
    envelope = bytearray(rows.ours.envelope)
    envelope[-1] ^= 1
    rows.ours.envelope = bytes(envelope)
    return [rows.ours]


MOVES = (another_tenants, two_of_one_tenant, an_older_version, wrapped_data_keys, one_bit)


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.guards("control_plane/core/sealing.py", '"credential": credential.id,', '"credential": "",')
@pytest.mark.guards("control_plane/core/sealing.py", '"version": version,', '"version": 1,')
def test_what_was_moved_is_refused_and_the_upstream_gets_nothing(
    deployment: Deployment, upstream: Upstream, rows: Rows, move: Callable[[Rows], list[Row]]
) -> None:
    moved = move(rows)

    answers = [each.way.ask("GET", f"/{each.credential_id}") for each in moved]

    assert [(answer.status, answer.refusal) for answer in answers] == [(503, "credential_unavailable")] * len(moved)
    assert upstream.requests == [], "nothing went upstream"
    assert rows.untouched.is_served(upstream)
    assert rows.theirs.is_served(upstream)
    for answer in answers:
        request_id = answer.header("coatcheck-request-id")
        wait_for(partial(recorded, rows, request_id))
        assert recorded(rows, request_id) == ["credential_unavailable"]
    secrets_of_all = [each.secret for each in (rows.ours, rows.second, rows.theirs)]
    kek = (deployment.folder / "kek.hex").read_text().strip()
    shown = deployment.logs() + "".join(answer.body.decode() for answer in answers)
    assert not any(text in shown for text in (*secrets_of_all, kek))


def recorded(rows: Rows, request_id: str) -> list[str]:
    """Codes of the request's events in the tenant's trail."""
    return [event["code"] for event in rows.workspace.api.audit(rows.workspace.tenant, request_id=request_id)]
