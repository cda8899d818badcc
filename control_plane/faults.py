"""Named points at which a test may end the process, or what it talks to, to see that nothing is lost or doubled.

    reach("exchange.minted")          in the code: "we are here"
    with armed(at_a_point): …          in a test program: called with each name, and free to kill

Rule: outside such a test a point is one call that does nothing. No setting, no variable and no request arms it; only
`bootstrap.running` is given what to do, as an argument, and the programs that serve never give it.
A name is `topic.what_was_just_done`, and stands once in the sources. `tests/e2e/test_kills.py` finds every one of them
there and fails for a point that it did not hit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

AtPoint = Callable[[str], None]


def nothing_happens(_point: str) -> None:
    """What every process but a test's does."""


_at_point: AtPoint = nothing_happens


def reach(point: str) -> None:
    """Says that this point was reached."""
    _at_point(point)


@contextmanager
def armed(at_point: AtPoint) -> Iterator[None]:
    """For as long as the block runs, in this whole process."""
    global _at_point
    before, _at_point = _at_point, at_point
    try:
        yield
    finally:
        _at_point = before
