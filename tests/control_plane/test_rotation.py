"""Rotations step by step, on SQLite and on PostgreSQL: what is in use, for whom, and what becomes of the rest."""

import asyncio
from typing import Any

import pytest

from control_plane.adapters.sql.engine import Database
from control_plane.contract.caller import SubjectId
from control_plane.contract.destination import parse_destination
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.contract.wire import Refused, ResolvedPlaceholder
from control_plane.core.rotation import WINDOW_SECONDS, is_canary
from tests.control_plane.databases import BOTH
from tests.control_plane.rotating import ACME, NAME, NEW, NEWER, OLD, OPERATOR, PLATFORM, Replica

FILE = "control_plane/rotation.py"
SUBJECTS = [f"subject-{number}" for number in range(12)]
CANARY: dict[str, Any] = {"canary_percent": 50, "canary_seconds": 600.0}
OVERLAP: dict[str, Any] = {"overlap_seconds": 3600.0}


@pytest.fixture
async def replica(database: Database) -> Replica:
    made = Replica(database)
    credential = await made.add_credential()
    await made.grant(credential, *SUBJECTS)
    return made


async def in_use(replica: Replica) -> dict[str, str]:
    """By subject: the secret that its requests would have now."""
    found = {}
    for subject, sha256 in replica.tokens.items():
        answer = await replica.resolve(sha256, subject)
        found[subject] = answer.secret if isinstance(answer, ResolvedPlaceholder) else answer.code.value
    return found


async def refused(coroutine: Any) -> RefusalCode:
    with pytest.raises(RefusedError) as raised:
        await coroutine
    return raised.value.refusal.code


async def test_without_options_the_new_version_is_in_use_at_once_and_the_old_ones_envelope_is_gone(
    replica: Replica,
) -> None:
    await replica.rotate()

    assert set((await in_use(replica)).values()) == {NEW}
    assert await replica.states() == ["retired", "active"]
    assert await replica.envelopes() == [False, True]
    assert (await replica.rotation()).phase.value == "completed"


async def test_a_canary_is_the_same_subjects_on_every_replica_and_all_placeholders_live_on(replica: Replica) -> None:
    await replica.rotate(**CANARY)

    rotation, first = await replica.rotation(), await in_use(replica)
    second = await in_use(replica.another())

    assert first == second
    assert {subject for subject, secret in first.items() if secret == NEW} == {
        subject for subject in SUBJECTS if is_canary(SubjectId(subject), rotation)
    }
    assert set(first.values()) == {OLD, NEW}
    assert await replica.states() == ["active", "pending"]


async def test_step_by_step_to_its_end(replica: Replica) -> None:
    await replica.rotate(**CANARY, **OVERLAP)

    seen = []
    for seconds in (599.0, 1.0, 3599.0, 1.0):
        replica.clock.now += seconds
        await replica.rotations.tick()
        seen.append(((await replica.rotation()).phase.value, await replica.states(), await replica.envelopes()))

    assert seen == [
        ("canary", ["active", "pending"], [True, True]),
        ("overlap", ["retiring", "active"], [True, True]),
        ("overlap", ["retiring", "active"], [True, True]),
        ("completed", ["retired", "active"], [False, True]),
    ]
    assert set((await in_use(replica)).values()) == {NEW}
    assert [action for action in await replica.actions() if "rotat" in action] == [
        "credential.rotate",
        "rotation.promote",
        "rotation.finish",
    ]
    assert ("credential", True) not in await replica.published(), "a rotation lets open streams finish"


@BOTH
async def test_three_subjects_whose_requests_fail_bring_the_old_version_back(replica: Replica) -> None:
    await replica.rotate(**OVERLAP)
    await replica.report("subject-0", version=2, s401=5)
    await replica.report("subject-1", version=2, s401=5)
    with_two = (await replica.rotation()).phase.value

    await replica.report("subject-2", version=2, s401=5)

    assert with_two == "overlap"
    rotation = await replica.rotation()
    assert (rotation.phase.value, "3 subjects" in rotation.reason) == ("rolled_back", True)
    assert set((await in_use(replica)).values()) == {OLD}
    assert await replica.states() == ["active", "retired"]
    assert await replica.envelopes() == [True, False]


