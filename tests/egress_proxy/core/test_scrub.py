"""The way back: no secret in a reply, however it is cut, and nothing held back that need not be."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from egress_proxy.core.scrub import Scrubber

SECRET = b"sk-real-aabaabaac"
SCRUB = "egress_proxy/core/scrub.py"


def scrubbed(pieces: list[bytes], *needles: bytes) -> bytes:
    scrubber = Scrubber(needles)
    return b"".join(scrubber.feed(piece) for piece in pieces) + scrubber.finish()


@pytest.mark.parametrize("first", range(len(SECRET) + 1))
@pytest.mark.parametrize("second", range(len(SECRET) + 1))
@pytest.mark.guards(SCRUB, "        hold = self._undecided(window)\n", "        hold = 0\n")
def test_a_secret_cut_anywhere_does_not_pass(first: int, second: int) -> None:
    low, high = sorted((first, second))
    pieces = [b"before " + SECRET[:low], SECRET[low:high], SECRET[high:] + b" after"]

    assert scrubbed(pieces, SECRET) == b"before " + b"*" * len(SECRET) + b" after"


@given(
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"aab", b"aba", b"x"]), max_size=40),
    st.lists(st.integers(0, 80), max_size=10),
)
@example([b"aab", b"aab", b"a"], [1, 2, 3, 4, 5])
def test_how_a_stream_is_cut_never_changes_what_is_sent(words: list[bytes], places: list[int]) -> None:
    needle = b"aabaab"
    data = b"".join(words)
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})

    out = scrubbed([data[a:b] for a, b in pairwise(edges)], needle)

    assert out == scrubbed([data], needle)
    assert len(out) == len(data)
    assert needle not in out


@pytest.mark.parametrize("cut", range(len(SECRET) + 1))
def test_the_last_piece_is_searched_together_with_what_was_held(cut: int) -> None:
    scrubber = Scrubber((SECRET,))

    out = scrubber.feed(b"a" + SECRET[:cut]) + scrubber.last(SECRET[cut:] + b"sk-")

    assert out == b"a" + b"*" * len(SECRET) + b"sk-"


def test_what_cannot_be_a_secrets_beginning_passes_at_once() -> None:
    scrubber = Scrubber((SECRET,))

    assert scrubber.feed(b"data: hello\n\n") == b"data: hello\n\n"
    assert scrubber.feed(b"data: sk-re") == b"data: "
    assert scrubber.feed(b"fused\n\n") == b"sk-refused\n\n"


def test_several_needles_are_all_scrubbed_and_counted() -> None:
    scrubber = Scrubber((b"first-secret", b"c2Vjb25k"))

    assert scrubber.feed(b"a first-secret b c2Vjb25k c first-") == b"a ************ b ******** c "
    assert scrubber.feed(b"secret") == b"************"
    assert scrubber.hits == 3


@given(
    st.lists(st.sampled_from([b"a", b"b", b"c", b"abc", b"bcd", b"abcd", b"x"]), max_size=30),
    st.lists(st.integers(0, 60), max_size=10),
)
@pytest.mark.guards(
    SCRUB, "self._held, self._shown = window[-hold:], shown[-hold:]", "self._held = self._shown = shown[-hold:]"
)
def test_secrets_that_overlap_are_all_overwritten_however_they_are_cut(words: list[bytes], places: list[int]) -> None:
    needles = (b"abcd", b"abc", b"bcda", b"cdab")
    data = b"".join(words)
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    expected = bytearray(data)
    for needle in needles:
        for at in range(len(data)):
            if data.startswith(needle, at):
                expected[at : at + len(needle)] = b"*" * len(needle)

    out = scrubbed([data[a:b] for a, b in pairwise(edges)], *needles)

    assert out == bytes(expected)


@pytest.mark.guards(
    SCRUB, "        return self._overwritten(rendered, rendered, new_from=0)\n", "        return rendered\n"
)
def test_a_head_is_scrubbed_and_keeps_its_length() -> None:
    head = b"HTTP/1.1 200 " + SECRET + b"\r\nLocation: https://x/?k=" + SECRET + b"\r\n\r\n"

    out = Scrubber((SECRET,)).whole(head)

    assert SECRET not in out
    assert len(out) == len(head)
