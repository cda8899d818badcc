"""Schedules: who is told that a secret is old, when a hook is asked for a new one, and what is never tried again."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest
import trustme

from control_plane import scheduling
from control_plane.adapters.hooks.http import TYP, HttpHook
from control_plane.adapters.outbound import Exceptions, HttpOutbound
from control_plane.adapters.sql.engine import Database
from control_plane.contract.caller import TenantId
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.core.probe import Probe
from control_plane.core.schedule import LEASE_SECONDS, LOOK_AGAIN_SECONDS, REMIND_AGAIN_SECONDS, RETRY_SECONDS
from control_plane.credentials import NewCredential
from control_plane.own_keys import OwnKeyring
from control_plane.ports import Created, HookAsk, HookFailedError, ProbeReply, whose_doing
from control_plane.scheduling import NewSchedule, ScheduleKeeper
from control_plane.trail import Trail
from tests.control_plane.databases import BOTH
from tests.control_plane.rotating import ACME, DESTINATION, NAME, NEW, NEWER, OLD, OPERATOR, Replica
from tests.support.upstream import Gate, Request, Upstream, Wire, gated, message, sends

FILE = "control_plane/scheduling.py"
DAY = 86_400.0
EVERY = NewSchedule(
    every_seconds=90 * DAY,
    remind_seconds=7 * DAY,
    hook=None,
    probes=False,
    proceeds_unproven=False,
    canary_percent=0,
    canary_seconds=0.0,
    overlap_seconds=0.0,
)
BY_HOOK = replace(EVERY, hook={"kind": "test"}, overlap_seconds=3600.0)


class Maker:
    """A hook that makes `NEW`, or does not (`ports.RotationHook`)."""

    def __init__(self) -> None:
        self.secrets = [NEW, NEWER]
        self.fails = False
        self.silence: asyncio.Event | None = None
        """Where it never answers."""
        self.asked: list[str] = []
        self.doing: list[str | None] = []
        """Whose doing each question was."""
        self.settled: list[tuple[bool, dict[str, str]]] = []

    async def create(self, ask: HookAsk) -> Created:
        self.asked.append(ask.attempt)
        self.doing.append(whose_doing())
        if self.silence is not None:
            await self.silence.wait()
        if self.fails:
            raise HookFailedError("the provider is away")
        return Created(Secret(self.secrets.pop(0)), state={"old": "key-1", "new": "key-2"})

    async def settle(self, ask: HookAsk, *, new_is_in_use: bool) -> None:
        self.doing.append(whose_doing())
        if self.fails:
            raise HookFailedError("the provider is away")
        self.settled.append((new_is_in_use, dict(ask.state)))


@pytest.fixture
async def replica(database: Database) -> Replica:
    made = Replica(database)
    await made.add_credential()
    return made


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def schedules(replica: Replica, maker: Maker) -> ScheduleKeeper:
    return keeper(replica, maker)


def keeper(replica: Replica, maker: Any) -> ScheduleKeeper:
    trail = Trail(replica.clock, os.urandom)
    hooks = {"test": maker}
    return ScheduleKeeper(replica.store, replica.custody, replica.rotations, hooks, trail, entropy=os.urandom)


async def at(replica: Replica, schedules: ScheduleKeeper, seconds: float) -> list[str]:
    """What happens by itself, so much later: the trail's new actions."""
    before = len(await replica.actions())
    replica.clock.now += seconds
    await replica.rotations.tick()
    await schedules.tick()
    return (await replica.actions())[before:]


async def test_people_are_reminded_before_a_secret_is_due_and_every_day_after(
    replica: Replica, schedules: ScheduleKeeper
) -> None:
    await schedules.put(ACME, NAME, EVERY, by=OPERATOR)

    seen = [
        await at(replica, schedules, seconds)
        for seconds in (0.0, 82 * DAY, DAY, REMIND_AGAIN_SECONDS - 1, 1, 6 * DAY, DAY)
    ]

    due = ["rotation.due"]
    assert seen == [[], [], due, [], due, due, due]
    described = await replica.credentials.get(ACME, NAME)
    assert described.due_at == described.credential.created_at + 90 * DAY
    assert "is 91 days old, due for 1 days" in await replica.trail()


async def test_a_rotation_by_hand_puts_the_reminders_off(replica: Replica, schedules: ScheduleKeeper) -> None:
    await schedules.put(ACME, NAME, EVERY, by=OPERATOR)
    await at(replica, schedules, 84 * DAY)
    await replica.rotate()

    assert await at(replica, schedules, DAY) == []
    assert await at(replica, schedules, 81 * DAY) == []
    assert await at(replica, schedules, DAY) == ["rotation.due"]


