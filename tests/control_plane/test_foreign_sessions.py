"""Every route of a session, found in the router, asked by those whose session it is not: as if it were not there."""

from typing import Any

import httpx
import pytest

from tests.control_plane.serving import PROXY, ControlPlane
from tests.control_plane.test_access import basic
from tests.control_plane.test_delegation import Operator
from tests.control_plane.test_roles import Staff
from tests.control_plane.workspace import JWT, SESSION, Json, Workspace


def session_routes(control_plane: ControlPlane) -> list[tuple[str, str]]:
    paths = control_plane.http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() if "{session}" in path for method in methods]


def ask(control_plane: ControlPlane, method: str, path: str, session: str, headers: dict[str, str]) -> httpx.Response:
    body: dict[str, Any] = {"json": {}} if method in ("PATCH", "PUT") else {}
    return control_plane.http.request(method, path.replace("{session}", session), headers=headers, **body)


def foreigners(own: Workspace, other: Workspace) -> dict[str, dict[str, str]]:
    """Everybody who is known, and whose session it is not."""
    stranger = Operator(other)
    second_runtime = f"{own.tenant}-second"
    second_secret = own.add_client(second_runtime, "runtime")
    other_session, same_subject = other.open_session(), own.open_session()
    staff = Staff(other)
    return {
        "another tenant's runtime": basic(other.runtime, other.runtime_secret),
        "another runtime of the tenant": basic(second_runtime, second_secret),
        "another tenant's operator": basic(*stranger.login),
        "another tenant's subject": {"Authorization": f"Bearer {other_session['session_token']}"},
        "the same subject in another session": {"Authorization": f"Bearer {same_subject['session_token']}"},
        "another tenant's administrator": staff.headers("tenant_admin"),
        "another tenant's auditor": staff.headers("tenant_auditor"),
    }


def shown(response: httpx.Response) -> Json:
    return {name: value for name, value in response.json().items() if name != "request_id"}


@pytest.mark.guards(
    "control_plane/api/sessions.py",
    "if claims.session != session_id:\n            raise RefusedError(SESSION_NOT_FOUND)",
    "pass",
)
@pytest.mark.guards("control_plane/api/sessions.py", "if not principal.sees(session.tenant):", "if False:")
def test_somebody_elses_session_answers_like_none_on_every_route(
    granted: Workspace, other_workspace: Workspace
) -> None:
    control_plane = granted.control_plane
    session = granted.open_session()
    granted.exchange(session)
    asked = 0

    for who, headers in foreigners(granted, other_workspace).items():
        for method, path in session_routes(control_plane):
            theirs = ask(control_plane, method, path, session["session_id"], headers)
            nobodys = ask(control_plane, method, path, "ses_0000000000000000000000", headers)
            assert theirs.status_code == nobodys.status_code, (who, method, path, theirs.text, nobodys.text)
            assert shown(theirs) == shown(nobodys), (who, method, path)
            assert theirs.status_code in (401, 403, 404), (who, method, path)
            asked += 1

    assert asked >= 7 * 4
    found = control_plane.made("GET", f"/v1/sessions/{session['session_id']}")
    assert (found["ended_at"], found["erased_at"]) == (None, None)


def test_a_session_id_of_somebody_else_opens_nothing_at_the_token_endpoint(
    granted: Workspace, other_workspace: Workspace
) -> None:
    session = granted.open_session()
    granted.exchange(session)
    second = f"{granted.tenant}-second"
    logins = [
        (other_workspace.runtime, other_workspace.runtime_secret),
        (second, granted.add_client(second, "runtime")),
        Operator(granted).login,
        PROXY,
    ]
    form = {"subject_token_type": SESSION, "audience": "example"}

    for login in logins:
        theirs = granted.token_as(login, subject_token=session["session_id"], **form)
        nobodys = granted.token_as(login, subject_token="ses_0000000000000000000000", **form)
        assert (theirs.status_code, theirs.content) == (nobodys.status_code, nobodys.content)
        stolen = granted.token_as(
            login, subject_token=session["session_token"], subject_token_type=JWT, audience="example"
        )
        assert stolen.status_code == 400


def test_a_session_named_in_a_body_or_a_query_is_looked_for_in_the_tenant_alone(
    granted: Workspace, other_workspace: Workspace
) -> None:
    session = granted.open_session()
    body = {"tenant": other_workspace.tenant, "subject": "alice", "method": "GET", "url": "https://api.example.com"}

    checked = granted.control_plane.made("POST", "/v1/access/check", body | {"session": session["session_id"]})
    ruled = granted.control_plane.admin(
        "POST", other_workspace.path("allow-rules"), {"host": "a.example", "session": session["session_id"]}
    )

    assert checked["code"] == "session_not_found"
    assert ruled.status_code in (404, 422)
