"""What an attack is, and what can be said of how a proxy took it.

A verdict is empty where the proxy held, and otherwise says in one line what broke.
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from tests.attacks.ways import Listener, Place, Seen, Way, forms
from tests.support.raw_client import Line, NoReplyError, Response, TunnelRefusedError
from tests.support.upstream import Behaviour, plain

WAIT_SECONDS = 5.0

Verdict = str


class NothingTriedError(Exception):
    """The request did not get to the origin, swapped, so that what was to be tried was not."""


class Direction(StrEnum):
    REQUEST = "→"
    REPLY = "←"


@dataclass(frozen=True, slots=True)
class Attack:
    """One input of one class (`kind` is the row of the grid), and where it makes sense."""

    kind: str
    name: str
    run: Callable[[Way], Verdict]
    direction: Direction = Direction.REQUEST
    listeners: frozenset[Listener] = frozenset(Listener)
    places: frozenset[Place] = frozenset(Place)

    def suits(self, way: Way) -> bool:
        return way.listener in self.listeners and way.place in self.places


def attacks(
    kind: str,
    inputs: Iterable[tuple[str, Callable[[Way], Verdict]]],
    *,
    direction: Direction = Direction.REQUEST,
    listeners: Iterable[Listener] = Listener,
    places: Iterable[Place] = Place,
) -> list[Attack]:
    return [Attack(kind, name, run, direction, frozenset(listeners), frozenset(places)) for name, run in inputs]


# --- verdicts on requests ---------------------------------------------------------------------------------------------


def refuses(way: Way, raw: bytes, *, line: Line | None = None) -> Verdict:
    """An error or a hang-up, and nothing upstream: neither a request nor any byte of the key."""
    seen, elsewhere = Seen(way.origin), Seen(way.other_origin)
    verdict, line = _no_request(way, raw, line, seen, elsewhere)
    return verdict or _no_key(way, line, seen, elsewhere)


def never_whole(way: Way, raw: bytes) -> Verdict:
    """As `refuses`, for what is wrong behind the head: the origin may have seen a beginning, never a whole request."""
    verdict, line = _no_request(way, raw, None, Seen(way.origin), Seen(way.other_origin))
    return verdict or ("the key came back" if _came_back(way, line) else "")


def _no_request(way: Way, raw: bytes, line: Line | None, *seen: Seen) -> tuple[Verdict, Line]:
    """An error or a hang-up, and no whole request at an origin; and the line that it was asked on."""
    response, line, is_over = _ask(way, raw, line)
    if response is not None and response.status < 400:
        return f"answered {response.status}", line
    if response is None and not is_over:
        return "neither answered nor hung up", line
    return ("reached an origin" if any(each.requests for each in seen) else ""), line


def carries_as_text(way: Way, raw: bytes, text: bytes) -> Verdict:
    """The request goes, swapped once in its place; `text` arrives as it was sent."""
    seen = Seen(way.origin)
    response, _, _ = _ask(way, raw, None)
    if response is None or response.status >= 400:
        return f"answered {response.status if response else 'nothing'}"
    if len(seen.requests) != 1 or not way.has_the_secret(seen.requests[0]):
        return "was not swapped in its place"
    request = seen.requests[0]
    if text not in request.body:
        return "the body was changed"
    return "the key stands in the body" if way.secret.encode() in request.body else ""


def same_or_refused(way: Way, raw: bytes, *, line: Line | None = None) -> Verdict:
    """Either it means the same origin and is swapped for that one, or it is refused; nothing goes anywhere else."""
    seen, elsewhere = Seen(way.origin), Seen(way.other_origin)
    response, line, is_over = _ask(way, raw, line)
    if elsewhere.requests:
        return "reached another origin"
    if response is None:
        return "" if is_over else "neither answered nor hung up"
    if response.status >= 400:
        return "refused, and sent all the same" if seen.requests else _no_key(way, line, seen, elsewhere)
    if not all(way.has_the_secret(request) for request in seen.requests) or not seen.requests:
        return "answered without having been swapped"
    return ""


def swaps_cleanly(way: Way, raw: bytes, *, unwanted: Iterable[bytes] = ()) -> Verdict:
    """Refused; or swapped, and the origin got none of these bytes (compared in lower case)."""
    seen = Seen(way.origin)
    response, _, _ = _ask(way, raw, None)
    if response is None or response.status >= 400:
        return "refused, and sent all the same" if seen.requests else ""
    if not all(way.has_the_secret(request) for request in seen.requests) or not seen.requests:
        return "answered without having been swapped"
    found = [text for text in unwanted if text.lower() in seen.bytes.lower()]
    return f"the origin got {found[0]!r}" if found else ""


# --- verdicts on replies ----------------------------------------------------------------------------------------------


def nothing_comes_back(way: Way, behaviour: Behaviour, *more: str, method: str = "GET") -> Verdict:
    """The origin answers with the key; the client gets neither the key nor a form of it."""
    line, _ = answered(way, behaviour, *more, method=method)
    return "the key came back" if _came_back(way, line) else ""


def blocks(way: Way, behaviour: Behaviour, *more: str) -> Verdict:
    """A reply that cannot be searched: an error, or a break."""
    line, response = answered(way, behaviour, *more)
    if response is not None and response.status < 400 and response.complete:
        return f"passed a whole {response.status}"
    return "the key came back" if _came_back(way, line) else ""


def fails(way: Way, behaviour: Behaviour) -> Verdict:
    """A reply that two readers could read in two ways: an error, or a break, and never the next reply's place."""
    line, response = answered(way, behaviour)
    if response is not None and response.status < 400 and response.complete:
        return f"passed a whole {response.status}"
    if b"smuggled" in line.received:
        return "the second reply came through"
    _, next_response = answered(way, plain(b"the next one"))
    if next_response is None or b"smuggled" in next_response.body:
        return "the next request got the second reply"
    return ""


