"""The administrators' API: tenants, clients, credentials, grants, allow rules, placeholders, the audit trail.

Rule: every route here is behind the gate of `guard`; each handler turns one message into one call and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from fastapi import APIRouter, Path, Query, Request, Response

from control_plane.access import Access, require
from control_plane.api.guard import AdminRoutes, actor, principal
from control_plane.api.lists import Items as Items
from control_plane.api.messages import (
    AllowRuleIn,
    AllowRuleOut,
    ClientChangeIn,
    ClientIn,
    ClientOut,
    CredentialChangeIn,
    CredentialIn,
    CredentialOut,
    ExchangeOut,
    GrantIn,
    GrantOut,
    NewClientOut,
    PlaceholderIn,
    PlaceholderOut,
    TenantOut,
)
from control_plane.api.rotation import RotationApi
from control_plane.contract.caller import ClientId, GrantId, PlaceholderId, SessionId, SubjectId, TenantId
from control_plane.contract.destination import Destination
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.audit import readable
from control_plane.core.names import CLIENT_ID, CREDENTIAL_NAME, OBJECT_ID, TENANT_ID
from control_plane.core.policy import Action, Verdict, decide
from control_plane.core.presets import PRESETS, preset_to_json
from control_plane.core.records import ClientKind, TokenKind
from control_plane.credentials import CredentialChange, CredentialKeeper, NewCredential
from control_plane.grants import AllowRuleKeeper, GrantKeeper, NewAllowRule, NewGrant
from control_plane.placeholders import NewPlaceholder, PlaceholderKeeper
from control_plane.ports import CrossTenantReason, PlatformScope, Store, TenantScope
from control_plane.registry import ClientChange, NewClient, Registry, SecretChange
from control_plane.rotation import RotationKeeper
from control_plane.scheduling import ScheduleKeeper

T = TypeVar("T")

TenantPath = Annotated[str, Path(pattern=TENANT_ID)]
NamePath = Annotated[str, Path(pattern=CREDENTIAL_NAME)]
ClientPath = Annotated[str, Path(pattern=CLIENT_ID)]
IdPath = Annotated[str, Path(pattern=OBJECT_ID)]
ConfirmQuery = Annotated[str | None, Query(max_length=64)]
AfterQuery = Annotated[int, Query(ge=0, le=2**62)]
EventIdQuery = Annotated[str | None, Query(pattern=r"^[^\x00-\x1f\x7f]{1,64}$")]  # proxies name theirs: `core.audit`
BeforeQuery = Annotated[str | None, Query(pattern=OBJECT_ID)]
LimitQuery = Annotated[int, Query(ge=1, le=1000)]
RequestIdQuery = Annotated[str | None, Query(pattern=r"^[0-9A-Za-z_-]{1,64}$")]  # a proxy's ids have a hyphen


@dataclass(frozen=True, slots=True)
class AdminApi:
    access: Access
    registry: Registry
    credentials: CredentialKeeper
    rotations: RotationKeeper
    schedules: ScheduleKeeper
    grants: GrantKeeper
    rules: AllowRuleKeeper
    placeholders: PlaceholderKeeper
    store: Store

    def router(self) -> APIRouter:
        routes = AdminRoutes(self.access)
        add = routes.add
        add("GET", "/tenants", self.list_tenants, Action.TENANT_READ)
        add("PUT", "/tenants/{tenant}", self.put_tenant, Action.TENANT_WRITE)
        add("DELETE", "/tenants/{tenant}", self.delete_tenant, Action.TENANT_WRITE, status_code=204)
        add("POST", "/clients", self.add_client, Action.CLIENT_WRITE, status_code=201)
        add("GET", "/clients", self.list_clients, Action.CLIENT_READ)
        add("PATCH", "/clients/{client}", self.change_client, Action.CLIENT_WRITE)
        add("DELETE", "/clients/{client}", self.delete_client, Action.CLIENT_WRITE, status_code=204)
        add("POST", "/tenants/{tenant}/credentials", self.add_credential, Action.CREDENTIAL_WRITE, status_code=201)
        add("GET", "/tenants/{tenant}/credentials", self.list_credentials, Action.CREDENTIAL_READ)
        add("GET", "/tenants/{tenant}/credentials/{name}", self.get_credential, Action.CREDENTIAL_READ)
        add("PATCH", "/tenants/{tenant}/credentials/{name}", self.change_credential, Action.CREDENTIAL_WRITE)
        add(
            "DELETE",
            "/tenants/{tenant}/credentials/{name}",
            self.delete_credential,
            Action.CREDENTIAL_WRITE,
            status_code=204,
        )
        RotationApi(self.rotations, self.schedules).add_to(routes)
        add("POST", "/tenants/{tenant}/grants", self.add_grant, Action.GRANT_WRITE, status_code=201)
        add("GET", "/tenants/{tenant}/grants", self.list_grants, Action.GRANT_READ)
        add("DELETE", "/tenants/{tenant}/grants/{grant}", self.delete_grant, Action.GRANT_WRITE, status_code=204)
        add("POST", "/tenants/{tenant}/allow-rules", self.add_rule, Action.ALLOW_RULE_WRITE, status_code=201)
        add("GET", "/tenants/{tenant}/allow-rules", self.list_rules, Action.ALLOW_RULE_READ)
        add(
            "DELETE", "/tenants/{tenant}/allow-rules/{rule}", self.delete_rule, Action.ALLOW_RULE_WRITE, status_code=204
        )
        add("GET", "/tenants/{tenant}/placeholders", self.list_placeholders, Action.PLACEHOLDER_READ)
        add("POST", "/tenants/{tenant}/placeholders", self.issue_placeholder, Action.PLACEHOLDER_WRITE, status_code=201)
        add(
            "DELETE",
            "/tenants/{tenant}/placeholders/{placeholder}",
            self.revoke_placeholder,
            Action.PLACEHOLDER_WRITE,
            status_code=204,
        )
        add("GET", "/tenants/{tenant}/audit", self.tenant_audit, Action.AUDIT_READ)
        add("GET", "/audit", self.audit, Action.AUDIT_READ_ALL)
        add("GET", "/presets", self.list_presets, Action.PRESET_READ)
        return routes.router

    # --- tenants and clients

    async def list_tenants(self, request: Request) -> Items[TenantOut]:
        """Those in which the caller holds a role."""
        seen = [tenant for tenant in await self.registry.tenants() if principal(request).sees(tenant.id)]
        return Items(items=[TenantOut(id=tenant.id, created_at=tenant.created_at) for tenant in seen])

    async def put_tenant(self, request: Request, tenant: TenantPath) -> TenantOut:
        """Makes the tenant if it is not there yet."""
        made = await self.registry.ensure_tenant(TenantId(tenant), by=actor(request))
        return TenantOut(id=made.id, created_at=made.created_at)

    async def delete_tenant(self, request: Request, tenant: TenantPath, confirm: ConfirmQuery = None) -> Response:
        """With everything it has: `confirm` repeats the tenant's id. The audit trail stays."""
        if confirm != tenant:
            raise RefusedError(NOT_CONFIRMED)
        await self.registry.remove_tenant(TenantId(tenant), by=actor(request))
        return Response(status_code=204)

    async def add_client(self, request: Request, body: ClientIn) -> NewClientOut:
        """The secret is in this answer and nowhere else."""
        new = NewClient(
            id=ClientId(body.id),
            kind=ClientKind(body.kind),
            tenant=TenantId(body.tenant) if body.tenant is not None else None,
            scopes=tuple(body.scopes),
            proofs=body.proofs,
            subject=SubjectId(body.subject) if body.subject is not None else None,
        )
        with_secret = body.proofs.is_empty if body.secret is None else body.secret
        client, secret = await self.registry.add_client(new, with_secret=with_secret, by=actor(request))
        return NewClientOut.with_secret(client, secret)

    async def change_client(self, request: Request, client: ClientPath, body: ClientChangeIn) -> NewClientOut:
        """How it proves itself. It stays the same client, and keeps its sessions and placeholders."""
        change = ClientChange(proofs=body.proofs, secret=SecretChange(body.secret))
        changed, secret = await self.registry.change_client(ClientId(client), change, by=actor(request))
        return NewClientOut.with_secret(changed, secret)

    async def list_clients(self, request: Request) -> Items[ClientOut]:
        """The platform's roles see all, a tenant's its own."""
        seen = [client for client in await self.registry.clients() if principal(request).sees(client.tenant)]
        return Items(items=[ClientOut.of(client) for client in seen])

    async def delete_client(self, request: Request, client: ClientPath) -> Response:
        """Whatever it holds is revoked."""
        await self.registry.remove_client(ClientId(client), by=actor(request))
        return Response(status_code=204)

    # --- credentials

    async def add_credential(self, request: Request, tenant: TenantPath, body: CredentialIn) -> CredentialOut:
        _require_private(request, tenant, *(body.destinations or ()))
        _require_direct(request, tenant, body.allow_direct)
        new = NewCredential(
            name=body.name,
            preset=body.preset,
            destinations=_tuple(body.destinations),
            placements=_tuple(body.placements),
            variables=_tuple(body.variables),
            credential_required=body.credential_required,
            allow_direct=body.allow_direct,
            secret=body.secret,
            kind=body.kind,
            settings=body.settings,
            max_stale_seconds=body.max_stale_seconds,
            secret_source=body.secret_source.to_reference() if body.secret_source is not None else None,
            probe=body.probe,
        )
        made = await self.credentials.add(
            TenantId(tenant), new, by=actor(request), by_platform=_names_platform_sources(request)
        )
        return CredentialOut.of(made)

    async def list_credentials(self, tenant: TenantPath) -> Items[CredentialOut]:
        found = await self.credentials.list(TenantId(tenant))
        return Items(items=[CredentialOut.of(described) for described in found])

    async def get_credential(self, tenant: TenantPath, name: NamePath) -> CredentialOut:
        return CredentialOut.of(await self.credentials.get(TenantId(tenant), name))

    async def change_credential(
        self, request: Request, tenant: TenantPath, name: NamePath, body: CredentialChangeIn
    ) -> CredentialOut:
        """Anything by which the secret could go further than before needs the secret again: 422 `secret_required`."""
        _require_private(request, tenant, *(body.destinations or ()))
        _require_direct(request, tenant, body.allow_direct)
        change = CredentialChange(
            destinations=_tuple(body.destinations),
            placements=_tuple(body.placements),
            variables=_tuple(body.variables),
            credential_required=body.credential_required,
            allow_direct=body.allow_direct,
            secret=body.secret,
            settings=body.settings,
            max_stale_seconds=body.max_stale_seconds,
            secret_source=body.secret_source.to_reference() if body.secret_source is not None else None,
            probe=body.probe,
            without_probe=body.without_probe,
        )
        changed = await self.credentials.change(
            TenantId(tenant), name, change, by=actor(request), by_platform=_names_platform_sources(request)
        )
        return CredentialOut.of(changed)

    async def delete_credential(self, request: Request, tenant: TenantPath, name: NamePath) -> Response:
        await self.credentials.delete(TenantId(tenant), name, by=actor(request))
        return Response(status_code=204)

    # --- grants and allow rules

    async def add_grant(self, request: Request, tenant: TenantPath, body: GrantIn) -> GrantOut:
        new = NewGrant(
            credential=body.credential,
            subject=SubjectId(body.subject) if body.subject is not None else None,
            role=body.role,
            client=ClientId(body.client) if body.client is not None else None,
            methods=_set(body.methods),
            path_prefixes=_set(body.path_prefixes),
            until=body.until,
        )
        return GrantOut.of(await self.grants.add(TenantId(tenant), new, by=actor(request)))

    async def list_grants(self, tenant: TenantPath) -> Items[GrantOut]:
        return Items(items=[GrantOut.of(named) for named in await self.grants.list(TenantId(tenant))])

    async def delete_grant(self, request: Request, tenant: TenantPath, grant: IdPath) -> Response:
        """Placeholders that stood on this grant alone are revoked."""
        await self.grants.remove(TenantId(tenant), GrantId(grant), by=actor(request))
        return Response(status_code=204)

    async def add_rule(self, request: Request, tenant: TenantPath, body: AllowRuleIn) -> AllowRuleOut:
        _require_private(request, tenant, body)
        new = NewAllowRule(
            host=body.host,
            port=body.port,
            methods=_set(body.methods),
            allow_private=body.allow_private,
            session=SessionId(body.session) if body.session is not None else None,
            tunnel=body.tunnel,
        )
        return AllowRuleOut.of(await self.rules.add(TenantId(tenant), new, by=actor(request)))

    async def list_rules(self, tenant: TenantPath) -> Items[AllowRuleOut]:
        return Items(items=[AllowRuleOut.of(rule) for rule in await self.rules.list(TenantId(tenant))])

    async def delete_rule(self, request: Request, tenant: TenantPath, rule: IdPath) -> Response:
        await self.rules.remove(TenantId(tenant), rule, by=actor(request))
        return Response(status_code=204)

    # --- placeholders

    async def list_placeholders(
        self,
        tenant: TenantPath,
        kind: TokenKind = TokenKind.PLACEHOLDER,
        before: BeforeQuery = None,
        limit: LimitQuery = 1000,
    ) -> Items[PlaceholderOut]:
        """Newest first; the next page is before the id last seen."""
        last_seen = PlaceholderId(before) if before is not None else None
        found = await self.placeholders.list(TenantId(tenant), kind, before=last_seen, limit=limit)
        return Items(items=[PlaceholderOut.of(named) for named in found])

    async def issue_placeholder(self, request: Request, tenant: TenantPath, body: PlaceholderIn) -> ExchangeOut:
        """For a subject that has a grant. The placeholder is in this answer and nowhere else."""
        new = NewPlaceholder(
            subject=SubjectId(body.subject),
            audience=body.audience,
            ttl_seconds=body.ttl_seconds,
            client=ClientId(body.client) if body.client is not None else None,
            with_session=body.session,
        )
        return ExchangeOut.of(await self.placeholders.issue(TenantId(tenant), new, by=actor(request)))

    async def revoke_placeholder(self, request: Request, tenant: TenantPath, placeholder: IdPath) -> Response:
        await self.placeholders.revoke(TenantId(tenant), PlaceholderId(placeholder), by=actor(request))
        return Response(status_code=204)

    # --- the trail, and what there is to know

    async def tenant_audit(
        self, tenant: TenantPath, after: EventIdQuery = None, limit: LimitQuery = 100, request_id: RequestIdQuery = None
    ) -> Items[dict[str, Any]]:
        """Oldest first; the next page is after the `event_id` of the last one seen."""
        # Without the number of each: it counts every tenant's events, and would tell how busy the others are.
        async with self.store.read(TenantScope(TenantId(tenant))) as records:
            begin = 0 if after is None else await records.audit.sequence_of(after)
            if begin is None:
                raise RefusedError(NO_SUCH_EVENT)
            found = await records.audit.after(begin, limit=limit, request_id=request_id)
        return Items(items=[readable(event) for _, event in found])

    async def audit(
        self, after: AfterQuery = 0, limit: LimitQuery = 100, request_id: RequestIdQuery = None
    ) -> Items[dict[str, Any]]:
        """Every tenant's, and the refusals of callers that nobody knows. In the order of `sequence`; the next page is
        after the last one seen."""
        async with self.store.read(PlatformScope(CrossTenantReason.AUDIT)) as records:
            found = await records.audit.after(after, limit=limit, request_id=request_id)
        return Items(items=[{"sequence": sequence, **readable(event)} for sequence, event in found])

    async def list_presets(self) -> Items[dict[str, Any]]:
        return Items(items=[preset_to_json(preset) for preset in PRESETS.values()])


