"""Every expected "no", from one closed list, with its status at each edge.

Rule: a refusal explains itself (what was expected, what to do) and never quotes a placeholder, a secret, a query string
or a body. A code that is not in this list does not exist. (Problem details: RFC 9457; OAuth errors: RFC 6749 §5.2.)
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, assert_never

from control_plane.contract.headers import REFUSAL_TYPE_PREFIX


class RefusalCode(StrEnum):
    # 400
    MALFORMED_REQUEST = "malformed_request"
    AMBIGUOUS_FRAMING = "ambiguous_framing"
    SUBJECT_CONFLICT = "subject_conflict"
    SESSION_MISMATCH = "session_mismatch"
    CREDENTIAL_REQUIRED = "credential_required"
    CREDENTIAL_AMBIGUOUS = "credential_ambiguous"
    ENDPOINT_UNRESOLVED = "endpoint_unresolved"
    # 401 and 407
    TOKEN_REQUIRED = "token_required"
    TOKEN_INVALID = "token_invalid"
    TOKEN_EXPIRED = "token_expired"
    PROXY_AUTHENTICATION_REQUIRED = "proxy_authentication_required"
    # 403
    UNKNOWN_PLACEHOLDER = "unknown_placeholder"
    EXPIRED_PLACEHOLDER = "expired_placeholder"
    REVOKED_PLACEHOLDER = "revoked_placeholder"
    CALLER_MISMATCH = "caller_mismatch"
    DESTINATION_DENIED = "destination_denied"
    DESTINATION_PRIVATE = "destination_private"
    PLAINTEXT_CREDENTIAL = "plaintext_credential"
    PLACEMENT_DENIED = "placement_denied"
    METHOD_DENIED = "method_denied"
    PATH_DENIED = "path_denied"
    DIRECT_NOT_ALLOWED = "direct_not_allowed"
    FOREIGN_CREDENTIAL = "foreign_credential"
    FORBIDDEN = "forbidden"
    # 404
    SESSION_NOT_FOUND = "session_not_found"
    CREDENTIAL_NOT_FOUND = "credential_not_found"
    NOT_FOUND = "not_found"
    """Of the control plane's API alone: no such route, tenant, grant, rule, client."""
    # 405, 408, 413, 414, 415, 431
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TIMEOUT = "request_timeout"
    BODY_TOO_LARGE = "body_too_large"
    URI_TOO_LONG = "uri_too_long"
    ENCODING_DENIED = "encoding_denied"
    HEADERS_TOO_LARGE = "headers_too_large"
    # 409
    SESSION_BUSY = "session_busy"
    TURN_IN_PROGRESS = "turn_in_progress"
    TURN_NOT_RUNNING = "turn_not_running"
    ROTATION_IN_PROGRESS = "rotation_in_progress"
    """The credential is being rotated already, or was, since the caller last looked."""
    ROTATION_NOT_RUNNING = "rotation_not_running"
    # 421 and 505
    MISDIRECTED_REQUEST = "misdirected_request"
    PROTOCOL_DENIED = "protocol_denied"
    # 422
    INVALID_FIELD = "invalid_field"
    SECRET_REQUIRED = "secret_required"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    # 429
    RATE_LIMITED = "rate_limited"
    SPEND_LIMIT_EXCEEDED = "spend_limit_exceeded"
    OVERLOADED = "overloaded"
    # 500 and 508
    INTERNAL_ERROR = "internal_error"
    LOOP_DETECTED = "loop_detected"
    # 502
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    UPSTREAM_UNVERIFIED = "upstream_unverified"
    UPSTREAM_PROTOCOL_ERROR = "upstream_protocol_error"
    RESPONSE_LEAK_BLOCKED = "response_leak_blocked"
    # 503
    CREDENTIAL_UNAVAILABLE = "credential_unavailable"
    CA_UNAVAILABLE = "ca_unavailable"
    STORE_UNAVAILABLE = "store_unavailable"
    AUDIT_UNAVAILABLE = "audit_unavailable"
    SANDBOX_UNAVAILABLE = "sandbox_unavailable"
    DRAINING = "draining"
    # 504
    UPSTREAM_TIMEOUT = "upstream_timeout"


C = RefusalCode


