"""The exchange over HTTP: what is issued, to whom, for how long, and every way of not getting it (RFC 8693)."""

import json
import re
from urllib.parse import urlencode

import httpx
import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import PROXY, PROXY_BASE_URL
from tests.control_plane.workspace import (
    GRANT_TYPE,
    HOST,
    JWT,
    PLACEHOLDER,
    SECRET,
    SESSION,
    Json,
    Workspace,
)

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def assert_oauth_error(response: httpx.Response, error: str, code: str | None = None, *, status: int = 400) -> None:
    body = response.json()
    assert (response.status_code, body["error"]) == (status, error), response.text
    assert code is None or body["code"] == code, response.text
    assert body["error_description"]
    assert response.headers["cache-control"] == "no-store"
    assert "access_token" not in body


# --- what is issued --------------------------------------------------------------------------------------------------


def test_a_session_token_is_exchanged_for_a_placeholder(granted: Workspace) -> None:
    session = granted.open_session()

    response = granted.token(subject_token=session["session_token"], subject_token_type=JWT, audience="example")

    answer = response.json()
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    assert re.fullmatch(r"coat_coatchk1[0-9A-Za-z]{28}", answer["access_token"])
    assert answer["upstream_credential"] == {"mode": "placeholder", "value": answer["access_token"]}
    assert re.fullmatch(r"coatprx1[0-9A-Za-z]{28}", answer["proxy_credential"])
    assert answer["issued_token_type"] == PLACEHOLDER
    assert answer["token_type"] == "Bearer"
    assert answer["expires_in"] == 900
    assert answer["base_url"] == f"{PROXY_BASE_URL}/example"
    assert answer["placement"] == {"kind": "header", "name": "authorization", "format": "Bearer {secret}"}
    assert answer["placements"] == [answer["placement"]]
    assert (answer["subject"], answer["tenant"], answer["session_id"]) == (
        "alice",
        granted.tenant,
        session["session_id"],
    )
    assert (answer["credential"], answer["variables"], answer["destinations"]) == (
        "example",
        ["EXAMPLE_API_KEY"],
        [f"https://{HOST}"],
    )
    assert SECRET not in response.text


def test_the_token_type_is_bearer_only_where_the_placement_is(granted: Workspace) -> None:
    granted.add_credential("keyed", placements=[{"kind": "header", "name": "x-api-key"}])
    granted.grant("keyed")

    assert granted.exchange(audience="keyed")["token_type"] == "N_A"


def test_a_placeholder_looks_like_its_providers_keys(granted: Workspace) -> None:
    granted.control_plane.made(
        "POST", granted.path("credentials"), {"name": "github", "preset": "github", "secret": SECRET}
    )
    granted.grant("github")

    placeholder = granted.exchange(audience="github")["access_token"]

    assert placeholder.startswith("ghp_coatchk1")
    assert len(placeholder) == 40


def test_two_exchanges_never_give_the_same_strings(granted: Workspace) -> None:
    session = granted.open_session()

    answers = [granted.exchange(session) for _ in range(5)]

    assert len({answer["access_token"] for answer in answers}) == 5
    assert len({answer["proxy_credential"] for answer in answers}) == 5


@pytest.mark.parametrize(
    "audience",
    ["example", HOST, HOST.upper(), f"{HOST}.", f"{HOST}:443", f"https://{HOST}", f"https://{HOST}/v1/models"],
)
def test_an_audience_is_a_name_or_a_host_in_any_spelling(granted: Workspace, audience: str) -> None:
    assert granted.exchange(audience=audience)["credential"] == "example"


def test_an_audience_is_a_provider_where_no_credential_has_that_name(granted: Workspace) -> None:
    granted.control_plane.made(
        "POST", granted.path("credentials"), {"name": "our-openai", "preset": "openai", "secret": SECRET}
    )
    granted.grant("our-openai")

    assert granted.exchange(audience="openai")["credential"] == "our-openai"
    assert granted.exchange(audience="api.openai.com")["credential"] == "our-openai"


