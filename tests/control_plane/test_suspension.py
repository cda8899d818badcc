"""A placeholder whose secret keeps coming back in replies is suspended for every proxy, for a while."""

import itertools

import pytest

from control_plane.suspension import LEAKS, WINDOW_SECONDS
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import PROXY, ControlPlane
from tests.control_plane.test_alarms import alarms, wait_for
from tests.control_plane.workspace import HOST, Json, Workspace

SUSPENSION = "control_plane/suspension.py"
_numbers = itertools.count(1)


def leak(workspace: Workspace, issued: Json, **fields: object) -> Json:
    caller = workspace.caller(issued)
    number = next(_numbers)
    return {
        "event_id": f"leak-{number}",
        "at": workspace.control_plane.clock(),
        "request_id": f"req-{number}",
        "action": "leak_blocked",
        "tenant": workspace.tenant,
        "subject": caller["subject"],
        "session": caller["session"],
        "client": caller["client"],
        "credential": "example",
        "placeholder_id": issued["id"],
        "host": HOST,
        "status": 200,
    } | fields


def report(workspace: Workspace, *events: Json) -> None:
    response = workspace.control_plane.http.post("/internal/audit", json={"events": list(events)}, auth=PROXY)
    assert response.status_code == 204, response.text


def is_refused(workspace: Workspace, issued: Json) -> bool:
    answer = workspace.resolve(issued)
    if "secret" in answer:
        return False
    assert answer["code"] == "revoked_placeholder", answer
    assert "suspended" in answer["detail"]
    return True


@pytest.fixture
def workspace(own_control_plane: OwnControlPlane) -> Workspace:
    control_plane: ControlPlane = own_control_plane()
    made = Workspace(control_plane, "acme")
    made.add_credential()
    made.grant()
    return made


@pytest.mark.guards("control_plane/resolution.py", "now < facts.token.suspended_until:", "False:")
def test_three_leaks_that_any_proxies_report_suspend_the_placeholder_and_no_other(workspace: Workspace) -> None:
    issued, other = workspace.exchange(), workspace.exchange()

    told = []
    for _ in range(LEAKS):
        told.append(is_refused(workspace, issued))
        report(workspace, leak(workspace, issued))

    assert told == [False] * LEAKS
    assert is_refused(workspace, issued)
    assert not is_refused(workspace, other)


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py",
    "inherited = func.coalesce(given(TOKENS.c.suspended_until), suspended)",
    "inherited = given(TOKENS.c.suspended_until)",
)
def test_to_exchange_again_is_no_way_around_it(workspace: Workspace) -> None:
    workspace.add_credential("another")
    workspace.grant(credential="another")
    session = workspace.open_session()
    suspended = workspace.exchange(session)
    report(workspace, *(leak(workspace, suspended) for _ in range(LEAKS)))

    again, for_another = workspace.exchange(session), workspace.exchange(session, audience="another")
    in_another_session = workspace.exchange()

    assert is_refused(workspace, again)
    assert not is_refused(workspace, for_another)
    assert not is_refused(workspace, in_another_session)
    workspace.control_plane.clock.advance(WINDOW_SECONDS + 1)
    fresh = session | workspace.control_plane.made("POST", f"/v1/sessions/{session['session_id']}/token")
    assert not is_refused(workspace, workspace.exchange(fresh))


def test_every_proxy_is_told_and_no_stream_is_cut(workspace: Workspace) -> None:
    issued = workspace.exchange()

    report(workspace, *(leak(workspace, issued) for _ in range(LEAKS)))

    changes = workspace.control_plane.look("SELECT tenant, revoked FROM outbox WHERE subject_id = ?", issued["id"])
    assert [(tenant, bool(revoked)) for tenant, revoked in changes] == [(workspace.tenant, False)]


def test_a_suspension_ends_by_itself(workspace: Workspace) -> None:
    issued = workspace.exchange()
    report(workspace, *(leak(workspace, issued) for _ in range(LEAKS)))
    assert is_refused(workspace, issued)

    workspace.control_plane.clock.advance(WINDOW_SECONDS)

    assert not is_refused(workspace, issued)


def test_a_renewal_does_not_end_it(workspace: Workspace) -> None:
    issued = workspace.exchange()
    report(workspace, *(leak(workspace, issued) for _ in range(LEAKS)))

    workspace.renew(issued)

    assert is_refused(workspace, issued)


@pytest.mark.guards(SUSPENSION, "since=now - WINDOW_SECONDS", "since=0.0")
def test_leaks_far_apart_suspend_nothing(workspace: Workspace) -> None:
    issued = workspace.exchange()

    for _ in range(LEAKS + 1):
        workspace.control_plane.clock.advance(WINDOW_SECONDS / 2 + 1)
        workspace.renew(issued)
        report(workspace, leak(workspace, issued))

    assert not is_refused(workspace, issued)


@pytest.mark.guards(SUSPENSION, "limit=LEAKS) < LEAKS:", "limit=LEAKS) < 0:")
def test_a_batch_that_is_delivered_again_counts_once(workspace: Workspace) -> None:
    issued = workspace.exchange()
    batch = [leak(workspace, issued)]

    for _ in range(LEAKS + 1):
        report(workspace, *batch)

    assert not is_refused(workspace, issued)


def test_what_is_reported_of_another_tenants_placeholder_suspends_nothing(workspace: Workspace) -> None:
    issued = workspace.exchange()
    stranger = Workspace(workspace.control_plane, "other")

    report(workspace, *(leak(workspace, issued, tenant=stranger.tenant) for _ in range(LEAKS)))

    assert not is_refused(workspace, issued)


def test_a_reply_that_could_not_be_searched_is_no_leak(workspace: Workspace) -> None:
    issued = workspace.exchange()
    blocked = [
        leak(workspace, issued, action="refuse", code="response_leak_blocked", true_code="response_leak_blocked")
        for _ in range(LEAKS)
    ]

    report(workspace, *blocked)

    assert not is_refused(workspace, issued)


def test_it_stands_in_the_trail_and_in_the_list(workspace: Workspace) -> None:
    issued = workspace.exchange()

    report(workspace, *(leak(workspace, issued) for _ in range(LEAKS)))

    [event] = [event for event in workspace.audit() if event["action"] == "placeholder.suspend"]
    items = workspace.control_plane.made("GET", workspace.path("placeholders"))["items"]
    [shown] = [item for item in items if item["id"] == issued["id"]]
    assert (event["placeholder_id"], event["credential"]) == (issued["id"], "example")
    assert shown["suspended_until"] == pytest.approx(workspace.control_plane.clock() + WINDOW_SECONDS, abs=60)
    assert shown["revoked_at"] is None


def test_every_leak_alarms_the_placeholders_tenant(workspace: Workspace) -> None:
    issued = workspace.exchange()

    for _ in range(2):
        report(workspace, leak(workspace, issued))

    [alarm] = wait_for(lambda: [each for each in alarms(workspace) if each["count"] == 2])
    assert (alarm["kind"], alarm["placeholder_id"], alarm["credential"]) == (
        "secret_returned",
        issued["id"],
        "example",
    )
    assert alarm["caller_is_of_another_tenant"] is False
