"""A placeholder in the wrong hands raises an alarm for whom it belongs to, and whoever had it notices nothing."""

import functools
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import trustme

from control_plane.alarms import MAX_HOOKS
from control_plane.core.alarms import MAX_ATTEMPTS, RETRY_SECONDS, WINDOW_SECONDS, hook_secret, retry_at, signature
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import ADMIN_TOKEN, PROXY
from tests.control_plane.workspace import ENDPOINT, HOST, PLACEHOLDER, Json, Workspace, sha256
from tests.support.upstream import Request, Upstream, Wire, plain

ALARMS = "control_plane/alarms.py"
CORE = "control_plane/core/alarms.py"
T = TypeVar("T")


def wait_for(fact: Callable[[], T], *, seconds: float = 10) -> T:
    """Until `fact` is true: alarms are raised within a second, and nobody waits for them."""
    deadline = time.monotonic() + seconds
    while not (found := fact()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def alarms(workspace: Workspace) -> list[Json]:
    items: list[Json] = workspace.control_plane.made("GET", workspace.path("alarms"))["items"]
    return items


def platform_alarms(workspace: Workspace) -> list[Json]:
    items = workspace.control_plane.made("GET", "/v1/alarms?limit=1000")["items"]
    return [item for item in items if item["tenant"] == workspace.tenant]


def stolen_by(thief: Json, issued: Json, workspace: Workspace) -> Json:
    """What a proxy hears that asks about `issued` on behalf of another caller."""
    return workspace.resolve(issued, caller=thief)


def colleague(workspace: Workspace, issued: Json) -> Json:
    return workspace.caller(issued) | {"subject": "bob", "session": None}


@pytest.fixture
def issued(granted: Workspace) -> Json:
    return granted.exchange()


def test_a_placeholder_of_another_subject_alarms_its_tenant(granted: Workspace, issued: Json) -> None:
    answer = stolen_by(colleague(granted, issued), issued, granted)

    (alarm,) = wait_for(lambda: alarms(granted))
    assert answer["code"] == "caller_mismatch"
    assert (alarm["kind"], alarm["placeholder_id"], alarm["credential"]) == (
        "stolen_placeholder",
        issued["id"],
        "example",
    )
    assert alarm["caller"] == {"client": granted.runtime, "subject": "bob", "session": None}
    assert (alarm["caller_is_of_another_tenant"], alarm["host"], alarm["count"], alarm["revoked"]) == (
        False,
        HOST,
        1,
        False,
    )
    (event,) = [event for event in granted.audit() if event["action"].startswith("alarm.")]
    assert (event["action"], event["placeholder_id"], event["subject"]) == (
        "alarm.stolen_placeholder",
        issued["id"],
        "bob",
    )
    assert issued["access_token"] not in json.dumps([alarm, event])


@pytest.mark.guards(CORE, "    elif alarm.is_foreign:\n        caller = None\n", "")
def test_of_a_caller_of_another_tenant_its_tenant_learns_that_and_no_more(
    granted: Workspace, other_workspace: Workspace, issued: Json
) -> None:
    thief = granted.caller(issued) | {"tenant": other_workspace.tenant, "subject": "mallory", "client": "evil-runtime"}

    answer = stolen_by(thief, issued, granted)

    (alarm,) = wait_for(lambda: alarms(granted))
    (whole,) = platform_alarms(granted)
    assert answer["code"] == "unknown_placeholder"
    assert alarm["caller_is_of_another_tenant"] is True
    assert alarm["caller"] is None
    assert whole["caller"]["tenant"] == other_workspace.tenant
    shown = json.dumps([alarm, granted.audit()])
    assert "mallory" not in shown
    assert other_workspace.tenant not in shown
    assert alarms(other_workspace) == []


@pytest.mark.guards(
    "control_plane/api/internal.py",
    "told = replace(event, true_code=event.code, credential=None, version=None, placeholder_id=None)",
    "told = event",
)
def test_the_thiefs_trail_says_what_the_thief_was_told_and_the_platforms_says_what_is_true(
    granted: Workspace, other_workspace: Workspace, issued: Json
) -> None:
    report(granted, mismatch(other_workspace.tenant, issued["id"], foreign=True, client="evil", subject="mallory"))

    (told,) = [event for event in other_workspace.audit() if event["action"] == "refuse"]
    (alarm,) = wait_for(lambda: alarms(granted))
    response = granted.control_plane.admin("GET", "/v1/audit", params={"request_id": "req-stolen"})
    true = [event for event in response.json()["items"] if "tenant" not in event]
    assert (told["code"], told["true_code"]) == ("unknown_placeholder", "unknown_placeholder")
    assert "placeholder_id" not in told
    assert "credential" not in told
    assert alarm["caller_is_of_another_tenant"] is True
    assert [(event["true_code"], event["placeholder_id"]) for event in true] == [("caller_mismatch", issued["id"])]


def mismatch(tenant: str, placeholder_id: str, *, foreign: bool, **fields: Any) -> Json:
    return {
        "event_id": f"ev-{tenant}-{placeholder_id}",
        "at": time.time(),
        "request_id": "req-stolen",
        "action": "refuse",
        "tenant": tenant,
        "code": "unknown_placeholder" if foreign else "caller_mismatch",
        "true_code": "caller_mismatch",
        "credential": "example",
        "version": 1,
        "placeholder_id": placeholder_id,
        "host": HOST,
        "status": 403,
    } | fields


def report(workspace: Workspace, *events: Json) -> None:
    response = workspace.control_plane.http.post("/internal/audit", json={"events": list(events)}, auth=PROXY)
    assert response.status_code == 204, response.text


def test_what_a_proxy_decided_by_itself_alarms_too(granted: Workspace, issued: Json) -> None:
    report(granted, mismatch(granted.tenant, issued["id"], foreign=False, client=granted.runtime, subject="bob"))

    (alarm,) = wait_for(lambda: alarms(granted))

    assert (alarm["placeholder_id"], alarm["caller"]["subject"]) == (issued["id"], "bob")


def test_a_report_about_its_own_caller_or_about_nothing_alarms_nobody(granted: Workspace, issued: Json) -> None:
    caller = granted.caller(issued)
    own = {name: caller[name] for name in ("client", "subject", "session")}
    report(
        granted,
        mismatch(granted.tenant, issued["id"], foreign=False, **own),
        mismatch(granted.tenant, "ph_none", foreign=False, client="c", subject="s"),
    )
    granted.control_plane.made("POST", granted.path("alarms/test"))

    assert [alarm["kind"] for alarm in alarms(granted)] == ["test"]


@pytest.mark.guards(ALARMS, "await records.alarms.again(sighting, count)\n                return None", "pass")
def test_a_thief_who_tries_on_is_counted_and_alarms_once_in_a_window(
    own_control_plane: OwnControlPlane,
) -> None:
    control_plane = own_control_plane()
    workspace = Workspace(control_plane, "acme")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()
    thief, other = colleague(workspace, issued), colleague(workspace, issued) | {"subject": "carol"}

    for _ in range(5):
        stolen_by(thief, issued, workspace)
    wait_for(lambda: [alarm for alarm in alarms(workspace) if alarm["count"] == 5])
    stolen_by(other, issued, workspace)
    wait_for(lambda: len(alarms(workspace)) == 2)
    control_plane.clock.advance(WINDOW_SECONDS)
    stolen_by(thief, issued, workspace)

    found = wait_for(lambda: alarms(workspace) if len(alarms(workspace)) == 3 else [])
    assert sorted((alarm["caller"]["subject"], alarm["count"]) for alarm in found) == [
        ("bob", 1),
        ("bob", 5),
        ("carol", 1),
    ]
    assert len([event for event in workspace.audit() if event["action"].startswith("alarm.")]) == 3


# --- revoking because of an alarm -------------------------------------------------------------------------------------


def revoke_on_mismatch(workspace: Workspace, value: bool) -> None:
    workspace.control_plane.made("PUT", workspace.path("alarm-settings"), {"revoke_on_mismatch": value})


def test_nothing_is_revoked_because_of_an_alarm_unless_the_tenant_wants_it(granted: Workspace, issued: Json) -> None:
    settings = granted.control_plane.made("GET", granted.path("alarm-settings"))
    stolen_by(colleague(granted, issued), issued, granted)
    wait_for(lambda: alarms(granted))

    assert settings == {"revoke_on_mismatch": False}
    assert granted.resolve(issued)["kind"] == "placeholder"


def test_where_the_tenant_wants_it_a_placeholder_in_the_wrong_hands_is_revoked(
    granted: Workspace, issued: Json
) -> None:
    revoke_on_mismatch(granted, True)
    stolen_by(colleague(granted, issued), issued, granted)

    (alarm,) = wait_for(lambda: [alarm for alarm in alarms(granted) if alarm["revoked"]])

    assert granted.resolve(issued)["code"] == "revoked_placeholder"
    (event,) = [event for event in granted.audit() if event["action"] == "placeholder.revoke"]
    assert (event["placeholder_id"], event["detail"]) == (alarm["placeholder_id"], "because of an alarm")


@pytest.mark.guards(ALARMS, "if not is_theft or alarm.is_foreign or not", "if not is_theft or not")
def test_another_tenant_cannot_have_a_placeholder_revoked_by_using_it(
    granted: Workspace, other_workspace: Workspace, issued: Json
) -> None:
    revoke_on_mismatch(granted, True)
    stolen_by(granted.caller(issued) | {"tenant": other_workspace.tenant}, issued, granted)
    wait_for(lambda: alarms(granted))

    assert granted.resolve(issued)["kind"] == "placeholder"


# --- decoys ----------------------------------------------------------------------------------------------------------


def decoy_of(workspace: Workspace, **fields: Any) -> Json:
    return workspace.control_plane.made("POST", workspace.path("decoys"), fields)


def ask_about(workspace: Workspace, placeholder: str, caller: Json) -> Json:
    answer: Json = workspace.ask(
        {
            "kind": "placeholder",
            "placeholder_sha256": sha256(placeholder),
            "caller": caller,
            "endpoint": dict(ENDPOINT),
        }
    )["answer"]
    return answer


def test_a_decoy_looks_like_a_placeholder_and_is_shown_once(granted: Workspace, issued: Json) -> None:
    decoy = decoy_of(granted, note="in the wiki")
    preset = decoy_of(granted, preset="anthropic")

    listed = granted.control_plane.made("GET", granted.path("decoys"))["items"]

    assert len(decoy["placeholder"]) == len(issued["access_token"])
    assert decoy["placeholder"][:12] == issued["access_token"][:12]
    assert preset["placeholder"].startswith("sk-ant-")
    assert [item["note"] for item in listed] == ["in the wiki", ""]
    assert "placeholder" not in listed[0]
    assert decoy["placeholder"] not in json.dumps([listed, granted.audit()])


@pytest.mark.guards("control_plane/resolution.py", "            await self._look_for_decoy(records, ask)\n", "")
def test_whoever_uses_a_decoy_hears_what_they_would_hear_of_any_unknown_string(
    granted: Workspace, other_workspace: Workspace, issued: Json
) -> None:
    decoy = decoy_of(granted)
    foreign = granted.caller(issued) | {"tenant": other_workspace.tenant}

    answers = [ask_about(granted, decoy["placeholder"], caller) for caller in (granted.caller(issued), foreign)]
    unknown = ask_about(granted, "coat_coatchk1" + "0" * 28, granted.caller(issued))

    assert answers == [unknown, unknown]
    found = wait_for(lambda: alarms(granted) if len(alarms(granted)) == 2 else [])
    assert {alarm["kind"] for alarm in found} == {"decoy_used"}
    assert {alarm["placeholder_id"] for alarm in found} == {decoy["id"]}
    assert sorted(alarm["caller_is_of_another_tenant"] for alarm in found) == [False, True]
    assert alarms(other_workspace) == []
    (listed,) = granted.control_plane.made("GET", granted.path("decoys"))["items"]
    assert listed["used_at"] is not None


def test_a_decoy_that_was_removed_alarms_nobody(granted: Workspace, issued: Json) -> None:
    decoy = decoy_of(granted)
    granted.control_plane.made("DELETE", granted.path(f"decoys/{decoy['id']}"))

    ask_about(granted, decoy["placeholder"], granted.caller(issued))
    granted.control_plane.made("POST", granted.path("alarms/test"))

    assert [alarm["kind"] for alarm in alarms(granted)] == ["test"]


@pytest.mark.parametrize(
    ("fields", "named"), [({"preset": "nobody"}, "preset"), ({"note": "a\nb"}, "note"), ({"shape": "x"}, "shape")]
)
def test_a_decoy_that_makes_no_sense_is_refused_with_its_field(workspace: Workspace, fields: Json, named: str) -> None:
    response = workspace.control_plane.admin("POST", workspace.path("decoys"), fields)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")
    assert response.json()["detail"].startswith(f"{named}:")


def test_a_client_that_presents_anothers_placeholder_or_a_decoy_alarms_too(granted: Workspace, issued: Json) -> None:
    decoy = decoy_of(granted)
    thief = (f"{granted.tenant}-other", granted.add_client(f"{granted.tenant}-other", "runtime"))

    answers = [
        granted.token_as(thief, subject_token=text, subject_token_type=PLACEHOLDER)
        for text in (issued["access_token"], decoy["placeholder"])
    ]

    assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(400, "unknown_placeholder")}
    found = wait_for(lambda: alarms(granted) if len(alarms(granted)) == 2 else [])
    assert {(alarm["kind"], alarm["placeholder_id"]) for alarm in found} == {
        ("stolen_placeholder", issued["id"]),
        ("decoy_used", decoy["id"]),
    }
    assert {alarm["caller"]["client"] for alarm in found} == {thief[0]}


