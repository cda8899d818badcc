"""What the runtime remembers: conversations, in this process and nowhere else.

Rule: everything is kept by its owner and bounded.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from control_plane.contract.caller import SessionId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from runtime.core.subject import Owner
from runtime.core.turn import Conversation
from runtime.ports import HeldSession

MAX_SESSIONS: Final = 10_000

Clock = Callable[[], float]
"""Unix seconds."""


@dataclass(slots=True)
class _Session:
    owner: Owner
    ends_at: float
    conversation: Conversation = field(default_factory=Conversation)
    is_held: bool = False
    is_ended: bool = False
    """A tombstone: nothing was kept but whose it was, so that no token that is still good begins it anew."""


class SessionsInMemory:
    """See `runtime.ports.Sessions`. When full, the session that was idle longest is forgotten."""

    def __init__(self, *, clock: Clock, capacity: int = MAX_SESSIONS) -> None:
        self._clock = clock
        self._capacity = capacity
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def owner(self, session: str) -> Owner | None:
        known = self._alive(session)
        return known.owner if known else None

    @contextmanager
    def hold(self, session: SessionId, *, owner: Owner, ends_at: float) -> Iterator[HeldSession]:
        known = self._alive(session) or self._begin(session, owner, ends_at)
        if known.owner != owner:
            raise _not_found()
        if known.is_ended:
            raise _not_found()
        if known.is_held:
            raise RefusedError(
                Refusal(
                    RefusalCode.SESSION_BUSY,
                    detail="a turn of this session is under way",
                    hint="wait for its answer",
                    retry_after_seconds=1,
                )
            )
        known.is_held, held = True, HeldSession(known.conversation)
        self._sessions.move_to_end(session)
        try:
            yield held
        finally:
            known.is_held = False
            if not known.is_ended:  # it may have ended meanwhile
                known.conversation = held.conversation

    def forget(self, session: SessionId) -> bool:
        known = self._sessions.get(session)
        if known is None:
            return True
        known.is_ended, known.conversation = True, Conversation()
        return not known.is_held

    def kept(self) -> Sequence[SessionId]:
        return [SessionId(session) for session, known in self._sessions.items() if not known.is_ended]

    def _alive(self, session: str) -> _Session | None:
        known = self._sessions.get(session)
        return None if known is None or self._is_over(known) else known

    def _is_over(self, known: _Session) -> bool:
        return self._clock() >= known.ends_at and not known.is_held

    def _begin(self, session: str, owner: Owner, ends_at: float) -> _Session:
        for ended in [other for other, known in self._sessions.items() if self._is_over(known)]:
            del self._sessions[ended]
        idle = (other for other, known in self._sessions.items() if not known.is_held)
        if len(self._sessions) >= self._capacity and (oldest := next(idle, None)) is not None:
            del self._sessions[oldest]
        begun = self._sessions[session] = _Session(owner, ends_at)
        return begun


def _not_found() -> RefusedError:
    return RefusedError(Refusal(RefusalCode.SESSION_NOT_FOUND, detail="there is no such session", hint="open one"))
