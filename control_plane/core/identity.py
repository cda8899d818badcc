"""Tokens of trusted issuers: from an `UnverifiedToken` to a `VerifiedIdentity`, by an issuer's claims table.

`verify` is the only way from one to the other, in numbered steps (JWT: RFC 7519; best practice: RFC 8725). Rule: an
issuer is believed in exactly what its record says: for these uses, these audiences and algorithms, by keys of its own
source, and in the claims of its table (`core/claims.py`). What happens to a claim that the table does not know is the
explicit setting `unknown_claims`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from control_plane.contract.caller import SubjectId, TenantId
from control_plane.core.claims import (
    REGISTERED,
    ClaimsTable,
    admin_roles,
    derived_roles,
    derived_subject,
    derived_tenant,
    first_step,
    require_claims,
    unknown_claims,
)
from control_plane.core.jwk import VerificationKey
from control_plane.core.policy import HeldRole
from control_plane.core.tokens import (
    InvalidTokenError,
    Others,
    UnverifiedToken,
    check_audience,
    check_header,
    check_signature,
    check_times,
    moment,
    trust_domain_of,
)


class Use(StrEnum):
    """What an issuer's tokens are good for. Each has to be said."""

    SESSION = "session"
    """The subject token of a person or a workload."""
    CLIENT = "client"
    """A workload's proof that it is a registered client."""
    ADMIN = "admin"
    """The administrators' API."""
    PROXY = "proxy"
    """A workload's proof, towards an egress proxy, that it is a registered client."""


class IdentifiedBy(StrEnum):
    """How a token is known to be this issuer's."""

    ISS = "iss"
    TRUST_DOMAIN = "trust_domain"
    """JWT-SVIDs need have no `iss`: the trust domain of `sub` names the issuer (SPIFFE JWT-SVID §3.1)."""


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where public keys come from: exactly one of the three."""

    discovery: str | None = None
    """The issuer whose OpenID Connect Discovery document names the key set."""
    jwks_url: str | None = None
    pinned: tuple[Mapping[str, Any], ...] = ()
    max_age_seconds: float = 300.0
    """A key that was taken out of the set verifies nothing after this, while the set can be fetched."""
    max_stale_seconds: float = 3_600.0
    """And after this in any case: how long the last good set serves while it cannot be."""


@dataclass(frozen=True, slots=True)
class TrustedIssuer:
    """An issuer whose tokens are believed, and exactly in what."""

    name: str
    preset: str | None
    issuer: str
    """Its `iss`, or `spiffe://<trust domain>`."""
    identified_by: IdentifiedBy
    uses: frozenset[Use]
    audiences: tuple[str, ...]
    """One of these is in `aud`."""
    other_audiences: Others
    """Whether `aud` may name somebody else too, who could then use the token here."""
    algorithms: tuple[str, ...]
    token_types: tuple[str, ...]
    """Values of the header's `typ`, in lower case; the empty text is none at all."""
    discovery: bool
    jwks_url: str | None
    keys: tuple[Mapping[str, Any], ...]
    claims: ClaimsTable
    unknown_claims: Others
    max_lifetime_seconds: int
    """How far from now `exp` may be."""
    keys_max_age_seconds: int
    keys_max_stale_seconds: int
    created_at: float
    updated_at: float

    @property
    def key_source(self) -> KeySource:
        return KeySource(
            discovery=self.issuer if self.discovery else None,
            jwks_url=self.jwks_url,
            pinned=self.keys,
            max_age_seconds=self.keys_max_age_seconds,
            max_stale_seconds=self.keys_max_stale_seconds,
        )


@dataclass(frozen=True, slots=True)
class VerifiedIdentity:
    """Who a verified token speaks for."""

    issuer: str
    """The name of the trusted issuer."""
    issuer_id: str
    """Its `iss`, or `spiffe://<trust domain>`."""
    subject: SubjectId
    tenant: TenantId | None
    """None only where the issuer's tokens are no subject tokens."""
    roles: tuple[str, ...]
    admin_roles: frozenset[HeldRole]
    issued_at: float | None
    expires_at: float
    token_id: str | None
    act: Mapping[str, Any] | None
    """Who acts for the subject already (RFC 8693 §4.1)."""
    may_act: Mapping[str, Any] | None
    """Who may (RFC 8693 §4.4)."""


def is_trust_domain(text: str) -> bool:
    return trust_domain_of(text) == text


