"""Fields of a wrong type, of no calendar, of an impossible name: an answer that says what is expected, never a 500."""

import re
from typing import Any

import pytest

from tests.control_plane.serving import ADMIN_TOKEN
from tests.control_plane.workspace import SECRET, Json, Workspace

NO_TEXTS: list[Any] = [1, 1.5, True, [], ["api.example.com"], {}, {"a": 1}]
NO_LISTS: list[Any] = [1, True, "x", {}, {"a": 1}]

ALLOW: Json = {"host": "mirror.test"}
GRANT: Json = {"credential": "example", "subject": "bob"}
CREDENTIAL: Json = {"name": "second", "destinations": [{"url": "https://api.example.com"}], "secret": SECRET}
CLIENT: Json = {"id": "worker", "kind": "runtime"}
PLACEHOLDER: Json = {"subject": "alice", "audience": "example", "ttl_seconds": 60}
SESSION: Json = {"runtime": "worker", "subject": "alice", "tenant": "local"}

ROUTES: dict[str, tuple[str, Json]] = {
    "allow-rules": ("allow-rules", ALLOW),
    "grants": ("grants", GRANT),
    "credentials": ("credentials", CREDENTIAL),
    "placeholders": ("placeholders", PLACEHOLDER),
    "clients": ("/v1/clients", CLIENT),
    "sessions": ("/v1/sessions", SESSION),
}

TEXTS = [
    *(("allow-rules", field) for field in ("host", "session")),
    *(("grants", field) for field in ("credential", "subject", "role", "client")),
    *(("credentials", field) for field in ("name", "preset", "secret")),
    *(("clients", field) for field in ("id", "kind", "tenant")),
    *(("placeholders", field) for field in ("subject", "audience", "client")),
    *(("sessions", field) for field in ("runtime", "subject", "tenant")),
]
LISTS = [
    ("allow-rules", "methods"),
    *(("grants", field) for field in ("methods", "path_prefixes")),
    *(("credentials", field) for field in ("destinations", "placements", "variables")),
    ("clients", "scopes"),
    ("sessions", "roles"),
]
NUMBERS = [("allow-rules", "port"), ("placeholders", "ttl_seconds"), ("grants", "until")]
FLAGS = [("allow-rules", "allow_private"), ("credentials", "credential_required"), ("placeholders", "session")]


def refused_field(workspace: Workspace, route: str, change: Json) -> str:
    """What the answer says of it, which is a 422 that begins with the field."""
    path, body = ROUTES[route]
    (field,) = change
    response = workspace.control_plane.admin(
        "POST", path if path.startswith("/") else workspace.path(path), body | change
    )
    assert (response.status_code, response.json()["code"]) == (422, "invalid_field"), (change, response.text)
    place, _, detail = str(response.json()["detail"]).partition(": ")
    assert place.split(".")[0] == field
    return detail


@pytest.mark.parametrize(("route", "field"), TEXTS)
def test_what_is_no_text_is_an_invalid_field(granted: Workspace, route: str, field: str) -> None:
    for value in NO_TEXTS:
        refused_field(granted, route, {field: value})


def test_a_host_is_not_nothing(workspace: Workspace) -> None:
    refused_field(workspace, "allow-rules", {"host": None})


@pytest.mark.parametrize(("route", "field"), LISTS)
def test_what_is_no_list_or_holds_no_texts_is_an_invalid_field(granted: Workspace, route: str, field: str) -> None:
    for value in [*NO_LISTS, *([item] for item in (*NO_TEXTS, None))]:
        refused_field(granted, route, {field: value})


@pytest.mark.parametrize(("route", "field"), NUMBERS)
def test_what_is_no_number_is_an_invalid_field(granted: Workspace, route: str, field: str) -> None:
    for value in ["1", True, [], {}, -1, 1e300, 10**30]:
        refused_field(granted, route, {field: value})


@pytest.mark.parametrize(("route", "field"), FLAGS)
def test_what_is_neither_true_nor_false_is_an_invalid_field(granted: Workspace, route: str, field: str) -> None:
    for value in ["true", 1, 0, [], {}]:
        refused_field(granted, route, {field: value})


