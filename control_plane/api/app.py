"""The HTTP application: one module a kind of caller, errors at one edge, one document that describes it.

What is asked thousands of times a second goes straight to its handler: it reads its own request, and what a framework
does around it would cost as much as the handler itself. It is a route like the others all the same, in the document and
for every other method.

Rule: the document is made when it is first asked for, beside the loop. It takes longer than the whole rest of a start.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.api.edge import ROUTE, Edge
from control_plane.api.errors import ANSWERED, answer_to, install
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


Handler = Callable[[Request], Awaitable[Response]]


def build_app(
    routers: Sequence[APIRouter],
    *,
    straight: Mapping[tuple[str, str], Handler],
    version: str,
    new_request_id: Callable[[], str],
    counters: Counters,
) -> ASGIApp:
    """The application inside its edge. `straight`: by method and path, what the framework is passed by for."""
    app = _Straight(straight, otherwise=build_inner_app(routers, version=version))
    return Edge(app, new_request_id=new_request_id, counters=counters)


class _Straight:
    def __init__(self, handlers: Mapping[tuple[str, str], Handler], *, otherwise: ASGIApp) -> None:
        self._handlers = handlers
        self._otherwise = otherwise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get((scope["method"], scope["path"]))
        if handler is None:
            await self._otherwise(scope, receive, send)
            return
        scope[ROUTE] = scope["path"]
        request = Request(scope, receive)
        try:
            response = await handler(request)
        except ANSWERED as error:
            response = answer_to(request, error)
        await response(scope, receive, send)


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
