"""`POST /v1/turn`, `DELETE /v1/sessions/{id}`, and the two questions an orchestrator asks.

Rule: 401 comes before anything else; a body is not even read for somebody unknown. A session and its owner come from
the verified token, never from a body. Every "no" is a problem (RFC 9457) from the closed list, and what nobody expected
is `internal_error` without a word of the exception.
"""

import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.contract.headers import (
    PROBLEM_JSON,
    REFUSAL_HEADER,
    REQUEST_ID_HEADER,
    SHOULD_RETRY_HEADER,
    SUBJECT_HEADER,
)
from control_plane.contract.refusal import RETRY_MAY_HELP, Refusal, RefusalCode, RefusedError, problem
from runtime.core.session_token import token_invalid
from runtime.core.subject import acting_subject, token_required
from runtime.core.turn import MAX_INPUT_CHARACTERS
from runtime.endings import Endings
from runtime.metrics import CONTENT_TYPE
from runtime.ports import Identity, Sessions
from runtime.runner import Runner, Turn

MAX_BODY_BYTES: Final = 4 * MAX_INPUT_CHARACTERS + 4_096

log = structlog.get_logger("runtime.api")

_BY_STATUS: Final = {
    404: Refusal(RefusalCode.NOT_FOUND, "there is no such route", "GET /openapi.json lists them"),
    405: Refusal(RefusalCode.METHOD_NOT_ALLOWED, "this route does not know that method", "see Allow"),
}
_MALFORMED: Final = Refusal(RefusalCode.MALFORMED_REQUEST, "the request cannot be read")


class TurnBody(BaseModel):
    """What a turn begins with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: Annotated[str, Field(min_length=1, max_length=MAX_INPUT_CHARACTERS)]
    session_id: str | None = None
    """May be left out: the session token says which session it is. Another one is `session_mismatch`."""


class TurnAnswer(BaseModel):
    """What a turn ends with."""

    session_id: str
    output: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes call, wired by `bootstrap`."""

    identity: Identity
    sessions: Sessions
    runner: Runner
    endings: Endings
    ready: Callable[[], Awaitable[bool]]
    metrics: Callable[[], bytes]
    new_request_id: Callable[[], str]


def make_app(parts: Parts) -> ASGIApp:
    """The whole HTTP interface."""
    app = FastAPI(title="Coatcheck runtime", version="1", docs_url=None, redoc_url=None)
    app.state.parts = parts
    app.add_exception_handler(RefusedError, _answer_refusal)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_unexpected)
    app.add_api_route("/v1/turn", turn, methods=["POST"], response_model=TurnAnswer, openapi_extra=_TURN_OPENAPI)
    app.add_api_route(
        "/v1/sessions/{session}", end_session, methods=["DELETE"], status_code=204, openapi_extra=_END_OPENAPI
    )
    app.add_api_route("/healthz", healthz, methods=["GET"])
    app.add_api_route("/readyz", readyz, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=PlainTextResponse)
    app.openapi().setdefault("components", {})["securitySchemes"] = {"session_token": _SESSION_TOKEN}
    return _OutermostBorder(app, parts.new_request_id)


async def turn(request: Request, response: Response) -> TurnAnswer:
    """Carry out one turn and answer with the model's words."""
    parts: Parts = request.app.state.parts
    # (1) Who is this? Nothing else happens before that is known.
    unverified_token = _bearer(request)
    claims = await parts.identity.verify(unverified_token)
    # (2) Who acts, by the subject rules.
    body = await _body(request)
    acting = acting_subject(
        claims,
        named_subjects=request.headers.getlist(SUBJECT_HEADER),
        addressed_session=body.session_id,
        recorded_owner=parts.sessions.owner(claims.session),
    )
    # (3) The turn itself.
    output = await parts.runner.carry_out(
        Turn(acting.owner, claims.session, claims.session_expires_at, unverified_token, body.input)
    )
    response.headers["cache-control"] = "no-store"
    return TurnAnswer(session_id=claims.session, output=output)


async def end_session(request: Request, session: str) -> Response:
    """Ended by its owner: at the control plane first, then here. Again changes nothing."""
    parts: Parts = request.app.state.parts
    claims = await parts.identity.verify(_bearer(request))
    if session != claims.session:  # another one is nobody's that we would tell of
        raise RefusedError(Refusal(RefusalCode.SESSION_NOT_FOUND, "there is no such session", "see its token"))
    acting_subject(
        claims,
        named_subjects=request.headers.getlist(SUBJECT_HEADER),
        addressed_session=session,
        recorded_owner=parts.sessions.owner(claims.session),
    )
    await parts.endings.end(claims.session)
    return Response(status_code=204, headers={"cache-control": "no-store"})


async def healthz() -> dict[str, str]:
    """Alive."""
    return {"status": "ok"}


