"""A session's end reaches everything that was kept of it, on both sides, wherever either of them dies on the way."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.dying import DIED
from tests.control_plane.serving import ADMIN_TOKEN, ControlPlane, control_plane_in
from tests.control_plane.workspace import JWT, SESSION, Json, Workspace

STORE = ["store.written", "store.published", "store.committed"]
STEPS = [
    *(("end", f"session.{step}") for step in ("tombstoned", "tokens_revoked", "rules_removed", "ended")),
    *(("end", point) for point in STORE),
    # Erasing publishes nothing: no proxy needs to hear of it.
    *(("erase", point) for point in ("store.written", "store.committed")),
]


class Runtime:
    """The runtime's side: a file for each session, and what is done about those that are over."""

    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self.workspace = workspace
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def login(self) -> tuple[str, str]:
        return self.workspace.runtime, self.workspace.runtime_secret

    def keep(self, session: Json) -> Path:
        file = self.folder / str(session["session_id"])
        file.write_text("what was said")
        return file

    def ended(self) -> list[str]:
        response = self.workspace.control_plane.http.get("/v1/sessions/ended", auth=self.login)
        assert response.status_code == 200, response.text
        return [item["session_id"] for item in response.json()["items"]]

    def forget(self, session_id: str) -> None:
        (self.folder / session_id).unlink(missing_ok=True)

    def confirm(self, session_id: str) -> httpx.Response:
        return self.workspace.control_plane.http.post(f"/v1/sessions/{session_id}/erased", auth=self.login)

    def catch_up(self) -> None:
        """What it does at its start and every now and then."""
        for session_id in self.ended():
            self.forget(session_id)
            assert self.confirm(session_id).status_code == 204


def is_over(workspace: Workspace, session: Json, issued: Json) -> bool:
    """Nothing more is exchanged, renewed, or resolved in the session."""
    answers = [
        workspace.token(subject_token=session["session_id"], subject_token_type=SESSION, audience="example"),
        workspace.token(subject_token=session["session_token"], subject_token_type=JWT, audience="example"),
        workspace.renewal(issued),
    ]
    return all(answer.status_code == 400 for answer in answers) and workspace.resolve(issued)["kind"] == "refused"


def test_what_was_kept_goes_on_both_sides_and_the_tombstone_and_the_trail_stay(
    granted: Workspace, tmp_path: Path
) -> None:
    runtime = Runtime(granted, tmp_path / "runtime")
    session, other = granted.open_session(), granted.open_session()
    kept, others = runtime.keep(session), runtime.keep(other)
    issued = granted.exchange(session)

    granted.end_session(session)
    before = runtime.ended()
    runtime.catch_up()

    shown = granted.control_plane.made("GET", f"/v1/sessions/{session['session_id']}")
    rows = granted.control_plane.look("SELECT * FROM tokens WHERE session = ?", session["session_id"])
    assert session["session_id"] in before
    assert (kept.exists(), others.exists()) == (False, True)
    assert rows == []
    assert shown["ended_at"] <= shown["erased_at"]
    assert is_over(granted, session, issued)
    actions = [event["action"] for event in granted.audit() if event.get("session") == session["session_id"]]
    assert actions[0] == "session.open"
    assert [action for action in actions if action.startswith("session.")] == [
        "session.open",
        "session.end",
        "session.erase",
    ]


@pytest.mark.guards(
    "control_plane/sessions.py", "if current.ended_at is None:\n                raise RefusedError(NOT_OVER)", "pass"
)
def test_nothing_is_erased_of_a_session_that_is_not_over(granted: Workspace, tmp_path: Path) -> None:
    runtime = Runtime(granted, tmp_path / "runtime")
    session = granted.open_session()
    issued = granted.exchange(session)

    response = runtime.confirm(session["session_id"])

    assert (response.status_code, response.json()["code"]) == (409, "session_busy")
    assert granted.resolve(issued)["kind"] == "placeholder"


def test_saying_it_again_changes_nothing(granted: Workspace, tmp_path: Path) -> None:
    runtime = Runtime(granted, tmp_path / "runtime")
    session = granted.open_session()
    granted.end_session(session)
    runtime.catch_up()
    first = granted.control_plane.made("GET", f"/v1/sessions/{session['session_id']}")["erased_at"]

    again = runtime.confirm(session["session_id"])
    granted.end_session(session)

    assert again.status_code == 204
    assert granted.control_plane.made("GET", f"/v1/sessions/{session['session_id']}")["erased_at"] == first
    assert session["session_id"] not in runtime.ended()


