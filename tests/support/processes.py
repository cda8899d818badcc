"""The product as it runs: separate processes, started by their command, configured by their environment.

Rule: nothing is shared with the test but loopback ports and files. A process gets a clean environment, so that nothing
preset on the machine (CA variables, proxies) changes a result.
"""

import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx
import trustme

from tests.support.api import TRUSTS_NOBODY, ControlPlaneApi, RuntimeClient, Ticket
from tests.support.raw_client import Line, connected, dial, tunnel

T = TypeVar("T")

COMMAND: Final = Path(sys.executable).parent / "coatcheck"
START_SECONDS: Final = 40.0
STOP_SECONDS: Final = 15.0
KEPT_VARIABLES: Final = ("PATH", "LANG", "TMPDIR", "COVERAGE_PROCESS_START")


def clean_environment(**more: str) -> dict[str, str]:
    """What `env -i` leaves, plus what is named here."""
    return {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ} | more


def free_port() -> int:
    """A port that was free a moment ago, for the settings that must be known before a process listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class ProcessEndedError(Exception):
    """A process stopped before it listened. Carries what it wrote."""


class Served:
    """One running process of the product; `log` grows while it runs."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, cwd: Path) -> None:
        self.command = list(command)
        self.environment = dict(environment)
        self.listening: dict[str, Any] = {}
        self._lines: list[str] = []
        self._listens = threading.Event()
        self.process = subprocess.Popen(
            self.command, env=self.environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", process_group=0,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """Everything written to standard output and error so far."""
        return "".join(list(self._lines))

    def log_events(self) -> Iterator[dict[str, Any]]:
        for line in list(self._lines):
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def wait_until_listening(self) -> Self:
        """Raises `ProcessEndedError` with the log when it ends, or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while not self._listens.wait(0.05):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._reader.join(2)
                self.kill()
                raise ProcessEndedError(f"{' '.join(self.command[-3:])} did not listen:\n{self.log}")
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired`."""
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def stop(self) -> None:
        """SIGTERM; SIGKILL when that does not end it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # its own group: its workers too
            self.process.wait(STOP_SECONDS)

    def pids(self) -> list[int]:
        """Its own and its children's."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, children)]

    def open_descriptors(self) -> int:
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.pids())

    def arguments(self) -> bytes:
        """What `ps` shows of it."""
        return b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.pids())

    def shown_environment(self) -> bytes:
        return b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in self.pids())

    def sockets_in_state(self, state: str) -> int:
        """How many of its TCP sockets are in this state, in the kernel's code (`08` is CLOSE_WAIT)."""
        inodes = set()
        for pid in self.pids():
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(entry.readlink().name.removeprefix("socket:[").removesuffix("]"))
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        return sum(1 for line in lines if line.split()[3] == state and line.split()[9] in inodes)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if '"listening"' in line and not self._listens.is_set():
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
                    if found.get("event") == "listening":
                        self.listening = found
                        self._listens.set()


def private_file(path: Path, text: str) -> Path:
    """A file only its owner may read, as the product demands of secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)
    return path


@dataclass(slots=True)
class Proxy:
    """One egress proxy process."""

    served: Served

    @property
    def forward_port(self) -> int:
        return int(self.served.listening["forward_port"])

    @property
    def reverse_port(self) -> int:
        return int(self.served.listening["reverse_port"])

    @property
    def admin_port(self) -> int:
        return int(self.served.listening["admin_port"])

    def is_ready(self) -> bool:
        """What a load balancer asks before it sends anybody here."""
        url = f"http://127.0.0.1:{self.admin_port}/readyz"
        return httpx.get(url, verify=TRUSTS_NOBODY, trust_env=False).status_code == 200

    def forward_url(self, ticket: Ticket) -> str:
        """For `HTTPS_PROXY`."""
        return f"http://x:{ticket.proxy_credential}@127.0.0.1:{self.forward_port}"

    def reverse_url(self, ticket: Ticket, credential: str) -> str:
        """A base URL: the caller's proof is the first segment, the route the second."""
        return f"http://127.0.0.1:{self.reverse_port}/~{ticket.proxy_credential}/{credential}"


@dataclass(slots=True)
class Deployment:
    """A control plane and its proxies, as an operator would run them."""

    folder: Path
    control_plane: Served
    api: ControlPlaneApi
    admin_token: str
    upstream_ca: trustme.CA
    interception_ca: trustme.CA
    proxy_secret: str
    reverse_port: int
    log_level: str = "debug"
    proxies: list[Proxy] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def proxy(self) -> Proxy:
        return self.proxies[0]

    @property
    def ca_file(self) -> Path:
        """What a client of the proxy must trust."""
        return self.folder / "interception-ca.pem"

    @property
    def database_files(self) -> list[Path]:
        return sorted(self.folder.glob("control-plane.sqlite*"))

    def client_context(self) -> ssl.SSLContext:
        """Trusts the interception CA, and nothing else."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.interception_ca.configure_trust(context)
        return context

    def start_proxy(self, *, reverse_port: int = 0, **settings: str) -> Proxy:
        """One more proxy process, sharing the control plane."""
        proxy = self.start_cold_proxy(reverse_port=reverse_port, **settings)
        wait_for(proxy.is_ready, timeout_seconds=START_SECONDS)
        return proxy

    def start_cold_proxy(self, *, reverse_port: int = 0, **settings: str) -> Proxy:
        """The same, where the control plane may not answer yet."""
        served = Served(
            [str(COMMAND), "serve", "proxy"], self._proxy_environment(reverse_port, settings), cwd=self.folder
        )
        proxy = Proxy(served.wait_until_listening())
        self.proxies.append(proxy)
        return proxy

    def stop(self) -> None:
        self.api.close()
        for proxy in self.proxies:
            proxy.served.stop()
        self.control_plane.stop()

    def logs(self) -> str:
        return "\n".join([self.control_plane.log, *(proxy.served.log for proxy in self.proxies)])

    def workspace(self, name: str = "") -> "Workspace":
        """A fresh tenant with one runtime client of its own."""
        tenant = name or f"t{next(self._numbers)}-{secrets.token_hex(3)}"
        self.api.put_tenant(tenant)
        client = self.api.add_client(f"{tenant}-runtime", kind="runtime", tenant=tenant)
        return Workspace(self, tenant, client)

    def _proxy_environment(self, reverse_port: int, settings: Mapping[str, str]) -> dict[str, str]:
        own = {
            "CONTROL_PLANE_URL": self.api.url,
            "CLIENT_ID": "proxy-1",
            "CLIENT_SECRET_FILE": str(self.folder / "proxy-secret"),
            "FORWARD_LISTEN": "127.0.0.1:0",
            "REVERSE_LISTEN": f"127.0.0.1:{reverse_port}",
            "ADMIN_LISTEN": "127.0.0.1:0",
            "CA_CERT_FILE": str(self.ca_file),
            "CA_KEY_FILE": str(self.folder / "interception-ca.key"),
            "UPSTREAM_CA_FILES": str(self.folder / "upstream-ca.pem"),
            "REVERSE_PATH_CREDENTIAL": "true",
            "LOG_LEVEL": self.log_level,
        } | dict(settings)
        # One that is given empty is left out.
        return clean_environment(**{f"COATCHECK_PROXY_{name}": value for name, value in own.items() if value})


@dataclass(slots=True)
class Workspace:
    """One tenant: its credentials, and sessions of its subjects."""

    deployment: Deployment
    tenant: str
    client: RuntimeClient

    @property
    def api(self) -> ControlPlaneApi:
        return self.deployment.api

    def credential(self, name: str, *, url: str, secret: str, subject: str = "alice", **fields: Any) -> None:
        """A credential bound to one loopback destination, granted to the subject."""
        destination = {"url": url, "allow_private": True} | fields.pop("destination", {})
        self.api.add_credential(self.tenant, name, secret=secret, destinations=[destination], **fields)
        self.api.add_grant(self.tenant, name, subject=subject)

    def session(self, subject: str = "alice") -> dict[str, Any]:
        return self.api.open_session(runtime=self.client.id, tenant=self.tenant, subject=subject)

    def ticket(self, audience: str, *, subject: str = "alice", session: dict[str, Any] | None = None) -> Ticket:
        """The whole way to a placeholder: a session, its token, the exchange."""
        opened = session or self.session(subject)
        return self.api.exchange(self.client, session_token=opened["session_token"], audience=audience)

    def tunnel(self, ticket: Ticket, authority: str, **options: Any) -> Line:
        """CONNECT through the first proxy as the ticket's caller, TLS inside."""
        return tunnel(
            self.deployment.proxy.forward_port,
            authority,
            proxy_credential=ticket.proxy_credential,
            context=self.deployment.client_context(),
            **options,
        )

    def connected(self, ticket: Ticket, authority: str) -> Line:
        return connected(self.deployment.proxy.forward_port, authority, proxy_credential=ticket.proxy_credential)

    def reverse(self) -> Line:
        return dial(self.deployment.proxy.reverse_port)

    def reverse_path(self, ticket: Ticket, credential: str, path: str) -> str:
        return f"/~{ticket.proxy_credential}/{credential}{path}"


def start_control_plane(folder: Path, **settings: str) -> tuple[Served, str]:
    """`coatcheck serve control-plane` on a fresh folder; gives the process and the operator's token."""
    admin_token, proxy_secret = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    private_file(folder / "proxy-secret", proxy_secret)
    proxy_client: dict[str, Any] = {"id": "proxy-1", "kind": "egress_proxy", "tenant": None, "scopes": []}
    clients = [proxy_client | {"secret_file": str(folder / "proxy-secret")}]
    own = {
        "LISTEN": "127.0.0.1:0",
        "DATABASE_URL": f"sqlite+aiosqlite:///{folder / 'control-plane.sqlite'}",
        "KEK_FILES": str(private_file(folder / "kek.hex", secrets.token_hex(32))),
        "ADMIN_TOKEN_FILE": str(private_file(folder / "admin-token", admin_token)),
        "CLIENTS_FILE": str(private_file(folder / "clients.json", json.dumps(clients))),
        "LOG_LEVEL": "debug",
    } | settings
    # One that is given empty is left out.
    environment = clean_environment(
        **{f"COATCHECK_CONTROL_PLANE_{name}": value for name, value in own.items() if value}
    )
    served = Served([str(COMMAND), "serve", "control-plane"], environment, cwd=folder)
    return served.wait_until_listening(), admin_token


def start_deployment(
    folder: Path,
    *,
    log_level: str = "debug",
    control_plane_settings: Mapping[str, str] | None = None,
    proxy_settings: Mapping[str, str] | None = None,
) -> Deployment:
    """A control plane and one proxy, each a process of its own."""
    upstream_ca, interception_ca = trustme.CA(), trustme.CA()
    upstream_ca.cert_pem.write_to_path(str(folder / "upstream-ca.pem"))
    interception_ca.cert_pem.write_to_path(str(folder / "interception-ca.pem"))
    private_file(folder / "interception-ca.key", interception_ca.private_key_pem.bytes().decode())
    reverse_port, port = free_port(), free_port()
    control_plane, admin_token = start_control_plane(
        folder,
        LISTEN=f"127.0.0.1:{port}",
        PROXY_BASE_URL=f"http://127.0.0.1:{reverse_port}",
        LOG_LEVEL=log_level,
        **(control_plane_settings or {}),
    )
    api = ControlPlaneApi(f"http://127.0.0.1:{port}", admin_token)
    deployment = Deployment(
        folder,
        control_plane,
        api,
        admin_token,
        upstream_ca,
        interception_ca,
        (folder / "proxy-secret").read_text(),
        reverse_port,
        log_level,
    )
    try:
        deployment.start_proxy(reverse_port=reverse_port, **(proxy_settings or {}))
    except BaseException:
        deployment.stop()
        raise
    return deployment


def wait_for(fact: Callable[[], T | None], *, timeout_seconds: float = 10) -> T:
    """Wait until `fact()` is true, and give it back. Raises `TimeoutError`."""
    deadline = time.monotonic() + timeout_seconds
    while not (found := fact()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true within {timeout_seconds} s")
        time.sleep(0.02)
    return found
