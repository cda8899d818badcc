"""The exchange: a session token in, a placeholder or a proxy credential out (RFC 8693), and renewal in place.

The whole decision is `_decide`, in numbered steps. Rule: each step either proves something or refuses; whatever is not
granted looks exactly like what is not there; and both outcomes stand in the audit trail.
"""

from dataclasses import dataclass, replace
from typing import Final

from control_plane.contract.caller import Caller, SessionId, TenantId
from control_plane.contract.headers import (
    GRANT_TYPE_TOKEN_EXCHANGE,
    TOKEN_TYPE_ACCESS_TOKEN,
    TOKEN_TYPE_DIRECT,
    TOKEN_TYPE_JWT,
    TOKEN_TYPE_PLACEHOLDER,
    TOKEN_TYPE_PROXY_CREDENTIAL,
    TOKEN_TYPE_SESSION,
)
from control_plane.contract.placeholder import ForgedTokenError, GenuineToken, parse
from control_plane.contract.placeholder import TokenKind as Marker
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import AuditEvent
from control_plane.core.names import is_object_id
from control_plane.core.oauth import OAuthErrorCode, OAuthRefusedError, TokenRequest, invalid_request
from control_plane.core.records import Client, ClientKind, Session, Token
from control_plane.core.session_token import ExpiredSessionTokenError, InvalidSessionTokenError
from control_plane.core.targeting import Target, choose
from control_plane.issuance import Issuance, Issued, IssuedProxyCredential, Mandate
from control_plane.own_keys import OwnKeyring
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Records, Store, TenantScope
from control_plane.revocation import revoke_tokens
from control_plane.trail import Actor, Trail


