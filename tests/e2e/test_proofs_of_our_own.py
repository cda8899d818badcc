"""Proxies and runtimes that prove themselves to the control plane by a workload's token or a certificate, not a secret.

Real processes, real TLS in both directions. The platform signs service account tokens and issues client certificates:
good ones, bad ones and short-lived ones, and turns the files while the programs run.
"""

import os
import secrets
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.control_plane.issuing import Provider
from tests.support.api import ControlPlaneApi, RuntimeClient
from tests.support.processes import (
    Deployment,
    Proxy,
    Served,
    free_port,
    private_file,
    start_control_plane,
    wait_for,
)
from tests.support.provider import serve_provider
from tests.support.runtimes import Runtime, start_runtime
from tests.support.upstream import Upstream, plain
from tests.support.ways import Kind, way

ISSUER_URL = "https://coatcheck.test"
SECONDS = 25

_numbers = count(1)


@dataclass(slots=True)
class Platform:
    """Who vouches for workloads, and where it puts what they prove themselves with."""

    folder: Path
    deployment: Deployment
    clients_ca: trustme.CA
    tokens: Provider = field(default_factory=lambda: Provider(f"cluster-{secrets.token_hex(3)}"))

    def register(self, kind: str, proofs: dict[str, Any]) -> str:
        """A client that has no secret; gives its id."""
        client = f"{kind.replace('_', '-')}-{next(_numbers)}"
        body = {"id": client, "kind": kind, "tenant": None, "proofs": proofs}
        self.deployment.api.ask("POST", "/v1/clients", body)
        return client

    def with_token(self, kind: str, account: str = "") -> "Workload":
        """A client that a service account's token proves."""
        account = account or f"account-{next(_numbers)}"
        subject = f"system:serviceaccount:agents:{account}"
        client = self.register(kind, {"workload": {"issuer": self.tokens.name, "subject": subject}})
        return Workload(self, client, self.folder / client, subject)

    def with_certificate(self, kind: str) -> "Workload":
        """A client that a name in a certificate proves."""
        name = f"workload-{next(_numbers)}.agents.test"
        client = self.register(kind, {"certificate": {"san_dns": name}})
        return Workload(self, client, self.folder / client, name)


