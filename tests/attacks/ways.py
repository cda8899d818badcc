"""One way through a proxy: a listener, a placement, a placeholder that is good there; and the origin at its end.

An attack is written once, against a `Way`, and runs over all of them. It sends raw bytes, and judges by raw bytes: what
came back to the client, and what the origin received.
"""

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tests.support.raw_client import Line
from tests.support.upstream import Request, Upstream

USER: Final = "x-access-token"
PARAMETER: Final = "key"
HEADER: Final = "X-Api-Key"


class Listener(StrEnum):
    """How a request gets into the proxy."""

    ABSOLUTE = "forward, http"
    """A request in absolute-form to the forward listener; a clear origin."""
    TUNNEL = "forward, TLS"
    """TLS inside a CONNECT, intercepted; an origin behind TLS."""
    REVERSE = "reverse"
    """A base URL of the proxy's own; an origin behind TLS."""


class Place(StrEnum):
    """Where the placeholder stands."""

    BEARER = "bearer"
    HEADER = "header"
    BASIC = "basic"
    QUERY = "query"
    PATH = "path"


@dataclass(frozen=True, slots=True)
class Way:
    """See the module."""

    listener: Listener
    place: Place
    placeholder: str
    secret: str
    origin: Upstream
    other_origin: Upstream
    """One that this placeholder is not good for."""
    dial: Callable[[], Line]
    """A bare connection to the listener."""
    enter: Callable[[Line, str, tuple[str, ...], str | None], Line]
    """CONNECT to that authority with these header lines, then TLS to that name; returns the line. Tunnels alone."""
    prefix: str
    """What stands before the path in the request's target."""
    host: str
    other_prefix: str
    """The same for the other origin, of the same caller."""
    proof: tuple[str, ...]
    """The header lines that prove the caller."""
    stranger: tuple[str, ...] = ()
    """The same of another tenant's caller; empty: this proxy has none."""
    dead: dict[str, str] = field(default_factory=dict)
    """Placeholders that are good no more (expired, revoked) or never were, by what they are."""
    own_ports: tuple[int, ...] = ()
    """The proxy's own listeners."""
    fresh: "Callable[[], Way] | None" = None
    """The same with another placeholder, for proxies that suspend one whose key keeps coming back."""

    @property
    def is_tunnel(self) -> bool:
        return self.listener is Listener.TUNNEL

    def open(self) -> Line:
        """A connection on which a request may be sent."""
        line = self.dial()
        return self.enter(line, self.origin.authority, self.proof, None) if self.is_tunnel else line

    def renewed(self) -> "Way":
        return self.fresh() if self.fresh is not None else self

    # --- requests in bytes --------------------------------------------------------------------------------------------

    def target(self, path: str = "/x", placeholder: str | None = None) -> str:
        placeholder = self.placeholder if placeholder is None else placeholder
        match self.place:
            case Place.QUERY if placeholder:
                path += ("&" if "?" in path else "?") + f"{PARAMETER}={placeholder}"
            case Place.PATH if placeholder:
                path = f"/{placeholder}{path}"
        return self.prefix + path

    def slot(self, placeholder: str | None = None) -> tuple[str, ...]:
        """The header line that the placeholder stands in, if it stands in one."""
        placeholder = self.placeholder if placeholder is None else placeholder
        match self.place:
            case _ if not placeholder:
                return ()
            case Place.BEARER:
                return (f"Authorization: Bearer {placeholder}",)
            case Place.HEADER:
                return (f"{HEADER}: {placeholder}",)
            case Place.BASIC:
                return ("Authorization: Basic " + base64.b64encode(f"{USER}:{placeholder}".encode()).decode(),)
        return ()

    def lines(self, *more: str, placeholder: str | None = None, host: str | None = None) -> list[str]:
        """Header lines of a request that may go: host, proof, placeholder, and these."""
        proof = () if self.is_tunnel else self.proof
        return [f"Host: {self.host if host is None else host}", *proof, *self.slot(placeholder), *more]

    def request(
        self,
        *more: str,
        path: str = "/x",
        method: str = "GET",
        placeholder: str | None = None,
        host: str | None = None,
        body: bytes = b"",
    ) -> bytes:
        if body:
            more = (*more, f"Content-Length: {len(body)}")
        lines = self.lines(*more, placeholder=placeholder, host=host)
        return head(f"{method} {self.target(path, placeholder)} HTTP/1.1", *lines) + body

    def has_the_secret(self, request: Request) -> bool:
        """Whether the origin got the key, in its place."""
        match self.place:
            case Place.BEARER:
                return request.values("authorization") == [f"Bearer {self.secret}"]
            case Place.HEADER:
                return request.values(HEADER) == [self.secret]
            case Place.BASIC:
                sent = base64.b64encode(f"{USER}:{self.secret}".encode()).decode()
                return request.values("authorization") == [f"Basic {sent}"]
            case Place.QUERY:
                return f"{PARAMETER}={self.secret}" in request.query.split("&")
            case Place.PATH:
                return self.secret in request.path.split("/")


def head(line: str, *lines: str) -> bytes:
    return "\r\n".join([line, *lines, "", ""]).encode("latin-1")


class Seen:
    """What an origin gets from now on."""

    def __init__(self, origin: Upstream) -> None:
        self._origin = origin
        self._requests = len(origin.requests)
        self._bytes = {id(each): len(each.received) for each in origin.connections}

    @property
    def requests(self) -> list[Request]:
        return list(self._origin.requests)[self._requests :]

    @property
    def bytes(self) -> bytes:
        return b"\n----\n".join(
            bytes(each.received[self._bytes.get(id(each), 0) :]) for each in list(self._origin.connections)
        )


def forms(secret: str) -> Iterable[bytes]:
    """A key as somebody might write it down. (A second implementation, on purpose: the first is what is judged.)"""
    raw = secret.encode()
    yield raw
    yield "".join(f"%{byte:02X}" for byte in raw).encode()
    yield "".join(f"\\u{byte:04x}" for byte in raw).encode()
    for offset in range(3):
        text = base64.b64encode(b"x" * offset + raw)
        inner = text[4 if offset else 0 : -4]
        yield inner
        yield inner.replace(b"+", b"-").replace(b"/", b"_")
