"""The audit trail: what proxies report, what the control plane itself decided, and how both are read."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.control_plane.serving import PROXY
from tests.control_plane.workspace import SECRET, Json, Workspace


def report(workspace: Workspace, *events: Json, dropped: int = 0) -> httpx.Response:
    return workspace.control_plane.http.post(
        "/internal/audit", json={"events": list(events), "dropped": dropped}, auth=PROXY
    )


def event(workspace: Workspace, number: int = 1, **fields: Any) -> Json:
    return {
        "event_id": f"ev-{workspace.tenant}-{number}",
        "at": 1_700_000_000.5 + number,
        "request_id": f"req-{number}",
        "action": "swap",
        "tenant": workspace.tenant,
        "subject": "alice",
        "method": "GET",
        "host": "api.example.com",
        "path": "/v1/models",
        "status": 200,
    } | fields


def reported(workspace: Workspace, **query: Any) -> list[Json]:
    return [item for item in workspace.audit(**query) if item["event_id"].startswith("ev-")]


def whole_trail(workspace: Workspace) -> list[Json]:
    """Every tenant's events, and those of none."""
    items: list[Json] = []
    while page := workspace.control_plane.admin(
        "GET", "/v1/audit", params={"limit": 1000, "after": items[-1]["sequence"] if items else 0}
    ).json()["items"]:
        items += page
    return items


def test_what_a_proxy_reports_is_read_back(workspace: Workspace) -> None:
    sent = event(workspace)

    response = report(workspace, sent)

    (found,) = reported(workspace)
    assert response.status_code == 204
    assert {name: found[name] for name in sent} == sent
    assert found["extra"] == {"reported_by": "test-proxy"}


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py",
    ".on_conflict_do_nothing(index_elements=[by] if isinstance(by, str) else list(by))",
    "",
)
def test_a_batch_that_is_sent_again_is_stored_once(workspace: Workspace) -> None:
    batch = [event(workspace, number) for number in range(3)]

    answers = [report(workspace, *batch, dropped=2), report(workspace, *batch, dropped=2)]
    report(workspace, *batch, event(workspace, 3))

    assert [answer.status_code for answer in answers] == [204, 204]
    assert [item["event_id"] for item in reported(workspace)] == [item["event_id"] for item in batch] + [
        f"ev-{workspace.tenant}-3"
    ]


def test_lost_events_leave_a_gap_that_says_how_many(workspace: Workspace) -> None:
    report(workspace, event(workspace), dropped=7)

    everything = whole_trail(workspace)

    before = everything[[item["event_id"] for item in everything].index(f"ev-{workspace.tenant}-1") - 1]
    assert (before["action"], before["extra"]["dropped"]) == ("gap", "7")
    assert "7 events were lost" in before["detail"]


def test_a_gap_alone_is_reported_too(workspace: Workspace) -> None:
    before = len(whole_trail(workspace))

    assert report(workspace, dropped=3).status_code == 204

    after = whole_trail(workspace)
    assert [item["action"] for item in after[before:]] == ["gap"]


@pytest.mark.guards("control_plane/core/audit.py", "return redact(path_alone).translate(_CONTROLS)", "return text")
def test_a_record_is_cleaned_once_more_before_it_is_stored(granted: Workspace) -> None:
    placeholder = granted.exchange()["access_token"]
    dirty = event(
        granted,
        path=f"/v1/{placeholder}?key=value",
        detail=f"quoted {placeholder} here",
        subject="a\nb\0c",
        extra={"note": placeholder},
    )

    response = report(granted, dirty | {"hint": "x" * 5_000})

    (found,) = reported(granted)
    assert response.status_code == 204
    assert placeholder not in str(found)
    assert found["path"] == "/v1/{placeholder}"
    assert found["detail"] == "quoted {placeholder} here"
    assert found["subject"] == "a�b�c"
    assert len(found["hint"]) == 256


@pytest.mark.parametrize("body", [b"", b"[]", b'{"events": [{"event_id": 1}]}', b'{"events": {}}', b"{"])
def test_what_is_no_batch_is_an_error_and_stores_nothing(workspace: Workspace, body: bytes) -> None:
    response = workspace.control_plane.http.post("/internal/audit", content=body, auth=PROXY)

    assert (response.status_code, response.json()["code"]) == (400, "malformed_request")


def test_a_large_batch_is_taken_and_a_huge_one_is_not(workspace: Workspace) -> None:
    many = [event(workspace, number, path="/" + "x" * 250) for number in range(2_000)]

    taken = report(workspace, *many)
    refused = workspace.control_plane.http.post("/internal/audit", content=b"[" + b" " * 9_000_000, auth=PROXY)

    assert taken.status_code == 204
    assert (refused.status_code, refused.json()["code"]) == (413, "body_too_large")


def test_the_trail_is_read_in_pages_in_its_order(workspace: Workspace) -> None:
    report(workspace, *[event(workspace, number) for number in range(10)])

    pages: list[list[Json]] = []
    query: Json = {"limit": 4}
    while page := workspace.audit(**query):
        pages.append(page)
        query["after"] = page[-1]["event_id"]
    everything = whole_trail(workspace)

    assert [item for page in pages for item in page] == workspace.audit()
    assert [item["sequence"] for item in everything] == sorted({item["sequence"] for item in everything})


