"""The OpenAPI document against the server: what it promises is what comes (schemathesis)."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from control_plane.core.policy import Role
from tests.control_plane.issuing import ADMINISTRATOR, Provider, SigningKey, bearer
from tests.control_plane.serving import ControlPlane, control_plane_in
from tests.control_plane.workspace import Json, Workspace

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


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One for everybody but the platform's administrator."""
    with control_plane_in(tmp_path_factory.mktemp("looked-at")) as plane:
        Workspace(plane, "0").add_credential("0")
        yield plane


class Asked:
    """What a run saw."""

    def __init__(self) -> None:
        self.operations = 0
        self.answers: Counter[int] = Counter()

    @property
    def share_of_2xx(self) -> float:
        good = sum(count for status, count in self.answers.items() if 200 <= status < 300)
        return good / max(1, self.answers.total())


def ask_everything(plane: ControlPlane, *, examples: int, headers: Mapping[str, str] = ADMINISTRATOR) -> Asked:
    """Asks every operation with generated requests and checks each answer."""
    asked = Asked()
    schema = schemathesis.openapi.from_url(f"{plane.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    for operation in operations:

        @settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            answer = case.call_and_validate(headers=dict(headers), excluded_checks=EXCLUDED)
            asked.answers[answer.status_code] += 1

        ask()
        asked.operations += 1
    return asked


def as_role(plane: ControlPlane, role: str) -> Mapping[str, str]:
    """Somebody with this role, in the tenant `0` where it is a tenant's."""
    provider = Provider("staff")
    if plane.admin("GET", "/v1/issuers/staff").status_code != 200:
        roles: dict[str, Json] = {each.value: {"role": each.value} for each in Role}
        roles["foreign"] = {"role": "tenant_admin", "tenant": "somewhere-else"}
        claims = {"subject": {}, "tenant": {"fixed": "0"}, "admin": {"claim": "groups", "map": roles}}
        provider.key = _STAFF_KEY
        provider.register(plane, tenant="", uses=["admin"], claims=claims, max_lifetime_seconds=86_400)
    provider.key = _STAFF_KEY
    return bearer(provider.token("carol", groups=[role], exp=int(time.time()) + 3_600))


_STAFF_KEY = SigningKey("staff-1")


def test_every_answer_is_one_that_the_document_describes(fuzzed: ControlPlane) -> None:
    asked = ask_everything(fuzzed, examples=3)

    assert asked.operations > 30
    print(f"\nplatform_admin: {asked.share_of_2xx:.0%} of {asked.answers.total()} answers were 2xx")


@pytest.mark.parametrize("role", [*(role.value for role in Role if role is not Role.PLATFORM_ADMIN), "foreign"])
def test_so_is_every_answer_to_another_role(
    role: str, looked_at: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    plane = looked_at
    before = plane.look("SELECT count(*) FROM credentials")

    asked = ask_everything(plane, examples=1, headers=as_role(plane, role))

    with capsys.disabled():
        print(f"\n{role}: {asked.share_of_2xx:.0%} of {asked.answers.total()} answers were 2xx")
    assert asked.operations > 30
    assert not any(status >= 500 for status in asked.answers)
    if role != "tenant_admin":
        assert plane.look("SELECT count(*) FROM credentials") == before


@pytest.mark.long
def test_every_answer_is_one_that_the_document_describes_whatever_is_asked(fuzzed: ControlPlane) -> None:
    assert ask_everything(fuzzed, examples=50).operations > 30


@pytest.mark.long
@pytest.mark.parametrize("role", ["tenant_admin", "tenant_auditor", "foreign"])
def test_so_is_every_answer_to_another_role_whatever_is_asked(role: str, fuzzed: ControlPlane) -> None:
    assert ask_everything(fuzzed, examples=30, headers=as_role(fuzzed, role)).operations > 30


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


def test_no_answer_in_the_document_has_a_field_for_a_secret_but_what_is_shown_once(control_plane: ControlPlane) -> None:
    document = control_plane.http.get("/openapi.json").json()

    schemas: dict[str, Any] = document["components"]["schemas"]
    outgoing = {name: schema for name, schema in schemas.items() if name.endswith("Out")}
    with_secret = {
        name for name, schema in outgoing.items() for field in schema.get("properties", {}) if field.endswith("secret")
    }
    assert with_secret == {"NewClientOut", "NewAlarmHookOut"}