class Exchange:
    def __init__(
        self,
        store: Store,
        own_keys: OwnKeyring,
        issuance: Issuance,
        trail: Trail,
        *,
        clock: Clock,
        issuer: str,
        placeholder_ttl_seconds: int,
    ) -> None:
        self._store = store
        self._own_keys = own_keys
        self._issuance = issuance
        self._trail = trail
        self._clock = clock
        self._issuer = issuer
        self._ttl_seconds = placeholder_ttl_seconds

    async def __call__(self, request: TokenRequest, *, client: Client, by: Actor) -> Issued | IssuedProxyCredential:
        """What is issued, or `RefusedError`. Either way the trail has it."""
        attempt = _Attempt(client, by, tenant=client.tenant)
        try:
            return await self._decide(request, attempt)
        except RefusedError as refused:
            await self._record_refusal(refused.refusal, attempt)
            raise

    async def _decide(self, request: TokenRequest, attempt: "_Attempt") -> Issued | IssuedProxyCredential:
        client, by = attempt.client, attempt.by
        # (1) Only a runtime exchanges, and only by this grant type.
        _require_runtime(client)
        if request.grant_type != GRANT_TYPE_TOKEN_EXCHANGE:
            raise OAuthRefusedError(OAuthErrorCode.UNSUPPORTED_GRANT_TYPE, UNSUPPORTED_GRANT_TYPE)
        # (2) The kind of token asked for is one that we issue here, and exactly what was asked is what is issued.
        _require_issued_here(request)
        if request.scope is not None:
            raise OAuthRefusedError(OAuthErrorCode.INVALID_SCOPE, INVALID_SCOPE)
        if request.actor_token is not None:
            raise invalid_request("actor_token is not supported here; leave it out")
        if request.subject_token is None:
            raise invalid_request("subject_token is missing")
        if _wants_proxy_credential(request):
            return await self._proxy_credential(request, request.subject_token, attempt)
        # (3) A placeholder as subject token means: the same one, for longer.
        if request.subject_token_type == TOKEN_TYPE_PLACEHOLDER:
            return await self._renew(request, request.subject_token, attempt)
        target = _target(request)
        # (4) Whose token is it? From here on everything happens inside one tenant.
        session = await self._proven_session(request, request.subject_token, client)
        attempt.is_of(session)
        async with self._store.write(TenantScope(session.tenant)) as records:
            # (5) The session as it is now: live, and this client's to act in.
            mandate = await self._mandate(records, session, request, client)
            # (6) The credential that is meant, among those granted to this subject through this client.
            credential = await self._issuance.granted(records, mandate, target)
            # (7) A placeholder for it, never outliving the session.
            issued = await self._issuance.new(records, mandate, credential, ttl_seconds=self._ttl_seconds)
            # (8) In the trail, in the same transaction.
            await records.audit.append([self._granted("exchange", issued, by)])
        return issued

    async def _proxy_credential(
        self, request: TokenRequest, subject_token: str, attempt: "_Attempt"
    ) -> IssuedProxyCredential:
        client, by = attempt.client, attempt.by
        # (1) A caller's proof is for nobody's destination: it opens what the tenant allows without a credential.
        if request.audience is not None or request.resource is not None:
            raise invalid_request("a proxy credential has no audience and no resource", hint="leave them out")
        # (2) A proxy credential as subject token means: the same one, for longer.
        if request.subject_token_type == TOKEN_TYPE_PROXY_CREDENTIAL:
            return await self._renew_proxy_credential(request, subject_token, attempt)
        # (3) Otherwise the same proof as for a placeholder: a live session, and this client's to act in.
        session = await self._proven_session(request, subject_token, client)
        attempt.is_of(session)
        async with self._store.write(TenantScope(session.tenant)) as records:
            mandate = await self._mandate(records, session, request, client)
            issued = await self._issuance.new_proxy_credential(records, mandate, ttl_seconds=self._ttl_seconds)
            await records.audit.append([self._token_event("exchange.proxy_credential", issued.token, by)])
        return issued

    async def _renew_proxy_credential(
        self, request: TokenRequest, text: str, attempt: "_Attempt"
    ) -> IssuedProxyCredential:
        client, by = attempt.client, attempt.by
        token = await self._own_token(text, Marker.PROXY_CREDENTIAL, client)
        async with self._store.write(TenantScope(token.tenant)) as records:
            session = await self._session_to_renew_in(records, token, request, attempt)
            mandate = _mandate_of(session, client)
            issued = await self._issuance.renewed_proxy_credential(records, mandate, token, text=text)
            await records.audit.append([self._token_event("exchange.proxy_credential.renew", token, by)])
        return issued

    async def _session_to_renew_in(
        self, records: Records, token: Token, request: TokenRequest, attempt: "_Attempt"
    ) -> Session:
        """The token's session, still live; when the token expired does not matter, since laptops sleep."""
        # What an operator issued without a session has the life that the operator gave it.
        if token.session is None:
            raise RefusedError(NOT_RENEWABLE)
        session = await records.sessions.get(token.session)
        if session is None or not session.is_live(self._clock()):
            raise RefusedError(SESSION_OVER)
        attempt.is_of(session)
        _require_subject(request, session)
        return session

    async def _renew(self, request: TokenRequest, text: str, attempt: "_Attempt") -> Issued:
        client, by = attempt.client, attempt.by
        # (1) A string that we minted, and that the store knows as this client's.
        placeholder = await self._own_token(text, Marker.PLACEHOLDER, client)
        proxy_token = None
        if request.proxy_credential is not None:
            proxy_token = await self._own_token(request.proxy_credential, Marker.PROXY_CREDENTIAL, client)
            if proxy_token.caller != placeholder.caller:
                raise RefusedError(UNKNOWN_TOKEN)
        async with self._store.write(TenantScope(placeholder.tenant)) as records:
            # (2) The session is still live.
            session = await self._session_to_renew_in(records, placeholder, request, attempt)
            mandate = _mandate_of(session, client)
            # (3) The grant still stands, and an audience, where one is named, still means this credential.
            credential = await self._issuance.still_granted(records, mandate, placeholder)
            if request.audience is not None or request.resource is not None:
                choose([credential], Target(request.audience, request.resource))
            # (4) The same strings, for longer: unless one was revoked.
            proxy = (request.proxy_credential, proxy_token) if request.proxy_credential and proxy_token else None
            issued = await self._issuance.renewed(records, mandate, credential, placeholder, text=text, proxy=proxy)
            await records.audit.append([self._granted("exchange.renew", issued, by)])
        return issued

    async def _proven_session(self, request: TokenRequest, subject_token: str, client: Client) -> Session:
        """The session that the subject token proves. Raises `RefusedError`."""
        match request.subject_token_type:
            case None:
                raise invalid_request("subject_token_type is missing")
            case token_type if token_type == TOKEN_TYPE_JWT:
                return await self._session_of_token(subject_token, client)
            case token_type if token_type == TOKEN_TYPE_SESSION:
                return await self._joined_session(subject_token, client)
            case _:
                raise invalid_request(
                    "subject_token_type is none that is accepted here",
                    hint=f"{TOKEN_TYPE_JWT}, {TOKEN_TYPE_PLACEHOLDER} or {TOKEN_TYPE_SESSION}",
                )

    async def _session_of_token(self, unverified_token: str, client: Client) -> Session:
        try:
            claims = await self._own_keys.verify(unverified_token, issuer=self._issuer, audience=client.id)
        except ExpiredSessionTokenError:
            raise _bad_subject_token(EXPIRED_SUBJECT_TOKEN) from None
        except InvalidSessionTokenError:
            raise _bad_subject_token(INVALID_SUBJECT_TOKEN) from None
        async with self._store.read(TenantScope(claims.tenant)) as records:
            session = await records.sessions.get(claims.session)
        if session is None or session.subject != claims.subject:
            raise _bad_subject_token(INVALID_SUBJECT_TOKEN)
        return session

    async def _joined_session(self, session_id: str, client: Client) -> Session:
        if not is_object_id(session_id):
            raise _bad_subject_token(INVALID_SUBJECT_TOKEN)
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            session = await records.sessions.get(SessionId(session_id))
        # Only the client that once held this session's own token may name the session instead.
        if session is None or session.joined_by != client.id:
            raise _bad_subject_token(INVALID_SUBJECT_TOKEN)
        return session

    async def _mandate(self, records: Records, proven: Session, request: TokenRequest, client: Client) -> Mandate:
        session = await records.sessions.get(proven.id)
        if session is None or session.runtime != client.id or not client.serves(session.tenant):
            raise _bad_subject_token(INVALID_SUBJECT_TOKEN)
        if not session.is_live(self._clock()):
            raise RefusedError(SESSION_OVER)
        _require_subject(request, session)
        if session.joined_by is None:
            await records.sessions.replace(replace(session, joined_by=client.id))
        return _mandate_of(session, client)

    async def _own_token(self, text: str, marker: Marker, client: Client) -> Token:
        """A token of this client. Another client's looks like none. Raises `RefusedError(unknown_placeholder)`."""
        genuine = await self._genuine(text)
        if genuine is None or genuine.kind is not marker:
            raise RefusedError(UNKNOWN_TOKEN)
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            token = await records.tokens.by_fingerprint(genuine.fingerprint)
        if token is None or token.client != client.id or not client.serves(token.tenant):
            raise RefusedError(UNKNOWN_TOKEN)
        return token

    async def _genuine(self, text: str) -> GenuineToken | None:
        try:
            return parse(text, (await self._own_keys.rings()).tags)
        except ForgedTokenError:
            return None

    async def revoke(self, text: str, *, client: Client, by: Actor) -> None:
        """RFC 7009. A token that is not this client's is left alone, and answered like one that is not there (§2.2)."""
        _require_runtime(client)
        genuine = await self._genuine(text)
        if genuine is None:
            return
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            token = await records.tokens.by_fingerprint(genuine.fingerprint)
        if token is None or token.client != client.id:
            return
        async with self._store.write(TenantScope(token.tenant)) as records:
            await revoke_tokens(records, [token], at=self._clock())
            await self._trail.record(records, [self._token_event(f"{token.kind.value}.revoke", token, by)])

    def _granted(self, action: str, issued: Issued, by: Actor) -> AuditEvent:
        return self._token_event(action, issued.token, by, credential=issued.credential.name)

    def _token_event(self, action: str, token: Token, by: Actor, *, credential: str | None = None) -> AuditEvent:
        return self._trail.event(
            action,
            by=by,
            tenant=token.tenant,
            subject=token.subject,
            session=token.session,
            credential=credential,
            placeholder_id=token.id,
        )

    async def _record_refusal(self, refusal: Refusal, attempt: "_Attempt") -> None:
        event = self._trail.refusal(
            "exchange",
            refusal,
            by=attempt.by,
            tenant=attempt.tenant,
            subject=attempt.session.subject if attempt.session else None,
            session=attempt.session.id if attempt.session else None,
        )
        try:
            async with self._store.write(PlatformScope(CrossTenantReason.AUDIT)) as records:
                await records.audit.append([event])
        except RefusedError:
            return  # the store is away, and that is what the caller hears already