@pytest.mark.parametrize("resource", [f"https://{HOST}", f"https://{HOST}/", f"https://{HOST}/v1/models"])
def test_a_resource_is_a_url(granted: Workspace, resource: str) -> None:
    session = granted.open_session()

    response = granted.token(subject_token=session["session_token"], subject_token_type=JWT, resource=resource)

    assert response.json()["credential"] == "example"


def test_a_client_names_itself_in_basic_with_form_encoding_too(granted: Workspace) -> None:
    session = granted.open_session()

    response = granted.token_as(
        (granted.runtime, granted.runtime_secret.replace("a", "%61")),
        subject_token=session["session_token"],
        subject_token_type=JWT,
        audience="example",
    )

    assert response.status_code == 200


def test_unknown_parameters_are_ignored_and_empty_ones_absent(granted: Workspace) -> None:
    session = granted.open_session()

    response = granted.token(
        subject_token=session["session_token"],
        subject_token_type=JWT,
        audience="example",
        scope="",
        resource="",
        actor_token="",
        requested_token_type="",
        unheard_of="x",
    )

    assert response.status_code == 200


@pytest.mark.parametrize(
    "asked", ["urn:coatcheck:token-type:placeholder", "urn:ietf:params:oauth:token-type:access_token"]
)
def test_a_placeholder_may_be_asked_for_by_either_name(granted: Workspace, asked: str) -> None:
    session = granted.open_session()

    response = granted.token(
        subject_token=session["session_token"],
        subject_token_type=JWT,
        audience="example",
        requested_token_type=asked,
    )

    assert response.json()["issued_token_type"] == PLACEHOLDER


@pytest.mark.guards("control_plane/issuance.py", "min(now + ttl_seconds, mandate.not_after)", "now + ttl_seconds")
def test_nothing_issued_outlives_the_session(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(session_seconds=60), "acme")
    workspace.add_credential()
    workspace.grant()

    issued = workspace.exchange()

    assert issued["expires_in"] in (59, 60)
    assert workspace.who(issued["proxy_credential"])["expires_at"] == pytest.approx(
        workspace.resolve(issued)["binding"]["expires_at"], abs=1
    )


def test_without_the_proxys_address_nothing_is_issued(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(proxy_base_url=""), "acme")
    workspace.add_credential()
    workspace.grant()
    session = workspace.open_session()

    response = workspace.token(subject_token=session["session_token"], subject_token_type=JWT, audience="example")

    assert_oauth_error(response, "invalid_target", "endpoint_unresolved")
    assert workspace.control_plane.look("SELECT * FROM tokens") == []


# --- every way of not getting it -------------------------------------------------------------------------------------

