"""`/v1/issuers`: whom this control plane believes. For the platform's administrator; its auditor may look."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request, Response
from pydantic import Field, StringConstraints

from control_plane.access import Access
from control_plane.api.guard import AdminRoutes, actor
from control_plane.api.lists import Items
from control_plane.api.messages import MAX_ITEMS, CredentialName, Whole, _Incoming, _Outgoing
from control_plane.core.claims import table_to_json
from control_plane.core.identity import IdentifiedBy, TrustedIssuer, Use
from control_plane.core.issuer_presets import ISSUER_PRESETS
from control_plane.core.jwk import MAX_KEYS
from control_plane.core.names import CREDENTIAL_NAME
from control_plane.core.policy import Action
from control_plane.core.tokens import MAX_TOKEN_BYTES, Others
from control_plane.credentials import invalid_field
from control_plane.issuers import DryRun, IssuerKeeper, NewIssuer

IssuerPath = Annotated[str, Path(pattern=CREDENTIAL_NAME)]
_Url = Annotated[str, StringConstraints(min_length=1, max_length=512)]
_Short = Annotated[str, StringConstraints(min_length=1, max_length=512)]
_OrIgnore = Literal["refuse", "ignore"]


class IssuerIn(_Incoming):
    """A trusted issuer. What is left out comes from the preset."""

    name: CredentialName
    preset: Annotated[str, StringConstraints(max_length=40)] | None = None
    issuer: _Url | None = None
    identified_by: Literal["iss", "trust_domain"] | None = None
    uses: Annotated[list[Literal["session", "client", "proxy", "admin"]], Field(min_length=1, max_length=4)]
    audiences: Annotated[list[_Short], Field(min_length=1, max_length=MAX_ITEMS)] | None = None
    """None: this control plane's own issuer URL."""
    other_audiences: _OrIgnore | None = None
    algorithms: Annotated[list[_Short], Field(min_length=1, max_length=MAX_ITEMS)] | None = None
    token_types: (
        Annotated[list[Annotated[str, StringConstraints(max_length=64)]], Field(min_length=1, max_length=16)] | None
    ) = None
    discovery: bool | None = None
    jwks_url: _Url | None = None
    keys: Annotated[list[dict[str, Any]], Field(max_length=MAX_KEYS)] = Field(default_factory=list)
    claims: dict[str, Any] = Field(default_factory=dict)
    unknown_claims: _OrIgnore | None = None
    max_lifetime_seconds: Annotated[Whole, Field(ge=60, le=30 * 86_400)] | None = None
    keys_max_age_seconds: Annotated[Whole, Field(ge=30, le=86_400)] | None = None
    keys_max_stale_seconds: Annotated[Whole, Field(ge=30, le=7 * 86_400)] | None = None

    def to_new(self) -> NewIssuer:
        return NewIssuer(
            name=self.name,
            preset=self.preset,
            issuer=self.issuer,
            uses=tuple(Use(use) for use in self.uses),
            audiences=tuple(self.audiences) if self.audiences is not None else None,
            claims=self.claims,
            identified_by=IdentifiedBy(self.identified_by) if self.identified_by else None,
            other_audiences=Others(self.other_audiences) if self.other_audiences else None,
            unknown_claims=Others(self.unknown_claims) if self.unknown_claims else None,
            algorithms=tuple(self.algorithms) if self.algorithms is not None else None,
            token_types=tuple(self.token_types) if self.token_types is not None else None,
            discovery=self.discovery,
            jwks_url=self.jwks_url,
            keys=tuple(self.keys),
            max_lifetime_seconds=self.max_lifetime_seconds,
            keys_max_age_seconds=self.keys_max_age_seconds,
            keys_max_stale_seconds=self.keys_max_stale_seconds,
        )


class IssuerTestIn(_Incoming):
    token: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TOKEN_BYTES)]
    use: Literal["session", "client", "proxy", "admin"]


