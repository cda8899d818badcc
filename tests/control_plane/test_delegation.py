"""Who acts for whom: client tokens, asserted subjects, actor tokens, and the chain that is never lost (RFC 8693 §4)."""

import time
from typing import Any

import httpx
import jwt
import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import ControlPlane
from tests.control_plane.test_exchange import assert_oauth_error
from tests.control_plane.test_session_tokens import signed, signing_key_of
from tests.control_plane.workspace import JWT, PROXY_CREDENTIAL, SESSION, Json, Workspace

CLIENT_CREDENTIALS = {"grant_type": "client_credentials"}


class Operator:
    """A client with `subject:assert` in a workspace."""

    def __init__(self, workspace: Workspace, name: str = "ci") -> None:
        self.workspace = workspace
        self.id = f"{workspace.tenant}-{name}"
        self.secret = workspace.add_client(self.id, "operator", scopes=["subject:assert"])

    @property
    def login(self) -> tuple[str, str]:
        return self.id, self.secret

    def asked(self, **form: str) -> httpx.Response:
        return self.workspace.token_as(self.login, **({"audience": self.workspace.runtime} | CLIENT_CREDENTIALS | form))

    def token(self, **form: str) -> str:
        response = self.asked(**form)
        assert response.status_code == 200, response.text
        text: str = response.json()["access_token"]
        return text

    def act(self) -> Json:
        return {"sub": self.id, "iss": issuer(self.workspace), "client_id": self.id}


def issuer(workspace: Workspace) -> str:
    metadata = workspace.control_plane.http.get("/.well-known/oauth-authorization-server").json()
    text: str = metadata["issuer"]
    return text


@pytest.fixture
def operator(granted: Workspace) -> Operator:
    return Operator(granted)


def asserted(workspace: Workspace, token: str, subject: str = "alice", **form: str) -> httpx.Response:
    form = {
        "subject_token": token,
        "subject_token_type": JWT,
        "requested_subject": subject,
        "audience": "example",
    } | form
    return workspace.token(**form)


# --- client tokens ---------------------------------------------------------------------------------------------------


def test_a_client_token_names_the_client_and_one_runtime_for_five_minutes(operator: Operator) -> None:
    response = operator.asked(scope="subject:assert")

    answer = response.json()
    header, payload = (
        jwt.get_unverified_header(answer["access_token"]),
        jwt.decode(answer["access_token"], options={"verify_signature": False}),
    )
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    assert (answer["token_type"], answer["expires_in"], answer["scope"]) == ("Bearer", 300, "subject:assert")
    assert header["typ"] == "coatcheck-client+jwt"
    assert (payload["aud"], payload["sub"], payload["tenant"]) == (
        operator.workspace.runtime,
        operator.id,
        operator.workspace.tenant,
    )
    assert payload["exp"] - payload["iat"] == 300
    assert "roles" not in payload
    assert "sid" not in payload


CLIENT_TOKEN_REFUSALS: dict[str, tuple[Json, str]] = {
    "no audience": ({"audience": ""}, "invalid_request"),
    "an unknown audience": ({"audience": "nobody-at-all"}, "invalid_target"),
    "an audience that is no client id": ({"audience": "https://runtime.example"}, "invalid_target"),
    "an audience that is itself": ({"audience": "SELF"}, "invalid_target"),
    "an audience that is a proxy": ({"audience": "test-proxy"}, "invalid_target"),
    "a resource": ({"resource": "https://api.example.com"}, "invalid_target"),
    "a wider scope": ({"scope": "subject:assert turn:write"}, "invalid_scope"),
    "another scope": ({"scope": "admin"}, "invalid_scope"),
    "a subject token": ({"subject_token": "x"}, "invalid_request"),
    "a requested subject": ({"requested_subject": "alice"}, "invalid_request"),
    "an actor": ({"actor_token": "x"}, "invalid_request"),
    "another kind of token": ({"requested_token_type": PROXY_CREDENTIAL}, "invalid_request"),
}