async def metrics(request: Request) -> Response:
    """For whoever watches: when our certificates end."""
    parts: Parts = request.app.state.parts
    return Response(parts.metrics(), media_type=CONTENT_TYPE)


async def readyz(request: Request) -> dict[str, str]:
    """Ready: session tokens can be verified, and we are not on our way out."""
    parts: Parts = request.app.state.parts
    if not await parts.ready():
        raise RefusedError(
            Refusal(
                RefusalCode.CREDENTIAL_UNAVAILABLE,
                detail="the control plane's keys are not known, or this process is draining",
                hint="see that the control plane is up",
                retry_after_seconds=2,
            )
        )
    return {"status": "ready"}


def _bearer(request: Request) -> str:
    """The token in `Authorization`. Raises `RefusedError`; `token_required` only where there is no such header."""
    values = request.headers.getlist("authorization")
    if not values:
        raise token_required()
    scheme, _, token = values[0].partition(" ")
    if len(values) != 1 or scheme.lower() != "bearer" or not token.strip():
        raise token_invalid()  # there, and not good: never "no token"
    return token.strip()


async def _body(request: Request) -> TurnBody:
    """Raises `RefusedError`: `body_too_large`, `malformed_request`, `invalid_field`."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            raise _refused(RefusalCode.BODY_TOO_LARGE, f"a turn's body is at most {MAX_BODY_BYTES} bytes")
    try:
        return TurnBody.model_validate_json(bytes(raw))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise _refused(RefusalCode.MALFORMED_REQUEST, "the body is not JSON") from None
        where = ".".join(str(part) for part in first["loc"] if part in TurnBody.model_fields) or "body"
        raise _refused(RefusalCode.INVALID_FIELD, f"{where}: {first['type']}") from None


def _refused(code: RefusalCode, detail: str) -> RefusedError:
    return RefusedError(
        Refusal(code, detail=detail, hint='send {"input": "…", "session_id": "…"}, the latter optional')
    )


# --- refusals on their way out ---------------------------------------------------------------------------------------


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return refusal_response(error.refusal, request_id=request.scope["coatcheck.request_id"])


async def _answer_http(request: Request, error: Exception) -> Response:
    """A route or method that does not exist."""
    assert isinstance(error, HTTPException)
    refusal = _BY_STATUS.get(error.status_code, _MALFORMED)
    answer = refusal_response(refusal, request_id=request.scope["coatcheck.request_id"])
    answer.headers.update(error.headers or {})
    return answer


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    """What nobody expected: `internal_error`, and its type and place in the log. Its message may hold a value."""
    request_id, frames = request.scope["coatcheck.request_id"], traceback.extract_tb(error.__traceback__)
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    log.error("internal_error", request_id=request_id, error=type(error).__name__, at=at)
    refusal = Refusal(RefusalCode.INTERNAL_ERROR, "the runtime failed", "its log has more under this request id")
    return refusal_response(refusal, request_id=request_id)


def refusal_response(refusal: Refusal, *, request_id: str) -> Response:
    """The refusal as this edge answers it."""
    log.info("refused", code=refusal.code.value, request_id=request_id)
    headers = {REFUSAL_HEADER: refusal.code.value, "cache-control": "no-store"}
    if refusal.code not in RETRY_MAY_HELP:
        headers[SHOULD_RETRY_HEADER] = "false"
    if refusal.retry_after_seconds is not None:
        headers["retry-after"] = str(refusal.retry_after_seconds)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(problem(refusal, request_id=request_id), refusal.status, headers, PROBLEM_JSON)


class _OutermostBorder:
    """Gives every request an id, and lets no exception out: it was answered, or the connection ends."""

    def __init__(self, app: ASGIApp, new_request_id: Callable[[], str]) -> None:
        self._app = app
        self._new_request_id = new_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["coatcheck.request_id"] = self._new_request_id()
        answered = False

        async def send_with_id(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # already answered by `_answer_unexpected`; half an answer must not look like a whole one
            if not answered:
                raise ConnectionAbortedError from None


_PROBLEM: Final[dict[str, Any]] = {"description": "A refusal", "content": {PROBLEM_JSON: {}}}
_SESSION_TOKEN: Final = {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}
_TURN_OPENAPI: Final[dict[str, Any]] = {
    "security": [{"session_token": []}],
    "requestBody": {"required": True, "content": {"application/json": {"schema": TurnBody.model_json_schema()}}},
    "responses": {str(status): _PROBLEM for status in (400, 401, 403, 404, 409, 413, 422, 429, 500, 502, 503, 504)},
}
_END_OPENAPI: Final[dict[str, Any]] = {
    "security": [{"session_token": []}],
    "responses": {str(status): _PROBLEM for status in (400, 401, 404, 500, 503)},
}