class IssuerOut(_Outgoing):
    name: str
    preset: str | None
    issuer: str
    identified_by: str
    uses: list[str]
    audiences: list[str]
    other_audiences: str
    algorithms: list[str]
    token_types: list[str]
    discovery: bool
    jwks_url: str | None
    keys: list[dict[str, Any]]
    claims: dict[str, Any]
    unknown_claims: str
    max_lifetime_seconds: int
    keys_max_age_seconds: int
    keys_max_stale_seconds: int
    created_at: float
    updated_at: float

    @classmethod
    def of(cls, issuer: TrustedIssuer) -> "IssuerOut":
        return cls(
            name=issuer.name,
            preset=issuer.preset,
            issuer=issuer.issuer,
            identified_by=issuer.identified_by.value,
            uses=sorted(use.value for use in issuer.uses),
            audiences=list(issuer.audiences),
            other_audiences=issuer.other_audiences.value,
            algorithms=list(issuer.algorithms),
            token_types=list(issuer.token_types),
            discovery=issuer.discovery,
            jwks_url=issuer.jwks_url,
            keys=[dict(key) for key in issuer.keys],
            claims=table_to_json(issuer.claims),
            unknown_claims=issuer.unknown_claims.value,
            max_lifetime_seconds=issuer.max_lifetime_seconds,
            keys_max_age_seconds=issuer.keys_max_age_seconds,
            keys_max_stale_seconds=issuer.keys_max_stale_seconds,
            created_at=issuer.created_at,
            updated_at=issuer.updated_at,
        )


class ClaimOut(_Outgoing):
    claim: str
    outcome: str


class AdminRoleOut(_Outgoing):
    role: str
    tenant: str | None


class IssuerTestOut(_Outgoing):
    """What would become of a token. `reason` is for whoever sets up an issuer; a caller never hears it."""

    accepted: bool
    reason: str | None
    subject: str | None
    tenant: str | None
    roles: list[str]
    admin_roles: list[AdminRoleOut]
    expires_at: float | None
    claims: list[ClaimOut]

    @classmethod
    def of(cls, run: DryRun) -> "IssuerTestOut":
        identity = run.identity
        held = sorted(identity.admin_roles, key=str) if identity else []
        return cls(
            accepted=identity is not None,
            reason=run.reason,
            subject=identity.subject if identity else None,
            tenant=identity.tenant if identity else None,
            roles=list(identity.roles) if identity else [],
            admin_roles=[AdminRoleOut(role=each.role.value, tenant=each.tenant) for each in held],
            expires_at=identity.expires_at if identity else None,
            claims=[ClaimOut(claim=claim, outcome=outcome) for claim, outcome in run.claims],
        )


class IssuerPresetOut(_Outgoing):
    id: str
    title: str
    issuer: str | None
    claims: dict[str, Any]
    unknown_claims: str


@dataclass(frozen=True, slots=True)
class IssuersApi:
    access: Access
    issuers: IssuerKeeper

    def router(self) -> APIRouter:
        routes = AdminRoutes(self.access)
        add = routes.add
        add("POST", "/issuers", self.add, Action.ISSUER_WRITE, status_code=201)
        add("GET", "/issuers", self.list, Action.ISSUER_READ)
        add("GET", "/issuer-presets", self.presets, Action.ISSUER_READ)
        add("GET", "/issuers/{name}", self.get, Action.ISSUER_READ)
        add("PUT", "/issuers/{name}", self.replace, Action.ISSUER_WRITE)
        add("DELETE", "/issuers/{name}", self.delete, Action.ISSUER_WRITE, status_code=204)
        add("POST", "/issuers/{name}/test", self.test, Action.ISSUER_READ)
        return routes.router

    async def add(self, request: Request, body: IssuerIn) -> IssuerOut:
        return IssuerOut.of(await self.issuers.add(body.to_new(), by=actor(request)))

    async def list(self) -> Items[IssuerOut]:
        return Items(items=[IssuerOut.of(issuer) for issuer in await self.issuers.list()])

    async def get(self, name: IssuerPath) -> IssuerOut:
        return IssuerOut.of(await self.issuers.get(name))

    async def replace(self, request: Request, name: IssuerPath, body: IssuerIn) -> IssuerOut:
        """The whole record: what is left out is as the preset has it, not as it was."""
        if body.name != name:
            raise invalid_field("name", "is the one in the path")
        return IssuerOut.of(await self.issuers.replace(body.to_new(), by=actor(request)))

    async def delete(self, request: Request, name: IssuerPath) -> Response:
        """From then on its tokens are nobody's. Sessions that were opened with them live on."""
        await self.issuers.remove(name, by=actor(request))
        return Response(status_code=204)

    async def test(self, name: IssuerPath, body: IssuerTestIn) -> IssuerTestOut:
        """What would become of a token, claim by claim. Nothing is opened or used up."""
        return IssuerTestOut.of(await self.issuers.test(name, body.token, use=Use(body.use)))

    async def presets(self) -> Items[IssuerPresetOut]:
        return Items(
            items=[
                IssuerPresetOut(
                    id=name,
                    title=preset.title,
                    issuer=preset.issuer,
                    claims=dict(preset.claims),
                    unknown_claims=preset.unknown_claims.value,
                )
                for name, preset in ISSUER_PRESETS.items()
            ]
        )
