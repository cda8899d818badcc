"""The server behind every row. It answers 200 only to the real key, so each timed request proves its own swap.

nginx where it is installed (a fast origin leaves the shared core to the load generator), else a small server of our
own; which one it was stands in the result, because the two are not comparable.

Hot path of our own: no parsing beyond one `find` for the key; one request is in flight a connection. GET alone:
rows with bodies and the download need nginx.
"""

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import uvloop

from tests.support.processes import private_file

REPLY: Final = json.dumps(
    {
        "id": "msg_01XFDUDYJgAACzvnptvVoYEL",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": [
            {
                "type": "text",
                "text": "A proxy stands between a program and the service that it calls. Where the program holds the "
                "key of the service, whoever takes over the program has the key, too: it can be copied, sent away, and "
                "used from anywhere until somebody notices. Where it holds a placeholder, there is nothing to take. "
                "The proxy knows who calls, on whose behalf, and where the request goes; only when all of it agrees "
                "does it put the key in the place of the placeholder, and what comes back is searched before the "
                "program sees it. So a key is known in one place, is changed in one place, and each use of it is "
                "written down. What that costs is measured here: one more hop, and some microseconds for each request.",
            }
        ],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 2095, "output_tokens": 178},
    }
)
"""What a model's service answers, about 1 KiB: replies are searched, and that depends on what is in them."""
REPLY_IN_NGINX: Final = f"'{REPLY}'"
DOWNLOAD_PATH: Final = "/v1/download"
UPLOAD_PATH: Final = "/v1/upload"
OPEN_DOWNLOAD_PATH: Final = "/v1/open-download"
"""The same file for whoever asks: without a placeholder nothing is swapped, and nothing searched for."""


def nginx_command() -> str | None:
    """Debian installs it outside the PATH of ordinary users."""
    return shutil.which("nginx") or shutil.which("/usr/sbin/nginx")


def start_origin(folder: Path, *, key: str, clear_port: int, tls_port: int) -> "subprocess.Popen[bytes]":
    """Serve on both ports. `folder` holds `origin.pem` (chain and key)."""
    nginx = nginx_command()
    if nginx is None:
        plan = {"key": key, "clear_port": clear_port, "tls_port": tls_port, "pem": str(folder / "origin.pem")}
        command = [sys.executable, "-m", "bench.origin", str(private_file(folder / "origin.json", json.dumps(plan)))]
    else:
        configuration = _nginx_origin(folder, key=key, clear_port=clear_port, tls_port=tls_port)
        command = [nginx, "-p", str(folder), "-c", str(private_file(folder / "origin.conf", configuration))]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def nginx_preamble(folder: Path, name: str) -> str:
    """What every nginx here has: one worker in the foreground, everything it writes under `folder`."""
    paths = "".join(
        f"  {kind}_temp_path {folder}/{name}-{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        "daemon off;\nmaster_process off;\nworker_processes 1;\n"
        f"pid {folder}/{name}.pid;\nerror_log {folder}/{name}.log;\n"
        "events { worker_connections 4096; }\n"
        "http {\n  client_max_body_size 0;\n"
        f"  access_log off;\n  keepalive_requests 100000000;\n  tcp_nodelay on;\n{paths}"
    )


def _nginx_origin(folder: Path, *, key: str, clear_port: int, tls_port: int) -> str:
    refuse = f'if ($http_authorization != "Bearer {key}") {{ return 401; }}'
    return (
        nginx_preamble(folder, "origin") + f"  server {{\n    listen 127.0.0.1:{clear_port};\n"
        f"    listen 127.0.0.1:{tls_port} ssl;\n"
        f"    ssl_certificate {folder}/origin.pem;\n    ssl_certificate_key {folder}/origin.pem;\n"
        f"    sendfile on;\n    default_type application/json;\n"
        f"    location {DOWNLOAD_PATH} {{\n      {refuse}\n      alias {folder}/download;\n    }}\n"
        f"    location {OPEN_DOWNLOAD_PATH} {{\n      alias {folder}/download;\n    }}\n"
        # It answers when it has the whole body, which `return` alone would not wait for.
        f"    location {UPLOAD_PATH} {{\n      {refuse}\n      client_body_buffer_size 2m;\n"
        f"      proxy_pass http://127.0.0.1:{clear_port}/;\n      proxy_pass_request_body off;\n"
        '      proxy_set_header Content-Length "";\n    }\n'
        f"    location / {{\n      {refuse}\n      return 200 {REPLY_IN_NGINX};\n    }}\n  }}\n}}\n"
    )


# --- our own ----------------------------------------------------------------------------------------------------------

_ACCEPTED: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(REPLY) + REPLY.encode()
)
_REFUSED: Final = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"


class Answers(asyncio.Protocol):
    def __init__(self, key: bytes) -> None:
        self._expected = b": Bearer " + key + b"\r\n"
        self._pending = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
        if not data.endswith(b"\r\n\r\n"):
            self._pending = data
            return
        self._pending = b""
        self._transport.write(_ACCEPTED if self._expected in data else _REFUSED)


async def _serve(plan: dict[str, Any]) -> None:
    loop, key = asyncio.get_running_loop(), plan["key"].encode()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(plan["pem"])
    await loop.create_server(lambda: Answers(key), "127.0.0.1", plan["clear_port"], backlog=1024)
    await loop.create_server(lambda: Answers(key), "127.0.0.1", plan["tls_port"], backlog=1024, ssl=context)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(json.loads(Path(sys.argv[1]).read_text())))
