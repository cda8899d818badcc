"""One field line of a head, and the markers that stand in it.

Rule: a line is judged once and remembered, because clients repeat themselves: of a request's fifteen lines fourteen
came before, and looking one up costs a tenth of judging it. What is remembered depends on the line alone.

A *mark* is a marker that was seen, with the slot it was seen in. Plain slots are a header's value, the target and
decoded Basic credentials; whatever appears only after percent- or base64-decoding, or without JSON's escapes (nested,
too), is hidden. A base64 run of fewer than 48 characters cannot hold a placeholder (36 characters) and is not decoded.
"""

import binascii
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Final
from urllib.parse import unquote_to_bytes

from control_plane.contract.headers import OWN_HEADER_PREFIX, SUBJECT_HEADER
from control_plane.contract.placeholder import Sighting, has_marker, sightings

MAX_REMEMBERED_LINES: Final = 4096
MAX_REMEMBERED_LINE_BYTES: Final = 256
MAX_REMEMBERED_PROOF_BYTES: Final = 160
"""Longer than any proxy credential's line, shorter than any signed token (`proofs.SHORTEST_TOKEN`)."""
MAX_PERCENT_LAYERS: Final = 3
MAX_MARKS: Final = 8
"""More than any request needs: a head with more is refused, and no more of them are looked at."""

HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer upgrade "
    b"http2-settings".split()
)  # RFC 9110 §7.6.1; HTTP2-Settings: RFC 7540 §3.2.1
_JUDGED_IN_REQUESTS = HOP_BY_HOP | frozenset(
    b"host content-length transfer-encoding expect accept-encoding range if-range referer origin".split()
)
_JUDGED_IN_REPLIES = HOP_BY_HOP | frozenset(
    b"content-length transfer-encoding content-encoding alt-svc strict-transport-security location "
    b"content-location www-authenticate".split()
)
_FORWARDING: Final = frozenset(
    b"forwarded via x-real-ip x-client-ip x-cluster-client-ip x-original-forwarded-for true-client-ip cf-connecting-ip "
    b"fastly-client-ip x-envoy-external-address x-original-host x-original-url x-rewrite-url x-ssl-client-cert "
    b"x-client-cert ssl-client-cert client-cert client-cert-chain x-arr-clientcert x-amzn-mtls-clientcert".split()
)
"""Who asked, from where, through whom: what an upstream could take for our word, and is at best somebody's address."""
_FORWARDING_PREFIXES: Final = (b"x-forwarded-", b"x-ssl-client-", b"x-amzn-mtls-", b"x-amzn-oidc-", b"x-goog-iap-")
_OWN_PREFIX = OWN_HEADER_PREFIX.encode()
_SUBJECT = SUBJECT_HEADER.lower().encode()

# The look-behind makes a failed run cost one step, not one for each of its characters.
_BASE64_RUN = re.compile(rb"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{48,}")
_TELLING_ESCAPE = re.compile(rb"%(?:25|3[0-9]|[46][1-9A-Fa-f]|[57][0-9Aa])")
_JSON_ESCAPE = re.compile(rb"\\u00([0-9A-Fa-f]{2})")  # RFC 8259 §7
_TOKEN68 = re.compile(rb"[A-Za-z0-9+/_-]*={0,2}")
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


class Slot(Enum):
    """Where a mark was seen."""

    HEADER = auto()
    BASIC = auto()
    TARGET = auto()
    HIDDEN = auto()


@dataclass(frozen=True, slots=True)
class Mark:
    """A marker seen in `text`, which is the slot's content (decoded, for BASIC and HIDDEN)."""

    slot: Slot
    text: bytes
    sighting: Sighting


@dataclass(frozen=True, slots=True)
class Field:
    """One field line. `special` lines are all that framing, identity, the swap and the strippers need to look at."""

    name: bytes
    """Lower case."""
    value: bytes
    """Without surrounding white space."""
    line: bytes
    """As sent, without its CRLF."""
    special: bool
    ours: bool
    """Named like one of our own fields: never passed on, in either direction."""
    marks: tuple[Mark, ...] = ()


def request_fields(block: bytes) -> list[Field]:
    """A request's field lines, with the markers in each. The block is valid: one field a line, no bare CR or LF."""
    return list(map(_remembered_request_fields.__getitem__, block.split(b"\r\n"))) if block else []


def reply_fields(block: bytes) -> list[Field]:
    """A reply's field lines."""
    return list(map(_remembered_reply_fields.__getitem__, block.split(b"\r\n"))) if block else []


def target_marks(target: bytes) -> list[Mark]:
    """The markers in a request target."""
    if b"%" not in target and len(target) < _SHORTEST_BASE64 and not has_marker(target):
        return []
    return list(islice(_marks_in(Slot.TARGET, target), MAX_MARKS + 1))


def name_holds_marker(sent_name: bytes) -> bool:
    """Of a field's name, in whatever encoding."""
    return next(_marks_in(Slot.HIDDEN, sent_name), None) is not None


def decode_basic(value: bytes) -> bytes | None:
    """`user:password` of a Basic field (RFC 7617); the scheme in any case, base64 url-safe or unpadded, too."""
    scheme, _, encoded = value.partition(b" ")
    # Decoders skip what is not of the alphabet: another reader might take what follows a comma for the credentials.
    is_basic = scheme.lower() == b"basic" and _TOKEN68.fullmatch(encoded.strip(b" "))
    return _base64(encoded.strip(b" ")) if is_basic else None


