"""Credentials on the administrator's API: what goes in, what comes out, what makes them wider."""

from typing import Any

import pytest

from tests.control_plane.workspace import HOST, SECRET, Json, Workspace

BEARER = {"kind": "header", "name": "authorization", "format": "Bearer {secret}"}
API_KEY = {"kind": "header", "name": "x-api-key", "format": "{secret}"}


def test_a_credential_needs_no_more_than_a_name_a_destination_and_a_secret(workspace: Workspace) -> None:
    made = workspace.add_credential("my-api")

    traits = {"allow_private": False, "websocket": False, "ranges": False, "unsearchable": False, "strict": False}
    assert made["destinations"] == [{"url": f"https://{HOST}", "methods": None, **traits, "ca_pem": None}]
    assert made["placements"] == [BEARER]
    assert made["variables"] == ["MY_API_API_KEY"]
    assert [(version["version"], version["state"]) for version in made["versions"]] == [(1, "active")]


def test_a_preset_fills_in_what_was_left_out(workspace: Workspace) -> None:
    made = workspace.control_plane.made(
        "POST", workspace.path("credentials"), {"name": "anthropic", "preset": "anthropic", "secret": SECRET}
    )

    assert [destination["url"] for destination in made["destinations"]] == ["https://api.anthropic.com"]
    assert made["placements"][0] == API_KEY
    assert made["variables"] == ["ANTHROPIC_API_KEY"]


def test_a_preset_without_a_host_needs_one_named(workspace: Workspace) -> None:
    response = workspace.post_credential({"name": "azure", "preset": "azure-openai", "secret": SECRET})

    assert response.status_code == 422
    assert response.json()["detail"].startswith("destinations: ")


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_providers_id_is_only_for_a_credential_of_that_preset(workspace: Workspace, name: str) -> None:
    body = {"name": name, "destinations": [{"url": f"https://{HOST}"}], "secret": SECRET}

    assert workspace.post_credential(body).status_code == 422
    assert workspace.post_credential(body | {"preset": "github"}).status_code == 422
    assert workspace.post_credential(body | {"preset": name}).status_code == 201


def test_no_answer_ever_holds_the_secret(workspace: Workspace) -> None:
    made = workspace.add_credential()
    changed = workspace.patch_credential({"secret": SECRET, "destinations": [{"url": "https://other.example"}]})
    rotated = workspace.rotate(SECRET)
    listed = workspace.control_plane.made("GET", workspace.path("credentials"))

    everything = str([made, changed.text, rotated, listed, workspace.credential(), workspace.audit()])
    assert SECRET not in everything
    assert "envelope" not in everything


def test_two_credentials_of_one_tenant_never_share_a_name(workspace: Workspace, other_workspace: Workspace) -> None:
    workspace.add_credential("twice")
    other_workspace.add_credential("twice")

    again = workspace.post_credential({"name": "twice", "destinations": [{"url": f"https://{HOST}"}], "secret": SECRET})

    assert again.status_code == 422
    assert again.json()["code"] == "invalid_field"


BAD_BODIES: dict[str, tuple[Json, str]] = {
    "unknown field": ({"secert": "x"}, "secert"),
    "upper-case name": ({"name": "Example"}, "name"),
    "name that ends in a hyphen": ({"name": "a-"}, "name"),
    "no destination": ({"destinations": []}, "destinations"),
    "destination without a scheme": ({"destinations": [{"url": "api.example.com"}]}, "destinations.0"),
    "destination with a user": ({"destinations": [{"url": "https://u@api.example.com"}]}, "destinations.0"),
    "destination with a query": ({"destinations": [{"url": "https://api.example.com/?a"}]}, "destinations.0"),
    "destination by a number": ({"destinations": [{"url": "https://2130706433"}]}, "destinations.0"),
    "destination that climbs": ({"destinations": [{"url": "https://api.example.com/a/../b"}]}, "destinations.0"),
    "empty methods": ({"destinations": [{"url": "https://a.example", "methods": []}]}, "destinations.0"),
    "methods in lower case": ({"destinations": [{"url": "https://a.example", "methods": ["get"]}]}, "destinations.0"),
    "allow_private that is no boolean": (
        {"destinations": [{"url": "https://a.example", "allow_private": "yes"}]},
        "destinations.0",
    ),
    "unknown field of a destination": ({"destinations": [{"url": "https://a.example", "x": 1}]}, "destinations.0"),
    "the same destination twice": ({"destinations": [{"url": "https://a.example"}] * 2}, "destinations"),
    "no placement": ({"placements": []}, "placements"),
    "unknown placement": ({"placements": [{"kind": "cookie"}]}, "placements.0"),
    "placement in a routing header": ({"placements": [{"kind": "header", "name": "host"}]}, "placements.0"),
    "placement in a logged header": ({"placements": [{"kind": "header", "name": "user-agent"}]}, "placements.0"),
    "placement without the secret": (
        {"placements": [{"kind": "header", "name": "x-key", "format": "token"}]},
        "placements.0",
    ),
    "unknown preset": ({"preset": "nobody"}, "preset"),
    "variable with a space": ({"variables": ["A B"]}, "variables.0"),
    "missing secret": ({"secret": None}, "secret"),
    "secret that is a number": ({"secret": 7}, "secret"),
}


