"""Placeholders: shape, marker and keyed tag. Mint, parse, find.

    <shape prefix> coatchk1 <padding> <22 characters of randomness> <6 characters of tag>

All base62 after the marker.

The tag is a truncated HMAC-SHA-256 over everything before it. It lets a proxy refuse a forgery without a look-up;
whether a placeholder is alive, and for whom, only the store knows. Proxy credentials have the same grammar with the
marker `coatprx1`, so that one finder sees both.

Rule: only `fingerprint()` of a placeholder is ever stored or logged.
"""

import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

BASE62: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
RANDOM_LENGTH: Final = 22  # 131 bits
TAG_LENGTH: Final = 6
MIN_BODY: Final = RANDOM_LENGTH + TAG_LENGTH
MAX_BODY: Final = 120
MAX_PREFIX: Final = 24
ENTROPY_BYTES: Final = 24
"""What `mint` wants: comfortably more than the 131 bits it keeps."""

DETECTOR: Final = r"coatchk1[0-9A-Za-z]{28,120}"
"""For secret scanners."""


class TokenKind(StrEnum):
    """What a marker says it is. The value is the marker."""

    PLACEHOLDER = "coatchk1"
    PROXY_CREDENTIAL = "coatprx1"


MARKER_LENGTH: Final = 8
_ANY_MARKER = re.compile(rb"coat(?:chk|prx)1", re.IGNORECASE)
_PLACEHOLDER_MARKER = TokenKind.PLACEHOLDER.value.encode()
_PROXY_MARKER = TokenKind.PROXY_CREDENTIAL.value.encode()
_BODY = re.compile(rb"[0-9A-Za-z]{0,121}")  # one more than a placeholder has: enough to tell that it is none
_PREFIX_RUN = re.compile(rb"[A-Za-z0-9_-]*\Z")
_PREFIX = re.compile(r"[A-Za-z0-9_-]{0,24}")
_GRAMMAR = re.compile(r"([A-Za-z0-9_-]{0,24}?)(coatchk1|coatprx1)([0-9A-Za-z]{28,120})")


@dataclass(frozen=True, slots=True)
class Shape:
    """How a provider's keys look, so that SDKs and scanners take a placeholder for one.

    `length` is an exact total length in characters, promised only where an SDK checks it.
    """

    prefix: str = "coat_"
    length: int | None = None

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix) or _ANY_MARKER.search(self.prefix.encode()):
            raise ValueError("a shape prefix is at most 24 letters, digits, '_' and '-'")
        if self.length is not None and not 0 <= self.padding <= MAX_BODY - MIN_BODY:
            raise ValueError("no placeholder of this shape has that length")

    @property
    def padding(self) -> int:
        return 0 if self.length is None else self.length - len(self.prefix) - MARKER_LENGTH - MIN_BODY


@dataclass(frozen=True, slots=True)
class GenuineToken:
    """A string whose tag was verified: minted by us, though perhaps expired, revoked or stolen."""

    text: str
    kind: TokenKind
    fingerprint: str
    """SHA-256 in hex: the form in which it is looked up, stored and logged."""

    @property
    def prefix(self) -> str:
        """What its provider's keys begin with, too."""
        return self.text[: self.text.index(self.kind.value)]

    def __repr__(self) -> str:
        return f"GenuineToken({self.kind.name}, sha256={self.fingerprint[:12]}…)"


class ForgedTokenError(ValueError):
    """Has a marker, but is not what we minted: cut, altered, in another case, or with a tag of no known key."""


def mint(shape: Shape, kind: TokenKind, *, tag_key: bytes, entropy: bytes) -> str:
    """A new placeholder or proxy credential. `entropy` is `ENTROPY_BYTES` from the system's generator."""
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"mint needs {ENTROPY_BYTES} bytes of entropy")
    stem = shape.prefix + kind.value + "0" * shape.padding + _base62(int.from_bytes(entropy), RANDOM_LENGTH)
    return stem + _tag(stem, tag_key)


