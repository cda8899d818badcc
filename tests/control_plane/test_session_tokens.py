"""Session tokens: the whole table of token confusion, and the life of a session (RFC 7519, RFC 8725)."""

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane.core.records import KeyPurpose
from control_plane.core.sealing import Kek, own_key_aad
from control_plane.custody import Custody
from control_plane.own_keys import SigningKey
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import ADMIN_TOKEN, ControlPlane
from tests.control_plane.workspace import JWT, SECRET, Json, Workspace


def decoded(token: str) -> tuple[Json, Json]:
    header: Json = jwt.get_unverified_header(token)
    payload: Json = jwt.decode(token, options={"verify_signature": False})
    return header, payload


def signing_key_of(control_plane: ControlPlane) -> SigningKey:
    """The real signing key, as only somebody with the database and its key file could have it."""
    ((key_id, envelope),) = control_plane.look("SELECT id, envelope FROM own_keys WHERE purpose = 'signing'")
    kek = Kek.of(bytes.fromhex(control_plane.settings.kek_files[0].read_text()))
    seed = Custody([kek], entropy=bytes).open(envelope, aad=own_key_aad(key_id=key_id, purpose=KeyPurpose.SIGNING))
    return SigningKey.of(seed)


def segment(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


# --- what a token says -----------------------------------------------------------------------------------------------


def test_a_session_token_says_who_for_whom_and_until_when(granted: Workspace) -> None:
    session = granted.open_session("alice", roles=["engineers"])

    header, payload = decoded(session["session_token"])

    jwks = granted.control_plane.http.get("/.well-known/jwks.json").json()["keys"]
    assert header == {"typ": "coatcheck-session+jwt", "alg": "EdDSA", "kid": jwks[0]["kid"]}
    assert payload["iss"] == granted.control_plane.url
    assert (payload["aud"], payload["sub"], payload["tenant"]) == (granted.runtime, "alice", granted.tenant)
    assert (payload["sid"], payload["roles"], payload["scope"]) == (session["session_id"], ["engineers"], "turn:write")
    assert payload["exp"] - payload["iat"] == session["expires_in"] == 300
    assert payload["session_exp"] == int(session["not_after"])
    assert payload["jti"]
    assert set(payload) == {
        *("iss", "aud", "sub", "tenant", "sid", "roles", "scope", "iat", "exp", "session_exp", "jti")
    }


def test_anybody_can_verify_a_session_token_with_the_published_key(granted: Workspace) -> None:
    token = granted.open_session()["session_token"]
    (jwk,) = granted.control_plane.http.get("/.well-known/jwks.json").json()["keys"]

    key = jwt.PyJWK(jwk)
    payload = jwt.decode(token, key, algorithms=["EdDSA"], audience=granted.runtime, issuer=granted.control_plane.url)

    assert payload["sub"] == "alice"
    assert "d" not in jwk


def test_the_key_id_is_the_beginning_of_the_public_keys_digest(granted: Workspace) -> None:
    key = signing_key_of(granted.control_plane)

    (jwk,) = granted.control_plane.http.get("/.well-known/jwks.json").json()["keys"]

    assert jwk["kid"] == key.id
    assert len(key.id) == 16


def test_the_metadata_names_this_issuer(control_plane: ControlPlane) -> None:
    metadata = control_plane.http.get("/.well-known/oauth-authorization-server").json()

    assert metadata["issuer"] == control_plane.url
    assert metadata["token_endpoint"] == f"{control_plane.url}/oauth/token"
    assert metadata["token_endpoint_auth_methods_supported"] == ["client_secret_basic", "private_key_jwt"]


# --- token confusion -------------------------------------------------------------------------------------------------

Forge = Callable[[Json, Json, SigningKey], str]


def signed(header: Json, payload: Json, key: Any, algorithm: str = "EdDSA") -> str:
    return jwt.encode(payload, key, algorithm=algorithm, headers={**header, "alg": algorithm})


def without(payload: Json, name: str) -> Json:
    return {key: value for key, value in payload.items() if key != name}


FORGERIES: dict[str, Forge] = {
    "no signature, alg none": lambda h, p, k: f"{segment({**h, 'alg': 'none'})}.{segment(p)}.",
    "an empty signature": lambda h, p, k: f"{segment(h)}.{segment(p)}.",
    "another key of the same kind": lambda h, p, k: signed(h, p, Ed25519PrivateKey.generate()),
    "HS256 with the public key": lambda h, p, k: hs256_with_the_public_key(h, p, k),
    "an unknown kid": lambda h, p, k: signed({**h, "kid": "0" * 16}, p, k.private),
    "a kid that is a path": lambda h, p, k: signed({**h, "kid": "../../dev/null"}, p, k.private),
    "no kid": lambda h, p, k: signed(without(h, "kid"), p, k.private),
    "a plain JWT type": lambda h, p, k: signed({**h, "typ": "JWT"}, p, k.private),
    "a client token's type": lambda h, p, k: signed({**h, "typ": "coatcheck-client+jwt"}, p, k.private),
    "no type": lambda h, p, k: signed({**h, "typ": None}, p, k.private),
    "an extension that must be understood": lambda h, p, k: signed({**h, "crit": ["x"], "x": 1}, p, k.private),
    "a key in the header": lambda h, p, k: with_a_key_of_its_own(h, p),
    "another issuer": lambda h, p, k: signed(h, {**p, "iss": "https://evil.example"}, k.private),
    "an issuer that begins like ours": lambda h, p, k: signed(h, {**p, "iss": p["iss"] + ".evil.example"}, k.private),
    "another runtime's audience": lambda h, p, k: signed(h, {**p, "aud": "another-runtime"}, k.private),
    "an audience that holds ours": lambda h, p, k: signed(h, {**p, "aud": f"x{p['aud']}"}, k.private),
    "a list of audiences": lambda h, p, k: signed(h, {**p, "aud": [p["aud"], "other"]}, k.private),
    "another scope": lambda h, p, k: signed(h, {**p, "scope": "turn:read"}, k.private),
    "another subject": lambda h, p, k: signed(h, {**p, "sub": "bob"}, k.private),
    "another tenant": lambda h, p, k: signed(h, {**p, "tenant": "somebody-else"}, k.private),
    "another session": lambda h, p, k: signed(h, {**p, "sid": "ses_0000000000000000"}, k.private),
    "issued in the future": lambda h, p, k: signed(h, {**p, "iat": int(time.time()) + 3_600}, k.private),
    "over": lambda h, p, k: signed(h, {**p, "exp": int(time.time()) - 1}, k.private),
    "of a session that is over": lambda h, p, k: signed(h, {**p, "session_exp": int(time.time()) - 1}, k.private),
    "an expiry that is text": lambda h, p, k: signed_raw(h, {**p, "exp": "4000000000"}, k),
    "an expiry that is true": lambda h, p, k: signed_raw(h, {**p, "exp": True}, k),
    "an expiry that is no number": lambda h, p, k: signed_raw(h, {**p, "exp": float("nan")}, k),
    "a payload that is a list": lambda h, p, k: signed_raw(h, [p], k),
    **{
        f"no {claim}": lambda h, p, k, claim=claim: signed(h, without(p, claim), k.private)  # type: ignore[misc]
        for claim in ("iss", "aud", "sub", "tenant", "sid", "roles", "scope", "iat", "exp", "session_exp", "jti")
    },
}


def hs256_with_the_public_key(header: Json, payload: Json, key: SigningKey) -> str:
    public = key.private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return jwt.encode(payload, public, algorithm="HS256", headers={**header, "alg": "HS256"})


def with_a_key_of_its_own(header: Json, payload: Json) -> str:
    own = SigningKey.of(b"\x07" * 32)
    return signed({**header, "jwk": own.public_jwk(), "jku": "https://evil.example/jwks"}, payload, own.private)


def signed_raw(header: Json, payload: Any, key: SigningKey) -> str:
    """Signs what a library would refuse to."""
    signing_input = f"{segment(header)}.{segment(payload)}"
    signature = base64.urlsafe_b64encode(key.private.sign(signing_input.encode())).rstrip(b"=").decode()
    return f"{signing_input}.{signature}"


@pytest.mark.guards("control_plane/core/session_token.py", 'if unverified_header.get("typ") != typ:', "if False:")
@pytest.mark.guards("control_plane/core/session_token.py", "if claims.issuer != issuer:", "if False:")
@pytest.mark.guards(
    "control_plane/core/session_token.py", "if audience is not None and claims.audience != audience:", "if False:"
)
@pytest.mark.guards("control_plane/core/session_token.py", 'if signed_payload.get("scope") != SCOPE:', "if False:")
@pytest.mark.guards(
    "control_plane/core/session_token.py", "if claims.issued_at > now + CLOCK_SKEW_SECONDS:", "if False:"
)
@pytest.mark.guards(
    "control_plane/core/session_token.py",
    "if not now < min(claims.expires_at, claims.session_expires_at):",
    "if False:",
)
@pytest.mark.guards(
    "control_plane/exchange.py",
    "if session is None or not proof.is_of(session):",
    "if session is None:",
)
@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_token_that_is_not_exactly_right_exchanges_nothing(granted: Workspace, forge: Forge) -> None:
    header, payload = decoded(granted.open_session()["session_token"])
    forged = forge(header, payload, signing_key_of(granted.control_plane))

    response = granted.token(subject_token=forged, subject_token_type=JWT, audience="example")

    assert response.status_code == 400, response.text
    assert response.json()["error"] == "invalid_request"
    assert response.json()["code"] in ("token_invalid", "token_expired")
    assert forged not in response.text


def test_the_same_token_made_by_hand_would_have_been_right(granted: Workspace) -> None:
    header, payload = decoded(granted.open_session()["session_token"])
    by_hand = signed(header, payload, signing_key_of(granted.control_plane).private)

    response = granted.token(subject_token=by_hand, subject_token_type=JWT, audience="example")

    assert response.status_code == 200


def test_a_stolen_session_token_is_worthless_to_another_client(granted: Workspace) -> None:
    thief = f"{granted.tenant}-thief"
    secret = granted.add_client(thief, "runtime")
    session = granted.open_session()

    response = granted.token_as(
        (thief, secret), subject_token=session["session_token"], subject_token_type=JWT, audience="example"
    )

    assert response.json()["code"] == "token_invalid"


@pytest.mark.guards("control_plane/exchange.py", "session.runtime != client.id or", "")
def test_a_token_signed_for_another_client_does_not_open_the_session_of_this_one(granted: Workspace) -> None:
    other = f"{granted.tenant}-other"
    secret = granted.add_client(other, "runtime")
    header, payload = decoded(granted.open_session()["session_token"])
    for_the_other = signed(header, {**payload, "aud": other}, signing_key_of(granted.control_plane).private)

    response = granted.token_as(
        (other, secret), subject_token=for_the_other, subject_token_type=JWT, audience="example"
    )

    assert response.json()["code"] == "token_invalid"


def test_an_expired_session_token_says_so(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    workspace.add_credential()
    workspace.grant()
    session = workspace.open_session()
    workspace.control_plane.clock.advance(301)

    response = workspace.token(subject_token=session["session_token"], subject_token_type=JWT, audience="example")

    assert (response.status_code, response.json()["code"]) == (400, "token_expired")


@pytest.mark.guards(
    "control_plane/core/records.py",
    "return self.ended_at is None and now < self.not_after",
    "return now < self.not_after",
)
def test_the_live_token_of_an_ended_session_exchanges_nothing(granted: Workspace) -> None:
    session = granted.open_session()
    granted.end_session(session)

    response = granted.token(subject_token=session["session_token"], subject_token_type=JWT, audience="example")

    assert (response.status_code, response.json()["code"]) == (400, "session_not_found")


# --- who opens one ---------------------------------------------------------------------------------------------------


def basic(client: str, secret: str) -> httpx.BasicAuth:
    return httpx.BasicAuth(client, secret)


@pytest.fixture
def operator(granted: Workspace) -> tuple[str, str]:
    """A client that may name subjects of the tenant."""
    name = f"{granted.tenant}-operator"
    return name, granted.add_client(name, "operator", scopes=["subject:assert"])


def test_an_operator_opens_a_session_for_a_subject_of_its_own_tenant(
    granted: Workspace, operator: tuple[str, str]
) -> None:
    response = granted.control_plane.http.post(
        "/v1/sessions", json={"runtime": granted.runtime, "subject": "alice"}, auth=operator
    )

    assert response.status_code == 201
    assert granted.exchange(response.json())["tenant"] == granted.tenant


@pytest.mark.guards("control_plane/api/sessions.py", "if body.tenant not in (None, tenant) or body.roles:", "if False:")
@pytest.mark.parametrize("fields", [{"tenant": "OTHER"}, {"roles": ["admins"]}], ids=["tenant", "roles"])
def test_an_operator_names_neither_another_tenant_nor_roles(
    granted: Workspace, operator: tuple[str, str], other_workspace: Workspace, fields: Json
) -> None:
    named = {"tenant": other_workspace.tenant} if "tenant" in fields else fields
    body = {"runtime": granted.runtime, "subject": "alice"} | named

    response = granted.control_plane.http.post("/v1/sessions", json=body, auth=operator)

    assert (response.status_code, response.json()["code"]) == (403, "forbidden")


@pytest.mark.guards("control_plane/sessions.py", "SUBJECT_ASSERT in client.scopes and ", "")
def test_an_operator_without_the_scope_opens_nothing(granted: Workspace) -> None:
    name = f"{granted.tenant}-plain"
    secret = granted.add_client(name, "operator")

    response = granted.control_plane.http.post(
        "/v1/sessions", json={"runtime": granted.runtime, "subject": "alice"}, auth=(name, secret)
    )

    assert response.status_code == 403


def test_a_runtime_opens_nothing(granted: Workspace) -> None:
    response = granted.control_plane.http.post(
        "/v1/sessions",
        json={"runtime": granted.runtime, "subject": "alice"},
        auth=(granted.runtime, granted.runtime_secret),
    )

    assert response.status_code == 403


@pytest.mark.guards("control_plane/registry.py", "if new.kind is not ClientKind.OPERATOR:", "if False:")
@pytest.mark.parametrize("kind", ["runtime", "egress_proxy"])
def test_only_an_operator_is_registered_with_the_right_to_name_subjects(workspace: Workspace, kind: str) -> None:
    body = {"id": "sneaky", "kind": kind, "tenant": workspace.tenant, "scopes": ["subject:assert"]}

    response = workspace.control_plane.admin("POST", "/v1/clients", body)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")


@pytest.mark.parametrize("runtime", ["nobody", "test-proxy", "OTHER"])
def test_a_session_is_for_a_runtime_that_serves_the_tenant(
    workspace: Workspace, other_workspace: Workspace, runtime: str
) -> None:
    named = other_workspace.runtime if runtime == "OTHER" else runtime
    body = {"tenant": workspace.tenant, "subject": "alice", "runtime": named}

    response = workspace.control_plane.admin("POST", "/v1/sessions", body)

    assert (response.status_code, response.json()["detail"][:8]) == (422, "runtime:")


@pytest.mark.parametrize(
    "fields", [{"tenant": None}, {"tenant": "nobody"}, {"subject": ""}, {"subject": "a\nb"}, {"extra": 1}]
)
def test_a_session_with_a_bad_field_is_not_opened(workspace: Workspace, fields: Json) -> None:
    body = {"tenant": workspace.tenant, "subject": "alice", "runtime": workspace.runtime} | fields

    response = workspace.control_plane.admin("POST", "/v1/sessions", body)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")


def test_a_runtime_without_a_tenant_serves_all_of_them(workspace: Workspace, other_workspace: Workspace) -> None:
    shared = f"{workspace.tenant}-shared"
    secret = workspace.add_client(shared, "runtime", tenant=None)
    for each in (workspace, other_workspace):
        each.add_credential(secret=f"key-of-{each.tenant}")
        each.grant()

    for each in (workspace, other_workspace):
        session = each.open_session(runtime=shared)
        issued = each.token_as(
            (shared, secret), subject_token=session["session_token"], subject_token_type=JWT, audience="example"
        ).json()
        caller = each.caller(issued) | {"client": shared}

        assert each.resolve(issued, caller=caller)["secret"] == f"key-of-{each.tenant}"


# --- refreshing, seeing, ending --------------------------------------------------------------------------------------


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_an_owner_gets_a_fresh_token_by_a_live_one(granted: Workspace) -> None:
    session = granted.open_session()

    response = granted.control_plane.http.post(
        f"/v1/sessions/{session['session_id']}/token", headers=bearer(session["session_token"])
    )

    assert response.status_code == 200
    fresh = response.json()
    assert fresh["session_id"] == session["session_id"]
    assert fresh["session_token"] != session["session_token"]
    assert granted.exchange(fresh)["session_id"] == session["session_id"]


@pytest.mark.guards("control_plane/api/sessions.py", "if claims.session != session_id:", "if False:")
@pytest.mark.parametrize("subject", ["alice", "bob"])
def test_a_token_of_one_session_gets_none_of_another(granted: Workspace, subject: str) -> None:
    mine, other = granted.open_session("alice"), granted.open_session(subject, roles=["admins"])

    for method, path in (("POST", "/token"), ("GET", ""), ("DELETE", "")):
        response = granted.control_plane.http.request(
            method, f"/v1/sessions/{other['session_id']}{path}", headers=bearer(mine["session_token"])
        )

        assert (response.status_code, response.json()["code"]) == (404, "session_not_found")


def test_an_ended_session_gets_no_fresh_token(granted: Workspace) -> None:
    session = granted.open_session()
    granted.end_session(session)

    response = granted.control_plane.http.post(
        f"/v1/sessions/{session['session_id']}/token", headers=bearer(session["session_token"])
    )

    assert (response.status_code, response.json()["code"]) == (404, "session_not_found")


def test_a_session_is_seen_by_its_owner_its_runtime_its_operator_and_the_administrator(
    granted: Workspace, operator: tuple[str, str]
) -> None:
    session = granted.open_session()
    path = f"/v1/sessions/{session['session_id']}"

    answers = [
        granted.control_plane.http.get(path, headers=bearer(session["session_token"])),
        granted.control_plane.http.get(path, auth=(granted.runtime, granted.runtime_secret)),
        granted.control_plane.http.get(path, auth=operator),
        granted.control_plane.http.get(path, headers=bearer(ADMIN_TOKEN)),
    ]

    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.json()["subject"] for answer in answers} == {"alice"}
    assert "session_token" not in answers[0].text


def test_a_session_of_somebody_else_is_not_found_by_anybody(granted: Workspace, other_workspace: Workspace) -> None:
    session = granted.open_session()
    stranger = f"{other_workspace.tenant}-operator"
    secret = other_workspace.add_client(stranger, "operator", scopes=["subject:assert"])
    callers = [(other_workspace.runtime, other_workspace.runtime_secret), (stranger, secret)]

    for caller in callers:
        for method in ("GET", "DELETE"):
            there = granted.control_plane.http.request(method, f"/v1/sessions/{session['session_id']}", auth=caller)
            nowhere = granted.control_plane.http.request(method, "/v1/sessions/ses_0", auth=caller)

            assert (there.status_code, there.json()["code"]) == (404, "session_not_found")
            assert there.json() | {"request_id": ""} == nowhere.json() | {"request_id": ""}
    assert granted.exchange(session)


def test_ending_a_session_takes_everything_that_hangs_on_it_and_again_changes_nothing(granted: Workspace) -> None:
    session = granted.open_session()
    issued, untouched = granted.exchange(session), granted.exchange()
    granted.control_plane.made(
        "POST", granted.path("allow-rules"), {"host": "mirror.test", "session": session["session_id"]}
    )

    first = granted.control_plane.http.delete(
        f"/v1/sessions/{session['session_id']}", auth=(granted.runtime, granted.runtime_secret)
    )
    again = granted.control_plane.http.delete(
        f"/v1/sessions/{session['session_id']}", auth=(granted.runtime, granted.runtime_secret)
    )

    assert (first.status_code, again.status_code) == (204, 204)
    assert granted.resolve(issued)["code"] == "revoked_placeholder"
    assert granted.who(issued["proxy_credential"])["code"] == "proxy_authentication_required"
    assert granted.renewal(issued).status_code == 400
    assert granted.control_plane.made("GET", granted.path("allow-rules"))["items"] == []
    assert granted.resolve(untouched)["secret"] == SECRET
    assert len([event for event in granted.audit() if event["action"] == "session.end"]) == 1
