"""Session tokens as the runtime takes them: every claim accounted for (JWT: RFC 7519; best practice: RFC 8725).

Rule: the runtime verifies and cannot mint. `typ` is looked at before anything else, the algorithm is ours to choose,
the issuer is the one control plane we belong to, the audience is our own client id. Why a token was refused is told to
nobody: the answer is `token_invalid`, or `token_expired` for one that was good.
"""

from collections.abc import Mapping
from typing import Any, Final

from control_plane.contract.caller import ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.headers import SESSION_TOKEN_TYP
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from runtime.core.subject import SessionClaims

ALGORITHM: Final = "EdDSA"  # RFC 8037, Ed25519
SCOPE: Final = "turn:write"
MAX_TOKEN_BYTES: Final = 8_192
CLOCK_SKEW_SECONDS: Final = 30


def token_invalid() -> RefusedError:
    """The one answer to every token that is not good."""
    return RefusedError(
        Refusal(
            RefusalCode.TOKEN_INVALID,
            detail="the session token is not valid here",
            hint="ask the control plane for a token of this session, for this runtime",
        )
    )


def check_header(unverified_header: Mapping[str, Any]) -> str:
    """The id of the key that a token claims to be signed with. Raises `RefusedError`."""
    # RFC 8725 §3.11: the type first, so that no other kind of JWT is ever taken for a session token.
    if unverified_header.get("typ") != SESSION_TOKEN_TYP:
        raise token_invalid()
    if unverified_header.get("alg") != ALGORITHM:
        raise token_invalid()
    if "crit" in unverified_header:  # RFC 7515 §4.1.11: we understand no extension
        raise token_invalid()
    return _text(unverified_header, "kid")


def check_claims(signed_payload: Mapping[str, Any], *, issuer: str, audience: ClientId, now: float) -> SessionClaims:
    """The claims of a payload whose signature was verified. Raises `RefusedError`."""
    if _text(signed_payload, "iss") != issuer:
        raise token_invalid()
    if _text(signed_payload, "aud") != audience:
        raise token_invalid()
    if _text(signed_payload, "scope") != SCOPE:
        raise token_invalid()
    if _seconds(signed_payload, "iat") > now + CLOCK_SKEW_SECONDS:
        raise token_invalid()
    claims = SessionClaims(
        tenant=TenantId(_text(signed_payload, "tenant")),
        subject=SubjectId(_text(signed_payload, "sub")),
        session=SessionId(_text(signed_payload, "sid")),
        session_expires_at=_seconds(signed_payload, "session_exp"),
    )
    if now >= _seconds(signed_payload, "exp") or now >= claims.session_expires_at:
        raise RefusedError(
            Refusal(
                RefusalCode.TOKEN_EXPIRED,
                detail="the session token is over",
                hint="ask the control plane for a fresh one",
            )
        )
    return claims


def _text(claims: Mapping[str, Any], name: str) -> str:
    value = claims.get(name)
    if not isinstance(value, str) or not value:
        raise token_invalid()
    return value


def _seconds(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise token_invalid()
    return float(value)
