"""Values that the chart refuses, and the settings that it offers: exactly those that the programs know."""

import json
from importlib import import_module
from typing import Any

import helm_python
import pytest

from tests.charts.rendering import CASES, CHART, case_values, environment, of_component, render, with_values

PROGRAMS = {
    "controlPlane": ("control-plane", "control_plane", "COATCHECK_CONTROL_PLANE_"),
    "proxy": ("proxy", "egress_proxy", "COATCHECK_PROXY_"),
    "runtime": ("runtime", "runtime", "COATCHECK_RUNTIME_"),
}
NOT_ON_KUBERNETES = {
    *("PLAINTEXT_LISTENER", "MIGRATION_DATABASE_URL", "MIGRATION_DATABASE_URL_FILE"),
    *("KEK_AWS_KEYS_FILE", "KEK_VAULT_ROLE_ID_FILE", "KEK_VAULT_SECRET_ID_FILE", "SOURCES_FOLDER"),
}
"""What the chart neither sets nor offers: every listener in it has a certificate, an init container migrates, a pod
proves itself by its service account, and its secrets are the cluster's."""


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"proxi": {}}, "proxi"),
        ({"proxy": {"replica": 3}}, "replica"),
        ({"proxy": {"settings": {"WORKER": 2}}}, "WORKER"),
        ({"proxy": {"settings": {"CA_KEY_FILE": "/tmp/key"}}}, "CA_KEY_FILE"),
        ({"proxy": {"settings": {"PLAINTEXT_LISTENER": "accepted-risk"}}}, "PLAINTEXT_LISTENER"),
        ({"proxy": {"settings": {"AUDIT_MODE": "off"}}}, "AUDIT_MODE"),
        ({"proxy": {"replicas": "two"}}, "replicas"),
        ({"proxy": {"podLabels": {"app.kubernetes.io/component": "runtime"}}}, "app.kubernetes.io/component"),
        ({"proxy": {"networkPolicy": {"clients": [{}]}}}, "clients"),
        ({"proxy": {"networkPolicy": {"clients": [{"podSelector": {}}]}}}, "clients"),
        ({"proxy": {"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {}}}]}}}, "clients"),
        ({"proxy": {"networkPolicy": {"egress": [{"cidr": "0.0.0.0/0"}]}}}, "egress"),
        ({"proxy": {"networkPolicy": {"egress": [{"cidr": "0.0.0.0/0", "ports": []}]}}}, "egress"),
        ({"proxy": {"networkPolicy": {"egress": [{"ports": [{"port": 443}]}]}}}, "egress"),
        ({"proxy": {"networkPolicy": {"egress": [{"cidr": "010.0.0.0/8", "ports": [{"port": 443}]}]}}}, "egress"),
        ({"proxy": {"networkPolicy": {"egress": [{"cidr": "10.0.0.0/33", "ports": [{"port": 443}]}]}}}, "egress"),
        ({"proxy": {"networkPolicy": {"egress": [{"cidr": "::ffff:1.2.3.4/96", "ports": [{"port": 1}]}]}}}, "egress"),
        ({"networkPolicy": {"dns": {"peers": []}}}, "peers"),
        ({"networkPolicy": {"dns": {"peers": [{"cidr": "0.0.0.0/0"}]}}}, "peers"),
        ({"networkPolicy": {"dns": {"nodeLocalAddresses": ["169.254.0.0/16"]}}}, "nodeLocalAddresses"),
        ({"networkPolicy": {"metadataAddresses": []}}, "metadataAddresses"),
        ({"controlPlane": {"kek": {"keys": []}}}, "keys"),
        ({"controlPlane": {"database": {"kind": "mysql"}}}, "kind"),
        ({"controlPlane": {"redis": {"url": "redis://user:password@host"}}}, "url"),
        ({"controlPlane": {"issuerUrl": "http://tickets.example.test"}}, "issuerUrl"),
        ({"controlPlane": {"clients": {"registered": [{"id": "x", "kind": "root", "scopes": []}]}}}, "kind"),
        ({"image": {"digest": "latest"}}, "digest"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=named):
        render(with_values(values))


def settings_of(package: str) -> set[str]:
    """The settings that a program knows, without their common prefix."""
    return {name.upper() for name in import_module(f"{package}.config").Settings.model_fields}


def set_by_the_chart(component: str, prefix: str) -> set[str]:
    return {
        name.removeprefix(prefix)
        for values in (*map(case_values, CASES), with_proofs_swapped())
        for name in environment(of_component(render(values), "Deployment", component))
    }


def with_proofs_swapped() -> dict[str, Any]:
    """The proxy by a certificate, the runtime by a token."""
    values = case_values("proofs")
    proxy, runtime = values["controlPlane"]["clients"]["registered"]
    proxy["proofs"], runtime["proofs"] = runtime["proofs"], proxy["proofs"]
    values["proxy"]["clientProof"], values["runtime"]["clientProof"] = (
        values["runtime"]["clientProof"],
        values["proxy"]["clientProof"],
    )
    return values


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"proxy": {"clientProof": {"kind": "secret"}}}, "proxy.clientProof.kind: token"),
        ({"runtime": {"clientProof": {"existingSecret": ""}}}, "runtime.clientProof.existingSecret"),
        ({"controlPlane": {"clientCAs": {"keys": []}}}, "controlPlane.clientCAs"),
    ],
)
def test_a_proof_that_is_only_half_there_is_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=told):
        render(with_values(changes, case="proofs"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_chart_sets_only_names_that_the_program_knows(program: str) -> None:
    component, package, prefix = PROGRAMS[program]

    assert set_by_the_chart(component, prefix) <= settings_of(package)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_setting_is_either_set_by_the_chart_or_offered(program: str) -> None:
    component, package, prefix = PROGRAMS[program]
    schema = json.loads((CHART / "values.schema.json").read_text())
    offered = set(schema["properties"][program]["properties"]["settings"]["properties"])

    left_out = settings_of(package) - offered - set_by_the_chart(component, prefix)

    assert left_out == NOT_ON_KUBERNETES & settings_of(package)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_takes_what_the_chart_gives_it(program: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    component, package, prefix = PROGRAMS[program]
    given = environment(of_component(render(case_values(case)), "Deployment", component))
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    settings = import_module(f"{package}.config").Settings()

    assert {prefix + name.upper() for name in settings.model_fields_set} == set(given)
