"""The ring of key-encryption keys over its life, on SQLite and on PostgreSQL: added, sealing, re-wrapped, retired."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.adapters.sql.engine import Database, open_database
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.caller import CredentialId
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.core.records import Credential, KeyPurpose, OwnKey, Source, SourceKind
from control_plane.core.sealing import Kek, own_key_aad, source_aad
from control_plane.custody import Custody, RingMember, UnopenableError, open_secret, seal_secret
from control_plane.kek_ring import IDLE_SECONDS, SETTLE_SECONDS, KekRing
from control_plane.ports import KekError, KekFailure
from control_plane.trail import Actor, Trail
from tests.control_plane.databases import migrated_database
from tests.control_plane.test_store import ACME, PLATFORM, credential, store, version, wake

__all__ = ["store", "wake"]  # fixtures

RING = "control_plane/kek_ring.py"
OLD, NEW, NEWEST = (Kek.of(bytes([number]) * 32) for number in (1, 2, 3))
ADMIN = Actor("administrator", "req_1")
COUNT, BATCH = 23, 10


on_both = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture(params=["sqlite"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """What is SQL's own business runs on both (`on_both`), the rest on one."""
    opened = open_database(await migrated_database(request.param, request, tmp_path))
    yield opened
    await opened.close()


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Replica:
    """One process of the control plane, as far as its ring goes."""

    def __init__(self, store: SqlStore, *ring: RingMember, clock: Clock, settle_seconds: float = 0.0) -> None:
        self.settings: list[RingMember] = list(ring)
        self.custody = Custody(ring, entropy=os.urandom, clock=clock)
        self.ring = KekRing(
            store,
            self.custody,
            Trail(clock, os.urandom),
            read_ring=lambda: tuple(self.settings),
            clock=clock,
            entropy=os.urandom,
            settle_seconds=settle_seconds,
            batch_rows=BATCH,
        )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def filled(store: SqlStore, clock: Clock) -> SqlStore:
    """With credentials, an own key and a source, all sealed under OLD."""
    custody = Custody([OLD], entropy=os.urandom)
    async with store.write(PLATFORM) as records:
        for number in range(COUNT):
            made = nth(number)
            sealed = seal_secret(custody, secret_of(number), made, version=1)
            await records.credentials.add(made)
            await records.versions.add(version(credential_id=made.id, kek_id=sealed.kek_id, envelope=sealed.envelope))
        sealed = custody.seal(b"k" * 32, aad=own_key_aad(key_id="k1", purpose=KeyPurpose.TAG))
        await records.own_keys.add(OwnKey("k1", KeyPurpose.TAG, sealed.envelope, sealed.kek_id, 1.5))
        await records.sources.add(sealed_source(custody))
    return store


def nth(number: int) -> Credential:
    return replace(credential(ACME), id=CredentialId(f"cred_{number:04}"), name=f"c{number}")


def secret_of(number: int) -> Secret:
    return Secret(f"secret-{number}")


def sealed_source(custody: Custody) -> Source:
    source = Source("files", SourceKind.FILE, {}, "{tenant}/{name}", 60.0, None, b"", "", 1.5, 1.5)
    sealed = custody.seal(b"", aad=source_aad(source))
    return replace(source, seal=sealed.envelope, kek_id=sealed.kek_id)


async def counts(store: SqlStore) -> dict[str, int]:
    async with store.read(PLATFORM) as records:
        return dict(await records.sealed.count_by_kek())


async def actions(store: SqlStore) -> list[str]:
    async with store.read(PLATFORM) as records:
        return [str(event["action"]) for _, event in await records.audit.after(0, limit=100, request_id=None)]