# --- moments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("until", ["NaN", "Infinity", "-Infinity", "1e300", "253402300800", "-1"])
def test_a_grant_until_a_moment_of_no_calendar_is_refused(granted: Workspace, until: str) -> None:
    response = granted.control_plane.http.post(
        granted.path("grants"),
        content=f'{{"credential": "example", "subject": "bob", "until": {until}}}',
        headers={
            "Authorization": f"Bearer {ADMIN_TOKEN}",
            "Content-Type": "application/json",
        },
    )

    assert response.status_code in (400, 422)


@pytest.mark.parametrize("until", [1e300, float("inf"), -1e300])
def test_a_grant_stored_until_no_moment_stops_nobody_listing(granted: Workspace, until: float) -> None:
    granted.control_plane.edit("UPDATE grants SET until = ? WHERE tenant = ?", until, granted.tenant)

    (grant,) = granted.control_plane.made("GET", granted.path("grants"))["items"]

    assert 0 <= grant["until"] <= 253_402_300_799


# --- names -----------------------------------------------------------------------------------------------------------


IMPOSSIBLE_NAMES = ["", "x" * 300, "UPPER", "-dash", "with space", "ünïcode"]


@pytest.mark.parametrize(("route", "field"), [("credentials", "name"), ("clients", "id"), ("sessions", "runtime")])
@pytest.mark.parametrize("name", IMPOSSIBLE_NAMES)
def test_a_name_that_cannot_be_is_answered_in_words(granted: Workspace, route: str, field: str, name: str) -> None:
    detail = refused_field(granted, route, {field: name})

    assert "lower-case letters, digits" in detail
    assert "^" not in detail


def test_a_subject_that_cannot_be_is_answered_in_words(granted: Workspace) -> None:
    for subject in ("", "x" * 256, "a\nb"):
        assert refused_field(granted, "grants", {"subject": subject}) == (
            "1 to 255 characters without control characters"
        )


def test_a_tenant_in_a_path_that_cannot_be_is_answered_in_words(granted: Workspace) -> None:
    response = granted.control_plane.admin("PUT", "/v1/tenants/UPPER")

    assert response.status_code == 422
    assert response.json()["detail"].startswith("tenant: 1 to 64 lower-case letters")


# --- every field of every body ----------------------------------------------------------------------------------------


def bodies(workspace: Workspace) -> list[tuple[str, str, dict[str, Json]]]:
    """Method, path and the body's properties, of every route that takes JSON."""
    document = workspace.control_plane.http.get("/openapi.json").json()
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            schema = document["components"]["schemas"].get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
            if schema.get("properties") and not path.startswith("/internal"):
                found.append((method.upper(), path, schema["properties"]))
    return found


def of_no_type(schema: Json) -> Any:
    """What no field takes: an object where a plain value or a list belongs, and a text where an object may stand."""
    kinds = {each.get("type", "object") for each in [*schema.get("anyOf", ()), *schema.get("oneOf", ())] or [schema]}
    return -0.5 if "object" in kinds or "$ref" in schema else {"a": {"b": 1}}


@pytest.mark.guards("control_plane/api/errors.py", "    return replace(refusal, hint=hint)", "    return refusal")
def test_whatever_field_is_wrong_on_whatever_route_the_answer_names_it_and_says_what_to_do(
    workspace: Workspace,
) -> None:
    asked = 0
    for method, path, properties in bodies(workspace):
        for field, schema in properties.items():
            own = path.replace("{tenant}", workspace.tenant).replace("{purpose}", "tag")
            concrete = re.sub(r"\{[a-z_]+\}", "nobody", own)
            answer = workspace.control_plane.admin(method, concrete, {field: of_no_type(schema)})
            told = answer.json()
            place, _, expected = str(told["detail"]).partition(": ")

            assert (answer.status_code, told["code"]) == (422, "invalid_field"), (method, path, field, told)
            assert place.split(".")[0] == field, (method, path, field, told)
            assert len(expected) > 5, (method, path, field, told)
            assert path in told["hint"], (method, path, field, told)
            assert place in told["hint"], (method, path, field, told)
            asked += 1

    assert asked > 100


def test_a_body_that_is_no_object_and_a_query_that_is_no_number_are_named_too(workspace: Workspace) -> None:
    listed = workspace.control_plane.admin("POST", workspace.path("grants"), [])
    asked = workspace.control_plane.admin("GET", "/v1/audit?limit=many")

    for answer, field in ((listed, "body"), (asked, "limit")):
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field")
        assert answer.json()["detail"].startswith(f"{field}: ")
        assert "/openapi.json" in answer.json()["hint"]
