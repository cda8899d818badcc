"""The exchange: a session token in, a placeholder or a proxy credential out (RFC 8693), and renewal in place.

The whole decision is `_decide`, in numbered steps. Rule: each step either proves something or refuses; what is issued
is exactly what was asked for; whatever is not granted looks exactly like what is not there; and both outcomes stand in
the audit trail.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from control_plane.contract.caller import Caller, SessionId, SubjectId, TenantId
from control_plane.contract.headers import (
    GRANT_TYPE_CLIENT_CREDENTIALS,
    GRANT_TYPE_TOKEN_EXCHANGE,
    TOKEN_TYPE_ACCESS_TOKEN,
    TOKEN_TYPE_DIRECT,
    TOKEN_TYPE_PLACEHOLDER,
    TOKEN_TYPE_PROXY_CREDENTIAL,
)
from control_plane.contract.placeholder import TokenKind as Marker
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import AuditEvent
from control_plane.core.alarms import AlarmKind, Decoy, Sighting
from control_plane.core.delegation import Chain
from control_plane.core.oauth import OAuthErrorCode, OAuthRefusedError, TokenRequest, invalid_request
from control_plane.core.records import Client, Session, Token, TokenKind
from control_plane.core.scopes import InvalidScopeError, covers, read_scope
from control_plane.core.targeting import Target, choose
from control_plane.direct import DirectMode
from control_plane.faults import reach
from control_plane.injectors import Injectors
from control_plane.issuance import Granted, Issuance, Issued, IssuedDirect, IssuedProxyCredential, Mandate
from control_plane.own_keys import OwnKeyring
from control_plane.pacing import Pacing
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Records, Store, TenantScope
from control_plane.proof import (
    OfSession,
    Proof,
    Proofs,
    bad_subject_token,
    require_runtime,
    require_subject,
)
from control_plane.sessions import Sessions
from control_plane.trail import Actor, Trail, acted

Exchanged = Issued | IssuedProxyCredential | IssuedDirect


class Exchange:
    def __init__(
        self,
        store: Store,
        own_keys: OwnKeyring,
        proofs: Proofs,
        sessions: Sessions,
        issuance: Issuance,
        injectors: Injectors,
        direct: DirectMode,
        trail: Trail,
        pacing: Pacing,
        *,
        clock: Clock,
        placeholder_ttl_seconds: int,
        on_sighting: Callable[[Sighting], None],
    ) -> None:
        """`on_sighting` is told of every placeholder that a client presents which is not its own."""
        self._on_sighting = on_sighting
        self._store = store
        self._own_keys = own_keys
        self._proofs = proofs
        self._sessions = sessions
        self._issuance = issuance
        self._injectors = injectors
        self._direct = direct
        self._trail = trail
        self._pacing = pacing
        self._clock = clock
        self._ttl_seconds = placeholder_ttl_seconds

    async def __call__(self, request: TokenRequest, *, client: Client, by: Actor) -> Exchanged:
        """What is issued, or `RefusedError`. Either way the trail has it."""
        attempt = _Attempt(client, by, tenant=client.tenant)
        try:
            return await self._decide(request, attempt)
        except RefusedError as refused:
            await self._record_refusal(refused.refusal, attempt)
            raise

    async def _decide(self, request: TokenRequest, attempt: "_Attempt") -> Exchanged:
        client, by = attempt.client, attempt.by
        # (1) Only a runtime exchanges, and only by this grant type.
        require_runtime(client)
        if request.grant_type != GRANT_TYPE_TOKEN_EXCHANGE:
            raise OAuthRefusedError(OAuthErrorCode.UNSUPPORTED_GRANT_TYPE, UNSUPPORTED_GRANT_TYPE)
        # (2) The kind of token asked for is one that we issue.
        _require_issued_here(request)
        if request.subject_token is None:
            raise invalid_request("subject_token is missing")
        if _wants_proxy_credential(request):
            return await self._proxy_credential(request, request.subject_token, attempt)
        # (3) A placeholder as subject token means: the same one, for longer.
        if request.subject_token_type == TOKEN_TYPE_PLACEHOLDER:
            return await self._renew(request, request.subject_token, attempt)
        target = _target(request)
        # (4) Whose token is it, and who acts for them? From here on everything happens inside one tenant.
        proof = await self._proofs.of_subject(request, client)
        attempt.is_of(proof.tenant, proof.subject, proof.session if isinstance(proof, OfSession) else None)
        await self._pacing.require(proof.tenant, proof.subject)
        attempt.act = chain = await self._proofs.chain(request, proof, client)
        if request.requested_token_type == TOKEN_TYPE_DIRECT:
            await self._direct.require_possible(proof)
        else:
            # (5) There is somebody who would swap a placeholder.
            await self._injectors.require_heard()
        await self._issuance.prepare()
        async with self._store.write(TenantScope(proof.tenant)) as records:
            # (6) The session as it is now, live and this client's to act in; where there is none, one is opened.
            mandate = await self._mandate(records, proof, chain, request, attempt)
            # (7) The credential that is meant, among those granted to this subject through this client.
            granted = await self._issuance.granted(records, mandate, target)
            # (8) The scope that is asked for, if the grants hold all of it.
            _require_covered(request, granted)
            # (9) The key itself, where that is asked for and nothing stands against it.
            if request.requested_token_type == TOKEN_TYPE_DIRECT:
                return await self._handed_out(records, mandate, granted, proof, by)
            # (10) A placeholder, never outliving the session.
            issued = await self._issuance.new(
                records, mandate, granted.credential, ttl_seconds=self._ttl_seconds, scope=request.scope or ""
            )
            # (11) In the trail, in the same transaction.
            await self._trail.record(records, [self._granted("exchange", issued, by)])
            reach("exchange.recorded")
        reach("exchange.committed")
        return issued

    async def _handed_out(
        self, records: Records, mandate: Mandate, granted: Granted, proof: Proof, by: Actor
    ) -> IssuedDirect:
        secret = await self._direct.key(records, granted.credential)
        issued = await self._issuance.handed_out(
            records,
            mandate,
            granted.credential,
            secret,
            for_token=proof.token_id or "",
            ttl_seconds=self._ttl_seconds,
        )
        event = self._token_event("exchange.direct", issued.token, by, credential=granted.credential.name)
        await self._trail.record(records, [event])
        return issued

    async def _proxy_credential(
        self, request: TokenRequest, subject_token: str, attempt: "_Attempt"
    ) -> IssuedProxyCredential:
        client, by = attempt.client, attempt.by
        # (1) A caller's proof is for nobody's destination: it opens what the tenant allows without a credential.
        if request.audience is not None or request.resource is not None:
            raise invalid_request("a proxy credential has no audience and no resource", hint="leave them out")
        if request.scope is not None:
            raise OAuthRefusedError(OAuthErrorCode.INVALID_SCOPE, NO_SCOPE)
        # (2) A proxy credential as subject token means: the same one, for longer.
        if request.subject_token_type == TOKEN_TYPE_PROXY_CREDENTIAL:
            return await self._renew_proxy_credential(request, subject_token, attempt)
        # (3) Otherwise the same proof as for a placeholder: a live session, and this client's to act in.
        proof = await self._proofs.of_subject(request, client)
        attempt.is_of(proof.tenant, proof.subject, proof.session if isinstance(proof, OfSession) else None)
        await self._pacing.require(proof.tenant, proof.subject)
        attempt.act = chain = await self._proofs.chain(request, proof, client)
        async with self._store.write(TenantScope(proof.tenant)) as records:
            mandate = await self._mandate(records, proof, chain, request, attempt)
            issued = await self._issuance.new_proxy_credential(records, mandate, ttl_seconds=self._ttl_seconds)
            await self._trail.record(records, [self._token_event("exchange.proxy_credential", issued.token, by)])
            reach("exchange.proxy_credential_recorded")
        return issued

    async def _renew_proxy_credential(
        self, request: TokenRequest, text: str, attempt: "_Attempt"
    ) -> IssuedProxyCredential:
        client, by = attempt.client, attempt.by
        token = await self._own_token(text, Marker.PROXY_CREDENTIAL, client)
        _require_same_actors(request)
        async with self._store.write(TenantScope(token.tenant)) as records:
            session = await self._session_to_renew_in(records, token, request, attempt)
            mandate = _mandate_of(session, client, token.act)
            issued = await self._issuance.renewed_proxy_credential(records, mandate, token, text=text)
            await self._trail.record(records, [self._token_event("exchange.proxy_credential.renew", token, by)])
        reach("exchange.proxy_credential_renewed")
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
        attempt.is_of(session.tenant, session.subject, session.id)
        attempt.act = token.act
        require_subject(request, session.subject)
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
        # (2) What it may do, and who acts with it, is what it was: a running program holds this very string.
        _require_same_scope(request, placeholder)
        _require_same_actors(request)
        async with self._store.write(TenantScope(placeholder.tenant)) as records:
            # (3) The session is still live.
            session = await self._session_to_renew_in(records, placeholder, request, attempt)
            mandate = _mandate_of(session, client, placeholder.act)
            # (4) The grant still stands, and an audience, where one is named, still means this credential.
            credential = await self._issuance.still_granted(records, mandate, placeholder)
            if request.audience is not None or request.resource is not None:
                choose([credential], Target(request.audience, request.resource))
            # (5) The same strings, for longer: unless one was revoked.
            proxy = (request.proxy_credential, proxy_token) if request.proxy_credential and proxy_token else None
            issued = await self._issuance.renewed(records, mandate, credential, placeholder, text=text, proxy=proxy)
            await self._trail.record(records, [self._granted("exchange.renew", issued, by)])
            reach("exchange.renewal_recorded")
        reach("exchange.renewed")
        return issued

    async def _mandate(
        self, records: Records, proof: Proof, chain: Chain, request: TokenRequest, attempt: "_Attempt"
    ) -> Mandate:
        if isinstance(proof, OfSession):
            session = await self._live_session(records, proof, request, attempt)
        else:
            require_subject(request, proof.subject)
            if not attempt.client.acts_for(proof.opening.tenant, proof.opening.subject):
                raise bad_subject_token()
            session = await self._sessions.open_in(records, proof.opening, by=attempt.by)
        return _mandate_of(session, attempt.client, chain)

    async def _live_session(
        self, records: Records, proof: OfSession, request: TokenRequest, attempt: "_Attempt"
    ) -> Session:
        client, session = attempt.client, await records.sessions.get(proof.session)
        if session is None or not proof.is_of(session):
            attempt.is_of_nobody()
            raise bad_subject_token()
        if session.runtime != client.id or not client.acts_for(session.tenant, session.subject):
            raise bad_subject_token()
        if not session.is_live(self._clock()):
            raise RefusedError(SESSION_OVER)
        require_subject(request, session.subject)
        if session.joined_by is None and not await records.sessions.join(session.id, by=client.id):
            raise RefusedError(SESSION_OVER)
        return session

    async def _own_token(self, text: str, marker: Marker, client: Client) -> Token:
        """A token of this client. Another client's looks like none. Raises `RefusedError(unknown_placeholder)`."""
        genuine = await self._own_keys.genuine(text)
        if genuine is None or genuine.kind is not marker:
            raise RefusedError(UNKNOWN_TOKEN)
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            token = await records.tokens.by_fingerprint(genuine.fingerprint)
            decoy = await records.decoys.by_fingerprint(genuine.fingerprint) if token is None else None
        if token is None or token.client != client.id or not client.serves(token.tenant):
            self._note_theft(token, decoy, client)
            raise RefusedError(UNKNOWN_TOKEN)
        return token

    def _note_theft(self, token: Token | None, decoy: Decoy | None, client: Client) -> None:
        """A client that presents what was not issued to it. It hears what it would hear of any unknown string."""
        # A client that serves all tenants is none of theirs.
        tenant = client.tenant or TenantId("")
        caller = Caller(client=client.id, tenant=tenant, subject=SubjectId(""), session=None)
        if token is not None and token.kind is TokenKind.PLACEHOLDER:
            kind, owner, seen = AlarmKind.STOLEN_PLACEHOLDER, token.tenant, token.id
        elif decoy is not None:
            kind, owner, seen = AlarmKind.DECOY_USED, decoy.tenant, decoy.id
        else:
            return
        self._on_sighting(Sighting(kind, owner, seen, None, caller, None, self._clock()))

    def _granted(self, action: str, issued: Issued, by: Actor) -> AuditEvent:
        return self._token_event(action, issued.token, by, credential=issued.credential.name)

    def _token_event(self, action: str, token: Token, by: Actor, *, credential: str | None = None) -> AuditEvent:
        event = self._trail.event(
            action,
            by=by,
            tenant=token.tenant,
            subject=token.subject,
            session=token.session,
            credential=credential,
            placeholder_id=token.id,
            detail=f"scope {token.scope}" if token.scope else "",
        )
        return acted(event, token.act)

    async def _record_refusal(self, refusal: Refusal, attempt: "_Attempt") -> None:
        event = self._trail.refusal(
            "exchange",
            refusal,
            by=attempt.by,
            tenant=attempt.tenant,
            subject=attempt.subject,
            session=attempt.session,
        )
        try:
            async with self._store.write(PlatformScope(CrossTenantReason.AUDIT)) as records:
                await self._trail.record(records, [acted(event, attempt.act)])
        except RefusedError:
            return  # the store is away, and that is what the caller hears already


