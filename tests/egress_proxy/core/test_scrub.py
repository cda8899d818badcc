"""The way back: no secret in a reply, however it is cut or written, and nothing held back that need not be."""

import base64
import json
import random
import string
import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from egress_proxy.core.needles import DECISIVE_CHARACTERS, GUARDED_CHARACTERS, Needle, Needles
from egress_proxy.core.scrub import LeakError, Scrubber
from egress_proxy.core.search import LONG_BYTES, stands_in

PREFIX = "sk-real-"
SECRET = PREFIX + "aabaabaacdefghij/+klmn%op"
RAW = SECRET.encode()
ENCODED_BEGINNING = len(PREFIX) * 4 // 3 + DECISIVE_CHARACTERS
"""Characters of the longest form that may pass before anything is held back."""
SCRUB = "egress_proxy/core/scrub.py"
NEEDLES = "egress_proxy/core/needles.py"


def needles_for(secret: str = SECRET, known: int = len(PREFIX)) -> Needles:
    return Needles.of((secret, known))


def guarded(*texts: bytes, decisive: int = 1) -> Needles:
    """Forms as they stand, for streams of few letters."""
    forms = tuple(Needle(text, decisive) for text in sorted(texts, key=len, reverse=True))
    ends = tuple((form.text[-2:], form.text) for form in forms)
    return Needles(forms, tuple(form.text for form in forms), ends, max(map(len, texts)), are_guarded=True)


def scrubbed(pieces: list[bytes], needles: Needles) -> bytes:
    scrubber = Scrubber(needles)
    return b"".join(scrubber.feed(piece) for piece in pieces) + scrubber.finish()


def forms_of(secret: str) -> dict[str, bytes]:
    raw = secret.encode()
    return {
        "raw": raw,
        "percent": quote(secret, safe="").encode(),
        "percent in lower case": quote(secret, safe="").replace("%2F", "%2f").replace("%2B", "%2b").encode(),
        "JSON": json.dumps({"key": secret}).encode(),
        "JSON with escaped slashes": json.dumps({"key": secret}).replace("/", "\\/").encode(),
        **{f"base64 after {n} bytes": base64.b64encode(b"u" * n + raw + b"rest") for n in range(7)},
        **{f"base64url after {n} bytes": base64.urlsafe_b64encode(b"u" * n + raw) for n in range(7)},
    }


# --- forms and cuts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", forms_of(SECRET))
@pytest.mark.guards(NEEDLES, "for form in _forms(secret, known):", "for form in list(_forms(secret, known))[:1]:")
def test_a_secret_is_overwritten_in_every_form_however_it_is_cut(form: str) -> None:
    text = b"before " + forms_of(SECRET)[form] + b" after"
    whole = Scrubber(needles_for()).whole(text)

    for cut in range(len(text) + 1):
        out = scrubbed([text[:cut], text[cut:]], needles_for())
        early = [at for at in range(len(text)) if out[at] != whole[at]]
        # Of what was cut early the beginning may have passed, and no more of it than can be guessed with.
        assert all(at < cut and out[at] == text[at] for at in early)
        assert len(early) < ENCODED_BEGINNING

    assert len(whole) == len(text)
    assert whole.count(b"*") >= len(SECRET)
    assert not any(letters in whole for letters in (b"aabaabaac", b"defghij", b"YWFiYWFi", b"hYmFhYmFh"))


