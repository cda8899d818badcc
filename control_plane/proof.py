"""Whose token is it? What the subject token and the actor token of an exchange prove (RFC 8693 §2.1).

    a session token of ours      the session it names, which is looked up
    a client token of ours       that a client may name a subject; a session is to be opened for that subject
    the id of a session          that session, for the client that once held its token
    a trusted issuer's token     a subject of the tenant that the issuer's claims table says; a session is to be opened,
                                 and ends no later than the token

Rule: a token says who is meant, the store says whether that still holds. The type of a JWT decides which of these it is
before anything else is read of it, and a bad token is one answer, whatever was wrong with it.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from control_plane.contract.caller import SessionId, SubjectId, TenantId
from control_plane.contract.headers import (
    CLIENT_TOKEN_TYP,
    SESSION_TOKEN_TYP,
    TOKEN_TYPE_ID_TOKEN,
    TOKEN_TYPE_JWT,
    TOKEN_TYPE_PLACEHOLDER,
    TOKEN_TYPE_SESSION,
)
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.delegation import Chain, InvalidDelegationError, Party, from_foreign_act, lengthened, may_act
from control_plane.core.identity import Use
from control_plane.core.names import IN_WORDS, PRINTABLE, is_object_id, is_printable
from control_plane.core.oauth import OAuthErrorCode, OAuthRefusedError, TokenRequest, invalid_request
from control_plane.core.records import Client, ClientKind, Session
from control_plane.core.session_token import ExpiredSessionTokenError, InvalidSessionTokenError
from control_plane.core.tokens import InvalidTokenError
from control_plane.identification import Identification
from control_plane.own_keys import OwnKeyring, unverified_typ
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Store
from control_plane.sessions import Opening, asserts_subjects_in, party_of


@dataclass(frozen=True, slots=True)
class OfSession:
    """A session, as a token of ours says it or as the store had it. Whether it is there, and live, is looked up in the
    transaction that issues something."""

    session: SessionId
    tenant: TenantId
    subject: SubjectId
    act: Chain
    may_act: Any
    token_id: str | None
    """Which of its tokens proved it. None: it was named by its id."""

    def is_of(self, session: Session) -> bool:
        return (
            session.id == self.session
            and session.tenant == self.tenant
            and session.subject == self.subject
            and session.act == self.act
            and session.may_act == self.may_act
        )


@dataclass(frozen=True, slots=True)
class ToOpen:
    """A subject without a session here: the exchange opens one."""

    opening: Opening
    token_id: str

    @property
    def act(self) -> Chain:
        return self.opening.act

    @property
    def may_act(self) -> Any:
        return self.opening.may_act

    @property
    def tenant(self) -> TenantId:
        return self.opening.tenant

    @property
    def subject(self) -> SubjectId:
        return self.opening.subject


Proof = OfSession | ToOpen


class Proofs:
    def __init__(
        self, store: Store, own_keys: OwnKeyring, identification: Identification, *, clock: Clock, issuer: str
    ) -> None:
        self._store = store
        self._own_keys = own_keys
        self._identification = identification
        self._clock = clock
        self._issuer = issuer

    async def of_subject(self, request: TokenRequest, client: Client) -> Proof:
        """Whom the subject token is about. Raises `RefusedError`."""
        if request.subject_token is None:
            raise invalid_request("subject_token is missing")
        match request.subject_token_type:
            case None:
                raise invalid_request("subject_token_type is missing")
            case token_type if token_type == TOKEN_TYPE_JWT:
                return await self._of_jwt(request.subject_token, request, client)
            case token_type if token_type == TOKEN_TYPE_ID_TOKEN:
                return await self._identified(request.subject_token, client)
            case token_type if token_type == TOKEN_TYPE_SESSION:
                return await self._joined(request.subject_token, client)
            case _:
                raise invalid_request(
                    "subject_token_type is none that is accepted here",
                    hint=f"{TOKEN_TYPE_JWT}, {TOKEN_TYPE_ID_TOKEN}, {TOKEN_TYPE_PLACEHOLDER} or {TOKEN_TYPE_SESSION}",
                )

    async def chain(self, request: TokenRequest, proof: Proof, client: Client) -> Chain:
        """Who acts for the subject: those who did, and the one that the actor token proves. Raises `RefusedError`."""
        if request.actor_token is None:
            if request.actor_token_type is not None:
                # RFC 8693 §2.1: it "MUST NOT be included when the actor_token parameter is not".
                raise invalid_request("actor_token_type is there without an actor_token")
            return proof.act
        if request.actor_token_type is None:
            raise invalid_request("actor_token_type is missing")
        if request.actor_token_type != TOKEN_TYPE_JWT:
            raise invalid_request("actor_token_type is none that is accepted here", hint=TOKEN_TYPE_JWT)
        actor = await self._actor(request.actor_token, client, proof.tenant)
        # RFC 8693 §4.4: the subject's own token says who may act for it. One that says nothing names nobody.
        if not may_act(proof.may_act, actor):
            raise _bad_token(MAY_NOT_ACT)
        try:
            return lengthened(proof.act, actor)
        except InvalidDelegationError as error:
            raise invalid_request(str(error)) from None

    async def _of_jwt(self, unverified_token: str, request: TokenRequest, client: Client) -> Proof:
        # RFC 8725 §3.11: the type first.
        match unverified_typ(unverified_token):
            case typ if typ == CLIENT_TOKEN_TYP:
                return await self._asserted(unverified_token, request, client)
            case typ if typ == SESSION_TOKEN_TYP:
                return await self._of_session_token(unverified_token, client)
            case _:
                return await self._identified(unverified_token, client)

    async def _of_session_token(self, unverified_token: str, client: Client) -> OfSession:
        try:
            claims = await self._own_keys.verify(unverified_token, issuer=self._issuer, audience=client.id)
        except ExpiredSessionTokenError:
            raise _bad_token(EXPIRED_SUBJECT_TOKEN) from None
        except InvalidSessionTokenError:
            raise _bad_token(INVALID_SUBJECT_TOKEN) from None
        return OfSession(
            claims.session, claims.tenant, claims.subject, claims.act, claims.may_act, token_id=claims.token_id
        )

    async def _asserted(self, unverified_token: str, request: TokenRequest, runtime: Client) -> ToOpen:
        """A subject that a client with `subject:assert` names, in its own tenant alone."""
        try:
            claims = await self._own_keys.verify_client(unverified_token, issuer=self._issuer, audience=runtime.id)
        except ExpiredSessionTokenError:
            raise _bad_token(EXPIRED_CLIENT_TOKEN) from None
        except InvalidSessionTokenError:
            raise _bad_token(INVALID_SUBJECT_TOKEN) from None
        asserting = await self._client(claims.client)
        if asserting is None or not asserts_subjects_in(asserting, claims.tenant) or not runtime.serves(claims.tenant):
            raise _bad_token(INVALID_SUBJECT_TOKEN)
        if request.requested_subject is None:
            raise invalid_request("requested_subject is missing: a client token names no subject by itself")
        if not is_printable(request.requested_subject):
            raise invalid_request(f"requested_subject is {IN_WORDS[PRINTABLE]}")
        opening = Opening(
            tenant=claims.tenant,
            subject=SubjectId(request.requested_subject),
            roles=(),
            runtime=runtime.id,
            act=(party_of(asserting, self._issuer),),
            joined_by=runtime.id,
        )
        return ToOpen(opening, claims.token_id)

    async def _identified(self, unverified_token: str, runtime: Client) -> ToOpen:
        """Somebody whom a trusted issuer vouches for, in the tenant that its claims table says."""
        try:
            identity = await self._identification.verified(unverified_token, use=Use.SESSION)
            chain = from_foreign_act(identity.act, issuer=identity.issuer_id, own_issuer=self._issuer)
        except (InvalidTokenError, InvalidDelegationError):
            raise bad_subject_token() from None
        if identity.tenant is None or not runtime.serves(identity.tenant):
            raise bad_subject_token()
        opening = Opening(
            tenant=identity.tenant,
            subject=identity.subject,
            roles=identity.roles,
            runtime=runtime.id,
            act=chain,
            may_act=identity.may_act,
            not_after=identity.expires_at,
            joined_by=runtime.id,
        )
        return ToOpen(opening, _digest(unverified_token))

    async def _joined(self, session_id: str, client: Client) -> OfSession:
        if not is_object_id(session_id):
            raise _bad_token(INVALID_SUBJECT_TOKEN)
        session = await self._session(SessionId(session_id))
        # Only the client that once held this session's own token may name the session instead.
        if session is None or session.joined_by != client.id:
            raise _bad_token(INVALID_SUBJECT_TOKEN)
        return OfSession(session.id, session.tenant, session.subject, session.act, session.may_act, token_id=None)

    async def _actor(self, unverified_token: str, client: Client, tenant: TenantId) -> Party:
        """Who the actor token proves: another session's subject, or a client, of the same tenant. Raises."""
        try:
            match unverified_typ(unverified_token):
                case typ if typ == CLIENT_TOKEN_TYP:
                    return await self._acting_client(unverified_token, client, tenant)
                case typ if typ == SESSION_TOKEN_TYP:
                    return await self._acting_subject(unverified_token, client, tenant)
                case _:
                    raise _bad_token(INVALID_ACTOR_TOKEN)
        except InvalidSessionTokenError:
            raise _bad_token(INVALID_ACTOR_TOKEN) from None

    async def _acting_client(self, unverified_token: str, client: Client, tenant: TenantId) -> Party:
        claims = await self._own_keys.verify_client(unverified_token, issuer=self._issuer, audience=client.id)
        acting = await self._client(claims.client)
        if acting is None or not asserts_subjects_in(acting, tenant):
            raise _bad_token(INVALID_ACTOR_TOKEN)
        return party_of(acting, self._issuer)

    async def _acting_subject(self, unverified_token: str, client: Client, tenant: TenantId) -> Party:
        claims = await self._own_keys.verify(unverified_token, issuer=self._issuer, audience=client.id)
        session = await self._session(claims.session)
        if session is None or not claims.are_of(session) or session.tenant != tenant:
            raise _bad_token(INVALID_ACTOR_TOKEN)
        if not session.is_live(self._clock()):
            raise _bad_token(INVALID_ACTOR_TOKEN)
        return Party(subject=session.subject, issuer=self._issuer)

    async def _session(self, session_id: SessionId) -> Session | None:
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            return await records.sessions.get(session_id)

    async def _client(self, client_id: Any) -> Client | None:
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            return await records.clients.get(client_id)


