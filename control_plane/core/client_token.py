"""Client tokens: what a client with `subject:assert` shows a runtime to name a subject (RFC 6749 §4.4, RFC 9068).

Rule: such a token names a client, never a subject, and is good at one runtime only. Its type (`typ`) differs from every
other token's, so that none is taken for another (RFC 8725 §3.11); every claim is accounted for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from control_plane.contract.caller import ClientId, TenantId
from control_plane.core.records import SUBJECT_ASSERT
from control_plane.core.session_token import (
    CLOCK_SKEW_SECONDS,
    ExpiredSessionTokenError,
    InvalidSessionTokenError,
    number_of,
    text_of,
)

LIFETIME_SECONDS: Final = 300


@dataclass(frozen=True, slots=True)
class ClientClaims:
    """What a verified client token says."""

    issuer: str
    audience: ClientId
    """The runtime that it is for."""
    client: ClientId
    tenant: TenantId
    issued_at: float
    expires_at: float
    token_id: str


def to_payload(claims: ClientClaims) -> dict[str, Any]:
    return {
        "iss": claims.issuer,
        "aud": claims.audience,
        "sub": claims.client,
        "client_id": claims.client,
        "tenant": claims.tenant,
        "scope": SUBJECT_ASSERT,
        "iat": int(claims.issued_at),
        "exp": int(claims.expires_at),
        "jti": claims.token_id,
    }


def check_claims(
    signed_payload: Mapping[str, Any], *, issuer: str, audience: ClientId | None, now: float
) -> ClientClaims:
    """The claims of a payload whose signature was verified. Raises `InvalidSessionTokenError`.

    `audience` is the client that presents the token; None where it is looked at by the control plane itself.
    """
    claims = ClientClaims(
        issuer=text_of(signed_payload, "iss"),
        audience=ClientId(text_of(signed_payload, "aud")),
        client=ClientId(text_of(signed_payload, "sub")),
        tenant=TenantId(text_of(signed_payload, "tenant")),
        issued_at=number_of(signed_payload, "iat"),
        expires_at=number_of(signed_payload, "exp"),
        token_id=text_of(signed_payload, "jti"),
    )
    if claims.issuer != issuer:
        raise InvalidSessionTokenError("iss")
    if audience is not None and claims.audience != audience:
        raise InvalidSessionTokenError("aud")
    if text_of(signed_payload, "client_id") != claims.client:
        raise InvalidSessionTokenError("client_id")
    if signed_payload.get("scope") != SUBJECT_ASSERT:
        raise InvalidSessionTokenError("scope")
    if claims.issued_at > now + CLOCK_SKEW_SECONDS:
        raise InvalidSessionTokenError("iat")
    if not now < claims.expires_at:
        raise ExpiredSessionTokenError("exp")
    return claims