@dataclass(slots=True)
class _Attempt:
    """What is known of an exchange so far: a refusal is recorded where whoever was refused can find it."""

    client: Client
    by: Actor
    tenant: TenantId | None
    session: Session | None = None

    def is_of(self, session: Session) -> None:
        self.session, self.tenant = session, session.tenant


def _require_runtime(client: Client) -> None:
    if client.kind is not ClientKind.RUNTIME:
        raise OAuthRefusedError(
            OAuthErrorCode.UNAUTHORIZED_CLIENT,
            Refusal(RefusalCode.FORBIDDEN, "only a client of kind 'runtime' exchanges tokens"),
        )


def _require_issued_here(request: TokenRequest) -> None:
    match request.requested_token_type:
        case None:
            return
        case asked if asked in (TOKEN_TYPE_PLACEHOLDER, TOKEN_TYPE_ACCESS_TOKEN, TOKEN_TYPE_PROXY_CREDENTIAL):
            return
        case asked if asked == TOKEN_TYPE_DIRECT:
            raise RefusedError(DIRECT_NOT_ALLOWED)
        case _:
            raise invalid_request(
                "requested_token_type is none that is issued here",
                hint=f"leave it out, or {TOKEN_TYPE_PLACEHOLDER}, or {TOKEN_TYPE_PROXY_CREDENTIAL}",
            )