def explain(token: UnverifiedToken, issuer: TrustedIssuer) -> list[tuple[str, str]]:
    """Each claim of the token and what becomes of it, for whoever sets up an issuer."""
    table = issuer.claims
    rules = {"subject": table.subject, "tenant": table.tenant, "roles": table.roles, "admin roles": table.admin}
    found = []
    for claim in sorted(token.payload):
        made_of_it = [what for what, rule in rules.items() if rule is not None and first_step(rule.claim) == claim]
        made_of_it += ["a required value" for path in table.require if first_step(path) == claim]
        if made_of_it:
            found.append((claim, f"gives {', '.join(made_of_it)}"))
        elif claim in REGISTERED:
            found.append((claim, "checked for every issuer"))
        elif claim in table.ignore:
            found.append((claim, "known and ignored"))
        else:
            found.append((claim, f"not in the table: {issuer.unknown_claims.value}"))
    return found


def precheck(token: UnverifiedToken, issuer: TrustedIssuer, *, use: Use, audiences: Sequence[str], now: float) -> None:
    """All that can be refused before a key is looked for. Raises `InvalidTokenError`."""
    # (1) What it is to be used for is something that this issuer's tokens are good for.
    if use not in issuer.uses:
        raise InvalidTokenError(f"use: this issuer's tokens are not for '{use.value}'")
    # (2) The header: a type and an algorithm that the issuer was allowed, and nothing that asks for more.
    check_header(token.header, algorithms=issuer.algorithms, token_types=issuer.token_types)
    # (3) From whom, for whom, and when.
    _check_issuer(token, issuer)
    # Whoever else a token is for could show it to a proxy, and a proxy has no second proof to ask for.
    others = Others.REFUSE if use is Use.PROXY else issuer.other_audiences
    check_audience(token.payload, audiences, others=others)
    check_times(token.payload, now=now, max_lifetime_seconds=issuer.max_lifetime_seconds)


def verify(
    token: UnverifiedToken,
    issuer: TrustedIssuer,
    keys: Sequence[VerificationKey],
    *,
    use: Use,
    audiences: Sequence[str],
    now: float,
) -> VerifiedIdentity:
    """Raises `InvalidTokenError`. `keys` came from the issuer's own source, `audiences` are the ones for this use."""
    # (1) Everything that it says of itself and that can be wrong without a key: see above.
    precheck(token, issuer, use=use, audiences=audiences, now=now)
    # (2) The signature, by a key of the issuer's own source that is for this algorithm.
    check_signature(token, keys)
    # (3) Every claim is one that is looked at here or that the table knows.
    if issuer.unknown_claims is Others.REFUSE and (unknown := unknown_claims(token.payload, issuer.claims)):
        raise InvalidTokenError(f"claims: not in the table: {', '.join(unknown)}")
    # (4) What has to have a value has it.
    require_claims(token.payload, issuer.claims)
    # (5) Who it is.
    return _identity(token.payload, issuer, use)


def _check_issuer(token: UnverifiedToken, issuer: TrustedIssuer) -> None:
    found = token.issuer if issuer.identified_by is IdentifiedBy.ISS else token.trust_domain
    if found != issuer.issuer:
        raise InvalidTokenError("iss: not this issuer's")


def _identity(payload: Mapping[str, Any], issuer: TrustedIssuer, use: Use) -> VerifiedIdentity:
    table = issuer.claims
    tenant = derived_tenant(payload, table.tenant) if table.tenant is not None else None
    if use is Use.SESSION and tenant is None:
        raise InvalidTokenError("tenant: the table does not say whose tokens these are")
    token_id = payload.get("jti")
    return VerifiedIdentity(
        issuer=issuer.name,
        issuer_id=issuer.issuer,
        subject=derived_subject(payload, table.subject),
        tenant=tenant,
        roles=derived_roles(payload, table.roles),
        admin_roles=admin_roles(payload, table.admin, tenant) if use is Use.ADMIN else frozenset(),
        issued_at=moment(payload, "iat"),
        expires_at=moment(payload, "exp") or 0.0,
        token_id=token_id if isinstance(token_id, str) else None,
        act=_optional_object(payload, "act"),
        may_act=_optional_object(payload, "may_act"),
    )


def _optional_object(payload: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    found = payload.get(name)
    if found is not None and not isinstance(found, dict):
        raise InvalidTokenError(f"{name}: not an object")
    return found