REFUSED_FORMS: dict[str, tuple[Json, str, str | None]] = {
    "no grant type": ({"grant_type": None}, "unsupported_grant_type", None),
    "another grant type": ({"grant_type": "authorization_code"}, "unsupported_grant_type", None),
    "a runtime that would name subjects": ({"grant_type": "client_credentials"}, "unauthorized_client", "forbidden"),
    "no subject token": ({"subject_token": None}, "invalid_request", None),
    "an empty subject token": ({"subject_token": ""}, "invalid_request", None),
    "no subject token type": ({"subject_token_type": None}, "invalid_request", None),
    "an unknown subject token type": ({"subject_token_type": "urn:x"}, "invalid_request", None),
    "an id token": (
        {"subject_token_type": "urn:ietf:params:oauth:token-type:id_token"},
        "invalid_request",
        None,
    ),
    "no audience": ({"audience": None}, "invalid_request", None),
    "an empty audience": ({"audience": ""}, "invalid_request", None),
    "an unknown audience": ({"audience": "nothing-like-it"}, "invalid_target", "credential_not_found"),
    "an unknown host": ({"audience": "evil.example"}, "invalid_target", "credential_not_found"),
    "the host on another port": ({"audience": f"{HOST}:8443"}, "invalid_target", "credential_not_found"),
    "the host by http": ({"audience": f"http://{HOST}"}, "invalid_target", "credential_not_found"),
    "the client itself": ({"audience": "RUNTIME"}, "invalid_target", "credential_not_found"),
    "an audience that is no host": ({"audience": "a b\nc"}, "invalid_target", "credential_not_found"),
    "a resource elsewhere": ({"resource": "https://evil.example"}, "invalid_target", "credential_not_found"),
    "a resource that is no URL": ({"resource": HOST}, "invalid_target", "credential_not_found"),
    "a scope": ({"scope": "admin"}, "invalid_scope", None),
    "several scopes": ({"scope": "turn:write admin"}, "invalid_scope", None),
    "an unknown requested type": ({"requested_token_type": "urn:x"}, "invalid_request", None),
    "the key itself": (
        {"requested_token_type": "urn:coatcheck:token-type:direct"},
        "invalid_target",
        "direct_not_allowed",
    ),
    "an actor": ({"actor_token": "x"}, "invalid_request", None),
    "another subject": ({"requested_subject": "bob"}, "invalid_request", "subject_conflict"),
    "garbage for a token": ({"subject_token": "x.y.z"}, "invalid_request", "token_invalid"),
    "a session id that nobody joined": (
        {"subject_token": "SID", "subject_token_type": SESSION},
        "invalid_request",
        "token_invalid",
    ),
    "a session id that is none": (
        {"subject_token": "\0'--", "subject_token_type": SESSION},
        "invalid_request",
        "token_invalid",
    ),
}


@pytest.mark.parametrize(("fields", "error", "code"), REFUSED_FORMS.values(), ids=REFUSED_FORMS.keys())
def test_what_was_not_asked_for_exactly_is_an_error_and_issues_nothing(
    granted: Workspace, fields: Json, error: str, code: str | None
) -> None:
    session = granted.open_session()
    form = {
        "grant_type": GRANT_TYPE,
        "subject_token": session["session_token"],
        "subject_token_type": JWT,
        "audience": "example",
    } | fields
    stand_ins = {"SID": session["session_id"], "RUNTIME": granted.runtime}
    sent = {name: stand_ins.get(value, value) for name, value in form.items() if value is not None}

    response = granted.control_plane.http.post(
        "/oauth/token", data=sent, auth=(granted.runtime, granted.runtime_secret)
    )

    assert_oauth_error(response, error, code)
    listed = granted.control_plane.made("GET", granted.path("placeholders"))
    assert listed["items"] == []


def test_two_audiences_are_an_error_not_a_choice(granted: Workspace) -> None:
    granted.add_credential("second")
    granted.grant("second")
    session = granted.open_session()
    form = [
        ("grant_type", GRANT_TYPE),
        ("subject_token", session["session_token"]),
        ("subject_token_type", JWT),
        ("audience", "example"),
        ("audience", "second"),
    ]

    response = granted.control_plane.http.post(
        "/oauth/token", content=urlencode(form), headers=FORM, auth=(granted.runtime, granted.runtime_secret)
    )

    assert_oauth_error(response, "invalid_request")
    assert "'audience'" in response.json()["error_description"]


def test_an_audience_and_a_resource_that_disagree_are_an_error(granted: Workspace) -> None:
    granted.add_credential("second", destinations=[{"url": "https://second.example"}])
    granted.grant("second")
    session = granted.open_session()

    response = granted.token(
        subject_token=session["session_token"],
        subject_token_type=JWT,
        audience="example",
        resource="https://second.example",
    )

    assert_oauth_error(response, "invalid_target", "credential_not_found")


def test_several_credentials_of_one_host_are_ambiguous(granted: Workspace) -> None:
    granted.add_credential("second")
    granted.grant("second")
    session = granted.open_session()

    response = granted.token(subject_token=session["session_token"], subject_token_type=JWT, audience=HOST)

    assert_oauth_error(response, "invalid_target", "credential_ambiguous")