@BOTH
async def test_a_hook_makes_the_new_value_and_puts_the_old_one_away(
    replica: Replica, schedules: ScheduleKeeper, maker: Maker
) -> None:
    await schedules.put(ACME, NAME, BY_HOOK, by=OPERATOR)
    await at(replica, schedules, 0.0)
    await at(replica, schedules, 84 * DAY)

    begun = await at(replica, schedules, 6 * DAY)
    during = await replica.states()
    waiting = await at(replica, schedules, LEASE_SECONDS)
    await at(replica, schedules, 3600.0)

    assert (begun, during, waiting) == (["credential.rotate"], ["retiring", "active"], [])
    assert maker.settled == [(True, {"old": "key-1", "new": "key-2"})]
    assert maker.doing == [ACME, ACME]
    assert await replica.states() == ["retired", "active"]
    assert (await replica.rotation()).started_by == "schedule"
    assert len(maker.asked) == 1


@pytest.mark.guards("control_plane/scheduling.py", "if present is None or present.hook != schedule.hook:", "if False:")
@pytest.mark.parametrize("then", [None, replace(BY_HOOK, hook={"kind": "other"}), EVERY])
async def test_a_hook_that_is_taken_away_while_it_is_asked_changes_nothing(
    replica: Replica, maker: Maker, then: NewSchedule | None
) -> None:
    class Slow(Maker):
        async def create(self, ask: HookAsk) -> Created:
            made = await maker.create(ask)
            if then is None:
                await asking.remove(ACME, NAME, by=OPERATOR)
            else:
                await asking.put(ACME, NAME, then, by=OPERATOR)
            return made

    asking = keeper(replica, Slow())
    await asking.put(ACME, NAME, BY_HOOK, by=OPERATOR)

    await at(replica, asking, 90 * DAY)

    assert len(maker.asked) == 1
    assert await replica.states() == ["active"]
    if then is None:
        with pytest.raises(RefusedError):
            await asking.get(ACME, NAME)
    else:
        assert (await asking.get(ACME, NAME)).schedule.hook == then.hook


async def test_a_date_that_changes_while_the_hook_is_asked_stands_and_so_does_the_new_value(
    replica: Replica, maker: Maker
) -> None:
    class Slow(Maker):
        async def create(self, ask: HookAsk) -> Created:
            await asking.put(ACME, NAME, replace(BY_HOOK, every_seconds=30 * DAY), by=OPERATOR)
            return await maker.create(ask)

    asking = keeper(replica, Slow())
    await asking.put(ACME, NAME, BY_HOOK, by=OPERATOR)

    begun = await at(replica, asking, 90 * DAY)

    kept = (await asking.get(ACME, NAME)).schedule
    assert begun[-1] == "credential.rotate"
    assert (kept.every_seconds, kept.attempt, kept.unsettled_rotation) == (
        30 * DAY,
        None,
        (await replica.rotation()).id,
    )


@pytest.mark.guards(
    "control_plane/core/schedule.py", "schedule.hook is not None and not why_suspended(schedule, rotation)", "True"
)
async def test_what_was_rolled_back_is_never_tried_again_by_itself(
    replica: Replica, schedules: ScheduleKeeper, maker: Maker
) -> None:
    await schedules.put(ACME, NAME, BY_HOOK, by=OPERATOR)
    await at(replica, schedules, 90 * DAY)
    for subject in ("alice", "bob", "carol"):
        await replica.report(subject, version=2, s401=5)
    rolled_back = (await replica.rotation()).phase.value

    later = [await at(replica, schedules, DAY) for _ in range(5)]

    assert rolled_back == "rolled_back"
    assert maker.asked == maker.asked[:1]
    assert maker.settled == [(False, {"old": "key-1", "new": "key-2"})], "the hook puts the new value away"
    assert {action for actions in later for action in actions} == {"rotation.settle", "rotation.due"}
    assert "rolled_back" in (await schedules.get(ACME, NAME)).suspended
    assert await replica.states() == ["active", "retired"]


async def test_an_operator_lets_it_go_on_with_another_value(
    replica: Replica, schedules: ScheduleKeeper, maker: Maker
) -> None:
    await schedules.put(ACME, NAME, replace(BY_HOOK, probes=False), by=OPERATOR)
    await at(replica, schedules, 90 * DAY)
    await replica.rotations.roll_back(ACME, NAME, by=OPERATOR)
    await at(replica, schedules, LEASE_SECONDS)
    await at(replica, schedules, LOOK_AGAIN_SECONDS)

    await schedules.put(ACME, NAME, BY_HOOK, by=OPERATOR)
    await at(replica, schedules, 1.0)

    assert await replica.states() == ["retiring", "retired", "active"]
    assert len(set(maker.asked)) == 2