@dataclass(slots=True)
class _Attempt:
    """What is known of an exchange so far: a refusal is recorded where whoever was refused can find it."""

    client: Client
    by: Actor
    tenant: TenantId | None
    subject: SubjectId | None = None
    session: SessionId | None = None
    act: Chain = ()

    def is_of(self, tenant: TenantId, subject: SubjectId, session: SessionId | None) -> None:
        self.tenant, self.subject, self.session = tenant, subject, session

    def is_of_nobody(self) -> None:
        """Whoever the token speaks of is not there (any more), nor perhaps their tenant."""
        self.tenant, self.subject, self.session = self.client.tenant, None, None


def _require_issued_here(request: TokenRequest) -> None:
    match request.requested_token_type:
        case None:
            return
        case asked if asked in (TOKEN_TYPE_PLACEHOLDER, TOKEN_TYPE_ACCESS_TOKEN, TOKEN_TYPE_PROXY_CREDENTIAL):
            return
        case asked if asked == TOKEN_TYPE_DIRECT:
            if request.subject_token_type == TOKEN_TYPE_PLACEHOLDER:
                raise invalid_request("a placeholder is not exchanged for the key it stands for")
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


def _require_covered(request: TokenRequest, granted: Granted) -> None:
    if request.scope is None:
        return
    if request.requested_token_type == TOKEN_TYPE_DIRECT:
        # Nobody would hold whoever has the key itself to a scope.
        raise OAuthRefusedError(OAuthErrorCode.INVALID_SCOPE, NO_SCOPE)
    try:
        narrowing = read_scope(request.scope)
    except InvalidScopeError as error:
        raise _invalid_scope(str(error)) from None
    scopes = [grant.scope for grant in granted.grants]
    if not covers(narrowing, grants=scopes, destinations=granted.credential.destinations):
        raise _invalid_scope("the grants do not cover all of the scope")