def answered(way: Way, behaviour: Behaviour, *more: str, method: str = "GET") -> tuple[Line, Response | None]:
    """The reply to a request that may go, where the origin behaves so. Raises `NothingTriedError`."""
    seen = Seen(way.origin)
    path = way.target("/answered").removeprefix(way.prefix).partition("?")[0].replace(way.placeholder, way.secret)
    way.origin.on(path, behaviour)
    response, line, _ = _ask(way, way.request(*more, path="/answered", method=method), None)
    if not any(way.has_the_secret(request) for request in seen.requests):
        raise NothingTriedError(f"answered {response.status} {response.refusal}" if response else "not answered")
    return line, response


# --- asking -----------------------------------------------------------------------------------------------------------


def _ask(way: Way, raw: bytes, line: Line | None) -> tuple[Response | None, Line, bool]:
    """The reply, if there was one; the line; and whether it is over where there was none."""
    if line is None:
        try:
            line = way.open()
        except TunnelRefusedError as refused:
            bare = way.dial()
            bare.close()
            return refused.response, bare, True
    response: Response | None = None
    is_over = False
    try:
        line.send(raw)
        method = raw.split(b" ", 1)[0].decode("latin-1")
        response = line.read_response(method=method, timeout_seconds=WAIT_SECONDS)
    except (NoReplyError, ConnectionError):
        is_over = True
    except (OSError, ValueError) as error:
        is_over = not isinstance(error, TimeoutError)
    finally:
        with contextlib.suppress(OSError):
            line.close()
    return response, line, is_over


def _no_key(way: Way, line: Line, *seen: Seen) -> Verdict:
    if any(way.secret.encode() in each.bytes for each in seen):
        return "the key left"
    return "the key came back" if _came_back(way, line) else ""


def _came_back(way: Way, line: Line) -> bool:
    return any(form in line.received for form in forms(way.secret))
