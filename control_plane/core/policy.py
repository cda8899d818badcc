"""Who may do what in the administrators' API: one table, from action to roles, and one decision over it.

Rule: an action that is not in the table does not exist, and what the table does not allow is refused. A role of one
tenant sees that tenant alone: towards everything of another it is told that there is no such tenant.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from control_plane.contract.caller import TenantId


class Role(StrEnum):
    PLATFORM_ADMIN = "platform_admin"
    PLATFORM_AUDITOR = "platform_auditor"
    """Looks at everything and changes nothing."""
    TENANT_ADMIN = "tenant_admin"
    TENANT_AUDITOR = "tenant_auditor"

    @property
    def is_of_one_tenant(self) -> bool:
        return self in (Role.TENANT_ADMIN, Role.TENANT_AUDITOR)


@dataclass(frozen=True, slots=True)
class HeldRole:
    """A role, and of which tenant. Raises `ValueError` for a tenant's role without one, or a platform's with one."""

    role: Role
    tenant: TenantId | None = None

    def __post_init__(self) -> None:
        if self.role.is_of_one_tenant != (self.tenant is not None):
            raise ValueError("a tenant's role is of one tenant, a platform's role of none")


@dataclass(frozen=True, slots=True)
class Principal:
    """Whoever calls the administrators' API, proven, with every role held."""

    name: str
    """As the audit trail has it: `administrator`, or `<issuer>:<subject>`."""
    roles: frozenset[HeldRole]

    @property
    def is_of_the_platform(self) -> bool:
        return any(not held.role.is_of_one_tenant for held in self.roles)

    @property
    def tenants(self) -> frozenset[TenantId]:
        """The tenants in which a role is held. (A platform's role is held in all of them.)"""
        return frozenset(held.tenant for held in self.roles if held.tenant is not None)

    def sees(self, tenant: TenantId | None) -> bool:
        return self.is_of_the_platform or tenant in self.tenants


class Action(StrEnum):
    """What can be done. `read` changes nothing."""

    TENANT_READ = "tenant.read"
    TENANT_WRITE = "tenant.write"
    CLIENT_READ = "client.read"
    CLIENT_WRITE = "client.write"
    ISSUER_READ = "issuer.read"
    ISSUER_WRITE = "issuer.write"
    SOURCE_READ = "source.read"
    SOURCE_WRITE = "source.write"
    KEK_READ = "kek.read"
    KEK_WRITE = "kek.write"
    KEY_READ = "key.read"
    KEY_WRITE = "key.write"
    INJECTOR_READ = "injector.read"
    INJECTOR_WRITE = "injector.write"
    PRESET_READ = "preset.read"
    METRICS_READ = "metrics.read"
    AUDIT_READ_ALL = "audit.read_all"
    AUDIT_READ = "audit.read"
    CREDENTIAL_READ = "credential.read"
    CREDENTIAL_WRITE = "credential.write"
    ROTATION_READ = "rotation.read"
    ROTATION_WRITE = "rotation.write"
    GRANT_READ = "grant.read"
    GRANT_WRITE = "grant.write"
    ALLOW_RULE_READ = "allow_rule.read"
    ALLOW_RULE_WRITE = "allow_rule.write"
    PRIVATE_ADDRESS_WRITE = "private_address.write"
    """Letting a tenant's workloads reach addresses inside the platform's own network."""
    DIRECT_WRITE = "direct.write"
    """Letting an exchange hand out the secret itself."""
    PLACEHOLDER_READ = "placeholder.read"
    PLACEHOLDER_WRITE = "placeholder.write"
    SESSION_READ = "session.read"
    SESSION_WRITE = "session.write"
    ACCESS_READ = "access.read"
    LIMIT_READ = "limit.read"
    LIMIT_WRITE = "limit.write"
    ALARM_READ = "alarm.read"
    ALARM_WRITE = "alarm.write"
    ALARM_READ_ALL = "alarm.read_all"
    ALARM_WRITE_ALL = "alarm.write_all"
    """Having the alarms of every tenant told somewhere."""
    DECOY_READ = "decoy.read"
    DECOY_WRITE = "decoy.write"


class Reach(StrEnum):
    """What an action is about."""

    PLATFORM = "platform"
    """No one tenant."""
    TENANT = "tenant"
    """The tenant that the request names."""
    OWN = "own"
    """Whatever the principal sees: everything, or its own tenants' part."""


@dataclass(frozen=True, slots=True)
class Rule:
    reach: Reach
    roles: frozenset[Role]