def _require_same_scope(request: TokenRequest, placeholder: Token) -> None:
    if request.scope is not None and request.scope != placeholder.scope:
        raise _invalid_scope("a renewal changes no scope")


def _require_same_actors(request: TokenRequest) -> None:
    if request.actor_token is not None or request.actor_token_type is not None:
        raise invalid_request("a renewal changes no actor", hint="leave actor_token out")


def _invalid_scope(detail: str) -> OAuthRefusedError:
    refusal = Refusal(RefusalCode.MALFORMED_REQUEST, detail, "see docs/exchange.md, or leave scope out")
    return OAuthRefusedError(OAuthErrorCode.INVALID_SCOPE, refusal)


def _target(request: TokenRequest) -> Target:
    if request.audience is None and request.resource is None:
        raise invalid_request("audience or resource is missing", hint="audience is a credential's name, or a host")
    return Target(request.audience, request.resource)


def _mandate_of(session: Session, client: Client, act: Chain) -> Mandate:
    caller = Caller(client=client.id, tenant=session.tenant, subject=session.subject, session=session.id)
    return Mandate(caller, session.roles, session.not_after, act)


UNSUPPORTED_GRANT_TYPE: Final = Refusal(
    RefusalCode.MALFORMED_REQUEST,
    f"grant_type is neither {GRANT_TYPE_TOKEN_EXCHANGE} nor {GRANT_TYPE_CLIENT_CREDENTIALS}",
)
NO_SCOPE: Final = Refusal(RefusalCode.MALFORMED_REQUEST, "what is asked for has no scopes", "leave scope out")
SESSION_OVER: Final = Refusal(RefusalCode.SESSION_NOT_FOUND, "the session is over", "open one with POST /v1/sessions")
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