async def test_a_version_that_its_upstream_rejects_does_not_go_live_by_schedule_either(
    replica: Replica, schedules: ScheduleKeeper, maker: Maker
) -> None:
    await replica.rotate(OLD, probes=True, probe=Probe("GET", "/v1/me"))
    replica.upstream.answer = ProbeReply(401, "")
    await schedules.put(ACME, NAME, replace(BY_HOOK, probes=True), by=OPERATOR)

    await at(replica, schedules, 90 * DAY)
    await at(replica, schedules, DAY)
    await at(replica, schedules, DAY)

    assert await replica.states() == ["retired", "active", "retired"]
    assert len(maker.asked) == 1
    assert maker.settled == [(False, {"old": "key-1", "new": "key-2"})]


async def test_a_hook_that_fails_is_asked_the_same_again_later(
    replica: Replica, schedules: ScheduleKeeper, maker: Maker
) -> None:
    maker.fails = True
    await schedules.put(ACME, NAME, BY_HOOK, by=OPERATOR)

    first = await at(replica, schedules, 90 * DAY)
    too_soon = await at(replica, schedules, RETRY_SECONDS - 1)
    told = (await schedules.get(ACME, NAME)).schedule.last_failure
    maker.fails = False
    second = await at(replica, schedules, 1.0)

    assert (first, too_soon, second) == (["rotation.hook_failed"], [], ["credential.rotate"])
    assert told == "the provider is away"
    assert len(maker.asked) == 2
    assert len(set(maker.asked)) == 1


async def test_a_replica_that_dies_after_the_hook_answered_asks_the_same_again(
    replica: Replica, schedules: ScheduleKeeper, maker: Maker
) -> None:
    class Dies(Maker):
        async def create(self, ask: HookAsk) -> Created:
            await maker.create(ask)
            raise RuntimeError

    maker.secrets = [NEW, NEW]
    await schedules.put(ACME, NAME, BY_HOOK, by=OPERATOR)
    replica.clock.now += 90 * DAY
    with pytest.raises(RuntimeError):
        await keeper(replica, Dies()).tick()

    at_once = await at(replica, schedules, 0.0)
    later = await at(replica, schedules, LEASE_SECONDS)

    assert (at_once, later) == ([], ["credential.rotate"])
    assert len(set(maker.asked)) == 1
    assert len(maker.asked) == 2


async def test_a_schedule_is_looked_up_and_taken_away(replica: Replica, schedules: ScheduleKeeper) -> None:
    await schedules.put(ACME, NAME, EVERY, by=OPERATOR)
    await schedules.remove(ACME, NAME, by=OPERATOR)

    assert await at(replica, schedules, 200 * DAY) == []
    for gone in (schedules.get(ACME, NAME), schedules.remove(ACME, NAME, by=OPERATOR)):
        with pytest.raises(RefusedError) as raised:
            await gone
        assert raised.value.refusal.code is RefusalCode.NOT_FOUND


# --- the hook of the operator's own ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def endpoint(ca: trustme.CA) -> Iterator[Upstream]:
    with Upstream(ca) as running:
        yield running


@pytest.fixture
def http_hook(replica: Replica, ca: trustme.CA, endpoint: Upstream, tmp_path: Path) -> HttpHook:
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    allowed = Exceptions(frozenset({("localhost", endpoint.port)}))
    keys = OwnKeyring(replica.store, replica.custody, clock=replica.clock, entropy=os.urandom)
    return HttpHook(
        HttpOutbound(ca_files=[tmp_path / "ca.pem"], exceptions=allowed),
        sign=lambda claims: keys.sign(claims, typ=TYP),
        issuer="https://control.test",
        clock=replica.clock,
    )


def answering(status: str, body: bytes) -> Callable[[Request, Wire], Any]:
    async def behave(request: Request, wire: Wire) -> None:
        await wire.write(message(body, status=status))

    return behave


def asked(endpoint: Upstream) -> HookAsk:
    url = f"https://localhost:{endpoint.port}/hook"
    return HookAsk({"kind": "http", "url": url}, ACME, NAME, "att_1", Secret(OLD), {})


