"""What a pod of this chart may do and hold: no root, no write, no token, no secret but as a file of its own."""

import json
import re

import helm_python
import pytest
import yaml

from tests.charts.rendering import (
    CASES,
    COMPONENTS,
    case_values,
    container,
    environment,
    of_component,
    of_kind,
    pod,
    render,
    render_text,
    with_values,
)

SECRET_FILE = re.compile(r"(_FILE|_FILES)$")
SAYS_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|KEY|KEK|DATABASE_URL")


@pytest.mark.guards("charts/coatcheck/templates/_pod.tpl", "runAsNonRoot: true", "runAsNonRoot: false")
@pytest.mark.guards(
    "charts/coatcheck/templates/_pod.tpl", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"
)
@pytest.mark.guards("charts/coatcheck/templates/_pod.tpl", "drop: [ALL]", "drop: []")
@pytest.mark.guards("charts/coatcheck/templates/_pod.tpl", "type: RuntimeDefault", "type: Unconfined")
@pytest.mark.guards(
    "charts/coatcheck/templates/_pod.tpl", "allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true"
)
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_pod_runs_without_privileges(component: str) -> None:
    deployment = of_component(render(case_values("sqlite")), "Deployment", component)

    in_pod, in_container = pod(deployment)["securityContext"], container(deployment)["securityContext"]

    assert in_pod["runAsNonRoot"] is True
    assert in_pod["runAsUser"] >= 10000
    assert in_pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert in_container["readOnlyRootFilesystem"] is True
    assert in_container["allowPrivilegeEscalation"] is False
    assert in_container["privileged"] is False
    assert in_container["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.guards("charts/coatcheck/templates/_pod.tpl", "enableServiceLinks: false", "enableServiceLinks: true")
@pytest.mark.guards(
    "charts/coatcheck/templates/_pod.tpl", "automountServiceAccountToken: false", "automountServiceAccountToken: true"
)
@pytest.mark.parametrize("component", COMPONENTS)
def test_kubernetes_puts_nothing_into_a_pod_by_itself(component: str) -> None:
    deployment = of_component(render(case_values("sqlite")), "Deployment", component)

    assert pod(deployment)["enableServiceLinks"] is False
    assert pod(deployment)["automountServiceAccountToken"] is False


NAMES_OF_KEYS = {
    f"COATCHECK_CONTROL_PLANE_KEK_{name}"
    for name in ("PROVIDER", "AWS_KEY_ARN", "AWS_ROLE_ARN", "VAULT_ADDRESS", "VAULT_KEY", "VAULT_ROLE")
}
"""Which key-encryption key it is and who asks for it: no key, and nothing that proves anybody."""


@pytest.mark.guards(
    "charts/coatcheck/templates/proxy/deployment.yaml",
    "value: /run/coatcheck/client-secret",
    "valueFrom: {secretKeyRef: {name: clients, key: proxy}}",
)
@pytest.mark.parametrize("case", CASES)
def test_no_secret_reaches_a_process_as_an_environment_value(case: str) -> None:
    manifests = render(case_values(case))

    for deployment in of_kind(manifests, "Deployment"):
        assert "envFrom" not in container(deployment)
        assert all(set(variable) == {"name", "value"} for variable in container(deployment)["env"])
        named = {name for name in environment(deployment) if SAYS_SECRET.search(name) and not SECRET_FILE.search(name)}
        assert named <= {"COATCHECK_CONTROL_PLANE_DATABASE_URL"} | NAMES_OF_KEYS
        url = environment(deployment).get("COATCHECK_CONTROL_PLANE_DATABASE_URL", "sqlite+")
        assert url.startswith("sqlite+"), "a URL with a password in it comes as a file"


@pytest.mark.parametrize("case", CASES)
def test_every_secret_exists_before_the_chart(case: str) -> None:
    assert of_kind(render(case_values(case)), "Secret") == []


@pytest.mark.guards(
    "charts/coatcheck/templates/_demands.tpl", "if not .proxy.ca.existingSecret", 'if eq .proxy.ca.existingSecret "-"'
)
@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ({"proxy": {"ca": {"existingSecret": ""}}}, "proxy.ca.existingSecret"),
        ({"proxy": {"tls": {"existingSecret": ""}}}, "proxy.tls.existingSecret"),
        ({"controlPlane": {"kek": {"existingSecret": ""}}}, "controlPlane.kek.existingSecret"),
        ({"controlPlane": {"tls": {"existingSecret": ""}}}, "controlPlane.tls.existingSecret"),
        ({"controlPlane": {"adminToken": {"existingSecret": ""}}}, "controlPlane.adminToken.existingSecret"),
        ({"controlPlane": {"clients": {"existingSecret": ""}}}, "controlPlane.clients.existingSecret"),
        ({"controlPlane": {"database": {"kind": "postgresql"}}}, "controlPlane.database.postgresql.existingSecret"),
        ({"runtime": {"tls": {"existingSecret": ""}}}, "runtime.tls.existingSecret"),
        ({"runtime": {"settings": {"MODEL": ""}}}, "runtime.settings.MODEL"),
        ({"internalCA": {"existingConfigMap": ""}}, "internalCA.existingConfigMap"),
        ({"internalCA": {"existingSecret": "another"}}, "not both"),
        ({"proxy": {"clientId": "nobody"}}, '"nobody" of kind egress_proxy'),
        ({"runtime": {"clientId": "proxy"}}, '"proxy" of kind runtime'),
    ],
)
def test_a_secret_that_is_not_named_stops_the_render(missing: dict[str, object], named: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=named):
        render(with_values(missing))


