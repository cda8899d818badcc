"""Where placeholders stand in a request's head, and the head that goes upstream instead.

Rule: every marker in the head is accounted for. One that is exactly a declared placement is swapped; every other, in
any case or encoding, refuses the request. Hop-by-hop fields go first, the secret is set last. Nothing of ours leaves.
"""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from control_plane.contract.destination import (
    DEFAULT_PORTS,
    Endpoint,
    InvalidDestinationError,
    authority,
    split_authority,
)
from control_plane.contract.placeholder import GenuineToken
from control_plane.contract.placement import (
    BasicPlacement,
    HeaderPlacement,
    PathPlacement,
    Placement,
    QueryPlacement,
)
from control_plane.contract.secret import Secret
from egress_proxy.core.fields import HOP_BY_HOP, Field, Mark, Slot, target_marks
from egress_proxy.core.http1 import Framing, RequestHead, ResponseHead
from egress_proxy.core.needles import Needles

_PASSWORDS_BESIDE_A_TOKEN_USER = frozenset(("", "x-oauth-basic"))


@dataclass(slots=True)
class Swap:
    """One secret and the one place it goes to. (Not frozen, as one is built for every request.)"""

    placement: Placement
    field: Field | None
    """The field it stands in; None for the target."""
    secret: Secret
    placeholder: str
    known_characters: int = 0
    """How many of the secret's first characters everybody knows, because its provider's keys all begin with them."""


# --- finding ---------------------------------------------------------------------------------------------------------

FoundMark = tuple[Mark, Field | None]
"""A mark, and the field it stands in; None for the target."""


def find_marks(head: RequestHead) -> list[FoundMark]:
    """Every marker in the head, but for the proxy's own slot (`Proxy-Authorization`)."""
    found: list[FoundMark] = [(mark, None) for mark in target_marks(head.target)]
    found.extend((mark, field) for field in head.special for mark in field.marks)
    return found


# --- placing ---------------------------------------------------------------------------------------------------------


def placement_of(found: FoundMark, token: GenuineToken, placements: tuple[Placement, ...]) -> Placement | None:
    """The declared placement that the token fills exactly, or None."""
    return next((placement for placement in placements if _fills(found, token, placement)), None)


def known_characters(token: GenuineToken, secret: Secret) -> int:
    """The length of what secret and placeholder begin with alike: a placeholder has its provider's shape."""
    pairs = zip(token.prefix, secret.reveal(), strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(token.prefix))


