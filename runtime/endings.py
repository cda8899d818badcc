"""Sessions that end, on both sides: told first, forgotten second, confirmed last (docs/exchange.md).

    the owner ends it here       the control plane's tombstone, then what is kept here
    it was ended elsewhere       the control plane's list says so; what is kept here goes
    the last step                the control plane hears that nothing is kept any more, and erases its own part

Rule: nothing is forgotten before the tombstone is there, or a session token would still begin the session anew; and
nothing is confirmed before every replica has had the time to look. Each step may be repeated, so that a runtime that
died between two of them goes on where the list says: the control plane's list is what outlives us.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from control_plane.contract.caller import SessionId
from control_plane.contract.refusal import RefusedError
from runtime.ports import ClientUnknownError, Placeholders, SessionEnds, Sessions

LOOKS_IN_GRACE: Final = 6
LONGEST_PAUSE_SECONDS: Final = 5.0

log = structlog.get_logger("runtime.endings")


class Endings:
    """One replica's part in the end of sessions."""

    def __init__(
        self,
        control_plane: SessionEnds,
        sessions: Sessions,
        placeholders: Placeholders,
        *,
        grace_seconds: float,
        monotonic: Callable[[], float],
    ) -> None:
        """`grace_seconds`: how long an ended session stays in the list after we saw it, so that other replicas do."""
        self._control_plane = control_plane
        self._sessions = sessions
        self._placeholders = placeholders
        self._grace_seconds = grace_seconds
        self._monotonic = monotonic
        self._looked_at = float("-inf")
        self._first_seen: dict[SessionId, float] = {}
        self.is_known = False
        """Whether the control plane knows us, as far as it said: an outage changes nothing."""

    async def end(self, session: SessionId) -> None:
        """For its owner. Raises `RefusedError`, and then nothing is forgotten; again changes nothing."""
        await self._control_plane.end(session)
        self._forget(session)

    async def look(self) -> None:
        """Forget what is over, and confirm what is due. Raises `RefusedError`; what was not reached is next time's."""
        now = self._monotonic()
        # (1) What the list names goes.
        try:
            ended = await self._control_plane.ended()
        except ClientUnknownError:
            self.is_known = False
            raise
        self.is_known = True
        quiet = {session for session in ended if self._forget(session)}
        # (2) We may have been away for so long that another replica confirmed what we never saw: ask one by one.
        if now - self._looked_at > self._grace_seconds / 2:
            for session in self._sessions.kept():
                if await self._control_plane.is_over(session):
                    self._forget(session)
        self._looked_at = now
        # (3) What every replica has had the time to see is confirmed, unless a turn of it is still under way here.
        self._first_seen = {session: self._first_seen.get(session, now) for session in ended}
        for session, since in self._first_seen.items():
            if session in quiet and now - since >= self._grace_seconds:
                await self._control_plane.erased(session)

    async def run(self) -> None:
        """Look again and again, for ever."""
        was_answered = True
        while True:
            try:
                await self.look()
                was_answered = True
            except RefusedError as error:
                if isinstance(error, ClientUnknownError):
                    log.error("client_not_known", reason=error.reason)  # noqa: TRY400 - it says all there is
                elif was_answered:
                    log.warning("control_plane_unreachable", reason=error.refusal.detail)
                was_answered = False
            except Exception as error:  # border: whatever it was, the next look begins anew
                log.error("endings_failed", error=type(error).__name__)  # noqa: TRY400 - no message of it
            await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, self._grace_seconds / LOOKS_IN_GRACE))

    def _forget(self, session: SessionId) -> bool:
        """Whether nothing is kept of it any more."""
        owner = self._sessions.owner(session)
        is_quiet = self._sessions.forget(session)
        if owner is not None:
            self._placeholders.forget(owner, session)
        return is_quiet
