"""A Vault to test against, over real TLS: KV 1 and 2, transit, three ways to log in, namespaces, sealing.

Rule: answers are those that the API's documentation shows, error bodies included. It keeps what it was asked.
https://developer.hashicorp.com/vault/api-docs
"""

import base64
import json
import os
import secrets
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import trustme
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Json = dict[str, Any]


@dataclass
class FakeVault:
    port: int = 0
    kv2: dict[str, Json | None] = field(default_factory=dict)
    """Path (with mount and namespace: `ns/secret/acme/key`) to its fields; None: deleted."""
    kv1: dict[str, Json] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    """Token to the path prefix that its policy allows."""
    kubernetes_roles: dict[str, str] = field(default_factory=dict)
    """Role to the service account token that may log in as it."""
    approles: dict[str, str] = field(default_factory=dict)
    transit: dict[str, list[bytes]] = field(default_factory=dict)
    """Key to its versions, oldest first."""
    sealed: bool = False
    answer_instead: tuple[int, bytes, str] | None = None
    lease_seconds: int = 3600
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def logins(self) -> int:
        return sum(path.endswith("/login") for _, path in self.asked)

    def issue_token(self, prefix: str = "") -> str:
        token = "hvs." + secrets.token_urlsafe(24)
        self.tokens[token] = prefix
        return token

    def answer(self, method: str, path: str, headers: Any, body: Json) -> tuple[int, Json | None]:
        if self.sealed:
            return 503, {"errors": ["Vault is sealed"]}
        namespace = (headers.get("X-Vault-Namespace") or "").strip("/")
        parts = path.removeprefix("/v1/").split("/")
        if parts[0] == "auth" and parts[-1] == "login":
            return self._login(parts[1:-1], body)
        place = "/".join(part for part in (namespace, *parts) if part)
        allowed = self.tokens.get(headers.get("X-Vault-Token") or "")
        if allowed is None or not place.startswith(allowed):
            return 403, {"errors": ["permission denied"]}
        if "transit" in parts[0]:
            return self._transit(parts[1], parts[2], body)
        if len(parts) > 2 and parts[1] == "data":
            return self._kv2("/".join(part for part in (namespace, parts[0], *parts[2:]) if part))
        fields = self.kv1.get(place)
        if fields is None:
            return 404, {"errors": []}
        return 200, {"request_id": "1", "lease_duration": 2764800, "renewable": False, "data": fields, "auth": None}

    def _kv2(self, place: str) -> tuple[int, Json]:
        if place not in self.kv2:
            return 404, {"errors": []}
        fields = self.kv2[place]
        metadata = {
            "created_time": "2026-01-01T00:00:00.0Z",
            "custom_metadata": None,
            "deletion_time": "" if fields is not None else "2026-01-02T00:00:00.0Z",
            "destroyed": False,
            "version": 2,
        }
        return 404 if fields is None else 200, {"request_id": "1", "data": {"data": fields, "metadata": metadata}}

    def _login(self, mount: list[str], body: Json) -> tuple[int, Json]:
        if mount[-1] == "kubernetes":
            if body.get("role") not in self.kubernetes_roles:
                return 400, {"errors": [f'invalid role name "{body.get("role")}"']}
            if self.kubernetes_roles[body["role"]] != body.get("jwt"):
                return 403, {"errors": ["permission denied"]}
        elif self.approles.get(str(body.get("role_id"))) != body.get("secret_id"):
            return 400, {"errors": ["invalid role or secret ID"]}
        token = self.issue_token()
        auth = {"client_token": token, "lease_duration": self.lease_seconds, "renewable": True, "policies": ["default"]}
        return 200, {"request_id": "1", "data": None, "auth": auth}

    def _transit(self, verb: str, key: str, body: Json) -> tuple[int, Json]:
        versions = self.transit.get(key)
        if versions is None:
            return 400, {"errors": ["encryption key not found"]}
        context = base64.b64decode(body.get("associated_data") or "")
        if verb == "encrypt":
            nonce = os.urandom(12)
            sealed = nonce + AESGCM(versions[-1]).encrypt(nonce, base64.b64decode(body["plaintext"]), context)
            ciphertext = f"vault:v{len(versions)}:{base64.b64encode(sealed).decode()}"
            return 200, {"data": {"ciphertext": ciphertext, "key_version": len(versions)}}
        try:
            _, number, encoded = str(body["ciphertext"]).split(":")
            sealed = base64.b64decode(encoded, validate=True)
            opened = AESGCM(versions[int(number[1:]) - 1]).decrypt(sealed[:12], sealed[12:], context)
        except (ValueError, IndexError):
            return 400, {"errors": ["invalid ciphertext"]}
        except InvalidTag:
            return 400, {"errors": ["cipher: message authentication failed"]}
        return 200, {"data": {"plaintext": base64.b64encode(opened).decode()}}


@contextmanager
def serving_vault(ca: trustme.CA) -> Iterator[FakeVault]:
    vault = FakeVault()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            vault.asked.append((self.command, self.path))
            if vault.answer_instead is not None:
                status, raw, media_type = vault.answer_instead
            else:
                status, answer = vault.answer(self.command, self.path.partition("?")[0], self.headers, body)
                raw, media_type = json.dumps(answer).encode(), "application/json"
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_PUT = do_GET  # noqa: N815 (the names that the server looks for)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: its lines would stand among those of the tests."""

    with tls_server(Handler, ca) as port:
        vault.port = port
        yield vault


@contextmanager
def tls_server(handler: type[BaseHTTPRequestHandler], ca: trustme.CA) -> Iterator[int]:
    """The port on 127.0.0.1 that it serves at."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1", "localhost").configure_cert(context)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients go away in tests."""

        def finish_request(self, request: Any, client_address: Any) -> None:
            # The handshake belongs to the connection's own thread.
            super().finish_request(context.wrap_socket(request, server_side=True), client_address)

    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
