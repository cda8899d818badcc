"""`/v1/sessions`: opened by the administrator or an operator, refreshed by its owner, ended by either side.

Rule: whoever may not see a session hears that there is none, whatever the reason.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from control_plane.access import FORBIDDEN, UNAUTHENTICATED, Access, bearer, require
from control_plane.api.admin import Items
from control_plane.api.errors import request_id
from control_plane.api.guard import PROBLEMS, actor_of
from control_plane.api.messages import EndedSessionOut, SessionIn, SessionOut, SessionTokenOut
from control_plane.api.peer import peer_certificate
from control_plane.contract.caller import ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.refusal import RefusedError
from control_plane.core.delegation import Chain, InvalidDelegationError, from_foreign_act
from control_plane.core.identity import Use, VerifiedIdentity
from control_plane.core.names import OBJECT_ID
from control_plane.core.policy import Action, Principal
from control_plane.core.records import Client, ClientKind, Session
from control_plane.core.session_token import InvalidSessionTokenError
from control_plane.credentials import invalid_field
from control_plane.sessions import (
    SESSION_NOT_FOUND,
    Opening,
    Sessions,
    asserting_tenant,
    asserts_subjects_in,
    party_of,
)
from control_plane.trail import Actor

AfterQuery = Annotated[str | None, Query(pattern=OBJECT_ID)]
LimitQuery = Annotated[int, Query(ge=1, le=1000)]
SessionPath = Annotated[str, Path(pattern=OBJECT_ID)]
Opener = Client | VerifiedIdentity | Principal
"""Who may ask for a session."""

_OPENER: Final = "coatcheck.opener"


@dataclass(frozen=True, slots=True)
class SessionsApi:
    access: Access
    sessions: Sessions

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/sessions", responses=PROBLEMS, tags=["sessions"])
        router.add_api_route(
            "", self.open, methods=["POST"], status_code=201, dependencies=[Depends(self._known_opener)]
        )
        router.add_api_route("/ended", self.ended, methods=["GET"])
        router.add_api_route("/{session}/erased", self.erased, methods=["POST"], status_code=204)
        router.add_api_route("/{session}/token", self.token, methods=["POST"])
        router.add_api_route("/{session}", self.get, methods=["GET"])
        router.add_api_route("/{session}", self.end, methods=["DELETE"], status_code=204)
        return router

    async def open(self, request: Request, body: SessionIn) -> SessionTokenOut:
        """For whoever a trusted issuer's token speaks for; for a subject that the caller names, if it may."""
        match _opener(request):
            case Client() as client:
                opening, by = self._opening_by_client(client, request, body)
            case VerifiedIdentity() as identity if _asks_for_its_own(identity, body):
                opening, by = _opening_of(identity, body, request, own_issuer=self.sessions.issuer)
            case Principal() as principal:
                opening, by = _opening_by_administrator(principal, request, body)
            case _:  # somebody who names somebody else, and may do so as an administrator alone
                principal = await self.access.principal(request.headers.get("authorization"))
                opening, by = _opening_by_administrator(principal, request, body)
        session = await self.sessions.open(opening, by=by)
        return await self._fresh_token(session)

    async def _known_opener(self, request: Request) -> None:
        """Who asks is proven before anything of the request is read."""
        authorization = request.headers.get("authorization")
        token = bearer(authorization)
        opener: Opener | None = None
        if token is not None:
            identity = await self.access.find_identity(token, use=Use.SESSION)
            opener = identity or await self.access.find_principal(authorization)
        request.scope[_OPENER] = opener or await self._client(request)

    def _opening_by_client(self, client: Client, request: Request, body: SessionIn) -> tuple[Opening, Actor]:
        tenant = asserting_tenant(client)
        if body.tenant not in (None, tenant) or body.roles:
            raise RefusedError(FORBIDDEN)
        act = (party_of(client, self.sessions.issuer),)
        return _opening(tenant, _named_subject(body), (), body, act=act), Actor(client.id, request_id(request))

    async def token(self, request: Request, session: SessionPath) -> SessionTokenOut:
        """A fresh token, for the owner by a live one of the same session, or for an administrator of the tenant."""
        seen = await self._seen_by_a_person(request, SessionId(session), Action.SESSION_WRITE)
        if seen is None:
            raise RefusedError(UNAUTHENTICATED)
        return await self._fresh_token(seen[0])

    async def get(self, request: Request, session: SessionPath) -> SessionOut:
        found, _ = await self._seen(request, SessionId(session), Action.SESSION_READ)
        return SessionOut.of(found)

    async def end(self, request: Request, session: SessionPath) -> Response:
        """Revokes its placeholders. Ending it again changes nothing."""
        found, by = await self._seen(request, SessionId(session), Action.SESSION_WRITE)
        await self.sessions.end(found, by=by)
        return Response(status_code=204)

    async def ended(
        self, request: Request, after: AfterQuery = None, limit: LimitQuery = 100
    ) -> Items[EndedSessionOut]:
        """For a runtime: its sessions that were ended, and of which it may still keep something; the next page is after
        the last id. A session that it keeps something of and that is unknown here is over, too."""
        runtime = await self._runtime(request)
        last = SessionId(after) if after is not None else None
        found = await self.sessions.to_erase(runtime, after=last, limit=limit)
        return Items(
            items=[
                EndedSessionOut(session_id=session.id, tenant=session.tenant, ended_at=session.ended_at or 0.0)
                for session in found
            ]
        )

    async def erased(self, request: Request, session: SessionPath) -> Response:
        """For its runtime, once it has forgotten all that it kept of an ended session. Again changes nothing."""
        runtime = await self._runtime(request)
        found = await self.sessions.find(SessionId(session))
        if found.runtime != runtime.id or not runtime.serves(found.tenant):
            raise RefusedError(SESSION_NOT_FOUND)
        await self.sessions.erased(found, by=Actor(runtime.id, request_id(request)))
        return Response(status_code=204)

    async def _seen(self, request: Request, session_id: SessionId, action: Action) -> tuple[Session, Actor]:
        """The session, if the caller is its owner, its runtime, an operator of its tenant, or an administrator."""
        seen = await self._seen_by_a_person(request, session_id, action)
        return seen or await self._seen_by_client(await self._client(request), request, session_id)

    async def _seen_by_a_person(
        self, request: Request, session_id: SessionId, action: Action
    ) -> tuple[Session, Actor] | None:
        """By its owner or an administrator. None: it is neither's token that the request brings."""
        authorization = request.headers.get("authorization")
        unverified_token = bearer(authorization)
        if unverified_token is None:
            return None
        try:
            claims = await self.sessions.verified_owner(unverified_token)
        except InvalidSessionTokenError:
            return await self._seen_by_issuers_word(unverified_token, request, session_id, action)
        if claims.session != session_id:
            raise RefusedError(SESSION_NOT_FOUND)
        return await self.sessions.find(session_id), Actor(claims.audience, request_id(request))

    async def _seen_by_issuers_word(
        self, unverified_token: str, request: Request, session_id: SessionId, action: Action
    ) -> tuple[Session, Actor] | None:
        identity = await self.access.find_identity(unverified_token, use=Use.SESSION)
        if identity is not None and (own := await self._own_session(identity, session_id)) is not None:
            return own, _actor_of(identity, request)
        principal = await self.access.find_principal(request.headers.get("authorization"))
        if principal is None:
            return None
        return await self._seen_by_administrator(principal, request, session_id, action)

    async def _runtime(self, request: Request) -> Client:
        return await self.access.client_of_kind(
            request.headers.get("authorization"), ClientKind.RUNTIME, certificate=peer_certificate(request)
        )

    async def _client(self, request: Request) -> Client:
        return await self.access.caller(request.headers.get("authorization"), certificate=peer_certificate(request))

    async def _own_session(self, identity: VerifiedIdentity, session_id: SessionId) -> Session | None:
        """The session, if it is this subject's. Raises `RefusedError(session_not_found)` where there is none."""
        session = await self.sessions.find(session_id)
        return session if (session.tenant, session.subject) == (identity.tenant, identity.subject) else None

    async def _seen_by_client(self, client: Client, request: Request, session_id: SessionId) -> tuple[Session, Actor]:
        session = await self.sessions.find(session_id)
        is_its_runtime = session.runtime == client.id and client.serves(session.tenant)
        if not is_its_runtime and not asserts_subjects_in(client, session.tenant):
            raise RefusedError(SESSION_NOT_FOUND)
        return session, Actor(client.id, request_id(request))

    async def _seen_by_administrator(
        self, principal: Principal, request: Request, session_id: SessionId, action: Action
    ) -> tuple[Session, Actor]:
        session = await self.sessions.find(session_id)
        if not principal.sees(session.tenant):
            raise RefusedError(SESSION_NOT_FOUND)
        require(principal, action, session.tenant)
        return session, actor_of(principal, request)

    async def _fresh_token(self, session: Session) -> SessionTokenOut:
        token = await self.sessions.token(session)
        return SessionTokenOut(
            session_id=session.id,
            session_token=token.text,
            expires_in=token.expires_in,
            not_after=session.not_after,
        )


