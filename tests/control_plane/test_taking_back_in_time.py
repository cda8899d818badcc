"""Taking back does not get slower by what piled up: one event, one statement, however many placeholders there were."""

import time
from collections.abc import Callable

import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import ADMIN_TOKEN, ControlPlane
from tests.control_plane.workspace import Json, Workspace

PILE = 20_000
AT_ONCE_SECONDS = 2.0
"""Of work, however busy the machine is: it takes some tenths; a statement for each placeholder takes half a minute."""


@pytest.fixture
def piled(own_control_plane: OwnControlPlane) -> tuple[Workspace, Json]:
    """A session with twenty thousand placeholders that can still be renewed."""
    workspace = Workspace(own_control_plane(), "local")
    workspace.add_credential()
    workspace.grant()
    session = workspace.open_session()
    workspace.exchange(session)
    pile_up(workspace, session)
    return workspace, session


def pile_up(workspace: Workspace, session: Json, *, expired_for: float = 600.0) -> None:
    now = time.time()
    workspace.control_plane.edit(
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {PILE}) "
        "INSERT INTO tokens (sha256, id, kind, subject, scope, act, ttl_seconds, tenant, session, client, "
        "credential_id, created_at, expires_at) SELECT printf('%064x', i), 'ph_old' || i, 'placeholder', 'alice', '', "
        "'[]', 900, ?, ?, ?, ?, ?, ? FROM n",
        workspace.tenant,
        session["session_id"],
        workspace.runtime,
        workspace.credential()["id"],
        now - expired_for - 900,
        now - expired_for,
    )


def events_of(control_plane: ControlPlane) -> list[tuple[str, bool]]:
    return [(kind, bool(revoked)) for kind, revoked in control_plane.look("SELECT kind, revoked FROM outbox")]


TAKEN_BACK: dict[str, tuple[Callable[[Workspace, Json], object], set[tuple[str, bool]]]] = {
    "its credential deleted": (
        lambda w, session: w.control_plane.made("DELETE", w.path("credentials/example")),
        {("credential", True)},
    ),
    "its credential narrowed": (
        lambda w, session: w.patch_credential({"destinations": [{"url": "https://api.example.com/v1"}]}),
        {("credential", True)},
    ),
    "its grant removed": (
        lambda w, session: w.remove_grant(w.control_plane.made("GET", w.path("grants"))["items"][0]),
        {("grant", True)},
    ),
    "its session ended": (lambda w, session: w.end_session(session), {("session", True)}),
    "its client removed": (
        lambda w, session: w.control_plane.made("DELETE", f"/v1/clients/{w.runtime}"),
        {("session", True), ("proxy_credential", True)},
    ),
    "its tenant removed": (
        lambda w, session: w.control_plane.made("DELETE", f"/v1/tenants/{w.tenant}?confirm={w.tenant}"),
        {("tenant", True)},
    ),
}


@pytest.mark.parametrize(("take_back", "told"), TAKEN_BACK.values(), ids=TAKEN_BACK.keys())
def test_taking_back_twenty_thousand_placeholders_is_one_event_of_a_kind_and_at_once(
    piled: tuple[Workspace, Json], take_back: Callable[[Workspace, Json], object], told: set[tuple[str, bool]]
) -> None:
    workspace, session = piled
    heard = len(events_of(workspace.control_plane))

    began = time.process_time()
    take_back(workspace, session)
    took = time.process_time() - began

    events = events_of(workspace.control_plane)[heard:]
    usable = "SELECT COUNT(*) FROM tokens WHERE revoked_at IS NULL AND kind = 'placeholder'"
    assert took < AT_ONCE_SECONDS
    assert sorted(event for event in events if event[1]) == sorted(told)
    assert workspace.control_plane.look(usable) == [(0,)]


def test_the_list_is_read_in_pages_newest_first(granted: Workspace) -> None:
    issued = [granted.exchange()["id"] for _ in range(5)]

    seen: list[str] = []
    while True:
        query = {"limit": 2} | ({"before": seen[-1]} if seen else {})
        page = granted.control_plane.admin("GET", granted.path("placeholders"), params=query).json()["items"]
        seen += [item["id"] for item in page]
        if len(page) < 2:
            break

    assert seen == issued[::-1]


def test_a_page_before_nobodys_placeholder_is_refused(granted: Workspace, other_workspace: Workspace) -> None:
    other_workspace.add_credential()
    other_workspace.grant()
    others = other_workspace.exchange()["id"]

    response = granted.control_plane.admin("GET", granted.path(f"placeholders?before={others}"))

    assert response.status_code == 422
    assert response.json()["detail"].startswith("before: ")


def test_a_list_is_never_longer_than_a_thousand(granted: Workspace) -> None:
    response = granted.control_plane.http.get(
        granted.path("placeholders?limit=1001"), headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}
    )

    assert response.status_code == 422
