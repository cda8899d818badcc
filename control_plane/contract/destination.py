"""Where a request goes, and where a credential may be sent.

Rule: one spelling. A host is parsed once into its canonical form, and only that form is compared, looked up and
dialled; whatever has no canonical form is an error, never "close enough". (IDNA: RFC 5890; literals: RFC 3986 §3.2.2.)
"""

import ipaddress
import operator
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Final
from urllib.parse import unquote_to_bytes

import idna
from pydantic import Field

_LABELS = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")
_ALL_NUMERIC = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*")
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}")
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
_PEM = re.compile(r"(-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]{1,16384}-----END CERTIFICATE-----\s*){1,8}")
_PATH_PREFIX = re.compile(r"/[A-Za-z0-9._~!$&'()*+,=:@/-]*")

DEFAULT_PORTS: Final = {"https": 443, "http": 80}
_MAX_DECODINGS: Final = 3


class InvalidDestinationError(ValueError):
    """Not a destination; the message says what was expected."""


@lru_cache(maxsize=4096)
def canonical_host(untrusted_host: str) -> str:
    """The one spelling of a host: lower case, IDNA, no final dot, IPv6 compressed and without brackets.

    Raises `InvalidDestinationError` for anything else: odd bytes, empty labels, decimal or octal spellings of
    addresses (`2130706433`, `0177.0.0.1`), zone ids.
    """
    host = untrusted_host
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise InvalidDestinationError("brackets hold an IPv6 address")
    if ":" in host:
        try:
            return ipaddress.IPv6Address(host if "%" not in host else "").compressed
        except ValueError:
            raise InvalidDestinationError("the host is not an IPv6 address") from None
    host = host.lower().removesuffix(".")
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True).decode("ascii")
        except idna.IDNAError:
            raise InvalidDestinationError("the host is not an internationalised domain name") from None
    if _ALL_NUMERIC.fullmatch(host):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise InvalidDestinationError("an IPv4 address is four decimal numbers without leading zeros") from None
    if not _LABELS.fullmatch(host):
        raise InvalidDestinationError("a host is letters, digits, hyphens and dots")
    return host


@lru_cache(maxsize=4096)
def is_ip_literal(host: str) -> bool:
    """Whether a canonical host is an address rather than a name."""
    return ":" in host or bool(_ALL_NUMERIC.fullmatch(host))


@lru_cache(maxsize=4096)
def authority(host: str, port: int, scheme: str) -> str:
    """`host[:port]` as a `Host` header has it: brackets for IPv6, the default port left out."""
    shown = f"[{host}]" if ":" in host else host
    return shown if DEFAULT_PORTS[scheme] == port else f"{shown}:{port}"