def status_of(code: RefusalCode) -> int:
    """The HTTP status of a refusal, the same at the proxy and at the control plane's and runtime's JSON edges."""
    match code:
        case (
            C.MALFORMED_REQUEST
            | C.AMBIGUOUS_FRAMING
            | C.SUBJECT_CONFLICT
            | C.SESSION_MISMATCH
            | C.CREDENTIAL_REQUIRED
            | C.CREDENTIAL_AMBIGUOUS
            | C.ENDPOINT_UNRESOLVED
        ):
            return 400
        case C.TOKEN_REQUIRED | C.TOKEN_INVALID | C.TOKEN_EXPIRED:
            return 401
        case C.PROXY_AUTHENTICATION_REQUIRED:
            return 407
        case (
            C.UNKNOWN_PLACEHOLDER
            | C.EXPIRED_PLACEHOLDER
            | C.REVOKED_PLACEHOLDER
            | C.CALLER_MISMATCH
            | C.DESTINATION_DENIED
            | C.DESTINATION_PRIVATE
            | C.PLAINTEXT_CREDENTIAL
            | C.PLACEMENT_DENIED
            | C.METHOD_DENIED
            | C.PATH_DENIED
            | C.DIRECT_NOT_ALLOWED
            | C.FOREIGN_CREDENTIAL
            | C.FORBIDDEN
        ):
            return 403
        case C.SESSION_NOT_FOUND | C.CREDENTIAL_NOT_FOUND | C.NOT_FOUND:
            return 404
        case C.METHOD_NOT_ALLOWED:
            return 405
        case C.REQUEST_TIMEOUT:
            return 408
        case C.SESSION_BUSY | C.TURN_IN_PROGRESS | C.TURN_NOT_RUNNING | C.ROTATION_IN_PROGRESS | C.ROTATION_NOT_RUNNING:
            return 409
        case C.BODY_TOO_LARGE:
            return 413
        case C.URI_TOO_LONG:
            return 414
        case C.ENCODING_DENIED:
            return 415
        case C.MISDIRECTED_REQUEST:
            return 421
        case C.INVALID_FIELD | C.SECRET_REQUIRED | C.IDEMPOTENCY_CONFLICT:
            return 422
        case C.RATE_LIMITED | C.SPEND_LIMIT_EXCEEDED | C.OVERLOADED:
            return 429
        case C.HEADERS_TOO_LARGE:
            return 431
        case C.INTERNAL_ERROR:
            return 500
        case C.UPSTREAM_UNREACHABLE | C.UPSTREAM_UNVERIFIED | C.UPSTREAM_PROTOCOL_ERROR | C.RESPONSE_LEAK_BLOCKED:
            return 502
        case (
            C.CREDENTIAL_UNAVAILABLE
            | C.CA_UNAVAILABLE
            | C.STORE_UNAVAILABLE
            | C.AUDIT_UNAVAILABLE
            | C.SANDBOX_UNAVAILABLE
            | C.DRAINING
        ):
            return 503
        case C.UPSTREAM_TIMEOUT:
            return 504
        case C.PROTOCOL_DENIED:
            return 505
        case C.LOOP_DETECTED:
            return 508
        case _:
            assert_never(code)


RETRY_MAY_HELP: Final = frozenset(
    {C.REQUEST_TIMEOUT, C.SESSION_BUSY, C.TURN_IN_PROGRESS, C.RATE_LIMITED, C.OVERLOADED, C.UPSTREAM_UNREACHABLE}
    | {C.UPSTREAM_TIMEOUT, C.CREDENTIAL_UNAVAILABLE, C.STORE_UNAVAILABLE, C.AUDIT_UNAVAILABLE, C.DRAINING}
    | {C.CA_UNAVAILABLE, C.SANDBOX_UNAVAILABLE}
)
"""Everything else is answered with `x-should-retry: false`, because SDKs retry 408, 409, 429 and 5xx by themselves."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One "no". `detail` says what was wrong, `hint` what to do; both are ours, never the request's own text."""

    code: RefusalCode
    detail: str
    hint: str = ""
    retry_after_seconds: int | None = None
    true_code: RefusalCode | None = None
    """What audit and alarm record where the caller is told less (another tenant's hears `unknown_placeholder`)."""

    @property
    def status(self) -> int:
        return status_of(self.code)

    @property
    def audited_code(self) -> RefusalCode:
        return self.true_code or self.code


class RefusedError(Exception):
    """Carries a `Refusal` up to the edge that answers it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.code.value)
        self.refusal = refusal


def problem(refusal: Refusal, *, request_id: str) -> dict[str, Any]:
    """The refusal as RFC 9457 problem details."""
    return {
        "type": REFUSAL_TYPE_PREFIX + refusal.code.value,
        "title": refusal.code.value.replace("_", " ").capitalize(),
        "status": refusal.status,
        "code": refusal.code.value,
        "detail": refusal.detail,
        "hint": refusal.hint,
        "request_id": request_id,
    }