def _digest(token: str) -> str:
    """Stands for a token whose own id (`jti`) is another issuer's business.

    Of what is signed alone: a signature can be spelled in several ways by whoever holds it (ECDSA's second solution,
    base64url's spare bits), and it is the same token still.
    """
    return hashlib.sha256(token.rpartition(".")[0].encode()).hexdigest()


def require_runtime(client: Client) -> None:
    if client.kind is not ClientKind.RUNTIME:
        raise OAuthRefusedError(
            OAuthErrorCode.UNAUTHORIZED_CLIENT,
            Refusal(RefusalCode.FORBIDDEN, "only a client of kind 'runtime' exchanges tokens"),
        )


def require_subject(request: TokenRequest, subject: SubjectId) -> None:
    if request.requested_subject not in (None, subject):
        raise RefusedError(SUBJECT_CONFLICT)


def bad_subject_token() -> OAuthRefusedError:
    return _bad_token(INVALID_SUBJECT_TOKEN)


def _bad_token(refusal: Refusal) -> OAuthRefusedError:
    # RFC 8693 §2.2.2: a bad token is invalid_request; 401 invalid_client would blame the client's own secret.
    return OAuthRefusedError(OAuthErrorCode.INVALID_REQUEST, refusal)


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
EXPIRED_CLIENT_TOKEN: Final = Refusal(
    RefusalCode.TOKEN_EXPIRED,
    "the subject token has expired",
    "the client gets a fresh one with grant_type=client_credentials",
)
INVALID_ACTOR_TOKEN: Final = Refusal(
    RefusalCode.TOKEN_INVALID,
    "the actor token is not valid for this client and this tenant",
    "present a fresh session token or client token that names this client as its audience",
)
MAY_NOT_ACT: Final = Refusal(
    RefusalCode.FORBIDDEN,
    "the subject token does not say that this actor may act for its subject",
    "whoever opens the session names the actor in 'may_act'",
)
SUBJECT_CONFLICT: Final = Refusal(
    RefusalCode.SUBJECT_CONFLICT, "requested_subject is not the subject of the token", "leave it out"
)
