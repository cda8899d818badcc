"""A decision made ready to be carried out, more than once.

Clients repeat themselves on a connection: the same request line and the same special fields, again and again. For equal
inputs `decide` gives equal answers, so its last answer is kept beside them and used while the view has not changed
(`revision`), nothing that it rests on has ended (`until`), and for `PLAN_SECONDS` at most. That, and having rendered
what the proxy itself puts into the head, is most of what a warm request costs (`make bench`).

Rule: a plan is one connection's; what it holds of the secret it shows nobody.
"""

from typing import Final

from egress_proxy.core.decision import Forward
from egress_proxy.core.fields import Field
from egress_proxy.core.http1 import RequestHead, nominated
from egress_proxy.core.substitution import dropped_lines, needles, render_closing, render_opening, slot_names

PLAN_SECONDS: Final = 0.5
"""By how much a plan may outlive a cached answer; the cache believes its answers for so much less."""


class Plan:
    """`forward` for `head`, and for every head that differs from it in plain fields and Content-Length alone."""

    __slots__ = (
        "_closing",
        "_dropped",
        "_line",
        "_opening",
        "_removed",
        "_revision",
        "_special",
        "_until",
        "forward",
        "needles",
    )

    def __init__(self, asked: RequestHead, forward: Forward, *, revision: int, now: float) -> None:
        """`asked` is the head that was decided on, as it came; `forward.head` may have lost traces of the proxy."""
        head = forward.head
        self.forward = forward
        self.needles = needles(forward.swaps)
        """What the reply is searched for."""
        self._line = asked.line
        self._special = _decisive(asked)
        self._revision = revision
        self._until = min(forward.until, now + PLAN_SECONDS)
        self._opening = render_opening(head, endpoint=forward.endpoint, target=forward.target, swaps=forward.swaps)
        self._closing = render_closing(head, forward.swaps)
        kept = {field.line for field in head.special}
        traces = {field.line for field in asked.special if field.line not in kept}
        self._dropped = dropped_lines(head, forward.swaps) | traces
        self._removed = nominated(head.special) | slot_names(forward.swaps)

    def __repr__(self) -> str:
        return f"Plan({self.forward!r})"

    def fits(self, head: RequestHead, *, revision: int, now: float) -> bool:
        """Whether deciding on `head` now would give the same answer."""
        return (
            revision == self._revision
            and now < self._until
            and head.line == self._line
            and _decisive(head) == self._special
        )

    def render(self, head: RequestHead) -> bytes:
        """The head that goes upstream, secret included: write it, and keep it nowhere."""
        dropped = self._dropped
        lines = [self._opening]
        lines += [field.line for field in head.fields if field.line not in dropped and field.name not in self._removed]
        lines.append(self._closing)
        return b"\r\n".join(lines)


def _decisive(head: RequestHead) -> list[Field]:
    """The fields that a decision may depend on. How long the body is changes where nothing goes."""
    return [field for field in head.special if field.name != b"content-length"]