async def test_two_subjects_never_do_however_often_they_fail(replica: Replica) -> None:
    await replica.rotate(**OVERLAP)

    for _ in range(20):
        await replica.report("subject-0", version=2, s401=500)
        await replica.report("subject-1", version=2, s401=500)

    assert (await replica.rotation()).phase.value == "overlap"


async def test_a_storm_of_403_never_does_of_however_many_subjects(replica: Replica) -> None:
    await replica.rotate(**CANARY, **OVERLAP)

    for subject in SUBJECTS:
        await replica.report(subject, version=2, s403=1000, s400=50, s500=50, s429=50)

    assert (await replica.rotation()).phase.value == "canary"


async def test_a_canary_no_worse_than_the_old_version_goes_on(replica: Replica) -> None:
    await replica.rotate(**CANARY)

    for number, subject in enumerate(SUBJECTS):
        await replica.report(subject, version=1 + number % 2, s200=5, s401=5)

    assert (await replica.rotation()).phase.value == "canary"


async def test_what_failed_before_the_window_is_not_counted(replica: Replica) -> None:
    await replica.rotate(**OVERLAP)
    await replica.report("subject-0", version=2, s401=5)
    await replica.report("subject-1", version=2, s401=5)
    replica.clock.now += WINDOW_SECONDS + 60

    await replica.report("subject-2", version=2, s401=5)

    assert (await replica.rotation()).phase.value == "overlap"


@pytest.mark.guards(
    FILE,
    "rotation is None or not rotation.is_running:\n            return None  #",
    "rotation is None:\n            return None  #",
)
async def test_reports_of_another_version_or_of_no_rotation_count_for_nothing(replica: Replica) -> None:
    await replica.rotate(**OVERLAP)
    for subject in SUBJECTS:
        await replica.report(subject, version=7, s401=50)

    during = (await replica.rotation()).phase.value
    await replica.rotations.promote(ACME, NAME, by=OPERATOR)
    for subject in SUBJECTS:
        await replica.report(subject, version=2, s401=50)

    assert during == "overlap"
    assert (await replica.rotation()).phase.value == "completed"
    assert await replica.states() == ["retired", "active"]


async def test_a_second_operator_is_told_that_a_rotation_is_under_way(replica: Replica) -> None:
    await replica.rotate(**CANARY)

    code = await refused(replica.rotate(NEWER))

    assert code is RefusalCode.ROTATION_IN_PROGRESS
    assert await replica.states() == ["active", "pending"]


@BOTH
async def test_of_operators_who_rotate_what_they_saw_at_the_same_time_one_is_told(replica: Replica) -> None:
    other = replica.another()

    outcomes = await asyncio.gather(
        replica.rotate(NEW, if_version=1), other.rotate(NEWER, if_version=1), return_exceptions=True
    )

    codes = [outcome.refusal.code for outcome in outcomes if isinstance(outcome, RefusedError)]
    assert codes == [RefusalCode.ROTATION_IN_PROGRESS]
    assert await replica.states() == ["retired", "active"]


@BOTH
async def test_a_secret_that_leaked_during_a_canary_goes_at_once_and_nothing_comes_back(replica: Replica) -> None:
    await replica.rotate(**CANARY, **OVERLAP)

    await replica.rotate(NEWER, compromised=True)

    assert await replica.states() == ["revoked", "revoked", "active"]
    assert await replica.envelopes() == [False, False, True]
    assert set((await in_use(replica)).values()) == {NEWER}
    assert (await replica.rotation()).phase.value == "overtaken"
    assert ("credential", True) in await replica.published(), "open streams are cut"
    assert await refused(replica.rotations.roll_back(ACME, NAME, by=OPERATOR)) is RefusalCode.ROTATION_NOT_RUNNING


