"""The programs measured, each started pinned to the proxy's core, each doing the same work: one key to one origin.

nginx forwards the key it is given (a plain reverse proxy: the floor of what forwarding costs). mitmproxy swaps a
placeholder header in an addon, and this proxy swaps as it always does; both are given a placeholder. Reverse mode is
measured with clear text on both sides, and with TLS to the origin, which is how it runs; forward mode has TLS on both.

The control plane, which only this proxy has, runs on the load's core with the lowest priority: in production it is
another machine, and it must not be what slows the load down. What the proxy does for it (audit events, batches) counts.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import trustme

from bench.load import Plan
from bench.origin import nginx_command, nginx_preamble, start_origin
from tests.support.api import Ticket
from tests.support.processes import Deployment, Proxy, Workspace, free_port, private_file, start_deployment
from tests.support.raw_client import proxy_authorization

PROXY_CORE: Final = 0
LOAD_CORE: Final = 1
CLEAR_ROUTE: Final = "clear"
TLS_ROUTE: Final = "tls"
START_SECONDS: Final = 30.0

HEADERS: Final = (
    "Accept: application/json\r\nUser-Agent: bench/1\r\nContent-Type: application/json\r\nX-Stainless-Lang: python\r\n"
    "X-Stainless-Package-Version: 1.0\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\n"
    "X-Stainless-Runtime: CPython\r\nanthropic-version: 2023-06-01\r\n"
)
"""About what an SDK sends."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `watch` are the proxy's processes."""

    name: str
    group: str
    plan: Plan
    wrk: bool = False
    """Whether wrk can drive it too: clear text, no CONNECT."""


@dataclass(frozen=True, slots=True)
class Origin:
    folder: Path
    key: str
    clear_port: int
    tls_port: int

    @property
    def ca_file(self) -> Path:
        return self.folder / "upstream-ca.pem"


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
    private_file(folder / "origin.pem", certificate.private_key_and_cert_chain_pem.bytes().decode())
    origin = Origin(folder, f"sk-{secrets.token_urlsafe(36)}", free_port(), free_port())
    process = start_origin(folder, key=origin.key, clear_port=origin.clear_port, tls_port=origin.tls_port)
    stack.callback(_end, process)
    _wait_for_ports(process, [origin.clear_port, origin.tls_port])
    pin_to_load_core(process.pid)
    return origin


def direct(origin: Origin) -> list[Row]:
    """No proxy: what the load and the origin can do together."""
    request = _request("/v1/messages", "localhost", origin.key)
    clear = Plan("127.0.0.1", origin.clear_port, request, 0, 0, 0)
    tls = Plan("127.0.0.1", origin.tls_port, request, 0, 0, 0, server_name="localhost", ca_file=str(origin.ca_file))
    return [Row("direct, clear", "reverse", clear, wrk=True), Row("direct, TLS", "forward TLS", tls)]


def nginx(stack: ExitStack, origin: Origin) -> list[Row] | None:
    """None when nginx is not installed."""
    command = nginx_command()
    if command is None:
        return None
    folder, port, to_tls_port = origin.folder, free_port(), free_port()
    configuration = private_file(folder / "nginx.conf", _nginx_reverse(origin, port, to_tls_port))
    process = subprocess.Popen([command, "-p", str(folder), "-c", str(configuration)], stderr=subprocess.DEVNULL)
    stack.callback(_end, process)
    _wait_for_ports(process, [port, to_tls_port])
    pin(process.pid, PROXY_CORE)
    plan = Plan("127.0.0.1", port, _request("/v1/messages", "localhost", origin.key), 0, 0, 0, watch_pids=[process.pid])
    return [
        Row("nginx, reverse", "reverse", plan, wrk=True),
        Row("nginx, reverse to TLS", "reverse to TLS", replace(plan, port=to_tls_port), wrk=True),
    ]


