"""Introspection and revocation of what was issued (RFC 7662, RFC 7009).

Rule: a token is described to whom it was issued, to who opened its session on somebody's behalf, and to administrators
who see its tenant; to everybody else it is exactly as inactive as one that never was. Active means that it would work
now. The same rule says who may take a token back; whoever may not is answered like one who has.
"""

from typing import Any, Final

from control_plane.contract.caller import SessionId
from control_plane.contract.headers import CLIENT_TOKEN_TYP, SESSION_TOKEN_TYP
from control_plane.contract.refusal import Refusal, RefusalCode
from control_plane.contract.wire import AuditEvent
from control_plane.core.client_token import ClientClaims
from control_plane.core.delegation import to_act
from control_plane.core.names import is_object_id
from control_plane.core.oauth import OAuthErrorCode, OAuthRefusedError
from control_plane.core.policy import Principal
from control_plane.core.records import SUBJECT_ASSERT, Client, Session, Token, TokenKind
from control_plane.core.scopes import narrowed_by_token
from control_plane.core.session_token import SCOPE, InvalidSessionTokenError, SessionClaims
from control_plane.issuance import live
from control_plane.own_keys import OwnKeyring, unverified_typ
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Records, Store, TenantScope, TokenFacts
from control_plane.revocation import end_sessions, revoke_tokens
from control_plane.sessions import asserts_subjects_in, party_of
from control_plane.trail import Actor, Trail, acted

INACTIVE: Final[dict[str, Any]] = {"active": False}
Viewer = Client | Principal


