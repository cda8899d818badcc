"""`/metrics`: what whoever watches over the control plane wants to know, and nobody's name in it."""

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.bootstrap import running
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.databases import new_database
from tests.control_plane.serving import PROXY, private_file, settings_in
from tests.control_plane.workspace import HOST, SECRET, Json, Workspace

PREFIX = "coatcheck_control_plane_"


def page(workspace: Workspace) -> str:
    response = workspace.control_plane.admin("GET", "/v1/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return response.text


def samples(text: str) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items()) if sample.labels else ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def metric(workspace: Workspace, name: str, **labels: str) -> float:
    key = f"{PREFIX}{name}{sorted(labels.items()) if labels else ''}"
    return samples(page(workspace)).get(key, 0.0)


def wait_for(fact: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not fact() and time.monotonic() < deadline:
        time.sleep(0.05)
    return fact()


def test_requests_refusals_and_resolves_are_counted(granted: Workspace) -> None:
    before = samples(page(granted))
    issued = granted.exchange()
    granted.resolve(issued)
    granted.resolve(issued, caller=granted.caller(issued) | {"subject": "bob"})
    granted.token(subject_token="x", subject_token_type="y", audience="example")
    after = samples(page(granted))

    def more(name: str, **labels: str) -> float:
        key = f"{PREFIX}{name}{sorted(labels.items())}"
        return after.get(key, 0) - before.get(key, 0)

    assert more("requests_total", method="POST", route="/oauth/token", status="2xx") == 1
    assert more("requests_total", method="POST", route="/oauth/token", status="4xx") == 1
    assert more("request_seconds_count", route="/oauth/token") == 2
    assert more("request_seconds_bucket", route="/oauth/token", le="+Inf") == 2
    assert more("resolves_total", outcome="answered") == 1
    assert more("resolves_total", outcome="caller_mismatch") == 1
    assert more("refusals_total", code="malformed_request") >= 1


def test_it_is_said_how_things_stand(granted: Workspace) -> None:
    granted.control_plane.made("POST", granted.path("alarms/test"))

    found = samples(page(granted))

    assert found[f"{PREFIX}store_up"] == 1
    assert found[f"{PREFIX}tenants"] >= 1
    assert found[f"{PREFIX}credentials"] >= 1
    assert found[f"{PREFIX}credentials_due"] == 0
    assert found[f"{PREFIX}outbox_sequence"] >= 1
    assert found[f"{PREFIX}outbox_lag_changes"] == 0
    assert found[f"{PREFIX}alarms_total[('kind', 'test')]"] >= 1
    assert found[f"{PREFIX}audit_failures_total"] == 0
    assert "process_resident_memory_bytes" in found
    assert wait_for(lambda: metric(granted, "audit_unchained_events") == 0)


def test_it_is_said_how_old_the_versions_in_use_are_and_which_are_past_their_reminder(
    own_control_plane: OwnControlPlane,
) -> None:
    plane, day = own_control_plane(), 86_400
    workspace = Workspace(plane, "acme")
    nobody = samples(page(workspace))
    for name in ("old", "replaced", "scheduled"):
        workspace.add_credential(name)
    schedule = {"every_seconds": 60 * day, "remind_seconds": 20 * day}
    plane.made("PUT", workspace.path("credentials/scheduled/rotation/schedule"), schedule)
    plane.clock.advance(45 * day)
    workspace.rotate("a-new-key-0123456789", name="replaced")

    found = samples(page(workspace))
    plane.clock.advance(20 * day)
    later = samples(page(workspace))

    def within(days: int) -> float:
        return found[f"{PREFIX}credential_age_seconds_bucket[('le', '{days * day:.1f}')]"]

    assert (nobody[f"{PREFIX}credential_oldest_seconds"], nobody[f"{PREFIX}credential_age_seconds_count"]) == (0, 0)
    assert [within(days) for days in (1, 7, 30, 90, 180, 365)] == [1, 1, 1, 3, 3, 3]
    assert found[f"{PREFIX}credential_age_seconds_count"] == 3
    assert 90 * day <= found[f"{PREFIX}credential_age_seconds_sum"] < 90 * day + 600
    assert 45 * day <= found[f"{PREFIX}credential_oldest_seconds"] < 45 * day + 600
    assert [found[f"{PREFIX}credentials_{name}"] for name in ("reminded", "due")] == [1, 0]
    assert [later[f"{PREFIX}credentials_{name}"] for name in ("reminded", "due")] == [1, 1]


def test_envelopes_are_counted_under_each_key_encryption_key_also_where_there_are_none(
    own_control_plane: OwnControlPlane, tmp_path: Path
) -> None:
    older = private_file(tmp_path / "older.hex", os.urandom(32).hex())
    settings = settings_in(tmp_path)
    plane = own_control_plane(kek_files=(*settings.kek_files, older))
    workspace = Workspace(plane, "acme")
    keks = plane.made("GET", "/v1/keks")["items"]
    newest, oldest = keks[0]["kek_id"], keks[1]["kek_id"]
    before = samples(page(workspace))[f"{PREFIX}envelopes[('kek', '{newest}'), ('state', 'seals')]"]

    workspace.add_credential()
    after = samples(page(workspace))

    assert after[f"{PREFIX}envelopes[('kek', '{newest}'), ('state', 'seals')]"] == before + 1
    assert after[f"{PREFIX}envelopes[('kek', '{oldest}'), ('state', 'opens')]"] == 0


def test_envelopes_under_a_key_that_is_in_no_setting_any_more_are_seen(
    own_control_plane: OwnControlPlane, tmp_path: Path
) -> None:
    plane = own_control_plane()
    workspace = Workspace(plane, "acme")
    workspace.add_credential()

    plane.edit("UPDATE credential_versions SET kek_id = 'f00d'")

    assert samples(page(workspace))[f"{PREFIX}envelopes[('kek', 'f00d'), ('state', 'missing')]"] == 1


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def test_both_databases_say_how_things_stand(
    kind: str, request: pytest.FixtureRequest, own_control_plane: OwnControlPlane, tmp_path: Path
) -> None:
    url = asyncio.run(new_database(kind, request, tmp_path))
    workspace = Workspace(own_control_plane(database_url=url), "acme")
    workspace.add_credential()

    found = samples(page(workspace))

    assert found[f"{PREFIX}credential_age_seconds_count"] == 1
    assert sum(value for name, value in found.items() if name.startswith(f"{PREFIX}envelopes[")) >= 1


def test_event_streams_are_counted_while_they_are_open(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    url = f"{workspace.control_plane.url}/internal/events"

    with httpx.stream("GET", url, auth=PROXY, trust_env=False) as response:
        next(response.iter_lines())
        open_ones = metric(workspace, "event_streams")

    assert open_ones == 1
    assert wait_for(lambda: metric(workspace, "event_streams") == 0)


def test_no_name_and_no_secret_is_in_it(granted: Workspace) -> None:
    issued: Json = granted.exchange()
    granted.resolve(issued)
    granted.control_plane.http.get("/v1/odd-path-of-a-request?query=odd", headers={"X-Odd": "odd"})

    text = page(granted)

    for name in (granted.tenant, granted.runtime, "alice", "example", HOST, SECRET, issued["access_token"], "odd"):
        assert not re.search(rf"\b{re.escape(name)}\b", text), name


def test_a_method_that_somebody_made_up_is_no_label(workspace: Workspace) -> None:
    workspace.control_plane.http.request("BREW", "/healthz")

    assert "BREW" not in page(workspace)


@pytest.mark.guards(
    "control_plane/api/errors.py", "HTTPException, ClientDisconnect, Unreadable", "HTTPException, Unreadable"
)
@pytest.mark.parametrize("route", ["/oauth/token", "/oauth/revoke"], ids=["straight", "by the framework"])
def test_who_goes_before_the_request_is_whole_is_no_failure_of_ours(workspace: Workspace, route: str) -> None:
    def counted(status: str) -> float:
        return metric(workspace, "requests_total", method="POST", route=route, status=status)

    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    before = {status: counted(status) for status in ("0xx", "4xx", "5xx")}

    port = int(workspace.control_plane.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
        peer.sendall(f"{head}Content-Length: 100\r\n\r\ngrant_type=".encode())

    assert wait_for(lambda: counted("4xx") == before["4xx"] + 1)
    assert (counted("0xx"), counted("5xx")) == (before["0xx"], before["5xx"])


def test_metrics_are_for_the_platform(workspace: Workspace) -> None:
    for headers in ({}, {"Authorization": "Bearer nobody"}):
        assert workspace.control_plane.http.get("/v1/metrics", headers=headers).status_code == 401


@pytest.mark.parametrize(("path", "status"), [("/metrics", 200), ("/", 404), ("/v1/tenants", 404), ("/healthz", 404)])
def test_a_listener_of_their_own_shows_metrics_and_nothing_else(metrics_url: str, path: str, status: int) -> None:
    response = httpx.get(metrics_url + path, trust_env=False)

    assert response.status_code == status
    assert (PREFIX in response.text) is (status == 200)


@pytest.fixture(scope="module")
def metrics_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = settings_in(tmp_path_factory.mktemp("metrics"), metrics_listen="127.0.0.1:0")
    ready, found = threading.Event(), list[str]()
    state: dict[str, asyncio.Event | asyncio.AbstractEventLoop] = {}

    async def main() -> None:
        stop = asyncio.Event()
        state["loop"], state["stop"] = asyncio.get_running_loop(), stop
        async with running(settings) as control_plane:
            found.append(f"http://127.0.0.1:{control_plane.metrics_port}")
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(20)
    yield found[0]
    loop, stop = state["loop"], state["stop"]
    assert isinstance(loop, asyncio.AbstractEventLoop)
    assert isinstance(stop, asyncio.Event)
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)


def test_a_database_that_is_away_is_a_level_and_not_an_error(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    workspace.control_plane.edit("ALTER TABLE outbox RENAME TO elsewhere")

    found = samples(page(workspace))

    assert found[f"{PREFIX}store_up"] == 0
    assert f"{PREFIX}tenants" not in found
