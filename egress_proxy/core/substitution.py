"""Where placeholders stand in a request's head, and the head that goes upstream instead.

Rule: every marker in the head is accounted for. One that is exactly a declared placement is swapped; every other, in
any case or encoding, refuses the request. Hop-by-hop fields go first, the secret is set last. Nothing of ours leaves.

A *mark* is a marker that was seen, with the slot it was seen in. Plain slots are a header's value, the target and the
decoded Basic credentials; whatever appears only after percent- or base64-decoding (nested, too) is hidden.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from control_plane.contract.destination import Endpoint, authority
from control_plane.contract.headers import OWN_HEADER_PREFIX, SUBJECT_HEADER
from control_plane.contract.placeholder import GenuineToken, Sighting, has_marker, sightings
from control_plane.contract.placement import BasicPlacement, HeaderPlacement, Placement, QueryPlacement
from control_plane.contract.secret import Secret
from egress_proxy.core.http1 import HOP_BY_HOP, Framing, Header, RequestHead, ResponseHead, nominated

MAX_PERCENT_LAYERS: Final = 3
_SHORTEST_BASE64: Final = 48
"""Base64 characters that hold the shortest placeholder (36 characters)."""

_BASE64_RUN = re.compile(rb"[A-Za-z0-9+/_-]{48,}")
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_OWN_PREFIX = OWN_HEADER_PREFIX.encode()
_SUBJECT = SUBJECT_HEADER.lower().encode()
_PASSWORDS_BESIDE_A_TOKEN_USER = frozenset(("", "x-oauth-basic"))


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
    index: int
    """The header's index; -1 for the target."""
    text: bytes
    sighting: Sighting


@dataclass(frozen=True, slots=True)
class Swap:
    """One secret and the one place it goes to."""

    placement: Placement
    index: int
    secret: Secret


# --- finding ---------------------------------------------------------------------------------------------------------


def find_marks(head: RequestHead) -> list[Mark]:
    """Every marker in the head, but for the proxy's own slot (`Proxy-Authorization`)."""
    plain = has_marker(head.raw)
    percent = b"%" in head.raw
    marks: list[Mark] = []
    if plain or percent:
        _marks_in(head.target, -1, Slot.TARGET, marks)
    for index, (name, _, value) in enumerate(head.headers):
        if name == b"proxy-authorization":
            continue
        if plain or (percent and b"%" in value):
            _marks_in(name, index, Slot.HIDDEN, marks)
            _marks_in(value, index, Slot.HEADER, marks)
        elif len(value) >= _SHORTEST_BASE64 or name == b"authorization":
            _hidden_marks(value, index, marks)
        if name == b"authorization":
            _basic_marks(value, index, marks)
    return marks


def _marks_in(text: bytes, index: int, slot: Slot, marks: list[Mark]) -> None:
    marks.extend(Mark(slot, index, text, seen) for seen in sightings(text))
    _hidden_marks(text, index, marks)


def _hidden_marks(text: bytes, index: int, marks: list[Mark]) -> None:
    for decoded in _decodings(text):
        marks.extend(Mark(Slot.HIDDEN, index, decoded, seen) for seen in sightings(decoded))


def _basic_marks(value: bytes, index: int, marks: list[Mark]) -> None:
    decoded = decode_basic(value)
    if decoded is None or not has_marker(decoded):
        return
    # The same bytes were just found as hidden base64: here they are in a slot that a credential may have declared.
    marks[:] = [mark for mark in marks if not (mark.index == index and mark.text in decoded)]
    marks.extend(Mark(Slot.BASIC, index, decoded, seen) for seen in sightings(decoded))


def _decodings(text: bytes) -> Iterator[bytes]:
    """`text` percent-decoded up to three times, base64-decoded once, and both nested. Only what differs from it."""
    layers = [text, *_percent_layers(text)]
    yield from layers[1:]
    for layer in layers:
        for run in _BASE64_RUN.findall(layer):
            decoded = _base64(run)
            if decoded is not None:
                yield decoded
                yield from _percent_layers(decoded)


