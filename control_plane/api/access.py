"""`/v1/access`: who can use what, and what one request would get. For whoever may read the tenant's grants."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field, StringConstraints

from control_plane.access import Access, require
from control_plane.access_review import AccessReview, Answer, Entitlement, Question
from control_plane.api.admin import Items
from control_plane.api.guard import ACTION_FIELD, PROBLEMS, identifying, principal
from control_plane.api.messages import (
    MAX_ITEMS,
    ClientName,
    Method,
    ObjectId,
    PlacementField,
    Printable,
    TenantName,
    _Incoming,
    _Outgoing,
)
from control_plane.contract.caller import ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.placement import placement_to_json
from control_plane.core.moments import within_calendar
from control_plane.core.names import PRINTABLE, TENANT_ID
from control_plane.core.policy import Action, Principal
from control_plane.core.scopes import MAX_SCOPE_CHARACTERS
from control_plane.registry import Registry

TRAITS: Final = ("allow_private", "ranges", "strict", "unsearchable", "websocket")
SubjectQuery = Annotated[str | None, Query(pattern=PRINTABLE)]
TenantQuery = Annotated[str | None, Query(pattern=TENANT_ID)]


class UseOut(_Outgoing):
    subject: str
    client: str
    host: str
    last_used_at: float
    requests: int
    """As the proxies reported them; a report that came twice counts once."""


class EntitlementOut(_Outgoing):
    """One grant, what it is of, and when it was used."""

    tenant: str
    grant: str
    subject: str | None
    role: str | None
    client: str | None
    credential: str
    destinations: list[str]
    methods: list[str] | None
    path_prefixes: list[str] | None
    until: float | None
    live: bool
    last_used_at: float | None
    uses: list[UseOut]

    @classmethod
    def of(cls, entitlement: Entitlement) -> "EntitlementOut":
        grant, credential = entitlement.grant, entitlement.credential
        return cls(
            tenant=grant.tenant,
            grant=grant.id,
            subject=grant.subject,
            role=grant.role,
            client=grant.client,
            credential=credential.name,
            destinations=[destination.url for destination in credential.destinations],
            methods=sorted(grant.methods) if grant.methods is not None else None,
            path_prefixes=sorted(grant.path_prefixes) if grant.path_prefixes is not None else None,
            until=within_calendar(grant.until) if grant.until is not None else None,
            live=entitlement.is_live,
            last_used_at=entitlement.last_used_at,
            uses=[
                UseOut(
                    subject=use.subject,
                    client=use.client,
                    host=use.host,
                    last_used_at=use.last_used_at,
                    requests=use.requests,
                )
                for use in entitlement.uses
            ],
        )


class AccessCheckIn(_Incoming):
    """One request that nobody makes."""

    tenant: TenantName
    subject: Printable
    method: Method
    url: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    client: ClientName | None = None
    credential: Printable | None = None
    """Name, provider or host, as `audience` of an exchange. None: the request goes without a credential."""
    roles: list[Printable] = Field(default_factory=list, max_length=MAX_ITEMS)
    session: ObjectId | None = None
    scope: Annotated[str, StringConstraints(max_length=MAX_SCOPE_CHARACTERS)] = ""
    placement: PlacementField | None = None
    """Where the placeholder stands. None: in the credential's first placement."""
    websocket: bool = False
    """It would open a WebSocket."""
    other_key: bool = False
    """It would carry a key that is no placeholder, in whatever field."""


class StepOut(_Outgoing):
    step: str
    outcome: str
    """`passed`, `refused`, `not_reached` after a refusal, `not_asked` where the question says nothing about it."""
    detail: str


class AccessCheckOut(_Outgoing):
    allowed: bool
    code: str | None
    detail: str
    hint: str
    client: str
    credential: str | None
    grants: list[str]
    placement: dict[str, str] | None
    """Where its placeholder would stand."""
    traits: list[str]
    """Of its destination: `allow_private`, `ranges`, `strict`, `unsearchable`, `websocket`."""
    steps: list[StepOut]

    @classmethod
    def of(cls, answer: Answer) -> "AccessCheckOut":
        refusal = answer.refusal
        return cls(
            allowed=refusal is None,
            code=refusal.code.value if refusal is not None else None,
            detail=refusal.detail if refusal is not None else "the request would go",
            hint=refusal.hint if refusal is not None else "",
            client=answer.client,
            credential=answer.credential,
            grants=[grant.id for grant in answer.grants],
            placement=placement_to_json(answer.placement) if answer.placement is not None else None,
            traits=[name for name in TRAITS if answer.handling is not None and getattr(answer.handling, name)],
            steps=[
                StepOut(step=explained.step.value, outcome=explained.outcome.value, detail=explained.detail)
                for explained in answer.steps
            ],
        )


@dataclass(frozen=True, slots=True)
class AccessApi:
    access: Access
    review: AccessReview
    registry: Registry

    def router(self) -> APIRouter:
        router = APIRouter(
            prefix="/v1/access",
            dependencies=[Depends(identifying(self.access))],
            responses=PROBLEMS,
            tags=["admin"],
        )
        described: dict[str, Any] = {ACTION_FIELD: Action.ACCESS_READ.value}
        router.add_api_route("", self.list, methods=["GET"], openapi_extra=described)
        router.add_api_route("/check", self.check, methods=["POST"], openapi_extra=described)
        return router

    async def list(
        self, request: Request, subject: SubjectQuery = None, tenant: TenantQuery = None
    ) -> Items[EntitlementOut]:
        """Without a tenant: of every tenant that the caller sees."""
        caller = principal(request)
        tenants = [TenantId(tenant)] if tenant is not None else await self._seen(caller)
        found: list[Entitlement] = []
        for each in tenants:
            require(caller, Action.ACCESS_READ, each)
            found += await self.review.list(each, SubjectId(subject) if subject is not None else None)
        return Items(items=[EntitlementOut.of(entitlement) for entitlement in found])

    async def _seen(self, caller: Principal) -> Sequence[TenantId]:
        return [tenant.id for tenant in await self.registry.tenants() if caller.sees(tenant.id)]

    async def check(self, request: Request, body: AccessCheckIn) -> AccessCheckOut:
        """What the request would get, step by step. Nothing is sent and nothing is issued."""
        tenant = TenantId(body.tenant)
        require(principal(request), Action.ACCESS_READ, tenant)
        question = Question(
            subject=SubjectId(body.subject),
            method=body.method,
            url=body.url,
            client=ClientId(body.client) if body.client is not None else None,
            credential=body.credential,
            roles=tuple(body.roles),
            session=SessionId(body.session) if body.session is not None else None,
            scope=body.scope,
            placement=body.placement,
            websocket=body.websocket,
            other_key=body.other_key,
        )
        return AccessCheckOut.of(await self.review.check(tenant, question))
