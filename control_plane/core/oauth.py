"""The form of a token request, and OAuth's words for a "no" (RFC 6749 §3.2 and §5.2, RFC 8693 §2.1 and §2.2.2).

Rule: unknown parameters are ignored and empty ones are absent (RFC 6749 §3.2), but a parameter that comes twice is an
error, because two readers would take a different one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError


class OAuthErrorCode(StrEnum):
    INVALID_REQUEST = "invalid_request"
    INVALID_CLIENT = "invalid_client"
    UNAUTHORIZED_CLIENT = "unauthorized_client"
    UNSUPPORTED_GRANT_TYPE = "unsupported_grant_type"
    INVALID_SCOPE = "invalid_scope"
    INVALID_TARGET = "invalid_target"
    """RFC 8693 §2.2.2."""
    UNSUPPORTED_TOKEN_TYPE = "unsupported_token_type"
    """RFC 7009 §2.2.1."""
    SLOW_DOWN = "slow_down"
    TEMPORARILY_UNAVAILABLE = "temporarily_unavailable"
    SERVER_ERROR = "server_error"


class OAuthRefusedError(RefusedError):
    """A refusal whose OAuth error is more than its code says."""

    def __init__(self, error: OAuthErrorCode, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.error = error


PARAMETERS: Final = (
    "grant_type",
    "subject_token",
    "subject_token_type",
    "audience",
    "resource",
    "scope",
    "requested_token_type",
    "actor_token",
    "actor_token_type",
    "requested_subject",
    "proxy_credential",
)


@dataclass(frozen=True, slots=True, repr=False)
class TokenRequest:
    """The parameters of one request; an absent one is None. Not yet believed in anything."""

    grant_type: str | None
    subject_token: str | None
    subject_token_type: str | None
    audience: str | None
    resource: str | None
    scope: str | None
    requested_token_type: str | None
    actor_token: str | None
    actor_token_type: str | None
    requested_subject: str | None
    proxy_credential: str | None


def read_token_request(pairs: Sequence[tuple[str, str]]) -> TokenRequest:
    """Raises `OAuthRefusedError(invalid_request)`."""
    return TokenRequest(**{name: single(pairs, name) for name in PARAMETERS})


def single(pairs: Sequence[tuple[str, str]], name: str) -> str | None:
    """The one value of a parameter, None when it is absent or empty. Raises `OAuthRefusedError(invalid_request)`."""
    values = [value for key, value in pairs if key == name]
    if len(values) > 1:
        raise invalid_request(f"the parameter '{name}' is there more than once")
    return values[0] if values and values[0] else None


def invalid_request(
    detail: str, *, code: RefusalCode = RefusalCode.MALFORMED_REQUEST, hint: str = ""
) -> OAuthRefusedError:
    return OAuthRefusedError(OAuthErrorCode.INVALID_REQUEST, Refusal(code, detail, hint))


C = RefusalCode


def error_of(code: RefusalCode) -> tuple[int, OAuthErrorCode]:
    """Status and `error` of a refusal at the OAuth edge."""
    match code:
        case C.CREDENTIAL_NOT_FOUND | C.CREDENTIAL_AMBIGUOUS | C.ENDPOINT_UNRESOLVED | C.DIRECT_NOT_ALLOWED:
            return 400, OAuthErrorCode.INVALID_TARGET
        case C.TOKEN_REQUIRED | C.TOKEN_INVALID | C.TOKEN_EXPIRED | C.PROXY_AUTHENTICATION_REQUIRED:
            return 401, OAuthErrorCode.INVALID_CLIENT
        case C.FORBIDDEN:
            return 400, OAuthErrorCode.UNAUTHORIZED_CLIENT
        case C.RATE_LIMITED | C.SPEND_LIMIT_EXCEEDED | C.OVERLOADED:
            return 429, OAuthErrorCode.SLOW_DOWN
        case (
            C.CREDENTIAL_UNAVAILABLE
            | C.CA_UNAVAILABLE
            | C.STORE_UNAVAILABLE
            | C.AUDIT_UNAVAILABLE
            | C.SANDBOX_UNAVAILABLE
            | C.DRAINING
        ):
            return 503, OAuthErrorCode.TEMPORARILY_UNAVAILABLE
        case C.BODY_TOO_LARGE:
            return 413, OAuthErrorCode.INVALID_REQUEST
        case C.INTERNAL_ERROR | C.LOOP_DETECTED:
            return 500, OAuthErrorCode.SERVER_ERROR
        case (
            C.MALFORMED_REQUEST
            | C.AMBIGUOUS_FRAMING
            | C.SUBJECT_CONFLICT
            | C.SESSION_MISMATCH
            | C.CREDENTIAL_REQUIRED
            | C.UNKNOWN_PLACEHOLDER
            | C.EXPIRED_PLACEHOLDER
            | C.REVOKED_PLACEHOLDER
            | C.CALLER_MISMATCH
            | C.DESTINATION_DENIED
            | C.DESTINATION_PRIVATE
            | C.PLAINTEXT_CREDENTIAL
            | C.PLACEMENT_DENIED
            | C.METHOD_DENIED
            | C.PATH_DENIED
            | C.FOREIGN_CREDENTIAL
            | C.SESSION_NOT_FOUND
            | C.NOT_FOUND
            | C.METHOD_NOT_ALLOWED
            | C.REQUEST_TIMEOUT
            | C.URI_TOO_LONG
            | C.ENCODING_DENIED
            | C.HEADERS_TOO_LARGE
            | C.SESSION_BUSY
            | C.TURN_IN_PROGRESS
            | C.TURN_NOT_RUNNING
            | C.ROTATION_IN_PROGRESS
            | C.ROTATION_NOT_RUNNING
            | C.MISDIRECTED_REQUEST
            | C.PROTOCOL_DENIED
            | C.INVALID_FIELD
            | C.SECRET_REQUIRED
            | C.IDEMPOTENCY_CONFLICT
            | C.UPSTREAM_UNREACHABLE
            | C.UPSTREAM_UNVERIFIED
            | C.UPSTREAM_PROTOCOL_ERROR
            | C.RESPONSE_LEAK_BLOCKED
            | C.UPSTREAM_TIMEOUT
        ):
            return 400, OAuthErrorCode.INVALID_REQUEST
        case _:
            assert_never(code)
