"""What is measured, and this proxy as one of it. Each contestant is started pinned to the proxy's core.

Rule: all do the same work. Each is given a placeholder and swaps it for the same key to the same origin (`peers`: nginx
by a map, haproxy by a rule, Envoy in Lua, mitmproxy by an addon), each with one process or thread, each with its
upstream connections kept and its upstream's certificate verified.

The control plane, which only this proxy has, runs on the load's core with the lowest priority: in production it is
another machine, and it must not be what slows the load down. What the proxy does for it (audit events, batches) counts.
"""

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import trustme

from bench.load import Plan
from bench.origin import start_origin
from bench.stream import start_events
from tests.support.api import Ticket
from tests.support.processes import Deployment, Proxy, Workspace, free_port, private_file, start_deployment
from tests.support.raw_client import proxy_authorization

PROXY_CORE: Final = 0
LOAD_CORE: Final = 1
START_SECONDS: Final = 30.0
SPOOL_EVENTS: Final = "4000000"
"""The load leaves the control plane little time, so that events pile up as they would in an outage of minutes."""

REVERSE: Final = "reverse"
TO_TLS: Final = "reverse to TLS"
TLS: Final = "TLS"
FORWARD_TLS: Final = "forward TLS"
EVENTS: Final = "events"

HEADERS: Final = (
    "Accept: application/json\r\nUser-Agent: bench/1\r\nContent-Type: application/json\r\nX-Stainless-Lang: python\r\n"
    "X-Stainless-Package-Version: 1.0\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\n"
    "X-Stainless-Runtime: CPython\r\nanthropic-version: 2023-06-01\r\n"
)
"""About what an SDK sends; eleven fields with `Host` and `Authorization`."""
POST_HEADERS: Final = (
    "Accept-Encoding: gzip, deflate\r\nX-Stainless-Runtime-Version: 3.11.7\r\nX-Stainless-Async: false\r\n"
    "X-Stainless-Retry-Count: 0\r\nX-Stainless-Read-Timeout: 600\r\n"
)
"""With these and `Content-Length` they are seventeen."""
MESSAGES_PATH: Final = "/v1/messages"


