"""Grants, allow rules and placeholders on the administrator's API, and what a proxy hears of them."""

import pytest

from tests.control_plane.serving import PROXY_BASE_URL
from tests.control_plane.workspace import HOST, SECRET, Json, Workspace, sha256

BAD_GRANTS: dict[str, tuple[Json, int]] = {
    "for nobody": ({}, 422),
    "for a subject and a role": ({"subject": "alice", "role": "admins"}, 422),
    "for an empty subject": ({"subject": ""}, 422),
    "with no methods": ({"subject": "alice", "methods": []}, 422),
    "with a method in lower case": ({"subject": "alice", "methods": ["get"]}, 422),
    "with no paths": ({"subject": "alice", "path_prefixes": []}, 422),
    "with a path that climbs": ({"subject": "alice", "path_prefixes": ["/a/../b"]}, 422),
    "with a path that is none": ({"subject": "alice", "path_prefixes": ["v1"]}, 422),
    "until a word": ({"subject": "alice", "until": "tomorrow"}, 422),
    "until for ever": ({"subject": "alice", "until": 1e300}, 422),
    "through a client that is not there": ({"subject": "alice", "client": "nobody"}, 422),
    "of a credential that is not there": ({"subject": "alice", "credential": "nothing"}, 404),
    "with an unknown field": ({"subject": "alice", "methdos": ["GET"]}, 422),
}


@pytest.mark.guards("control_plane/grants.py", "if (new.subject is None) == (new.role is None):", "if False:")
@pytest.mark.parametrize(("fields", "status"), BAD_GRANTS.values(), ids=BAD_GRANTS.keys())
def test_a_bad_grant_is_refused_and_grants_nothing(workspace: Workspace, fields: Json, status: int) -> None:
    workspace.add_credential()

    response = workspace.control_plane.admin("POST", workspace.path("grants"), {"credential": "example"} | fields)

    assert response.status_code == status, response.text
    assert workspace.control_plane.made("GET", workspace.path("grants"))["items"] == []


def test_a_grant_narrows_what_the_proxy_will_let_through(workspace: Workspace) -> None:
    workspace.add_credential()
    workspace.grant(subject="alice", methods=["GET"], path_prefixes=["/v1"], until=4_000_000_000)

    binding = workspace.resolve(workspace.exchange())["binding"]

    assert binding["scopes"] == [
        {"endpoints": None, "methods": ["GET"], "path_prefixes": ["/v1"], "until": 4_000_000_000}
    ]


@pytest.mark.guards("control_plane/core/records.py", "return self.subject == subject", "return True")
@pytest.mark.guards("control_plane/core/records.py", "and self.role in roles", "")
@pytest.mark.guards(
    "control_plane/core/records.py", "if self.client is not None and self.client != client:", "if False:"
)
def test_the_grants_of_a_caller_are_all_told_and_nobody_elses(workspace: Workspace) -> None:
    workspace.add_credential()
    grants = [workspace.grant(subject="alice", methods=["GET"]), workspace.grant(role="writers", methods=["POST"])]
    workspace.grant(subject="bob", methods=["DELETE"])
    workspace.grant(role="admins", methods=["DELETE"])
    workspace.grant(subject="alice", client="test-proxy", methods=["DELETE"])

    binding = workspace.resolve(workspace.exchange(workspace.open_session(roles=["writers"])))["binding"]

    assert set(binding["grant_ids"]) == {grant["id"] for grant in grants}
    assert {tuple(scope["methods"]) for scope in binding["scopes"]} == {("GET",), ("POST",)}


@pytest.mark.guards(
    "control_plane/grants.py",
    "await records.tokens.revoke_no_longer_granted(grant.credential_id, self._clock())",
    "pass",
)
def test_a_removed_grant_takes_its_placeholders_for_good(granted: Workspace) -> None:
    (grant,) = granted.control_plane.made("GET", granted.path("grants"))["items"]
    issued = granted.exchange()

    granted.remove_grant(grant)
    gone = granted.resolve(issued)
    granted.grant()

    assert gone["code"] == "revoked_placeholder"
    assert granted.resolve(issued)["code"] == "revoked_placeholder"