async def test_without_a_new_secret_a_version_that_waits_takes_over(replica: Replica) -> None:
    await replica.rotate(**CANARY, **OVERLAP)

    await replica.rotate(None, compromised=True)

    assert await replica.states() == ["revoked", "active"]
    assert set((await in_use(replica)).values()) == {NEW}


async def test_without_a_successor_nothing_is_in_use_until_there_is_one(replica: Replica) -> None:
    await replica.rotate(None, compromised=True)
    without, states = await in_use(replica), await replica.states()

    await replica.rotate(NEW, **CANARY, **OVERLAP)

    assert set(without.values()) == {"credential_unavailable"}
    assert states == ["revoked"]
    assert set((await in_use(replica)).values()) == {NEW}, "there is nothing to be a canary beside, or to go back to"


@pytest.mark.guards(FILE, "if new.compromised and value:", "if False and value:")
@pytest.mark.parametrize("plan", [CANARY, OVERLAP])
async def test_a_compromised_secret_has_no_canary_and_no_overlap(replica: Replica, plan: dict[str, Any]) -> None:
    assert await refused(replica.rotate(compromised=True, **plan)) is RefusalCode.INVALID_FIELD
    assert await replica.states() == ["active"]


async def test_an_operator_goes_on_back_or_throws_away(replica: Replica) -> None:
    await replica.rotate(**CANARY, **OVERLAP)
    await replica.rotations.promote(ACME, NAME, by=OPERATOR)
    promoted = await replica.states()
    late = await refused(replica.rotations.cancel(ACME, NAME, by=OPERATOR))
    await replica.rotations.roll_back(ACME, NAME, by=OPERATOR)
    back = await replica.states()

    await replica.rotate(NEWER, **CANARY)
    await replica.rotations.cancel(ACME, NAME, by=OPERATOR)

    assert (promoted, late, back) == (
        ["retiring", "active"],
        RefusalCode.ROTATION_NOT_RUNNING,
        ["active", "retired"],
    )
    assert await replica.states() == ["active", "retired", "retired"]
    assert set((await in_use(replica)).values()) == {OLD}
    assert await refused(replica.rotations.promote(ACME, NAME, by=OPERATOR)) is RefusalCode.ROTATION_NOT_RUNNING


async def test_narrowing_ends_a_rotation_and_leaves_one_version_sealed_to_the_narrower_reach(replica: Replica) -> None:
    await replica.rotate(**OVERLAP)

    await replica.change(destinations=(parse_destination("https://api.example.com/v1"),))

    assert await replica.states() == ["retired", "retired", "active"]
    assert await replica.envelopes() == [False, False, True]
    assert (await replica.rotation()).phase.value == "overtaken"
    replica.clock.now += 7200
    await replica.rotations.tick()
    assert await replica.states() == ["retired", "retired", "active"]


async def test_a_deleted_credential_takes_its_rotation_with_it(replica: Replica) -> None:
    credential = await replica.credential()
    await replica.rotate(**OVERLAP)
    found = await replica.rotation()

    await replica.credentials.delete(ACME, NAME, by=OPERATOR)
    replica.clock.now += 7200
    await replica.rotations.tick()
    await replica.rotations.look_at(found)

    async with replica.store.read(PLATFORM) as records:
        assert await records.rotations.of(credential.id) is None
    answer = await replica.resolve(replica.tokens["subject-0"], "subject-0")
    assert isinstance(answer, Refused)


@BOTH
async def test_replicas_that_look_at_the_same_time_take_one_step(replica: Replica) -> None:
    await replica.rotate(**CANARY, **OVERLAP)
    replicas = [replica, *(replica.another() for _ in range(3))]
    replica.clock.now += 600

    await asyncio.gather(*(each.rotations.tick() for each in replicas))

    assert (await replica.actions()).count("rotation.promote") == 1
    assert (await replica.rotation()).phase.value == "overlap"


async def test_no_secret_stands_in_the_trail(replica: Replica) -> None:
    await replica.rotate(**CANARY)
    await replica.rotate(NEWER, compromised=True)

    said = await replica.trail()

    assert not [secret for secret in (OLD, NEW, NEWER) if secret in said]