@pytest.mark.parametrize("form", forms_of(SECRET))
@pytest.mark.guards(SCRUB, "stands_in(text, data) or text in seam for", "text in seam for")
@pytest.mark.guards(SCRUB, "stands_in(text, data) or text in seam for", "stands_in(text, data) for")
@pytest.mark.guards(SCRUB, "data[: self._needles.longest]", "data[: len(tail)]")
@pytest.mark.guards(SCRUB, "return any(stands_in(text, data) for text in self._texts)", "return False")
def test_a_long_piece_is_searched_like_a_short_one(form: str) -> None:
    text, filler = b"before " + forms_of(SECRET)[form] + b" after", b"a coat, " * (LONG_BYTES // 8)

    for cut in range(len(text) + 1):
        short = scrubbed([text[:cut], text[cut:]], needles_for())

        assert scrubbed([text[:cut], text[cut:] + filler], needles_for()) == short + filler
        assert scrubbed([filler + text[:cut], text[cut:]], needles_for()) == filler + short
        assert scrubbed([filler + text[:cut], text[cut:] + filler], needles_for()) == filler + short + filler
    whole = Scrubber(needles_for()).whole(text)
    assert scrubbed([filler + text + filler], needles_for()) == filler + whole + filler
    assert Scrubber(needles_for()).whole(filler + text + filler) == filler + whole + filler


@given(st.binary(max_size=40), st.binary(min_size=1, max_size=4), st.binary(max_size=40))
@example(b"\0" * 8, b"\0", b"")
def test_the_c_librarys_search_answers_as_pythons_does(before: bytes, text: bytes, after: bytes) -> None:
    for data in (before + text + after, before + after, bytearray(before + text)):
        assert stands_in(text, data) == (text in data)  # type: ignore[arg-type]


@given(st.text(string.ascii_letters + string.digits + '/+=_-."\\ é%', min_size=24, max_size=80), st.integers(0, 5))
def test_no_form_of_any_guarded_secret_passes(secret: str, offset: int) -> None:
    needles = Needles.of((secret, 0))
    raw = secret.encode()
    reply = json.dumps({"a": secret, "b": base64.b64encode(b"x" * offset + raw).decode(), "c": quote(secret, safe="")})

    out = Scrubber(needles).whole(reply.encode())

    assert raw not in out
    assert json.dumps(secret)[1:-1].encode() not in out
    assert quote(secret, safe="").encode() not in out
    shown = [piece for piece in out.split(b'"') if len(piece) > 24 and set(piece) - set(b"*")]
    assert all(b"*" * (len(raw) - 4) in piece for piece in shown)


@pytest.mark.parametrize("first", range(0, len(RAW) + 1, 2))
@pytest.mark.parametrize("second", range(1, len(RAW) + 1, 2))
@pytest.mark.guards(SCRUB, "self._undecided(tail, len(data)) if self._needles", "0 if self._needles")
def test_a_secret_cut_twice_does_not_pass(first: int, second: int) -> None:
    """Until enough of it was matched its beginning may have passed; never the rest."""
    low, high = sorted((first, second))
    pieces = [b"before " + RAW[:low], RAW[low:high], RAW[high:] + b" after"]

    out = scrubbed(pieces, needles_for())

    assert RAW not in out
    shown = out.removeprefix(b"before ").removesuffix(b" after").replace(b"*", b"")
    assert RAW.startswith(shown) or out == b"before " + RAW + b" after"
    assert len(shown) < len(PREFIX) + DECISIVE_CHARACTERS


@given(
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"aab", b"aba", b"x"]), max_size=40),
    st.lists(st.integers(0, 80), max_size=10),
)
@example([b"aab", b"aab", b"a"], [1, 2, 3, 4, 5])
def test_how_a_stream_is_cut_never_changes_what_is_sent(words: list[bytes], places: list[int]) -> None:
    needle = b"aabaab"
    data = b"".join(words)
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})

    out = scrubbed([data[a:b] for a, b in pairwise(edges)], guarded(needle))

    assert out == scrubbed([data], guarded(needle))
    assert len(out) == len(data)
    assert needle not in out


@pytest.mark.parametrize("cut", range(len(RAW) + 1))
def test_the_last_piece_is_searched_together_with_what_was_held(cut: int) -> None:
    scrubber = Scrubber(guarded(RAW))

    out = scrubber.feed(b"a" + RAW[:cut]) + scrubber.last(RAW[cut:] + b"sk-")

    assert out == b"a" + b"*" * len(RAW) + b"sk-"