def split_authority(untrusted: str, *, default_port: int) -> tuple[str, int]:
    """`host[:port]` into canonical host and port. Raises `InvalidDestinationError`; userinfo is never accepted."""
    host, port_text = untrusted, ""
    if untrusted.startswith("["):
        closing = untrusted.find("]")
        host, rest = untrusted[: closing + 1], untrusted[closing + 1 :]
        if closing < 0 or (rest and not rest.startswith(":")):
            raise InvalidDestinationError("an IPv6 address stands in brackets, followed by nothing or ':port'")
        port_text = rest[1:]
        has_port = rest.startswith(":")
    else:
        host, colon, port_text = untrusted.partition(":")
        has_port = bool(colon)
    if not has_port:
        return canonical_host(host), default_port
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and 0 < int(port_text) < 65536):
        raise InvalidDestinationError("a port is a number from 1 to 65535")
    return canonical_host(host), int(port_text)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The place bytes go to: scheme, canonical host, port. What an upstream connection is opened to."""

    scheme: str
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"{self.scheme}://{authority(self.host, self.port, self.scheme)}"


Trait = Annotated[bool, Field(exclude_if=operator.not_)]
"""Left out of a message where it is false, so that contract 1 is written as it always was."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Scheme + host + port (+ path prefix, methods) that a credential may be sent to."""

    endpoint: Endpoint
    path_prefix: str = "/"
    """Matches whole segments: `/v1` covers `/v1` and `/v1/x`, not `/v10`."""
    methods: frozenset[str] | None = None
    """None: any method. An empty set is invalid, it never means "any"."""
    allow_private: bool = False
    """The operator named this destination as one that may resolve to a private or loopback address."""
    websocket: Trait = False
    """A swapped request may become a WebSocket. What its frames carry is not searched for the secret."""
    ranges: Trait = False
    """A swapped request may ask for a part of something. A secret cut into parts is not found."""
    unsearchable: Trait = False
    """Replies in a content coding pass unsearched, instead of being blocked."""
    strict: Trait = False
    """A key that is not a placeholder is refused: nobody sends anything to this place under a key of their own."""
    ca_pem: Annotated[str | None, Field(exclude_if=operator.not_)] = None
    """The certificates that alone are trusted for this destination; None: those the proxy trusts."""

    def __post_init__(self) -> None:
        if self.endpoint.scheme not in DEFAULT_PORTS:
            raise InvalidDestinationError("a destination begins with https:// or http://")
        if self.ca_pem is not None and (self.endpoint.scheme != "https" or not _PEM.fullmatch(self.ca_pem)):
            raise InvalidDestinationError("ca_pem holds PEM certificates, for a destination that begins with https://")
        check_path_prefix(self.path_prefix)
        check_methods(self.methods)

    def admits_path(self, raw_path: str) -> bool:
        return path_is_within(raw_path, self.path_prefix)

    def admits_method(self, method: str) -> bool:
        return self.methods is None or method in self.methods

    @property
    def url(self) -> str:
        return self.endpoint.url + ("" if self.path_prefix == "/" else self.path_prefix)


def check_methods(methods: frozenset[str] | None) -> None:
    """Raises `InvalidDestinationError` unless it is None (any) or a set of upper-case method names."""
    if methods is not None and (not methods or any(not _METHOD.fullmatch(method) for method in methods)):
        raise InvalidDestinationError("methods are upper-case names such as GET; leave them out to allow any")


def check_path_prefix(prefix: str) -> None:
    """Raises `InvalidDestinationError` unless it is a path that every reader understands alike."""
    if not _PATH_PREFIX.fullmatch(prefix) or not is_plain_path(prefix):
        raise InvalidDestinationError("a path prefix begins with '/' and has no '..', '//', ';', '%' or '\\'")


def parse_destination(url: str, *, methods: frozenset[str] | None = None, allow_private: bool = False) -> Destination:
    """`https://host[:port][/prefix]` into a `Destination`. Raises `InvalidDestinationError`."""
    scheme, found, rest = url.partition("://")
    scheme = scheme.lower()
    if not found or scheme not in DEFAULT_PORTS:
        raise InvalidDestinationError("a destination is https://host[:port][/prefix]")
    if any(char in rest for char in "?#@\\") or any(char <= " " for char in rest):
        raise InvalidDestinationError("a destination has no user, query, fragment or white space")
    authority_text, slash, path = rest.partition("/")
    host, port = split_authority(authority_text, default_port=DEFAULT_PORTS[scheme])
    prefix = slash + path if slash else "/"
    return Destination(Endpoint(scheme, host, port), prefix, methods, allow_private)


def is_plain_path(raw_path: str) -> bool:
    """Whether every reader agrees on the path's segments.

    False for dot segments, empty segments, backslashes, path parameters, encoded separators, control characters and
    overlong UTF-8, at any depth of percent-encoding, and for broken percent-encoding (`%u002e`): a server may normalise
    these, and then a prefix check means nothing.
    """
    if _BROKEN_ESCAPE.search(raw_path):
        return False
    decoded = raw_path.encode("latin-1", "replace")
    for _ in range(_MAX_DECODINGS):
        once_more = unquote_to_bytes(decoded)
        if once_more == decoded:
            break
        if once_more.count(b"/") != decoded.count(b"/"):
            return False
        decoded = once_more
    else:
        return False
    if b"\\" in decoded or b";" in decoded or b"//" in decoded or _CONTROL.search(decoded):
        return False
    try:
        decoded.decode("utf-8")  # RFC 3629 §3: `C0 AE` is not a dot, but there are servers that read it as one
    except UnicodeDecodeError:
        return False
    return not any(segment in (b".", b"..") for segment in decoded.split(b"/"))