# --- telling hooks ---------------------------------------------------------------------------------------------------


class Listening:
    """A control plane whose hooks lead to a server of ours."""

    def __init__(self, workspace: Workspace, server: Upstream) -> None:
        self.workspace = workspace
        self.server = server

    def hook(self, path: str = "/alarms") -> Json:
        url = f"{self.server.url}{path}"
        return self.workspace.control_plane.made("POST", self.workspace.path("alarm-hooks"), {"url": url})

    def test(self) -> Json:
        return self.workspace.control_plane.made("POST", self.workspace.path("alarms/test"))

    def was_tried(self, times: int) -> bool:
        return bool(self.delivery()["attempts"] == times)

    def delivery(self) -> Json:
        (alarm,) = alarms(self.workspace)
        (delivery,) = alarm["deliveries"]
        return dict(delivery)


@pytest.fixture
def listening(own_control_plane: OwnControlPlane, tmp_path: Path) -> Iterator[Listening]:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "hooks-ca.pem"))
    with Upstream(ca) as server:
        server.on("/alarms", plain(b"taken"))
        control_plane = own_control_plane(
            outbound_allow=(server.authority,), outbound_ca_files=(tmp_path / "hooks-ca.pem",)
        )
        yield Listening(Workspace(control_plane, "acme"), server)