@pytest.mark.guards(
    "control_plane/client_tokens.py",
    "if found is None or found.kind is not ClientKind.RUNTIME or not found.serves(tenant):",
    "if False:",
)
@pytest.mark.guards("control_plane/client_tokens.py", "if request.scope not in (None, SUBJECT_ASSERT):", "if False:")
@pytest.mark.parametrize(("fields", "error"), CLIENT_TOKEN_REFUSALS.values(), ids=CLIENT_TOKEN_REFUSALS.keys())
def test_a_client_token_is_exactly_what_was_asked_for_or_an_error(operator: Operator, fields: Json, error: str) -> None:
    named = {name: operator.id if value == "SELF" else value for name, value in fields.items()}

    assert_oauth_error(operator.asked(**named), error)


def test_a_runtime_of_another_tenant_is_no_audience(operator: Operator, other_workspace: Workspace) -> None:
    assert_oauth_error(operator.asked(audience=other_workspace.runtime), "invalid_target", "not_found")


@pytest.mark.guards(
    "control_plane/client_tokens.py",
    "if client.tenant is None or not asserts_subjects_in(client, client.tenant):",
    "if client.tenant is None:",
)
def test_only_a_client_with_the_scope_gets_a_client_token_and_never_a_runtime(granted: Workspace) -> None:
    plain = f"{granted.tenant}-plain"
    secret = granted.add_client(plain, "operator")
    form = CLIENT_CREDENTIALS | {"audience": granted.runtime}

    for login in ((plain, secret), (granted.runtime, granted.runtime_secret)):
        assert_oauth_error(granted.token_as(login, **form), "unauthorized_client", "forbidden")


# --- asserted subjects -----------------------------------------------------------------------------------------------


def test_a_client_token_and_a_subject_open_a_session_in_which_the_client_acts(operator: Operator) -> None:
    workspace = operator.workspace

    answer = asserted(workspace, operator.token()).json()

    session = workspace.control_plane.made("GET", f"/v1/sessions/{answer['session_id']}")
    assert (answer["subject"], answer["tenant"]) == ("alice", workspace.tenant)
    assert answer["act"] == operator.act()
    assert session["act"] == operator.act()
    assert session["roles"] == []
    assert workspace.resolve(answer)["kind"] == "placeholder"


def test_the_actor_stands_in_the_row_the_trail_and_every_further_exchange_of_the_session(operator: Operator) -> None:
    workspace = operator.workspace
    first = asserted(workspace, operator.token()).json()
    sid = first["session_id"]
    token = workspace.control_plane.made("POST", f"/v1/sessions/{sid}/token")["session_token"]

    again = [
        workspace.token(subject_token=sid, subject_token_type=SESSION, audience="example").json(),
        workspace.token(subject_token=token, subject_token_type=JWT, audience="example").json(),
        workspace.renew(first),
    ]

    assert [answer["act"] for answer in again] == [operator.act()] * 3
    assert jwt.decode(token, options={"verify_signature": False})["act"] == operator.act()
    ((row,),) = workspace.control_plane.look("SELECT act FROM tokens WHERE id = ?", first["id"])
    assert operator.id in row
    of_session = [event for event in workspace.audit() if event.get("session") == sid]
    assert {event["action"] for event in of_session} == {"session.open", "exchange", "exchange.renew"}
    assert {event["extra"]["act"] for event in of_session} == {operator.id}


@pytest.mark.parametrize("subject", ["", "a\nb", "x" * 256, "\x00"])
def test_a_subject_that_is_none_is_not_asserted(operator: Operator, subject: str) -> None:
    assert_oauth_error(asserted(operator.workspace, operator.token(), subject), "invalid_request")


def test_an_asserted_subject_has_its_own_grants_and_no_roles(operator: Operator) -> None:
    operator.workspace.add_credential("for-admins")
    operator.workspace.grant("for-admins", role="admins")

    assert_oauth_error(asserted(operator.workspace, operator.token(), "bob"), "invalid_target", "credential_not_found")
    assert_oauth_error(
        asserted(operator.workspace, operator.token(), audience="for-admins"), "invalid_target", "credential_not_found"
    )