def climbs(raw_path: str) -> bool:
    """Whether the path holds a dot-dot segment in any encoding: it could leave the prefix a reverse route adds."""
    if "." not in raw_path and "%" not in raw_path:
        return False
    decoded = raw_path.encode("latin-1", "replace")
    for _ in range(_MAX_DECODINGS + 1):
        if any(segment.split(b";", 1)[0] in (b".", b"..") for segment in decoded.replace(b"\\", b"/").split(b"/")):
            return True
        once_more = unquote_to_bytes(decoded)
        if once_more == decoded:
            return False
        decoded = once_more
    return True


def path_is_within(raw_path: str, prefix: str) -> bool:
    """Whether a request's raw path (no query) lies under the prefix. A prefix of `/` admits every path, as sent.

    `*` (RFC 9112 §3.2.4, of OPTIONS) is no path: it asks about a whole server, and no destination holds that.
    """
    if prefix == "/":
        return raw_path.startswith("/")
    stem = prefix.rstrip("/")
    if not is_plain_path(raw_path):
        return False
    return raw_path.startswith(stem + "/") or (raw_path == stem and not prefix.endswith("/"))


FLAGS: Final = ("websocket", "ranges", "unsearchable", "strict")


def destination_to_json(destination: Destination) -> dict[str, Any]:
    """What it has not is not named: envelopes that were sealed to it before it could have it still open."""
    flags = {name: True for name in FLAGS if getattr(destination, name)}
    own_ca = {"ca_pem": destination.ca_pem} if destination.ca_pem is not None else {}
    return {
        "url": destination.url,
        "methods": sorted(destination.methods) if destination.methods is not None else None,
        "allow_private": destination.allow_private,
        **flags,
        **own_ca,
    }


def destination_from_json(data: dict[str, Any]) -> Destination:
    """The reverse of `destination_to_json`. Raises `InvalidDestinationError`."""
    url, methods, allow_private = data.get("url"), data.get("methods"), data.get("allow_private", False)
    if not isinstance(url, str) or not isinstance(allow_private, bool):
        raise InvalidDestinationError("a destination is {url, methods?: [name, …], allow_private?: true or false}")
    if methods is not None and not (isinstance(methods, list) and all(isinstance(name, str) for name in methods)):
        raise InvalidDestinationError("methods are a list of upper-case names such as GET")
    flags = {name: data.get(name, False) for name in FLAGS}
    ca_pem = data.get("ca_pem")
    if not all(isinstance(flag, bool) for flag in flags.values()) or not isinstance(ca_pem, str | None):
        raise InvalidDestinationError(f"{', '.join(FLAGS)} are true or false, and ca_pem is text")
    names = frozenset(methods) if methods is not None else None
    return replace(parse_destination(url, methods=names, allow_private=allow_private), ca_pem=ca_pem, **flags)


@dataclass(frozen=True, slots=True)
class AllowRule:
    """A host that a tenant's workloads may reach without any credential."""

    host: str
    """Canonical."""
    port: int | None = None
    """None: 443 for https and 80 for http."""
    methods: frozenset[str] | None = None
    allow_private: bool = False
    id: str = field(default="", compare=False)
    tunnel: Trait = False
    """A CONNECT goes through unopened: what is inside is between the client and the host, and is not looked at."""

    def admits(self, endpoint: Endpoint, method: str) -> bool:
        port = self.port if self.port is not None else DEFAULT_PORTS[endpoint.scheme]
        return endpoint.host == self.host and endpoint.port == port and (self.methods is None or method in self.methods)
