"""`/v1/metrics` for the platform's administrators and auditors, and the same page alone, on a listener of its own."""

from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.access import Access
from control_plane.api.guard import AdminRoutes
from control_plane.core.policy import Action
from control_plane.metrics import CONTENT_TYPE, Metrics

PAGE: Final = "/metrics"
_TEXT: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@dataclass(frozen=True, slots=True)
class MetricsApi:
    access: Access
    metrics: Metrics

    def router(self) -> APIRouter:
        routes = AdminRoutes(self.access)
        routes.add("GET", PAGE, self.page, Action.METRICS_READ, response_class=PlainTextResponse, responses=_TEXT)
        return routes.router

    async def page(self) -> Response:
        return Response(await self.metrics.page(), media_type=CONTENT_TYPE)


def metrics_alone(metrics: Metrics) -> ASGIApp:
    """Nothing but the page. Who may read it is for the network to say: it holds no secret and nobody's name."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] != PAGE or scope["method"] not in ("GET", "HEAD"):
            await PlainTextResponse("there is /metrics here, and nothing else\n", status_code=404)(scope, receive, send)
            return
        await Response(await metrics.page(), media_type=CONTENT_TYPE)(scope, receive, send)

    return app