def test_a_refused_assertion_opens_no_session(operator: Operator) -> None:
    before = operator.workspace.control_plane.look("SELECT count(*) FROM sessions")

    asserted(operator.workspace, operator.token(), audience="nothing-like-it")

    assert operator.workspace.control_plane.look("SELECT count(*) FROM sessions") == before


@pytest.mark.guards(
    "control_plane/core/client_token.py", "if audience is not None and claims.audience != audience:", "if False:"
)
def test_a_client_token_is_worthless_at_another_runtime(operator: Operator) -> None:
    thief = f"{operator.workspace.tenant}-thief"
    secret = operator.workspace.add_client(thief, "runtime")

    response = operator.workspace.token_as(
        (thief, secret),
        subject_token=operator.token(),
        subject_token_type=JWT,
        requested_subject="alice",
        audience="example",
    )

    assert_oauth_error(response, "invalid_request", "token_invalid")


@pytest.mark.guards(
    "control_plane/proof.py",
    "if asserting is None or not asserts_subjects_in(asserting, claims.tenant) or not",
    "if asserting is None or not",
)
def test_a_client_that_lost_its_right_asserts_nobody_with_an_old_token(operator: Operator) -> None:
    token = operator.token()
    operator.workspace.control_plane.edit("UPDATE clients SET scopes = '[]' WHERE id = ?", operator.id)

    assert_oauth_error(asserted(operator.workspace, token), "invalid_request", "token_invalid")


def test_a_deleted_clients_token_asserts_nobody(operator: Operator) -> None:
    token = operator.token()
    operator.workspace.control_plane.made("DELETE", f"/v1/clients/{operator.id}")

    assert_oauth_error(asserted(operator.workspace, token), "invalid_request", "token_invalid")


def test_a_shared_runtime_opens_sessions_in_the_clients_own_tenant_alone(
    operator: Operator, other_workspace: Workspace
) -> None:
    workspace = operator.workspace
    other_workspace.add_credential()
    other_workspace.grant()
    shared = f"{workspace.tenant}-shared"
    secret = workspace.add_client(shared, "runtime", tenant=None)
    forged = {**payload_of(operator.token(audience=shared)), "tenant": other_workspace.tenant}

    def exchanged(token: str) -> httpx.Response:
        form = {"subject_token": token, "subject_token_type": JWT, "requested_subject": "alice", "audience": "example"}
        return workspace.token_as((shared, secret), **form)

    assert exchanged(operator.token(audience=shared)).json()["tenant"] == workspace.tenant
    assert_oauth_error(exchanged(by_hand(workspace.control_plane, forged)), "invalid_request", "token_invalid")


def payload_of(token: str) -> Json:
    payload: Json = jwt.decode(token, options={"verify_signature": False})
    return payload


def by_hand(control_plane: ControlPlane, payload: Json, typ: str = "coatcheck-client+jwt") -> str:
    """Signed with the real key, as only somebody with database and key file could."""
    key = signing_key_of(control_plane)
    return signed({"typ": typ, "kid": key.id}, payload, key.private)


FORGED_CLAIMS: dict[str, Json] = {
    "another issuer": {"iss": "https://evil.example"},
    "an audience that holds ours": {"aud": "xRUNTIME"},
    "a list of audiences": {"aud": ["RUNTIME"]},
    "another client": {"sub": "somebody-else", "client_id": "somebody-else"},
    "two clients": {"client_id": "somebody-else"},
    "another scope": {"scope": "turn:write"},
    "issued in the future": {"iat": int(time.time()) + 3_600},
    "over": {"exp": int(time.time()) - 1},
    **{
        f"no {name}": {name: None}
        for name in ("iss", "aud", "sub", "client_id", "tenant", "scope", "iat", "exp", "jti")
    },
}