async def assert_everything_opens(store: SqlStore, custody: Custody, *, leaving_out: Sequence[int] = ()) -> None:
    async with store.read(PLATFORM) as records:
        for number in range(COUNT):
            if number not in leaving_out:
                row = await records.versions.get(nth(number).id, 1)
                assert open_secret(custody, row, nth(number)) == secret_of(number)
        (key,) = await records.own_keys.list(KeyPurpose.TAG)
        assert custody.open(key.envelope, aad=own_key_aad(key_id="k1", purpose=KeyPurpose.TAG)) == b"k" * 32
        source = await records.sources.get("files")
        assert source is not None
        assert custody.open(source.seal, aad=source_aad(source)) == b""


@on_both
async def test_a_rewrap_brings_everything_under_the_newest_key_and_counts_it(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, NEW, OLD, clock=clock)
    await replica.ring.reload()

    begun = await replica.ring.start_rewrap(by=ADMIN)
    await replica.ring.work()
    done = await replica.ring.rewrap_status()

    assert (begun.rewrap.total, begun.remaining, begun.rewrap.finished_at) == (COUNT + 2, COUNT + 2, None)
    assert done is not None
    assert (done.rewrap.rewrapped, done.rewrap.unopenable, done.remaining) == (COUNT + 2, 0, 0)
    assert done.rewrap.finished_at is not None
    assert await counts(filled) == {NEW.id: COUNT + 2}
    await assert_everything_opens(filled, Custody([NEW], entropy=os.urandom))
    with pytest.raises(UnopenableError):
        await assert_everything_opens(filled, Custody([OLD], entropy=os.urandom))
    assert await actions(filled) == ["kek.add", "kek.add", "kek.rewrap"]


async def test_a_rewrap_leaves_every_secret_closed(filled: SqlStore, clock: Clock) -> None:
    async with filled.read(PLATFORM) as records:
        before = await records.versions.get(nth(0).id, 1)
    replica = Replica(filled, NEW, OLD, clock=clock)

    await replica.ring.start_rewrap(by=ADMIN)
    await replica.ring.work()

    async with filled.read(PLATFORM) as records:
        after = await records.versions.get(nth(0).id, 1)
    assert before is not None
    assert before.envelope is not None
    assert after is not None
    assert after.envelope is not None
    wrapped = 1 + 12 + 32 + 16
    assert after.envelope[wrapped:] == before.envelope[wrapped:]
    assert after.envelope[:wrapped] != before.envelope[:wrapped]


class Killed(BaseException):
    """The process ended here."""


@pytest.mark.parametrize(("batch", "moment"), [(0, "before"), (1, "before"), (1, "after"), (2, "after")])
async def test_a_rewrap_killed_around_the_write_of_a_batch_goes_on_from_there(
    filled: SqlStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, batch: int, moment: str
) -> None:
    killed, survivor = (Replica(filled, NEW, OLD, clock=clock) for _ in range(2))
    write = killed.ring._write
    written: list[int] = []

    async def ending(*arguments: object) -> int:
        if len(written) == batch and moment == "before":
            raise Killed
        written.append(await write(*arguments))  # type: ignore[arg-type]
        if len(written) > batch:
            raise Killed
        return written[-1]

    monkeypatch.setattr(killed.ring, "_write", ending)  # the process's end, at a place of the test's choice
    await killed.ring.start_rewrap(by=ADMIN)
    with pytest.raises(Killed):
        await killed.ring.work()

    await survivor.ring.work()
    untouched = await survivor.ring.rewrap_status()
    clock.now += IDLE_SECONDS + 1
    await survivor.ring.work()

    status = await survivor.ring.rewrap_status()
    assert untouched is not None
    assert untouched.rewrap.finished_at is None  # it may only have been slow
    assert status is not None
    assert (status.rewrap.rewrapped, status.remaining) == (COUNT + 2, 0)
    assert status.rewrap.finished_at is not None
    await assert_everything_opens(filled, Custody([NEW], entropy=os.urandom))


