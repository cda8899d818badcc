"""JSON Web Tokens of others: read, and checked in all that does not depend on who issued them (RFC 7515, 7519, 8725).

Rule: a string becomes an `UnverifiedToken`, of which nothing is true yet; each check raises or says nothing. The
algorithm is one that the reader allows, never one that the token picks, and nothing in a header names a place to look.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import jwt

from control_plane.core.jwk import ALGORITHMS, VerificationKey, named

MAX_TOKEN_BYTES: Final = 16_384
CLOCK_SKEW_SECONDS: Final = 30
PROXY_AUDIENCE: Final = "coatcheck-proxy"
"""Who a workload's token for the egress proxy is for. Such a token is no proof towards the control plane."""

OWN_TYP_PREFIX: Final = "coatcheck-"
"""Of the types of our own tokens: no issuer's token has one."""

_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]+")
"""RFC 7515 §2: without padding. A signature that is not there is none."""
_FOREIGN_KEYS: Final = ("jku", "jwk", "x5u", "x5c")
_MAX_KEY_ID: Final = 512


class Others(StrEnum):
    """What happens where a token names more than it has to."""

    REFUSE = "refuse"
    IGNORE = "ignore"


class InvalidTokenError(ValueError):
    """Not a token that is believed. `reason` is for the trail and a dry run; whoever presented it hears none."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ExpiredTokenError(InvalidTokenError):
    """It would be, and is over."""


@dataclass(frozen=True, slots=True, repr=False)
class UnverifiedToken:
    """What a string says of itself. Nothing of it is true yet."""

    text: str
    header: Mapping[str, Any]
    payload: Mapping[str, Any]

    @property
    def issuer(self) -> str | None:
        found = self.payload.get("iss")
        return found if isinstance(found, str) else None

    @property
    def trust_domain(self) -> str | None:
        """`spiffe://<trust domain>` of its subject."""
        subject = self.payload.get("sub")
        return trust_domain_of(subject) if isinstance(subject, str) else None

    @property
    def key_id(self) -> str | None:
        found = self.header.get("kid")
        return found if isinstance(found, str) else None


_SPIFFE_ID: Final = re.compile(r"(spiffe://[a-z0-9._-]{1,255})(?:/[A-Za-z0-9._-]+)*")


def trust_domain_of(spiffe_id: str) -> str | None:
    """`spiffe://<trust domain>`; None for what is no SPIFFE id (SPIFFE ID §2)."""
    found = _SPIFFE_ID.fullmatch(spiffe_id)
    return found[1] if found else None


def read(text: str) -> UnverifiedToken:
    """Raises `InvalidTokenError` for what is no JWT in compact form (RFC 7515 §7.1)."""
    if len(text) > MAX_TOKEN_BYTES or not text.isascii():
        raise InvalidTokenError("form")
    parts = text.split(".")
    if len(parts) != 3:
        raise InvalidTokenError("form")
    if not all(_BASE64URL.fullmatch(part) for part in parts):
        raise InvalidTokenError("form")
    return UnverifiedToken(text, header=_object(parts[0]), payload=_object(parts[1]))


def check_header(header: Mapping[str, Any], *, algorithms: Sequence[str], token_types: Sequence[str]) -> None:
    """Raises `InvalidTokenError`."""
    # RFC 8725 §3.11: the type first, so that no other kind of JWT is ever taken for this one.
    if _token_type(header) not in token_types:
        raise InvalidTokenError("typ: not a type of token that is accepted here")
    # RFC 7515 §4.1.11: an extension that must be understood is not understood here.
    if "crit" in header:
        raise InvalidTokenError("crit: the token demands an extension")
    if header.get("alg") not in algorithms or header["alg"] not in ALGORITHMS:
        raise InvalidTokenError("alg: not an algorithm that this issuer is allowed")
    # RFC 8725 §3.10: a token that brings its own key, or says where to get one, is not looked at further.
    if any(name in header for name in _FOREIGN_KEYS):
        raise InvalidTokenError("header: it brings a key, or names a place for one")
    key_id = header.get("kid")
    if key_id is not None and (not isinstance(key_id, str) or len(key_id) > _MAX_KEY_ID):
        raise InvalidTokenError("kid: not a key's name")


def check_signature(token: UnverifiedToken, keys: Sequence[VerificationKey]) -> None:
    """Raises `InvalidTokenError`."""
    algorithm = token.header["alg"]
    for key in named(keys, token.key_id):
        if algorithm in key.algorithms and _is_signed(token.text, key, algorithm):
            return
    raise InvalidTokenError("signature: by none of the issuer's keys")


def check_audience(payload: Mapping[str, Any], audiences: Sequence[str], *, others: Others) -> None:
    """Whole strings only: neither a part of one nor a list inside a list is an audience. Raises `InvalidTokenError`."""
    found = payload.get("aud")
    named_in_token = [found] if isinstance(found, str) else found
    if not isinstance(named_in_token, list) or not all(isinstance(each, str) for each in named_in_token):
        raise InvalidTokenError("aud: missing, or not text")
    if PROXY_AUDIENCE in named_in_token and PROXY_AUDIENCE not in audiences:
        raise InvalidTokenError("aud: the token is for the egress proxy")
    if not set(named_in_token) & set(audiences):
        raise InvalidTokenError("aud: the token is for somebody else")
    if others is Others.REFUSE and set(named_in_token) - set(audiences):
        raise InvalidTokenError("aud: the token is for somebody else too")


def check_times(payload: Mapping[str, Any], *, now: float, max_lifetime_seconds: float) -> None:
    """Raises `InvalidTokenError`."""
    expires_at = moment(payload, "exp")
    if expires_at is None:
        raise InvalidTokenError("exp: missing")
    if not now < expires_at:
        raise ExpiredTokenError("exp: the token is over")
    if expires_at > now + max_lifetime_seconds + CLOCK_SKEW_SECONDS:
        raise InvalidTokenError("exp: further away than this issuer's tokens may be good for")
    for name in ("iat", "nbf"):
        begins_at = moment(payload, name)
        if begins_at is not None and begins_at > now + CLOCK_SKEW_SECONDS:
            raise InvalidTokenError(f"{name}: in the future")


def moment(payload: Mapping[str, Any], name: str) -> float | None:
    """Unix seconds; None where the claim is not there. Raises `InvalidTokenError`."""
    found = payload.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise InvalidTokenError(f"{name}: not a number")
    try:
        seconds = float(found)
    except OverflowError:
        raise InvalidTokenError(f"{name}: not a moment") from None
    if not math.isfinite(seconds):
        raise InvalidTokenError(f"{name}: not a moment")
    return seconds


def _is_signed(text: str, key: VerificationKey, algorithm: str) -> bool:
    try:
        jwt.PyJWS().decode_complete(text, key.public, algorithms=[algorithm])
    except (jwt.PyJWTError, ValueError, TypeError):
        return False
    return True


def _object(segment: str) -> Mapping[str, Any]:
    try:
        raw = base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError, binascii.Error):
        raise InvalidTokenError("form") from None
    if not isinstance(value, dict):
        raise InvalidTokenError("form")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # RFC 7519 §4: names are unique, or two readers believe different ones.
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _token_type(header: Mapping[str, Any]) -> str | None:
    found = header.get("typ", "")
    # RFC 7515 §4.1.9: a media type, whose "application/" may be left out; RFC 9110 §8.3.1: in any case.
    return found.lower().removeprefix("application/") if isinstance(found, str) else None
