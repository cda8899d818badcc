"""What a turn is made of: a conversation, the input that continues it, and what the runtime holds instead of a key."""

from dataclasses import dataclass, replace
from typing import Final, Literal

from control_plane.contract.caller import SessionId
from control_plane.contract.credential import PlaceholderCredential
from control_plane.contract.placement import Placement
from runtime.core.subject import Owner

MAX_INPUT_CHARACTERS: Final = 200_000
MAX_CONVERSATION_CHARACTERS: Final = 2_000_000
"""Beyond it the oldest turns are left out of what the model is told."""


@dataclass(frozen=True, slots=True)
class Message:
    """One side's words."""

    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A session's finished turns, oldest first: always pairs of input and answer, so that it can be continued."""

    messages: tuple[Message, ...] = ()

    def asking(self, text: str) -> "Conversation":
        """With the input of a turn that has not been answered yet."""
        kept, room = list(self.messages), MAX_CONVERSATION_CHARACTERS - len(text)
        while sum(len(message.text) for message in kept) > room:
            del kept[:2]
        return replace(self, messages=(*kept, Message("user", text)))

    def answered(self, text: str) -> "Conversation":
        return replace(self, messages=(*self.messages, Message("assistant", text)))


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose a placeholder is, and what for."""

    owner: Owner
    session: SessionId
    audience: str
    """The credential's name."""


@dataclass(frozen=True, slots=True, repr=False)
class Placeholder:
    """What an exchange gave: the placeholder, where it stands in a request, and our proof to the proxy.

    None of it is a key, and yet none of it shows itself: whoever holds both parts can spend a tenant's money.
    """

    credential: PlaceholderCredential
    placement: Placement
    proxy_credential: str
    base_url: str
    """The proxy's reverse route for this credential, without a final slash."""
    expires_at: float
    """Unix seconds."""

    def __repr__(self) -> str:
        return f"Placeholder(base_url={self.base_url!r}, expires_at={self.expires_at})"
