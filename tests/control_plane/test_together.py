"""Questions that wait are answered by one look, each by its own answer."""

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar

import pytest

from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.together import AT_MOST, LOOKS_AT_ONCE, Together

AWAY = RefusedError(Refusal(RefusalCode.STORE_UNAVAILABLE, "away"))


class Looks:
    """Every look and what it was about. While `held` is not set, looks wait."""

    def __init__(self) -> None:
        self.about: list[list[str]] = []
        self.held = asyncio.Event()
        self.held.set()

    async def __call__(self, questions: Sequence[str]) -> Sequence[str | Exception]:
        self.about.append(list(questions))
        await self.held.wait()
        if "spoils" in questions:
            raise ZeroDivisionError
        if "away" in questions:
            raise AWAY
        return [ValueError(text) if text == "wrong" else text.upper() for text in questions]


async def test_what_is_asked_in_one_turn_is_one_look_and_everybody_hears_their_own() -> None:
    looks = Looks()
    together = Together(looks)

    answers = await asyncio.gather(*(together(text) for text in ("a", "b", "a", "c")))

    assert answers == ["A", "B", "A", "C"]
    assert looks.about == [["a", "b", "a", "c"]]


@pytest.mark.guards(
    "control_plane/together.py",
    "some = [self._waiting.popleft() for _ in range(min(len(self._waiting), AT_MOST))]\n"
    "                await self._answer([(question, answer) for question, answer in some if not answer.done()])",
    "some = list(self._waiting)\n"
    "                await self._answer([(question, answer) for question, answer in some if not answer.done()])\n"
    "                self._waiting.clear()",
)
async def test_a_look_never_answers_what_was_asked_after_it_began() -> None:
    looks = Looks()
    looks.held.clear()
    together = Together(looks)
    early = [asyncio.create_task(together(f"early {number}")) for number in range(LOOKS_AT_ONCE)]
    for _ in range(5):
        await asyncio.sleep(0)

    late = [asyncio.create_task(together(f"late {number}")) for number in range(AT_MOST + 1)]
    for _ in range(5):
        await asyncio.sleep(0)
    begun = len(looks.about)
    looks.held.set()
    await asyncio.wait_for(asyncio.gather(*early, *late), 5)

    assert begun <= LOOKS_AT_ONCE
    assert all(len(about) <= AT_MOST for about in looks.about)
    assert sorted(text for about in looks.about for text in about) == sorted(
        [*(f"early {number}" for number in range(LOOKS_AT_ONCE)), *(f"late {number}" for number in range(AT_MOST + 1))]
    )


async def test_an_answer_that_is_an_exception_is_raised_where_it_was_asked() -> None:
    together = Together(Looks())

    answers = await asyncio.gather(*(together(text) for text in ("a", "wrong", "b")), return_exceptions=True)

    assert answers[0::2] == ["A", "B"]
    assert isinstance(answers[1], ValueError)


async def test_one_question_that_breaks_the_look_spoils_nobody_elses_answer() -> None:
    looks = Looks()
    together = Together(looks)

    answers = await asyncio.gather(*(together(text) for text in ("a", "spoils", "b")), return_exceptions=True)

    assert answers[0::2] == ["A", "B"]
    assert isinstance(answers[1], ZeroDivisionError)
    assert looks.about == [["a", "spoils", "b"], ["a"], ["spoils"], ["b"]]


async def test_a_database_that_is_away_is_away_for_all_and_not_asked_for_each() -> None:
    looks = Looks()
    together = Together(looks)

    answers = await asyncio.gather(*(together(text) for text in ("a", "away", "b")), return_exceptions=True)

    assert answers == [AWAY] * 3
    assert len(looks.about) == 1


async def test_who_goes_away_takes_nobody_along() -> None:
    looks = Looks()
    looks.held.clear()
    together = Together(looks)
    goes, stays = asyncio.create_task(together("goes")), asyncio.create_task(together("stays"))
    for _ in range(3):
        await asyncio.sleep(0)

    goes.cancel()
    looks.held.set()

    assert await asyncio.wait_for(stays, 5) == "STAYS"
    assert await together("later") == "LATER"


@pytest.mark.guards("control_plane/together.py", "self._looking.discard(asyncio.current_task())", "pass")
async def test_who_asks_in_the_very_turn_in_which_the_last_look_ends_is_answered_too() -> None:
    together = Together(Looks())
    first = [asyncio.create_task(together(f"first {number}")) for number in range(LOOKS_AT_ONCE)]
    await asyncio.sleep(0)  # they have asked, and the looks begin with the next turn

    last = asyncio.create_task(together("last"))  # comes after the looks, in that same turn

    assert await asyncio.wait_for(last, 5) == "LAST"
    await asyncio.gather(*first)


@pytest.mark.guards("control_plane/together.py", ", context=Context()", "")
async def test_a_look_runs_in_nobodys_context() -> None:
    asker: ContextVar[str] = ContextVar("asker", default="nobody")

    async def look(questions: Sequence[str]) -> Sequence[str]:
        return [asker.get()] * len(questions)

    together = Together(look)
    asker.set("the first")

    assert await together("whose look is it?") == "nobody"


@pytest.mark.guards("control_plane/together.py", "asyncio.timeout(self._waits_seconds)", "asyncio.timeout(None)")
async def test_behind_looks_that_hang_nobody_waits_for_ever_and_nobody_is_looked_for_who_has_gone() -> None:
    looks = Looks()
    looks.held.clear()
    together = Together(looks, waits_seconds=0.05)
    asked = [asyncio.create_task(together(f"{number}")) for number in range(AT_MOST * LOOKS_AT_ONCE * 3)]

    heard = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
    begun = len(looks.about)
    looks.held.set()

    assert {type(each) for each in heard} == {RefusedError}
    assert {each.refusal.code for each in heard if isinstance(each, RefusedError)} == {RefusalCode.STORE_UNAVAILABLE}
    assert await together("later") == "LATER"
    assert len(looks.about) == begun + 1
