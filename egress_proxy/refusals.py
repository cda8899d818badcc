"""A refusal as the client gets it: problem details in an HTTP/1.1 reply (RFC 9457).

Rule: everything in it is ours. It quotes nothing of the request, so it can neither leak nor be used to inject.
"""

import json
from http import HTTPStatus
from typing import Final

from control_plane.contract.headers import PROBLEM_JSON, REFUSAL_HEADER, REQUEST_ID_HEADER, SHOULD_RETRY_HEADER
from control_plane.contract.refusal import RETRY_MAY_HELP, Refusal, RefusalCode, problem

ALLOWED_METHODS: Final = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, CONNECT"
_CHALLENGES: Final = ('Basic realm="coatcheck"', "Bearer")
"""Basic first: most clients that get their credential from a proxy URL know nothing else (RFC 7617, RFC 6750)."""


def render_refusal(refusal: Refusal, *, request_id: str, close: bool, is_head: bool = False) -> bytes:
    """The whole reply. The code is the reason phrase too: pip, npm, requests and others show that, and no body."""
    told = problem(refusal, request_id=request_id)
    told["message"] = f"{refusal.code.value}: {told['detail']}"  # what SDKs show of an error (RFC 9457 §3.2)
    body = json.dumps(told, ensure_ascii=False).encode()
    lines = [
        f"HTTP/1.1 {refusal.status} {refusal.code.value}",
        f"Content-Type: {PROBLEM_JSON}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        f"{REFUSAL_HEADER}: {refusal.code.value}",
        f"{REQUEST_ID_HEADER}: {request_id}",
        *_more(refusal),
    ]
    if close:
        lines.append("Connection: close")
    head = "\r\n".join([*lines, "", ""]).encode("ascii")
    return head if is_head else head + body


def _more(refusal: Refusal) -> list[str]:
    lines = []
    if refusal.code not in RETRY_MAY_HELP:
        lines.append(f"{SHOULD_RETRY_HEADER}: false")
    if refusal.retry_after_seconds is not None:
        lines.append(f"Retry-After: {refusal.retry_after_seconds}")
    if refusal.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        lines += [f"Proxy-Authenticate: {challenge}" for challenge in _CHALLENGES]
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        lines += [f"WWW-Authenticate: {challenge}" for challenge in _CHALLENGES]
    if refusal.code is RefusalCode.METHOD_NOT_ALLOWED:
        lines.append(f"Allow: {ALLOWED_METHODS}")
    return lines
