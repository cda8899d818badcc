"""The one table of who may do what, as sentences."""

import pytest

from control_plane.contract.caller import TenantId
from control_plane.core.policy import POLICY, Action, HeldRole, Principal, Reach, Role, Verdict, decide

ACME, EVIL = TenantId("acme"), TenantId("evil")


def who(*roles: tuple[Role, TenantId | None]) -> Principal:
    return Principal("somebody", frozenset(HeldRole(role, tenant) for role, tenant in roles))


PLATFORM_ADMIN = who((Role.PLATFORM_ADMIN, None))
PLATFORM_AUDITOR = who((Role.PLATFORM_AUDITOR, None))
ACME_ADMIN = who((Role.TENANT_ADMIN, ACME))
ACME_AUDITOR = who((Role.TENANT_AUDITOR, ACME))
ADMIN_THERE_AUDITOR_HERE = who((Role.TENANT_ADMIN, EVIL), (Role.TENANT_AUDITOR, ACME))
NOBODY = who()

ALLOWED, FORBIDDEN, UNKNOWN = Verdict.ALLOWED, Verdict.FORBIDDEN, Verdict.UNKNOWN


@pytest.mark.guards(
    "control_plane/core/policy.py", "return reach is Reach.TENANT and held.tenant == tenant", "return True"
)
@pytest.mark.parametrize(
    ("principal", "action", "tenant", "verdict"),
    [
        pytest.param(
            PLATFORM_ADMIN, Action.GRANT_WRITE, ACME, ALLOWED, id="the platform's administrator writes anywhere"
        ),
        pytest.param(PLATFORM_ADMIN, Action.ISSUER_WRITE, None, ALLOWED, id="and what is the platform's"),
        pytest.param(PLATFORM_AUDITOR, Action.GRANT_READ, ACME, ALLOWED, id="the platform's auditor reads anywhere"),
        pytest.param(PLATFORM_AUDITOR, Action.GRANT_WRITE, ACME, FORBIDDEN, id="and writes nowhere"),
        pytest.param(PLATFORM_AUDITOR, Action.ISSUER_WRITE, None, FORBIDDEN, id="not even what is the platform's"),
        pytest.param(ACME_ADMIN, Action.GRANT_WRITE, ACME, ALLOWED, id="a tenant's administrator writes there"),
        pytest.param(ACME_ADMIN, Action.GRANT_WRITE, EVIL, UNKNOWN, id="and knows no other tenant"),
        pytest.param(ACME_ADMIN, Action.GRANT_READ, EVIL, UNKNOWN, id="not even to look"),
        pytest.param(ACME_ADMIN, Action.TENANT_WRITE, EVIL, UNKNOWN, id="nor to make one"),
        pytest.param(ACME_ADMIN, Action.TENANT_WRITE, ACME, FORBIDDEN, id="nor deletes its own"),
        pytest.param(ACME_ADMIN, Action.ISSUER_READ, None, FORBIDDEN, id="nor sees what is the platform's"),
        pytest.param(ACME_ADMIN, Action.PRIVATE_ADDRESS_WRITE, ACME, FORBIDDEN, id="nor opens the platform's network"),
        pytest.param(ACME_ADMIN, Action.TENANT_READ, None, ALLOWED, id="but may list what it sees"),
        pytest.param(ACME_AUDITOR, Action.AUDIT_READ, ACME, ALLOWED, id="a tenant's auditor reads there"),
        pytest.param(ACME_AUDITOR, Action.GRANT_WRITE, ACME, FORBIDDEN, id="and does not write"),
        pytest.param(ACME_AUDITOR, Action.AUDIT_READ_ALL, None, FORBIDDEN, id="nor reads everybody's"),
        pytest.param(
            ADMIN_THERE_AUDITOR_HERE, Action.GRANT_WRITE, ACME, FORBIDDEN, id="a role counts where it is held"
        ),
        pytest.param(ADMIN_THERE_AUDITOR_HERE, Action.GRANT_WRITE, EVIL, ALLOWED, id="and only there"),
        pytest.param(PLATFORM_ADMIN, Action.GRANT_WRITE, None, FORBIDDEN, id="which tenant has to be said"),
        pytest.param(NOBODY, Action.PRESET_READ, None, FORBIDDEN, id="without a role nothing is allowed"),
    ],
)
def test_the_table_says_who_may_do_what(
    principal: Principal, action: Action, tenant: TenantId | None, verdict: Verdict
) -> None:
    assert decide(principal, action, tenant=tenant) is verdict


def test_every_action_is_in_the_table_and_the_platforms_administrator_may_do_it() -> None:
    assert set(POLICY) == set(Action)
    for action, rule in POLICY.items():
        tenant = ACME if rule.reach is Reach.TENANT else None
        assert decide(PLATFORM_ADMIN, action, tenant=tenant) is ALLOWED, action


def test_no_auditor_may_do_anything_that_changes_something() -> None:
    for action in Action:
        reads = action.name.endswith(("_READ", "_READ_ALL"))
        for auditor in (PLATFORM_AUDITOR, ACME_AUDITOR):
            for tenant in (ACME, None):
                assert reads or decide(auditor, action, tenant=tenant) is not ALLOWED, action


@pytest.mark.parametrize(("role", "tenant"), [(Role.TENANT_ADMIN, None), (Role.PLATFORM_ADMIN, ACME)])
def test_a_role_is_of_a_tenant_exactly_where_it_has_to_be(role: Role, tenant: TenantId | None) -> None:
    with pytest.raises(ValueError, match="a tenant's role"):
        HeldRole(role, tenant)