def test_several_secrets_are_all_scrubbed_and_counted() -> None:
    scrubber = Scrubber(guarded(b"first-secret", b"c2Vjb25k"))

    assert scrubber.feed(b"a first-secret b c2Vjb25k c first-") == b"a ************ b ******** c "
    assert scrubber.feed(b"secret") == b"************"
    assert scrubber.hits == 3


@given(
    st.lists(st.sampled_from([b"a", b"b", b"c", b"abc", b"bcd", b"abcd", b"x"]), max_size=30),
    st.lists(st.integers(0, 60), max_size=10),
)
@pytest.mark.guards(SCRUB, "self._shown = shown[-hold:]", "self._tail = self._shown = shown[-hold:]")
def test_secrets_that_overlap_are_all_overwritten_however_they_are_cut(words: list[bytes], places: list[int]) -> None:
    texts = (b"abcd", b"abc", b"bcda", b"cdab")
    data = b"".join(words)
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    expected = bytearray(data)
    for text in texts:
        for at in range(len(data)):
            if data.startswith(text, at):
                expected[at : at + len(text)] = b"*" * len(text)

    out = scrubbed([data[a:b] for a, b in pairwise(edges)], guarded(*texts))

    assert out == bytes(expected)


@pytest.mark.guards(
    SCRUB, "            return self._overwritten(data, data, new_from=0)\n", "            return data\n"
)
def test_a_head_is_scrubbed_and_keeps_its_length() -> None:
    head = b"HTTP/1.1 200 " + RAW + b"\r\nLocation: https://x/?k=" + RAW + b"\r\n\r\n"

    out = Scrubber(needles_for()).whole(head)

    assert RAW not in out
    assert len(out) == len(head)


def undecided(data: bytes, needles: Needles) -> int:
    """As it is defined: the longest end of `data` that begins a form, and has enough of it."""
    ends = [
        length
        for form in needles.forms
        for length in range(form.decisive, min(len(form.text), len(data) + 1))
        if form.text.startswith(data[-length:])
    ]
    return max(ends, default=0)


@given(
    st.lists(st.text("ab", min_size=3, max_size=12), min_size=1, max_size=3),
    st.integers(1, 4),
    st.lists(st.text("abc", max_size=9), max_size=12),
)
@example(["a" * 12], 2, ["a" * 9, "a" * 9, "b", "aaa"])
@example(["abaabaab"], 3, ["abaaba", "abaab", "aabaab"])
@example(["abaaba"], 3, ["abaababaaba"])
@pytest.mark.guards(SCRUB, "self._borders_of(place, text)[known - 1]\n", "0\n")
@pytest.mark.guards(SCRUB, "at + max(period, len(text) - period) + 1)", "end)")
def test_secrets_that_repeat_themselves_are_found_everywhere(
    secrets: list[str], decisive: int, parts: list[str]
) -> None:
    needles = guarded(*{secret.encode() for secret in secrets}, decisive=decisive)
    pieces = [part.encode() for part in parts if part]
    scrubber, data, held = Scrubber(needles), b"", 0

    for piece in pieces:
        data += piece
        could_be_held = held + len(piece)  # what passed before there was enough of it is out
        held = could_be_held - len(scrubber.feed(piece))
        assert held == min(could_be_held, undecided(data, needles))

    stands = [(at, text) for text in needles.texts for at in range(len(data)) if data.startswith(text, at)]
    assert scrubber.hits == len(stands)
    whole, mask = Scrubber(needles).whole(data), {at + n for at, text in stands for n in range(len(text))}
    assert whole == bytes(0x2A if at in mask else byte for at, byte in enumerate(data))


def steps_taken(pieces: list[bytes], needles: Needles) -> int:
    """Lines run and functions called: what takes time, counted."""
    scrubber, count = Scrubber(needles), 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "c_call"

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        for piece in pieces:
            scrubber.feed(piece)
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


