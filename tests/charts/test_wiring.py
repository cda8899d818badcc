"""The three programs started exactly as the chart starts them: same arguments, settings and files, TLS between them.

What differs is what a test cannot have: paths under a folder of its own, loopback ports instead of cluster names.
"""

import secrets
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import trustme

from egress_proxy.ca import create_ca, utc_now
from tests.charts.rendering import (
    COMPONENTS,
    Manifest,
    case_values,
    container,
    environment,
    of_component,
    of_kind,
    pod,
    render,
)
from tests.control_plane.issuing import Provider
from tests.support.processes import COMMAND, Served, clean_environment, free_port

NUMBERED_PORTS: Final = ("8470", "8471", "8472", "8473", "8474", "8475")
READY_SECONDS: Final = 40.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A folder for each pod, a port for each of the chart's ports, and what the Secrets hold."""

    root: Path
    ports: dict[str, int]
    secrets: dict[tuple[str, str], str]
    trust: ssl.SSLContext
    issuer: Provider = field(default_factory=lambda: Provider("cluster"))

    def here(self, component: str, value: str) -> str:
        """A setting's value, with the cluster's addresses and paths made ours."""
        for name in COMPONENTS:
            value = value.replace(f"tickets-coatcheck-{name}.agents.svc", "127.0.0.1")
        value = value.replace("0.0.0.0", "127.0.0.1")
        for port in NUMBERED_PORTS:
            value = value.replace(f":{port}", f":{self.ports[port]}")
        for folder in ("/run/coatcheck", "/etc/coatcheck", "/var/lib/coatcheck"):
            value = value.replace(folder, str(self.root / component) + folder)
        return value

    def mount(self, component: str, manifests: list[Manifest]) -> None:
        """Every file that the pod's volumes bring, where the container mounts them."""
        deployment = of_component(manifests, "Deployment", component)
        mounts = {mount["name"]: mount["mountPath"] for mount in container(deployment)["volumeMounts"]}
        for volume in pod(deployment)["volumes"]:
            folder = self.root / component / mounts[volume["name"]].lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
            for path, content in self._files(volume, component, manifests):
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content)
                file.chmod(0o600)

    def _files(self, volume: dict[str, Any], component: str, manifests: list[Manifest]) -> Iterator[tuple[str, str]]:
        if "configMap" in volume:
            yield from self._mapped(volume["configMap"]["name"], component, manifests)
        for source in volume.get("projected", {}).get("sources", []):
            ((kind, told),) = source.items()
            if kind == "serviceAccountToken":
                yield told["path"], self.token(component, told)
                continue
            for item in told["items"]:
                yield item["path"], self.secrets[told["name"], item["key"]]

    def _mapped(self, name: str, component: str, manifests: list[Manifest]) -> Iterator[tuple[str, str]]:
        """A ConfigMap of the chart's, or one that was there before."""
        for manifest in of_kind(manifests, "ConfigMap"):
            if manifest["metadata"]["name"] == name:
                yield from ((key, self.here(component, text)) for key, text in manifest["data"].items())
        yield from ((key, text) for (held, key), text in self.secrets.items() if held == name)

    def token(self, component: str, told: dict[str, Any]) -> str:
        """As the cluster signs it for the pod's service account."""
        now = int(time.time())
        ends = {"aud": [self.here(component, told["audience"])], "exp": now + told["expirationSeconds"]}
        return self.issuer.token(f"system:serviceaccount:agents:tickets-coatcheck-{component}", **ends)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    internal = trustme.CA()
    serving = internal.issue_cert("127.0.0.1")
    chain = "".join(blob.bytes().decode() for blob in serving.cert_chain_pems)
    key = serving.private_key_pem.bytes().decode()
    (tmp_path / "interception-ca").mkdir()
    create_ca(tmp_path / "interception-ca", now=utc_now())
    trust = ssl.create_default_context()
    internal.configure_trust(trust)
    held = {
        ("coatcheck-kek", "kek.hex"): secrets.token_hex(32),
        ("coatcheck-admin-token", "token"): secrets.token_urlsafe(32),
        ("coatcheck-clients", "proxy"): secrets.token_urlsafe(32),
        ("coatcheck-clients", "runtime"): secrets.token_urlsafe(32),
        ("coatcheck-interception-ca", "tls.crt"): (tmp_path / "interception-ca/ca.pem").read_text(),
        ("coatcheck-interception-ca", "tls.key"): (tmp_path / "interception-ca/ca.key").read_text(),
        ("coatcheck-internal-ca", "ca.crt"): internal.cert_pem.bytes().decode(),
    }
    clients = trustme.CA()
    certificate = clients.issue_cert("runtime.coatcheck.internal")
    held["coatcheck-client-cas", "ca.crt"] = clients.cert_pem.bytes().decode()
    held["coatcheck-runtime-client", "tls.crt"] = "".join(blob.bytes().decode() for blob in certificate.cert_chain_pems)
    held["coatcheck-runtime-client", "tls.key"] = certificate.private_key_pem.bytes().decode()
    for component in COMPONENTS:
        held[f"coatcheck-{component}-tls", "tls.crt"] = chain
        held[f"coatcheck-{component}-tls", "tls.key"] = key
    return Cluster(tmp_path, {port: free_port() for port in NUMBERED_PORTS}, held, trust)