def test_a_credential_that_is_not_granted_makes_nothing_ambiguous(granted: Workspace) -> None:
    granted.add_credential("second")

    assert granted.exchange(audience=HOST)["credential"] == "example"


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (json.dumps({"grant_type": GRANT_TYPE}).encode(), "application/json"),
        (b"grant_type=x", "text/plain"),
        (b"grant_type=x", ""),
        (b"grant_type=\xff", "application/x-www-form-urlencoded"),
        (b"grant_type=%ff", "application/x-www-form-urlencoded"),
        (b"&".join(b"a=1" for _ in range(500)), "application/x-www-form-urlencoded"),
    ],
    ids=["JSON", "text", "no type", "bytes that are no text", "escapes that are no text", "hundreds of parameters"],
)
def test_what_is_no_form_is_an_error_that_says_so(granted: Workspace, content: bytes, content_type: str) -> None:
    response = granted.control_plane.http.post(
        "/oauth/token",
        content=content,
        headers={"Content-Type": content_type},
        auth=(granted.runtime, granted.runtime_secret),
    )

    assert_oauth_error(response, "invalid_request")


@pytest.mark.parametrize("auth", [None, ("nobody", "x" * 43), ("RUNTIME", "wrong"), ("RUNTIME", "")])
def test_a_client_that_proves_nothing_is_an_invalid_client(granted: Workspace, auth: tuple[str, str] | None) -> None:
    session = granted.open_session()
    form = {"grant_type": GRANT_TYPE, "subject_token": session["session_token"], "subject_token_type": JWT}
    user = auth and (granted.runtime if auth[0] == "RUNTIME" else auth[0], auth[1])

    response = granted.control_plane.http.post(
        "/oauth/token", data=form, auth=httpx.BasicAuth(*user) if user else httpx.USE_CLIENT_DEFAULT
    )

    assert_oauth_error(response, "invalid_client", "token_invalid", status=401)
    assert response.headers["www-authenticate"].startswith("Basic ")


@pytest.mark.guards(
    "control_plane/exchange.py",
    "# (1) Only a runtime exchanges, and only by this grant type.\n        require_runtime(client)",
    "# (1)\n        pass",
)
def test_a_proxy_never_exchanges(granted: Workspace) -> None:
    session = granted.open_session()

    response = granted.token_as(
        PROXY, subject_token=session["session_token"], subject_token_type=JWT, audience="example"
    )

    assert_oauth_error(response, "unauthorized_client", "forbidden")


# --- grants ----------------------------------------------------------------------------------------------------------


def test_what_is_not_granted_looks_exactly_like_what_is_not_there(workspace: Workspace) -> None:
    workspace.add_credential()
    session = workspace.open_session()

    def ask(audience: str) -> httpx.Response:
        return workspace.token(subject_token=session["session_token"], subject_token_type=JWT, audience=audience)

    not_granted, not_there = ask("example"), ask("nothing-like-it")

    assert_oauth_error(not_granted, "invalid_target", "credential_not_found")
    assert not_granted.content == not_there.content
    volatile = ("coatcheck-request-id", "date")
    assert [pair for pair in not_granted.headers.items() if pair[0] not in volatile] == [
        pair for pair in not_there.headers.items() if pair[0] not in volatile
    ]


NOT_FOR_ALICE: dict[str, Json] = {
    "another subject": {"subject": "bob"},
    "a role she does not have": {"role": "admins"},
    "another client": {"subject": "alice", "client": "test-proxy"},
    "a time that is over": {"subject": "alice", "until": 1},
}


@pytest.mark.guards(
    "control_plane/issuance.py",
    "return [Granted(credential, live(grants, now)) for credential, grants in pairs if live(grants, now)]",
    "return [Granted(credential, grants) for credential, grants in pairs]",
)
@pytest.mark.parametrize("grant", NOT_FOR_ALICE.values(), ids=NOT_FOR_ALICE.keys())
def test_a_grant_for_somebody_else_is_none(workspace: Workspace, grant: Json) -> None:
    workspace.add_credential()
    workspace.grant(**grant)
    session = workspace.open_session("alice")

    response = workspace.token(subject_token=session["session_token"], subject_token_type=JWT, audience="example")

    assert_oauth_error(response, "invalid_target", "credential_not_found")


