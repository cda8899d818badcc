"""A proxy credential by itself: for a session that reaches what needs no credential (RFC 8693)."""

import re

import httpx
import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.workspace import JWT, PLACEHOLDER, PROXY_CREDENTIAL, SESSION, Json, Workspace


def asked(workspace: Workspace, session: Json, **form: str) -> httpx.Response:
    return workspace.token(
        **{
            "subject_token": session["session_token"],
            "subject_token_type": JWT,
            "requested_token_type": PROXY_CREDENTIAL,
        }
        | form
    )


def issued(workspace: Workspace, session: Json | None = None) -> Json:
    response = asked(workspace, session or workspace.open_session())
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def renewal(workspace: Workspace, proxy_credential: str, **form: str) -> httpx.Response:
    return workspace.token(subject_token=proxy_credential, subject_token_type=PROXY_CREDENTIAL, **form)


def assert_refused(response: httpx.Response, code: str) -> None:
    assert (response.status_code, response.json()["code"]) == (400, code), response.text
    assert "access_token" not in response.json()


def test_a_session_without_any_grant_gets_a_proxy_credential(workspace: Workspace) -> None:
    session = workspace.open_session()

    response = asked(workspace, session)

    answer = response.json()
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    assert re.fullmatch(r"coatprx1[0-9A-Za-z]{28}", answer["access_token"])
    assert answer == {
        "access_token": answer["access_token"],
        "issued_token_type": PROXY_CREDENTIAL,
        "token_type": "N_A",
        "expires_in": 900,
        "scope": "",
        "proxy_credential": answer["access_token"],
        "subject": "alice",
        "tenant": workspace.tenant,
        "session_id": session["session_id"],
        "id": answer["id"],
        "act": None,
    }
    assert workspace.who(answer["access_token"])["caller"] == workspace.caller(answer)


def test_it_is_in_the_trail_by_name(workspace: Workspace) -> None:
    answer = issued(workspace)
    renewal(workspace, answer["access_token"])

    events = [event for event in workspace.audit() if event.get("placeholder_id") == answer["id"]]

    assert [event["action"] for event in events] == ["exchange.proxy_credential", "exchange.proxy_credential.renew"]
    assert answer["access_token"] not in str(events)


@pytest.mark.guards(
    "control_plane/exchange.py",
    "        if request.audience is not None or request.resource is not None:\n            raise invalid_request(",
    "        if False:\n            raise invalid_request(",
)
@pytest.mark.parametrize("form", [{"audience": "example"}, {"resource": "https://api.example.com"}])
def test_it_is_for_no_destination(granted: Workspace, form: dict[str, str]) -> None:
    response = asked(granted, granted.open_session(), **form)

    assert_refused(response, "malformed_request")
    assert response.json()["error"] == "invalid_request"


def test_a_session_may_be_named_by_the_client_that_joined_it(workspace: Workspace) -> None:
    session = workspace.open_session()
    issued(workspace, session)

    response = asked(workspace, session, subject_token=session["session_id"], subject_token_type=SESSION)

    assert response.status_code == 200


def test_it_is_renewed_in_place_even_when_it_expired(own_control_plane: OwnControlPlane) -> None:
    control_plane = own_control_plane()
    workspace = Workspace(control_plane, "local")
    answer = issued(workspace)
    control_plane.clock.advance(3_600)
    assert workspace.who(answer["access_token"])["kind"] == "refused"

    response = renewal(workspace, answer["access_token"], requested_token_type=PROXY_CREDENTIAL)

    assert response.status_code == 200
    assert response.json() == answer
    assert workspace.who(answer["access_token"])["kind"] == "caller"


def test_the_requested_type_may_be_left_out_of_a_renewal(workspace: Workspace) -> None:
    answer = issued(workspace)

    assert renewal(workspace, answer["access_token"]).json() == answer


def test_it_never_outlives_its_session(own_control_plane: OwnControlPlane) -> None:
    control_plane = own_control_plane(session_seconds=1_000)
    workspace = Workspace(control_plane, "local")
    answer = issued(workspace)
    control_plane.clock.advance(800)

    renewed = renewal(workspace, answer["access_token"]).json()

    assert renewed["expires_in"] <= 200


@pytest.mark.guards(
    "control_plane/exchange.py", "if session is None or not session.is_live(self._clock()):", "if session is None:"
)
def test_it_is_not_renewed_once_its_session_is_over(own_control_plane: OwnControlPlane) -> None:
    control_plane = own_control_plane(session_seconds=1_000)
    workspace = Workspace(control_plane, "local")
    answer = issued(workspace)
    control_plane.clock.advance(1_001)

    assert_refused(renewal(workspace, answer["access_token"]), "session_not_found")


@pytest.mark.guards(
    "control_plane/issuance.py",
    "if not await records.tokens.prolong(token.sha256, expires_at):",
    "if await records.tokens.prolong(token.sha256, expires_at) is None:",
)
def test_it_is_not_renewed_once_revoked(workspace: Workspace) -> None:
    answer = issued(workspace)
    workspace.control_plane.made("DELETE", workspace.path(f"placeholders/{answer['id']}"))

    assert_refused(renewal(workspace, answer["access_token"]), "revoked_placeholder")


@pytest.mark.guards(
    "control_plane/exchange.py",
    "if token is None or token.client != client.id or not client.serves(token.tenant):",
    "if token is None or not client.serves(token.tenant):",
)
def test_another_client_cannot_renew_it(workspace: Workspace) -> None:
    answer = issued(workspace)
    thief = f"{workspace.tenant}-thief"
    secret = workspace.add_client(thief, "runtime")

    response = workspace.token_as(
        (thief, secret), subject_token=answer["access_token"], subject_token_type=PROXY_CREDENTIAL
    )

    assert_refused(response, "unknown_placeholder")


@pytest.mark.guards(
    "control_plane/exchange.py",
    "if genuine is None or genuine.kind is not marker:",
    "if genuine is None:",
)
def test_a_placeholder_is_not_taken_for_a_proxy_credential(granted: Workspace) -> None:
    placeholder = granted.exchange()["access_token"]

    assert_refused(renewal(granted, placeholder), "unknown_placeholder")


def test_a_proxy_credential_buys_no_placeholder(granted: Workspace) -> None:
    answer = issued(granted)

    response = granted.token(
        subject_token=answer["access_token"],
        subject_token_type=PROXY_CREDENTIAL,
        requested_token_type=PLACEHOLDER,
        audience="example",
    )

    assert_refused(response, "malformed_request")