def started(cluster: Cluster, component: str, manifests: list[Manifest]) -> Served:
    deployment = of_component(manifests, "Deployment", component)
    cluster.mount(component, manifests)
    settings = {name: cluster.here(component, value) for name, value in environment(deployment).items()}
    return Served([str(COMMAND), *container(deployment)["args"]], clean_environment(**settings), cwd=cluster.root)


def becomes_ready(cluster: Cluster, component: str, manifests: list[Manifest]) -> bool:
    """What the kubelet asks for, in the chart's own words."""
    probe = container(of_component(manifests, "Deployment", component))["readinessProbe"]["httpGet"]
    named = {
        port["name"]: port["containerPort"]
        for port in container(of_component(manifests, "Deployment", component))["ports"]
    }
    url = f"{probe['scheme'].lower()}://127.0.0.1:{cluster.ports[str(named[probe['port']])]}{probe['path']}"
    deadline = time.monotonic() + READY_SECONDS
    with httpx.Client(verify=cluster.trust, timeout=5, trust_env=False) as client:
        while time.monotonic() < deadline:
            try:
                if client.get(url).status_code == 200:
                    return True
            except httpx.TransportError:
                pass
            time.sleep(0.2)
    return False


def trust_the_clusters_tokens(cluster: Cluster) -> None:
    """What an administrator does once, with `coatcheck issuer add`."""
    believed = {"uses": ["client"], "audiences": None, "claims": {"subject": {"claim": "sub"}}}
    admin = {"Authorization": f"Bearer {cluster.secrets['coatcheck-admin-token', 'token']}"}
    with httpx.Client(verify=cluster.trust, trust_env=False) as client:
        client.post(
            f"https://127.0.0.1:{cluster.ports['8470']}/v1/issuers",
            json=cluster.issuer.record(tenant="", **believed),
            headers=admin,
        ).raise_for_status()


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", ["sqlite", "proofs"])
def test_what_the_chart_starts_becomes_ready_and_works_together(cluster: Cluster, case: str) -> None:
    manifests = render(case_values(case))
    (cluster.root / "control-plane/var/lib/coatcheck").mkdir(parents=True)
    running: list[Served] = []

    try:
        for component in COMPONENTS:
            running.append(started(cluster, component, manifests))
            assert becomes_ready(cluster, component, manifests), running[-1].log
            if component == "control-plane":
                trust_the_clusters_tokens(cluster)

        control_plane = f"https://127.0.0.1:{cluster.ports['8470']}"
        admin = {"Authorization": f"Bearer {cluster.secrets['coatcheck-admin-token', 'token']}"}
        with httpx.Client(verify=cluster.trust, trust_env=False) as client:
            clients = client.get(f"{control_plane}/v1/clients", headers=admin).json()["items"]
            refused = client.get(f"https://127.0.0.1:{cluster.ports['8472']}/anthropic/v1/models")
            issuer = client.get(f"{control_plane}/.well-known/oauth-authorization-server").json()["issuer"]

        assert {(known["id"], known["kind"]) for known in clients} == {
            ("proxy", "egress_proxy"),
            ("runtime", "runtime"),
        }
        assert (refused.status_code, refused.headers["Coatcheck-Refusal"]) == (401, "token_required")
        assert issuer == control_plane
    finally:
        for process in reversed(running):
            process.stop()
    assert [process.process.returncode for process in running] == [0, 0, 0]