@pytest.mark.guards(CORE, 'str(at).encode() + b"." + body', "body")
def test_a_hook_is_told_and_can_check_who_tells(listening: Listening) -> None:
    hook = listening.hook()

    alarm = listening.test()

    (told,) = wait_for(lambda: listening.server.seen("/alarms"))
    assert wait_for(lambda: listening.delivery()["delivered"])
    assert json.loads(told.body) == alarm
    parts = dict(part.split("=") for part in told.header("coatcheck-signature").split(","))
    expected = hmac.new(hook["secret"].encode(), f"{parts['t']}.".encode() + told.body, hashlib.sha256).hexdigest()
    assert hmac.compare_digest(parts["v1"], expected)
    assert abs(int(parts["t"]) - time.time()) < 60
    assert told.header("content-type") == "application/json"


@pytest.mark.guards(
    "control_plane/adapters/sql/alarms.py", "order_by(waiting.c.turn, waiting.c.due_at)", "order_by(waiting.c.due_at)"
)
def test_a_tenant_with_slow_hooks_and_many_alarms_holds_up_no_other(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def says_nothing(_request: Request, wire: Wire) -> None:
        await wire.peer_gone.wait()

    monkeypatch.setattr("control_plane.adapters.outbound.MAX_SECONDS", 2.0)
    listening.server.on("/slow", says_nothing)
    evil = Listening(Workspace(listening.workspace.control_plane, "evil"), listening.server)
    for _ in range(MAX_HOOKS):
        evil.hook("/slow")
    for _ in range(12):
        evil.test()
    listening.hook()

    listening.test()

    assert wait_for(lambda: listening.server.seen("/alarms"), seconds=8)


def test_a_hooks_secret_is_shown_once_and_each_has_its_own(listening: Listening) -> None:
    one, other = listening.hook(), listening.hook("/other")

    listed = listening.workspace.control_plane.made("GET", listening.workspace.path("alarm-hooks"))["items"]

    assert one["secret"] != other["secret"]
    assert one["secret"].startswith("whsec_")
    assert all("secret" not in hook for hook in listed)
    assert one["secret"] not in json.dumps(listening.workspace.audit())


def test_a_hook_that_fails_is_tried_again_a_bounded_number_of_times(listening: Listening) -> None:
    listening.hook("/broken")
    listening.server.on("/broken", plain(b"", status="500 Internal Server Error"))
    listening.test()

    for attempt in range(1, MAX_ATTEMPTS + 1):
        wait_for(functools.partial(listening.was_tried, attempt))
        wait_for(lambda: listening.delivery()["error"] == "status 500")
        listening.workspace.control_plane.clock.advance(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS)) - 1] + 1)
    wait_for(lambda: listening.delivery()["given_up"])
    listening.workspace.control_plane.clock.advance(86_400)

    assert listening.delivery() | {"hook": ""} == {
        "hook": "",
        "attempts": MAX_ATTEMPTS,
        "delivered": False,
        "given_up": True,
        "error": "status 500",
    }
    assert len(listening.server.seen("/broken")) == MAX_ATTEMPTS


