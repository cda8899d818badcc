"""A token endpoint: asked with a form, answered with JSON (RFC 6749 §5).

Rule: nothing that a provider says goes any further than a token and one of the known codes. What cannot be read is not
guessed at; a code that is not known counts as "no answer", which is asked again, not as a "no", which is reported.
"""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

import jwt

from control_plane.contract.secret import Secret
from control_plane.ports import (
    Outbound,
    OutboundError,
    OutboundFailure,
    OutboundReply,
    OutboundRequest,
    ProviderAnswer,
    ProviderError,
    ProviderFailure,
)

SECONDS: Final = 4.0
"""For one question: a proxy that waits for the answer gives up after five."""
FORM: Final = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
_TOO_MANY: Final = 429
_SERVER_ERROR: Final = 500
_UNAUTHORIZED: Final = 401
_MAX_SECONDS: Final = 10 * 365 * 86_400

F = ProviderFailure

# RFC 6749 §4.1.2.1, §5.2; RFC 8707 §2; and what large providers say instead.
CODES: Final[Mapping[str, ProviderFailure]] = {
    "invalid_grant": F.CONSENT_ENDED,
    "bad_refresh_token": F.CONSENT_ENDED,
    "token_revoked": F.CONSENT_ENDED,
    "invalid_client": F.CLIENT_REFUSED,
    "unauthorized_client": F.CLIENT_REFUSED,
    "incorrect_client_credentials": F.CLIENT_REFUSED,
    "invalid_scope": F.REQUEST_REFUSED,
    "invalid_target": F.REQUEST_REFUSED,
    "access_denied": F.REQUEST_REFUSED,
    "unsupported_grant_type": F.REQUEST_REFUSED,
    "invalid_request": F.REQUEST_REFUSED,
    "temporarily_unavailable": F.UNAVAILABLE,
    "server_error": F.UNAVAILABLE,
    "slow_down": F.UNAVAILABLE,
}

_UNHEARD: Final = frozenset({OutboundFailure.TIMEOUT, OutboundFailure.UNREADABLE})
_SAYS_MORE: Final = frozenset({OutboundFailure.DENIED_ADDRESS, OutboundFailure.UNVERIFIED})
_NO_ANSWER: Final = frozenset({OutboundFailure.UNREACHABLE, OutboundFailure.TIMEOUT, *_SAYS_MORE})


async def send(outbound: Outbound, request: OutboundRequest) -> OutboundReply:
    """Raises `ProviderError`."""
    try:
        return await outbound.send(request)
    except OutboundError as error:
        raise ProviderError(
            F.UNAVAILABLE if error.failure in _NO_ANSWER else F.UNUSABLE,
            code=error.failure.value if error.failure in _SAYS_MORE else "",
            unheard=error.sent and error.failure in _UNHEARD,
        ) from None


async def post_form(
    outbound: Outbound, url: str, form: Mapping[str, str | None], headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The answer's members, of an answer with success. Raises `ProviderError`."""
    body = urlencode({name: value for name, value in form.items() if value is not None}).encode("ascii")
    reply = await send(outbound, OutboundRequest("POST", url, {**FORM, **(headers or {})}, body, seconds=SECONDS))
    return successful(reply)


def successful(reply: OutboundReply) -> dict[str, Any]:
    """The members of an answer with success. Raises `ProviderError`."""
    found = members(reply)
    code = found.get("error") if found else None
    # There are providers that say no with a status of 200.
    if reply.status >= 300 or (code is not None and "access_token" not in (found or {})):
        raise refused(reply, code if isinstance(code, str) else "")
    if found is None:
        raise ProviderError(F.UNUSABLE)
    return found


def refused(reply: OutboundReply, code: str) -> ProviderError:
    if reply.status == _TOO_MANY or reply.status >= _SERVER_ERROR:
        return ProviderError(F.UNAVAILABLE, retry_after_seconds=retry_after(reply))
    if code in CODES:
        return ProviderError(CODES[code], code=code)
    return ProviderError(F.CLIENT_REFUSED if reply.status == _UNAUTHORIZED else F.UNUSABLE)


def retry_after(reply: OutboundReply) -> float | None:
    text = reply.headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def members(reply: OutboundReply) -> dict[str, Any] | None:
    """Of a JSON object; None where it is none."""
    try:
        found = json.loads(reply.body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def bearer(found: Mapping[str, Any]) -> ProviderAnswer:
    """RFC 6749 §5.1. Raises `ProviderError` for what is no bearer token."""
    token, type_ = found.get("access_token"), found.get("token_type", "Bearer")
    if not isinstance(token, str) or not token or not isinstance(type_, str) or type_.lower() != "bearer":
        raise ProviderError(F.UNUSABLE)
    return ProviderAnswer(Secret(token), seconds(found.get("expires_in")))


def seconds(value: Any) -> float | None:
    """Some write the number as text. Raises `ProviderError` for what is no number of seconds."""
    if value is None:
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ProviderError(F.UNUSABLE)
    return float(min(value, _MAX_SECONDS))


async def signed(claims: Mapping[str, Any], *, key: str, algorithm: str, key_id: str | None = None) -> str:
    """A JWT (RFC 7519), signed in a thread: an RSA key takes milliseconds to load. Raises `ProviderError`."""
    headers = {"kid": key_id} if key_id else None
    try:
        return await asyncio.to_thread(jwt.encode, dict(claims), key, algorithm, headers)
    except (ValueError, TypeError, jwt.PyJWTError):
        raise ProviderError(F.CLIENT_REFUSED) from None
