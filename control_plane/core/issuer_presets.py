"""What is known of the issuers that people use, as data: a start for a trusted issuer, every field of it replaceable.

Rule: a preset says how such tokens look, never whom to believe: uses and tenants are the administrator's to say. Where
a preset lists an issuer's standard claims, others are ignored, because such an issuer adds claims as it goes; where it
does not, an unknown claim refuses the token. Sources: each preset names its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from control_plane.core.identity import IdentifiedBy
from control_plane.core.tokens import Others

_RSA: Final = ("RS256", "RS384", "RS512")
_PSS: Final = ("PS256", "PS384", "PS512")
_EC: Final = ("ES256", "ES384", "ES512")

_OIDC_STANDARD: Final = (
    # OpenID Connect Core 1.0 §2 and §5.1
    *("acr", "amr", "auth_time", "azp", "at_hash", "c_hash", "nonce", "sid", "name", "given_name", "family_name"),
    *("middle_name", "nickname", "preferred_username", "profile", "picture", "website", "email", "email_verified"),
    *("gender", "birthdate", "zoneinfo", "locale", "phone_number", "phone_number_verified", "address", "updated_at"),
    # RFC 9068 §2.2
    *("client_id", "scope", "groups", "roles", "entitlements"),
)


@dataclass(frozen=True, slots=True)
class IssuerPreset:
    title: str
    issuer: str | None = None
    """Its `iss`, where there is only one such issuer."""
    identified_by: IdentifiedBy = IdentifiedBy.ISS
    discovery: bool = True
    algorithms: tuple[str, ...] = (*_RSA, *_PSS, *_EC, "EdDSA")
    token_types: tuple[str, ...] = ("", "jwt")
    other_audiences: Others = Others.REFUSE
    unknown_claims: Others = Others.REFUSE
    max_lifetime_seconds: int = 86_400
    claims: Mapping[str, Any] = field(default_factory=lambda: {"subject": {"claim": "sub"}})
    narrowed_by: tuple[str, ...] = ()
    """Anybody can get a token of this issuer: one of these claims has to be required, or to decide the tenant."""


NO_PRESET: Final = IssuerPreset("anything else", discovery=False, claims={})

ISSUER_PRESETS: Final[Mapping[str, IssuerPreset]] = {
    # https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/
    "kubernetes": IssuerPreset(
        "Kubernetes ServiceAccount tokens",
        algorithms=(*_RSA, *_EC),
        claims={"subject": {"claim": "sub"}, "ignore": ["kubernetes.io"]},
    ),
    # https://github.com/spiffe/spiffe/blob/main/standards/JWT-SVID.md
    "spiffe": IssuerPreset(
        "SPIFFE JWT-SVIDs",
        identified_by=IdentifiedBy.TRUST_DOMAIN,
        discovery=False,
        algorithms=(*_RSA, *_PSS, *_EC),
        token_types=("", "jwt", "jose"),
        max_lifetime_seconds=3_600,
    ),
    # https://docs.github.com/en/actions/reference/security/oidc
    "github_actions": IssuerPreset(
        "GitHub Actions OIDC",
        issuer="https://token.actions.githubusercontent.com",
        algorithms=("RS256",),
        unknown_claims=Others.IGNORE,
        max_lifetime_seconds=3_600,
        claims={
            "subject": {"claim": "sub"},
            "ignore": [
                *("actor", "actor_id", "base_ref", "check_run_id", "enterprise", "enterprise_id", "environment"),
                *("environment_node_id", "event_name", "head_ref", "issuer_scope", "job_workflow_ref"),
                *("job_workflow_sha", "ref", "ref_protected", "ref_type", "repository", "repository_id"),
                *("repository_owner", "repository_owner_id", "repository_visibility", "run_attempt", "run_id"),
                *("run_number", "runner_environment", "sha", "workflow", "workflow_ref", "workflow_sha"),
            ],
        },
        narrowed_by=("sub", "repository", "repository_id", "repository_owner", "repository_owner_id", "enterprise"),
    ),
    # https://www.keycloak.org/docs/latest/server_admin/#_protocol-mappers
    "keycloak": IssuerPreset(
        "Keycloak",
        algorithms=(*_RSA, *_PSS, *_EC, "EdDSA"),
        # Keycloak names the resource servers of all the caller's roles in one token's `aud`.
        other_audiences=Others.IGNORE,
        unknown_claims=Others.IGNORE,
        claims={
            "subject": {"claim": "sub"},
            "roles": {"claim": "/realm_access/roles"},
            # Its refresh, logout and action tokens are JWTs of the same keys.
            "require": {"typ": ["Bearer", "ID"]},
            "ignore": [*_OIDC_STANDARD, "session_state", "allowed-origins", "resource_access"],
        },
    ),
    # https://openid.net/specs/openid-connect-core-1_0.html
    "oidc": IssuerPreset(
        "OpenID Connect",
        token_types=("", "jwt", "at+jwt"),
        unknown_claims=Others.IGNORE,
        claims={"subject": {"claim": "sub"}, "ignore": [*_OIDC_STANDARD]},
    ),
}


def merged_claims(preset: IssuerPreset, given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's table with what was given in its place; requirements and ignored claims add up."""
    merged = {**preset.claims, **given}
    if isinstance(given.get("require", {}), Mapping) and "require" in merged:
        merged["require"] = {**preset.claims.get("require", {}), **given.get("require", {})}
    if isinstance(given.get("ignore", []), list) and "ignore" in merged:
        merged["ignore"] = [*preset.claims.get("ignore", []), *given.get("ignore", [])]
    return merged