@pytest.mark.guards("control_plane/core/client_token.py", "if claims.issuer != issuer:", "if False:")
@pytest.mark.guards(
    "control_plane/core/client_token.py", 'if text_of(signed_payload, "client_id") != claims.client:', "if False:"
)
@pytest.mark.guards(
    "control_plane/core/client_token.py", 'if signed_payload.get("scope") != SUBJECT_ASSERT:', "if False:"
)
@pytest.mark.guards(
    "control_plane/core/client_token.py", "if claims.issued_at > now + CLOCK_SKEW_SECONDS:", "if False:"
)
@pytest.mark.guards("control_plane/core/client_token.py", "if not now < claims.expires_at:", "if False:")
@pytest.mark.parametrize("changed", FORGED_CLAIMS.values(), ids=FORGED_CLAIMS.keys())
def test_a_client_token_that_is_not_exactly_right_asserts_nobody(operator: Operator, changed: Json) -> None:
    workspace = operator.workspace
    stand_ins: dict[str, Any] = {"xRUNTIME": f"x{workspace.runtime}"}
    payload = payload_of(operator.token()) | {
        name: stand_ins.get(value, value) if isinstance(value, str) else value for name, value in changed.items()
    }
    payload = {name: value for name, value in payload.items() if value is not None}

    response = asserted(workspace, by_hand(workspace.control_plane, payload))

    assert_oauth_error(response, "invalid_request")
    assert response.json()["code"] in ("token_invalid", "token_expired")


def test_a_client_token_is_no_session_token_and_a_session_token_no_client_token(operator: Operator) -> None:
    workspace = operator.workspace
    session_token = workspace.open_session()["session_token"]
    client_token = operator.token()

    as_session = by_hand(workspace.control_plane, payload_of(client_token), "coatcheck-session+jwt")
    as_client = by_hand(workspace.control_plane, payload_of(session_token), "coatcheck-client+jwt")

    assert_oauth_error(asserted(workspace, as_session), "invalid_request", "token_invalid")
    assert_oauth_error(asserted(workspace, as_client), "invalid_request", "token_invalid")
    for bearer in (client_token, as_session):
        opened = workspace.control_plane.http.get(
            f"/v1/sessions/{payload_of(session_token)['sid']}", headers={"Authorization": f"Bearer {bearer}"}
        )
        assert opened.status_code == 401


# --- actor tokens ----------------------------------------------------------------------------------------------------


def with_actor(workspace: Workspace, session: Json, token: str, **form: str) -> httpx.Response:
    form = {
        "subject_token": session["session_token"],
        "subject_token_type": JWT,
        "audience": "example",
        "actor_token": token,
        "actor_token_type": JWT,
    } | form
    return workspace.token(**form)


def test_an_actor_that_the_subject_named_acts_and_is_written_down(operator: Operator) -> None:
    workspace = operator.workspace
    session = workspace.open_session(may_act={"sub": operator.id, "client_id": operator.id})

    answer = with_actor(workspace, session, operator.token()).json()

    assert answer["act"] == operator.act()
    (event,) = [event for event in workspace.audit() if event.get("placeholder_id") == answer["id"]]
    assert event["extra"]["act"] == operator.id


def test_another_subject_may_act_with_a_session_token_of_its_own(granted: Workspace) -> None:
    session, assistant = granted.open_session(may_act={"sub": "bob"}), granted.open_session("bob")

    answer = with_actor(granted, session, assistant["session_token"]).json()

    assert (answer["subject"], answer["act"]) == ("alice", {"sub": "bob", "iss": issuer(granted)})


def test_an_actor_is_put_before_those_who_acted_already(operator: Operator) -> None:
    workspace = operator.workspace
    body = {"subject": "alice", "runtime": workspace.runtime, "may_act": {"sub": "bob"}}
    session = workspace.control_plane.http.post("/v1/sessions", json=body, auth=operator.login).json()
    assistant = workspace.open_session("bob")

    answer = with_actor(workspace, session, assistant["session_token"]).json()
    renewed = workspace.renew(answer)

    assert answer["act"] == {"sub": "bob", "iss": issuer(workspace), "act": operator.act()}
    assert renewed["act"] == answer["act"]
    (event,) = [event for event in workspace.audit() if event["action"] == "exchange"]
    assert event["extra"]["act"] == f"bob ({issuer(workspace)}) < {operator.id}"