@pytest.mark.parametrize(("fields", "field"), BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_bad_field_is_named_and_nothing_is_stored(workspace: Workspace, fields: Json, field: str) -> None:
    body = {"name": "example", "destinations": [{"url": f"https://{HOST}"}], "secret": SECRET} | fields

    response = workspace.post_credential(body)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")
    assert response.json()["detail"].startswith(field)
    assert workspace.control_plane.made("GET", workspace.path("credentials"))["items"] == []


BAD_SECRETS = {
    "inner line break": "key\r\nX-Evil: 1",
    "lone carriage return": "key\rmore",
    "NUL": "key\0more",
    "tab": "key\tmore",
    "leading space": " key",
    "trailing space": "key ",
    "empty": "",
    "only a line end": "\n",
    "too long": "k" * 16_385,
    "delete": "key\x7f",
}


@pytest.mark.guards("control_plane/api/messages.py", "else Secret.submitted(value)", "else Secret(value)")
@pytest.mark.parametrize("secret", BAD_SECRETS.values(), ids=BAD_SECRETS.keys())
def test_a_secret_that_cannot_be_carried_is_refused_and_not_quoted(workspace: Workspace, secret: str) -> None:
    response = workspace.post_credential(
        {"name": "example", "destinations": [{"url": f"https://{HOST}"}], "secret": secret}
    )

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")
    assert response.json()["detail"].startswith("secret: ")
    assert len(secret) < 3 or secret.strip() not in response.text


@pytest.mark.guards(
    "control_plane/credentials.py", "if not all(fits(secret.reveal(), placement) for", "if not any(True for"
)
def test_a_secret_outside_ascii_is_refused_for_a_header_and_taken_for_a_query(workspace: Workspace) -> None:
    body = {"name": "example", "destinations": [{"url": f"https://{HOST}"}], "secret": "schlüssel-key"}

    in_a_header = workspace.post_credential(body)
    in_a_query = workspace.post_credential(body | {"placements": [{"kind": "query", "parameter": "key"}]})

    assert (in_a_header.status_code, in_a_query.status_code) == (422, 201)
    assert "schlüssel" not in in_a_header.text


def test_one_trailing_line_end_of_a_secret_is_dropped(granted: Workspace) -> None:
    granted.rotate("key-from-a-file\r\n")

    assert granted.resolve(granted.exchange())["secret"] == "key-from-a-file"


def test_a_secret_of_sixteen_kilobytes_is_carried_whole(granted: Workspace) -> None:
    granted.rotate("k" * 16_384)

    assert granted.resolve(granted.exchange())["secret"] == "k" * 16_384


# --- wider needs the secret again ------------------------------------------------------------------------------------

NARROW: Json = {
    "destinations": [{"url": f"https://{HOST}/v1", "methods": ["GET", "POST"]}],
    "placements": [BEARER],
}

WIDER: dict[str, Json] = {
    "another host": {"destinations": [{"url": "https://evil.example/v1", "methods": ["GET"]}]},
    "one more host": {"destinations": [NARROW["destinations"][0], {"url": "https://evil.example"}]},
    "another port": {"destinations": [{"url": f"https://{HOST}:8443/v1", "methods": ["GET"]}]},
    "http instead of https": {"destinations": [{"url": f"http://{HOST}:443/v1", "methods": ["GET"]}]},
    "a shorter path prefix": {"destinations": [{"url": f"https://{HOST}", "methods": ["GET"]}]},
    "a path prefix beside it": {"destinations": [{"url": f"https://{HOST}/v10", "methods": ["GET"]}]},
    "one more method": {"destinations": [{"url": f"https://{HOST}/v1", "methods": ["GET", "POST", "PUT"]}]},
    "any method": {"destinations": [{"url": f"https://{HOST}/v1"}]},
    "private addresses": {"destinations": [{"url": f"https://{HOST}/v1", "methods": ["GET"], "allow_private": True}]},
    "one more placement": {"placements": [BEARER, API_KEY]},
    "another header": {"placements": [API_KEY]},
    "another format": {"placements": [{"kind": "header", "name": "authorization", "format": "token {secret}"}]},
    "a query parameter": {"placements": [{"kind": "query", "parameter": "key"}]},
    "Basic": {"placements": [{"kind": "basic", "username": "x"}]},
}


@pytest.mark.guards("control_plane/credentials.py", "if widened and change.secret is None:", "if False and widened:")
@pytest.mark.guards("control_plane/core/reach.py", "new.endpoint == old.endpoint", "True")
@pytest.mark.guards("control_plane/core/reach.py", "_prefix_is_within(new.path_prefix, old.path_prefix)", "True")
@pytest.mark.guards("control_plane/core/reach.py", "_methods_are_within(new.methods, old.methods)", "True")
@pytest.mark.guards("control_plane/core/reach.py", "(old.allow_private or not new.allow_private)", "True")
@pytest.mark.guards("control_plane/core/reach.py", "if not set(new.placements) <= set(old.placements):", "if False:")
@pytest.mark.parametrize("change", WIDER.values(), ids=WIDER.keys())
def test_what_sends_the_secret_further_needs_the_secret_again(workspace: Workspace, change: Json) -> None:
    workspace.add_credential(**NARROW)
    before = workspace.credential()

    without = workspace.patch_credential(change)
    unchanged = workspace.credential()
    with_it = workspace.patch_credential(change | {"secret": SECRET})

    assert (without.status_code, without.json()["code"]) == (422, "secret_required")
    assert next(iter(change)) in without.json()["detail"]
    assert unchanged == before
    assert with_it.status_code == 200
    assert with_it.json()["current_version"] == 2


NARROWER: dict[str, Json] = {
    "a longer path prefix": {"destinations": [{"url": f"https://{HOST}/v1/models", "methods": ["GET", "POST"]}]},
    "fewer methods": {"destinations": [{"url": f"https://{HOST}/v1", "methods": ["GET"]}]},
    "the variables, which send nothing": {"variables": ["OTHER_KEY"]},
    "credential_required": {"credential_required": True},
}


@pytest.mark.parametrize("change", NARROWER.values(), ids=NARROWER.keys())
def test_narrowing_needs_no_secret_and_the_secret_still_opens(workspace: Workspace, change: Json) -> None:
    workspace.add_credential(**NARROW)
    workspace.grant()

    changed = workspace.patch_credential(change)

    assert changed.status_code == 200
    assert changed.json()["current_version"] == (2 if "destinations" in change else 1)
    assert workspace.resolve(workspace.exchange())["secret"] == SECRET


def test_narrowed_it_is_wide_no_more(workspace: Workspace) -> None:
    workspace.add_credential(**NARROW)
    workspace.patch_credential({"destinations": [{"url": f"https://{HOST}/v1/models", "methods": ["GET"]}]})

    back = workspace.patch_credential({"destinations": NARROW["destinations"]})

    assert back.json()["code"] == "secret_required"


def test_an_unknown_field_of_a_change_is_refused(workspace: Workspace) -> None:
    workspace.add_credential()

    response = workspace.patch_credential({"name": "other"})

    assert (response.status_code, response.json()["detail"]) == (422, "name: there is no such field")


def test_a_destination_that_is_no_object_is_refused_in_words_of_the_api(workspace: Workspace) -> None:
    workspace.add_credential()

    response = workspace.patch_credential({"destinations": ["https://api.example.com"]})

    assert (response.status_code, response.json()["detail"]) == (422, "destinations.0: an object is expected")


def test_an_empty_list_is_never_everything(workspace: Workspace) -> None:
    workspace.add_credential()

    for field in ("destinations", "placements"):
        assert workspace.patch_credential({field: [], "secret": SECRET}).status_code == 422


# --- versions --------------------------------------------------------------------------------------------------------


def test_a_rotation_makes_a_new_version_and_the_placeholder_lives_on(granted: Workspace) -> None:
    issued = granted.exchange()

    rotated = granted.rotate("a-new-key")

    assert [(version["version"], version["state"]) for version in rotated["versions"]] == [
        (1, "retired"),
        (2, "active"),
    ]
    answer = granted.resolve(issued)
    assert (answer["secret"], answer["binding"]["version"]) == ("a-new-key", 2)


def test_a_compromised_version_is_revoked_not_retired(granted: Workspace) -> None:
    rotated = granted.rotate("a-new-key", compromised=True)

    assert [version["state"] for version in rotated["versions"]] == ["revoked", "active"]


@pytest.mark.guards(
    "control_plane/versions.py",
    "return replace(version, state=state, envelope=None, kek_id=None)",
    "return replace(version, state=state)",
)
def test_the_envelope_of_a_version_that_is_over_is_gone(granted: Workspace) -> None:
    made = granted.credential()
    granted.rotate("a-new-key")

    envelopes = granted.control_plane.look(
        "SELECT version, envelope IS NULL FROM credential_versions WHERE credential_id = ? ORDER BY version", made["id"]
    )

    assert envelopes == [(1, 1), (2, 0)]


@pytest.mark.guards(
    "control_plane/credentials.py",
    "            if is_bound_anew:",
    "            if False:",
)
@pytest.mark.parametrize(
    "change",
    [
        {"destinations": [{"url": f"https://{HOST}/v1"}]},
        {"destinations": [{"url": f"https://{HOST}"}, {"url": "https://more.example"}], "secret": SECRET},
    ],
    ids=["narrower", "wider"],
)
def test_a_changed_destination_revokes_the_placeholders(granted: Workspace, change: Json) -> None:
    issued = granted.exchange()

    granted.patch_credential(change)

    assert granted.resolve(issued)["code"] == "revoked_placeholder"
    assert granted.resolve(granted.exchange())["secret"] == SECRET


def test_a_change_that_sends_nothing_elsewhere_revokes_nothing(granted: Workspace) -> None:
    issued = granted.exchange()

    granted.patch_credential({"variables": ["OTHER_KEY"], "credential_required": True})

    assert granted.resolve(issued)["secret"] == SECRET


def test_a_deleted_credential_is_gone_with_its_envelopes_grants_and_placeholders(granted: Workspace) -> None:
    issued, made = granted.exchange(), granted.credential()

    response = granted.control_plane.admin("DELETE", granted.path("credentials/example"))

    assert response.status_code == 204
    assert granted.control_plane.admin("GET", granted.path("credentials/example")).status_code == 404
    assert granted.control_plane.made("GET", granted.path("grants"))["items"] == []
    assert granted.resolve(issued)["code"] == "revoked_placeholder"
    left = granted.control_plane.look("SELECT * FROM credential_versions WHERE credential_id = ?", made["id"])
    assert left == []


def test_a_credential_of_the_same_name_made_again_is_another_one(granted: Workspace) -> None:
    issued = granted.exchange()
    granted.control_plane.made("DELETE", granted.path("credentials/example"))

    granted.add_credential(secret="another-key")
    granted.grant()

    assert granted.resolve(issued)["code"] == "revoked_placeholder"


@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE"])
def test_a_credential_of_another_tenant_is_not_found(
    workspace: Workspace, other_workspace: Workspace, method: str
) -> None:
    workspace.add_credential("mine")

    body: Any = {} if method == "PATCH" else None
    response = other_workspace.control_plane.admin(method, other_workspace.path("credentials/mine"), body)

    assert (response.status_code, response.json()["code"]) == (404, "credential_not_found")


def test_a_credential_for_a_tenant_that_is_not_there_is_refused(workspace: Workspace) -> None:
    body = {"name": "example", "destinations": [{"url": f"https://{HOST}"}], "secret": SECRET}

    response = workspace.control_plane.admin("POST", "/v1/tenants/nobody/credentials", body)

    assert (response.status_code, response.json()["code"]) == (404, "not_found")
