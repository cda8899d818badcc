"""The HTTP application: one module a kind of caller, errors at one edge, one document that describes it.

Rule: the document is made when it is first asked for, beside the loop. It takes longer than the whole rest of a start.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from control_plane.api.edge import Edge
from control_plane.api.errors import install
from control_plane.metrics import Counters

_SECURITY_SCHEMES: Final = {
    "administrator": {"type": "http", "scheme": "bearer", "description": "The administrator's token"},
    "client": {"type": "http", "scheme": "basic", "description": "A registered client: its id and secret"},
    "session": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT", "description": "A live session token"},
}
_SECURITY: Final[Mapping[str, list[dict[str, list[str]]]]] = {
    "admin": [{"administrator": []}],
    "oauth": [{"client": []}],
    "sessions": [{"administrator": []}, {"client": []}, {"session": []}],
    "well-known": [],
}
"""Who may call, by the tag of a router. The checks themselves stand in the handlers."""


def build_app(
    routers: Sequence[APIRouter], *, version: str, new_request_id: Callable[[], str], counters: Counters
) -> ASGIApp:
    """The application inside its edge."""
    return Edge(build_inner_app(routers, version=version), new_request_id=new_request_id, counters=counters)


def build_inner_app(routers: Sequence[APIRouter], *, version: str) -> FastAPI:
    """Without the interactive pages: they load scripts from elsewhere."""
    app = FastAPI(
        title="Coatcheck control plane",
        version=version,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    for router in routers:
        app.include_router(router)
    install(app)
    describe = functools.cache(lambda: _described(app))
    app.openapi = describe  # type: ignore[method-assign]

    async def document(_: Request) -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(describe))

    app.add_route("/openapi.json", document, include_in_schema=False)
    return app


def _described(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    document["components"]["securitySchemes"] = _SECURITY_SCHEMES
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["security"] = _SECURITY[operation["tags"][0]]
    return document