@pytest.mark.parametrize("piece", [1, 7, 100_000], ids=["byte by byte", "by sevens", "at once"])
@pytest.mark.parametrize(
    "stream",
    [lambda n: b"a" * (n - 1) + b"b", lambda n: b"a" * n, lambda n: b"a" * (n // 2) + b"b" * (n // 2)],
    ids=["but for the last", "the secret", "half of it"],
)
@pytest.mark.guards(SCRUB, "            at = old\n", "            at = known = old = 0\n")
def test_a_secret_that_repeats_itself_takes_as_long_as_it_is(stream: Callable[[int], bytes], piece: int) -> None:
    steps = []

    for length in (500, 1_000, 2_000):
        data = stream(length) * 3
        pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
        steps.append(steps_taken(pieces, guarded(b"a" * length, decisive=12)))

    assert steps[1] <= 2.2 * steps[0] + 500
    assert steps[2] <= 2.2 * steps[1] + 500


# --- what holding back tells ------------------------------------------------------------------------------------------


def held_after(text: bytes, needles: Needles) -> int:
    """How many bytes of a piece of a stream have not passed yet."""
    return len(text) - len(Scrubber(needles).feed(text))


def test_a_complete_event_passes_at_once() -> None:
    for needles in (needles_for(), needles_for("short", 0)):
        assert held_after(b"data: hello\n\n", needles) == 0
        assert held_after(b"data: " + PREFIX.encode() + b"\n\n", needles) == 0


@pytest.mark.parametrize("right", range(len(PREFIX) + DECISIVE_CHARACTERS))
@pytest.mark.guards(NEEDLES, "yield Needle(raw, len(prefix) + DECISIVE_CHARACTERS)", "yield Needle(raw, 1)")
def test_a_guess_of_few_characters_is_not_answered_by_a_delay(right: int) -> None:
    """However many of them are right: the next one is held back no more than a wrong one."""
    guess = RAW[:right]
    wrong = guess[:-1] + b"~" if guess else b"~"

    assert held_after(b"x " + guess, needles_for()) == held_after(b"x " + wrong, needles_for()) == 0


def test_enough_of_a_guarded_secret_is_held_back_until_it_is_decided() -> None:
    enough = RAW[: len(PREFIX) + DECISIVE_CHARACTERS]
    scrubber = Scrubber(needles_for())

    assert scrubber.feed(b"x " + enough) == b"x "
    assert scrubber.feed(b"~") == enough + b"~"


@given(st.text(string.ascii_lowercase, min_size=0, max_size=30), st.text(string.ascii_lowercase, max_size=30))
@pytest.mark.guards(SCRUB, "are_guarded else self._unended(tail)", "are_guarded else self._undecided(tail, len(data))")
def test_for_a_short_secret_the_same_is_held_whatever_was_matched(one: str, other: str) -> None:
    needles = Needles.of(("hunter2hunter2", 0))
    length = min(len(one), len(other))

    held = [held_after(b"\n" + text[:length].encode(), needles) for text in (one, other)]

    assert held[0] == held[1] == min(length, needles.longest - 1)


@pytest.mark.parametrize("form", forms_of("hunter2hunter2"))
@pytest.mark.guards(SCRUB, "                    raise LeakError\n", "                    pass\n")
def test_a_short_secret_blocks_the_reply(form: str) -> None:
    text = b"before " + forms_of("hunter2hunter2")[form] + b" after"
    needles = Needles.of(("hunter2hunter2", 0))

    for cut in range(len(text) + 1):
        scrubber = Scrubber(needles)
        with pytest.raises(LeakError):
            scrubber.last(scrubber.feed(text[:cut]) * 0 + text[cut:])
        assert scrubber.hits == 1


@pytest.mark.parametrize("unknown", [GUARDED_CHARACTERS - 1, GUARDED_CHARACTERS])
@pytest.mark.guards(NEEDLES, "len(secret) - known >= GUARDED_CHARACTERS", "len(secret) >= GUARDED_CHARACTERS")
def test_what_everybody_knows_of_a_secret_does_not_make_it_long(unknown: int) -> None:
    secret = PREFIX + "".join(random.Random(1).choices(string.ascii_letters, k=unknown))

    assert needles_for(secret).are_guarded is (unknown >= GUARDED_CHARACTERS)
