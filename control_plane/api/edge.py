"""The outermost layer of the HTTP server: request ids, size limits, the access log, the last resort.

Rule: whatever happens inside, the caller gets a well-formed answer, and the log gets one line without a query, a header
or a value.
"""

import time
import traceback
from collections.abc import Callable
from typing import Final

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from control_plane.api.errors import INTERNAL_ERROR, answer, refusal_of_status
from control_plane.contract.headers import AUDIT_HEADER, REFUSAL_HEADER, REQUEST_ID_HEADER
from control_plane.contract.placeholder import redact
from control_plane.metrics import Counters
from control_plane.trail import noticing_unrecorded

MAX_HEAD_BYTES: Final = 128 * 1024
MAX_TARGET_BYTES: Final = 8 * 1024
MAX_BODY_BYTES: Final = 256 * 1024
MAX_AUDIT_BODY_BYTES: Final = 8 * 1024 * 1024

ROUTE: Final = "coatcheck.route"
"""Where the scope says which route it was, if the framework was passed by."""

_OF_COURSE: Final = frozenset({"/healthz", "/readyz", "/metrics", "/internal/injector"})
"""Asked every few seconds by every probe, scraper and proxy: in the log when something is the matter, or by `debug`."""

_REFUSAL: Final = REFUSAL_HEADER.lower().encode()

_log = structlog.get_logger("control_plane.access")


class Edge:
    def __init__(self, app: ASGIApp, *, new_request_id: Callable[[], str], counters: Counters) -> None:
        self._app = app
        self._counters = counters
        self._new_request_id = new_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = scope["coatcheck.request_id"] = self._new_request_id()
        outgoing = _Outgoing(send, request_id)
        began = time.perf_counter()
        try:
            if (status := _oversized(scope)) is not None:
                await _refuse(status, scope, receive, outgoing, request_id)
            else:
                # Whatever is logged on the way, however deep, says of which request it is.
                with bound_contextvars(request_id=request_id), noticing_unrecorded() as outgoing.unrecorded:
                    await self._app(scope, _limited(receive, _body_limit(scope)), outgoing)
        except Exception as error:
            _log.error("internal_error", request_id=request_id, error=type(error).__name__, at=_where(error))
            if outgoing.status is None:
                await answer(INTERNAL_ERROR, request_id=request_id)(scope, receive, outgoing)
        finally:
            seconds = time.perf_counter() - began
            self._counters.request(
                method=scope["method"],
                route=scope[ROUTE] if ROUTE in scope else getattr(scope.get("route"), "path", ""),
                status=outgoing.status or 0,
                refusal=outgoing.refusal,
                seconds=seconds,
            )
            of_course = scope["path"] in _OF_COURSE and (outgoing.status or 500) < 400
            (_log.debug if of_course else _log.info)(
                "request",
                request_id=request_id,
                method=scope["method"],
                path=redact(scope["path"])[:256],
                status=outgoing.status,
                milliseconds=round(seconds * 1000, 2),
            )


class _Outgoing:
    """Adds what every answer has, and remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._headers = [
            (REQUEST_ID_HEADER.lower().encode(), request_id.encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        self.status: int | None = None
        self.refusal: str | None = None
        """The code that was answered, if it was a refusal."""
        self.unrecorded: list[str] = []
        """What was done although the audit trail could not take it."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status >= 400:
                headers = message.get("headers", ())
                self.refusal = next((value.decode() for name, value in headers if name == _REFUSAL), None)
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
            if self.unrecorded:
                message["headers"].append((AUDIT_HEADER.lower().encode(), b"unavailable"))
        await self._send(message)


def _oversized(scope: Scope) -> int | None:
    if len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") > MAX_TARGET_BYTES:
        return 414
    if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEAD_BYTES:
        return 431
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return 413 if declared.isdigit() and int(declared) > _body_limit(scope) else None


def _body_limit(scope: Scope) -> int:
    return MAX_AUDIT_BODY_BYTES if scope["path"] == "/internal/audit" else MAX_BODY_BYTES


def _limited(receive: Receive, limit: int) -> Receive:
    """Counts what comes in: a chunked body declares no length."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise HTTPException(413)
        return message

    return counted


async def _refuse(status: int, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
    # The rest of the message is not read: the connection cannot be used again.
    response = answer(refusal_of_status(status), request_id=request_id, headers={"Connection": "close"})
    await response(scope, receive, send)


def _where(error: BaseException) -> list[str]:
    """File and line of the innermost frames. No source text, no values."""
    return [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-4:]]
