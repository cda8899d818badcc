"""The other programs: each forwards to the origin, and puts the key where a placeholder stands.

Each is configured as its own documentation says for this: upstream connections kept alive and verified, nothing logged,
streams passed on as they come, one worker. None of them knows who asks, or what for; none searches replies or records
anything. A contestant that is not installed is None.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.contestants import (
    EVENTS,
    FORWARD_TLS,
    PROXY_CORE,
    REVERSE,
    TLS,
    TO_TLS,
    Contestant,
    Origin,
    Way,
    end,
    pin,
    wait_for_ports,
)
from bench.origin import nginx_command, nginx_preamble
from bench.stream import EVENTS_PATH
from tests.support.processes import free_port, private_file

PLACEHOLDER: Final = "placeholder-of-a-peer-0123456789abcdefghijklmnopqrst"
"""About as long as one of ours."""


def nginx(stack: ExitStack, origin: Origin) -> Contestant | None:
    command = nginx_command()
    if command is None:
        return None
    folder, ports = origin.folder, {REVERSE: free_port(), TO_TLS: free_port(), TLS: free_port()}
    configuration = private_file(folder / "nginx.conf", _nginx_configuration(origin, ports))
    pid = _start(stack, [command, "-p", str(folder), "-c", str(configuration)], list(ports.values()))
    return Contestant("nginx", _ways(origin, ports, pid))


def haproxy(stack: ExitStack, origin: Origin) -> Contestant | None:
    command = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")
    if command is None:
        return None
    ports = {REVERSE: free_port(), TLS: free_port()}
    configuration = private_file(origin.folder / "haproxy.cfg", _haproxy_configuration(origin, ports))
    pid = _start(stack, [command, "-q", "-db", "-f", str(configuration)], list(ports.values()))
    return Contestant("haproxy", _ways(origin, ports, pid))


def envoy(stack: ExitStack, origin: Origin) -> Contestant | None:
    command = _of_bench_venv("envoy")
    if command is None:
        return None
    ports = {REVERSE: free_port()}
    text = json.dumps(_envoy_configuration(origin, ports[REVERSE]))
    configuration = private_file(origin.folder / "envoy.json", text)
    options = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error", "--disable-hot-restart"]
    pid = _start(stack, [command, "-c", str(configuration), *options], list(ports.values()))
    return Contestant("Envoy", _ways(origin, ports, pid))


def mitmproxy(stack: ExitStack, origin: Origin) -> Contestant | None:
    command = _of_bench_venv("mitmdump")
    if command is None:
        return None
    folder, reverse_port, forward_port = origin.folder, free_port(), free_port()
    addon = private_file(folder / "swap.py", _addon(origin.key))
    options = {
        "confdir": folder / "mitmproxy",
        "ssl_verify_upstream_trusted_ca": origin.ca_file,
        "http2": "false",
        "flow_detail": 0,
    }
    started = [
        command, "-q", "-s", str(addon), "--listen-host", "127.0.0.1",
        "--mode", f"reverse:http://localhost:{origin.clear_port}@{reverse_port}", "--mode", f"regular@{forward_port}",
        *(part for name, value in options.items() for part in ("--set", f"{name}={value}")),
    ]  # fmt: skip
    pid = _start(stack, started, [reverse_port, forward_port])
    authority = f"localhost:{origin.tls_port}"
    forward = Way(
        forward_port, PLACEHOLDER, [pid], host=authority, server_name="localhost",
        connect=f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n",
        ca_file=str(folder / "mitmproxy" / "mitmproxy-ca-cert.pem"),
    )  # fmt: skip
    return Contestant("mitmproxy", {REVERSE: Way(reverse_port, PLACEHOLDER, [pid]), FORWARD_TLS: forward})


def _start(stack: ExitStack, command: list[str], ports: Sequence[int]) -> int:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(end, process)
    wait_for_ports(process, ports)
    pin(process.pid, PROXY_CORE)
    return process.pid


def _of_bench_venv(name: str) -> str | None:
    beside = Path(sys.executable).parents[2] / ".venv-bench" / "bin" / name
    return str(beside) if beside.exists() else shutil.which(name)


def _ways(origin: Origin, ports: dict[str, int], pid: int) -> dict[str, Way]:
    ways = {name: Way(port, PLACEHOLDER, [pid]) for name, port in ports.items()}
    if TLS in ports:
        ca_file = str(origin.ca_file)
        ways[TLS] = Way(ports[TLS], PLACEHOLDER, [pid], server_name="localhost", ca_file=ca_file)
    return ways | {EVENTS: ways[REVERSE]}


# --- configurations ---------------------------------------------------------------------------------------------------


def _nginx_configuration(origin: Origin, ports: dict[str, int]) -> str:
    upstreams = "".join(
        f"  upstream {name} {{ server 127.0.0.1:{port}; keepalive 512; keepalive_requests 100000000; }}\n"
        for name, port in (("clear", origin.clear_port), ("tls", origin.tls_port), ("events", origin.events_port))
    )
    always = (
        '    proxy_http_version 1.1;\n    proxy_set_header Connection "";\n    proxy_set_header Host localhost;\n'
        "    proxy_set_header Authorization $swapped;\n    proxy_request_buffering off;\n"
        "    proxy_max_temp_file_size 0;\n"
    )
    verified = (
        "    proxy_ssl_verify on;\n    proxy_ssl_name localhost;\n    proxy_ssl_session_reuse on;\n"
        f"    proxy_ssl_trusted_certificate {origin.ca_file};\n"
    )
    certificate = f"    ssl_certificate {origin.pem_file};\n    ssl_certificate_key {origin.pem_file};\n"

    def server(listen: str, more: str, to: str) -> str:
        return (
            f"  server {{\n    listen 127.0.0.1:{listen};\n{always}{more}"
            f"    location {EVENTS_PATH} {{ proxy_pass http://events; proxy_buffering off; }}\n"
            f"    location / {{ proxy_pass {to}; }}\n  }}\n"
        )

    return (
        nginx_preamble(origin.folder, "nginx")
        + "  map_hash_bucket_size 256;\n"
        + f'  map $http_authorization $swapped {{ "Bearer {PLACEHOLDER}" "Bearer {origin.key}"; }}\n'
        + upstreams
        + server(f"{ports[REVERSE]}", "", "http://clear")
        + server(f"{ports[TO_TLS]}", verified, "https://tls")
        + server(f"{ports[TLS]} ssl", verified + certificate, "https://tls")
        + "}\n"
    )


def _haproxy_configuration(origin: Origin, ports: dict[str, int]) -> str:
    verified = f"ssl verify required ca-file {origin.ca_file} sni str(localhost) verifyhost localhost"
    swap = (
        f'  http-request set-header Authorization "Bearer {origin.key}" '
        f'if {{ req.hdr(authorization) "Bearer {PLACEHOLDER}" }}\n'
    )
    return (
        "global\n  nbthread 1\n  maxconn 4096\n  ssl-server-verify required\n"
        # Without http-no-delay a stream's events wait for the client's acknowledgement.
        "defaults\n  mode http\n  option http-no-delay\n  option http-keep-alive\n  http-reuse always\n"
        "  timeout connect 5s\n  timeout client 120s\n  timeout server 120s\n  timeout http-keep-alive 120s\n"
        f"frontend clear\n  bind 127.0.0.1:{ports[REVERSE]}\n{swap}"
        f"  use_backend events if {{ path_beg {EVENTS_PATH} }}\n  default_backend clear\n"
        f"frontend tls\n  bind 127.0.0.1:{ports[TLS]} ssl crt {origin.pem_file}\n{swap}  default_backend tls\n"
        f"backend clear\n  server origin 127.0.0.1:{origin.clear_port}\n"
        f"backend tls\n  server origin 127.0.0.1:{origin.tls_port} {verified}\n"
        f"backend events\n  server origin 127.0.0.1:{origin.events_port}\n"
    )


def _envoy_configuration(origin: Origin, port: int) -> dict[str, Any]:
    lua = (
        "function envoy_on_request(handle)\n"
        "  local headers = handle:headers()\n"
        f'  if headers:get("authorization") == "Bearer {PLACEHOLDER}" then\n'
        f'    headers:replace("authorization", "Bearer {origin.key}")\n'
        "  end\n"
        "end\n"
    )
    types = "type.googleapis.com/envoy.extensions.filters"
    filters = [
        {
            "name": "envoy.filters.http.lua",
            "typed_config": {"@type": f"{types}.http.lua.v3.Lua", "default_source_code": {"inline_string": lua}},
        },
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": f"{types}.http.router.v3.Router", "suppress_envoy_headers": True},
        },
    ]
    routes = [
        {"match": {"prefix": EVENTS_PATH}, "route": {"cluster": "events", "timeout": "0s"}},
        {"match": {"prefix": "/"}, "route": {"cluster": "clear", "timeout": "0s"}},
    ]
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "generate_request_id": False,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": filters,
    }
    connection_manager = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    listener = {
        "address": _envoy_address(port),
        "filter_chains": [{"filters": [connection_manager]}],
    }
    clusters = [_envoy_cluster("clear", origin.clear_port), _envoy_cluster("events", origin.events_port)]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _envoy_address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _envoy_cluster(name: str, port: int) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _envoy_address(port)}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _addon(key: str) -> str:
    return (
        "def request(flow):\n"
        f"    if flow.request.headers.get('authorization') == 'Bearer {PLACEHOLDER}':\n"
        f"        flow.request.headers['authorization'] = 'Bearer {key}'\n"
    )
