"""How fast a subject may be issued placeholders, where an operator says so."""

from typing import Any

import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.workspace import JWT, Json, Workspace


def asked(workspace: Workspace, session: Json, **form: Any) -> Any:
    return workspace.token(subject_token=session["session_token"], subject_token_type=JWT, audience="example", **form)


@pytest.mark.guards("control_plane/pacing.py", "if not taken.allowed:", "if False:")
def test_beyond_it_exchanges_are_told_when_to_come_again(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(exchanges_per_minute=3), "acme")
    workspace.add_credential()
    workspace.grant()
    workspace.grant(subject="bob")
    alice, bob = workspace.open_session("alice"), workspace.open_session("bob")

    answers = [asked(workspace, alice) for _ in range(5)]
    others = asked(workspace, bob)

    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert (answers[-1].json()["error"], answers[-1].json()["code"]) == ("slow_down", "rate_limited")
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 20
    assert others.status_code == 200
    assert [event.get("code") for event in workspace.audit()].count("rate_limited") == 2


def test_without_a_limit_nobody_is_held_up(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    workspace.add_credential()
    workspace.grant()
    session = workspace.open_session()

    assert {asked(workspace, session).status_code for _ in range(20)} == {200}
