"""Every exception's answer, at the one edge: problem details (RFC 9457).

Rule: an expected "no" answers with its code; anything else is `internal_error` without the exception's message. What a
field held is never repeated, only its name.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from control_plane.contract.headers import PROBLEM_JSON, REFUSAL_HEADER, SHOULD_RETRY_HEADER
from control_plane.contract.refusal import RETRY_MAY_HELP, Refusal, RefusalCode, RefusedError, problem
from control_plane.core.names import IN_WORDS
from control_plane.ports import UnreadableRowError

_log = structlog.get_logger("control_plane.api")

ANSWERED: Final = (RefusedError, HTTPException, ClientDisconnect, UnreadableRowError)
"""What a handler that reads its own request may raise without having failed."""

INTERNAL_ERROR: Final = Refusal(
    RefusalCode.INTERNAL_ERROR, "the control plane failed", "the log has more under this request id"
)
_UNREADABLE: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "a stored record is not readable",
    "the log says of which kind (row_unreadable); a newer release may have written it",
)

_BY_STATUS: Final[Mapping[int, Refusal]] = {
    404: Refusal(RefusalCode.NOT_FOUND, "there is no such route", "GET /openapi.json lists them"),
    405: Refusal(RefusalCode.METHOD_NOT_ALLOWED, "this route does not know that method", "see Allow"),
    408: Refusal(RefusalCode.REQUEST_TIMEOUT, "the request's head did not come in time", "send it again"),
    413: Refusal(RefusalCode.BODY_TOO_LARGE, "the request's body is too large", "send less at once"),
    414: Refusal(RefusalCode.URI_TOO_LONG, "the request's target is too long", "send a shorter one"),
    431: Refusal(
        RefusalCode.HEADERS_TOO_LARGE, "the request's header fields are too large", "send fewer or shorter ones"
    ),
}
_RETRY_AFTER_SECONDS: Final = 5
_NAME = re.compile(r"[a-z_]{1,32}|[0-9]{1,4}")
_MALFORMED: Final = Refusal(
    RefusalCode.MALFORMED_REQUEST, "the request cannot be read", "send it as GET /openapi.json describes"
)


def answer(refusal: Refusal, *, request_id: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The refusal as a response."""
    return JSONResponse(
        problem(refusal, request_id=request_id),
        status_code=refusal.status,
        media_type=PROBLEM_JSON,
        headers={**refusal_headers(refusal), **(headers or {})},
    )


def refusal_headers(refusal: Refusal) -> dict[str, str]:
    headers = {REFUSAL_HEADER: refusal.code.value}
    if refusal.code not in RETRY_MAY_HELP:
        headers[SHOULD_RETRY_HEADER] = "false"
    if refusal.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["Retry-After"] = str(refusal.retry_after_seconds or _RETRY_AFTER_SECONDS)
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        # RFC 9110 §11.6.1: both challenges, since a wrong token's answer is the same on every route.
        headers["WWW-Authenticate"] = 'Bearer realm="coatcheck", Basic realm="coatcheck"'
    return headers


def refusal_of_status(status: int) -> Refusal:
    return _BY_STATUS.get(status, _MALFORMED)


def answer_to(request: Request, error: Exception) -> JSONResponse:
    """What whoever asked hears of the exception."""
    headers: Mapping[str, str] | None = None
    match error:
        case RefusedError():
            refusal = _with_something_to_do(error.refusal, request)
        case HTTPException():
            refusal, headers = refusal_of_status(error.status_code), error.headers
        case RequestValidationError():
            refusal = _with_something_to_do(_invalid(error.errors()), request)
        case ClientDisconnect():  # it went before its request was whole: no fault of ours, and nobody hears it
            refusal = _MALFORMED
        case UnreadableRowError():
            refusal = _UNREADABLE
        case _:
            refusal = INTERNAL_ERROR
    return answer(refusal, request_id=request_id(request), headers=headers)


def install(app: FastAPI) -> None:
    """Registers the answers of every kind of exception."""

    async def answered(request: Request, error: Exception) -> JSONResponse:
        return answer_to(request, error)

    for kind in (*ANSWERED, RequestValidationError, Exception):
        app.add_exception_handler(kind, answered)


def request_id(request: Request) -> str:
    """As the edge made it."""
    value = request.scope.get("coatcheck.request_id")
    return value if isinstance(value, str) else ""


def _with_something_to_do(refusal: Refusal, request: Request) -> Refusal:
    """Of a field that is not as it should be: where its route's fields are described."""
    if refusal.hint or refusal.code is not RefusalCode.INVALID_FIELD:
        return refusal
    route = getattr(request.scope.get("route"), "path", "this route")
    field, named, _ = refusal.detail.partition(": ")
    what = field if named else "what the detail says"
    hint = f"correct {what} and send it again; GET /openapi.json describes the fields of {request.method} {route}"
    return replace(refusal, hint=hint)


def _invalid(errors: Any) -> Refusal:
    # What was sent and is wrong says more than what was not sent.
    first = next((error for error in errors if error["type"] != "missing"), errors[0])
    if first["type"] == "json_invalid":
        return Refusal(RefusalCode.MALFORMED_REQUEST, "the body is not JSON", "send one JSON object")
    place = [str(part) for part in first["loc"] if part not in ("body", "path", "query")]
    # Somebody may have put a value where a name belongs: only what looks like a name is repeated.
    field = ".".join(part if _NAME.fullmatch(part) else "…" for part in place) or "body"
    return Refusal(RefusalCode.INVALID_FIELD, f"{field}: {_expectation(first)}")


def _expectation(error: Mapping[str, Any]) -> str:
    # Pydantic's own sentences say what was expected; ours, raised in validators, say it too. Neither quotes the input.
    match error["type"]:
        case "extra_forbidden":
            return "there is no such field"
        case "missing":
            return "is missing"
        case "model_type" | "dataclass_type" | "model_attributes_type":
            return "an object is expected"  # and not the name of a class of ours
        case "string_pattern_mismatch" if (words := IN_WORDS.get(error["ctx"]["pattern"])) is not None:
            return words
        case "value_error":
            return str(error["msg"]).removeprefix("Value error, ")
        case _:
            return str(error["msg"])[:200]
