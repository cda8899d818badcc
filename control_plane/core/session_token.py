"""Session tokens: which claims one has, and the check of every claim (JWT: RFC 7519; best practice: RFC 8725).

Rule: `unverified` becomes `SessionClaims` only through `check_claims`, which accounts for every claim; the type
(`typ`) is looked at before anything else, and the one algorithm is ours to choose, not the token's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from control_plane.contract.caller import ClientId, SessionId, SubjectId, TenantId
from control_plane.core.delegation import Chain, InvalidDelegationError, from_act, to_act
from control_plane.core.records import Session

ALGORITHM: Final = "EdDSA"  # RFC 8037, Ed25519
LIFETIME_SECONDS: Final = 300
SCOPE: Final = "turn:write"
MAX_TOKEN_BYTES: Final = 8_192
CLOCK_SKEW_SECONDS: Final = 30


class InvalidSessionTokenError(ValueError):
    """Not a session token of ours, or not for this use. The reason stays inside."""


class ExpiredSessionTokenError(InvalidSessionTokenError):
    """Ours, and over."""


@dataclass(frozen=True, slots=True)
class SessionClaims:
    """What a verified session token says."""

    issuer: str
    audience: ClientId
    subject: SubjectId
    tenant: TenantId
    session: SessionId
    roles: tuple[str, ...]
    issued_at: float
    expires_at: float
    session_expires_at: float
    token_id: str
    act: Chain = ()
    """Who acts for the subject, as the session has it."""
    may_act: Mapping[str, Any] | None = None

    def are_of(self, session: Session) -> bool:
        """Whether the session that is named is the one that is meant, as the store has it."""
        return session.id == self.session and session.tenant == self.tenant and session.subject == self.subject


def to_payload(claims: SessionClaims) -> dict[str, Any]:
    act = to_act(claims.act)
    return {
        "iss": claims.issuer,
        "aud": claims.audience,
        "sub": claims.subject,
        "tenant": claims.tenant,
        "sid": claims.session,
        "roles": list(claims.roles),
        "scope": SCOPE,
        "iat": int(claims.issued_at),
        "exp": int(claims.expires_at),
        "session_exp": int(claims.session_expires_at),
        "jti": claims.token_id,
        **({"act": act} if act is not None else {}),
        **({"may_act": dict(claims.may_act)} if claims.may_act is not None else {}),
    }


def check_header(unverified_header: Mapping[str, Any], *, typ: str) -> str:
    """The key id of a token that may be one of ours. Raises `InvalidSessionTokenError`."""
    # RFC 8725 §3.11: the type first, so that no other kind of JWT is ever taken for this one.
    if unverified_header.get("typ") != typ:
        raise InvalidSessionTokenError("typ")
    if unverified_header.get("alg") != ALGORITHM:
        raise InvalidSessionTokenError("alg")
    if "crit" in unverified_header:  # RFC 7515 §4.1.11: we understand no extension
        raise InvalidSessionTokenError("crit")
    key_id = unverified_header.get("kid")
    if not isinstance(key_id, str):
        raise InvalidSessionTokenError("kid")
    return key_id


def check_claims(
    signed_payload: Mapping[str, Any], *, issuer: str, audience: ClientId | None, now: float
) -> SessionClaims:
    """The claims of a payload whose signature was verified. Raises `InvalidSessionTokenError`.

    `audience` is the client that presents the token; None where its owner presents it to the control plane itself.
    """
    claims = SessionClaims(
        issuer=text_of(signed_payload, "iss"),
        audience=ClientId(text_of(signed_payload, "aud")),
        subject=SubjectId(text_of(signed_payload, "sub")),
        tenant=TenantId(text_of(signed_payload, "tenant")),
        session=SessionId(text_of(signed_payload, "sid")),
        roles=_texts(signed_payload, "roles"),
        issued_at=number_of(signed_payload, "iat"),
        expires_at=number_of(signed_payload, "exp"),
        session_expires_at=number_of(signed_payload, "session_exp"),
        token_id=text_of(signed_payload, "jti"),
        act=_act(signed_payload),
        may_act=_may_act(signed_payload),
    )
    if claims.issuer != issuer:
        raise InvalidSessionTokenError("iss")
    if audience is not None and claims.audience != audience:
        raise InvalidSessionTokenError("aud")
    if signed_payload.get("scope") != SCOPE:
        raise InvalidSessionTokenError("scope")
    if claims.issued_at > now + CLOCK_SKEW_SECONDS:
        raise InvalidSessionTokenError("iat")
    if not now < min(claims.expires_at, claims.session_expires_at):
        raise ExpiredSessionTokenError("exp")
    return claims


def _act(payload: Mapping[str, Any]) -> Chain:
    try:
        return from_act(payload.get("act"))
    except InvalidDelegationError:
        raise InvalidSessionTokenError("act") from None


def _may_act(payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
    value = payload.get("may_act")
    if value is not None and not isinstance(value, dict):
        raise InvalidSessionTokenError("may_act")
    return value


def text_of(payload: Mapping[str, Any], name: str) -> str:
    value = payload.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidSessionTokenError(name)
    return value


def _texts(payload: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = payload.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidSessionTokenError(name)
    return tuple(value)


def number_of(payload: Mapping[str, Any], name: str) -> float:
    value = payload.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidSessionTokenError(name)
    return float(value)
