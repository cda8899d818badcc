"""Tokens of trusted issuers: whose sessions they open, and what an issuer's record may say."""

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import structlog
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from control_plane.core.issuer_presets import ISSUER_PRESETS
from tests.control_plane.issuing import AUDIENCE, Provider, SigningKey, bearer
from tests.control_plane.serving import ControlPlane
from tests.control_plane.workspace import Json, Workspace


@pytest.fixture
def provider(workspace: Workspace) -> Provider:
    return Provider(f"idp-{workspace.tenant}")


def opened(workspace: Workspace, token: str, **fields: Any) -> httpx.Response:
    body = {"runtime": workspace.runtime} | fields
    return workspace.control_plane.http.post("/v1/sessions", json=body, headers=bearer(token))


def session_of(workspace: Workspace, answer: httpx.Response) -> Json:
    assert answer.status_code == 201, answer.text
    return workspace.control_plane.made("GET", f"/v1/sessions/{answer.json()['session_id']}")


# --- sessions --------------------------------------------------------------------------------------------------------


def test_an_issuers_token_opens_a_session_for_its_own_subject(workspace: Workspace, provider: Provider) -> None:
    provider.register(
        workspace.control_plane,
        tenant=workspace.tenant,
        claims={
            "subject": {"claim": "sub"},
            "tenant": {"fixed": workspace.tenant},
            "roles": {"claim": "groups", "map": {"eng": ["engineers", "everybody"], "ops": ["operators"]}},
        },
    )

    session = session_of(workspace, opened(workspace, provider.token("alice", groups=["eng", "unheard-of"])))

    assert (session["tenant"], session["subject"]) == (workspace.tenant, "alice")
    assert session["roles"] == ["engineers", "everybody"]
    (event,) = [event for event in workspace.audit() if event["action"] == "session.open"]
    assert event["extra"]["by"] == f"{provider.name}:alice"
    assert "client" not in event


def test_nobody_opens_a_session_of_somebody_else(workspace: Workspace, provider: Provider) -> None:
    provider.register(workspace.control_plane, tenant=workspace.tenant)

    for fields in ({"subject": "bob"}, {"tenant": "another"}):
        assert opened(workspace, provider.token("alice"), **fields).status_code == 401
    assert opened(workspace, provider.token("alice"), roles=["admins"]).status_code == 403
    assert opened(workspace, provider.token("alice"), subject="alice", tenant=workspace.tenant).status_code == 201


def test_the_owner_gets_fresh_tokens_and_ends_the_session_by_the_issuers_token(
    workspace: Workspace, other_workspace: Workspace, provider: Provider
) -> None:
    provider.register(workspace.control_plane, tenant=workspace.tenant)
    http, path = workspace.control_plane.http, "/v1/sessions/{}"
    mine = path.format(opened(workspace, provider.token("alice")).json()["session_id"])
    elsewhere = path.format(other_workspace.open_session("alice")["session_id"])

    assert http.post(f"{mine}/token", headers=bearer(provider.token("alice"))).status_code == 200
    for session, subject in ((mine, "bob"), (elsewhere, "alice")):
        for method, rest in (("POST", "/token"), ("GET", ""), ("DELETE", "")):
            assert http.request(method, session + rest, headers=bearer(provider.token(subject))).status_code in (
                401,
                404,
            )
    assert http.delete(mine, headers=bearer(provider.token("alice"))).status_code == 204


SERVICE_ACCOUNT = {"claim": "sub", "pattern": "system:serviceaccount:{value}:*"}
BY_NAME = {"claim": "org", "map": {"Acme Inc.": "TENANT"}}


@pytest.mark.guards(
    "control_plane/core/patterns.py", "{len(text) - at for at in mirrored}", "set(range(len(text) + 1))"
)
@pytest.mark.parametrize(
    ("tenant", "claims", "status"),
    [
        (BY_NAME, {"org": "Acme Inc."}, 201),
        (BY_NAME, {"org": "Evil Inc."}, 401),
        (BY_NAME, {}, 401),
        (BY_NAME, {"org": ["Acme Inc."]}, 401),
        ({"claim": "/deep/org"}, {"deep": {"org": "TENANT"}}, 201),
        ({"claim": "/deep/org"}, {"deep": "TENANT"}, 401),
        (SERVICE_ACCOUNT, {"sub": "system:serviceaccount:TENANT:agent"}, 201),
        (SERVICE_ACCOUNT, {"sub": "system:serviceaccount:other:TENANT:agent"}, 401),
        (SERVICE_ACCOUNT, {"sub": "x:system:serviceaccount:TENANT:agent"}, 401),
        ({"claim": "org"}, {"org": "Not A Tenant's Name"}, 401),
    ],
)
def test_the_tenant_is_what_the_table_derives(
    workspace: Workspace, provider: Provider, tenant: Json, claims: Json, status: int
) -> None:
    def meant(value: Any) -> Any:
        if isinstance(value, dict):
            return {meant(key): meant(inner) for key, inner in value.items()}
        return value.replace("TENANT", workspace.tenant) if isinstance(value, str) else value

    table = {"subject": {"claim": "sub"}, "tenant": meant(tenant)}
    provider.register(workspace.control_plane, tenant="", claims=table)

    answer = opened(workspace, provider.key.sign(provider.claims() | meant(claims)))

    assert answer.status_code == status, answer.text
    if status == 201:
        assert session_of(workspace, answer)["tenant"] == workspace.tenant