def _percent_layers(text: bytes) -> Iterator[bytes]:
    for _ in range(MAX_PERCENT_LAYERS):
        if b"%" not in text:
            return
        decoded = unquote_to_bytes(text)
        if decoded == text:
            return
        yield decoded
        text = decoded


def decode_basic(value: bytes) -> bytes | None:
    """`user:password` of a Basic field (RFC 7617); the scheme in any case, base64 url-safe or unpadded, too."""
    scheme, _, encoded = value.partition(b" ")
    return _base64(encoded.strip()) if scheme.lower() == b"basic" else None


def _base64(run: bytes) -> bytes | None:
    stripped = run.rstrip(b"=").translate(_URL_SAFE)
    try:
        return binascii.a2b_base64(stripped + b"=" * (-len(stripped) % 4))
    except binascii.Error:
        # One character too many: every other reader drops it, so must we.
        return binascii.a2b_base64(stripped[:-1]) if len(stripped) % 4 == 1 else None


# --- placing ---------------------------------------------------------------------------------------------------------


def placement_of(
    mark: Mark, token: GenuineToken, head: RequestHead, placements: tuple[Placement, ...]
) -> Placement | None:
    """The declared placement that the token fills exactly, or None."""
    return next((placement for placement in placements if _fills(mark, token, head, placement)), None)


def _fills(mark: Mark, token: GenuineToken, head: RequestHead, placement: Placement) -> bool:
    match placement:
        case HeaderPlacement():
            if mark.slot is not Slot.HEADER or head.headers[mark.index][0].decode("latin-1") != placement.name:
                return False
            value = mark.text.decode("latin-1")
            # RFC 9110 §11.1: the scheme before the token is case-insensitive. The token itself never is.
            return (
                len(value) == len(placement.prefix) + len(token.text) + len(placement.suffix)
                and value[len(placement.prefix) :].removesuffix(placement.suffix) == token.text
                and value.lower().startswith(placement.prefix.lower())
            )
        case BasicPlacement():
            if mark.slot is not Slot.BASIC:
                return False
            user, _, password = mark.text.decode("latin-1").partition(":")
            return password == token.text or (user == token.text and password in _PASSWORDS_BESIDE_A_TOKEN_USER)
        case QueryPlacement(parameter=parameter):
            if mark.slot is not Slot.TARGET:
                return False
            query = mark.text.partition(b"#")[0].partition(b"?")[2].decode("latin-1")
            values = [value for name, value in _query_pairs(query) if name == parameter]
            return values == [token.text]


def _query_pairs(query: str) -> Iterator[tuple[str, str]]:
    """Names decoded, values as they stand."""
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        yield unquote_to_bytes(name.replace("+", " ")).decode("latin-1"), value


# --- rendering -------------------------------------------------------------------------------------------------------


def wire_value(placement: Placement, secret: Secret) -> bytes:
    """The secret as it stands in the request: what the upstream sees, and what must not come back."""
    text = secret.reveal()
    match placement:
        case HeaderPlacement(prefix=prefix, suffix=suffix):
            return (prefix + text + suffix).encode("ascii")
        case BasicPlacement(username=username):
            return b"Basic " + base64.b64encode(f"{username}:{text}".encode())
        case QueryPlacement():
            return quote(text, safe="").encode("ascii")


def needles(swaps: tuple[Swap, ...]) -> tuple[bytes, ...]:
    """What to look for in the reply: each secret raw, and in the form it was sent in."""
    found: dict[bytes, None] = {}
    for swap in swaps:
        found[swap.secret.reveal().encode()] = None
        if not isinstance(swap.placement, HeaderPlacement):
            found[wire_value(swap.placement, swap.secret).removeprefix(b"Basic ")] = None
    return tuple(found)