FOR_ALICE: dict[str, Json] = {
    "herself": {"subject": "alice"},
    "a role of hers": {"role": "engineers"},
    "herself through this runtime": {"subject": "alice", "client": "RUNTIME"},
    "until some time": {"subject": "alice", "until": 4_000_000_000},
}


@pytest.mark.parametrize("grant", FOR_ALICE.values(), ids=FOR_ALICE.keys())
def test_a_grant_for_her_is_enough(workspace: Workspace, grant: Json) -> None:
    workspace.add_credential()
    named = {name: workspace.runtime if value == "RUNTIME" else value for name, value in grant.items()}
    workspace.grant(**named)

    issued = workspace.exchange(workspace.open_session("alice", roles=["engineers"]))

    assert workspace.resolve(issued)["secret"] == SECRET


def test_a_grant_of_another_tenant_is_none(workspace: Workspace, other_workspace: Workspace) -> None:
    workspace.add_credential()
    other_workspace.add_credential()
    other_workspace.grant()
    session = workspace.open_session("alice")

    response = workspace.token(subject_token=session["session_token"], subject_token_type=JWT, audience="example")

    assert_oauth_error(response, "invalid_target", "credential_not_found")


# --- renewal in place ------------------------------------------------------------------------------------------------


def test_a_renewal_gives_the_same_strings_for_longer(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(placeholder_ttl_seconds=100), "acme")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()
    before = workspace.resolve(issued)["binding"]["expires_at"]
    workspace.control_plane.clock.advance(60)

    renewed = workspace.renew(issued, proxy_credential=issued["proxy_credential"])

    assert renewed == issued
    assert workspace.resolve(issued)["binding"]["expires_at"] == pytest.approx(before + 60, abs=5)
    assert workspace.who(issued["proxy_credential"])["expires_at"] == pytest.approx(before + 60, abs=5)


def test_an_expired_placeholder_is_renewed_while_its_session_lives(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(placeholder_ttl_seconds=5), "acme")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()
    workspace.control_plane.clock.advance(3_600)
    expired, unknown_caller = workspace.resolve(issued), workspace.who(issued["proxy_credential"])

    workspace.renew(issued, proxy_credential=issued["proxy_credential"])

    assert expired["code"] == "expired_placeholder"
    assert unknown_caller["code"] == "proxy_authentication_required"
    assert workspace.resolve(issued)["secret"] == SECRET
    assert workspace.who(issued["proxy_credential"])["kind"] == "caller"


def test_a_renewal_never_outlives_the_session(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(placeholder_ttl_seconds=100, session_seconds=150), "acme")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()
    workspace.control_plane.clock.advance(100)

    assert workspace.renew(issued)["expires_in"] in (49, 50)


@pytest.mark.guards(
    "control_plane/exchange.py",
    "if session is None or not session.is_live(self._clock()):",
    "if session is None:",
)
def test_a_session_that_ran_out_renews_nothing(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(session_seconds=60), "acme")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()
    workspace.control_plane.clock.advance(61)

    assert_oauth_error(workspace.renewal(issued), "invalid_request", "session_not_found")


def test_a_renewal_without_the_proxy_credential_gives_a_fresh_one(granted: Workspace) -> None:
    issued = granted.exchange()

    renewed = granted.renew(issued)

    assert renewed["access_token"] == issued["access_token"]
    assert renewed["proxy_credential"] != issued["proxy_credential"]
    assert granted.who(renewed["proxy_credential"])["caller"] == granted.caller(issued)


