"""All attacks, and the grid they fill: a row for each class, a column for each listener and direction."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tests.attacks import callers, framing, hosts, places, replies
from tests.attacks.attack import Attack, Direction, NothingTriedError, Verdict
from tests.attacks.ways import Listener, Way

ATTACKS: Final[list[Attack]] = [
    *hosts.ATTACKS,
    *places.ATTACKS,
    *replies.ATTACKS,
    *framing.ATTACKS,
    *callers.ATTACKS,
]
KINDS: Final[list[str]] = list(dict.fromkeys(attack.kind for attack in ATTACKS))
COLUMNS: Final[list[tuple[Listener, Direction]]] = [(each, way) for way in Direction for each in Listener]

_ASKED = "is about what is asked"
_ANSWERED = "is about what is answered"
_NO_HOST = "the reverse listener takes its origin from the route, never from what the client says"
_IN_REPLIES_ALONE: Final = ("echo in responses", "split at chunk borders", "redirects")
_IN_REPLIES: Final = (*_IN_REPLIES_ALONE, "compressed echo", "request smuggling")
EMPTY: Final[dict[tuple[str, Listener | None, Direction], str]] = {
    **{(kind, None, Direction.REPLY): _ASKED for kind in KINDS if kind not in _IN_REPLIES},
    **{(kind, None, Direction.REQUEST): _ANSWERED for kind in _IN_REPLIES_ALONE},
    **{
        (kind, Listener.REVERSE, Direction.REQUEST): _NO_HOST
        for kind in ("host parsed two ways", "odd addresses", "SSRF to itself")
    },
}
"""Why a cell has no attack in it. `None`: on every listener."""

ELSEWHERE: Final[dict[str, str]] = {
    "DNS rebinding": "needs a name server of the proxy's: tests/egress_proxy/test_upstreams.py",
    "fail-open fall-backs": "needs a control plane that fails: tests/egress_proxy/test_control_plane_link.py",
    "plain-HTTP path forgotten": "is the first column of this grid",
    "supply chain of the key holder": "is about what runs beside it: tests/house, tests/charts, test_operation.py",
    "health that lies": "needs the proxy's own health: tests/egress_proxy/test_operation.py",
}
"""Classes that cannot be tried from outside, with where they are."""


@dataclass(frozen=True, slots=True)
class Result:
    attack: Attack
    way: Way
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.attack.kind}: {self.attack.name} [{self.way.listener}, {self.way.place}]: {self.verdict}"


def run(ways: Iterable[Way], attacks: Iterable[Attack] = ATTACKS) -> Iterator[Result]:
    """Every attack over every way that it suits, one after the other."""
    ways = list(ways)
    for attack in attacks:
        for way in ways:
            if attack.suits(way):
                yield _tried(attack, way.renewed() if attack.direction is Direction.REPLY else way)


def _tried(attack: Attack, way: Way) -> Result:
    try:
        return Result(attack, way, attack.run(way))
    except NothingTriedError as error:
        return Result(attack, way, f"nothing was tried: {error}")


Cell = tuple[str, str, str]
"""Kind, listener, direction."""


def cell(attack: Attack, way: Way) -> Cell:
    return attack.kind, way.listener.value, attack.direction.value


def grid(held: Counter[Cell], tried: Counter[Cell]) -> list[str]:
    """As lines of text: in each cell how many held, of how many where that is not all."""
    width = max(len(kind) for kind in KINDS) + 2
    heads = [f"{direction.value} {listener.value}" for listener, direction in COLUMNS]
    lines = [" " * width + "".join(f"{each:<18}" for each in heads)]
    reasons: dict[str, int] = {}
    for kind in KINDS:
        row = []
        for listener, direction in COLUMNS:
            key = (kind, listener.value, direction.value)
            if tried[key]:
                row.append(f"{held[key]}" if held[key] == tried[key] else f"{held[key]} of {tried[key]} !")
                continue
            reason = EMPTY.get((kind, listener, direction)) or EMPTY.get((kind, None, direction)) or "not tried here"
            row.append(f"– ({reasons.setdefault(reason, len(reasons) + 1)})")
        lines.append(f"{kind:<{width}}" + "".join(f"{each:<18}" for each in row))
    lines += [f"({number}) {reason}" for reason, number in reasons.items()]
    lines += [f"{kind}: {where}" for kind, where in ELSEWHERE.items()]
    lines.append(f"{sum(held.values())} of {sum(tried.values())} held")
    return lines
