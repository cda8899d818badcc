"""One turn: in whose name, with which placeholder, and what is left when it fails."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from control_plane.contract.caller import SessionId, SubjectId, TenantId
from control_plane.contract.credential import PlaceholderCredential
from control_plane.contract.placement import HeaderPlacement
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from runtime.adapters.memory import SessionsInMemory
from runtime.core.subject import Owner
from runtime.core.turn import Conversation, Holder, Placeholder
from runtime.ports import PlaceholderRefusedError
from runtime.runner import Runner, Turn

ALICE = Owner(TenantId("acme"), SubjectId("alice"))
TURN = Turn(ALICE, SessionId("ses_1"), session_ends_at=2_000.0, session_token="the token", input="hello")
AWAY = RefusedError(Refusal(RefusalCode.UPSTREAM_UNREACHABLE, detail="away"))


class Placeholders:
    """Hands out p1, p2, … and notes for whom."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.given = 0
        self.used = 0

    @asynccontextmanager
    async def in_use(self, owner: Owner, session: SessionId) -> AsyncIterator[None]:
        self.used += 1
        try:
            yield
        finally:
            self.used -= 1

    async def placeholder(self, holder: Holder, *, session_token: str) -> Placeholder:
        assert self.used == 1, "what is used in a turn is kept alive for as long as it lasts"
        self.given += 1
        owner = holder.owner
        self.log.append(f"exchange {owner.tenant}/{owner.subject}/{holder.session} with {session_token}")
        value = PlaceholderCredential(f"p{self.given}")
        return Placeholder(value, HeaderPlacement("x-api-key"), "proof", "http://p", 9e9)

    def forget(self, owner: Owner, session: SessionId) -> None:
        self.log.append(f"forget {owner.tenant}/{owner.subject}/{session}")


class Model:
    """Says what it was told, or fails as scripted."""

    def __init__(self, *failures: Exception | None) -> None:
        self.failures = list(failures)
        self.told: list[tuple[str, list[str]]] = []

    async def answer(self, conversation: Conversation, placeholder: Placeholder) -> str:
        self.told.append((placeholder.credential.value, [message.text for message in conversation.messages]))
        failure = self.failures.pop(0) if self.failures else None
        if failure:
            raise failure
        return f"heard {conversation.messages[-1].text}"


def runner_with(model: Model, placeholders: Placeholders | None = None) -> Runner:
    return Runner(
        sessions=SessionsInMemory(clock=lambda: 1_000.0),
        placeholders=placeholders or Placeholders(),
        model=model,
        audience="anthropic",
    )


async def test_a_turn_is_the_owners_with_a_placeholder_of_its_session() -> None:
    placeholders, model = Placeholders(), Model()

    answer = await runner_with(model, placeholders).carry_out(TURN)

    assert answer == "heard hello"
    assert placeholders.log == ["exchange acme/alice/ses_1 with the token"]
    assert model.told == [("p1", ["hello"])]


async def test_the_next_turn_continues_the_conversation() -> None:
    model = Model()
    runner = runner_with(model)
    await runner.carry_out(TURN)

    await runner.carry_out(replace(TURN, input="and now?"))

    assert model.told[-1][1] == ["hello", "heard hello", "and now?"]


async def test_a_failed_turn_leaves_no_half_of_it_behind() -> None:
    model = Model(None, AWAY)
    runner = runner_with(model)
    await runner.carry_out(TURN)

    with pytest.raises(RefusedError):
        await runner.carry_out(replace(TURN, input="lost"))
    await runner.carry_out(replace(TURN, input="again"))

    assert model.told[-1][1] == ["hello", "heard hello", "again"]


async def test_a_placeholder_that_is_over_is_replaced_once() -> None:
    placeholders, model = Placeholders(), Model(PlaceholderRefusedError())

    answer = await runner_with(model, placeholders).carry_out(TURN)

    assert answer == "heard hello"
    assert [value for value, _ in model.told] == ["p1", "p2"]
    assert placeholders.log[1] == "forget acme/alice/ses_1"


async def test_a_proxy_that_takes_no_placeholder_ends_the_turn() -> None:
    placeholders, model = Placeholders(), Model(*[PlaceholderRefusedError()] * 9)

    with pytest.raises(RefusedError) as refused:
        await runner_with(model, placeholders).carry_out(TURN)

    assert refused.value.refusal.code is RefusalCode.CREDENTIAL_UNAVAILABLE
    assert len(model.told) == 2
    assert placeholders.log.count("forget acme/alice/ses_1") == 2


@pytest.mark.guards(
    "runtime/runner.py",
    "with self._sessions.hold(turn.session, owner=turn.owner,",
    "with self._sessions.hold(turn.session, owner=self._sessions.owner(turn.session) or turn.owner,",
)
async def test_a_turn_in_anothers_session_reaches_neither_exchange_nor_model() -> None:
    placeholders, model = Placeholders(), Model()
    runner = runner_with(model, placeholders)
    await runner.carry_out(TURN)

    with pytest.raises(RefusedError) as refused:
        await runner.carry_out(replace(TURN, owner=Owner(TenantId("acme"), SubjectId("bob"))))

    assert refused.value.refusal.code is RefusalCode.SESSION_NOT_FOUND
    assert len(model.told) == len(placeholders.log) == 1
