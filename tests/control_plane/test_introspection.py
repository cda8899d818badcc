"""Introspection (RFC 7662), revocation (RFC 7009), and what the metadata (RFC 8414) promises against what there is."""

from urllib.parse import urlsplit

import httpx
import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import ADMIN_TOKEN, PROXY, ControlPlane
from tests.control_plane.test_delegation import Operator, asserted
from tests.control_plane.test_exchange import assert_oauth_error
from tests.control_plane.workspace import GRANT_TYPE, JWT, SESSION, Json, Workspace

INACTIVE = {"active": False}


def introspected(workspace: Workspace, token: str, login: tuple[str, str] | None = None) -> Json:
    response = workspace.control_plane.http.post(
        "/oauth/introspect", data={"token": token}, auth=login or (workspace.runtime, workspace.runtime_secret)
    )
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    answer: Json = response.json()
    return answer


def as_administrator(workspace: Workspace, token: str, bearer: str = ADMIN_TOKEN) -> httpx.Response:
    return workspace.control_plane.http.post(
        "/oauth/introspect", data={"token": token}, headers={"Authorization": f"Bearer {bearer}"}
    )


# --- what a token is -------------------------------------------------------------------------------------------------


def test_a_placeholder_is_described_to_the_client_that_it_was_issued_to(granted: Workspace) -> None:
    session = granted.open_session()
    form = {"subject_token": session["session_token"], "subject_token_type": JWT, "audience": "example"}
    issued = granted.token(**form, scope="read").json()

    answer = introspected(granted, issued["access_token"])

    assert answer["active"] is True
    assert (answer["token_type"], answer["scope"], answer["sub"]) == ("placeholder", "read", "alice")
    assert (answer["client_id"], answer["tenant"]) == (granted.runtime, granted.tenant)
    assert (answer["session_id"], answer["credential"], answer["aud"]) == (session["session_id"], "example", "example")
    assert answer["exp"] - answer["iat"] == 900
    assert answer["jti"] == issued["id"]
    assert "act" not in answer


def test_a_proxy_credential_a_session_token_and_a_client_token_are_described_too(granted: Workspace) -> None:
    operator = Operator(granted)
    issued = asserted(granted, operator.token()).json()
    path = f"/v1/sessions/{issued['session_id']}/token"
    session_token = granted.control_plane.made("POST", path)["session_token"]

    kinds = {
        introspected(granted, text)["token_type"]: introspected(granted, text)
        for text in (issued["proxy_credential"], session_token, operator.token())
    }

    assert set(kinds) == {"proxy_credential", "session", "client"}
    assert kinds["session"]["act"] == kinds["proxy_credential"]["act"] == operator.act()
    assert kinds["session"]["scope"] == "turn:write"
    assert (kinds["client"]["sub"], kinds["client"]["scope"]) == (operator.id, "subject:assert")


def test_who_opened_the_session_and_administrators_hear_of_it_too(granted: Workspace) -> None:
    operator = Operator(granted)
    issued = asserted(granted, operator.token()).json()

    assert introspected(granted, issued["access_token"], operator.login)["active"] is True
    assert as_administrator(granted, issued["access_token"]).json()["active"] is True


@pytest.mark.guards(
    "control_plane/introspection.py",
    "if facts is None or not _is_seen(facts.token, facts.session, viewer, self._issuer):",
    "if facts is None:",
)
@pytest.mark.guards(
    "control_plane/introspection.py", "if not _is_session_seen(session, viewer, self._issuer):", "if False:"
)
@pytest.mark.guards("control_plane/introspection.py", "if not is_seen:", "if False:")
def test_to_everybody_else_every_token_is_as_inactive_as_one_that_never_was(
    granted: Workspace, other_workspace: Workspace
) -> None:
    operator, stranger = Operator(granted), Operator(other_workspace)
    idle = Operator(granted, "idle")
    session = granted.open_session()
    issued = granted.exchange(session)
    tokens = [issued["access_token"], issued["proxy_credential"], session["session_token"], operator.token()]
    others = [
        (other_workspace.runtime, other_workspace.runtime_secret),
        *(stranger.login, idle.login, PROXY),
    ]

    for token in tokens:
        for login in others:
            assert introspected(granted, token, login) == INACTIVE, login
    assert introspected(granted, "nothing like it") == INACTIVE
    for nobody in (httpx.USE_CLIENT_DEFAULT, httpx.BasicAuth("nobody", "x" * 43)):
        refused = granted.control_plane.http.post("/oauth/introspect", data={"token": tokens[0]}, auth=nobody)
        assert_oauth_error(refused, "invalid_client", status=401)
    assert as_administrator(granted, tokens[0], "wrong").status_code == 401