@pytest.mark.guards("control_plane/core/identity.py", "if issuer.unknown_claims is Others.REFUSE and", "if False and")
def test_a_claim_that_is_not_in_the_table_is_refused_unless_the_record_says_otherwise(
    workspace: Workspace, provider: Provider
) -> None:
    claims = {"subject": {"claim": "sub"}, "tenant": {"fixed": workspace.tenant}, "ignore": ["email"]}
    record = provider.register(workspace.control_plane, tenant="", claims=claims)
    surprising = provider.token("alice", email="a@x.test", department="7")

    refused = opened(workspace, surprising)
    known = opened(workspace, provider.token("alice", email="a@x.test"))
    changed = provider.record(tenant="", claims=claims, unknown_claims="ignore")
    workspace.control_plane.made("PUT", f"/v1/issuers/{record['name']}", changed)
    accepted = opened(workspace, surprising)

    assert [answer.status_code for answer in (refused, known, accepted)] == [401, 201, 201]


@pytest.mark.guards("control_plane/core/claims.py", "if not _is_among(_at(payload, path), expected):", "if False:")
@pytest.mark.parametrize(
    ("required", "found", "status"),
    [
        ({"azp": ["web", "cli"]}, {"azp": "cli"}, 201),
        ({"azp": ["web", "cli"]}, {"azp": "clip"}, 401),
        ({"azp": ["web", "cli"]}, {}, 401),
        ({"repository": ["acme/*"]}, {"repository": "acme/tools"}, 201),
        ({"repository": ["acme/*"]}, {"repository": "acme/tools/more"}, 401),
        ({"repository": ["acme/*"]}, {"repository": "evil/acme/tools"}, 401),
        ({"groups": ["agents"]}, {"groups": ["people", "agents"]}, 201),
        ({"groups": ["agents"]}, {"groups": ["people"]}, 401),
        ({"email_verified": [True]}, {"email_verified": True}, 201),
        ({"email_verified": [True]}, {"email_verified": "true"}, 401),
        ({"email_verified": [True]}, {"email_verified": 1}, 401),
        ({"/cnf/level": [2]}, {"cnf": {"level": 2}}, 201),
    ],
)
def test_what_is_required_has_to_be_there(
    workspace: Workspace, provider: Provider, required: Json, found: Json, status: int
) -> None:
    claims = {"subject": {"claim": "sub"}, "tenant": {"fixed": workspace.tenant}, "require": required}
    provider.register(workspace.control_plane, tenant="", claims=claims)

    assert opened(workspace, provider.token("alice", **found)).status_code == status


def test_subjects_of_two_issuers_are_kept_apart_by_a_prefix(workspace: Workspace, provider: Provider) -> None:
    claims = {"subject": {"claim": "sub", "prefix": "corp:"}, "tenant": {"fixed": workspace.tenant}}
    provider.register(workspace.control_plane, tenant="", claims=claims)

    session = session_of(workspace, opened(workspace, provider.token("alice")))

    assert session["subject"] == "corp:alice"


@pytest.mark.parametrize("subject", ["", " \n", "a\x00b", "x" * 256, "\ud800"])
def test_a_subject_that_is_no_name_is_refused(workspace: Workspace, provider: Provider, subject: str) -> None:
    provider.register(workspace.control_plane, tenant=workspace.tenant)

    assert opened(workspace, provider.token(subject)).status_code == 401


def test_an_issuer_that_is_deleted_is_believed_no_more(workspace: Workspace, provider: Provider) -> None:
    provider.register(workspace.control_plane, tenant=workspace.tenant)
    before = opened(workspace, provider.token("alice"))

    workspace.control_plane.made("DELETE", f"/v1/issuers/{provider.name}")

    assert (before.status_code, opened(workspace, provider.token("alice")).status_code) == (201, 401)


