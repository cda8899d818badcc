"""An exchange gives exactly the audience and scope that were asked for, or an error that says so (field case C41)."""

import json
from dataclasses import dataclass
from urllib.parse import urlencode

import httpx
import pytest

from tests.control_plane.workspace import GRANT_TYPE, HOST, JWT, PLACEHOLDER, PROXY_CREDENTIAL, SESSION, Json, Workspace

FORM = "application/x-www-form-urlencoded"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
DIRECT = "urn:coatcheck:token-type:direct"
ERRORS = {"invalid_request", "invalid_target", "invalid_scope", "unsupported_grant_type"}
"""All that may be wrong with what is asked for; the client itself is proven."""


@dataclass(frozen=True)
class Asked:
    """Parameters beside, or instead of, those of a good exchange for `example`. None leaves one out."""

    changes: tuple[tuple[str, str | None], ...]
    error: str | None = None
    """None: it is given."""
    credential: str = "example"
    scope: str = ""
    content_type: str = FORM


def asked(error: str | None = None, *, credential: str = "example", given: str = "", **changes: str | None) -> Asked:
    return Asked(tuple(changes.items()), error, credential, given)


def twice(name: str, *values: str) -> Asked:
    return Asked((*((name, None),), *((name, value) for value in values)), "invalid_request")


VARIANTS: dict[str, Asked] = {
    # the audience
    "as it is": asked(),
    "another service": asked(audience="second", credential="second"),
    "another service's host": asked(audience="second.example", credential="second"),
    "an unknown service": asked("invalid_target", audience="unknown"),
    "a service that is not granted": asked("invalid_target", audience="ungranted"),
    "the client itself": asked("invalid_target", audience="RUNTIME"),
    "the control plane itself": asked("invalid_target", audience="ISSUER"),
    "the proxy": asked("invalid_target", audience="coatcheck-proxy"),
    "the tenant": asked("invalid_target", audience="TENANT"),
    "part of a name": asked("invalid_target", audience="exampl"),
    "a longer name": asked("invalid_target", audience="example2"),
    "a name in capitals": asked("invalid_target", audience="EXAMPLE"),
    "a name with a space": asked("invalid_target", audience="example "),
    "two names in one": asked("invalid_target", audience="example second"),
    "everything": asked("invalid_target", audience="*"),
    "a host's subdomain": asked("invalid_target", audience=f"evil.{HOST}"),
    "a host's parent": asked("invalid_target", audience="example.com"),
    "two audiences": twice("audience", "example", "second"),
    "the same audience twice": twice("audience", "example", "example"),
    "an empty audience and a good one": twice("audience", "", "example"),
    "an empty audience": asked("invalid_request", audience=""),
    "no audience": asked("invalid_request", audience=None),
    # the resource
    "a resource": asked(audience=None, resource=f"https://{HOST}/v1"),
    "audience and resource that agree": asked(resource=f"https://{HOST}"),
    "audience and resource that differ": asked("invalid_target", resource="https://second.example"),
    "a resource that is unknown": asked("invalid_target", audience=None, resource="https://nobody.example"),
    "a resource by http": asked("invalid_target", audience=None, resource=f"http://{HOST}"),
    "a resource that is no URL": asked("invalid_target", audience=None, resource="example"),
    "a resource with a fragment": asked("invalid_target", audience=None, resource=f"https://{HOST}/#x"),
    "two resources": twice("resource", f"https://{HOST}", "https://second.example"),
    # the scope
    "a narrower scope": asked(scope="method:GET", given="method:GET"),
    "several scopes": asked(scope="read path:/v1", given="read path:/v1"),
    "an empty scope": asked(scope=""),
    "a wider scope than the grant": asked("invalid_scope", audience="narrow", scope="method:POST"),
    "the grant's scope and more": asked("invalid_scope", audience="narrow", scope="method:GET method:POST"),
    "a scope that there is not": asked("invalid_scope", scope="admin"),
    "the session token's scope": asked("invalid_scope", scope="turn:write"),
    "two scope parameters": twice("scope", "method:GET", "method:POST"),
    # the kind of token
    "a placeholder by its name": asked(requested_token_type=PLACEHOLDER),
    "a placeholder as an access token": asked(requested_token_type=ACCESS_TOKEN),
    "an empty kind": asked(requested_token_type=""),
    "an unknown kind": asked("invalid_request", requested_token_type="urn:x"),
    "a refresh token": asked("invalid_request", requested_token_type="urn:ietf:params:oauth:token-type:refresh_token"),
    "a JWT": asked("invalid_request", requested_token_type=JWT),
    "the key": asked("invalid_target", requested_token_type=DIRECT),
    "a proxy credential for an audience": asked("invalid_request", requested_token_type=PROXY_CREDENTIAL),
    # the subject
    "no subject token": asked("invalid_request", subject_token=None),
    "no subject token type": asked("invalid_request", subject_token_type=None),
    "an empty subject token type": asked("invalid_request", subject_token_type=""),
    "an unknown subject token type": asked("invalid_request", subject_token_type="urn:x"),
    "an access token": asked("invalid_request", subject_token_type=ACCESS_TOKEN),
    "a session token as a session's id": asked("invalid_request", subject_token_type=SESSION),
    "a session token as a placeholder": asked("invalid_request", subject_token_type=PLACEHOLDER),
    "another subject": asked("invalid_request", requested_subject="bob"),
    "the subject by its name": asked(requested_subject="alice"),
    "two subject tokens": twice("subject_token", "TOKEN", "TOKEN"),
    # the form
    "no grant type": asked("unsupported_grant_type", grant_type=None),
    "another grant type": asked("unsupported_grant_type", grant_type="authorization_code"),
    "a parameter that nobody knows": asked(unheard_of="x"),
    "JSON instead of a form": Asked((), "invalid_request", content_type="application/json"),
    "a multipart form": Asked((), "invalid_request", content_type="multipart/form-data; boundary=x"),
    "a form by another name": Asked((), "invalid_request", content_type="text/plain"),
    "a form with a charset": Asked((), content_type=f"{FORM}; charset=UTF-8"),
}