async def test_the_endpoint_can_tell_that_it_is_us_who_asks(
    replica: Replica, http_hook: HttpHook, endpoint: Upstream
) -> None:
    endpoint.on("/hook", answering("200 OK", json.dumps({"secret": NEW}).encode()))
    keys = OwnKeyring(replica.store, replica.custody, clock=replica.clock, entropy=os.urandom)

    created = await http_hook.create(asked(endpoint))

    assert created.secret.reveal() == NEW
    [request] = endpoint.requests
    token = request.header("authorization").removeprefix("Bearer ")
    public = (await keys.rings()).signing[0].private.public_key()
    claims = jwt.decode(
        token,
        public,
        algorithms=["EdDSA"],
        audience=asked(endpoint).settings["url"],
        issuer="https://control.test",
        options={"verify_exp": False, "verify_iat": False},
    )
    assert jwt.get_unverified_header(token)["typ"] == "coatcheck-hook+jwt"
    assert claims["jti"] == "att_1"
    assert json.loads(request.body) == {
        "event": "create",
        "tenant": ACME,
        "credential": NAME,
        "attempt": "att_1",
    }
    assert OLD.encode() not in endpoint.received()


async def add_other(replica: Replica) -> None:
    new = NewCredential(
        name="other",
        preset=None,
        destinations=(DESTINATION,),
        placements=None,
        variables=None,
        credential_required=False,
        secret=Secret(OLD),
    )
    await replica.credentials.add(ACME, new, by=OPERATOR)


@pytest.mark.guards(FILE, "LOOKS_AT_ONCE: Final = 8", "LOOKS_AT_ONCE: Final = 1")
async def test_an_endpoint_that_answers_slowly_delays_no_other(
    replica: Replica, http_hook: HttpHook, endpoint: Upstream
) -> None:
    await add_other(replica)
    answer = message(json.dumps({"secret": NEW}).encode())
    slowly = Gate()
    endpoint.on("/slow", gated(b"", slowly, answer))
    endpoint.on("/quick", sends(answer))
    schedules = keeper(replica, http_hook)
    for name, path in ((NAME, "/slow"), ("other", "/quick")):
        hook = {"kind": "test", "url": f"https://localhost:{endpoint.port}{path}"}
        await schedules.put(ACME, name, replace(BY_HOOK, hook=hook), by=OPERATOR)
    replica.clock.now += 91 * DAY

    looking = asyncio.create_task(schedules.tick())
    while not endpoint.seen("/slow") or "credential.rotate" not in await replica.actions():
        assert not looking.done()
        await asyncio.sleep(0.01)
    begun = (await replica.actions()).count("credential.rotate")
    of_other = (await replica.rotations.get(ACME, "other"))[0]
    slowly.open()
    await looking

    assert begun == 1
    assert of_other is not None
    assert (await replica.actions()).count("credential.rotate") == 2


@pytest.mark.guards(FILE, "async with asyncio.timeout(HOOK_SECONDS):", "if True:")
async def test_a_hook_that_never_answers_has_failed_after_its_time(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "HOOK_SECONDS", 0.05)
    silent = Maker()
    silent.silence = asyncio.Event()
    schedules = keeper(replica, silent)
    await schedules.put(ACME, NAME, BY_HOOK, by=OPERATOR)
    replica.clock.now += 91 * DAY

    async with asyncio.timeout(10):
        await schedules.tick()

    assert "did not answer within 0.05 seconds" in await replica.trail()
    assert (await replica.actions())[-1] == "rotation.hook_failed"


async def test_whoever_has_many_schedules_waits_for_his_own(replica: Replica) -> None:
    await add_other(replica)
    schedules = keeper(replica, Maker())
    scheduled = [(await schedules.put(ACME, name, EVERY, by=OPERATOR)).schedule for name in (NAME, "other")]
    evil = replace(scheduled[0], tenant=TenantId("evil"))

    in_turn = scheduling._tenant_by_tenant([*scheduled, evil])

    assert [schedule.tenant for schedule in in_turn] == [ACME, "evil", ACME]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        ("500 Oops", b'{"secret": "x"}'),
        ("302 Found", b'{"secret": "x"}'),
        ("200 OK", b""),
        ("200 OK", b"[]"),
        ("200 OK", b'{"secret": 7}'),
        ("200 OK", b'{"secret": ""}'),
        ("200 OK", b'{"secret": "a\\u0000b"}'),
        ("200 OK", b"[" * 100_000),
    ],
)
async def test_what_is_no_new_value_fails_without_repeating_it(
    http_hook: HttpHook, endpoint: Upstream, status: str, body: bytes
) -> None:
    endpoint.on("/hook", answering(status, body))

    with pytest.raises(HookFailedError) as raised:
        await http_hook.create(asked(endpoint))

    assert str(raised.value) in {
        "the hook answered 500",
        "the hook could not be asked (redirect)",
        'the hook did not answer {"secret": "…"}',
        "what the hook answered cannot be a secret",
    }