@on_both
async def test_replicas_that_rewrap_at_once_do_no_harm(filled: SqlStore, clock: Clock) -> None:
    replicas = [Replica(filled, NEW, OLD, clock=clock) for _ in range(3)]
    await replicas[0].ring.start_rewrap(by=ADMIN)

    await asyncio.gather(*(replica.ring.work() for replica in replicas))

    status = await replicas[0].ring.rewrap_status()
    assert status is not None
    assert (status.rewrap.rewrapped, status.remaining) == (COUNT + 2, 0)
    await assert_everything_opens(filled, Custody([NEW], entropy=os.urandom))


@on_both
@pytest.mark.guards(
    "control_plane/adapters/sql/sealed.py", ".where(*where, kind.envelope == row.envelope)", ".where(*where)"
)
async def test_a_secret_rotated_while_its_old_envelope_is_rewrapped_stays_the_new_one(
    filled: SqlStore, clock: Clock
) -> None:
    replica = Replica(filled, NEW, OLD, clock=clock)
    async with filled.read(PLATFORM) as records:
        row = (await records.sealed.not_under(NEW.id, after="", limit=1))[0]
    stale = await replica.custody.rewrapped(row.envelope, aad=row.aad, by=NEW.id)
    newer = seal_secret(replica.custody, Secret("newer"), nth(0), version=1)
    async with filled.write(PLATFORM) as records:
        found = await records.versions.get(nth(0).id, 1)
        assert found is not None
        await records.versions.replace(replace(found, envelope=newer.envelope, kek_id=newer.kek_id))

    async with filled.write(PLATFORM) as records:
        replaced = await records.sealed.replace(row, envelope=stale.envelope, kek_id=stale.kek_id)

    async with filled.read(PLATFORM) as records:
        row_now = await records.versions.get(nth(0).id, 1)
    assert not replaced
    assert open_secret(replica.custody, row_now, nth(0)) == Secret("newer")


async def test_what_does_not_open_is_named_and_holds_up_nothing_else(filled: SqlStore, clock: Clock) -> None:
    foreign = seal_secret(Custody([OLD], entropy=os.urandom), Secret("x"), nth(1), version=1)
    async with filled.write(PLATFORM) as records:
        found = await records.versions.get(nth(7).id, 1)
        assert found is not None
        await records.versions.replace(replace(found, envelope=foreign.envelope))
    replica = Replica(filled, NEW, OLD, clock=clock)

    await replica.ring.start_rewrap(by=ADMIN)
    await replica.ring.work()

    status = await replica.ring.rewrap_status()
    assert status is not None
    assert (status.rewrap.unopenable, status.remaining, status.unopenable) == (1, 1, ("acme/c7",))
    assert status.rewrap.finished_at is not None
    await assert_everything_opens(filled, Custody([NEW], entropy=os.urandom), leaving_out=[7])


# --- retiring --------------------------------------------------------------------------------------------------------


@pytest.mark.guards(RING, "            if left:\n", "            if False:\n")
async def test_a_key_does_not_retire_while_envelopes_are_under_it(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, NEW, OLD, clock=clock)
    await replica.ring.reload()

    with pytest.raises(RefusedError) as refused:
        await replica.ring.retire(OLD.id, abandon=False, by=ADMIN)

    assert refused.value.refusal.code is RefusalCode.INVALID_FIELD
    assert str(COUNT + 2) in refused.value.refusal.detail


async def test_the_key_that_seals_does_not_retire(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, NEW, OLD, clock=clock)
    await replica.ring.reload()

    with pytest.raises(RefusedError, match="invalid_field"):
        await replica.ring.retire(NEW.id, abandon=True, by=ADMIN)


@on_both
async def test_a_retired_key_seals_nothing_any_more_on_any_replica_whatever_the_settings_say(
    filled: SqlStore, clock: Clock
) -> None:
    replica = Replica(filled, NEW, OLD, clock=clock)
    await replica.ring.start_rewrap(by=ADMIN)
    await replica.ring.work()
    await replica.ring.retire(OLD.id, abandon=False, by=ADMIN)

    misconfigured = Replica(filled, OLD, NEW, clock=clock)
    await misconfigured.ring.reload()

    assert misconfigured.custody.sealing_id == NEW.id
    assert (await actions(filled))[-1] == "kek.retire"


