"""Placeholders by their holder: whose one is used for, how often is asked, and what keeps one alive."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from control_plane.contract.caller import SessionId, SubjectId, TenantId
from control_plane.contract.credential import PlaceholderCredential
from control_plane.contract.placement import HeaderPlacement
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from runtime.core.subject import Owner
from runtime.core.turn import Holder, Placeholder
from runtime.placeholders import PlaceholderStore
from runtime.ports import PlaceholderRefusedError

FILE = "runtime/placeholders.py"

ALICE = Holder(Owner(TenantId("acme"), SubjectId("alice")), SessionId("ses_1"), "anthropic")
OTHERS = [
    replace(ALICE, owner=Owner(TenantId("acme"), SubjectId("bob"))),
    replace(ALICE, owner=Owner(TenantId("evil"), SubjectId("alice"))),
    replace(ALICE, session=SessionId("ses_2")),
    replace(ALICE, audience="openai"),
]
AWAY = RefusedError(Refusal(RefusalCode.CREDENTIAL_UNAVAILABLE, "away"))


class Time:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class ControlPlane:
    """Gives each time another placeholder, of a life of its choice. Answers when it is let."""

    def __init__(self, clock: Callable[[], float], *, life: float = 100.0) -> None:
        self.clock = clock
        self.life = life
        self.exchanged: list[tuple[Holder, str]] = []
        self.renewed: list[tuple[str, Holder]] = []
        self.failures: list[Exception] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def exchange(self, session_token: str, holder: Holder) -> Placeholder:
        self.exchanged.append((holder, session_token))
        number = len(self.exchanged)
        await self._answer()
        value = PlaceholderCredential(f"placeholder-{number}")
        return Placeholder(value, HeaderPlacement("x-api-key"), f"proof-{number}", "http://p", self.clock() + self.life)

    async def renew(self, placeholder: Placeholder, holder: Holder) -> Placeholder:
        self.renewed.append((placeholder.credential.value, holder))
        await self._answer()
        return replace(placeholder, expires_at=self.clock() + self.life)

    async def _answer(self) -> None:
        await self.answers.wait()
        if self.failures:
            raise self.failures.pop(0)


async def take(store: PlaceholderStore, holder: Holder = ALICE, token: str = "token") -> str:
    return (await store.placeholder(holder, session_token=token)).credential.value


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def control_plane(time: Time) -> ControlPlane:
    return ControlPlane(time)


@pytest.fixture
def store(control_plane: ControlPlane, time: Time) -> PlaceholderStore:
    return PlaceholderStore(control_plane, clock=time)


async def test_it_is_exchanged_once_and_used_again(store: PlaceholderStore, control_plane: ControlPlane) -> None:
    assert await take(store) == await take(store, token="another token")
    assert control_plane.exchanged == [(ALICE, "token")]


@pytest.mark.guards(
    FILE,
    "kept, now = self._kept.get(holder), self._clock()",
    "kept, now = next(iter(self._kept.values()), None), self._clock()",
)
@pytest.mark.parametrize("other", OTHERS)
async def test_nobodys_is_used_for_anybody_else(store: PlaceholderStore, other: Holder) -> None:
    assert await take(store) != await take(store, other)


@pytest.mark.guards(FILE, "        self._asking[holder] = asking\n", "")
async def test_many_who_want_it_at_once_cause_one_exchange(
    store: PlaceholderStore, control_plane: ControlPlane
) -> None:
    control_plane.answers.clear()
    asking = [asyncio.create_task(take(store)) for _ in range(20)]
    await settled()

    asking[0].cancel()  # whoever asked first goes away
    await settled()
    control_plane.answers.set()

    assert await asyncio.gather(*asking[1:]) == ["placeholder-1"] * 19
    assert len(control_plane.exchanged) == 1


async def test_a_bad_token_of_one_is_no_answer_to_another(store: PlaceholderStore, control_plane: ControlPlane) -> None:
    control_plane.failures = [RefusedError(Refusal(RefusalCode.TOKEN_EXPIRED, "over"))]
    control_plane.answers.clear()
    bad, good = asyncio.create_task(take(store, token="bad")), asyncio.create_task(take(store, token="good"))
    await settled()

    control_plane.answers.set()

    assert await good == "placeholder-2"
    with pytest.raises(RefusedError):
        await bad


async def test_at_half_its_life_it_is_renewed_beside_and_stays_the_same(
    store: PlaceholderStore, control_plane: ControlPlane, time: Time
) -> None:
    await take(store)
    time.now += 49
    before = await take(store)
    await settled()
    none_yet = list(control_plane.renewed)
    time.now += 1
    control_plane.answers.clear()  # nobody waits for it

    after = [await take(store), await take(store)]
    await settled()
    control_plane.answers.set()
    await settled()

    assert (before, none_yet, after) == ("placeholder-1", [], ["placeholder-1"] * 2)
    assert control_plane.renewed == [("placeholder-1", ALICE)]
    assert (await store.placeholder(ALICE, session_token="")).expires_at == time.now + 100


async def test_one_that_is_over_is_renewed_and_waited_for_since_programs_hold_it(
    store: PlaceholderStore, control_plane: ControlPlane, time: Time
) -> None:
    await take(store)
    time.now += 500

    again = await take(store)

    assert (again, len(control_plane.exchanged)) == ("placeholder-1", 1)


async def test_one_that_was_taken_back_is_dropped_and_the_next_is_exchanged(
    store: PlaceholderStore, control_plane: ControlPlane, time: Time
) -> None:
    await take(store)
    time.now += 60
    control_plane.failures = [PlaceholderRefusedError()]

    await take(store)
    await settled()

    assert await take(store, token="fresh") == "placeholder-2"
    assert control_plane.exchanged[-1] == (ALICE, "fresh")


async def test_one_that_was_taken_back_after_its_end_is_exchanged_anew(
    store: PlaceholderStore, control_plane: ControlPlane, time: Time
) -> None:
    await take(store)
    time.now += 500
    control_plane.failures = [PlaceholderRefusedError()]

    assert await take(store) == "placeholder-2"


@pytest.mark.guards(FILE, "if self._asking.get(holder) is asyncio.current_task():", "if True:")
async def test_what_was_forgotten_while_its_answer_was_on_its_way_stays_forgotten(
    store: PlaceholderStore, control_plane: ControlPlane
) -> None:
    control_plane.answers.clear()
    asking = asyncio.create_task(take(store))
    await settled()

    store.forget(ALICE.owner, ALICE.session)
    control_plane.answers.set()
    await asking

    assert await take(store) == "placeholder-2"


async def test_to_forget_a_session_forgets_all_of_it_and_nothing_else(store: PlaceholderStore) -> None:
    first = {holder: await take(store, holder) for holder in (ALICE, *OTHERS)}

    store.forget(ALICE.owner, ALICE.session)
    then = {holder: await take(store, holder) for holder in (ALICE, *OTHERS)}

    assert {holder for holder in first if first[holder] != then[holder]} == {ALICE, replace(ALICE, audience="openai")}


async def test_only_so_many_are_kept(control_plane: ControlPlane, time: Time) -> None:
    store = PlaceholderStore(control_plane, clock=time, capacity=2)

    for holder in (ALICE, OTHERS[0], OTHERS[1], OTHERS[0], ALICE):
        await take(store, holder)

    assert [holder for holder, _ in control_plane.exchanged] == [ALICE, OTHERS[0], OTHERS[1], ALICE]


# --- while something is under way ------------------------------------------------------------------------------------


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.fixture
async def quick() -> ControlPlane:
    """By the true clock, with short lives."""
    return ControlPlane(asyncio.get_running_loop().time, life=0.2)


@pytest.mark.guards(FILE, "used.renewing = asyncio.create_task(", "(lambda work, name: work.close())(")
async def test_in_a_turn_that_takes_many_lives_it_never_ends(quick: ControlPlane) -> None:
    store = PlaceholderStore(quick, clock=quick.clock)

    async with store.in_use(ALICE.owner, ALICE.session), store.in_use(ALICE.owner, ALICE.session):
        await take(store)
        await take(store, replace(ALICE, audience="openai"))
        await take(store, OTHERS[0])
        await until(lambda: {value for value, _ in quick.renewed[4:]} >= {"placeholder-1", "placeholder-2"})

    assert "placeholder-3" not in {value for value, _ in quick.renewed}
    assert len(quick.exchanged) == 3


async def test_after_the_turn_nothing_is_renewed_any_more(quick: ControlPlane) -> None:
    store = PlaceholderStore(quick, clock=quick.clock)
    async with store.in_use(ALICE.owner, ALICE.session):
        await take(store)
        await until(lambda: len(quick.renewed) > 1)

    await settled()
    renewed = len(quick.renewed)
    await asyncio.sleep(0.4)

    assert len(quick.renewed) == renewed
    assert store._in_use == {}


async def test_a_renewal_that_fails_is_tried_again_while_the_turn_lasts(
    quick: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.placeholders.AGAIN_SECONDS", 0.02)
    store = PlaceholderStore(quick, clock=quick.clock)

    async with store.in_use(ALICE.owner, ALICE.session):
        await take(store)
        quick.failures = [AWAY, AWAY]
        await until(lambda: len(quick.renewed) > 3)
        with suppress(RefusedError):
            assert await take(store) == "placeholder-1"

    assert len(quick.exchanged) == 1
