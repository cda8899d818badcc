"""A decision made ready to be carried out, more than once.

Clients repeat themselves on a connection: the same head again and again, or the same but for what decides nothing.
Upstreams do, too. For equal inputs `decide` gives equal answers, so its last answer is kept beside them and used while
the view has not changed (`revision`), nothing that it rests on has ended (`until`), and for `PLAN_SECONDS` at most.
What the head becomes on its way upstream is kept, too, and the last reply's head with what the client got of it.
Together that is most of what a warm request costs (`make bench`).

Rule: a plan is one connection's, which has one request at a time; what it holds of the secret it shows nobody.
"""

from dataclasses import dataclass, replace
from typing import Final

from egress_proxy.core.decision import Forward
from egress_proxy.core.fields import Field
from egress_proxy.core.http1 import Framing, RequestHead, ResponseHead, nominated
from egress_proxy.core.substitution import dropped_lines, needles, render_closing, render_opening, slot_names

PLAN_SECONDS: Final = 1.0
"""By how much a plan may outlive a cached answer; the cache believes its answers for so much less."""
MAX_REMEMBERED_REPLY_BYTES: Final = 4_096
_MAX_DIGITS: Final = 18


@dataclass(frozen=True, slots=True)
class RepeatedReply:
    """The head of a plan's last reply, and what the client got of it: nothing in it had to be scrubbed."""

    raw: bytes
    head: ResponseHead
    rendered: bytes


class Plan:
    """`forward`, for the head it was decided on and for those that differ from it where nothing depends on it."""

    __slots__ = (
        "_after",
        "_before",
        "_closing",
        "_dropped",
        "_line",
        "_opening",
        "_removed",
        "_revision",
        "_special",
        "_until",
        "_wire_after",
        "_wire_before",
        "counts_replies",
        "forward",
        "head",
        "is_plain",
        "needles",
        "reply",
    )

    def __init__(self, raw: bytes, asked: RequestHead, forward: Forward, *, revision: int, now: float) -> None:
        """`asked` is the head that was decided on, as it came; `forward.head` may have lost traces of the proxy."""
        head = forward.head
        self.forward = forward
        self.needles = needles(forward.swaps)
        """What the reply is searched for; empty where nothing was swapped."""
        self.counts_replies = any(binding.reports_replies for binding in forward.bindings)
        self.reply: RepeatedReply | None = None
        is_more = head.expects_continue or head.opens_websocket or bool(forward.limits)
        self.is_plain = not is_more and head.framing is not Framing.CHUNKED
        """Whether `content_length` bytes follow the head, and nothing is waited for or counted before them."""
        self._line = asked.line
        self._special = _decisive(asked)
        self._revision = revision
        self._until = min(forward.until, now + PLAN_SECONDS)
        self._opening = render_opening(head, endpoint=forward.endpoint, target=forward.target, swaps=forward.swaps)
        self._closing = render_closing(head, forward.swaps, unsearchable=forward.handling.unsearchable)
        kept = {field.line for field in head.special}
        traces = {field.line for field in asked.special if field.line not in kept}
        ranges, unsearchable = forward.handling.ranges, forward.handling.unsearchable
        self._dropped = dropped_lines(head, forward.swaps, ranges=ranges, unsearchable=unsearchable) | traces
        self._removed = nominated(head.special) | slot_names(forward.swaps)
        self.adopt(raw, asked)

    def __repr__(self) -> str:
        return f"Plan({self.forward!r})"

    def fits(self, head: RequestHead, *, revision: int, now: float) -> bool:
        """Whether deciding on `head` now would give the same answer."""
        return (
            revision == self._revision
            and now < self._until
            and not self.forward.handling.strict  # for which every field counts
            and self._is_asked_alike(head)
        )

    def renewed_by(self, raw: bytes, head: RequestHead, anew: Forward, *, revision: int, now: float) -> bool:
        """Whether what was decided anew on `head` is the same again; then the plan holds on, and has adopted it."""
        is_same = replace(anew, head=self.forward.head) == self.forward and self._is_asked_alike(head)
        if not is_same or anew.handling.strict:  # for which every field counts
            return False
        self._revision = revision
        self._until = min(anew.until, now + PLAN_SECONDS)
        self.adopt(raw, head)
        return True

    def _is_asked_alike(self, head: RequestHead) -> bool:
        return head.line == self._line and _decisive(head) == self._special

    def adopt(self, raw: bytes, head: RequestHead) -> None:
        """Take a head that fits as the one to be carried out, and to be repeated."""
        self.head = head
        """The head of the request under way."""
        dropped, removed = self._dropped, self._removed
        lines = [field.line for field in head.fields if field.line not in dropped and field.name not in removed]
        wire = b"\r\n".join([self._opening, *lines, self._closing])
        length = next((field for field in head.special if field.name == b"content-length"), None)
        self._before, self._after = _around(raw, length)
        self._wire_before, self._wire_after = _around(wire, length)

    def repeated_by(self, data: bytes, *, revision: int, now: float) -> int:
        """Length of the head that `data` begins with, if it is the adopted one but for the number in Content-Length;
        then `head` becomes that head. 0: it is not."""
        before, after = self._before, self._after
        if revision != self._revision or now >= self._until or not data.startswith(before):
            return 0
        if not after:
            return len(before)  # it ends with the empty line
        end = data.find(b"\r", len(before), len(before) + _MAX_DIGITS + 1)
        digits = data[len(before) : end]
        if end < 0 or not digits.isdigit() or not data.startswith(after, end):
            return 0
        length = int(digits)
        if bool(length) != bool(self.head.content_length):
            return 0  # with a body and without one are two kinds of request
        self.head.content_length = length
        return end + len(after)

    def render(self) -> bytes:
        """The head that goes upstream, secret included: write it, and keep it nowhere."""
        if not self._wire_after:
            return self._wire_before
        return b"%b%d%b" % (self._wire_before, self.head.content_length, self._wire_after)


def _decisive(head: RequestHead) -> list[Field]:
    """The fields that a decision may depend on. How long the body is changes where nothing goes."""
    return [field for field in head.special if field.name != b"content-length"]


def _around(head: bytes, length: Field | None) -> tuple[bytes, bytes]:
    """The bytes before and after the number in Content-Length; all of them, and none, where there is no such field."""
    if length is None:
        return head, b""
    in_line = length.line.index(length.value, length.line.index(b":"))
    begin = head.index(b"\r\n" + length.line + b"\r\n") + len(b"\r\n") + in_line
    return head[:begin], head[begin + len(length.value) :]
