"""What has to hold of finding placeholders, for any bytes around them.

Rule: how a stream is cut changes nothing of what is found in it; what stands in a head plainly, or under one of the
encodings that the finder undoes, is seen; and whatever is decided, no marker leaves in a head, and the secret stands in
its declared place alone.
"""

import base64
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote_from_bytes

from control_plane.contract.placeholder import StreamFinder, genuine_at, has_marker, redact, sightings
from control_plane.contract.refusal import RefusedError
from egress_proxy.core.decision import Connection, Forward, Mode, decide
from egress_proxy.core.fields import MAX_MARKS
from egress_proxy.core.http1 import RequestHead, parse_request_head
from egress_proxy.core.plan import Plan
from egress_proxy.core.substitution import find_marks
from tests.egress_proxy.core.world import ALICE, NOW, TAG_KEY, World
from tests.fuzz.path import HOST, ROUTE, SECRET, cut

_URL_LETTERS: Final = b"-._~!$&'()*+,;=:@/?"


class _Caller:
    """One caller with one credential, made once: nothing here changes it."""

    def __init__(self) -> None:
        self.world = World()
        self.connection = Connection(Mode.REVERSE, self.world.proxy_credential(ALICE))
        self.placeholder = self.world.credential(
            ALICE, f"https://{HOST}", name=ROUTE, secret=SECRET, prefix="sk-real-"
        ).encode()


ONE: Final = _Caller()


def check_stream(data: bytes, cuts: Sequence[int]) -> None:
    """Markers in a stream, counted as it comes, and redacted as text."""
    finder = StreamFinder()
    for piece in cut(data, cuts):
        finder.feed(piece)
    seen = list(sightings(data))
    assert finder.count == len(seen), f"{finder.count} in pieces, {len(seen)} in one"
    assert bool(seen) == has_marker(data)
    for sighting in seen:
        token = genuine_at(data, sighting, [TAG_KEY])
        assert token is None or token.text.encode() in data
    assert not has_marker(redact(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape"))


def check_hidden(before: bytes, after: bytes, layers: Sequence[int], *, in_target: bool) -> None:
    """A placeholder between any two texts, under any encodings that are undone, is found in a head."""
    text = ONE.placeholder
    percents, has_base64 = 0, False
    for layer in layers:
        match layer % 4:
            case 0 if percents < 3:
                text, percents = quote_from_bytes(text, safe=b"").replace("t", "%74").encode(), percents + 1
            case 1 | 2 if not has_base64 and percents == 0:
                encode = base64.b64encode if layer % 4 == 1 else base64.urlsafe_b64encode
                text, has_base64 = encode(b"user:"[: layer % 5] + text), True
    head = _head(before + text + after, in_target=in_target)
    if head is None:
        return
    found = find_marks(head)
    assert found, f"not found in {head.target!r} {[field.line for field in head.fields]}"
    assert found == find_marks(head)


def check_decision(raw: bytes) -> bool:
    """What goes on of any head. Returns whether it went."""
    raw = raw.replace(b"{placeholder}", ONE.placeholder)
    try:
        head = parse_request_head(raw)
    except RefusedError:
        return False
    decision = decide(head, ONE.connection, ONE.world, NOW)
    if not isinstance(decision, Forward):
        return False
    wire = Plan(raw, head, decision, revision=0, now=NOW).render()
    assert not has_marker(wire), f"a marker leaves: {wire!r}"
    assert wire.count(SECRET.encode()) == len(decision.swaps) <= MAX_MARKS
    assert all(f"\r\nAuthorization: Bearer {SECRET}\r\n".lower().encode() in wire.lower() for _ in decision.swaps)
    return True


def _head(text: bytes, *, in_target: bool) -> RequestHead | None:
    """A head with the text in it; None where it cannot stand there."""
    if in_target:
        path = b"".join(b"%c" % byte if chr(byte).isalnum() or byte in b"%" + _URL_LETTERS else b"-" for byte in text)
        raw = b"GET /" + path + b" HTTP/1.1\r\nHost: a\r\n\r\n"
    else:
        raw = b"GET / HTTP/1.1\r\nHost: a\r\nX-A: " + text + b"\r\n\r\n"
    try:
        return parse_request_head(raw)
    except RefusedError:
        return None
