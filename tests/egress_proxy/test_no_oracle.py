"""What is held back answers no guess: through the whole proxy, a right beginning of a secret and a wrong one are alike.

An upstream that echoes what it is sent lets a program have its guesses compared with the secret. If a right guess were
held back for longer than a wrong one, a secret could be guessed one character at a time.
"""

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable

import pytest

from egress_proxy.core.needles import DECISIVE_CHARACTERS
from tests.egress_proxy.world import World, get, reverse_path
from tests.support.raw_client import Line
from tests.support.upstream import Gate, Request, Upstream, Wire, chunk

SCRUB = "egress_proxy/core/scrub.py"
NEEDLES = "egress_proxy/core/needles.py"
LONG = "Kx7" + secrets.token_hex(20)
SHORT = "Kx7pQ2mZ9rT4"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
QUIET_SECONDS = 0.2
"""So long nothing may come before what was not there counts as held back."""


def guesses(secret: str, length: int) -> dict[str, bytes]:
    wrong = secret[: length - 1] + ("a" if secret[length - 1] != "a" else "b")
    return {"right": secret[:length].encode(), "wrong": wrong.encode()}


def before_more_is_written(world: World, upstream: Upstream, secret: str, guess: bytes) -> tuple[bytes, float]:
    """What the client has of a body that ends with the guess, while the stream is open; and how long that took."""
    gate = Gate()

    async def behave(_: Request, wire: Wire) -> None:
        await wire.write(HEAD + chunk(b"0123456789" + guess))
        await gate.opened()
        await wire.write(b"0\r\n\r\n")

    upstream.default = behave
    ticket = world.ticket(upstream.url, secret=secret)
    with world.reverse() as line:
        line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        line.read_until(b"\r\n\r\n")
        began = time.monotonic()
        body = _whatever_comes(line, enough=lambda got: got.endswith(guess + b"\r\n"))
        took = time.monotonic() - began
        gate.open()
    return body, took


def _whatever_comes(line: Line, *, enough: Callable[[bytes], bool]) -> bytes:
    line.sock.settimeout(QUIET_SECONDS)
    with contextlib.suppress(TimeoutError):
        while not enough(bytes(line._unread)) and line._more():
            pass
    return bytes(line._unread)


@pytest.mark.guards(NEEDLES, "DECISIVE_CHARACTERS: Final = 12", "DECISIVE_CHARACTERS: Final = 4")
@pytest.mark.parametrize("length", [1, 2, 5, 8, 11])
def test_a_guess_of_fewer_than_the_decisive_characters_passes_at_once_right_or_wrong(
    world: World, upstream: Upstream, length: int
) -> None:
    came = {
        name: before_more_is_written(world, upstream, LONG, guess)[0] for name, guess in guesses(LONG, length).items()
    }

    assert {name: body.partition(b"0123456789")[2] for name, body in came.items()} == {
        name: guess + b"\r\n" for name, guess in guesses(LONG, length).items()
    }


def test_the_delays_of_a_right_and_a_wrong_guess_are_alike(world: World, upstream: Upstream) -> None:
    """Taken in turn, so that whatever else the machine does meets both."""
    delays: dict[str, list[float]] = {"right": [], "wrong": []}

    for _ in range(25):
        for name, guess in guesses(LONG, DECISIVE_CHARACTERS - 1).items():
            delays[name].append(before_more_is_written(world, upstream, LONG, guess)[1])

    right, wrong = (statistics.median(delays[name]) for name in ("right", "wrong"))
    assert max(right, wrong) < QUIET_SECONDS / 4, "neither is held back"
    assert abs(right - wrong) < max(min(right, wrong), 0.005), (right, wrong)


def test_more_than_the_decisive_characters_are_held_back_until_it_is_known(world: World, upstream: Upstream) -> None:
    found = guesses(LONG, DECISIVE_CHARACTERS)

    right, wrong = (before_more_is_written(world, upstream, LONG, found[name])[0] for name in ("right", "wrong"))

    assert right == chunk(b"0123456789")
    assert wrong == chunk(b"0123456789" + found["wrong"])


@pytest.mark.guards(SCRUB, "else self._unended(tail)", "else self._undecided(tail, len(data))")
@pytest.mark.parametrize("length", [1, 3, 6, 11])
def test_of_a_short_secret_as_much_is_held_back_for_a_wrong_guess_as_for_a_right_one(
    world: World, upstream: Upstream, length: int
) -> None:
    found = guesses(SHORT, length)

    right, wrong = (before_more_is_written(world, upstream, SHORT, found[name])[0] for name in ("right", "wrong"))

    assert len(right) == len(wrong)
    assert found["right"] not in right
    assert found["wrong"] not in wrong