_PLATFORM_READ: Final = Rule(Reach.PLATFORM, frozenset({Role.PLATFORM_ADMIN, Role.PLATFORM_AUDITOR}))
_PLATFORM_WRITE: Final = Rule(Reach.PLATFORM, frozenset({Role.PLATFORM_ADMIN}))
_OWN_READ: Final = Rule(Reach.OWN, frozenset(Role))
_TENANT_READ: Final = Rule(Reach.TENANT, frozenset(Role))
_TENANT_WRITE: Final = Rule(Reach.TENANT, frozenset({Role.PLATFORM_ADMIN, Role.TENANT_ADMIN}))
_TENANT_WRITE_BY_THE_PLATFORM: Final = Rule(Reach.TENANT, frozenset({Role.PLATFORM_ADMIN}))

POLICY: Final[Mapping[Action, Rule]] = {
    Action.TENANT_READ: _OWN_READ,
    Action.TENANT_WRITE: _PLATFORM_WRITE,
    # Client ids, certificates and workload names are one namespace for all tenants: who may write in it could take
    # another tenant's name.
    Action.CLIENT_READ: _OWN_READ,
    Action.CLIENT_WRITE: _PLATFORM_WRITE,
    Action.ISSUER_READ: _PLATFORM_READ,
    Action.ISSUER_WRITE: _PLATFORM_WRITE,
    Action.SOURCE_READ: _PLATFORM_READ,
    Action.SOURCE_WRITE: _PLATFORM_WRITE,
    Action.KEK_READ: _PLATFORM_READ,
    Action.KEK_WRITE: _PLATFORM_WRITE,
    Action.KEY_READ: _PLATFORM_READ,
    Action.KEY_WRITE: _PLATFORM_WRITE,
    Action.INJECTOR_READ: _PLATFORM_READ,
    Action.INJECTOR_WRITE: _PLATFORM_WRITE,
    Action.PRESET_READ: _OWN_READ,
    Action.METRICS_READ: _PLATFORM_READ,
    Action.AUDIT_READ_ALL: _PLATFORM_READ,
    Action.AUDIT_READ: _TENANT_READ,
    Action.CREDENTIAL_READ: _TENANT_READ,
    Action.CREDENTIAL_WRITE: _TENANT_WRITE,
    Action.ROTATION_READ: _TENANT_READ,
    Action.ROTATION_WRITE: _TENANT_WRITE,
    Action.GRANT_READ: _TENANT_READ,
    Action.GRANT_WRITE: _TENANT_WRITE,
    Action.ALLOW_RULE_READ: _TENANT_READ,
    Action.ALLOW_RULE_WRITE: _TENANT_WRITE,
    Action.PRIVATE_ADDRESS_WRITE: _TENANT_WRITE_BY_THE_PLATFORM,
    Action.DIRECT_WRITE: _TENANT_WRITE_BY_THE_PLATFORM,
    Action.PLACEHOLDER_READ: _TENANT_READ,
    Action.PLACEHOLDER_WRITE: _TENANT_WRITE,
    Action.SESSION_READ: _TENANT_READ,
    Action.SESSION_WRITE: _TENANT_WRITE,
    Action.ACCESS_READ: _OWN_READ,
    Action.LIMIT_READ: _TENANT_READ,
    Action.LIMIT_WRITE: _TENANT_WRITE_BY_THE_PLATFORM,
    Action.ALARM_READ: _TENANT_READ,
    Action.ALARM_WRITE: _TENANT_WRITE,
    Action.ALARM_READ_ALL: _PLATFORM_READ,
    Action.ALARM_WRITE_ALL: _PLATFORM_WRITE,
    Action.DECOY_READ: _TENANT_READ,
    Action.DECOY_WRITE: _TENANT_WRITE,
}


class Verdict(StrEnum):
    ALLOWED = "allowed"
    FORBIDDEN = "forbidden"
    """The principal may see it, and may not do this."""
    UNKNOWN = "unknown"
    """For this principal there is no such tenant."""


def decide(principal: Principal, action: Action, *, tenant: TenantId | None) -> Verdict:
    """Whether the principal may do this to that tenant (None: the action names no tenant)."""
    rule = POLICY.get(action)
    if rule is None:
        return Verdict.FORBIDDEN
    # (1) What is another tenant's is not there, whatever was to be done with it.
    if tenant is not None and not principal.sees(tenant):
        return Verdict.UNKNOWN
    # (2) An action on a tenant needs to say on which.
    if rule.reach is Reach.TENANT and tenant is None:
        return Verdict.FORBIDDEN
    # (3) One of the roles that are held where it is done.
    held_here = {held.role for held in principal.roles if _is_held_at(held, rule.reach, tenant)}
    return Verdict.ALLOWED if held_here & rule.roles else Verdict.FORBIDDEN


def _is_held_at(held: HeldRole, reach: Reach, tenant: TenantId | None) -> bool:
    if not held.role.is_of_one_tenant or reach is Reach.OWN:
        return True
    return reach is Reach.TENANT and held.tenant == tenant
