"""What a process remembers: each owner's own, no more than it has room for, and nothing beyond a session's end."""

import pytest

from control_plane.contract.caller import SessionId, SubjectId, TenantId
from control_plane.contract.refusal import RefusalCode, RefusedError
from runtime.adapters.memory import SessionsInMemory
from runtime.core.subject import Owner
from runtime.core.turn import Conversation, Message

FILE = "runtime/adapters/memory.py"

ALICE = Owner(TenantId("acme"), SubjectId("alice"))
BOB = Owner(TenantId("acme"), SubjectId("bob"))
OTHER_ALICE = Owner(TenantId("globex"), SubjectId("alice"))
ONE, TWO = SessionId("ses_1"), SessionId("ses_2")
SAID = Conversation((Message("user", "hello"), Message("assistant", "hi")))


class Time:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


# --- sessions --------------------------------------------------------------------------------------------------------


def say(sessions: SessionsInMemory, session: SessionId, owner: Owner, *, ends_at: float = 2_000.0) -> Conversation:
    """One turn; gives what was remembered before it."""
    with sessions.hold(session, owner=owner, ends_at=ends_at) as held:
        before, held.conversation = held.conversation, SAID
    return before


def test_a_session_is_remembered_from_one_turn_to_the_next() -> None:
    sessions = SessionsInMemory(clock=Time())

    assert sessions.owner(ONE) is None
    assert say(sessions, ONE, ALICE) == Conversation()
    assert say(sessions, ONE, ALICE) == SAID
    assert sessions.owner(ONE) == ALICE


@pytest.mark.parametrize("stranger", [BOB, OTHER_ALICE])
@pytest.mark.guards(FILE, "if known.owner != owner:", "if False:")
def test_a_session_of_another_subject_or_tenant_is_not_found(stranger: Owner) -> None:
    sessions = SessionsInMemory(clock=Time())
    say(sessions, ONE, ALICE)

    with pytest.raises(RefusedError) as refused:
        say(sessions, ONE, stranger)

    assert refused.value.refusal.code is RefusalCode.SESSION_NOT_FOUND


def test_a_session_has_one_turn_at_a_time() -> None:
    sessions = SessionsInMemory(clock=Time())

    with sessions.hold(ONE, owner=ALICE, ends_at=2_000.0):
        say(sessions, TWO, ALICE)
        with pytest.raises(RefusedError) as refused:
            say(sessions, ONE, ALICE)

    assert refused.value.refusal.code is RefusalCode.SESSION_BUSY
    assert say(sessions, ONE, ALICE) == Conversation()


def test_a_turn_that_failed_leaves_the_conversation_as_it_was_and_the_session_free() -> None:
    sessions = SessionsInMemory(clock=Time())
    say(sessions, ONE, ALICE)

    with pytest.raises(KeyError), sessions.hold(ONE, owner=ALICE, ends_at=2_000.0):
        raise KeyError

    assert say(sessions, ONE, ALICE) == SAID


@pytest.mark.guards(FILE, "return self._clock() >= known.ends_at and not known.is_held", "return False")
def test_nothing_is_remembered_beyond_a_sessions_end() -> None:
    time = Time()
    sessions = SessionsInMemory(clock=time)
    say(sessions, ONE, ALICE, ends_at=2_000.0)
    time.now = 2_000.0

    assert sessions.owner(ONE) is None
    assert say(sessions, ONE, ALICE, ends_at=3_000.0) == Conversation()


def test_the_session_that_was_idle_longest_makes_room() -> None:
    sessions = SessionsInMemory(clock=Time(), capacity=2)
    say(sessions, ONE, ALICE)
    say(sessions, TWO, ALICE)
    say(sessions, ONE, ALICE)

    say(sessions, SessionId("ses_3"), BOB)

    assert (sessions.owner(ONE), sessions.owner(TWO)) == (ALICE, None)


def test_a_session_under_way_is_never_forgotten() -> None:
    time = Time()
    sessions = SessionsInMemory(clock=time, capacity=1)

    with sessions.hold(ONE, owner=ALICE, ends_at=2_000.0) as held:
        time.now = 2_001.0
        say(sessions, TWO, BOB, ends_at=3_000.0)
        held.conversation = SAID
        owner = sessions.owner(ONE)

    assert owner == ALICE