async def test_an_unknown_key_cannot_retire(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, OLD, clock=clock)

    with pytest.raises(RefusedError, match="not_found"):
        await replica.ring.retire("nobody", abandon=False, by=ADMIN)


@on_both
async def test_what_is_under_a_lost_key_is_given_up_and_nothing_else(filled: SqlStore, clock: Clock) -> None:
    lost = Kek.of(b"9" * 32)
    under_lost = seal_secret(Custody([lost], entropy=os.urandom), Secret("gone"), nth(3), version=1)
    async with filled.write(PLATFORM) as records:
        found = await records.versions.get(nth(3).id, 1)
        assert found is not None
        await records.versions.replace(replace(found, envelope=under_lost.envelope, kek_id=lost.id))
    await Replica(filled, OLD, lost, clock=clock).ring.reload()
    replica = Replica(filled, OLD, clock=clock)
    with pytest.raises(RefusedError, match="credential_unavailable"):
        await replica.ring.require_whole()
    with pytest.raises(RefusedError, match="invalid_field"):
        await replica.ring.retire(lost.id, abandon=False, by=ADMIN)

    await replica.ring.retire(lost.id, abandon=True, by=ADMIN)

    await replica.ring.require_whole()
    assert await counts(filled) == {OLD.id: COUNT + 1}
    await assert_everything_opens(filled, replica.custody, leaving_out=[3])
    assert (await actions(filled))[-2:] == ["kek.abandon", "kek.retire"]


async def test_what_does_open_is_not_given_up(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, NEW, OLD, clock=clock)
    await replica.ring.reload()

    with pytest.raises(RefusedError, match="invalid_field"):
        await replica.ring.retire(OLD.id, abandon=True, by=ADMIN)

    assert await counts(filled) == {OLD.id: COUNT + 2}


# --- the ring over time ----------------------------------------------------------------------------------------------


async def test_a_ring_that_lacks_a_key_in_use_is_not_ready_and_says_which(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, NEW, clock=clock)

    with pytest.raises(RefusedError) as refused:
        await replica.ring.require_whole()

    assert OLD.id in refused.value.refusal.detail
    assert "KEK_FILES" in refused.value.refusal.hint


async def test_a_new_key_opens_at_once_and_seals_when_every_replica_has_had_the_time_to_read_it(
    filled: SqlStore, clock: Clock
) -> None:
    replica = Replica(filled, OLD, clock=clock, settle_seconds=SETTLE_SECONDS)
    await replica.ring.reload()
    replica.settings = [NEW, OLD]

    await replica.ring.reload()
    at_once = (replica.custody.kek_ids, replica.custody.sealing_id)
    clock.now += SETTLE_SECONDS
    await replica.ring.reload()

    assert at_once == ((NEW.id, OLD.id), OLD.id)
    assert replica.custody.sealing_id == NEW.id


async def test_the_first_key_of_a_new_database_seals_at_once(store: SqlStore, clock: Clock) -> None:
    replica = Replica(store, NEW, OLD, clock=clock, settle_seconds=SETTLE_SECONDS)

    await replica.ring.reload()

    assert replica.custody.sealing_id == NEW.id


async def test_a_key_that_left_the_settings_while_in_use_stays_in_memory(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, NEW, OLD, clock=clock)
    await replica.ring.reload()
    replica.settings = [NEW]

    await replica.ring.reload()

    assert replica.custody.kek_ids == (NEW.id, OLD.id)
    await assert_everything_opens(filled, replica.custody)


async def test_settings_that_cannot_be_read_leave_the_ring_as_it_is(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, OLD, clock=clock)

    def unreadable() -> Sequence[RingMember]:
        raise ValueError("cannot read /run/kek")

    replica.ring._read_ring = unreadable
    await replica.ring.reload_or_keep()

    assert replica.custody.kek_ids == (OLD.id,)


