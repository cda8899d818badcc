"""Administrators by an issuer's claims: every route of their API, as each role, at home and abroad.

The routes are found in the router's own document; one without an entry in the policy fails here.
"""

from typing import Any, Final

import httpx
import pytest

from control_plane.api.guard import ACTION_FIELD
from control_plane.core.policy import POLICY, Action, Reach, Role
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.issuing import Provider, bearer
from tests.control_plane.serving import ADMIN_TOKEN, ControlPlane
from tests.control_plane.test_access import SESSIONS, filled
from tests.control_plane.workspace import Json, Workspace

ROLES: Final = ("platform_admin", "platform_auditor", "tenant_admin", "tenant_auditor")
NOT_ALLOWED: Final = {401, 403}


class Staff:
    """One issuer whose groups are roles: `<role>` of its own tenant, and `evil_<role>` of the tenant `evil`."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.provider = Provider(f"staff-{workspace.tenant}")
        own = {role: {"role": role} for role in ROLES}
        evil = {f"evil_{role}": {"role": role, "tenant": "evil"} for role in ROLES if role.startswith("tenant_")}
        claims = {
            "subject": {"claim": "sub"},
            "tenant": {"fixed": workspace.tenant},
            "admin": {"claim": "groups", "map": own | evil},
        }
        self.provider.register(workspace.control_plane, tenant="", uses=["admin"], claims=claims)

    def headers(self, *groups: str, **claims: Any) -> dict[str, str]:
        return bearer(self.provider.token("carol", groups=list(groups), **claims))

    def ask(self, method: str, path: str, *groups: str, body: Any = None) -> httpx.Response:
        return self.workspace.control_plane.http.request(method, path, headers=self.headers(*groups), json=body)


@pytest.fixture
def staff(workspace: Workspace) -> Staff:
    return Staff(workspace)


def administrators_routes(control_plane: ControlPlane) -> list[tuple[str, str, Action]]:
    """Every route under `/v1` but a session's owner's, with what it needs. Fails for one that says nothing."""
    document = control_plane.http.get("/openapi.json").json()
    return [
        (method.upper(), path, Action(operation[ACTION_FIELD]))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if path.startswith("/v1/") and path not in SESSIONS
    ]


def asked(staff: Staff, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    body: Json | None = {} if method in ("POST", "PATCH", "PUT") else None
    return staff.workspace.control_plane.http.request(method, path, headers=headers, json=body)


@pytest.mark.guards("control_plane/api/guard.py", "require(caller, action, TenantId(tenant)", "str(TenantId(tenant)")
def test_every_route_is_open_to_exactly_the_roles_that_the_policy_says(staff: Staff) -> None:
    routes = administrators_routes(staff.workspace.control_plane)

    assert len(routes) > 40
    for method, path, action in routes:
        rule, own = POLICY[action], filled(path.replace("{tenant}", staff.workspace.tenant))
        for role in ROLES:
            status = asked(staff, method, own, staff.headers(role)).status_code
            allowed = Role(role) in rule.roles
            assert (status not in NOT_ALLOWED) == allowed, (method, path, role, status)
            assert status < 500, (method, path, role)


def test_an_auditor_changes_nothing_on_any_route(staff: Staff) -> None:
    for method, path, action in administrators_routes(staff.workspace.control_plane):
        if method == "GET" or action.name.endswith("_READ"):
            continue
        for role in ("platform_auditor", "tenant_auditor"):
            own = filled(path.replace("{tenant}", staff.workspace.tenant))
            answer = asked(staff, method, own, staff.headers(role))
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), (method, path, role)


def test_a_tenants_administrator_finds_no_other_tenant_on_any_route(staff: Staff, other_workspace: Workspace) -> None:
    other_workspace.add_credential()
    compared = 0
    for method, path, action in administrators_routes(staff.workspace.control_plane):
        if "{tenant}" not in path:
            continue
        for role in ("tenant_admin", "tenant_auditor"):
            there, nowhere = (
                asked(staff, method, filled(path.replace("{tenant}", tenant)), staff.headers(role))
                for tenant in (other_workspace.tenant, "no-such-tenant")
            )
            assert there.status_code == nowhere.status_code == 404, (method, path, role, action)
            assert _without_id(there) == _without_id(nowhere)
            compared += 1
    assert compared > 30


def _without_id(answer: httpx.Response) -> Json:
    return {name: value for name, value in answer.json().items() if name != "request_id"}


def test_without_a_token_or_a_role_every_route_is_401(staff: Staff) -> None:
    for method, path, _ in administrators_routes(staff.workspace.control_plane):
        for headers in ({}, staff.headers(), staff.headers("unheard-of"), {"Authorization": "Bearer x"}):
            answer = asked(staff, method, filled(path), headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid"), (method, path)


def test_a_role_of_the_tokens_own_tenant_and_one_of_a_named_tenant(staff: Staff) -> None:
    staff.workspace.control_plane.made("PUT", "/v1/tenants/evil")

    assert staff.ask("GET", "/v1/tenants/evil/grants", "evil_tenant_auditor").status_code == 200
    assert staff.ask("GET", "/v1/tenants/evil/grants", "tenant_admin").status_code == 404
    both = staff.ask("GET", "/v1/tenants", "tenant_admin", "evil_tenant_auditor").json()["items"]
    assert {tenant["id"] for tenant in both} == {staff.workspace.tenant, "evil"}
    writes = staff.ask("POST", "/v1/tenants/evil/grants", "tenant_admin", "evil_tenant_auditor", body={})
    assert writes.status_code == 403


def test_lists_of_the_platform_show_a_tenants_role_its_own_part(staff: Staff, other_workspace: Workspace) -> None:
    for path, name in (("/v1/tenants", "id"), ("/v1/clients", "tenant")):
        shown = {item[name] for item in staff.ask("GET", path, "tenant_auditor").json()["items"]}
        everything = {item[name] for item in staff.ask("GET", path, "platform_auditor").json()["items"]}
        assert shown == {staff.workspace.tenant}
        assert other_workspace.tenant in everything


@pytest.mark.guards("control_plane/api/admin.py", "if any(each.allow_private for each in reached):", "if False:")
def test_only_the_platform_opens_its_own_network(staff: Staff) -> None:
    credential = {
        "name": "inside",
        "destinations": [{"url": "https://inside.test", "allow_private": True}],
        "secret": "s-0123456789",
    }
    paths = {
        staff.workspace.path("credentials"): credential,
        staff.workspace.path("allow-rules"): {"host": "inside.test", "allow_private": True},
    }
    for path, body in paths.items():
        assert staff.ask("POST", path, "tenant_admin", body=body).status_code == 403
        assert staff.ask("POST", path, "platform_admin", body=body).status_code == 201
    staff.workspace.add_credential("outside")
    change = {"destinations": credential["destinations"], "secret": "s-0123456789"}
    assert (
        staff.ask("PATCH", staff.workspace.path("credentials/outside"), "tenant_admin", body=change).status_code == 403
    )


def test_sessions_are_opened_seen_and_ended_by_the_tenants_administrators_alone(
    staff: Staff, other_workspace: Workspace
) -> None:
    own = {"tenant": staff.workspace.tenant, "subject": "alice", "runtime": staff.workspace.runtime}
    foreign = other_workspace.open_session()["session_id"]
    opened = staff.ask("POST", "/v1/sessions", "tenant_admin", body=own)
    session = opened.json()["session_id"]

    assert opened.status_code == 201
    assert staff.ask("POST", "/v1/sessions", "tenant_auditor", body=own).status_code == 403
    elsewhere = own | {"tenant": other_workspace.tenant, "runtime": other_workspace.runtime}
    assert staff.ask("POST", "/v1/sessions", "tenant_admin", body=elsewhere).status_code == 404
    for path, method in ((foreign, "GET"), (foreign, "DELETE"), (f"{foreign}/token", "POST")):
        answer = staff.ask(method, f"/v1/sessions/{path}", "tenant_admin")
        assert (answer.status_code, answer.json()["code"]) == (404, "session_not_found")
    assert staff.ask("GET", f"/v1/sessions/{session}", "tenant_auditor").status_code == 200
    assert staff.ask("POST", f"/v1/sessions/{session}/token", "tenant_auditor").status_code == 403
    assert staff.ask("DELETE", f"/v1/sessions/{session}", "tenant_auditor").status_code == 403
    assert staff.ask("DELETE", f"/v1/sessions/{session}", "tenant_admin").status_code == 204


def test_what_an_administrator_does_is_in_the_trail_under_the_name(staff: Staff) -> None:
    staff.ask("POST", staff.workspace.path("allow-rules"), "tenant_admin", body={"host": "example.com"})

    (event,) = [event for event in staff.workspace.audit() if event["action"].startswith("allow")]

    assert event["extra"]["by"] == f"{staff.provider.name}:carol"
    assert "client" not in event


def test_a_token_for_sessions_gives_no_role(workspace: Workspace) -> None:
    provider = Provider(f"people-{workspace.tenant}")
    provider.register(workspace.control_plane, tenant=workspace.tenant, unknown_claims="ignore")

    answer = workspace.control_plane.http.get("/v1/tenants", headers=bearer(provider.token(groups=["platform_admin"])))

    assert answer.status_code == 401


def test_with_an_issuer_there_need_be_no_bootstrap_token(own_control_plane: OwnControlPlane) -> None:
    first = own_control_plane()
    staff = Staff(Workspace(first, "acme"))
    first.stop()
    second = own_control_plane(admin_token_file=None)

    by_role = second.http.get("/v1/tenants", headers=staff.headers("platform_admin"))
    by_token = second.http.get("/v1/tenants", headers=bearer(ADMIN_TOKEN))

    assert (by_role.status_code, by_token.status_code) == (200, 401)


def test_a_route_about_a_tenant_names_it_in_its_path_or_asks_the_gate_itself(control_plane: ControlPlane) -> None:
    asks_itself = {Action.ACCESS_READ, Action.TENANT_WRITE}  # by a query or a body; making tenants is the platform's
    for method, path, action in administrators_routes(control_plane):
        about_a_tenant = POLICY[action].reach is Reach.TENANT
        assert about_a_tenant == ("{tenant}" in path) or action in asks_itself, (method, path)