@pytest.mark.guards(
    "control_plane/api/sessions.py",
    "if found.runtime != runtime.id or not runtime.serves(found.tenant):",
    "if False:",
)
def test_another_runtime_neither_sees_nor_erases_it(
    granted: Workspace, other_workspace: Workspace, tmp_path: Path
) -> None:
    session = granted.open_session()
    granted.end_session(session)
    stranger = Runtime(other_workspace, tmp_path / "stranger")

    assert session["session_id"] not in stranger.ended()
    assert stranger.confirm(session["session_id"]).status_code == 404
    assert granted.control_plane.made("GET", f"/v1/sessions/{session['session_id']}")["erased_at"] is None


def test_a_runtime_that_died_half_way_catches_up(granted: Workspace, tmp_path: Path) -> None:
    runtime = Runtime(granted, tmp_path / "runtime")
    untouched, forgotten = granted.open_session(), granted.open_session()
    for session in (untouched, forgotten):
        runtime.keep(session)
        granted.end_session(session)
    runtime.forget(forgotten["session_id"])  # and here it died, before it could say so

    runtime.catch_up()

    assert list(runtime.folder.iterdir()) == []
    assert not {untouched["session_id"], forgotten["session_id"]} & set(runtime.ended())


def test_the_list_of_what_is_over_comes_in_pages(granted: Workspace) -> None:
    ids = []
    for _ in range(5):
        session = granted.open_session()
        granted.end_session(session)
        ids.append(session["session_id"])
    seen: list[str] = []
    while True:
        query = {"limit": 2} | ({"after": seen[-1]} if seen else {})
        login = (granted.runtime, granted.runtime_secret)
        page = granted.control_plane.http.get("/v1/sessions/ended", params=query, auth=login).json()["items"]
        if not page:
            break
        seen += [item["session_id"] for item in page]

    assert seen == sorted(ids)


# --- killed on the way -----------------------------------------------------------------------------------------------


def dying(control_plane: ControlPlane, point: str, count: int = 1) -> tuple["subprocess.Popen[str]", str]:
    """Another process over the same database, and its URL."""
    command = [sys.executable, "-m", "tests.control_plane.dying", str(control_plane.folder), point, str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.long
@pytest.mark.parametrize(("act", "point"), STEPS)
def test_a_control_plane_that_is_killed_at_any_step_leaves_all_or_nothing_and_it_is_done_again(
    own_control_plane: OwnControlPlane, tmp_path: Path, act: str, point: str
) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    workspace.add_credential()
    workspace.grant()
    session = workspace.open_session()
    issued = workspace.exchange(session)
    runtime = Runtime(workspace, tmp_path / "runtime")
    kept = runtime.keep(session)
    if act == "erase":
        workspace.end_session(session)
    process, url = dying(workspace.control_plane, point)

    path = f"/v1/sessions/{session['session_id']}"
    administrator = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
        asked = (
            http.build_request("DELETE", path, headers=administrator)
            if act == "end"
            else http.build_request("POST", f"{path}/erased")
        )
        with pytest.raises(httpx.HTTPError):
            http.send(asked, auth=runtime.login if act == "erase" else None)

    assert process.wait(20) == DIED
    with control_plane_in(workspace.control_plane.folder) as after:
        workspace.control_plane = after
        shown = after.made("GET", path)
        if act == "end":
            assert is_over(workspace, session, issued) == (shown["ended_at"] is not None)
            ends = [event for event in workspace.audit() if event["action"] == "session.end"]
            assert len(ends) == (1 if shown["ended_at"] is not None else 0)
        workspace.end_session(session)
        runtime.catch_up()
        assert is_over(workspace, session, issued)
        assert not kept.exists()
        assert after.look("SELECT * FROM tokens WHERE session = ?", session["session_id"]) == []
        actions = [event["action"] for event in workspace.audit() if event.get("session") == session["session_id"]]
        assert actions.count("session.end") == actions.count("session.erase") == 1