def test_a_renewal_may_name_the_audience_it_has_and_no_other(granted: Workspace) -> None:
    granted.add_credential("second", destinations=[{"url": "https://second.example"}])
    granted.grant("second")
    issued = granted.exchange()

    assert granted.renewal(issued, audience="example").status_code == 200
    assert_oauth_error(granted.renewal(issued, audience="second"), "invalid_target", "credential_not_found")


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py",
    "(TOKENS.c.sha256 == sha256, TOKENS.c.revoked_at.is_(None), self",
    "(TOKENS.c.sha256 == sha256, self",
)
@pytest.mark.parametrize("revoked", ["access_token", "proxy_credential"])
def test_what_was_revoked_is_not_renewed(granted: Workspace, revoked: str) -> None:
    issued = granted.exchange()
    before = granted.resolve(issued)
    revoke(granted, issued[revoked])

    response = granted.renewal(issued, proxy_credential=issued["proxy_credential"])

    assert_oauth_error(response, "invalid_request", "revoked_placeholder")
    unchanged = granted.resolve(issued)["binding"]["expires_at"]
    assert unchanged == before["binding"]["expires_at"]


def test_a_renewal_for_another_subject_is_an_error(granted: Workspace) -> None:
    response = granted.renewal(granted.exchange(), requested_subject="bob")

    assert_oauth_error(response, "invalid_request", "subject_conflict")