class Introspection:
    def __init__(self, store: Store, own_keys: OwnKeyring, trail: Trail, *, clock: Clock, issuer: str) -> None:
        self._store = store
        self._own_keys = own_keys
        self._trail = trail
        self._clock = clock
        self._issuer = issuer

    async def describe(self, text: str, viewer: Viewer) -> dict[str, Any]:
        """RFC 7662 §2.2. Never raises for a token that is not one."""
        match unverified_typ(text):
            case typ if typ == SESSION_TOKEN_TYP:
                return await self._described_session_token(text, viewer)
            case typ if typ == CLIENT_TOKEN_TYP:
                return await self._described_client_token(text, viewer)
            case _:
                return await self._described_token(text, viewer)

    async def revoke(self, text: str, *, client: Client, by: Actor) -> None:
        """RFC 7009 §2. Raises `OAuthRefusedError(unsupported_token_type)` for the client's own client token."""
        match unverified_typ(text):
            case typ if typ == SESSION_TOKEN_TYP:
                await self._revoke_session_token(text, client, by)
            case typ if typ == CLIENT_TOKEN_TYP:
                await self._refuse_client_token(text, client)
            case _ if is_object_id(text) and text.startswith(_SESSION_PREFIX):
                await self._end_session(SessionId(text), client, by, of_joined_alone=True)
            case _:
                await self._revoke_token(text, client, by)

    # --- placeholders and proxy credentials

    async def _described_token(self, text: str, viewer: Viewer) -> dict[str, Any]:
        genuine = await self._own_keys.genuine(text)
        if genuine is None:
            return INACTIVE
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            facts = (await records.hot.token_facts([genuine.fingerprint])).get(genuine.fingerprint)
            if facts is None or not _is_seen(facts.token, facts.session, viewer, self._issuer):
                return INACTIVE
            if not await self._works(records, facts):
                return INACTIVE
        token = facts.token
        return self._about(
            client_id=token.client,
            sub=token.subject,
            scope=token.scope,
            token_type=token.kind.value,
            exp=int(token.expires_at),
            iat=int(token.created_at),
            jti=token.id,
            tenant=token.tenant,
            session_id=token.session,
            credential=facts.credential.name if facts.credential else None,
            aud=facts.credential.name if facts.credential else None,
            act=to_act(token.act),
        )

    async def _works(self, records: Records, facts: TokenFacts) -> bool:
        """Whether it would be taken now, by a proxy that asks for it."""
        now, token = self._clock(), facts.token
        if token.revoked_at is not None or now >= token.expires_at or not facts.client_registered:
            return False
        if token.session is not None and (facts.session is None or not facts.session.is_live(now)):
            return False
        if token.credential_id is None:
            return token.kind is TokenKind.PROXY_CREDENTIAL
        if facts.credential is None:
            return False
        roles = facts.session.roles if facts.session else ()
        grants = [
            grant
            for grant in await records.grants.of_credentials([facts.credential.id])
            if grant.applies_to(subject=token.subject, roles=roles, client=token.client)
        ]
        return bool(narrowed_by_token([grant.scope for grant in live(grants, now)], token.scope))

    async def _revoke_token(self, text: str, client: Client, by: Actor) -> None:
        genuine = await self._own_keys.genuine(text)
        if genuine is None:
            return
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            token = await records.tokens.by_fingerprint(genuine.fingerprint)
        # §2.1: "verifies … whether the token was issued to the client making the revocation request".
        if token is None or token.client != client.id:
            return
        async with self._store.write(TenantScope(token.tenant)) as records:
            await revoke_tokens(records, [token], at=self._clock())
            await self._trail.record(records, [self._token_event(token, by)])

    def _token_event(self, token: Token, by: Actor) -> AuditEvent:
        event = self._trail.event(
            f"{token.kind.value}.revoke",
            by=by,
            tenant=token.tenant,
            subject=token.subject,
            session=token.session,
            placeholder_id=token.id,
        )
        return acted(event, token.act)

    # --- session tokens and client tokens

    async def _described_session_token(self, text: str, viewer: Viewer) -> dict[str, Any]:
        claims = await self._session_claims(text)
        if claims is None:
            return INACTIVE
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            session = await records.sessions.get(claims.session)
        if session is None or not claims.are_of(session) or not session.is_live(self._clock()):
            return INACTIVE
        if not _is_session_seen(session, viewer, self._issuer):
            return INACTIVE
        return self._about(
            client_id=session.runtime,
            sub=session.subject,
            scope=SCOPE,
            token_type="session",
            exp=int(claims.expires_at),
            iat=int(claims.issued_at),
            jti=claims.token_id,
            tenant=session.tenant,
            session_id=session.id,
            aud=claims.audience,
            act=to_act(session.act),
        )

    async def _described_client_token(self, text: str, viewer: Viewer) -> dict[str, Any]:
        claims = await self._client_claims(text)
        if claims is None:
            return INACTIVE
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            client = await records.clients.get(claims.client)
        if client is None or not asserts_subjects_in(client, claims.tenant):
            return INACTIVE
        is_seen = (
            viewer.sees(claims.tenant) if isinstance(viewer, Principal) else viewer.id in (client.id, claims.audience)
        )
        if not is_seen:
            return INACTIVE
        return self._about(
            client_id=client.id,
            sub=client.id,
            scope=SUBJECT_ASSERT,
            token_type="client",
            exp=int(claims.expires_at),
            iat=int(claims.issued_at),
            jti=claims.token_id,
            tenant=claims.tenant,
            aud=claims.audience,
        )

    async def _revoke_session_token(self, text: str, client: Client, by: Actor) -> None:
        """RFC 7009 §2.1: with the token goes what it stands for. Its session ends, and all that hangs on that."""
        claims = await self._session_claims(text)
        if claims is not None:
            await self._end_session(claims.session, client, by, of_joined_alone=False)

    async def _end_session(self, session_id: SessionId, client: Client, by: Actor, *, of_joined_alone: bool) -> None:
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            found = await records.sessions.get(session_id)
        if found is None or not _is_session_seen(found, client, self._issuer):
            return
        if of_joined_alone and found.joined_by != client.id:
            return
        async with self._store.write(TenantScope(found.tenant)) as records:
            session = await records.sessions.get(session_id)
            if session is None or session.ended_at is not None:
                return
            await end_sessions(records, [session], at=self._clock())
            event = self._trail.event(
                "session.end", by=by, tenant=session.tenant, subject=session.subject, session=session.id
            )
            await self._trail.record(records, [acted(event, session.act)])

    async def _refuse_client_token(self, text: str, client: Client) -> None:
        claims = await self._client_claims(text)
        if claims is not None and claims.client == client.id:
            raise OAuthRefusedError(OAuthErrorCode.UNSUPPORTED_TOKEN_TYPE, NOT_REVOCABLE)

    async def _session_claims(self, text: str) -> SessionClaims | None:
        try:
            return await self._own_keys.verify(text, issuer=self._issuer, audience=None)
        except InvalidSessionTokenError:
            return None

    async def _client_claims(self, text: str) -> ClientClaims | None:
        try:
            return await self._own_keys.verify_client(text, issuer=self._issuer, audience=None)
        except InvalidSessionTokenError:
            return None

    def _about(self, **facts: Any) -> dict[str, Any]:
        return {"active": True, "iss": self._issuer, **{name: value for name, value in facts.items() if value}}


_SESSION_PREFIX: Final = "ses_"


def _is_seen(token: Token, session: Session | None, viewer: Viewer, issuer: str) -> bool:
    if isinstance(viewer, Principal):
        return viewer.sees(token.tenant)
    return token.client == viewer.id or (session is not None and _opened_by(session, viewer, issuer))


def _is_session_seen(session: Session, viewer: Viewer, issuer: str) -> bool:
    if isinstance(viewer, Principal):
        return viewer.sees(session.tenant)
    is_its_runtime = session.runtime == viewer.id and viewer.serves(session.tenant)
    return is_its_runtime or _opened_by(session, viewer, issuer)


def _opened_by(session: Session, client: Client, issuer: str) -> bool:
    """Whether this client opened the session on its subject's behalf."""
    return asserts_subjects_in(client, session.tenant) and party_of(client, issuer) in session.act


NOT_REVOCABLE: Final = Refusal(
    RefusalCode.MALFORMED_REQUEST,
    "a client token is not revoked by itself: it ends within five minutes",
    "an administrator takes its client away with DELETE /v1/clients/{client}",
)
