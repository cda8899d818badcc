"""`/v1/tenants/{tenant}/limits`: how much of what a tenant's subjects may use in a window of time."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from control_plane.access import Access
from control_plane.api.admin import Items
from control_plane.api.guard import AdminRoutes, actor
from control_plane.api.messages import LimitIn, LimitOut
from control_plane.contract.caller import SubjectId, TenantId
from control_plane.core.names import OBJECT_ID, TENANT_ID
from control_plane.core.policy import Action
from control_plane.limits import LimitKeeper, NewLimit

TenantPath = Annotated[str, Path(pattern=TENANT_ID)]
IdPath = Annotated[str, Path(pattern=OBJECT_ID)]


@dataclass(frozen=True, slots=True)
class LimitsApi:
    access: Access
    limits: LimitKeeper

    def router(self) -> APIRouter:
        routes = AdminRoutes(self.access)
        routes.add("POST", "/tenants/{tenant}/limits", self.add, Action.LIMIT_WRITE, status_code=201)
        routes.add("GET", "/tenants/{tenant}/limits", self.list, Action.LIMIT_READ)
        routes.add("DELETE", "/tenants/{tenant}/limits/{limit}", self.remove, Action.LIMIT_WRITE, status_code=204)
        return routes.router

    async def add(self, request: Request, tenant: TenantPath, body: LimitIn) -> LimitOut:
        """In force on every proxy as soon as it has heard of it."""
        new = NewLimit(
            credential=body.credential,
            subject=SubjectId(body.subject) if body.subject is not None else None,
            each_subject=body.each_subject,
            measure=body.measure,
            amount=body.amount,
            window_seconds=body.window_seconds,
        )
        return LimitOut.of(await self.limits.add(TenantId(tenant), new, by=actor(request)))

    async def list(self, tenant: TenantPath) -> Items[LimitOut]:
        """With what was given out of each in the window that runs now."""
        return Items(items=[LimitOut.of(named) for named in await self.limits.list(TenantId(tenant))])

    async def remove(self, request: Request, tenant: TenantPath, limit: IdPath) -> Response:
        await self.limits.remove(TenantId(tenant), limit, by=actor(request))
        return Response(status_code=204)
