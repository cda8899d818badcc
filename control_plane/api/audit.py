"""`/v1/…/audit`: the chain of the audit trail, for whoever reads the trail: exports, heads, and who has a chain.

Rule: a tenant's chain is read in that tenant's scope. The public keys are for everybody: they prove, and open nothing.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from control_plane.access import Access
from control_plane.api.guard import AdminRoutes
from control_plane.audit_keys import AuditKeys
from control_plane.contract.caller import TenantId
from control_plane.core.chain import Head, anchor_line, head_line
from control_plane.core.names import TENANT_ID
from control_plane.core.policy import Action
from control_plane.ports import CrossTenantReason, PlatformScope, Scope, Store, TenantScope
from control_plane.trail_export import TrailExport

JSON_LINES: Final = "application/x-ndjson"
_LINES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "One JSON object a line", "content": {JSON_LINES: {"schema": {"type": "string"}}}}
}
_PLATFORM: Final = PlatformScope(CrossTenantReason.AUDIT)
TenantPath = Annotated[str, Path(pattern=TENANT_ID)]
AfterQuery = Annotated[int, Query(ge=0, le=2**62)]


@dataclass(frozen=True, slots=True)
class AuditApi:
    access: Access
    export: TrailExport
    keys: AuditKeys
    store: Store

    def router(self) -> APIRouter:
        routes = AdminRoutes(self.access)
        lines: dict[str, Any] = {"response_class": StreamingResponse, "responses": _LINES}
        routes.add("GET", "/tenants/{tenant}/audit/export", self.export_of_tenant, Action.AUDIT_READ, **lines)
        routes.add("GET", "/tenants/{tenant}/audit/head", self.head_of_tenant, Action.AUDIT_READ)
        routes.add("GET", "/audit/export", self.export_of_platform, Action.AUDIT_READ_ALL, **lines)
        routes.add("GET", "/audit/head", self.head_of_platform, Action.AUDIT_READ_ALL)
        routes.add("GET", "/audit/chains", self.chains, Action.AUDIT_READ_ALL)
        return routes.router

    def public_router(self) -> APIRouter:
        router = APIRouter(tags=["well-known"])
        router.add_api_route("/.well-known/coatcheck-audit-keys.json", self.public_keys, methods=["GET"])
        return router

    async def export_of_tenant(self, tenant: TenantPath, after: AfterQuery = 0) -> StreamingResponse:
        """JSON lines: events in their order, each batch with its signed head. `after` resumes behind a position."""
        return self._export(TenantScope(TenantId(tenant)), tenant, after)

    async def export_of_platform(self, after: AfterQuery = 0) -> StreamingResponse:
        """The same for the events of no tenant."""
        return self._export(_PLATFORM, None, after)

    async def head_of_tenant(self, tenant: TenantPath) -> dict[str, Any]:
        """The newest signed head. Kept elsewhere, it shows later whether anything before it was changed or cut off."""
        return await self._head(TenantScope(TenantId(tenant)), tenant)

    async def head_of_platform(self) -> dict[str, Any]:
        return await self._head(_PLATFORM, None)

    async def chains(self) -> dict[str, list[dict[str, Any]]]:
        """Every chain there is, with its end; `tenant` is null for the one of the events of no tenant."""
        async with self.store.read(_PLATFORM) as records:
            ends = [(tenant, await records.chain.last(tenant)) for tenant in await records.chain.tenants()]
        items: list[dict[str, Any]] = []
        for tenant, end in ends:
            position = 0 if end is None else end.last if isinstance(end, Head) else end.position
            items.append({"tenant": tenant, "number": end.number if end else 0, "position": position})
        return {"items": items}

    async def public_keys(self) -> dict[str, list[dict[str, Any]]]:
        """The keys that sign heads (RFC 7517). They sign no tokens."""
        return (await self.keys.ring()).public_jwks()

    async def _head(self, scope: Scope, tenant: str | None) -> dict[str, Any]:
        end = await self.export.last_head(scope, tenant)
        if end is None:
            return {"kind": "none", "tenant": tenant}
        return head_line(end) if isinstance(end, Head) else anchor_line(end)

    def _export(self, scope: Scope, tenant: str | None, after: int) -> StreamingResponse:
        return StreamingResponse(_written(self.export.lines(scope, tenant, after=after)), media_type=JSON_LINES)


async def _written(pages: AsyncIterator[list[dict[str, Any]]]) -> AsyncIterator[bytes]:
    async for page in pages:
        yield "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in page).encode("ascii")