def _wants_proxy_credential(request: TokenRequest) -> bool:
    """Whether it is about a proxy credential alone: it is asked for, or it is what is to live longer."""
    if request.requested_token_type is not None:
        return request.requested_token_type == TOKEN_TYPE_PROXY_CREDENTIAL
    return request.subject_token_type == TOKEN_TYPE_PROXY_CREDENTIAL


def _require_subject(request: TokenRequest, session: Session) -> None:
    if request.requested_subject not in (None, session.subject):
        raise RefusedError(SUBJECT_CONFLICT)


def _target(request: TokenRequest) -> Target:
    if request.audience is None and request.resource is None:
        raise invalid_request("audience or resource is missing", hint="audience is a credential's name, or a host")
    return Target(request.audience, request.resource)


def _mandate_of(session: Session, client: Client) -> Mandate:
    caller = Caller(client=client.id, tenant=session.tenant, subject=session.subject, session=session.id)
    return Mandate(caller, session.roles, session.not_after)


def _bad_subject_token(refusal: Refusal) -> OAuthRefusedError:
    # RFC 8693 §2.2.2: a bad subject token is invalid_request; 401 invalid_client would blame the client's own secret.
    return OAuthRefusedError(OAuthErrorCode.INVALID_REQUEST, refusal)


UNSUPPORTED_GRANT_TYPE: Final = Refusal(RefusalCode.MALFORMED_REQUEST, f"grant_type is not {GRANT_TYPE_TOKEN_EXCHANGE}")
INVALID_SCOPE: Final = Refusal(
    RefusalCode.MALFORMED_REQUEST, "this credential has no scopes", "leave scope out; grants narrow instead"
)
INVALID_SUBJECT_TOKEN: Final = Refusal(
    RefusalCode.TOKEN_INVALID,
    "the subject token is not valid for this client",
    "present a fresh session token that names this client as its audience",
)
EXPIRED_SUBJECT_TOKEN: Final = Refusal(
    RefusalCode.TOKEN_EXPIRED,
    "the subject token has expired",
    "its owner gets a fresh one with POST /v1/sessions/{id}/token",
)
SESSION_OVER: Final = Refusal(RefusalCode.SESSION_NOT_FOUND, "the session is over", "open one with POST /v1/sessions")
SUBJECT_CONFLICT: Final = Refusal(
    RefusalCode.SUBJECT_CONFLICT, "requested_subject is not the subject of the token", "leave it out"
)
UNKNOWN_TOKEN: Final = Refusal(
    RefusalCode.UNKNOWN_PLACEHOLDER,
    "the placeholder or proxy credential is not one of this client's",
    "exchange again for a new one",
)
NOT_RENEWABLE: Final = Refusal(
    RefusalCode.EXPIRED_PLACEHOLDER,
    "a placeholder without a session is not renewed",
    "an operator issues a new one with: coatcheck placeholder issue",
)
DIRECT_NOT_ALLOWED: Final = Refusal(
    RefusalCode.DIRECT_NOT_ALLOWED,
    "a proxy swaps placeholders here, so keys are never handed out",
    "leave requested_token_type out",
)
