"""Suspending a placeholder whose secret keeps coming back in replies, at every proxy.

Rule: once may be an upstream's error message that quotes a field; `LEAKS` times within `WINDOW_SECONDS`, through
whatever proxies, is somebody who uses an upstream as a mirror. What is counted is what the trail holds, after it was
stored: of replicas that hear of one reply each, the last to look sees all of them, and a batch that is delivered again
counts nothing twice. A suspension touches no other placeholder, and ends by itself.
"""

from collections.abc import Sequence
from typing import Final

import structlog

from control_plane.contract.caller import PlaceholderId
from control_plane.contract.wire import LEAK_BLOCKED, AuditEvent
from control_plane.core.records import Change, ChangeKind, TokenKind
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Store
from control_plane.trail import Actor, Trail

LEAKS: Final = 3
WINDOW_SECONDS: Final = 600.0
_SCOPE: Final = PlatformScope(CrossTenantReason.AUDIT)
_LEAKS: Final = Actor("leaks", "", is_a_client=False)

_log = structlog.get_logger("control_plane.suspension")


class Suspensions:
    def __init__(self, store: Store, trail: Trail, *, clock: Clock) -> None:
        self._store = store
        self._trail = trail
        self._clock = clock

    async def heard(self, events: Sequence[AuditEvent]) -> None:
        """What proxies report, once it stands in the trail."""
        leaked = {event.placeholder_id: event for event in events if event.action == LEAK_BLOCKED}
        for placeholder_id, event in leaked.items():
            if placeholder_id is not None:
                await self._look(PlaceholderId(placeholder_id), event)

    async def _look(self, placeholder_id: PlaceholderId, event: AuditEvent) -> None:
        now = self._clock()
        async with self._store.write(_SCOPE) as records:
            token = await records.tokens.get(placeholder_id)
            if token is None or token.kind is not TokenKind.PLACEHOLDER or token.tenant != event.tenant:
                return
            if token.revoked_at is not None or (token.suspended_until or 0.0) > now:
                return
            if await records.audit.leaks(token, since=now - WINDOW_SECONDS, limit=LEAKS) < LEAKS:
                return
            if not await records.tokens.suspend(token.id, now + WINDOW_SECONDS, now=now):
                return  # another replica, that heard of the same replies
            # No stream is cut: what is open was let through before, and its replies are scrubbed like all others.
            await records.outbox.append([Change(ChangeKind.PLACEHOLDER, token.tenant, token.id, revoked=False)], now)
            recorded = self._trail.event(
                "placeholder.suspend",
                by=_LEAKS,
                tenant=token.tenant,
                subject=token.subject,
                session=token.session,
                credential=event.credential,
                placeholder_id=token.id,
                detail=f"replies gave its secret back; for {WINDOW_SECONDS / 60:.0f} minutes",
            )
            await self._trail.record(records, [recorded])
        _log.warning("placeholder_suspended", tenant=token.tenant, placeholder=token.id, seconds=WINDOW_SECONDS)