# --- active means that it would work now -----------------------------------------------------------------------------


@pytest.mark.guards("control_plane/introspection.py", "if not await self._works(records, facts):", "if False:")
@pytest.mark.parametrize(
    "over",
    ["revoked", "session ended", "grant removed", "credential deleted", "client gone"],
)
def test_what_would_not_work_any_more_is_inactive(granted: Workspace, over: str) -> None:
    session = granted.open_session()
    issued = granted.exchange(session)
    before = as_administrator(granted, issued["access_token"]).json()
    match over:
        case "revoked":
            revoke(granted, issued["access_token"])
        case "session ended":
            granted.end_session(session)
        case "grant removed":
            for grant in granted.control_plane.made("GET", granted.path("grants"))["items"]:
                granted.remove_grant(grant)
        case "credential deleted":
            granted.control_plane.made("DELETE", granted.path("credentials/example"))
        case _:
            granted.control_plane.made("DELETE", f"/v1/clients/{granted.runtime}")

    assert before["active"] is True
    assert as_administrator(granted, issued["access_token"]).json() == INACTIVE


def test_what_is_expired_is_inactive(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(placeholder_ttl_seconds=60), "acme")
    workspace.add_credential()
    workspace.grant()
    session = workspace.open_session()
    issued = workspace.exchange(session)
    workspace.control_plane.clock.advance(301)

    for token in (issued["access_token"], issued["proxy_credential"], session["session_token"]):
        assert introspected(workspace, token) == INACTIVE


# --- revocation ------------------------------------------------------------------------------------------------------


def revoke(workspace: Workspace, token: str, login: tuple[str, str] | None = None, **form: str) -> httpx.Response:
    return workspace.control_plane.http.post(
        "/oauth/revoke", data={"token": token} | form, auth=login or (workspace.runtime, workspace.runtime_secret)
    )


@pytest.mark.parametrize("by", ["token", "id"])
def test_revoking_a_session_by_its_token_or_its_id_ends_it_and_all_that_hangs_on_it(
    granted: Workspace, by: str
) -> None:
    session = granted.open_session()
    issued = granted.exchange(session)

    response = revoke(granted, session["session_token" if by == "token" else "session_id"])

    assert (response.status_code, response.content) == (200, b"")
    assert granted.resolve(issued)["kind"] == "refused"
    again = granted.token(subject_token=session["session_id"], subject_token_type=SESSION, audience="example")
    assert_oauth_error(again, "invalid_request", "session_not_found")
    assert [event["action"] for event in granted.audit() if event["action"] == "session.end"] == ["session.end"]


@pytest.mark.guards(
    "control_plane/introspection.py",
    "if found is None or not _is_session_seen(found, client, self._issuer):",
    "if found is None:",
)
def test_somebody_elses_session_is_left_alone(granted: Workspace, other_workspace: Workspace) -> None:
    session = granted.open_session()
    issued = granted.exchange(session)
    stranger = (other_workspace.runtime, other_workspace.runtime_secret)

    answers = [revoke(granted, session[name], stranger) for name in ("session_token", "session_id")]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert granted.resolve(issued)["kind"] == "placeholder"


@pytest.mark.guards(
    "control_plane/introspection.py", "if of_joined_alone and found.joined_by != client.id:", "if False:"
)
def test_an_id_alone_ends_no_session_that_the_client_never_held(granted: Workspace) -> None:
    session = granted.open_session()

    revoke(granted, session["session_id"])

    assert granted.control_plane.made("GET", f"/v1/sessions/{session['session_id']}")["ended_at"] is None