@pytest.fixture
def services(granted: Workspace) -> Workspace:
    granted.add_credential("second", destinations=[{"url": "https://second.example"}])
    granted.grant("second")
    granted.add_credential("narrow", destinations=[{"url": "https://narrow.example"}])
    granted.grant("narrow", subject="alice", methods=["GET"])
    granted.add_credential("ungranted", destinations=[{"url": "https://ungranted.example"}])
    return granted


def send(workspace: Workspace, variant: Asked) -> httpx.Response:
    stand_ins = {
        "RUNTIME": workspace.runtime,
        "TENANT": workspace.tenant,
        "ISSUER": workspace.control_plane.url,
        "TOKEN": (token := workspace.open_session()["session_token"]),
    }
    good = {"grant_type": GRANT_TYPE, "subject_token": token, "subject_token_type": JWT, "audience": "example"}
    changed = {name for name, _ in variant.changes}
    pairs = [(name, value) for name, value in good.items() if name not in changed]
    pairs += [(name, stand_ins.get(value, value)) for name, value in variant.changes if value is not None]
    body = json.dumps(dict(pairs)) if "json" in variant.content_type else urlencode(pairs)
    return workspace.control_plane.http.post(
        "/oauth/token",
        content=body.encode(),
        headers={"Content-Type": variant.content_type},
        auth=(workspace.runtime, workspace.runtime_secret),
    )


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_what_is_given_is_what_was_asked_for_or_nothing(services: Workspace, variant: Asked) -> None:
    response = send(services, variant)

    answer: Json = response.json()
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cache-control"] == "no-store"
    if variant.error is None:
        assert response.status_code == 200, response.text
        assert (answer["credential"], answer["scope"]) == (variant.credential, variant.scope)
        assert (answer["subject"], answer["issued_token_type"]) == ("alice", PLACEHOLDER)
        ids = {services.credential(variant.credential)["id"]}
        rows = services.control_plane.look("SELECT credential_id, scope FROM tokens WHERE id = ?", answer["id"])
        assert rows == [(*ids, variant.scope)]
    else:
        assert (response.status_code, answer["error"]) == (400, variant.error), response.text
        assert answer["error"] in ERRORS
        assert answer["error_description"]
        assert "access_token" not in answer
        assert services.control_plane.made("GET", services.path("placeholders"))["items"] == []