def test_the_trail_is_read_on_behind_an_event_whatever_a_proxy_called_it(workspace: Workspace) -> None:
    odd = [f"{workspace.tenant} a/b?c=d&é {number}" for number in range(2)]
    report(workspace, *[event(workspace, event_id=name) for name in odd])

    behind = workspace.audit(after=odd[0])

    assert [item["event_id"] for item in behind] == odd[1:]


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py",
    "AUDIT.c.event_id == event_id, self._tx.mine(AUDIT.c.tenant))",
    "AUDIT.c.event_id == event_id)",
)
def test_a_tenant_learns_no_number_that_counts_what_others_do(workspace: Workspace, other_workspace: Workspace) -> None:
    """A platform's sequence in its events, or as a place to begin, would say how busy the others are."""
    report(workspace, event(workspace, 1))
    report(other_workspace, event(other_workspace, 2))

    of_other = other_workspace.audit()[-1]["event_id"]
    asked = {
        after: workspace.control_plane.admin("GET", workspace.path("audit"), params={"after": after})
        for after in (of_other, "1", "0", "ev-nobody")
    }

    assert all("sequence" not in item for item in workspace.audit())
    assert {after: answer.status_code for after, answer in asked.items()} == dict.fromkeys(asked, 422)
    assert len({answer.json()["detail"] for answer in asked.values()}) == 1


def test_a_request_is_found_by_its_id(workspace: Workspace) -> None:
    report(workspace, event(workspace, 1), event(workspace, 2), event(workspace, 3, request_id="req-2"))

    assert [item["event_id"][-1] for item in reported(workspace, request_id="req-2")] == ["2", "3"]
    assert reported(workspace, request_id="req-none") == []


def test_a_tenants_trail_has_no_event_of_another(workspace: Workspace, other_workspace: Workspace) -> None:
    report(workspace, event(workspace), event(other_workspace), event(workspace, 2, tenant=None))

    assert {item["tenant"] for item in workspace.audit()} == {workspace.tenant}
    assert {item["tenant"] for item in other_workspace.audit()} == {other_workspace.tenant}
    everything = whole_trail(workspace)
    assert [item["event_id"] for item in everything if item["event_id"] == f"ev-{workspace.tenant}-2"]


def test_every_act_of_the_administrator_is_in_the_trail(workspace: Workspace) -> None:
    workspace.add_credential()
    grant = workspace.grant()
    workspace.patch_credential({"variables": ["X"]})
    workspace.rotate("a-new-key")
    session = workspace.open_session()
    workspace.exchange(session)
    workspace.end_session(session)
    workspace.remove_grant(grant)
    rule = workspace.control_plane.made("POST", workspace.path("allow-rules"), {"host": "mirror.test"})
    workspace.control_plane.made("DELETE", workspace.path(f"allow-rules/{rule['id']}"))
    workspace.control_plane.made("DELETE", workspace.path("credentials/example"))
    workspace.control_plane.made("DELETE", f"/v1/clients/{workspace.runtime}")

    trail = workspace.audit()

    assert [item["action"] for item in trail] == [
        *("tenant.add", "client.add", "credential.add", "grant.add", "credential.change", "credential.rotate"),
        *("session.open", "exchange", "session.end", "grant.remove", "allow.add", "allow.remove"),
        *("credential.delete", "client.delete"),
    ]
    assert all(item["extra"]["by"] in ("administrator", workspace.runtime) for item in trail)
    assert all(item["request_id"].startswith("req_") for item in trail)
    assert SECRET not in str(trail)
    assert "a-new-key" not in str(trail)


# --- from proxies that say odd things --------------------------------------------------------------------------------


ODD_MOMENTS = ["NaN", "Infinity", "-Infinity", "1e300", "-1", "253402300800"]


@pytest.mark.guards("control_plane/core/audit.py", "if is_within_calendar(event.at):", "if True:")
@pytest.mark.parametrize("moment", ODD_MOMENTS)
def test_a_moment_of_no_calendar_is_recorded_as_now(workspace: Workspace, moment: str) -> None:
    one, other = event(workspace, 1), event(workspace, 2)
    body = json.dumps({"events": [one, other]}).replace(str(one["at"]), moment)

    response = workspace.control_plane.http.post("/internal/audit", content=body, auth=PROXY)

    first, second = reported(workspace)
    assert response.status_code == 204, response.text
    assert abs(first["at"] - time.time()) < 60
    assert first["extra"]["reported_at"]
    assert second["at"] == other["at"]


@pytest.mark.parametrize("moment", ["Infinity", "1e300", "NaN", "-1e300"])
def test_an_odd_moment_in_a_stored_record_stops_nobody_reading(workspace: Workspace, moment: str) -> None:
    report(workspace, event(workspace, 1), event(workspace, 2))
    ((record,),) = workspace.control_plane.look(
        "SELECT record FROM audit_events WHERE event_id = ?", event(workspace, 1)["event_id"]
    )
    odd = record.replace(str(event(workspace, 1)["at"]), moment)
    workspace.control_plane.edit("UPDATE audit_events SET record = ? WHERE record = ?", odd, record)

    first, second = reported(workspace)

    assert 0 <= first["at"] <= 253_402_300_799
    assert second["at"] == event(workspace, 2)["at"]


def test_a_newer_proxys_codes_are_kept_and_its_batch_is_not_lost(workspace: Workspace) -> None:
    newer = event(workspace, 1, action="refuse", code="code_of_tomorrow", true_code="another_of_tomorrow")
    known = event(workspace, 2, action="refuse", code="destination_denied")

    response = report(workspace, newer, known)

    first, second = reported(workspace)
    assert response.status_code == 204
    assert "code" not in first
    assert (first["extra"]["unknown_code"], first["extra"]["unknown_true_code"]) == (
        "code_of_tomorrow",
        "another_of_tomorrow",
    )
    assert second["code"] == "destination_denied"


@pytest.mark.parametrize("code", [1, True, [], {}])
def test_a_code_that_is_no_text_is_no_newer_code(workspace: Workspace, code: object) -> None:
    assert report(workspace, event(workspace, code=code)).status_code == 400