@pytest.mark.guards("control_plane/resolution.py", "or binding is None or not binding.scopes:", "or binding is None:")
def test_without_any_grant_left_a_placeholder_resolves_to_nothing(granted: Workspace) -> None:
    issued = granted.exchange()

    granted.control_plane.edit("DELETE FROM grants WHERE tenant = ?", granted.tenant)

    assert granted.resolve(issued)["code"] == "revoked_placeholder"


def test_a_placeholder_lives_on_while_another_grant_stands(granted: Workspace) -> None:
    first = granted.control_plane.made("GET", granted.path("grants"))["items"][0]
    granted.grant(subject="alice", methods=["GET"])
    issued = granted.exchange()

    granted.remove_grant(first)

    answer = granted.resolve(issued)
    assert [scope["methods"] for scope in answer["binding"]["scopes"]] == [["GET"]]


@pytest.mark.parametrize("kind", ["grants", "allow-rules", "placeholders"])
def test_what_is_another_tenants_is_not_found(granted: Workspace, other_workspace: Workspace, kind: str) -> None:
    granted.exchange()
    granted.control_plane.made("POST", granted.path("allow-rules"), {"host": "mirror.test"})
    (mine,) = granted.control_plane.made("GET", granted.path(kind))["items"]

    response = other_workspace.control_plane.admin("DELETE", other_workspace.path(f"{kind}/{mine['id']}"))

    assert (response.status_code, response.json()["code"]) == (404, "not_found")
    assert granted.control_plane.made("GET", granted.path(kind))["items"] == [mine]
    assert other_workspace.control_plane.made("GET", other_workspace.path(kind))["items"] == []


# --- allow rules -----------------------------------------------------------------------------------------------------


def test_a_callers_policy_has_its_routes_and_its_tenants_allow_rules(
    granted: Workspace, other_workspace: Workspace
) -> None:
    granted.add_credential("not-granted", destinations=[{"url": "https://hidden.example"}])
    granted.control_plane.made("POST", granted.path("allow-rules"), {"host": "Mirror.Test.", "methods": ["GET"]})
    other_workspace.control_plane.made("POST", other_workspace.path("allow-rules"), {"host": "evil.example"})
    caller = granted.caller(granted.exchange())

    policy = granted.policy(caller)

    assert policy["caller"] == caller
    assert [route["credential_name"] for route in policy["routes"]] == ["example"]
    assert policy["routes"][0]["destinations"][0]["endpoint"] == {"scheme": "https", "host": HOST, "port": 443}
    assert [(rule["host"], rule["methods"]) for rule in policy["allow"]] == [("mirror.test", ["GET"])]


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py", "or_(RULES.c.session.is_(None), RULES.c.session == session)", "true()"
)
def test_an_allow_rule_of_a_session_is_for_that_session_alone(granted: Workspace) -> None:
    mine, other = granted.open_session(), granted.open_session()
    granted.control_plane.made(
        "POST", granted.path("allow-rules"), {"host": "mirror.test", "session": mine["session_id"]}
    )

    policies = [granted.policy(granted.caller(granted.exchange(session))) for session in (mine, other)]

    assert [len(policy["allow"]) for policy in policies] == [1, 0]


def test_an_allow_rule_for_a_session_that_is_over_is_refused(granted: Workspace) -> None:
    session = granted.open_session()
    granted.end_session(session)

    response = granted.control_plane.admin(
        "POST", granted.path("allow-rules"), {"host": "mirror.test", "session": session["session_id"]}
    )

    assert response.status_code == 422


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "https://mirror.test"},
        {"host": "mirror.test:443"},
        {"host": "2130706433"},
        {"host": "*.mirror.test"},
        {"host": ""},
        {"host": "mirror.test", "port": 0},
        {"host": "mirror.test", "port": 65_536},
        {"host": "mirror.test", "port": "443"},
        {"host": "mirror.test", "methods": []},
        {"host": "mirror.test", "allow_private": 1},
    ],
    ids=str,
)
def test_a_bad_allow_rule_is_refused(workspace: Workspace, fields: Json) -> None:
    response = workspace.control_plane.admin("POST", workspace.path("allow-rules"), fields)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")


