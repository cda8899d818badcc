"""A probe is declared, changed and taken away with its credential; what sends the secret elsewhere needs it again."""

import pytest

from tests.control_plane.workspace import SECRET, Json, Workspace

ME, MODELS = {"method": "GET", "path": "/v1/me"}, {"method": "GET", "path": "/v1/models"}


def test_a_probe_is_declared_with_a_new_credential_and_tries_its_next_secret(workspace: Workspace) -> None:
    workspace.add_credential(probe=ME)

    declared = workspace.credential()
    rotating = workspace.rotate("a-new-key-0123456789", probe=True)

    assert (declared["probe"], declared["settings"]) == (ME, {})
    # It was tried, and nobody knows: no proxy runs here.
    assert (rotating["rotation"]["phase"], rotating["rotation"]["probe"]) == ("cancelled", "unknown")


@pytest.mark.guards("control_plane/core/kinds.py", 'case "probe", dict(), None:', 'case "probe", _, _:')
@pytest.mark.parametrize("before", [None, MODELS])
def test_another_probe_needs_the_secret_again(workspace: Workspace, before: Json | None) -> None:
    workspace.add_credential(probe=before)

    without = workspace.patch_credential({"probe": ME})
    same = workspace.patch_credential({"probe": before} if before else {"credential_required": False})
    given = workspace.patch_credential({"probe": ME, "secret": SECRET})

    assert (without.status_code, without.json()["code"]) == (422, "secret_required")
    assert "probe" in without.json()["detail"]
    assert same.status_code == 200
    assert (given.status_code, given.json()["probe"], given.json()["current_version"]) == (200, ME, 2)


def test_a_probe_is_taken_away_without_the_secret_and_placeholders_stay(workspace: Workspace) -> None:
    workspace.add_credential(probe=ME)
    workspace.grant()
    issued = workspace.exchange()

    taken = workspace.patch_credential({"probe": None})
    rotated = workspace.control_plane.admin(
        "POST", workspace.path("credentials/example/rotate"), {"secret": "a-new-key-0123456789", "probe": True}
    )

    assert (taken.status_code, taken.json()["probe"]) == (200, None)
    assert workspace.resolve(issued)["secret"] == SECRET
    assert (rotated.status_code, rotated.json()["code"]) == (422, "invalid_field")


def test_a_change_of_something_else_leaves_the_probe(workspace: Workspace) -> None:
    workspace.add_credential(probe=ME)

    changed = workspace.patch_credential({"credential_required": True, "settings": {}})

    assert (changed.status_code, changed.json()["probe"]) == (200, ME)


WRONG: dict[str, tuple[Json, str]] = {
    "a method that changes things": ({"probe": {"method": "DELETE", "path": "/"}}, "probe"),
    "a query": ({"probe": {"path": "/v1?all"}}, "probe"),
    "a field of its own": ({"probe": {"path": "/", "host": "elsewhere.example"}}, "probe"),
    "no request": ({"probe": True}, "probe"),
    "outside of its destination": ({"probe": ME, "destinations": [{"url": "https://api.example.com/v2"}]}, "probe"),
    "as a setting": ({"settings": {"probe": ME}}, "settings.probe"),
}


@pytest.mark.parametrize(("fields", "field"), WRONG.values(), ids=WRONG)
def test_what_is_no_probe_is_refused_by_the_fields_name(workspace: Workspace, fields: Json, field: str) -> None:
    new = {"name": "new", "destinations": [{"url": "https://api.example.com"}], "secret": SECRET}
    workspace.add_credential()

    answers = [workspace.post_credential(new | fields), workspace.patch_credential(fields | {"secret": SECRET})]

    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field"), answer.text
        assert field in answer.json()["detail"]
        assert SECRET not in answer.text