def test_everything_that_is_missing_is_told_at_once() -> None:
    with pytest.raises(helm_python.HelmRenderError) as refused:
        render({})

    assert str(refused.value).count("existingSecret:") >= 8


@pytest.mark.guards(
    "charts/coatcheck/templates/proxy/deployment.yaml",
    "items: [{key: {{ $values.clientId }}, path: client-secret}]",
    "items: [{key: {{ $values.clientId }}, path: client-secret}, {key: runtime, path: other}]",
)
def test_a_component_is_given_its_own_client_secret_alone() -> None:
    manifests = render(case_values("postgresql"))

    for component in ("proxy", "runtime"):
        (secrets,) = [
            volume
            for volume in pod(of_component(manifests, "Deployment", component))["volumes"]
            if volume["name"] == "secrets"
        ]
        (clients,) = [
            source["secret"]
            for source in secrets["projected"]["sources"]
            if source.get("secret", {}).get("name") == "clients"
        ]
        assert clients["items"] == [{"key": component, "path": "client-secret"}]


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_projected_secret_lists_the_keys_it_mounts_and_is_not_for_everybody(component: str) -> None:
    deployment = of_component(render(case_values("postgresql")), "Deployment", component)
    (secrets,) = [volume["projected"] for volume in pod(deployment)["volumes"] if volume["name"] == "secrets"]

    assert secrets["defaultMode"] == 0o440
    assert all(next(iter(source.values()))["items"] for source in secrets["sources"])


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_file_that_a_setting_names_is_mounted(component: str) -> None:
    deployment = of_component(render(case_values("postgresql")), "Deployment", component)
    mounts = {mount["mountPath"] for mount in container(deployment)["volumeMounts"]}
    projected = {
        f"/run/coatcheck/{item['path']}"
        for volume in pod(deployment)["volumes"]
        if "projected" in volume
        for source in volume["projected"]["sources"]
        for item in next(iter(source.values())).get("items", ())
    }

    for name, value in environment(deployment).items():
        for path in value.split(",") if SECRET_FILE.search(name) else ():
            assert path in projected or path.rpartition("/")[0] in mounts - {"/run/coatcheck"}, f"{name}={path}"


def test_the_list_of_clients_names_files_that_are_mounted() -> None:
    manifests = render(case_values("postgresql"))
    clients = json.loads(of_component(manifests, "ConfigMap", "control-plane")["data"]["clients.json"])
    deployment = of_component(manifests, "Deployment", "control-plane")
    (secrets,) = [volume["projected"] for volume in pod(deployment)["volumes"] if volume["name"] == "secrets"]
    mounted = {f"/run/coatcheck/{item['path']}" for source in secrets["sources"] for item in source["secret"]["items"]}

    assert [(client["id"], client["kind"], client["tenant"], client["scopes"]) for client in clients] == [
        ("proxy", "egress_proxy", None, []),
        ("runtime", "runtime", None, []),
        ("nightly", "operator", "acme", ["subject:assert"]),
    ]
    assert {client["secret_file"] for client in clients} <= mounted


def test_listeners_that_other_machines_reach_have_a_certificate() -> None:
    manifests = render(case_values("sqlite"))

    proxy = environment(of_component(manifests, "Deployment", "proxy"))
    control_plane = environment(of_component(manifests, "Deployment", "control-plane"))
    runtime = environment(of_component(manifests, "Deployment", "runtime"))

    assert proxy["COATCHECK_PROXY_FORWARD_LISTEN"] == "0.0.0.0:8471"
    assert {"COATCHECK_PROXY_LISTENER_TLS_CERT_FILE", "COATCHECK_PROXY_LISTENER_TLS_KEY_FILE"} <= set(proxy)
    assert "COATCHECK_PROXY_PLAINTEXT_LISTENER" not in proxy
    assert {"COATCHECK_CONTROL_PLANE_TLS_CERT_FILE", "COATCHECK_CONTROL_PLANE_TLS_KEY_FILE"} <= set(control_plane)
    assert {"COATCHECK_RUNTIME_TLS_CERT_FILE", "COATCHECK_RUNTIME_TLS_KEY_FILE"} <= set(runtime)
    assert proxy["COATCHECK_PROXY_CONTROL_PLANE_URL"].startswith("https://")
    assert runtime["COATCHECK_RUNTIME_CONTROL_PLANE_URL"].startswith("https://")
    assert control_plane["COATCHECK_CONTROL_PLANE_PROXY_BASE_URL"].startswith("https://")


def test_an_uninstalled_release_leaves_its_database() -> None:
    claim = of_component(render(case_values("sqlite")), "PersistentVolumeClaim", "control-plane")

    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_yaml_that_the_chart_writes_has_no_key_twice() -> None:
    class NoDuplicates(yaml.SafeLoader):
        """PyYAML takes the last of two equal keys; the API server refuses them."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[object, object]:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{keys} in {node.start_mark}"
        return {}

    NoDuplicates.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)

    for case in CASES:
        for path, text in render_text(case_values(case)).items():
            if path.endswith(".yaml"):
                list(yaml.load_all(text, Loader=NoDuplicates))
