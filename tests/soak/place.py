"""The processes of a soak: proxies and control planes as an operator runs them, on either kind of storage."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import trustme

from tests.control_plane.valkey import Valkey
from tests.support.api import TRUSTS_NOBODY, ControlPlaneApi
from tests.support.processes import Deployment, Proxy, Served, start_deployment
from tests.support.replicas import Replicas, replicas

QUICK = {"UPSTREAM_IDLE_SECONDS": "3", "IDLE_TIMEOUT_SECONDS": "20", "LOG_LEVEL": "info"}
"""So that what idles is gone soon after the clients are."""


@dataclass
class Place:
    deployment: Deployment
    made: Replicas | None
    """None: one control plane on SQLite."""
    new_ca: trustme.CA = field(default_factory=trustme.CA)
    """An interception CA to change to."""

    @property
    def proxies(self) -> list[Proxy]:
        return self.deployment.proxies

    @property
    def hints(self) -> Valkey | None:
        return self.made.hints if self.made is not None else None

    @property
    def control_planes(self) -> list[Served]:
        return self.made.control_planes if self.made is not None else [self.deployment.control_plane]

    @property
    def apis(self) -> list[ControlPlaneApi]:
        return self.made.apis if self.made is not None else [self.deployment.api]

    def start_again(self, number: int) -> None:
        if self.made is not None:
            self.made.start_again(number)
            return
        old = self.deployment.control_plane
        self.deployment.control_plane = Served(old.command, old.environment, cwd=self.deployment.folder)
        self.deployment.control_plane.wait_until_listening()

    def proxy_metrics(self, proxy: Proxy) -> dict[str, float]:
        url = f"http://127.0.0.1:{proxy.admin_port}/metrics"
        return _samples(httpx.get(url, verify=TRUSTS_NOBODY, trust_env=False, timeout=20).text)

    def control_plane_metrics(self, number: int) -> dict[str, float]:
        headers = {"Authorization": f"Bearer {self.deployment.admin_token}"}
        url = f"{self.apis[number].url}/v1/metrics"
        return _samples(httpx.get(url, headers=headers, verify=TRUSTS_NOBODY, trust_env=False, timeout=20).text)


def _samples(text: str) -> dict[str, float]:
    rows = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


@contextmanager
def place_in(folder: Path, *, embedded: bool) -> Iterator[Place]:
    if embedded:
        deployment = start_deployment(folder, log_level="info", proxy_settings=QUICK)
        try:
            yield Place(deployment, None)
        finally:
            deployment.stop()
        return
    with replicas(folder, number=2, **QUICK) as made:
        yield Place(made.deployment, made)
