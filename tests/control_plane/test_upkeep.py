"""What is over is forgotten, and nothing that could still be used, renewed or missed."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.engine import open_database
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.caller import ClientId, PlaceholderId, SessionId, SubjectId, TenantId
from control_plane.core.records import Change, ChangeKind, Session, Tenant, Token, TokenKind
from control_plane.core.tokens import CLOCK_SKEW_SECONDS
from control_plane.ports import CrossTenantReason, PlatformScope
from control_plane.upkeep import CHANGES_KEPT, ROWS_AT_ONCE, Upkeep
from tests.control_plane.databases import migrated_file
from tests.control_plane.rotating import Clock

NOW = 100 * 86_400.0
DAY = 86_400.0
PLATFORM = PlatformScope(CrossTenantReason.ADMINISTER)
ACME = TenantId("acme")

SESSION = Session(
    id=SessionId("ses_live"),
    tenant=ACME,
    subject=SubjectId("alice"),
    roles=(),
    runtime=ClientId("runtime"),
    joined_by=None,
    created_at=NOW - 30 * DAY,
    not_after=NOW + DAY,
    ended_at=None,
)
TOKEN = Token(
    sha256="0" * 64,
    id=PlaceholderId("ph_0"),
    kind=TokenKind.PLACEHOLDER,
    tenant=ACME,
    subject=SubjectId("alice"),
    session=SESSION.id,
    client=ClientId("runtime"),
    credential_id=None,
    ttl_seconds=900,
    created_at=NOW - 20 * DAY,
    expires_at=NOW - 20 * DAY,
    revoked_at=None,
)


@pytest.fixture
def clock() -> Clock:
    """The database's."""
    clock = Clock()
    clock.now = NOW
    return clock


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[SqlStore]:
    shutil.copy(migrated_file(), tmp_path / "store.sqlite")
    database = open_database(f"sqlite+aiosqlite:///{tmp_path / 'store.sqlite'}")
    store = SqlStore(database, LocalWake(), time=clock)
    async with store.write(PLATFORM) as records:
        await records.tenants.add(Tenant(ACME, 1.0))
        await records.sessions.add(SESSION)
    yield store
    await database.close()


@pytest.fixture
def upkeep(store: SqlStore) -> Upkeep:
    return Upkeep(store)


async def left(store: SqlStore) -> set[str]:
    async with store.read(PLATFORM) as records:
        return {token.id for token in await records.tokens.list(TokenKind.PLACEHOLDER)}


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py", "and_(TOKENS.c.expires_at < dead_before, ~session_lives)", "true()"
)
async def test_a_token_that_can_still_be_used_or_renewed_is_kept(store: SqlStore, upkeep: Upkeep) -> None:
    over = replace(SESSION, id=SessionId("ses_over"), not_after=NOW - 2 * DAY)
    just_over = replace(SESSION, id=SessionId("ses_just_over"), ended_at=NOW - 60)
    tokens = {
        "ph_renewable": replace(TOKEN, session=SESSION.id),
        "ph_by_hand_alive": replace(TOKEN, session=None, expires_at=NOW + 60),
        "ph_by_hand_just_over": replace(TOKEN, session=None, expires_at=NOW - 60),
        "ph_by_hand_over": replace(TOKEN, session=None),
        "ph_session_over": replace(TOKEN, session=over.id),
        "ph_session_just_over": replace(TOKEN, session=just_over.id, expires_at=NOW - 60),
    }
    async with store.write(PLATFORM) as records:
        await records.sessions.add(over)
        await records.sessions.add(just_over)
        for number, (name, token) in enumerate(tokens.items()):
            await records.tokens.add(replace(token, id=PlaceholderId(name), sha256=f"{number:064x}"))

    await upkeep.once()

    assert await left(store) == {"ph_renewable", "ph_by_hand_alive", "ph_by_hand_just_over", "ph_session_just_over"}


async def test_a_session_is_kept_while_it_lives_and_for_a_week(store: SqlStore, upkeep: Upkeep) -> None:
    ends = {"ses_a_day_ago": NOW - DAY, "ses_long_ago": NOW - 8 * DAY}
    async with store.write(PLATFORM) as records:
        for name, ended_at in ends.items():
            await records.sessions.add(replace(SESSION, id=SessionId(name), ended_at=ended_at))

    await upkeep.once()

    async with store.read(PLATFORM) as records:
        assert await records.sessions.get(SESSION.id) is not None
        assert await records.sessions.get(SessionId("ses_a_day_ago")) is not None
        assert await records.sessions.get(SessionId("ses_long_ago")) is None


async def test_a_round_takes_a_bounded_number(store: SqlStore, upkeep: Upkeep) -> None:
    async with store.write(PLATFORM) as records:
        for number in range(ROWS_AT_ONCE + 1):
            token = replace(TOKEN, session=None, id=PlaceholderId(f"ph_{number}"), sha256=f"{number:064x}")
            await records.tokens.add(token)

    await upkeep.once()

    assert len(await left(store)) == 1


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py", "OUTBOX.c.sequence <= newest - keep)", "OUTBOX.c.sequence > 0)"
)
async def test_the_newest_changes_are_kept_and_a_reader_further_behind_sees_a_gap(
    store: SqlStore, upkeep: Upkeep
) -> None:
    changes = [Change(ChangeKind.CREDENTIAL, ACME, "cred_1")] * (CHANGES_KEPT + 7)
    async with store.write(PLATFORM) as records:
        await records.outbox.append(changes, NOW - 2 * DAY)

    await upkeep.once()

    async with store.read(PLATFORM) as records:
        (first,) = await records.outbox.after(3, 1)
        position = await records.outbox.position()
    assert first.sequence == 8  # not 4: a proxy that expects the next number drops what it holds
    assert position.sequence == CHANGES_KEPT + 7


async def test_young_changes_are_kept_however_many(store: SqlStore, upkeep: Upkeep) -> None:
    changes = [Change(ChangeKind.CREDENTIAL, ACME, "cred_1")] * (CHANGES_KEPT + 7)
    async with store.write(PLATFORM) as records:
        await records.outbox.append(changes, NOW - 60)

    await upkeep.once()

    async with store.read(PLATFORM) as records:
        (first,) = await records.outbox.after(0, 1)
    assert first.sequence == 1


@pytest.mark.guards("control_plane/upkeep.py", "over_before = now - CLOCK_SKEW_SECONDS", "over_before = now")
async def test_an_assertion_is_remembered_until_it_is_over_on_a_replica_whose_clock_is_behind(
    store: SqlStore, clock: Clock
) -> None:
    behind = NOW
    async with store.write(PLATFORM) as records:
        await records.used_assertions.use("a" * 64, expires_at=behind + 0.5)

    clock.now = NOW + CLOCK_SKEW_SECONDS - 1
    await Upkeep(store).once()

    async with store.write(PLATFORM) as records:
        assert not await records.used_assertions.use("a" * 64, expires_at=behind + 0.5)