def test_a_client_ends_the_session_that_it_opened_for_a_subject(granted: Workspace) -> None:
    operator, idle = Operator(granted), Operator(granted, "idle")
    issued = asserted(granted, operator.token()).json()
    path = f"/v1/sessions/{issued['session_id']}"
    token = granted.control_plane.made("POST", f"{path}/token")["session_token"]

    revoke(granted, token, idle.login)
    before = granted.control_plane.made("GET", path)["ended_at"]
    revoke(granted, token, operator.login)

    assert before is None
    assert granted.control_plane.made("GET", path)["ended_at"] is not None


def test_a_client_token_says_that_it_is_not_revoked_by_itself_and_only_to_its_client(granted: Workspace) -> None:
    operator = Operator(granted)

    assert_oauth_error(revoke(granted, operator.token(), operator.login), "unsupported_token_type")
    assert revoke(granted, operator.token()).status_code == 200


@pytest.mark.parametrize("hint", ["access_token", "refresh_token", "nothing-like-it"])
def test_a_wrong_hint_changes_nothing(granted: Workspace, hint: str) -> None:
    issued = granted.exchange()

    assert revoke(granted, issued["access_token"], token_type_hint=hint).status_code == 200
    assert granted.resolve(issued)["code"] == "revoked_placeholder"


# --- metadata --------------------------------------------------------------------------------------------------------


def metadata_of(control_plane: ControlPlane) -> Json:
    response = control_plane.http.get("/.well-known/oauth-authorization-server")
    assert response.headers["content-type"] == "application/json"
    answer: Json = response.json()
    return answer


def test_every_endpoint_that_the_metadata_names_is_there_and_every_one_that_is_there_is_named(
    control_plane: ControlPlane,
) -> None:
    metadata = metadata_of(control_plane)
    paths = control_plane.http.get("/openapi.json").json()["paths"]

    named = {urlsplit(metadata[name]).path for name in metadata if name.endswith("_endpoint")}
    assert named == {path for path in paths if path.startswith("/oauth/")}
    assert all(metadata[name].startswith(metadata["issuer"] + "/") for name in metadata if name.endswith("_endpoint"))
    assert control_plane.http.get(urlsplit(metadata["jwks_uri"]).path).json()["keys"]


def test_every_grant_type_that_the_metadata_names_is_known_and_no_other(granted: Workspace) -> None:
    promised = metadata_of(granted.control_plane)["grant_types_supported"]
    login = (granted.runtime, granted.runtime_secret)

    for grant_type in (*promised, "authorization_code", "refresh_token", "password", "implicit"):
        response = granted.token_as(login, grant_type=grant_type)
        assert (response.json()["error"] == "unsupported_grant_type") == (grant_type not in promised), grant_type


def test_every_scope_that_the_metadata_names_is_issued(granted: Workspace) -> None:
    operator = Operator(granted)

    for scope in metadata_of(granted.control_plane)["scopes_supported"]:
        if scope == "subject:assert":
            assert operator.asked(scope=scope).json()["scope"] == scope
        else:
            form = {"subject_token": granted.open_session()["session_token"], "subject_token_type": JWT}
            assert granted.token(**form, audience="example", scope=scope).json()["scope"] == scope


def test_tokens_say_the_issuer_that_the_metadata_does(granted: Workspace) -> None:
    metadata = metadata_of(granted.control_plane)

    assert introspected(granted, granted.open_session()["session_token"])["iss"] == metadata["issuer"]
    assert metadata["response_types_supported"] == []
    assert GRANT_TYPE in metadata["grant_types_supported"]


def test_the_ways_to_prove_a_client_are_those_that_work_at_every_endpoint(granted: Workspace) -> None:
    metadata = metadata_of(granted.control_plane)

    for endpoint in ("token", "revocation", "introspection"):
        methods = metadata[f"{endpoint}_endpoint_auth_methods_supported"]
        assert {"client_secret_basic", "private_key_jwt"} <= set(methods)
        assert metadata[f"{endpoint}_endpoint_auth_signing_alg_values_supported"]
        assert "none" not in metadata[f"{endpoint}_endpoint_auth_signing_alg_values_supported"]
        assert ("tls_client_auth" in methods) == bool(granted.control_plane.settings.client_ca_files)
