"""A replica whose clock is hours off: whose turn it is, and when a step is over, is judged by the database's clock."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.engine import Database
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.kinds import CredentialKind
from control_plane.core.records import MintingState
from tests.control_plane.databases import BOTH, new_database
from tests.control_plane.minting import Minting, minting
from tests.control_plane.rotating import PLATFORM, Clock, Replica
from tests.control_plane.serving import ControlPlane, control_plane_with, settings_in
from tests.control_plane.test_alarms import wait_for
from tests.control_plane.test_minting import ca, ca_file, crashing, provider  # noqa: F401 (fixtures)
from tests.control_plane.workspace import Json, Workspace
from tests.support.token_provider import TokenProvider

HOURS = 6 * 3600.0


def by_a_wrong_clock(replica: Replica, *, seconds: float) -> Replica:
    """Another replica on the same database, whose clock alone is off."""
    clock = Clock()
    clock.now = replica.clock.now + seconds
    return replace(replica, clock=clock, database_clock=replica.clock)


@pytest.fixture
async def world(database: Database, provider: TokenProvider, ca_file: Path) -> Minting:  # noqa: F811
    return minting(database, provider, ca_file)


@BOTH
@pytest.mark.parametrize("seconds", [HOURS, -HOURS], ids=["ahead", "behind"])
async def test_nobody_takes_over_a_question_that_is_under_way(world: Minting, seconds: float) -> None:
    """Else a refresh token that may be sent once would count as lost, or be sent twice."""
    await world.add_refresh_token()
    replica, stuck = crashing(world, CredentialKind.OAUTH_REFRESH_TOKEN)
    asking = asyncio.ensure_future(world.value(replica))
    await stuck.answered.wait()

    wrong = asyncio.ensure_future(world.value(by_a_wrong_clock(world.replica, seconds=seconds)))
    await asyncio.wait([wrong], timeout=0.5)  # it looks, and sees that it is not its turn
    meanwhile = (await world.minted()).state
    stuck.lives_after_all.set()
    answer = await asking
    await wrong

    assert meanwhile is MintingState.NEW
    assert answer.startswith("at-")
    assert world.provider.reused == 0
    assert "credential.consent_lost" not in await world.replica.actions()


@BOTH
@pytest.mark.guards(
    "control_plane/adapters/sql/minted.py", "now = await self._tx.now()", "now = await self._tx.now() + 21_600"
)
async def test_a_lease_taken_by_a_wrong_clock_ends_when_it_should(world: Minting) -> None:
    await world.add_client_credentials()
    wrong = by_a_wrong_clock(world.replica, seconds=HOURS)
    stuck_replica, stuck = crashing(replace(world, replica=wrong), CredentialKind.OAUTH_CLIENT_CREDENTIALS)
    asking = asyncio.ensure_future(world.value(stuck_replica))
    await stuck.answered.wait()

    ends = (await world.minted()).leased_until - world.replica.clock()
    stuck.lives_after_all.set()
    await asking

    assert 0 < ends <= 15


@BOTH
async def test_both_databases_say_what_time_it_is(database: Database) -> None:
    async with SqlStore(database, LocalWake()).read(PLATFORM) as records:
        before, now, after = time.time(), await records.now(), time.time()

    assert before - 1 <= now <= after + 1


@pytest.fixture(params=["sqlite", "postgresql"])
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ControlPlane]:
    """Its clock may go wrong; its database's does not."""
    settings = settings_in(tmp_path)
    if request.param == "postgresql":
        settings = settings_in(tmp_path, database_url=asyncio.run(new_database(request.param, request, tmp_path)))
    with control_plane_with(settings, tmp_path, moves_the_database=False) as plane:
        yield plane


def test_a_canary_lasts_as_long_as_it_should_where_a_replicas_clock_is_hours_ahead(serving: ControlPlane) -> None:
    workspace = Workspace(serving, "acme")
    for name in ("example", "other"):
        workspace.add_credential(name)
        workspace.rotate("a-new-key-0123456789", name=name, canary_percent=20, canary_seconds=600)

    serving.clock.advance(HOURS)
    # What is due is taken in the order in which it began: when the second has moved, the first was looked at.
    serving.edit("UPDATE rotations SET ends_at = 0 WHERE credential_id = ?", workspace.credential("other")["id"])
    wait_for(lambda: rotation(workspace, "other")["phase"] != "canary")

    assert rotation(workspace, "other")["phase"] != "canary"
    assert rotation(workspace, "example")["phase"] == "canary"


def rotation(workspace: Workspace, name: str) -> Json:
    found: Json = workspace.credential(name)["rotation"]
    return found
