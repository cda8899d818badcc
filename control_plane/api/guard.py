"""Routes for administrators: none without an action, each behind the one gate (`access.require`, `core/policy.py`).

    routes = AdminRoutes(access)
    routes.add("GET", "/tenants/{tenant}/grants", self.list_grants, Action.GRANT_READ)

Rule: who calls is proven and allowed before anything of the request is believed. The tenant of a route is its path's
`{tenant}`, and nothing else. What a route still has to decide by its body, its handler asks of `principal(request)`.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Request

from control_plane.access import Access, require
from control_plane.api.errors import request_id
from control_plane.contract.caller import TenantId
from control_plane.core.policy import Action, Principal
from control_plane.trail import Actor

ACTION_FIELD: Final = "x-coatcheck-action"
"""In the OpenAPI document: what the caller has to be allowed to do."""

_PROBLEM: Final[dict[str, Any]] = {
    "description": "Problem details (RFC 9457)",
    "content": {"application/problem+json": {"schema": {"type": "object"}}},
}
PROBLEMS: Final[dict[int | str, dict[str, Any]]] = dict.fromkeys((400, 401, 403, 404, 413, 422, 503), _PROBLEM)

_PRINCIPAL: Final = "coatcheck.principal"

Authorization = Annotated[str | None, Header(include_in_schema=False)]


class AdminRoutes:
    """A router under `/v1` to which only guarded routes can be added."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.router = APIRouter(prefix="/v1", responses=PROBLEMS, tags=["admin"])

    def add(self, method: str, path: str, handler: Callable[..., Any], action: Action, **options: Any) -> None:
        self.router.add_api_route(
            path,
            handler,
            methods=[method],
            dependencies=[Depends(allowing(self._access, action))],
            openapi_extra={ACTION_FIELD: action.value},
            **options,
        )


def allowing(access: Access, action: Action) -> Callable[..., Any]:
    """A dependency that lets through whoever may do this to the path's tenant, and remembers who that is."""

    async def check(request: Request, authorization: Authorization = None) -> None:
        caller = await access.principal(authorization)
        tenant = request.path_params.get("tenant")
        require(caller, action, TenantId(tenant) if tenant is not None else None)
        request.scope[_PRINCIPAL] = caller

    return check


def identifying(access: Access) -> Callable[..., Any]:
    """A dependency that only proves who calls: for the few routes whose tenant stands elsewhere than in the path.

    Their handlers ask `require` before they do anything.
    """

    async def check(request: Request, authorization: Authorization = None) -> None:
        request.scope[_PRINCIPAL] = await access.principal(authorization)

    return check


def principal(request: Request) -> Principal:
    """Whoever was let through."""
    found = request.scope[_PRINCIPAL]
    assert isinstance(found, Principal)
    return found


def actor(request: Request) -> Actor:
    """The same, for the audit trail."""
    return actor_of(principal(request), request)


def actor_of(caller: Principal, request: Request) -> Actor:
    return Actor(caller.name, request_id(request), is_a_client=False)
