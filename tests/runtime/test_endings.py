"""Sessions that end: nothing is forgotten too early, nothing is confirmed before everybody could look."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import pytest

from control_plane.contract.caller import SessionId, SubjectId, TenantId
from control_plane.contract.refusal import RefusalCode, RefusedError
from runtime.adapters.control_plane import unavailable
from runtime.adapters.memory import SessionsInMemory
from runtime.core.subject import Owner
from runtime.core.turn import Conversation, Holder, Message, Placeholder
from runtime.endings import Endings

FILE = "runtime/endings.py"
ALICE = Owner(TenantId("acme"), SubjectId("alice"))
ONE, TWO = SessionId("ses_1"), SessionId("ses_2")
SAID = Conversation((Message("user", "hello"), Message("assistant", "hi")))
GRACE = 30.0


class ControlPlane:
    """The list of what is over, and what was confirmed of it."""

    def __init__(self) -> None:
        self.over: list[SessionId] = []
        self.confirmed: list[SessionId] = []
        self.is_away = False

    async def end(self, session: SessionId) -> None:
        self._answers()
        if session not in self.over:
            self.over.append(session)

    async def ended(self) -> Sequence[SessionId]:
        self._answers()
        return [session for session in self.over if session not in self.confirmed]

    async def is_over(self, session: SessionId) -> bool:
        self._answers()
        return session in self.over

    async def erased(self, session: SessionId) -> None:
        self._answers()
        self.confirmed.append(session)

    def _answers(self) -> None:
        if self.is_away:
            raise unavailable("the control plane does not answer")


class Replica:
    """One runtime process: what it keeps, and its part in the end of sessions."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self.now = 1_000.0
        self.sessions = SessionsInMemory(clock=lambda: 0.0)
        self.forgotten: list[tuple[Owner, SessionId]] = []
        self.endings = Endings(control_plane, self.sessions, self, grace_seconds=GRACE, monotonic=lambda: self.now)

    def in_use(self, owner: Owner, session: SessionId) -> AbstractAsyncContextManager[None]:
        raise AssertionError("an ending begins nothing")

    async def placeholder(self, holder: Holder, *, session_token: str) -> Placeholder:
        raise AssertionError("nobody asks for one here")

    def forget(self, owner: Owner, session: SessionId) -> None:
        self.forgotten.append((owner, session))

    def say(self, session: SessionId = ONE) -> Conversation:
        """One turn; gives what was remembered before it."""
        with self.sessions.hold(session, owner=ALICE, ends_at=2_000.0) as held:
            before, held.conversation = held.conversation, SAID
        return before

    async def look(self, *, after_seconds: float = 0.0) -> None:
        self.now += after_seconds
        await self.endings.look()


@pytest.fixture
def control_plane() -> ControlPlane:
    return ControlPlane()


@pytest.fixture
def replica(control_plane: ControlPlane) -> Replica:
    return Replica(control_plane)


def is_gone(replica: Replica, session: SessionId = ONE) -> bool:
    """Whether a turn of it is told that there is no such session."""
    try:
        replica.say(session)
    except RefusedError as refused:
        return refused.refusal.code is RefusalCode.SESSION_NOT_FOUND
    return False


async def test_what_was_ended_elsewhere_goes_and_the_rest_stays(control_plane: ControlPlane, replica: Replica) -> None:
    replica.say(ONE)
    replica.say(TWO)
    control_plane.over = [ONE]

    await replica.look()

    assert (is_gone(replica, ONE), replica.say(TWO)) == (True, SAID)
    assert replica.sessions.kept() == [TWO]
    assert (ALICE, ONE) in replica.forgotten


@pytest.mark.guards(FILE, "now - since >= self._grace_seconds", "True")
async def test_it_is_confirmed_only_once_every_replica_had_the_time_to_look(
    control_plane: ControlPlane, replica: Replica
) -> None:
    other = Replica(control_plane)
    for each in (replica, other):
        each.say()
        await each.look()
    control_plane.over = [ONE]

    await replica.look(after_seconds=5)
    await replica.look(after_seconds=GRACE - 1)
    early = list(control_plane.confirmed)
    await other.look(after_seconds=GRACE)
    await replica.look(after_seconds=1)

    assert (early, control_plane.confirmed) == ([], [ONE])
    assert (is_gone(replica), is_gone(other)) == (True, True)


@pytest.mark.guards(FILE, "if now - self._looked_at > self._grace_seconds / 2:", "if False:")
async def test_a_replica_that_was_cut_off_asks_about_everything_that_it_kept(
    control_plane: ControlPlane, replica: Replica
) -> None:
    replica.say()
    await replica.look()
    control_plane.over = control_plane.confirmed = [ONE]  # by another replica, meanwhile

    await replica.look(after_seconds=GRACE)

    assert is_gone(replica)


@pytest.mark.guards(
    FILE, "await self._control_plane.end(session)\n        self._forget(session)", "self._forget(session)"
)
async def test_while_the_control_plane_is_away_nothing_is_forgotten(
    control_plane: ControlPlane, replica: Replica
) -> None:
    replica.say()
    control_plane.is_away = True

    for work in (replica.endings.end(ONE), replica.look()):
        with pytest.raises(RefusedError):
            await work

    assert replica.say() == SAID


@pytest.mark.guards(FILE, "if session in quiet and", "if")
async def test_a_turn_that_is_under_way_leaves_nothing_behind_and_is_waited_for(
    control_plane: ControlPlane, replica: Replica
) -> None:
    replica.say()
    with replica.sessions.hold(ONE, owner=ALICE, ends_at=2_000.0) as held:
        control_plane.over = [ONE]
        await replica.look()
        await replica.look(after_seconds=GRACE)
        during = list(control_plane.confirmed)
        held.conversation = SAID
    await replica.look(after_seconds=1)

    assert (during, control_plane.confirmed) == ([], [ONE])
    assert is_gone(replica)
    assert replica.sessions.kept() == []
