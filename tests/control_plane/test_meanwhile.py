"""What another replica does between a replica's look and its write stays done.

PostgreSQL, where several write at once (SQLite has one writer at a time). The other replica is a transaction of the
test's own: it has written, and commits only once the control plane under test waits for it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from tests.control_plane.databases import new_database
from tests.control_plane.issuing import SigningKey
from tests.control_plane.serving import ControlPlane, control_plane_in, private_file
from tests.control_plane.workspace import HOST, JWT, Workspace

T = TypeVar("T")

_WAITING = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
_LOOKS = 2_000


@pytest.fixture(scope="module")
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("meanwhile")
    (folder / "files" / "followed").mkdir(parents=True)
    url = asyncio.run(new_database("postgresql", request, folder))
    with control_plane_in(folder, database_url=url, sources_folder=folder / "files") as serving:
        yield serving


@pytest.fixture
async def elsewhere(plane: ControlPlane) -> AsyncIterator[AsyncConnection]:
    engine = create_async_engine(plane.settings.database_url)
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


async def meanwhile(elsewhere: AsyncConnection, statement: str, values: dict[str, Any], ask: Callable[[], T]) -> T:
    """The answer of a question during which another replica writes, and commits when it is waited for."""
    await elsewhere.execute(text(statement), values)
    asking = asyncio.create_task(asyncio.to_thread(ask))
    watching = create_async_engine(elsewhere.engine.url, isolation_level="AUTOCOMMIT")
    async with watching.connect() as watcher:
        for _ in range(_LOOKS):
            if asking.done() or (await watcher.execute(_WAITING)).scalar_one():
                break
            await asyncio.sleep(0.005)
    await watching.dispose()
    await elsewhere.commit()
    return await asking


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py",
    "where = (*self._where(session), SESSIONS.c.ended_at.is_(None))",
    "where = self._where(session)",
)
async def test_a_session_that_ends_during_its_first_exchange_stays_ended(
    plane: ControlPlane, elsewhere: AsyncConnection
) -> None:
    workspace = Workspace(plane, "ended")
    workspace.add_credential()
    workspace.grant()
    session = workspace.open_session()

    answer = await meanwhile(
        elsewhere,
        "UPDATE sessions SET ended_at = :at WHERE id = :id",
        {"at": plane.clock(), "id": session["session_id"]},
        lambda: workspace.token(subject_token=session["session_token"], subject_token_type=JWT, audience="example"),
    )

    assert (answer.status_code, answer.json().get("code")) == (400, "session_not_found")
    assert plane.made("GET", f"/v1/sessions/{session['session_id']}")["ended_at"] is not None


@pytest.mark.guards(
    "control_plane/sources.py",
    "credential = await records.credentials.locked(kept.credential.id)",
    "credential = await records.credentials.get(kept.credential.id)",
)
async def test_what_an_operator_changes_while_a_secret_is_followed_stays_changed(
    plane: ControlPlane, elsewhere: AsyncConnection
) -> None:
    workspace, key = Workspace(plane, "followed"), plane.folder / "files" / "followed" / "key"
    plane.made("PUT", "/v1/sources/files", {"kind": "file", "path_template": "{tenant}/{name}"})
    private_file(key, "first-value")
    reference = {"source": "files", "name": "key"}
    body = {"name": "example", "destinations": [{"url": f"https://{HOST}"}], "secret_source": reference}
    plane.made("POST", workspace.path("credentials"), body)
    workspace.grant()
    issued = workspace.exchange()
    assert workspace.resolve(issued)["secret"] == "first-value"
    private_file(key, "second-value")
    plane.clock.advance(61)

    await meanwhile(
        elsewhere,
        "UPDATE credentials SET credential_required = true WHERE tenant = :tenant",
        {"tenant": "followed"},
        lambda: workspace.resolve(issued),
    )

    assert workspace.resolve(issued)["secret"] == "second-value"
    assert workspace.credential()["credential_required"] is True


@pytest.mark.guards(
    "control_plane/registry.py",
    "present = await records.clients.locked(client_id)",
    "present = await records.clients.get(client_id)",
)
async def test_a_client_whose_secret_is_taken_while_its_proofs_change_does_not_get_it_back(
    plane: ControlPlane, elsewhere: AsyncConnection
) -> None:
    workspace = Workspace(plane, "leaked")
    keys = [SigningKey("own", "EdDSA").jwk]

    changed = await meanwhile(
        elsewhere,
        "UPDATE clients SET secret_sha256 = '' WHERE id = :id",
        {"id": workspace.runtime},
        lambda: plane.admin("PATCH", f"/v1/clients/{workspace.runtime}", {"proofs": {"keys": keys}}),
    )

    assert changed.status_code == 200, changed.text
    assert workspace.token(subject_token="x", subject_token_type=JWT, audience="example").status_code == 401
