"""Grants and allow rules: who may use which credential, and which hosts need none.

Rule: nothing is allowed that is not written here. Taking a grant away also takes the placeholders that stood on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from control_plane.contract.caller import ClientId, GrantId, SessionId, SubjectId, TenantId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.core.records import Change, ChangeKind, Grant, TenantAllowRule
from control_plane.credentials import CREDENTIAL_NOT_FOUND, invalid_field, require_tenant
from control_plane.faults import reach
from control_plane.ports import Clock, Entropy, Records, Store, TenantScope
from control_plane.trail import Actor, Trail


@dataclass(frozen=True, slots=True)
class NewGrant:
    credential: str
    """Its name."""
    subject: SubjectId | None
    role: str | None
    client: ClientId | None
    methods: frozenset[str] | None
    path_prefixes: frozenset[str] | None
    until: float | None


@dataclass(frozen=True, slots=True)
class NewAllowRule:
    host: str
    port: int | None
    methods: frozenset[str] | None
    allow_private: bool
    session: SessionId | None
    tunnel: bool = False


@dataclass(frozen=True, slots=True)
class NamedGrant:
    grant: Grant
    credential_name: str


class GrantKeeper:
    def __init__(self, store: Store, trail: Trail, *, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._trail = trail
        self._clock = clock
        self._entropy = entropy

    async def add(self, tenant: TenantId, new: NewGrant, *, by: Actor) -> NamedGrant:
        """Raises `RefusedError` (`not_found`, `credential_not_found`, `invalid_field`)."""
        if (new.subject is None) == (new.role is None):
            raise invalid_field("subject", "a grant is for a subject or for a role: exactly one of the two")
        async with self._store.write(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            credential = await records.credentials.named(new.credential)
            if credential is None:
                raise RefusedError(CREDENTIAL_NOT_FOUND)
            if new.client is not None and await records.clients.get(new.client) is None:
                raise invalid_field("client", "there is no such client")
            grant = Grant(
                id=GrantId(new_id("gr", self._entropy(ID_ENTROPY_BYTES))),
                tenant=tenant,
                credential_id=credential.id,
                subject=new.subject,
                role=new.role,
                client=new.client,
                methods=new.methods,
                path_prefixes=new.path_prefixes,
                until=new.until,
                created_at=self._clock(),
            )
            await records.grants.add(grant)
            reach("grant.added")
            # Placeholders that are out already may now do more: what proxies hold of this credential is asked again.
            await self._published(records, "grant.add", grant, credential.name, by)
            return NamedGrant(grant, credential.name)

    async def list(self, tenant: TenantId) -> Sequence[NamedGrant]:
        async with self._store.read(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            names = {credential.id: credential.name for credential in await records.credentials.list()}
            return [NamedGrant(grant, names.get(grant.credential_id, "")) for grant in await records.grants.list()]

    async def remove(self, tenant: TenantId, grant_id: GrantId, *, by: Actor) -> None:
        """Raises `RefusedError(not_found)`."""
        async with self._store.write(TenantScope(tenant)) as records:
            grant = await records.grants.get(grant_id)
            if grant is None:
                raise RefusedError(GRANT_NOT_FOUND)
            await records.grants.remove(grant_id)
            reach("grant.removed")
            # What a proxy holds for them it holds by this grant, whose one event says it.
            await records.tokens.revoke_no_longer_granted(grant.credential_id, self._clock())
            reach("grant.tokens_revoked")
            credential = await records.credentials.get(grant.credential_id)
            await self._published(records, "grant.remove", grant, credential.name if credential else "", by)

    async def _published(self, records: Records, action: str, grant: Grant, credential_name: str, by: Actor) -> None:
        removed = action == "grant.remove"
        touched = (
            Change(ChangeKind.GRANT, grant.tenant, grant.id, revoked=True)
            if removed
            else Change(ChangeKind.CREDENTIAL, grant.tenant, grant.credential_id)
        )
        await records.outbox.append([touched, Change(ChangeKind.POLICY, grant.tenant, grant.tenant)], self._clock())
        event = self._trail.event(
            action,
            by=by,
            tenant=grant.tenant,
            subject=grant.subject,
            credential=credential_name,
            detail=f"role {grant.role}" if grant.role is not None else "",
        )
        await self._trail.record(records, [event])


class AllowRuleKeeper:
    def __init__(self, store: Store, trail: Trail, *, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._trail = trail
        self._clock = clock
        self._entropy = entropy

    async def add(self, tenant: TenantId, new: NewAllowRule, *, by: Actor) -> TenantAllowRule:
        """Raises `RefusedError` (`not_found`, `session_not_found`)."""
        async with self._store.write(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            if new.tunnel and new.methods is not None:
                raise invalid_field("tunnel", "nothing inside an unopened tunnel is seen, so no methods can be named")
            if new.session is not None:
                session = await records.sessions.get(new.session)
                if session is None or not session.is_live(self._clock()):
                    raise invalid_field("session", "there is no such live session")
            rule = TenantAllowRule(
                id=new_id("ar", self._entropy(ID_ENTROPY_BYTES)),
                tenant=tenant,
                host=new.host,
                port=new.port,
                methods=new.methods,
                allow_private=new.allow_private,
                session=new.session,
                created_at=self._clock(),
                tunnel=new.tunnel,
            )
            await records.rules.add(rule)
            await self._published(records, "allow.add", rule, by)
            return rule

    async def list(self, tenant: TenantId) -> Sequence[TenantAllowRule]:
        async with self._store.read(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            return await records.rules.list()

    async def remove(self, tenant: TenantId, rule_id: str, *, by: Actor) -> None:
        """Raises `RefusedError(not_found)`."""
        async with self._store.write(TenantScope(tenant)) as records:
            rule = await records.rules.get(rule_id)
            if rule is None:
                raise RefusedError(RULE_NOT_FOUND)
            await records.rules.remove(rule_id)
            await self._published(records, "allow.remove", rule, by, revoked=True)

    async def _published(
        self, records: Records, action: str, rule: TenantAllowRule, by: Actor, *, revoked: bool = False
    ) -> None:
        change = Change(ChangeKind.POLICY, rule.tenant, rule.tenant, revoked=revoked)
        await records.outbox.append([change], self._clock())
        detail = rule.host if rule.port is None else f"{rule.host}:{rule.port}"
        event = self._trail.event(action, by=by, tenant=rule.tenant, session=rule.session, detail=detail)
        await self._trail.record(records, [event])


GRANT_NOT_FOUND: Final = Refusal(
    RefusalCode.NOT_FOUND, "there is no such grant", "list them with: coatcheck grant list"
)
RULE_NOT_FOUND: Final = Refusal(
    RefusalCode.NOT_FOUND, "there is no such allow rule", "list them with: coatcheck allow list"
)