NOT_NAMED: dict[str, Json] = {
    "nobody": {},
    "another subject": {"may_act": {"sub": "carol"}},
    "a client of that name": {"may_act": {"sub": "bob", "client_id": "bob"}},
}


@pytest.mark.guards("control_plane/proof.py", "if not may_act(proof.may_act, actor):", "if False:")
@pytest.mark.guards(
    "control_plane/core/delegation.py",
    'if not claim or not claim.get("sub") or not set(claim) <= set(_MEMBERS):\n        return False',
    'if not claim or not claim.get("sub") or not set(claim) <= set(_MEMBERS):\n        return True',
)
@pytest.mark.parametrize("fields", NOT_NAMED.values(), ids=NOT_NAMED.keys())
def test_an_actor_that_the_subject_did_not_name_does_not_act(granted: Workspace, fields: Json) -> None:
    session, assistant = granted.open_session(**fields), granted.open_session("bob")

    response = with_actor(granted, session, assistant["session_token"])

    assert_oauth_error(response, "invalid_request", "forbidden")
    assert granted.control_plane.made("GET", granted.path("placeholders"))["items"] == []


def test_a_bad_actor_token_is_an_invalid_request_whatever_is_wrong_with_it(
    operator: Operator, other_workspace: Workspace
) -> None:
    workspace = operator.workspace
    session = workspace.open_session(may_act={"sub": "bob"})
    over, elsewhere = workspace.open_session("bob"), other_workspace.open_session("bob")
    workspace.end_session(over)
    bad = {
        "garbage": "x.y.z",
        "a session that is over": over["session_token"],
        "another tenant's session": elsewhere["session_token"],
        "a session id": workspace.open_session("bob")["session_id"],
    }

    for text in bad.values():
        assert_oauth_error(with_actor(workspace, session, text), "invalid_request", "token_invalid")


@pytest.mark.guards(
    "control_plane/proof.py",
    "if session is None or not claims.are_of(session) or session.tenant != tenant:",
    "if session is None:",
)
def test_an_actor_of_another_tenant_acts_for_nobody_here(granted: Workspace, other_workspace: Workspace) -> None:
    shared = f"{granted.tenant}-shared"
    secret = granted.add_client(shared, "runtime", tenant=None)
    session = granted.open_session(runtime=shared, may_act={"sub": "bob"})
    stranger = other_workspace.open_session("bob", runtime=shared)

    response = granted.token_as(
        (shared, secret),
        subject_token=session["session_token"],
        subject_token_type=JWT,
        audience="example",
        actor_token=stranger["session_token"],
        actor_token_type=JWT,
    )

    assert_oauth_error(response, "invalid_request", "token_invalid")


@pytest.mark.parametrize(
    "form",
    [
        {"actor_token_type": ""},
        {"actor_token_type": "urn:x"},
        {"actor_token": "", "actor_token_type": JWT},
    ],
    ids=["no type", "an unknown type", "a type without a token"],
)
def test_actor_token_and_its_type_come_together(granted: Workspace, form: dict[str, str]) -> None:
    session, assistant = granted.open_session(may_act={"sub": "bob"}), granted.open_session("bob")

    assert_oauth_error(with_actor(granted, session, assistant["session_token"], **form), "invalid_request")


def test_a_renewal_takes_no_actor(granted: Workspace) -> None:
    issued = granted.exchange()

    response = granted.renewal(issued, actor_token=granted.open_session("bob")["session_token"], actor_token_type=JWT)

    assert_oauth_error(response, "invalid_request")


def test_a_chain_does_not_grow_without_end(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    workspace.add_credential()
    workspace.grant()
    session = workspace.open_session(may_act={"sub": "bob"})
    parties = ",".join('{"sub": "x"}' for _ in range(8))
    workspace.control_plane.edit("UPDATE sessions SET act = ?", f"[{parties}]")

    response = with_actor(workspace, session, workspace.open_session("bob")["session_token"])

    assert_oauth_error(response, "invalid_request")
