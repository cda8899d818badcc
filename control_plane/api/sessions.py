"""`/v1/sessions`: opened by the administrator or an operator, refreshed by its owner, ended by either side.

Rule: whoever may not see a session hears that there is none, whatever the reason.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from control_plane.access import FORBIDDEN, UNAUTHENTICATED, Access, bearer, is_basic, require
from control_plane.api.admin import Items
from control_plane.api.errors import request_id
from control_plane.api.guard import PROBLEMS, actor_of
from control_plane.api.messages import EndedSessionOut, SessionIn, SessionOut, SessionTokenOut
from control_plane.api.peer import peer_certificate
from control_plane.contract.caller import ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.refusal import RefusedError
from control_plane.core.delegation import Chain, InvalidDelegationError, from_act
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


@dataclass(frozen=True, slots=True)
class SessionsApi:
    access: Access
    sessions: Sessions

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/sessions", responses=PROBLEMS, tags=["sessions"])
        router.add_api_route("", self.open, methods=["POST"], status_code=201)
        router.add_api_route("/ended", self.ended, methods=["GET"])
        router.add_api_route("/{session}/erased", self.erased, methods=["POST"], status_code=204)
        router.add_api_route("/{session}/token", self.token, methods=["POST"])
        router.add_api_route("/{session}", self.get, methods=["GET"])
        router.add_api_route("/{session}", self.end, methods=["DELETE"], status_code=204)
        return router

    async def open(self, request: Request, body: SessionIn) -> SessionTokenOut:
        """For whoever a trusted issuer's token speaks for; for a subject that the caller names, if it may."""
        authorization = request.headers.get("authorization")
        if _is_of_a_client(request):
            opening, by = await self._opening_by_client(request, body)
        elif (own := await self._own_identity(authorization, body)) is not None:
            opening, by = _opening_of(own, body, request)
        else:
            opening, by = await self._opening_by_administrator(request, body)
        session = await self.sessions.open(opening, by=by)
        return await self._fresh_token(session)

    async def _opening_by_client(self, request: Request, body: SessionIn) -> tuple[Opening, Actor]:
        client = await self._client(request)
        tenant = asserting_tenant(client)
        if body.tenant not in (None, tenant) or body.roles:
            raise RefusedError(FORBIDDEN)
        act = (party_of(client, self.sessions.issuer),)
        return _opening(tenant, _named_subject(body), (), body, act=act), Actor(client.id, request_id(request))

    async def _opening_by_administrator(self, request: Request, body: SessionIn) -> tuple[Opening, Actor]:
        principal = await self.access.principal(request.headers.get("authorization"))
        if body.tenant is None:
            raise invalid_field("tenant", "is missing")
        tenant = TenantId(body.tenant)
        require(principal, Action.SESSION_WRITE, tenant)
        return _opening(tenant, _named_subject(body), tuple(body.roles), body), actor_of(principal, request)

    async def _own_identity(self, authorization: str | None, body: SessionIn) -> VerifiedIdentity | None:
        """Of a caller that asks for a session of its own. None: it names somebody else, or is no issuer's subject."""
        token = bearer(authorization)
        if token is None:
            return None
        identity = await self.access.find_identity(token, use=Use.SESSION)
        if (
            identity is None
            or body.subject not in (None, identity.subject)
            or body.tenant not in (None, identity.tenant)
        ):
            return None
        return identity

    async def token(self, request: Request, session: SessionPath) -> SessionTokenOut:
        """A fresh token, for the owner by a live one of the same session, or for an administrator of the tenant."""
        if _is_of_a_client(request):
            raise RefusedError(UNAUTHENTICATED)
        found, _ = await self._seen(request, SessionId(session), Action.SESSION_WRITE)
        return await self._fresh_token(found)

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
        runtime = await self.access.client_of_kind(
            request.headers.get("authorization"), ClientKind.RUNTIME, certificate=peer_certificate(request)
        )
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
        runtime = await self.access.client_of_kind(
            request.headers.get("authorization"), ClientKind.RUNTIME, certificate=peer_certificate(request)
        )
        found = await self.sessions.find(SessionId(session))
        if found.runtime != runtime.id or not runtime.serves(found.tenant):
            raise RefusedError(SESSION_NOT_FOUND)
        await self.sessions.erased(found, by=Actor(runtime.id, request_id(request)))
        return Response(status_code=204)

    async def _seen(self, request: Request, session_id: SessionId, action: Action) -> tuple[Session, Actor]:
        """The session, if the caller is its owner, its runtime, an operator of its tenant, or an administrator."""
        authorization = request.headers.get("authorization")
        if _is_of_a_client(request):
            return await self._seen_by_client(await self._client(request), request, session_id)
        unverified_token = bearer(authorization)
        if unverified_token is None:
            raise RefusedError(UNAUTHENTICATED)
        try:
            claims = await self.sessions.verified_owner(unverified_token)
        except InvalidSessionTokenError:
            identity = await self.access.find_identity(unverified_token, use=Use.SESSION)
            if identity is not None and (own := await self._own_session(identity, session_id)) is not None:
                return own, _actor_of(identity, request)
            return await self._seen_by_administrator(
                await self.access.principal(authorization), request, session_id, action
            )
        if claims.session != session_id:
            raise RefusedError(SESSION_NOT_FOUND)
        return await self.sessions.find(session_id), Actor(claims.audience, request_id(request))

    async def _client(self, request: Request) -> Client:
        return await self.access.client(request.headers.get("authorization"), certificate=peer_certificate(request))

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


def _is_of_a_client(request: Request) -> bool:
    """Whether it is a client's proof that the request brings: a secret, or a certificate and nothing else."""
    authorization = request.headers.get("authorization")
    return is_basic(authorization) or (authorization is None and peer_certificate(request) is not None)


def _opening_of(identity: VerifiedIdentity, body: SessionIn, request: Request) -> tuple[Opening, Actor]:
    """Tenant, subject and roles are the token's: nobody gives itself a role."""
    if body.roles or identity.tenant is None:
        raise RefusedError(FORBIDDEN)
    try:
        act = from_act(identity.act)
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
