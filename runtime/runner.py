"""One turn, carried out. Read it beside the control plane's `exchange` and the proxy's `decision`: it calls both."""

from dataclasses import dataclass

from control_plane.contract.caller import SessionId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from runtime.core.subject import Owner
from runtime.core.turn import Conversation, Holder, Placeholder
from runtime.ports import Model, PlaceholderRefusedError, Placeholders, Sessions


@dataclass(frozen=True, slots=True)
class Turn:
    """What is to be done, for whom. The token is only passed on to the control plane."""

    owner: Owner
    session: SessionId
    session_ends_at: float
    """Unix seconds."""
    session_token: str
    input: str


class Runner:
    """Carries out turns, one at a time in each session."""

    def __init__(self, *, sessions: Sessions, placeholders: Placeholders, model: Model, audience: str) -> None:
        """`audience`: the name of the model's credential."""
        self._sessions = sessions
        self._placeholders = placeholders
        self._model = model
        self._audience = audience

    async def carry_out(self, turn: Turn) -> str:
        """The model's answer. Raises `RefusedError`; then the conversation is as it was."""
        # (1) The session is its owner's alone, and has one turn at a time.
        with self._sessions.hold(turn.session, owner=turn.owner, ends_at=turn.session_ends_at) as session:
            # (2) What the model is told: the finished turns, and this one's input.
            asked = session.conversation.asking(turn.input)
            # (3) A placeholder for this owner and session, alive for as long as the turn lasts, and (4) the model,
            # through the proxy.
            async with self._placeholders.in_use(turn.owner, turn.session):
                answer = await self._ask(turn, asked)
            # (5) Both sides are remembered together, or not at all.
            session.conversation = asked.answered(answer)
            return answer

    async def _ask(self, turn: Turn, asked: Conversation) -> str:
        try:
            return await self._model.answer(asked, await self._placeholder(turn))
        except PlaceholderRefusedError:
            # Revoked or forgotten between two turns. The proxy sent nothing on, so asking once more repeats nothing; if
            # the session or its grant is gone, the exchange says so.
            self._placeholders.forget(turn.owner, turn.session)
        try:
            return await self._model.answer(asked, await self._placeholder(turn))
        except PlaceholderRefusedError:
            self._placeholders.forget(turn.owner, turn.session)
            raise RefusedError(
                Refusal(
                    RefusalCode.CREDENTIAL_UNAVAILABLE,
                    detail="the egress proxy does not take a fresh placeholder",
                    hint="try again; if it stays so, look the request up with `coatcheck why`",
                    retry_after_seconds=1,
                )
            ) from None

    async def _placeholder(self, turn: Turn) -> Placeholder:
        holder = Holder(turn.owner, turn.session, self._audience)
        return await self._placeholders.placeholder(holder, session_token=turn.session_token)