@dataclass(frozen=True, slots=True)
class Way:
    """One way through a contestant."""

    port: int
    key: str
    """What stands in `Authorization`: a placeholder, or the key itself where there is no proxy."""
    watch_pids: list[int] = field(default_factory=list)
    prefix: str = ""
    host: str = "localhost"
    proof: str = ""
    """One more header line."""
    connect: str | None = None
    server_name: str | None = None
    ca_file: str | None = None

    @property
    def is_clear(self) -> bool:
        return self.server_name is None

    def get(self, path: str = MESSAGES_PATH, *, more: str = "", is_bare: bool = False) -> Plan:
        """`is_bare`: without a placeholder."""
        return self._plan("GET", path, f"{HEADERS}{more}", 0, is_bare=is_bare)

    def post(self, body_bytes: int, *, path: str = MESSAGES_PATH) -> Plan:
        fields = f"{HEADERS}{POST_HEADERS}Content-Length: {body_bytes}\r\n"
        return self._plan("POST", path, fields, body_bytes)

    def _plan(self, method: str, path: str, fields: str, body_bytes: int, *, is_bare: bool = False) -> Plan:
        authorization = "" if is_bare else f"Authorization: Bearer {self.key}\r\n"
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}\r\n{authorization}{self.proof}{fields}\r\n"
        return Plan(
            "127.0.0.1", self.port, head, body_bytes, connect=self.connect, server_name=self.server_name,
            ca_file=self.ca_file, watch_pids=self.watch_pids,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    ways: dict[str, Way]
    """By the names above."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    group: str
    plan: Plan
    wrk: bool = False
    """Whether wrk can drive it too: clear text, no CONNECT, no body."""


@dataclass(frozen=True, slots=True)
class Origin:
    folder: Path
    key: str
    clear_port: int
    tls_port: int
    events_port: int

    @property
    def ca_file(self) -> Path:
        return self.folder / "upstream-ca.pem"

    @property
    def pem_file(self) -> Path:
        """A certificate for localhost, and its key: the origin's, and that of the contestants' TLS listeners."""
        return self.folder / "origin.pem"


def pin(pid: int, core: int, policy: int = os.SCHED_OTHER) -> None:
    """Every thread of a process, and every thread it will start."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
        os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


def pin_to_load_core(pid: int) -> None:
    """Load and origin take turns (SCHED_BATCH, sched(7)).

    Where each write of the proxy let one interrupt the other, an interrupt between the cores would be part of every
    write: a third of the proxy's time, which it would not spend with its peers on other machines.
    """
    pin(pid, LOAD_CORE, os.SCHED_BATCH)


def open_origin(stack: ExitStack, folder: Path, ca: trustme.CA) -> Origin:
    certificate = ca.issue_cert("localhost", "127.0.0.1")
    key = f"sk-{secrets.token_urlsafe(36)}"
    origin = Origin(folder, key, free_port(), free_port(), free_port())
    private_file(origin.pem_file, certificate.private_key_and_cert_chain_pem.bytes().decode())
    process = start_origin(folder, key=key, clear_port=origin.clear_port, tls_port=origin.tls_port)
    events = start_events(key=key, port=origin.events_port)
    for started in (process, events):
        stack.callback(end, started)
    wait_for_ports(process, [origin.clear_port, origin.tls_port])
    wait_for_ports(events, [origin.events_port])
    pin_to_load_core(process.pid)
    pin(events.pid, LOAD_CORE)
    return origin


def direct(origin: Origin) -> Contestant:
    """No proxy: what the load and the origin can do together."""
    name, ca_file = "localhost", str(origin.ca_file)
    return Contestant(
        "direct",
        {
            REVERSE: Way(origin.clear_port, origin.key),
            FORWARD_TLS: Way(origin.tls_port, origin.key, server_name=name, ca_file=ca_file),
            EVENTS: Way(origin.events_port, origin.key),
        },
    )


def start_control_plane(stack: ExitStack, folder: Path) -> Deployment:
    """With one proxy, for what needs no more than clear listeners."""
    deployment = start_deployment(folder, log_level="info", proxy_settings={"AUDIT_SPOOL_EVENTS": SPOOL_EVENTS})
    stack.callback(deployment.stop)
    pin_control_plane(deployment, os.SCHED_OTHER)
    for pid in deployment.proxy.served.pids():
        pin(pid, PROXY_CORE)
    return deployment


def pin_control_plane(deployment: Deployment, policy: int) -> None:
    """SCHED_IDLE while something is timed; it must get its turn where a proxy asks it for the first time."""
    for pid in deployment.control_plane.pids():
        pin(pid, LOAD_CORE, policy)


def start_proxy(deployment: Deployment, origin: Origin, *, workers: str = "1", is_tls: bool = False) -> Proxy:
    """One more. `is_tls`: its listeners speak TLS."""
    pem = str(origin.pem_file) if is_tls else ""
    proxy = deployment.start_proxy(
        WORKERS=workers, LISTENER_TLS_CERT_FILE=pem, LISTENER_TLS_KEY_FILE=pem, AUDIT_SPOOL_EVENTS=SPOOL_EVENTS
    )
    for pid in proxy.served.pids():
        pin(pid, PROXY_CORE)
    return proxy


def this_proxy(deployment: Deployment, origin: Origin) -> Contestant:
    """One process for clear listeners, forward mode's among them; one whose reverse listener speaks TLS."""
    workspace = deployment.workspace()
    clear, to_tls, events = (
        granted(workspace, name, url, origin)
        for name, url in (
            ("clear", f"http://localhost:{origin.clear_port}"),
            ("tls", f"https://localhost:{origin.tls_port}"),
            ("events", f"http://localhost:{origin.events_port}"),
        )
    )
    proxy, tls_proxy = deployment.proxy, start_proxy(deployment, origin, is_tls=True)
    authority = f"localhost:{origin.tls_port}"
    proof = proxy_authorization(to_tls.proxy_credential).decode()
    forward = Way(
        proxy.forward_port, to_tls.placeholder, proxy.served.pids(), host=authority, server_name="localhost",
        connect=f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{proof}\r\n", ca_file=str(deployment.ca_file),
    )  # fmt: skip
    return Contestant(
        "this proxy",
        {
            REVERSE: reverse_way(proxy, clear, "clear"),
            TO_TLS: reverse_way(proxy, to_tls, "tls"),
            TLS: reverse_way(tls_proxy, to_tls, "tls", ca_file=origin.ca_file),
            FORWARD_TLS: forward,
            EVENTS: reverse_way(proxy, events, "events"),
        },
    )


def through(proxy: Proxy, way: Way) -> Way:
    """The same through another process of this proxy."""
    port = proxy.forward_port if way.connect is not None else proxy.reverse_port
    return replace(way, port=port, watch_pids=proxy.served.pids())


def granted(workspace: Workspace, name: str, url: str, origin: Origin) -> Ticket:
    """The key as a credential for this URL, and a placeholder of it."""
    workspace.credential(name, url=url, secret=origin.key)
    return workspace.ticket(name)


def reverse_way(proxy: Proxy, ticket: Ticket, route: str, *, ca_file: Path | None = None) -> Way:
    return Way(
        proxy.reverse_port, ticket.placeholder, proxy.served.pids(), prefix=f"/{route}",
        proof=f"Proxy-Authorization: Bearer {ticket.proxy_credential}\r\n",
        server_name="localhost" if ca_file else None, ca_file=str(ca_file) if ca_file else None,
    )  # fmt: skip


def wait_for_ports(process: "subprocess.Popen[bytes]", ports: Sequence[int]) -> None:
    deadline = time.monotonic() + START_SECONDS
    for port in ports:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{process.args!r} does not listen on {port}") from None
                time.sleep(0.05)


def end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
