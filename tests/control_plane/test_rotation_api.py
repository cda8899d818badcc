"""Rotations and schedules over HTTP: what is refused and why, and what an operator is shown."""

from typing import Any

import pytest

from tests.control_plane.workspace import SECRET, Json, Workspace

NEW = "a-new-key-0123456789"


def rotate(workspace: Workspace, **body: Any) -> Any:
    return workspace.control_plane.admin("POST", workspace.path("credentials/example/rotate"), body)


def ask(workspace: Workspace, method: str, rest: str, body: Any = None) -> Any:
    return workspace.control_plane.admin(method, workspace.path(f"credentials/example/rotation{rest}"), body)


WRONG: dict[str, tuple[Json, str]] = {
    "no secret": ({}, "secret"),
    "an unknown field": ({"secret": NEW, "canary": 10}, "canary"),
    "a canary without a time": ({"secret": NEW, "canary_percent": 10}, "canary_seconds"),
    "a time without a canary": ({"secret": NEW, "canary_seconds": 10}, "canary_percent"),
    "everybody is no canary": ({"secret": NEW, "canary_percent": 100, "canary_seconds": 1}, "canary_percent"),
    "a time before now": ({"secret": NEW, "overlap_seconds": -1}, "overlap_seconds"),
    "a share that is none": ({"secret": NEW, "canary_percent": "10", "canary_seconds": 1}, "canary_percent"),
    "no probe is known": ({"secret": NEW, "probe": True}, "probe"),
    "a probe that changes things": ({"secret": NEW, "probe": {"method": "DELETE", "path": "/"}}, "probe"),
    "a probe with a query": ({"secret": NEW, "probe": {"path": "/v1?all"}}, "probe"),
    "a probe with a field of its own": ({"secret": NEW, "probe": {"path": "/", "host": "x"}}, "probe"),
    "compromised, and a probe": ({"secret": NEW, "compromised": True, "probe": {"path": "/"}}, "probe"),
    "compromised, and an overlap": ({"secret": NEW, "compromised": True, "overlap_seconds": 1}, "overlap_seconds"),
}


@pytest.mark.parametrize(("body", "field"), WRONG.values(), ids=WRONG)
def test_what_makes_no_sense_is_refused_by_the_fields_name(granted: Workspace, body: Json, field: str) -> None:
    refused = rotate(granted, **body)

    assert refused.status_code == 422
    assert refused.json()["code"] == "invalid_field"
    assert field in refused.json()["detail"]
    assert NEW not in refused.text
    assert granted.credential()["current_version"] == 1


def test_a_rotation_is_shown_while_it_is_under_way_and_after(granted: Workspace) -> None:
    before = ask(granted, "GET", "").json()
    rotate(granted, secret=NEW, canary_percent=20, canary_seconds=600, overlap_seconds=600)
    during = granted.credential()
    promoted = ask(granted, "POST", "/promote").json()
    ask(granted, "POST", "/rollback")
    after = ask(granted, "GET", "").json()

    assert before == {"rotation": None, "replies": []}
    assert (during["rotation"]["phase"], during["rotation"]["canary_percent"]) == ("canary", 20)
    assert (promoted["current_version"], promoted["rotation"]["phase"]) == (2, "overlap")
    assert (after["rotation"]["phase"], after["rotation"]["running"]) == ("rolled_back", False)
    assert "canary_key" not in str([during, promoted, after]), "who knows it could choose subjects"
    assert granted.resolve(granted.exchange())["secret"] == SECRET


def test_a_second_rotation_is_a_conflict_unless_the_secret_leaked(granted: Workspace) -> None:
    rotate(granted, secret=NEW, overlap_seconds=600)

    second = rotate(granted, secret="another-key-0123456789")
    stale = rotate(granted, secret="another-key-0123456789", if_version=1)
    leaked = rotate(granted, secret="another-key-0123456789", compromised=True)

    assert [answer.json()["code"] for answer in (second, stale)] == ["rotation_in_progress"] * 2
    assert (second.status_code, stale.status_code, leaked.status_code) == (409, 409, 200)
    assert [version["state"] for version in leaked.json()["versions"]] == ["revoked", "revoked", "active"]


@pytest.mark.parametrize("verb", ["promote", "rollback", "cancel"])
def test_where_nothing_is_under_way_there_is_nothing_to_help_along(granted: Workspace, verb: str) -> None:
    answer = ask(granted, "POST", f"/{verb}")

    assert (answer.status_code, answer.json()["code"]) == (409, "rotation_not_running")


def test_proxies_are_told_to_report_only_while_a_rotation_is_under_way(granted: Workspace) -> None:
    issued = granted.exchange()
    before = granted.resolve(issued)["binding"]
    rotate(granted, secret=NEW, overlap_seconds=600)
    during = granted.resolve(issued)["binding"]
    ask(granted, "POST", "/promote")
    after = granted.resolve(issued)["binding"]

    assert [binding.get("reports_replies", False) for binding in (before, during, after)] == [False, True, False]
    assert [binding["version"] for binding in (before, during, after)] == [1, 2, 2]


HOOK = {"kind": "http", "url": "https://hook.example/rotate"}
WRONG_SCHEDULES: dict[str, tuple[Json, str]] = {
    "no age": ({}, "every_seconds"),
    "an age of no time": ({"every_seconds": 1}, "every_seconds"),
    "reminded before it begins": ({"every_seconds": 3600, "remind_seconds": 3600}, "remind_seconds"),
    "a hook in the clear": ({"every_seconds": 3600, "hook": HOOK | {"url": "http://hook.example/"}}, "url"),
    "a hook with a password": ({"every_seconds": 3600, "hook": HOOK | {"url": "https://u:p@hook.example/"}}, "url"),
    "an unknown hook": ({"every_seconds": 3600, "hook": {"kind": "shell"}}, "hook"),
    "a probe that is not there": ({"every_seconds": 3600, "probe": True}, "probe"),
    "half a canary": ({"every_seconds": 3600, "canary_percent": 5}, "canary_seconds"),
}


@pytest.mark.parametrize(("body", "field"), WRONG_SCHEDULES.values(), ids=WRONG_SCHEDULES)
def test_a_schedule_that_makes_no_sense_is_refused_by_the_fields_name(
    granted: Workspace, body: Json, field: str
) -> None:
    refused = ask(granted, "PUT", "/schedule", body)

    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_field")
    assert field in refused.json()["detail"]


def test_a_schedule_is_put_shown_and_taken_away(granted: Workspace) -> None:
    put = ask(granted, "PUT", "/schedule", {"every_seconds": 86_400, "remind_seconds": 3600, "hook": HOOK}).json()
    shown = ask(granted, "GET", "/schedule").json()
    credential = granted.credential()
    gone = [ask(granted, method, "/schedule").status_code for method in ("DELETE", "GET", "DELETE")]

    assert put == shown
    assert (shown["hook"], shown["suspended"], shown["last_failure"]) == (HOOK, "", "")
    assert credential["rotation_due_at"] == shown["due_at"] == credential["rotated_at"] + 86_400
    assert gone == [204, 404, 404]