def _names_platform_sources(request: Request) -> bool:
    """Whether the caller may name sources that read with our own rights: the platform's administrator alone."""
    return decide(principal(request), Action.SOURCE_WRITE, tenant=None) is Verdict.ALLOWED


def _require_private(request: Request, tenant: str, *reached: Destination | AllowRuleIn) -> None:
    """What lets a tenant reach into the platform's own network is not for the tenant to say."""
    if any(each.allow_private for each in reached):
        require(principal(request), Action.PRIVATE_ADDRESS_WRITE, TenantId(tenant))


def _require_direct(request: Request, tenant: str, allow_direct: bool | None) -> None:
    """Handing out secrets themselves is for the platform to allow."""
    if allow_direct:
        require(principal(request), Action.DIRECT_WRITE, TenantId(tenant))


def _tuple(values: Sequence[T] | None) -> tuple[T, ...] | None:
    return None if values is None else tuple(values)


def _set(values: Sequence[T] | None) -> frozenset[T] | None:
    return None if values is None else frozenset(values)


NO_SUCH_EVENT: Final = Refusal(
    RefusalCode.INVALID_FIELD,
    "after: there is no such event in this trail (any more)",
    "give the event_id of the last event seen, or leave it out to begin with the oldest",
)
NOT_CONFIRMED: Final = Refusal(
    RefusalCode.INVALID_FIELD,
    "confirm: the query parameter repeats the tenant's id, since its credentials, grants and sessions go with it",
    "DELETE /v1/tenants/{tenant}?confirm={tenant}; the command line does so with: coatcheck tenant delete NAME --yes",
)
