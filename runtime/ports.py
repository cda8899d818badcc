"""What a turn needs from outside, as the runner sees it. `adapters/` has one end of each."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from control_plane.contract.caller import SessionId
from control_plane.contract.refusal import Refusal, RefusedError
from runtime.core.subject import Owner, SessionClaims
from runtime.core.turn import Conversation, Holder, Placeholder


class Identity(Protocol):
    """Turns an unverified token into claims."""

    async def verify(self, unverified_token: str) -> SessionClaims:
        """Raises `RefusedError`: `token_invalid`, `token_expired`; `credential_unavailable` while no key is known."""
        ...


@dataclass(slots=True)
class HeldSession:
    """A session while one turn has it for itself. Whoever holds it sets its conversation."""

    conversation: Conversation


class Sessions(Protocol):
    """Conversations by session. A session is known from its first valid token on, never from a request's body."""

    def owner(self, session: str) -> Owner | None:
        """Whose it is; None when we have not seen it."""
        ...

    def hold(self, session: SessionId, *, owner: Owner, ends_at: float) -> AbstractContextManager[HeldSession]:
        """The session, for one turn. Raises `RefusedError`: `session_busy`, `session_not_found`."""
        ...

    def forget(self, session: SessionId) -> bool:
        """It is over: its conversation goes, and no turn of it begins any more. False while one is under way."""
        ...

    def kept(self) -> Sequence[SessionId]:
        """Those of which something is kept."""
        ...


class ClientUnknownError(RefusedError):
    """The control plane does not know this runtime by what it proves itself with, or there is nothing to prove with."""

    def __init__(self, refusal: Refusal, *, reason: str) -> None:
        """`reason` is for our own log; callers hear the refusal."""
        super().__init__(refusal)
        self.reason = reason


class SessionEnds(Protocol):
    """The control plane's side of a session's end.

    Every method raises `RefusedError` where it cannot be reached, `ClientUnknownError` where it does not know us.
    """

    async def end(self, session: SessionId) -> None:
        """Sets the tombstone: nothing is exchanged, renewed or resolved in it from then on."""
        ...

    async def ended(self) -> Sequence[SessionId]:
        """All sessions of this runtime that are over, and of which it has not confirmed that nothing is kept."""
        ...

    async def is_over(self, session: SessionId) -> bool:
        """Whether this one is over, or is not known."""
        ...

    async def erased(self, session: SessionId) -> None:
        """Confirms that nothing is kept of it."""
        ...


class Placeholders(Protocol):
    """Placeholders by their holder."""

    async def placeholder(self, holder: Holder, *, session_token: str) -> Placeholder:
        """One that is alive. Raises `RefusedError`."""
        ...

    def in_use(self, owner: Owner, session: SessionId) -> AbstractAsyncContextManager[None]:
        """While this lasts, every placeholder of the session stays alive."""
        ...

    def forget(self, owner: Owner, session: SessionId) -> None:
        """It is over, or the proxy no longer takes it."""
        ...


class PlaceholderRefusedError(Exception):
    """The placeholder is known no longer: the proxy sent nothing on, or the control plane renews it no more."""


class ExchangesPlaceholders(Protocol):
    """Where placeholders come from. Both raise `RefusedError`."""

    async def exchange(self, session_token: str, holder: Holder) -> Placeholder:
        """A new one."""
        ...

    async def renew(self, placeholder: Placeholder, holder: Holder) -> Placeholder:
        """The same one, and its proxy credential, for longer. Raises `PlaceholderRefusedError` where it is over."""
        ...


class Model(Protocol):
    """Continues a conversation."""

    async def answer(self, conversation: Conversation, placeholder: Placeholder) -> str:
        """The model's words. Raises `PlaceholderRefusedError`, or `RefusedError` for everything else."""
        ...
