"""A client that goes takes its sessions along: whoever gets its name later is somebody else."""

import json
from pathlib import Path

import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import private_file, settings_in
from tests.control_plane.workspace import JWT, SESSION, Workspace


@pytest.mark.guards(
    "control_plane/registry.py", "await end_sessions(records, sessions, at=now)", "assert sessions is not None"
)
def test_a_removed_runtimes_sessions_are_not_the_next_ones_of_its_name(granted: Workspace) -> None:
    session = granted.open_session()
    granted.exchange(session)
    granted.control_plane.made("DELETE", f"/v1/clients/{granted.runtime}")

    newcomer = (granted.runtime, granted.add_client(granted.runtime, "runtime"))

    by_name = granted.token_as(
        newcomer, subject_token=session["session_id"], subject_token_type=SESSION, audience="example"
    )
    by_token = granted.token_as(
        newcomer, subject_token=session["session_token"], subject_token_type=JWT, audience="example"
    )
    assert (by_name.status_code, by_name.json()["code"]) == (400, "session_not_found")
    assert (by_token.status_code, by_token.json()["code"]) == (400, "session_not_found")


def test_its_sessions_rules_go_and_the_trail_says_so(granted: Workspace) -> None:
    session = granted.open_session()
    granted.control_plane.made(
        "POST", granted.path("allow-rules"), {"host": "mirror.test", "session": session["session_id"]}
    )

    granted.control_plane.made("DELETE", f"/v1/clients/{granted.runtime}")

    ended = [event for event in granted.audit() if event["action"] == "session.end"]
    assert granted.control_plane.made("GET", granted.path("allow-rules"))["items"] == []
    assert [event["session"] for event in ended] == [session["session_id"]]


@pytest.mark.parametrize(
    "change", [{"tenant": "other"}, {"kind": "operator"}], ids=["another tenant's", "of another kind"]
)
def test_a_client_of_the_file_that_becomes_another_loses_its_sessions(
    own_control_plane: OwnControlPlane, tmp_path: Path, change: dict[str, str]
) -> None:
    settings_in(tmp_path)
    private_file(tmp_path / "worker", "secret-of-the-worker-0123456789abcdef")
    (proxy,) = json.loads((tmp_path / "clients.json").read_text())
    worker = {"id": "worker", "kind": "runtime", "tenant": "local", "scopes": [], "secret_file": "worker"}
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps([proxy, worker]))
    after.write_text(json.dumps([proxy, worker | change]))
    first = own_control_plane(clients_file=before)
    session = first.made("POST", "/v1/sessions", {"tenant": "local", "subject": "alice", "runtime": "worker"})
    first.stop()

    second = own_control_plane(clients_file=after)

    assert second.made("GET", f"/v1/sessions/{session['session_id']}")["ended_at"] is not None