class DeafKek:
    """Nobody answers for it."""

    id, provider, place = "deaf", "test", "nowhere"

    async def wrap(self, data_key: bytes, *, context: bytes) -> bytes:
        raise KekError(KekFailure.UNAVAILABLE, "no answer")

    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        raise KekError(KekFailure.UNAVAILABLE, "no answer")


async def test_a_rewrap_towards_a_key_that_does_not_answer_changes_nothing_and_can_go_on(
    filled: SqlStore, clock: Clock
) -> None:
    replica = Replica(filled, DeafKek(), OLD, clock=clock)
    await replica.ring.reload()
    await replica.ring.start_rewrap(by=ADMIN)

    with pytest.raises(RefusedError, match="credential_unavailable"):
        await replica.ring.work()

    status = await replica.ring.rewrap_status()
    assert status is not None
    assert (status.rewrap.rewrapped, status.rewrap.finished_at) == (0, None)
    assert await counts(filled) == {OLD.id: COUNT + 2}


async def test_a_newer_key_takes_over_a_rewrap_that_is_under_way(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, NEW, OLD, clock=clock)
    await replica.ring.start_rewrap(by=ADMIN)
    replica.settings = [NEWEST, NEW, OLD]

    await replica.ring.start_rewrap(by=ADMIN)
    await replica.ring.work()

    assert await counts(filled) == {NEWEST.id: COUNT + 2}


async def test_the_list_says_what_seals_and_what_may_go(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, NEW, OLD, clock=clock)
    await replica.ring.reload()

    listed = [(kek.id, kek.provider, kek.seals, kek.envelopes) for kek in await replica.ring.statuses()]

    assert listed == [(NEW.id, "file", True, 0), (OLD.id, "file", False, COUNT + 2)]


# --- what is said of them ---------------------------------------------------------------------------------------------


async def test_a_key_that_is_new_to_a_running_fleet_says_from_when_it_seals(filled: SqlStore, clock: Clock) -> None:
    replica = Replica(filled, OLD, clock=clock, settle_seconds=SETTLE_SECONDS)
    await replica.ring.reload()
    begun = clock.now
    clock.now += 1_000
    replica.settings = [NEW, OLD, NEWEST]
    await replica.ring.reload()

    statuses = {kek.id: (kek.seals, kek.seals_from) for kek in await replica.ring.statuses()}

    assert statuses == {
        NEW.id: (False, begun + 1_000 + SETTLE_SECONDS),
        OLD.id: (True, begun),
        NEWEST.id: (False, None),
    }


@on_both
async def test_of_a_key_that_is_missing_it_is_known_where_it_was_last(filled: SqlStore, clock: Clock) -> None:
    placed, moved = (Kek.of(OLD.key, place=f"/etc/keks/{name}.hex") for name in ("1", "one"))
    for kek in (placed, moved):
        await Replica(filled, kek, clock=clock).ring.reload()

    without = Replica(filled, NEW, clock=clock)
    await without.ring.reload()
    missing = {kek.id: kek for kek in await without.ring.statuses()}[OLD.id]

    assert (missing.in_ring, missing.seals, missing.place) == (False, False, "/etc/keks/one.hex")
    assert "missing from the ring: it was last at /etc/keks/one.hex" in missing.problem


async def test_a_key_that_leaves_the_settings_and_one_that_does_not_answer_are_named(
    filled: SqlStore, clock: Clock
) -> None:
    replica = Replica(filled, OLD, DeafKek(), clock=clock)
    await replica.ring.reload()
    replica.settings = [NEW, DeafKek()]
    await replica.ring.reload()

    problems = {kek.id: kek.problem for kek in await replica.ring.statuses()}

    assert problems[NEW.id] == ""
    assert "the settings name it no more" in problems[OLD.id]
    assert problems["deaf"] == "it cannot be used now: no answer"