def render_request(head: RequestHead, *, endpoint: Endpoint, target: bytes, swaps: tuple[Swap, ...]) -> bytes:
    """The head that goes upstream. `target` is in origin-form (or `*`), still with its placeholder.

    The result holds the secret: write it, and keep it nowhere.
    """
    removed = nominated(head.headers)
    swapped_fields = frozenset(_field_of(swap.placement) for swap in swaps)
    lines = [
        b"%b %b HTTP/1.1" % (head.method.encode(), _swapped_target(target, swaps)),
        b"Host: " + authority(endpoint.host, endpoint.port, endpoint.scheme).encode(),
    ]
    for name, sent_name, value in head.headers:
        if name in HOP_BY_HOP or name == b"host" or name in removed or _is_ours(name):
            continue
        # Every spelling of a slot that is about to be set goes (`X_Api_Key`), and with it any second value.
        if swaps and (name == b"accept-encoding" or name.replace(b"_", b"-") in swapped_fields):
            continue
        lines.append(b"%b: %b" % (sent_name, value))
    if any(name == b"transfer-encoding" for name, _, _ in head.headers):
        lines.append(b"Transfer-Encoding: chunked")
    if swaps:
        lines.append(b"Accept-Encoding: identity")  # what is compressed cannot be scanned on its way back
    for swap in swaps:
        if not isinstance(swap.placement, QueryPlacement):
            sent_name = head.headers[swap.index][1]
            lines.append(b"%b: %b" % (sent_name, wire_value(swap.placement, swap.secret)))
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def _field_of(placement: Placement) -> bytes:
    match placement:
        case HeaderPlacement(name=name):
            return name.encode("ascii").replace(b"_", b"-")
        case BasicPlacement():
            return b"authorization"
        case QueryPlacement():
            return b""


def _is_ours(name: bytes) -> bool:
    return name.startswith(_OWN_PREFIX) or name == _SUBJECT


def _swapped_target(target: bytes, swaps: tuple[Swap, ...]) -> bytes:
    for swap in swaps:
        if isinstance(swap.placement, QueryPlacement):
            target = _with_parameter(target, swap.placement, swap.secret)
    return target


def _with_parameter(target: bytes, placement: QueryPlacement, secret: Secret) -> bytes:
    path, _, query = target.partition(b"?")
    pairs = []
    for pair in query.split(b"&"):
        name, equals, _ = pair.partition(b"=")
        is_slot = unquote_to_bytes(name.replace(b"+", b" ")).decode("latin-1") == placement.parameter
        pairs.append(name + equals + wire_value(placement, secret) if is_slot else pair)
    return path + b"?" + b"&".join(pairs)


def without_own_referrer(headers: list[Header], own_host: bytes) -> list[Header]:
    """Reverse mode: `Referer` and `Origin` that name the proxy itself tell the upstream about us, and are dropped."""
    own = b"//" + own_host.lower()
    return [
        header
        for header in headers
        if not (header[0] in (b"referer", b"origin") and _names_host(header[2].lower(), own))
    ]


def _names_host(value: bytes, own: bytes) -> bool:
    _, found, rest = value.partition(own)
    return bool(found) and rest[:1] in (b"", b"/", b"?", b"#")


_NOT_PASSED_BACK: Final = frozenset((b"alt-svc", b"strict-transport-security"))
"""They would lead the client past the proxy, or bind the proxy's own name."""


def render_response(head: ResponseHead, *, framing: Framing, close: bool) -> bytes:
    """The reply's head as the client gets it, still to be scrubbed. `framing` is how its body goes to the client."""
    removed = nominated(head.headers)
    lines = [b"HTTP/1.1 %d %b" % (head.status, head.reason)]
    for name, sent_name, value in head.headers:
        if name in HOP_BY_HOP or name in removed or name in _NOT_PASSED_BACK or name.startswith(_OWN_PREFIX):
            continue
        lines.append(b"%b: %b" % (sent_name, value))
    if framing is Framing.CHUNKED:
        lines.append(b"Transfer-Encoding: chunked")
    if close:
        lines.append(b"Connection: close")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)