def test_a_hook_inside_our_own_network_is_not_reached(workspace: Workspace) -> None:
    workspace.control_plane.made("POST", workspace.path("alarm-hooks"), {"url": "https://169.254.169.254/latest"})

    workspace.control_plane.made("POST", workspace.path("alarms/test"))

    (alarm,) = wait_for(lambda: [alarm for alarm in alarms(workspace) if alarm["deliveries"][0]["error"]])
    assert alarm["deliveries"][0]["error"] == "denied_address"


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/",
        "https://user:hunter2@hooks.example.com/",
        "https://hooks.example.com/#x",
        "ftp://x",
    ],
)
def test_a_url_that_is_none_of_ours_is_refused_with_its_field(workspace: Workspace, url: str) -> None:
    response = workspace.control_plane.admin("POST", workspace.path("alarm-hooks"), {"url": url})

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")
    assert response.json()["detail"].startswith("url:")
    assert "hunter2" not in response.text


def test_the_platforms_hooks_are_told_every_tenants_alarms_with_both_sides(listening: Listening) -> None:
    http: httpx.Client = listening.workspace.control_plane.http
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    made = http.post("/v1/alarm-hooks", json={"url": f"{listening.server.url}/alarms"}, headers=headers).json()

    listening.test()

    (told,) = wait_for(lambda: listening.server.seen("/alarms"))
    assert json.loads(told.body)["caller"]["tenant"] == "acme"
    assert http.get("/v1/alarm-hooks", headers=headers).json()["items"][0]["id"] == made["id"]
    tenants = http.get("/v1/tenants/acme/alarm-hooks", headers=headers).json()["items"]
    assert tenants == []
    gone = http.delete(f"/v1/tenants/acme/alarm-hooks/{made['id']}", headers=headers)
    assert gone.status_code == 404
    assert http.delete(f"/v1/alarm-hooks/{made['id']}", headers=headers).status_code == 204


def test_a_hook_of_another_tenant_is_not_found(workspace: Workspace, other_workspace: Workspace) -> None:
    made = other_workspace.control_plane.made(
        "POST", other_workspace.path("alarm-hooks"), {"url": "https://hooks.example.com/"}
    )

    foreign = workspace.control_plane.admin("DELETE", workspace.path(f"alarm-hooks/{made['id']}"))

    assert foreign.status_code == 404


def test_retries_are_bounded_and_slower_each_time() -> None:
    times = [retry_at(attempts, now=0.0) for attempts in range(1, MAX_ATTEMPTS + 1)]

    assert times[:-1] == sorted(time for time in times[:-1] if time is not None)
    assert times[-1] is None


def test_a_signature_is_of_its_time_secret_and_body() -> None:
    secret = hook_secret(b"k" * 32, "hook_1")

    made = signature(secret, b"{}", at=1_700_000_000)

    assert made.startswith("t=1700000000,v1=")
    assert len({made, signature(secret, b"{}", at=1_700_000_001), signature(secret, b"{ }", at=1_700_000_000)}) == 3
    assert hook_secret(b"k" * 32, "hook_2") != secret