def _fills(found: FoundMark, token: GenuineToken, placement: Placement) -> bool:
    mark, field = found
    match placement:
        case HeaderPlacement():
            prefix, suffix = placement.prefix, placement.suffix
            if mark.slot is not Slot.HEADER or field is None or field.name != placement.name.encode():
                return False
            # RFC 9110 §11.1: the scheme before the token is case-insensitive. The token itself never is.
            begin = len(prefix)
            return (
                mark.text[begin:] == (token.text + suffix).encode()
                and mark.text[:begin].lower() == prefix.lower().encode()
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
            return [value for name, value in query_pairs(query) if name == parameter] == [token.text]
        case PathPlacement():
            if mark.slot is not Slot.TARGET:
                return False
            return _segments(mark.text).count(_segment(placement, token.text)) == 1


def query_pairs(query: str) -> Iterator[tuple[str, str]]:
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
        case PathPlacement():
            return _segment(placement, quote(text, safe=""))


def needles(swaps: tuple[Swap, ...]) -> Needles:
    """What to look for in the reply."""
    return Needles.of(*((swap.secret.reveal(), swap.known_characters) for swap in swaps))


def render_opening(head: RequestHead, *, endpoint: Endpoint, target: bytes, swaps: tuple[Swap, ...]) -> bytes:
    """The request line and Host. `target` is in origin-form (or `*`), still with its placeholder."""
    line = b"%b %b HTTP/1.1" % (head.method.encode(), _swapped_target(target, swaps))
    return line + b"\r\nHost: " + authority(endpoint.host, endpoint.port, endpoint.scheme).encode()


def dropped_lines(
    head: RequestHead, swaps: tuple[Swap, ...], *, ranges: bool = False, unsearchable: bool = False
) -> frozenset[bytes]:
    """The special lines that do not go on: the hop's own, ours, and those that the closing sets anew. With a swap
    those, too, by which the reply could come in a form that cannot be searched, where that is not allowed."""
    unwanted = frozenset() if ranges or not swaps else _RANGES
    if swaps and not unsearchable:
        unwanted |= _CODINGS
    slots = slot_names(swaps)
    return frozenset([field.line for field in head.special if field.name in unwanted or _is_dropped(field, slots)])


def slot_names(swaps: tuple[Swap, ...]) -> frozenset[bytes]:
    """The fields that the secrets go to. No other value of theirs goes on, in whatever spelling."""
    return frozenset([_slot_name(swap.placement) for swap in swaps])


def render_closing(head: RequestHead, swaps: tuple[Swap, ...], *, unsearchable: bool = False) -> bytes:
    """The fields that the proxy itself sets, the secret last, and the blank line."""
    lines = [b"Transfer-Encoding: chunked"] if head.framing is Framing.CHUNKED else []
    if head.opens_websocket:
        lines.append(_TO_WEBSOCKET)
    if swaps and not unsearchable:
        lines.append(b"Accept-Encoding: identity")  # what is compressed cannot be scanned on its way back
    for swap in swaps:
        if swap.field is not None:
            sent_name = swap.field.line.partition(b":")[0]
            lines.append(b"%b: %b" % (sent_name, wire_value(swap.placement, swap.secret)))
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


_CODINGS: Final = frozenset((b"accept-encoding",))
_RANGES: Final = frozenset((b"range", b"if-range"))


_TO_WEBSOCKET: Final = b"Connection: Upgrade\r\nUpgrade: websocket"


def _is_dropped(field: Field, slots: frozenset[bytes]) -> bool:
    name = field.name
    if field.ours or name in HOP_BY_HOP or name in (b"host", b"transfer-encoding"):
        return True
    # Every other spelling of a slot that is about to be set goes, too (`X_Api_Key`).
    return bool(slots) and name.replace(b"_", b"-") in slots


def _slot_name(placement: Placement) -> bytes:
    match placement:
        case HeaderPlacement(name=name):
            return name.encode("ascii").replace(b"_", b"-")
        case BasicPlacement():
            return b"authorization"
        case QueryPlacement() | PathPlacement():
            return b""


def _swapped_target(target: bytes, swaps: tuple[Swap, ...]) -> bytes:
    for swap in swaps:
        if isinstance(swap.placement, QueryPlacement):
            target = _with_parameter(target, swap.placement, swap.secret)
        elif isinstance(swap.placement, PathPlacement):
            target = _with_segment(target, swap.placement, swap)
    return target


def _segments(target: bytes) -> list[bytes]:
    return target.partition(b"#")[0].partition(b"?")[0].split(b"/")


def _segment(placement: PathPlacement, text: str) -> bytes:
    return f"{placement.prefix}{text}{placement.suffix}".encode("ascii")


def _with_segment(target: bytes, placement: PathPlacement, swap: Swap) -> bytes:
    path, question_mark, query = target.partition(b"?")
    placeholder = _segment(placement, swap.placeholder)
    segments = [wire_value(placement, swap.secret) if part == placeholder else part for part in path.split(b"/")]
    return b"/".join(segments) + question_mark + query


def _with_parameter(target: bytes, placement: QueryPlacement, secret: Secret) -> bytes:
    path, _, query = target.partition(b"?")
    pairs = []
    for pair in query.split(b"&"):
        name, equals, _ = pair.partition(b"=")
        is_slot = unquote_to_bytes(name.replace(b"+", b" ")).decode("latin-1") == placement.parameter
        pairs.append(name + equals + wire_value(placement, secret) if is_slot else pair)
    return path + b"?" + b"&".join(pairs)


REFERRERS: Final = frozenset((b"referer", b"origin"))


def names_host(field: Field, host: bytes) -> bool:
    """Whether the URL in this field is one of `host` (a `Host` field's value)."""
    _, found, rest = field.value.lower().partition(b"//" + host.lower())
    return bool(found) and rest[:1] in (b"", b"/", b"?", b"#")


_NOT_PASSED_BACK: Final = HOP_BY_HOP | {b"transfer-encoding", b"alt-svc", b"strict-transport-security"}
"""The last two would lead the client past the proxy, or bind the proxy's own name."""


_SAME_PLACE: Final = frozenset((b"location", b"content-location"))
# RFC 9110 §11.6.1: challenges, separated by commas. These two schemes prove who somebody is once for a connection (RFC
# 4559 §6), and a connection of the pool serves many.
_CONNECTION_CHALLENGE = re.compile(rb"(?:^|,)[ \t]*(?:negotiate|ntlm)(?:[ \t]+[A-Za-z0-9+/=._~-]+)?[ \t]*(?=,|$)", re.I)


@dataclass(frozen=True, slots=True)
class RouteBase:
    """Where a reverse route leads, and what of the client's target led there: its own `/<credential name>`."""

    endpoint: Endpoint
    base: bytes

    def rewritten(self, location: bytes) -> bytes:
        """A URL of the route's own origin, as the client can follow it; every other one as it is."""
        scheme = f"{self.endpoint.scheme}:".encode()
        rest = location[len(scheme) :] if location[: len(scheme)].lower() == scheme else location
        if not rest.startswith(b"//"):
            is_path = rest is location and location.startswith(b"/")
            return self.base + location if is_path else location
        place, _, path = rest[2:].partition(b"/")
        try:
            found = split_authority(place.decode("ascii"), default_port=DEFAULT_PORTS[self.endpoint.scheme])
        except (InvalidDestinationError, UnicodeDecodeError):
            return location
        return self.base + b"/" + path if found == (self.endpoint.host, self.endpoint.port) else location


def render_response(head: ResponseHead, *, framing: Framing, close: bool, route: RouteBase | None = None) -> bytes:
    """The reply's head as the client gets it, still to be scrubbed. `framing` is how its body goes to the client."""
    lines = [b"HTTP/1.1 %d %b" % (head.status, head.reason)]
    for field in head.fields:
        if not field.special:
            lines.append(field.line)
        elif not _is_not_passed_back(field):
            lines.extend(_passed_back(field, route))
    if head.status < 200 or head.status == 204:  # RFC 9110 §8.6: such a reply states no length
        lines[1:] = [line for line in lines[1:] if line[:15].lower() != b"content-length:"]
    if head.removed:
        lines[1:] = [line for line in lines[1:] if line.partition(b":")[0].lower() not in head.removed]
    if framing is Framing.CHUNKED:
        lines.append(b"Transfer-Encoding: chunked")
    if head.status == 101:
        lines.append(_TO_WEBSOCKET)
    elif close:
        lines.append(b"Connection: close")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def _passed_back(field: Field, route: RouteBase | None) -> Iterator[bytes]:
    name, value = field.line.partition(b":")[0], field.value
    if field.name == b"www-authenticate":
        kept = _CONNECTION_CHALLENGE.sub(b"", value).lstrip(b", \t")
        if kept:
            yield field.line if kept == value else name + b": " + kept
    elif route is not None and field.name in _SAME_PLACE:
        followed = route.rewritten(value)
        yield field.line if followed == value else name + b": " + followed
    else:
        yield field.line


def _is_not_passed_back(field: Field) -> bool:
    return field.ours or field.name in _NOT_PASSED_BACK
