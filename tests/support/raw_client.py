"""A client that sends exactly the bytes it is told to, and tells a whole reply from a cut one.

Rule: nothing is repaired. A reply counts as complete only when its framing says so (RFC 9112 §8): a missing last chunk,
a short body, a reset, or a TLS connection closed without close_notify is an incomplete message.
"""

import base64
import contextlib
import json
import socket
import ssl
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

READ_BYTES = 65536
DEFAULT_TIMEOUT_SECONDS = 10.0
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
BODYLESS = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class Response:
    """One final reply, with the interim ones before it."""

    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    """In order, names in lower case."""
    body: bytes
    complete: bool
    head: bytes
    interim: tuple[int, ...] = ()
    trailers: tuple[tuple[str, str], ...] = ()

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name.lower()]

    def header(self, name: str, default: str = "") -> str:
        return next(iter(self.values(name)), default)

    @property
    def refusal(self) -> str:
        """The refusal's code; empty when it is not the proxy's own answer."""
        return self.header("coatcheck-refusal")

    def json(self) -> Any:
        return json.loads(self.body)


class NoReplyError(Exception):
    """The connection ended, or the time ran out, before a reply's head was there."""


class Line:
    """One client connection. `received` keeps every byte that came back."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = bytearray()
        self._unread = bytearray()
        self._ended_orderly = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, data: bytes, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Response:
        """Send one request and read its reply."""
        self.send(data)
        return self.read_response(method=data.split(b" ", 1)[0].decode("latin-1"), timeout_seconds=timeout_seconds)

    def read_response(self, *, method: str = "GET", timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Response:
        """The next final reply. Raises `NoReplyError` when there is no head."""
        self.sock.settimeout(timeout_seconds)
        interim: list[int] = []
        while True:
            head = self.read_until(b"\r\n\r\n")
            status, reason, headers = _parse_head(head)
            if not 100 <= status < 200 or status == 101:
                break
            interim.append(status)
        body, trailers, complete = self._read_body(method, status, headers)
        return Response(status, reason, tuple(headers), body, complete, head, tuple(interim), tuple(trailers))

    def read_until(self, end: bytes) -> bytes:
        """Raises `NoReplyError`."""
        while (at := self._unread.find(end)) < 0:
            if not self._more():
                raise NoReplyError(f"connection ended after {len(self._unread)} bytes")
        return self._take(at + len(end))

    def read_exactly(self, count: int) -> bytes:
        """Raises `NoReplyError`."""
        while len(self._unread) < count:
            if not self._more():
                raise NoReplyError(f"connection ended after {len(self._unread)} of {count} bytes")
        return self._take(count)

    def read_to_end(self) -> bytes:
        while self._more():
            pass
        return self._take(len(self._unread))

    def is_closed_by_peer(self, *, timeout_seconds: float = 5) -> bool:
        """Whether the other end hangs up within the time."""
        self.sock.settimeout(timeout_seconds)
        try:
            while self._more():
                pass
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()

    def reset(self) -> None:
        """Hang up with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.sock.close()

    def start_tls(self, context: ssl.SSLContext, server_name: str | None) -> None:
        """Raises `ssl.SSLError`, or `OSError` when the other end hangs up."""
        self.sock.settimeout(DEFAULT_TIMEOUT_SECONDS)
        self.sock = context.wrap_socket(self.sock, server_hostname=server_name)

    def _read_body(
        self, method: str, status: int, headers: list[tuple[str, str]]
    ) -> tuple[bytes, list[tuple[str, str]], bool]:
        found = dict(headers)
        if method == "HEAD" or status in BODYLESS or status == 101 or (method == "CONNECT" and status == 200):
            return b"", [], True
        if "transfer-encoding" in found:
            return self._read_chunked()
        if "content-length" not in found:
            body = self._read_what_comes(None)
            return body, [], self._ended_orderly
        length = int(found["content-length"])
        body = self._read_what_comes(length)
        return body, [], len(body) == length

    def _read_chunked(self) -> tuple[bytes, list[tuple[str, str]], bool]:
        body = bytearray()
        trailers: list[tuple[str, str]] = []
        try:
            while size := int(self.read_until(b"\r\n").split(b";")[0], 16):
                part = self._read_what_comes(size + 2)
                body += part[:size]
                if len(part) < size + 2:
                    return bytes(body), trailers, False
            while (line := self.read_until(b"\r\n")) != b"\r\n":
                name, _, value = line.decode("latin-1").partition(":")
                trailers.append((name.lower(), value.strip()))
        except (NoReplyError, OSError):
            return bytes(body), trailers, False
        return bytes(body), trailers, True

    def _read_what_comes(self, count: int | None) -> bytes:
        with contextlib.suppress(TimeoutError):
            while count is None or len(self._unread) < count:
                if not self._more():
                    break
        return self._take(len(self._unread) if count is None else min(count, len(self._unread)))

    def _more(self) -> bool:
        try:
            data = self.sock.recv(READ_BYTES)
        except (ConnectionError, ssl.SSLError):
            return False
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            return False
        if not data:
            self._ended_orderly = True
            return False
        self.received += data
        self._unread += data
        return True

    def _take(self, count: int) -> bytes:
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken


class TunnelRefusedError(Exception):
    """CONNECT was answered with something else than 200."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"CONNECT was answered {response.status} {response.refusal}")
        self.response = response


def dial(port: int, *, host: str = "127.0.0.1") -> Line:
    sock = socket.create_connection((host, port), timeout=DEFAULT_TIMEOUT_SECONDS)
    # As every HTTP client does: else the request waits 40 ms for the handshake's last bytes to be acknowledged.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Line(sock)


def proxy_authorization(proxy_credential: str) -> bytes:
    """As clients send it that were given `http://x:<credential>@proxy` (RFC 7617)."""
    return b"Proxy-Authorization: Basic " + base64.b64encode(b"x:" + proxy_credential.encode()) + b"\r\n"


def tunnel(
    proxy_port: int,
    authority: str,
    *,
    proxy_credential: str | None,
    context: ssl.SSLContext,
    server_name: str | None = None,
) -> Line:
    """CONNECT, then TLS inside. `server_name` defaults to the authority's host. Raises `TunnelRefusedError`."""
    line = connected(proxy_port, authority, proxy_credential=proxy_credential)
    line.start_tls(context, server_name or authority.rpartition(":")[0])
    return line


def connected(proxy_port: int, authority: str, *, proxy_credential: str | None) -> Line:
    """CONNECT answered with 200, nothing sent inside yet. Raises `TunnelRefusedError`."""
    line = dial(proxy_port)
    proof = proxy_authorization(proxy_credential) if proxy_credential else b""
    response = line.ask(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n".encode() + proof + b"\r\n")
    if response.status != 200:
        line.close()
        raise TunnelRefusedError(response)
    return line


def request(
    method: str,
    target: str,
    host: str,
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    body: bytes = b"",
) -> bytes:
    """A request in bytes: `Host` first, then the headers in order, `Content-Length` only where there is a body."""
    pairs = list(headers.items()) if isinstance(headers, dict) else list(headers or [])
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in pairs)]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _parse_head(head: bytes) -> tuple[int, str, list[tuple[str, str]]]:
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    _, status, *reason = first.split(" ", 2)
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return int(status), reason[0] if reason else "", headers