_SHORTEST_BASE64: Final = 48


def _judge_request_field(line: bytes) -> Field:
    sent_name, _, padded_value = line.partition(b":")
    name, value = sent_name.lower(), padded_value.strip(b" \t")
    ours = _is_for_us(name.replace(b"_", b"-"))
    marks = tuple(islice(_field_marks(sent_name, value), MAX_MARKS + 1))
    # An underscore may be read as a hyphen further on, so such a line can be another spelling of a secret's slot.
    special = bool(marks) or ours or name in _JUDGED_IN_REQUESTS or b"_" in name
    return Field(name, value, line, special, ours, marks)


def _judge_reply_field(line: bytes) -> Field:
    sent_name, _, padded_value = line.partition(b":")
    name, value = sent_name.lower(), padded_value.strip(b" \t")
    ours = name.startswith(_OWN_PREFIX)
    return Field(name, value, line, ours or name in _JUDGED_IN_REPLIES, ours)


def _is_for_us(name: bytes) -> bool:
    """Whether a request's field is one of ours, or says who the client is: it means nothing here, and goes no further.
    (RFC 9110 §7.6.3 would have a proxy write itself into Via; docs/adr/0025.)"""
    return name.startswith((_OWN_PREFIX, *_FORWARDING_PREFIXES)) or name == _SUBJECT or name in _FORWARDING


class _Remembered(dict[bytes, Field]):
    """Fields by their line, judged when first seen. Emptied when full; a look-up costs half of `lru_cache`'s."""

    def __init__(self, judge: Callable[[bytes], Field]) -> None:
        self._judge = judge

    def __missing__(self, line: bytes) -> Field:
        field = self._judge(line)
        # Of signed tokens only the digest is kept, so that no line which could hold one is remembered.
        longest = MAX_REMEMBERED_PROOF_BYTES if field.name == b"proxy-authorization" else MAX_REMEMBERED_LINE_BYTES
        if len(line) <= longest:
            if len(self) >= MAX_REMEMBERED_LINES:
                self.clear()
            self[line] = field
        return field


_remembered_request_fields: Final = _Remembered(_judge_request_field)
_remembered_reply_fields: Final = _Remembered(_judge_reply_field)


def _field_marks(sent_name: bytes, value: bytes) -> Iterator[Mark]:
    name = sent_name.lower()
    if name == b"proxy-authorization":  # the proxy's own slot: `decision` reads it
        return
    yield from _marks_in(Slot.HIDDEN, sent_name)
    basic = decode_basic(value) if name == b"authorization" else None
    if basic is not None:
        yield from _marks_in(Slot.BASIC, basic)
    # What decodes to the Basic credentials themselves was just seen, in a slot that a credential may declare.
    yield from _marks_in(Slot.HEADER, value, seen_already=basic)


def _marks_in(slot: Slot, text: bytes, *, seen_already: bytes | None = None) -> Iterator[Mark]:
    """The plain marks of a slot, then the hidden ones."""
    yield from (Mark(slot, text, seen) for seen in sightings(text))
    for decoded in _decodings(text):
        if has_marker(decoded) and (seen_already is None or decoded not in seen_already):
            yield from (Mark(Slot.HIDDEN, decoded, seen) for seen in sightings(decoded))


def _decodings(text: bytes) -> Iterator[bytes]:
    """`text` percent-decoded up to three times, without JSON's escapes, base64-decoded once, and these nested.

    Only what differs from it.

    A percent layer in which nothing new appears is left out: it would show the plain markers again.
    """
    layers = [text]
    for layer in _percent_layers(text):
        layers.append(layer)
        if _count(layer) != _count(text):
            yield layer
    if b"\\u00" in layers[-1]:
        unescaped = _JSON_ESCAPE.sub(lambda escape: bytes((int(escape[1], 16),)), layers[-1])
        layers.append(unescaped)
        if _count(unescaped) != _count(text):
            yield unescaped
    for layer in layers:
        for run in _BASE64_RUN.findall(layer):
            # What precedes it may be of the alphabet too ('/'), so where the encoding begins is unknown.
            for offset in range(4):
                decoded = _base64(run[offset:])
                if decoded is not None:
                    yield decoded
                    yield from _percent_layers(decoded)


def _count(text: bytes) -> int:
    """How many markers there are, as far as that matters."""
    return sum(1 for _ in islice(sightings(text), MAX_MARKS + 1))


def _percent_layers(text: bytes) -> Iterator[bytes]:
    for _ in range(MAX_PERCENT_LAYERS):
        # Only an escaped letter, digit or '%' can turn what is no marker into one; URLs are full of other escapes.
        if not _TELLING_ESCAPE.search(text):
            return
        decoded = unquote_to_bytes(text)
        if decoded == text:
            return
        yield decoded
        text = decoded


def _base64(run: bytes) -> bytes | None:
    stripped = run.rstrip(b"=").translate(_URL_SAFE)
    if len(stripped) % 4 == 1:  # one character too many: other readers drop it
        stripped = stripped[:-1]
    try:
        return binascii.a2b_base64(stripped + b"=" * (-len(stripped) % 4))
    except binascii.Error:
        return None
