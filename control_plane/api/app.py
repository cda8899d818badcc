"""The HTTP application: one module a kind of caller, errors at one edge."""

from collections.abc import Callable, Sequence

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from control_plane.api.edge import Edge
from control_plane.api.errors import install


def build_app(routers: Sequence[APIRouter], *, version: str, new_request_id: Callable[[], str]) -> ASGIApp:
    """The application inside its edge."""
    return Edge(build_inner_app(routers, version=version), new_request_id=new_request_id)


def build_inner_app(routers: Sequence[APIRouter], *, version: str) -> FastAPI:
    """Without the interactive pages: they load scripts from elsewhere."""
    app = FastAPI(
        title="Coatcheck control plane",
        version=version,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    for router in routers:
        app.include_router(router)
    install(app)
    return app