def test_a_use_that_is_not_said_is_none(workspace: Workspace, provider: Provider) -> None:
    provider.register(workspace.control_plane, tenant=workspace.tenant, uses=["client"])

    assert opened(workspace, provider.token("alice")).status_code == 401


# --- records ---------------------------------------------------------------------------------------------------------


def refusal(control_plane: ControlPlane, record: Json) -> str:
    response = control_plane.admin("POST", "/v1/issuers", record)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_field"), response.text
    return str(response.json()["detail"])


ADMIN_RULE = {"claim": "groups", "map": {"admins": {"role": "platform_admin"}}}
ADMIN_RULE = {"claim": "groups", "map": {"admins": {"role": "platform_admin"}}}
PRIVATE = {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "d": "AA"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"claims": {}}, "claims"),
        ({"claims": {"subject": {"claim": "sub"}}}, "claims.tenant"),
        ({"claims": {"subject": {"claim": "sub"}, "tenant": {}}}, "claims.tenant"),
        ({"claims": {"subject": {"claim": "sub"}, "tenant": {"fixed": "a", "claim": "b"}}}, "claims.tenant"),
        ({"claims": {"subject": {"claim": "sub"}, "tenant": {"claim": "b", "map": {}}}}, "claims.tenant"),
        ({"claims": {"subject": {"claim": "sub"}, "tenant": {"fixed": "a"}, "rolls": {}}}, "claims.rolls"),
        ({"claims": {"subject": {"claim": "sub", "pattern": "{value}{value}"}}}, "claims.subject.pattern"),
        ({"claims": {"subject": {"claim": "/"}, "tenant": {"fixed": "a"}}}, "claims.subject.claim"),
        ({"claims": {"subject": {}, "tenant": {"fixed": "a"}, "require": {"x": []}}}, "claims.require"),
        ({"claims": {"subject": {}, "tenant": {"fixed": "a"}, "admin": ADMIN_RULE}}, "claims.admin"),
        ({"uses": []}, "uses"),
        ({"uses": ["session", "admin"]}, "claims.admin"),
        ({"audiences": []}, "audiences"),
        ({"audiences": ["coatcheck-proxy"]}, "audiences"),
        ({"algorithms": ["HS256"]}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"algorithms": []}, "algorithms"),
        ({"keys": []}, "keys"),
        ({"discovery": True}, "keys"),
        ({"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}, "keys.0"),
        ({"keys": [PRIVATE]}, "keys.0"),
        ({"keys": [SigningKey("r", "RS256").jwk]}, "keys.0"),
        ({"keys": [], "jwks_url": "http://idp.test/keys"}, "jwks_url"),
        ({"keys": [], "jwks_url": "https://user@idp.test/keys"}, "jwks_url"),
        ({"keys": [], "jwks_url": "file:///etc/passwd"}, "jwks_url"),
        ({"issuer": "idp.test"}, "issuer"),
        ({"issuer": None}, "issuer"),
        ({"identified_by": "trust_domain", "issuer": "https://x.test"}, "issuer"),
        ({"token_types": ["coatcheck-session+jwt"]}, "token_types"),
        ({"preset": "okta"}, "preset"),
        ({"keys_max_age_seconds": 600, "keys_max_stale_seconds": 60}, "keys_max_stale_seconds"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused_by_the_name_of_its_field(
    workspace: Workspace, provider: Provider, fields: Json, field: str
) -> None:
    detail = refusal(workspace.control_plane, provider.record(tenant=workspace.tenant, **fields))

    assert detail.startswith((f"{field}:", f"{field}.")), detail
    assert "c2VjcmV0" not in detail


def test_the_control_plane_is_no_issuer_to_itself(workspace: Workspace, provider: Provider) -> None:
    record = provider.record(tenant=workspace.tenant, issuer=workspace.control_plane.url)

    assert refusal(workspace.control_plane, record).startswith("issuer:")


def test_a_public_issuer_has_to_be_narrowed(workspace: Workspace, provider: Provider) -> None:
    record: Json = {
        "name": provider.name,
        "preset": "github_actions",
        "uses": ["session"],
        "claims": {"tenant": {"fixed": workspace.tenant}},
    }

    detail = refusal(workspace.control_plane, record)

    assert detail.startswith("claims.require: anybody can get a token of GitHub Actions OIDC")


def test_every_preset_makes_a_record(control_plane: ControlPlane) -> None:
    for number, preset in enumerate(ISSUER_PRESETS):
        issuer = {"spiffe": f"spiffe://td{number}.test", "github_actions": None}.get(preset, f"https://p{number}.test")
        record: Json = {
            "name": f"preset-{number}",
            "preset": preset,
            "issuer": issuer,
            "uses": ["session", "client"],
            "claims": {"tenant": {"fixed": "acme"}, "require": {"sub": ["a/*"]}},
        }
        if preset == "spiffe":
            record["jwks_url"] = "https://bundle.test/keys"

        made = control_plane.made("POST", "/v1/issuers", record)

        assert made["claims"]["subject"]["claim"] == "sub"
        control_plane.made("DELETE", f"/v1/issuers/preset-{number}")
    assert {each["id"] for each in control_plane.made("GET", "/v1/issuer-presets")["items"]} == set(ISSUER_PRESETS)


def test_two_records_of_one_issuer_are_refused(workspace: Workspace, provider: Provider) -> None:
    provider.register(workspace.control_plane, tenant=workspace.tenant)

    again = refusal(workspace.control_plane, provider.record(tenant=workspace.tenant))
    renamed = refusal(workspace.control_plane, provider.record(tenant=workspace.tenant, name="another-name"))

    assert again.startswith("name:")
    assert renamed.startswith("issuer:")


def test_a_change_is_in_the_trail(workspace: Workspace, provider: Provider) -> None:
    plane = workspace.control_plane
    provider.register(plane, tenant=workspace.tenant)
    plane.made("PUT", f"/v1/issuers/{provider.name}", provider.record(tenant=workspace.tenant))
    plane.made("DELETE", f"/v1/issuers/{provider.name}")

    events = [item for item in plane.look("SELECT action, record FROM audit_events") if provider.issuer in item[1]]

    assert [action for action, _ in events] == ["issuer.add", "issuer.change", "issuer.delete"]


# --- a dry run -------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_becomes_of_each_claim_and_opens_nothing(workspace: Workspace, provider: Provider) -> None:
    provider.register(workspace.control_plane, tenant=workspace.tenant)
    path = f"/v1/issuers/{provider.name}/test"

    good = workspace.control_plane.made("POST", path, {"token": provider.token("alice"), "use": "session"})
    bad = workspace.control_plane.made("POST", path, {"token": provider.token("alice", extra=1), "use": "session"})
    nothing = workspace.control_plane.made("POST", path, {"token": "x", "use": "session"})

    assert (good["accepted"], good["subject"], good["tenant"]) == (True, "alice", workspace.tenant)
    assert {"claim": "sub", "outcome": "gives subject"} in good["claims"]
    assert (bad["accepted"], bad["reason"]) == (False, "claims: not in the table: extra")
    assert {"claim": "extra", "outcome": "not in the table: refuse"} in bad["claims"]
    assert (nothing["accepted"], nothing["reason"]) == (False, "form")
    assert [event["action"] for event in workspace.audit()].count("session.open") == 0


def test_an_audience_that_is_left_out_is_our_own(workspace: Workspace, provider: Provider) -> None:
    made = provider.register(workspace.control_plane, tenant=workspace.tenant, audiences=None)

    assert made["audiences"] == [workspace.control_plane.url]
    assert opened(workspace, provider.token(aud=workspace.control_plane.url)).status_code == 201
    assert opened(workspace, provider.token(aud=AUDIENCE)).status_code == 401


# --- the log ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def everything_is_logged() -> Iterator[None]:
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    yield
    structlog.configure(wrapper_class=before)


@pytest.mark.guards("control_plane/api/edge.py", "with bound_contextvars(request_id=request_id), ", "with ")
def test_what_is_said_of_a_token_that_is_not_believed_says_of_which_request_it_was(
    workspace: Workspace, provider: Provider, everything_is_logged: None
) -> None:
    provider.register(workspace.control_plane, tenant=workspace.tenant)
    stranger = Provider("stranger")
    form = {
        "grant_type": "client_credentials",
        "client_id": workspace.runtime,
        "client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
        "client_assertion": stranger.token("somebody"),
    }

    with capture_logs(processors=[merge_contextvars]) as logs:
        answers = {
            "token_not_believed": opened(workspace, stranger.token("alice")),
            "client_assertion_not_believed": workspace.control_plane.http.post("/oauth/token", data=form),
        }
        other = workspace.control_plane.http.get("/.well-known/jwks.json")

    for event, answer in answers.items():
        said = [line for line in logs if line["event"] == event]
        assert answer.headers["coatcheck-request-id"] in [line["request_id"] for line in said]
    assert len({line["request_id"] for line in logs if line["event"] == "request"}) == 3
    of_other = [line["event"] for line in logs if line["request_id"] == other.headers["coatcheck-request-id"]]
    assert of_other == ["request"]