def test_a_removed_allow_rule_is_in_no_policy(granted: Workspace) -> None:
    rule = granted.control_plane.made("POST", granted.path("allow-rules"), {"host": "mirror.test"})
    caller = granted.caller(granted.exchange())

    granted.control_plane.made("DELETE", granted.path(f"allow-rules/{rule['id']}"))

    assert granted.policy(caller)["allow"] == []


# --- placeholders ----------------------------------------------------------------------------------------------------


def test_placeholders_are_listed_without_themselves(granted: Workspace) -> None:
    issued = granted.exchange()

    response = granted.control_plane.admin("GET", granted.path("placeholders"))

    (item,) = response.json()["items"]
    assert (item["id"], item["kind"], item["credential"]) == (issued["id"], "placeholder", "example")
    assert (item["subject"], item["client"], item["revoked_at"]) == ("alice", granted.runtime, None)
    assert issued["access_token"] not in response.text
    assert sha256(issued["access_token"]) not in response.text


def test_proxy_credentials_are_listed_when_asked_for(granted: Workspace) -> None:
    granted.exchange()

    listed = granted.control_plane.made("GET", granted.path("placeholders?kind=proxy_credential"))

    assert [(item["kind"], item["credential"]) for item in listed["items"]] == [("proxy_credential", None)]


def issue(workspace: Workspace, **fields: object) -> Json:
    body = {"subject": "alice", "audience": "example", "ttl_seconds": 60} | fields
    return workspace.control_plane.made("POST", workspace.path("placeholders"), body)


def test_an_operator_issues_a_placeholder_without_a_session(granted: Workspace) -> None:
    issued = issue(granted)

    answer = granted.resolve(issued)
    assert (issued["session_id"], issued["expires_in"]) == (None, 60)
    assert issued["base_url"] == f"{PROXY_BASE_URL}/example"
    assert answer["secret"] == SECRET
    assert answer["binding"]["caller"]["session"] is None
    assert granted.who(issued["proxy_credential"])["caller"]["session"] is None


def test_an_operator_issues_a_placeholder_with_a_session_of_its_own(granted: Workspace) -> None:
    issued = issue(granted, session=True)

    assert granted.resolve(issued)["secret"] == SECRET
    assert granted.renew(issued)["session_id"] == issued["session_id"]


def test_a_placeholder_without_a_session_is_not_renewed(granted: Workspace) -> None:
    response = granted.renewal(issue(granted))

    assert (response.status_code, response.json()["code"]) == (400, "expired_placeholder")


def test_an_operator_issues_nothing_that_is_not_granted(granted: Workspace) -> None:
    body = {"subject": "bob", "audience": "example", "ttl_seconds": 60}

    response = granted.control_plane.admin("POST", granted.path("placeholders"), body)

    assert (response.status_code, response.json()["code"]) == (404, "credential_not_found")


@pytest.mark.parametrize(
    "fields",
    [{"ttl_seconds": 0}, {"ttl_seconds": 10**9}, {"ttl_seconds": True}, {"client": "nobody"}, {"client": "test-proxy"}],
    ids=str,
)
def test_a_placeholder_with_a_bad_field_is_not_issued(granted: Workspace, fields: Json) -> None:
    body = {"subject": "alice", "audience": "example", "ttl_seconds": 60} | fields

    response = granted.control_plane.admin("POST", granted.path("placeholders"), body)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")


def test_a_revoked_placeholder_stays_revoked_and_again_changes_nothing(granted: Workspace) -> None:
    issued = granted.exchange()

    for _ in range(2):
        granted.control_plane.made("DELETE", granted.path(f"placeholders/{issued['id']}"))

    assert granted.resolve(issued)["code"] == "revoked_placeholder"
    assert len([event for event in granted.audit() if event["action"] == "placeholder.revoke"]) == 1