def parse(untrusted: str, tag_keys: Sequence[bytes]) -> GenuineToken:
    """The whole string as a token, its tag checked against every key of the ring. Raises `ForgedTokenError`."""
    match = _GRAMMAR.fullmatch(untrusted)
    if match is None:
        raise ForgedTokenError("not of a placeholder's form")
    stem, tag = untrusted[:-TAG_LENGTH], untrusted[-TAG_LENGTH:]
    for key in tag_keys:
        if hmac.compare_digest(_tag(stem, key), tag):
            return GenuineToken(untrusted, TokenKind(match[2]), fingerprint(untrusted))
    raise ForgedTokenError("its tag is of no known key")


def fingerprint(text: str) -> str:
    """SHA-256 in hex: the only form in which a placeholder is stored, cached or logged."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Sighting:
    """A marker seen in bytes, in any case. `start` is the marker's first byte, `end` the end of the body's run."""

    start: int
    end: int


def has_marker(data: bytes) -> bool:
    """Whether any marker, in any case, stands in `data`."""
    # Two `in` over a lowered copy cost a fiftieth of a case-insensitive regular expression on a request's head.
    lowered = data.lower()
    return _PLACEHOLDER_MARKER in lowered or _PROXY_MARKER in lowered


def sightings(data: bytes) -> Iterator[Sighting]:
    """Every marker in `data`, case-insensitively, left to right."""
    if not has_marker(data):
        return
    for match in _ANY_MARKER.finditer(data):
        body = _BODY.match(data, match.end())
        yield Sighting(match.start(), body.end() if body else match.end())


def genuine_at(data: bytes, sighting: Sighting, tag_keys: Sequence[bytes]) -> GenuineToken | None:
    """The token a sighting belongs to, whatever stands before it; None when no reading of it is genuine.

    Where its prefix begins cannot be known from outside a placement, so beginnings are tried, the furthest first: in a
    well-formed slot that is the right one.
    """
    run = _PREFIX_RUN.search(data, max(0, sighting.start - MAX_PREFIX), sighting.start)
    first = run.start() if run else sighting.start
    text = data[first : sighting.end].decode("latin-1")
    for begin in range(sighting.start - first + 1):
        try:
            return parse(text[begin:], tag_keys)
        except ForgedTokenError:
            continue
    return None


class StreamFinder:
    """Counts markers in bytes that arrive in pieces: how they are cut changes nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._carry = b""

    def feed(self, piece: bytes) -> None:
        window = self._carry + piece
        last = 0
        for match in _ANY_MARKER.finditer(window):
            self.count += 1
            last = match.end()
        self._carry = window[max(last, len(window) - (MARKER_LENGTH - 1)) :]


def redact(text: str, names: dict[str, str] | None = None) -> str:
    """`text` with every token replaced by `{placeholder:<id>}` (or `{placeholder}` when its id is not known).

    `names` maps fingerprints to ids.
    """
    data = text.encode("utf-8", "surrogatepass")
    out, at = bytearray(), 0
    for seen in sightings(data):
        begin = seen.start
        while begin > max(at, seen.start - MAX_PREFIX) and chr(data[begin - 1]) in BASE62 + "_-":
            begin -= 1
        if begin < at:
            continue
        known = (names or {}).get(fingerprint(data[begin : seen.end].decode("latin-1")))
        out += data[at:begin] + (f"{{placeholder:{known}}}" if known else "{placeholder}").encode()
        at = seen.end
    return (bytes(out) + data[at:]).decode("utf-8", "surrogatepass")


def _tag(stem: str, key: bytes) -> str:
    digest = hmac.digest(key, stem.encode("ascii"), "sha256")
    return _base62(int.from_bytes(digest[:16]), TAG_LENGTH)


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, rest = divmod(number, 62)
        digits.append(BASE62[rest])
    return "".join(digits)
