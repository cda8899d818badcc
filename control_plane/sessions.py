"""Sessions: opened for a subject, given short-lived tokens, ended once.

Rule: the store owns a session's existence, owner and end. A token only says which session is meant; every use looks
here. Whoever may not see a session hears that there is none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from control_plane.access import FORBIDDEN
from control_plane.contract.caller import ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.headers import SESSION_TOKEN_TYP
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import AuditEvent
from control_plane.core.delegation import Chain, Party
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.core.records import (
    SUBJECT_ASSERT,
    Client,
    ClientKind,
    Session,
)
from control_plane.core.session_token import LIFETIME_SECONDS, SessionClaims, to_payload
from control_plane.faults import reach
from control_plane.own_keys import OwnKeyring
from control_plane.ports import Clock, CrossTenantReason, Entropy, PlatformScope, Records, Store, TenantScope
from control_plane.revocation import end_sessions
from control_plane.trail import Actor, Trail, acted

SESSION_NOT_FOUND: Final = Refusal(
    RefusalCode.SESSION_NOT_FOUND,
    "there is no such session, or it is not yours, or it is over",
    "open one with POST /v1/sessions",
)
NOT_OVER: Final = Refusal(
    RefusalCode.SESSION_BUSY,
    "the session is not over, so nothing of it is to be erased yet",
    "end it first: DELETE /v1/sessions/{id}",
)


@dataclass(frozen=True, slots=True)
class SessionToken:
    text: str
    expires_in: int


@dataclass(frozen=True, slots=True)
class Opening:
    """A session to be opened."""

    tenant: TenantId
    subject: SubjectId
    roles: tuple[str, ...]
    runtime: ClientId
    act: Chain = ()
    """Who opens it on the subject's behalf."""
    may_act: Mapping[str, Any] | None = None
    not_after: float | None = None
    """The end of what it is opened by, which it never outlives. None: it has no end of its own."""
    joined_by: ClientId | None = None


class Sessions:
    def __init__(
        self,
        store: Store,
        own_keys: OwnKeyring,
        trail: Trail,
        *,
        clock: Clock,
        entropy: Entropy,
        issuer: str,
        session_seconds: int,
    ) -> None:
        self._store = store
        self._own_keys = own_keys
        self._trail = trail
        self._clock = clock
        self._entropy = entropy
        self.issuer = issuer
        self._session_seconds = session_seconds

    async def open(self, opening: Opening, *, by: Actor) -> Session:
        async with self._store.write(TenantScope(opening.tenant)) as records:
            return await self.open_in(records, opening, by=by)

    async def open_in(self, records: Records, opening: Opening, *, by: Actor) -> Session:
        """Within a transaction of the tenant. Raises `RefusedError(invalid_field)`."""
        if await records.tenants.get(opening.tenant) is None:
            raise RefusedError(Refusal(RefusalCode.INVALID_FIELD, "tenant: there is no such tenant"))
        runtime = await records.clients.get(opening.runtime)
        if runtime is None or runtime.kind is not ClientKind.RUNTIME or not runtime.serves(opening.tenant):
            raise RefusedError(
                Refusal(RefusalCode.INVALID_FIELD, "runtime: not a client of kind 'runtime' that serves this tenant")
            )
        now = self._clock()
        session = Session(
            id=SessionId(new_id("ses", self._entropy(ID_ENTROPY_BYTES))),
            tenant=opening.tenant,
            subject=opening.subject,
            roles=opening.roles,
            runtime=opening.runtime,
            joined_by=opening.joined_by,
            created_at=now,
            not_after=min(now + self._session_seconds, opening.not_after or math.inf),
            ended_at=None,
            act=opening.act,
            may_act=opening.may_act,
        )
        await records.sessions.add(session)
        reach("session.added")
        await self._trail.record(records, [self._event("session.open", session, by)])
        return session

    async def token(self, session: Session) -> SessionToken:
        """A fresh token of a live session. Raises `RefusedError(session_not_found)`."""
        now = self._clock()
        if not session.is_live(now):
            raise RefusedError(SESSION_NOT_FOUND)
        expires_at = min(now + LIFETIME_SECONDS, session.not_after)
        claims = SessionClaims(
            issuer=self.issuer,
            audience=session.runtime,
            subject=session.subject,
            tenant=session.tenant,
            session=session.id,
            roles=session.roles,
            issued_at=now,
            expires_at=expires_at,
            session_expires_at=session.not_after,
            token_id=new_id("jti", self._entropy(ID_ENTROPY_BYTES)),
            act=session.act,
            may_act=session.may_act,
        )
        text = await self._own_keys.sign(to_payload(claims), typ=SESSION_TOKEN_TYP)
        return SessionToken(text, max(1, int(expires_at - now)))

    async def verified_owner(self, unverified_token: str) -> SessionClaims:
        """A session token presented to the control plane by its owner. Raises `InvalidSessionTokenError`."""
        return await self._own_keys.verify(unverified_token, issuer=self.issuer, audience=None)

    async def find(self, session_id: SessionId) -> Session:
        """Raises `RefusedError(session_not_found)`. Who may see it is for the edge to check."""
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            session = await records.sessions.get(session_id)
        if session is None:
            raise RefusedError(SESSION_NOT_FOUND)
        return session

    async def end(self, session: Session, *, by: Actor) -> None:
        """The tombstone first, and with it everything that hangs on the session. Again changes nothing."""
        async with self._store.write(TenantScope(session.tenant)) as records:
            current = await records.sessions.get(session.id)
            if current is None or current.ended_at is not None:
                return
            await end_sessions(records, [current], at=self._clock())
            reach("session.ended")
            await self._trail.record(records, [self._event("session.end", current, by)])

    async def to_erase(self, runtime: Client, *, after: SessionId | None, limit: int) -> Sequence[Session]:
        """Sessions of this runtime that were ended, and of which it has not said that it kept nothing; by id."""
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            found = await records.sessions.to_erase(runtime.id, after=after, limit=limit)
        return [session for session in found if runtime.serves(session.tenant)]

    async def erased(self, session: Session, *, by: Actor) -> None:
        """Its runtime has forgotten all that it kept of it, and so do we, but for the tombstone and the trail.

        Again changes nothing. Raises `RefusedError(session_busy)` for one that is not over: the tombstone comes first.
        """
        async with self._store.write(TenantScope(session.tenant)) as records:
            current = await records.sessions.get(session.id)
            if current is None or current.erased_at is not None:
                return
            if current.ended_at is None:
                raise RefusedError(NOT_OVER)
            await records.tokens.forget_of_session(current)
            await records.sessions.erase(current.id, self._clock())
            await self._trail.record(records, [self._event("session.erase", current, by)])

    def _event(self, action: str, session: Session, by: Actor) -> AuditEvent:
        event = self._trail.event(action, by=by, tenant=session.tenant, subject=session.subject, session=session.id)
        return acted(event, session.act)


def party_of(client: Client, issuer: str) -> Party:
    """A client that acts for a subject."""
    return Party(subject=client.id, issuer=issuer, client=client.id)


def asserts_subjects_in(client: Client, tenant: TenantId) -> bool:
    """Whether the client may name subjects of that tenant. A runtime never may."""
    return client.kind is not ClientKind.RUNTIME and SUBJECT_ASSERT in client.scopes and client.tenant == tenant


def asserting_tenant(client: Client) -> TenantId:
    """The tenant in which the client may name subjects. Raises `RefusedError(forbidden)`."""
    if client.tenant is None or not asserts_subjects_in(client, client.tenant):
        raise RefusedError(FORBIDDEN)
    return client.tenant