def test_a_renewal_needs_the_grant_still(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    workspace.add_credential()
    workspace.grant(subject="alice", until=workspace.control_plane.clock() + 60)
    issued = workspace.exchange()
    workspace.control_plane.clock.advance(61)

    assert_oauth_error(workspace.renewal(issued), "invalid_target", "credential_not_found")


@pytest.mark.guards(
    "control_plane/exchange.py", "if token is None or token.client != client.id or not", "if token is None or not"
)
def test_another_clients_placeholder_is_not_renewed(granted: Workspace) -> None:
    issued = granted.exchange()
    stranger = f"{granted.tenant}-stranger"
    secret = granted.add_client(stranger, "runtime")

    response = granted.token_as(
        (stranger, secret), subject_token=issued["access_token"], subject_token_type=PLACEHOLDER
    )

    assert_oauth_error(response, "invalid_request", "unknown_placeholder")


@pytest.mark.guards("control_plane/exchange.py", "if proxy_token.caller != placeholder.caller:", "if False:")
def test_a_proxy_credential_of_another_session_is_not_renewed_along(granted: Workspace) -> None:
    issued, other = granted.exchange(), granted.exchange()

    response = granted.renewal(issued, proxy_credential=other["proxy_credential"])

    assert_oauth_error(response, "invalid_request", "unknown_placeholder")


@pytest.mark.parametrize("forged", ["coat_coatchk1" + "0" * 28, "nothing like it", "coatchk1", "x" * 9_000])
def test_a_string_that_was_never_minted_is_not_renewed(granted: Workspace, forged: str) -> None:
    response = granted.token(subject_token=forged, subject_token_type=PLACEHOLDER)

    assert_oauth_error(response, "invalid_request", "unknown_placeholder")
    assert forged not in response.text


def test_a_proxy_credential_is_no_placeholder(granted: Workspace) -> None:
    issued = granted.exchange()

    response = granted.token(subject_token=issued["proxy_credential"], subject_token_type=PLACEHOLDER)

    assert_oauth_error(response, "invalid_request", "unknown_placeholder")


# --- further audiences of a joined session ---------------------------------------------------------------------------


def test_a_client_that_joined_a_session_may_name_it_instead_of_a_token(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    workspace.add_credential()
    workspace.grant()
    workspace.add_credential("second", destinations=[{"url": "https://second.example"}])
    workspace.grant("second")
    session = workspace.open_session()
    workspace.exchange(session)
    workspace.control_plane.clock.advance(3_600)  # its token is long over

    response = workspace.token(subject_token=session["session_id"], subject_token_type=SESSION, audience="second")

    assert response.json()["session_id"] == session["session_id"]
    assert response.json()["credential"] == "second"


@pytest.mark.guards("control_plane/proof.py", "session.joined_by != client.id", "False")
def test_a_session_is_named_only_by_the_client_that_joined_it(granted: Workspace) -> None:
    session = granted.open_session()

    response = granted.token(subject_token=session["session_id"], subject_token_type=SESSION, audience="example")

    assert_oauth_error(response, "invalid_request", "token_invalid")


def test_a_refused_exchange_joins_nothing(granted: Workspace) -> None:
    session = granted.open_session()
    granted.token(subject_token=session["session_token"], subject_token_type=JWT, audience="nothing-like-it")

    response = granted.token(subject_token=session["session_id"], subject_token_type=SESSION, audience="example")

    assert_oauth_error(response, "invalid_request", "token_invalid")


def test_an_ended_session_is_named_by_nobody(granted: Workspace) -> None:
    session = granted.open_session()
    granted.exchange(session)
    granted.end_session(session)

    response = granted.token(subject_token=session["session_id"], subject_token_type=SESSION, audience="example")

    assert_oauth_error(response, "invalid_request", "session_not_found")


# --- revocation (RFC 7009) -------------------------------------------------------------------------------------------


def revoke(workspace: Workspace, token: str, client: tuple[str, str] | None = None) -> httpx.Response:
    return workspace.control_plane.http.post(
        "/oauth/revoke", data={"token": token}, auth=client or (workspace.runtime, workspace.runtime_secret)
    )


def test_a_client_revokes_its_placeholder_and_its_proxy_credential(granted: Workspace) -> None:
    issued = granted.exchange()

    answers = [revoke(granted, issued[name]) for name in ("access_token", "proxy_credential", "access_token")]

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert granted.resolve(issued)["code"] == "revoked_placeholder"
    assert granted.who(issued["proxy_credential"])["code"] == "proxy_authentication_required"


@pytest.mark.guards(
    "control_plane/introspection.py", "if token is None or token.client != client.id:", "if token is None:"
)
def test_another_clients_token_is_left_alone(granted: Workspace) -> None:
    issued = granted.exchange()
    stranger = f"{granted.tenant}-stranger"
    secret = granted.add_client(stranger, "runtime")

    response = revoke(granted, issued["access_token"], (stranger, secret))

    assert (response.status_code, response.content) == (200, b"")
    assert granted.resolve(issued)["secret"] == SECRET


def test_a_token_that_is_not_there_is_revoked_already(granted: Workspace) -> None:
    assert revoke(granted, "nothing like it").status_code == 200


def test_a_revocation_without_a_token_is_an_error(granted: Workspace) -> None:
    response = granted.control_plane.http.post(
        "/oauth/revoke", data={"token": ""}, auth=(granted.runtime, granted.runtime_secret)
    )

    assert_oauth_error(response, "invalid_request")


# --- the trail -------------------------------------------------------------------------------------------------------


def test_what_was_issued_and_what_was_refused_stand_in_the_trail(granted: Workspace) -> None:
    session = granted.open_session()
    issued = granted.exchange(session)
    refused = granted.token(subject_token=session["session_token"], subject_token_type=JWT, audience="nothing-like-it")

    exchanges = [event for event in granted.audit() if event["action"] == "exchange"]

    assert [event.get("code") for event in exchanges] == [None, "credential_not_found"]
    assert exchanges[0]["placeholder_id"] == issued["id"]
    assert exchanges[0]["subject"] == "alice"
    assert exchanges[0]["client"] == granted.runtime
    assert (exchanges[1]["subject"], exchanges[1]["session"]) == ("alice", session["session_id"])
    assert exchanges[1]["request_id"] == refused.headers["coatcheck-request-id"]
    assert issued["access_token"] not in str(exchanges)


def test_a_shared_runtimes_refusal_stands_in_the_trail_of_the_tenant_it_was_for(granted: Workspace) -> None:
    shared = f"{granted.tenant}-shared"
    secret = granted.add_client(shared, "runtime", tenant=None)
    session = granted.open_session(runtime=shared)

    granted.token_as(
        (shared, secret), subject_token=session["session_token"], subject_token_type=JWT, audience="nothing-like-it"
    )

    (refused,) = [event for event in granted.audit() if event["action"] == "exchange"]
    assert (refused["code"], refused["client"]) == ("credential_not_found", shared)