@dataclass(slots=True)
class Workload:
    """A client's own folder, as a pod sees it."""

    platform: Platform
    client: str
    folder: Path
    name: str
    """The subject of its tokens, or the name in its certificates."""

    def put_token(self, *, seconds: float = 300, subject: str = "", text: str = "") -> None:
        """By renaming, as the kubelet does."""
        usual = {"aud": [ISSUER_URL], "exp": int(time.time() + seconds), "iat": int(time.time()) - 600}
        token = text or self.platform.tokens.token(subject or self.name, **usual)
        new = private_file(self.folder / f"token-{next(_numbers)}", token)
        new.replace(self.folder / "token")

    def put_certificate(self, *, seconds: float = 3600, name: str = "", ca: trustme.CA | None = None) -> None:
        end = datetime.now(UTC) + timedelta(seconds=seconds)
        leaf = (ca or self.platform.clients_ca).issue_cert(
            name or self.name, not_before=datetime.now(UTC) - timedelta(days=2), not_after=end
        )
        chain = "".join(pem.bytes().decode() for pem in leaf.cert_chain_pems)
        for file, text in (("tls.key", leaf.private_key_pem.bytes().decode()), ("tls.crt", chain)):
            private_file(self.folder / f".{file}", text).replace(self.folder / file)

    @property
    def settings(self) -> dict[str, str]:
        """By which it proves itself; the secret is left out."""
        control_plane_ca = {"CONTROL_PLANE_CA_FILE": str(self.platform.folder / "internal-ca.pem")}
        own = {"CLIENT_ID": self.client, "CLIENT_SECRET_FILE": ""} | control_plane_ca
        if (self.folder / "tls.crt").exists():
            files = {"CLIENT_CERT_FILE": self.folder / "tls.crt", "CLIENT_KEY_FILE": self.folder / "tls.key"}
        else:
            files = {"CLIENT_TOKEN_FILE": self.folder / "token"}
        return own | {name: str(file) for name, file in files.items()}

    def start_proxy(self, **settings: str) -> Proxy:
        """Not yet ready. The deployment's first proxy is the one whose address the control plane gives out."""
        deployment = self.platform.deployment
        proxy = deployment.start_cold_proxy(reverse_port=0, **(self.settings | settings))
        deployment.proxies.remove(proxy)
        return proxy

    def start_runtime(self) -> Runtime:
        return start_runtime(
            self.platform.deployment,
            self.folder,
            client=RuntimeClient(self.client, ""),
            ISSUER_URL=ISSUER_URL,
            **self.settings,
        )


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A control plane that speaks TLS and asks for certificates, and one proxy that proves itself by a token."""
    folder = tmp_path_factory.mktemp("platform")
    internal, clients = trustme.CA(), trustme.CA()
    serving = internal.issue_cert("localhost")
    upstream_ca, interception_ca = trustme.CA(), trustme.CA()
    for file, ca in (("internal-ca", internal), ("clients-ca", clients), ("upstream-ca", upstream_ca)):
        ca.cert_pem.write_to_path(str(folder / f"{file}.pem"))
    interception_ca.cert_pem.write_to_path(str(folder / "interception-ca.pem"))
    private_file(folder / "interception-ca.key", interception_ca.private_key_pem.bytes().decode())
    serving.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    private_file(folder / "tls.key", serving.private_key_pem.bytes().decode())
    port, reverse_port = free_port(), free_port()
    control_plane, admin_token = start_control_plane(
        folder,
        LISTEN=f"127.0.0.1:{port}",
        ISSUER_URL=ISSUER_URL,
        PROXY_BASE_URL=f"http://127.0.0.1:{reverse_port}",
        TLS_CERT_FILE=str(folder / "tls.crt"),
        TLS_KEY_FILE=str(folder / "tls.key"),
        CLIENT_CA_FILES=str(folder / "clients-ca.pem"),
    )
    trust = ssl.create_default_context()
    internal.configure_trust(trust)
    api = ControlPlaneApi(f"https://localhost:{port}", admin_token, trust=trust)
    deployment = Deployment(folder, control_plane, api, admin_token, upstream_ca, interception_ca, "", reverse_port)
    platform = Platform(folder, deployment, clients)
    try:
        believed: dict[str, Any] = {"uses": ["client"], "audiences": None, "claims": {"subject": {"claim": "sub"}}}
        api.ask("POST", "/v1/issuers", platform.tokens.record(tenant="", **believed))
        workload = platform.with_token("egress_proxy")
        workload.put_token()
        deployment.start_proxy(reverse_port=reverse_port, **workload.settings)
        yield platform
    finally:
        deployment.stop()


@pytest.fixture
def upstream(platform: Platform) -> Iterator[Upstream]:
    with Upstream(platform.deployment.upstream_ca) as running:
        running.default = plain(b"ok")
        yield running


def swaps(platform: Platform, proxy: Proxy, upstream: Upstream) -> bool:
    """Whether a placeholder that the proxy has never seen is swapped by it."""
    workspace = platform.deployment.workspace()
    key = f"sk-real-{secrets.token_hex(20)}"
    workspace.credential("api", url=upstream.url, secret=key)
    through = way(workspace, upstream, workspace.ticket("api"), Kind.TUNNEL)
    through = type(through)(Kind.TUNNEL, through.ticket, upstream.authority, "api", proxy, through.context)
    answer = through.ask("GET", "/x", timeout_seconds=20)
    return answer.status == 200 and upstream.requests[-1].header("authorization") == f"Bearer {key}"


def proofs(platform: Platform, kind: str) -> Iterator[Workload]:
    token, certificate = platform.with_token(kind), platform.with_certificate(kind)
    token.put_token()
    certificate.put_certificate()
    yield from (token, certificate)


def test_a_proxy_is_known_by_its_token_or_its_certificate_and_swaps(platform: Platform, upstream: Upstream) -> None:
    for workload in proofs(platform, "egress_proxy"):
        proxy = workload.start_proxy()

        wait_for(proxy.is_ready, timeout_seconds=SECONDS)
        is_swapped = swaps(platform, proxy, upstream)
        proxy.served.stop()

        assert is_swapped
        assert b"client-secret" not in proxy.served.log.encode()


def test_a_runtime_is_known_by_its_token_or_its_certificate_and_carries_out_turns(
    platform: Platform, upstream: Upstream
) -> None:
    for workload in proofs(platform, "runtime"):
        key = f"sk-real-{secrets.token_hex(20)}"
        serve_provider(upstream, key=key)
        runtime = workload.start_runtime()

        wait_for(runtime.is_ready, timeout_seconds=SECONDS)
        session = runtime.workspace(upstream, key).session()
        turn, ended = runtime.turn(session), runtime.end(session)
        runtime.served.stop()

        assert (turn.status_code, ended.status_code) == (200, 204), runtime.served.log
        assert upstream.requests[-1].header("x-api-key") == key


@pytest.mark.guards("egress_proxy/bootstrap.py", "client.is_known and ", "")
def test_a_token_that_is_turned_goes_on_working_and_one_that_is_no_good_shows(
    platform: Platform, upstream: Upstream
) -> None:
    workload = platform.with_token("egress_proxy")
    workload.put_token()
    proxy = workload.start_proxy()
    wait_for(proxy.is_ready, timeout_seconds=SECONDS)

    workload.put_token(seconds=-60)
    wait_for(lambda: not proxy.is_ready(), timeout_seconds=SECONDS)
    told = proxy.served.log
    workload.put_token()
    wait_for(proxy.is_ready, timeout_seconds=SECONDS)
    is_swapped = swaps(platform, proxy, upstream)
    proxy.served.stop()

    assert "answered 401: it does not know this proxy by the workload token in" in told
    assert "which ended at" in told
    assert is_swapped


@pytest.mark.long
def test_a_certificate_that_is_turned_is_shown_from_the_next_connection_on(
    platform: Platform, upstream: Upstream
) -> None:
    workload = platform.with_certificate("egress_proxy")
    workload.put_certificate(seconds=8)
    ends_at = time.time() + 8
    proxy = workload.start_proxy()
    wait_for(proxy.is_ready, timeout_seconds=SECONDS)

    workload.put_certificate()
    wait_for(lambda: '"source": "client"' in adopted(proxy.served), timeout_seconds=SECONDS)
    wait_for(lambda: time.time() > ends_at + 1, timeout_seconds=SECONDS)
    old = platform.deployment.control_plane
    old.stop()  # and with it every connection of before
    platform.deployment.control_plane = Served(old.command, old.environment, cwd=platform.folder).wait_until_listening()

    assert wait_for(lambda: proxy.is_ready() and swaps(platform, proxy, upstream), timeout_seconds=SECONDS)
    proxy.served.stop()


def adopted(served: Served) -> str:
    return "".join(line for line in served.log.splitlines() if "certificates_adopted" in line)


def a_stranger_s(workload: Workload) -> None:
    workload.put_certificate(ca=trustme.CA())


NO_GOOD: dict[str, tuple[str, Callable[[Workload], None], str]] = {
    "a token that is over": ("token", lambda w: w.put_token(seconds=-60), "which ended at"),
    "another workload's token": ("token", lambda w: w.put_token(subject="system:serviceaccount:a:b"), "does not know"),
    "no token": ("token", lambda w: None, "cannot read the workload token"),
    "an empty token": ("token", lambda w: w.put_token(text=" "), "there is no token in"),
    "another workload's certificate": ("cert", lambda w: w.put_certificate(name="other.test"), "does not know"),
    "a stranger's certificate": ("cert", a_stranger_s, "does not take the client certificate"),
    "a certificate that is over": ("cert", lambda w: w.put_certificate(seconds=-60), "which ended at"),
}


@pytest.mark.long
@pytest.mark.parametrize("no_good", NO_GOOD)
@pytest.mark.parametrize("program", ["egress_proxy", "runtime"])
def test_who_is_not_known_is_not_ready_and_says_by_what(platform: Platform, program: str, no_good: str) -> None:
    by, put, told = NO_GOOD[no_good]
    workload = platform.with_token(program) if by == "token" else platform.with_certificate(program)
    put(workload)
    if not workload.folder.exists():
        workload.folder.mkdir()

    started = workload.start_proxy() if program == "egress_proxy" else workload.start_runtime()
    try:
        wait_for(lambda: told in started.served.log, timeout_seconds=SECONDS)
        is_ready = started.is_ready()
    finally:
        started.served.stop()

    assert not is_ready


def test_a_control_plane_that_somebody_else_vouches_for_is_not_asked(platform: Platform, tmp_path: Path) -> None:
    """TLS in the other direction: the token never leaves."""
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other-ca.pem"))
    workload = platform.with_token("egress_proxy")
    workload.put_token()

    proxy = workload.start_proxy(CONTROL_PLANE_CA_FILE=str(tmp_path / "other-ca.pem"))
    wait_for(lambda: "control_plane_unreachable" in proxy.served.log, timeout_seconds=SECONDS)
    is_ready = proxy.is_ready()
    proxy.served.stop()

    assert not is_ready
    assert os.fspath(workload.folder) not in platform.deployment.control_plane.log