def mitmproxy(stack: ExitStack, origin: Origin) -> list[Row] | None:
    """None when mitmproxy is not installed, neither in `.venv-bench` nor on the PATH."""
    beside = Path(sys.executable).parents[2] / ".venv-bench" / "bin" / "mitmdump"
    command = str(beside) if beside.exists() else shutil.which("mitmdump")
    if command is None:
        return None
    folder, reverse_port, forward_port = origin.folder, free_port(), free_port()
    placeholder = "mitm-placeholder"
    addon = private_file(folder / "swap.py", _addon(placeholder, origin.key))
    options = {
        "confdir": folder / "mitmproxy",
        "ssl_verify_upstream_trusted_ca": origin.ca_file,
        "http2": "false",
        "flow_detail": 0,
    }
    process = subprocess.Popen(
        [command, "-q", "-s", str(addon), "--listen-host", "127.0.0.1",
         "--mode", f"reverse:http://localhost:{origin.clear_port}@{reverse_port}", "--mode", f"regular@{forward_port}",
         *(part for name, value in options.items() for part in ("--set", f"{name}={value}"))],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    stack.callback(_end, process)
    _wait_for_ports(process, [reverse_port, forward_port])
    pin(process.pid, PROXY_CORE)
    request = _request("/v1/messages", f"localhost:{origin.tls_port}", placeholder)
    reverse = Plan("127.0.0.1", reverse_port, request, 0, 0, 0, watch_pids=[process.pid])
    forward = Plan(
        "127.0.0.1", forward_port, request, 0, 0, 0, connect=_connect(origin, b""), server_name="localhost",
        ca_file=str(folder / "mitmproxy" / "mitmproxy-ca-cert.pem"), watch_pids=[process.pid],
    )  # fmt: skip
    return [
        Row("mitmproxy, reverse", "reverse", reverse, wrk=True),
        Row("mitmproxy, forward TLS", "forward TLS", forward),
    ]


def start_this_proxy(stack: ExitStack, folder: Path) -> Deployment:
    # The load leaves the control plane little time, so that events pile up as they would in an outage of minutes.
    deployment = start_deployment(folder, log_level="info", proxy_settings={"AUDIT_SPOOL_EVENTS": "4000000"})
    stack.callback(deployment.stop)
    for pid in deployment.control_plane.pids():
        pin(pid, LOAD_CORE, os.SCHED_IDLE)
    for pid in deployment.proxy.served.pids():
        pin(pid, PROXY_CORE)
    return deployment


def this_proxy(deployment: Deployment, origin: Origin) -> list[Row]:
    """Reverse mode, and forward mode with TLS on both sides."""
    workspace: Workspace = deployment.workspace()
    workspace.credential(CLEAR_ROUTE, url=f"http://localhost:{origin.clear_port}", secret=origin.key)
    workspace.credential(TLS_ROUTE, url=f"https://localhost:{origin.tls_port}", secret=origin.key)
    clear, tls = workspace.ticket(CLEAR_ROUTE), workspace.ticket(TLS_ROUTE)
    proxy, watched = deployment.proxy, deployment.proxy.served.pids()
    inside = _request("/v1/messages", f"localhost:{origin.tls_port}", tls.placeholder)
    forward = Plan(
        "127.0.0.1", proxy.forward_port, inside, 0, 0, 0,
        connect=_connect(origin, proxy_authorization(tls.proxy_credential)), server_name="localhost",
        ca_file=str(deployment.ca_file), watch_pids=watched,
    )  # fmt: skip
    return [
        Row("this proxy, reverse", "reverse", _reverse(proxy, clear, CLEAR_ROUTE, watched), wrk=True),
        Row("this proxy, reverse to TLS", "reverse to TLS", _reverse(proxy, tls, TLS_ROUTE, watched), wrk=True),
        Row("this proxy, forward TLS", "forward TLS", forward),
    ]


def _reverse(proxy: Proxy, ticket: Ticket, route: str, watched: list[int]) -> Plan:
    proof = f"Proxy-Authorization: Bearer {ticket.proxy_credential}\r\n"
    request = _request(f"/{route}/v1/messages", f"127.0.0.1:{proxy.reverse_port}", ticket.placeholder, proof)
    return Plan("127.0.0.1", proxy.reverse_port, request, 0, 0, 0, watch_pids=watched)


def _request(path: str, host: str, key: str, more: str = "") -> str:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n{more}{HEADERS}\r\n"


def _connect(origin: Origin, proof: bytes) -> str:
    authority = f"localhost:{origin.tls_port}"
    return f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{proof.decode()}\r\n"


def _nginx_reverse(origin: Origin, port: int, to_tls_port: int) -> str:
    def server(listen: int, scheme: str, at: int, more: str = "") -> str:
        return (
            f"  upstream {scheme}_origin {{ server 127.0.0.1:{at}; keepalive 256; keepalive_requests 100000000; }}\n"
            f"  server {{\n    listen 127.0.0.1:{listen};\n    location / {{\n"
            f"      proxy_pass {scheme}://{scheme}_origin;\n      proxy_http_version 1.1;\n"
            f'      proxy_set_header Connection "";\n      proxy_set_header Host localhost;\n{more}    }}\n  }}\n'
        )

    verified = (
        "      proxy_ssl_verify on;\n      proxy_ssl_name localhost;\n"
        f"      proxy_ssl_trusted_certificate {origin.ca_file};\n"
    )
    return (
        nginx_preamble(origin.folder, "nginx")
        + server(port, "http", origin.clear_port)
        + server(to_tls_port, "https", origin.tls_port, verified)
        + "}\n"
    )


def _addon(placeholder: str, key: str) -> str:
    return (
        "def request(flow):\n"
        f"    if flow.request.headers.get('authorization') == 'Bearer {placeholder}':\n"
        f"        flow.request.headers['authorization'] = 'Bearer {key}'\n"
    )


def _wait_for_ports(process: "subprocess.Popen[bytes]", ports: Sequence[int]) -> None:
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


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
