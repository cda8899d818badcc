"""One limit, two proxies, one control plane, all real: together they let through what the limit says, and no more."""

import secrets
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from egress_proxy.ca import create_ca
from egress_proxy.config import Settings
from tests.control_plane.serving import PROXY, ControlPlane, control_plane_in
from tests.control_plane.workspace import Workspace
from tests.egress_proxy.world import LOOPBACK, ProxyThread, get
from tests.support.raw_client import dial, tunnel
from tests.support.upstream import Upstream, plain

ANTHROPIC = b'{"content":[],"usage":{"input_tokens":1200,"output_tokens":300}}'


class Place:
    """A control plane, proxies, and an upstream whose key they hold."""

    def __init__(self, folder: Path, control_plane: ControlPlane, upstream: Upstream, ca: trustme.CA) -> None:
        self.folder = folder
        self.upstream = upstream
        upstream.on("/v1", plain())
        self.workspace = Workspace(control_plane, f"acme-{secrets.token_hex(3)}")
        self.workspace.add_credential(destinations=[{"url": upstream.url, "allow_private": True}])
        self.workspace.grant()
        self.issued = self.workspace.exchange()
        create_ca(folder, now=datetime.now(UTC))
        ca.cert_pem.write_to_path(str(folder / "upstream-ca.pem"))

    @contextmanager
    def proxy(self) -> Iterator[ProxyThread]:
        """One that is ready."""
        proxy = ProxyThread(
            Settings(
                control_plane_url=self.workspace.control_plane.url,
                client_id=PROXY[0],
                client_secret_file=self.workspace.control_plane.folder / "proxy-secret",
                forward_listen=LOOPBACK,
                reverse_listen=LOOPBACK,
                admin_listen=LOOPBACK,
                ca_cert_file=self.folder / "ca.pem",
                ca_key_file=self.folder / "ca.key",
                upstream_ca_files=(self.folder / "upstream-ca.pem",),
            )
        )
        with proxy:
            for _ in range(500):
                with dial(proxy.proxy.admin_port) as line:
                    if line.ask(b"GET /readyz HTTP/1.1\r\nHost: admin\r\n\r\n").status == 200:
                        break
                threading.Event().wait(0.02)
            yield proxy

    def limit(self, measure: str, amount: int) -> str:
        body = {"measure": measure, "amount": amount, "window_seconds": 31 * 86_400}
        made = self.workspace.control_plane.made("POST", self.workspace.path("limits"), body)
        return str(made["id"])

    def given_out(self) -> int:
        (limit,) = self.workspace.control_plane.made("GET", self.workspace.path("limits"))["items"]
        return int(limit["granted"])

    def ask(self, proxy: ProxyThread, times: int, *, method: str = "GET") -> list[int]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.folder / "ca.pem")
        headers = {"Authorization": f"Bearer {self.issued['access_token']}"}
        if method == "POST":
            headers["Content-Length"] = "0"
        with tunnel(
            proxy.proxy.forward_port,
            self.upstream.authority,
            proxy_credential=self.issued["proxy_credential"],
            context=context,
        ) as line:
            return [
                line.ask(get("/v1", host=self.upstream.authority, headers=headers, method=method)).status
                for _ in range(times)
            ]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    ca = trustme.CA()
    with control_plane_in(tmp_path) as control_plane, Upstream(ca) as upstream:
        yield Place(tmp_path, control_plane, upstream, ca)


def test_two_proxies_let_through_what_a_limit_says_and_no_more(place: Place) -> None:
    place.limit("requests", 25)
    statuses: list[int] = []

    with ExitStack() as stack:
        proxies = [stack.enter_context(place.proxy()) for _ in range(2)]
        threads = [
            threading.Thread(target=lambda proxy=proxy: statuses.extend(place.ask(proxy, 12)))
            for proxy in proxies
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    assert len(statuses) == 48
    assert statuses.count(200) == len(place.upstream.requests) == 25
    assert statuses.count(429) == 23


def test_a_stopped_proxy_gives_back_what_it_did_not_use(place: Place) -> None:
    place.limit("requests", 1_000)

    with place.proxy() as proxy:
        assert place.ask(proxy, 3) == [200] * 3
        assert place.given_out() == 50

    assert place.given_out() == 3


def test_tokens_that_both_proxies_saw_count_together(place: Place) -> None:
    place.limit("tokens", 1_000_000)
    place.upstream.on("/v1", plain(ANTHROPIC))

    with place.proxy() as one, place.proxy() as other:
        place.ask(one, 2, method="POST")
        place.ask(other, 1, method="POST")

    assert place.given_out() == 3 * 1_500
