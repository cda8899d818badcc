"""The OpenAPI document against the server: what it promises is what comes (schemathesis)."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.control_plane.serving import ADMIN_TOKEN, ControlPlane, control_plane_in
from tests.control_plane.workspace import Workspace

# What a field means is more than its schema says (a tenant must exist, a host must have a canonical form), and JSON
# Schema counts 5.0 among the integers: these two checks would blame the server for being right.
EXCLUDED = [positive_data_acceptance, negative_data_rejection]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One for requests that delete whatever they find."""
    with control_plane_in(tmp_path_factory.mktemp("fuzzed")) as plane:
        workspace = Workspace(plane, "0")
        workspace.add_credential("0")
        workspace.grant("0", subject="0")
        yield plane


def ask_everything(plane: ControlPlane, *, examples: int) -> int:
    """Asks every operation with generated requests and checks each answer; how many operations there are."""
    schema = schemathesis.openapi.from_url(f"{plane.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    for operation in operations:

        @settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            case.call_and_validate(headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}, excluded_checks=EXCLUDED)

        ask()
    return len(operations)


def test_every_answer_is_one_that_the_document_describes(fuzzed: ControlPlane) -> None:
    assert ask_everything(fuzzed, examples=3) > 30


@pytest.mark.long
def test_every_answer_is_one_that_the_document_describes_whatever_is_asked(fuzzed: ControlPlane) -> None:
    assert ask_everything(fuzzed, examples=50) > 30


def test_every_route_is_described_once_with_its_refusals(control_plane: ControlPlane) -> None:
    document = control_plane.http.get("/openapi.json").json()

    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path.startswith("/v1/"):
                assert {"401", "422"} <= set(operation["responses"]), path
            if path.startswith("/oauth/"):
                assert {"400", "401"} <= set(operation["responses"]), path


def test_no_answer_in_the_document_has_a_field_for_a_secret_but_a_new_clients(control_plane: ControlPlane) -> None:
    document = control_plane.http.get("/openapi.json").json()

    schemas: dict[str, Any] = document["components"]["schemas"]
    outgoing = {name: schema for name, schema in schemas.items() if name.endswith("Out")}
    with_secret = {
        name for name, schema in outgoing.items() for field in schema.get("properties", {}) if "secret" in field
    }
    assert with_secret == {"NewClientOut"}
