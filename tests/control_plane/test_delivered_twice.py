"""What proxies report may be delivered again, whole, in part, or at two replicas at once: each event counts once."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from threading import Barrier
from typing import Any

import pytest

from control_plane.faults import armed
from tests.control_plane.databases import new_database
from tests.control_plane.serving import PROXY, ControlPlane, control_plane_in
from tests.control_plane.test_alarms import alarms, colleague, mismatch, wait_for
from tests.control_plane.workspace import HOST, Json, Workspace

INTERNAL = "control_plane/api/internal.py"
_names = count(1)
_NONE = {"replies": 0, "authentication_errors": 0}


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def planes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ControlPlane]]:
    """On PostgreSQL two replicas; on SQLite one, twice."""
    folder, issuer = tmp_path_factory.mktemp("twice"), "https://coatcheck.example"
    url = asyncio.run(new_database(request.param, request, folder))
    with ExitStack() as stack:
        made = [
            stack.enter_context(control_plane_in(folder, database_url=url, issuer_url=issuer))
            for _ in range(1 if request.param == "sqlite" else 2)
        ]
        yield [made[0], made[-1]]


@pytest.fixture
def rotating(planes: list[ControlPlane]) -> Workspace:
    """With a credential whose canary is under way: its replies are counted."""
    workspace = Workspace(planes[0], f"acme-{next(_names)}")
    workspace.add_credential()
    workspace.grant()
    workspace.rotate("a-new-key-0123456789", canary_percent=20, canary_seconds=600)
    return workspace


def deliver(plane: ControlPlane, *events: Json, dropped: int = 0) -> None:
    batch = {"events": list(events), "dropped": dropped}
    response = plane.http.post("/internal/audit", json=batch, auth=PROXY)
    assert response.status_code == 204, response.text


def replies(workspace: Workspace, name: str, **fields: Any) -> Json:
    """Three of 401 and seven of 200, of the old version."""
    return {
        "event_id": f"{workspace.tenant}-{name}",
        "at": 2_000.0,
        "request_id": "r",
        "action": "replies",
        "tenant": workspace.tenant,
        "subject": "alice",
        "credential": "example",
        "version": 1,
        "extra": {"credential_id": workspace.credential()["id"], "401": "3", "200": "7"},
    } | fields


def swap(workspace: Workspace, name: str, *, at: float) -> Json:
    return {
        "event_id": f"{workspace.tenant}-{name}",
        "at": at,
        "request_id": "r",
        "action": "swap",
        "tenant": workspace.tenant,
        "subject": "alice",
        "client": workspace.runtime,
        "credential": "example",
        "host": HOST,
    }


def counted(workspace: Workspace) -> tuple[int, int, int, float]:
    """Replies and failures of the old version; requests, and when the last one was."""
    plane = workspace.control_plane
    state = plane.made("GET", workspace.path("credentials/example/rotation"))
    old = next((each for each in state["replies"] if each["version"] == 1), _NONE)
    (entitlement,) = plane.made("GET", f"/v1/access?tenant={workspace.tenant}")["items"]
    (use,) = entitlement["uses"] or [{"requests": 0, "last_used_at": 0.0}]
    return old["replies"], old["authentication_errors"], use["requests"], use["last_used_at"]


@pytest.mark.guards(INTERNAL, "news = _first_of_each(events, added)", "news = events")
def test_a_batch_that_is_delivered_again_whole_or_in_part_counts_once(
    planes: list[ControlPlane], rotating: Workspace
) -> None:
    batch = [
        replies(rotating, "a"),
        swap(rotating, "b", at=1_000.0),
        swap(rotating, "c", at=2_000.0),
        replies(rotating, "d", subject="bob"),
    ]
    deliver(planes[0], *batch)
    once = counted(rotating)

    deliver(planes[0], *batch)
    deliver(planes[1], *batch[2:], swap(rotating, "e", at=1_500.0))
    deliver(planes[1], *batch, batch[0], batch[1], dropped=3)

    assert once == (20, 6, 2, 2_000.0)
    assert counted(rotating) == (20, 6, 3, 2_000.0)


@pytest.mark.guards(INTERNAL, "return list(reversed(by_id.values()))", "return events if by_id else []")
def test_an_event_that_stands_twice_in_its_batch_counts_once(planes: list[ControlPlane], rotating: Workspace) -> None:
    deliver(planes[0], *[replies(rotating, "a"), swap(rotating, "b", at=1_000.0)] * 2)

    assert counted(rotating) == (10, 3, 1, 1_000.0)


def test_what_is_delivered_to_two_replicas_at_once_counts_once(planes: list[ControlPlane], rotating: Workspace) -> None:
    batches = [
        [replies(rotating, f"{number}"), *(swap(rotating, f"{number}-{each}", at=1_000.0) for each in range(20))]
        for number in range(8)
    ]
    together = Barrier(4)

    def one(worker: int) -> None:
        for batch in batches:
            together.wait(60)
            deliver(planes[worker % 2], *(batch if worker < 2 else batch[:7]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))

    assert counted(rotating) == (80, 24, 160, 1_000.0)


def test_counts_that_could_not_be_recorded_are_made_up_for_when_their_batch_comes_again(
    planes: list[ControlPlane], rotating: Workspace
) -> None:
    """Events and counts are one transaction: neither is there without the other."""
    batch = [replies(rotating, "a"), swap(rotating, "b", at=1_000.0)]

    def breaks(point: str) -> None:
        if point == "audit.appended":
            raise RuntimeError("the database broke off")

    with armed(breaks):
        failed = planes[0].http.post("/internal/audit", json={"events": batch}, auth=PROXY)
    before = counted(rotating), [item for item in rotating.audit() if item["action"] == "swap"]
    deliver(planes[0], *batch)

    assert failed.status_code == 500
    assert before == ((0, 0, 0, 0.0), [])
    assert counted(rotating) == (10, 3, 1, 1_000.0)


@pytest.mark.guards(
    "control_plane/rotation.py",
    "if credential is None or credential.tenant != tenant:",
    "if credential is None:",
)
def test_a_report_of_anothers_credential_counts_for_nobody(planes: list[ControlPlane], rotating: Workspace) -> None:
    other = Workspace(planes[0], f"other-{next(_names)}")

    deliver(planes[0], replies(rotating, "a", tenant=other.tenant))

    assert counted(rotating) == (0, 0, 0, 0.0)


@pytest.mark.guards("control_plane/alarms.py", "times=1 if event.event_id in new else 0", "times=1")
def test_a_stolen_placeholder_that_is_reported_again_is_one_sighting(
    planes: list[ControlPlane], rotating: Workspace
) -> None:
    issued = rotating.exchange()
    thief = {name: colleague(rotating, issued)[name] for name in ("client", "subject", "session")}
    seen = [
        mismatch(rotating.tenant, issued["id"], foreign=False, event_id=f"{rotating.tenant}-{each}", **thief)
        for each in range(2)
    ]

    for batch in (seen[:1], seen[:1], seen, seen):
        deliver(planes[0], *batch)

    wait_for(lambda: [alarm for alarm in alarms(rotating) if alarm["count"] >= 2])
    assert [alarm["count"] for alarm in alarms(rotating)] == [2]