def _opener(request: Request) -> Opener:
    found = request.scope[_OPENER]
    assert isinstance(found, Client | VerifiedIdentity | Principal)
    return found


def _asks_for_its_own(identity: VerifiedIdentity, body: SessionIn) -> bool:
    return body.subject in (None, identity.subject) and body.tenant in (None, identity.tenant)


def _opening_by_administrator(principal: Principal, request: Request, body: SessionIn) -> tuple[Opening, Actor]:
    if body.tenant is None:
        raise invalid_field("tenant", "is missing")
    tenant = TenantId(body.tenant)
    require(principal, Action.SESSION_WRITE, tenant)
    return _opening(tenant, _named_subject(body), tuple(body.roles), body), actor_of(principal, request)


def _opening_of(
    identity: VerifiedIdentity, body: SessionIn, request: Request, *, own_issuer: str
) -> tuple[Opening, Actor]:
    """Tenant, subject and roles are the token's: nobody gives itself a role."""
    if body.roles or identity.tenant is None:
        raise RefusedError(FORBIDDEN)
    try:
        act = from_foreign_act(identity.act, issuer=identity.issuer_id, own_issuer=own_issuer)
    except InvalidDelegationError:
        raise RefusedError(UNAUTHENTICATED) from None
    opening = _opening(identity.tenant, identity.subject, identity.roles, body, act=act)
    return replace(opening, may_act=opening.may_act or identity.may_act), _actor_of(identity, request)


def _opening(
    tenant: TenantId, subject: SubjectId, roles: tuple[str, ...], body: SessionIn, *, act: Chain = ()
) -> Opening:
    may_act = body.may_act.to_claim() if body.may_act is not None else None
    return Opening(
        tenant=tenant, subject=subject, roles=roles, runtime=ClientId(body.runtime), act=act, may_act=may_act
    )


def _named_subject(body: SessionIn) -> SubjectId:
    if body.subject is None:
        raise invalid_field("subject", "is missing")
    return SubjectId(body.subject)


def _actor_of(identity: VerifiedIdentity, request: Request) -> Actor:
    return Actor(f"{identity.issuer}:{identity.subject}", request_id(request), is_a_client=False)
