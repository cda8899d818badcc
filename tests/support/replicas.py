"""The product as it runs in production: replicas of the control plane on PostgreSQL and Valkey, a proxy before each.

Rule: every part is a process of its own, and what an operator would write into its environment is all it knows.
"""

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme

from tests.control_plane.postgresql import PostgreSql, database_with_two_logins, postgresql_server
from tests.control_plane.valkey import PASSWORD, Valkey, valkey
from tests.support.api import ControlPlaneApi
from tests.support.processes import (
    Deployment,
    Proxy,
    Served,
    free_port,
    private_file,
    start_control_plane,
)


@dataclass
class Replicas:
    """`deployment` is the first replica and all the proxies; proxy n asks replica n."""

    deployment: Deployment
    others: list[Served]
    apis: list[ControlPlaneApi]
    database: PostgreSql
    hints: Valkey

    @property
    def proxies(self) -> list[Proxy]:
        return self.deployment.proxies

    @property
    def control_planes(self) -> list[Served]:
        return [self.deployment.control_plane, *self.others]

    def start_again(self, number: int) -> None:
        """The same replica, with the same environment, after it was killed."""
        old = self.control_planes[number]
        served = Served(old.command, old.environment, cwd=self.deployment.folder).wait_until_listening()
        if number == 0:
            self.deployment.control_plane = served
        else:
            self.others[number - 1] = served


@contextmanager
def replicas(folder: Path, *, number: int = 2, **proxy_settings: str) -> Iterator[Replicas]:
    with postgresql_server() as database, valkey() as hints:
        logins = asyncio.run(database_with_two_logins(database.url))
        ports, reverse_ports = [free_port() for _ in range(number)], [free_port() for _ in range(number)]
        upstream_ca, interception_ca = trustme.CA(), trustme.CA()
        upstream_ca.cert_pem.write_to_path(str(folder / "upstream-ca.pem"))
        interception_ca.cert_pem.write_to_path(str(folder / "interception-ca.pem"))
        private_file(folder / "interception-ca.key", interception_ca.private_key_pem.bytes().decode())
        first, admin_token = start_control_plane(
            folder,
            LISTEN=f"127.0.0.1:{ports[0]}",
            ISSUER_URL="https://coatcheck.example",
            PROXY_BASE_URL=f"http://127.0.0.1:{reverse_ports[0]}",
            DATABASE_URL=logins.app,
            MIGRATION_DATABASE_URL=logins.owner,
            REDIS_URL=hints.url,
            REDIS_PASSWORD_FILE=str(private_file(folder / "redis-password", PASSWORD)),
            LOG_LEVEL="info",
        )
        others = [
            Served(
                first.command,
                {**first.environment, "COATCHECK_CONTROL_PLANE_LISTEN": f"127.0.0.1:{port}"},
                cwd=folder,
            ).wait_until_listening()
            for port in ports[1:]
        ]
        apis = [ControlPlaneApi(f"http://127.0.0.1:{port}", admin_token) for port in ports]
        deployment = Deployment(
            folder,
            first,
            apis[0],
            admin_token,
            upstream_ca,
            interception_ca,
            (folder / "proxy-secret").read_text(),
            reverse_ports[0],
            "info",
        )
        made = Replicas(deployment, others, apis, database, hints)
        try:
            for api, reverse_port in zip(apis, reverse_ports, strict=True):
                deployment.start_proxy(reverse_port=reverse_port, CONTROL_PLANE_URL=api.url, **proxy_settings)
            yield made
        finally:
            for api in apis[1:]:
                api.close()
            deployment.stop()
            for served in made.others:
                served.stop()


def through(proxy: Proxy, deployment: Deployment) -> Deployment:
    """The deployment as somebody sees it who knows this proxy alone."""
    return dataclasses.replace(deployment, proxies=[proxy])
