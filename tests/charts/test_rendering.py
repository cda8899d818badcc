"""The chart lints and renders, and Kubernetes knows every field of what it renders, in every version served."""

import re
from typing import Any

import helm_python
import kubernetes_validate
import pytest

from tests.charts.rendering import CASES, CHART, COMPONENTS, case_values, of_component, render, render_text, with_values

KUBERNETES = ("1.28", "1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35")


@pytest.mark.parametrize("case", CASES)
def test_the_chart_lints(case: str) -> None:
    report = helm_python.lint(CHART, case_values(case), strict=True)

    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] >= 2] == []


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_knows_every_field(case: str, version: str) -> None:
    for manifest in render(case_values(case)):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validation_notices_an_unknown_field() -> None:
    deployment = of_component(render(case_values("sqlite")), "Deployment", "proxy")
    deployment["spec"]["template"]["spec"]["containers"][0]["enviroment"] = []

    with pytest.raises(kubernetes_validate.ValidationError, match="enviroment"):
        kubernetes_validate.validate(deployment, "1.33", strict=True)


@pytest.mark.parametrize("case", CASES)
def test_two_renders_of_the_same_values_are_equal(case: str) -> None:
    assert render_text(case_values(case)) == render_text(case_values(case))


def test_no_template_makes_anything_that_a_second_render_would_make_differently() -> None:
    unrepeatable = re.compile(r"\b(gen[A-Z]\w+|rand\w+|uuidv4|lookup|now|derivePassword|bcrypt|htpasswd|encryptAES)\b")

    found = {
        f"{file.name}: {match[0]}"
        for file in (CHART / "templates").rglob("*.*")
        for match in unrepeatable.finditer(re.sub(r"\{\{-? ?/\*.*?\*/|#.*", "", file.read_text(), flags=re.DOTALL))
    }

    assert found == set()


def test_every_component_has_the_same_files() -> None:
    names = {name: {file.name for file in (CHART / "templates" / name).iterdir()} for name in COMPONENTS}
    shared = set.intersection(*names.values())

    assert shared == {
        "deployment.yaml",
        "networkpolicy.yaml",
        "poddisruptionbudget.yaml",
        "service.yaml",
        "serviceaccount.yaml",
    }
    assert names["control-plane"] - shared == {"configmap.yaml", "persistentvolumeclaim.yaml"}
    assert names["proxy"] == names["runtime"] == shared


def test_the_program_that_a_deployment_starts_is_its_component() -> None:
    manifests = render(case_values("postgresql"))

    for component in COMPONENTS:
        deployment = of_component(manifests, "Deployment", component)
        assert deployment["spec"]["template"]["spec"]["containers"][0]["args"] == ["serve", component]


def test_every_service_finds_its_pods_and_their_ports() -> None:
    manifests = render(case_values("sqlite"))

    for component in COMPONENTS:
        service = of_component(manifests, "Service", component)
        template = of_component(manifests, "Deployment", component)["spec"]["template"]
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_sqlite_is_never_served_by_two_processes() -> None:
    manifests = render(case_values("sqlite"))

    deployment = of_component(manifests, "Deployment", "control-plane")

    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    with pytest.raises(helm_python.HelmRenderError, match="SQLite serves one replica"):
        render(with_values({"controlPlane": {"replicas": 2}}))


def test_a_large_number_among_the_settings_stays_a_number() -> None:
    deployment = of_component(render(case_values("postgresql")), "Deployment", "proxy")

    variables = {
        entry["name"]: entry["value"] for entry in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    }

    assert variables["COATCHECK_PROXY_AUDIT_SPOOL_EVENTS"] == "2000000"


def test_a_changed_list_of_clients_restarts_the_control_plane() -> None:
    def annotations(clients: list[dict[str, Any]]) -> dict[str, str]:
        values = with_values({"controlPlane": {"clients": {"registered": clients}}})
        template = of_component(render(values), "Deployment", "control-plane")["spec"]["template"]
        found: dict[str, str] = template["metadata"]["annotations"]
        return found

    pair = [{"id": "proxy", "kind": "egress_proxy", "scopes": []}, {"id": "runtime", "kind": "runtime", "scopes": []}]
    nightly = {"id": "nightly", "kind": "operator", "tenant": "acme", "scopes": ["subject:assert"]}

    assert annotations(pair) != annotations([*pair, nightly])


@pytest.mark.parametrize(("component", "drain_seconds"), [("proxy", 120), ("runtime", 600)])
def test_a_pod_gets_more_time_to_end_than_its_drain_takes(component: str, drain_seconds: int) -> None:
    deployment = of_component(render(case_values("postgresql")), "Deployment", component)

    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain_seconds


@pytest.mark.parametrize("component", COMPONENTS)
def test_probes_ask_a_port_that_the_container_has(component: str) -> None:
    deployment = of_component(render(case_values("sqlite")), "Deployment", component)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}

    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}

    assert {probe["port"] for probe in probes.values()} <= ports
    assert probes["liveness"]["path"] == "/healthz"
    assert probes["readiness"]["path"] == probes["startup"]["path"] == "/readyz"
    expected = ("admin", "HTTP") if component == "proxy" else ("https", "HTTPS")
    assert {(probe["port"], probe["scheme"]) for probe in probes.values()} == {expected}
