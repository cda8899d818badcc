"""Placeholders: what is minted parses, what is forged does not, and no cut of a stream hides a marker."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.placeholder import (
    BASE62,
    DETECTOR,
    ENTROPY_BYTES,
    MAX_BODY,
    MIN_BODY,
    ForgedTokenError,
    Shape,
    Sighting,
    StreamFinder,
    TokenKind,
    fingerprint,
    genuine_at,
    has_marker,
    mint,
    parse,
    redact,
    sightings,
)

FILE = "control_plane/contract/placeholder.py"

KEY = bytes(range(32))
OLDER_KEY = bytes(range(32, 64))
FOREIGN_KEY = b"\xff" * 32
ENTROPY = bytes(range(100, 100 + ENTROPY_BYTES))

PREFIX_CHARACTERS = BASE62 + "_-"
ANY_CHARACTER = st.characters() | st.sampled_from("\ud800\udc80\udcff\udfff")  # lone surrogates too
PROVIDER_SHAPES = [
    Shape(),
    Shape("ghp_", 40),
    Shape("sk-ant-api03-"),
    Shape("sk-"),
    Shape("xoxb-"),
    Shape("sk-ant-api03-", 108),
    Shape("", 36),
    Shape("p" * 24, 24 + 8 + MAX_BODY),
]

keys = st.binary(min_size=32, max_size=32)
entropies = st.binary(min_size=ENTROPY_BYTES, max_size=ENTROPY_BYTES)
kinds = st.sampled_from(TokenKind)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    prefix = draw(st.text(PREFIX_CHARACTERS, max_size=24).filter(lambda text: not has_marker(text.encode())))
    shortest = len(prefix) + 8 + MIN_BODY
    length = draw(st.none() | st.integers(shortest, shortest + MAX_BODY - MIN_BODY))
    return Shape(prefix, length)


def placeholder(shape: Shape = PROVIDER_SHAPES[2], kind: TokenKind = TokenKind.PLACEHOLDER) -> str:
    return mint(shape, kind, tag_key=KEY, entropy=ENTROPY)


# --- mint and parse --------------------------------------------------------------------------------------------------


@given(shape=shapes(), kind=kinds, key=keys, entropy=entropies)
def test_what_is_minted_parses_to_itself(shape: Shape, kind: TokenKind, key: bytes, entropy: bytes) -> None:
    text = mint(shape, kind, tag_key=key, entropy=entropy)

    token = parse(text, [key])
    assert (token.text, token.kind, token.fingerprint) == (text, kind, fingerprint(text))


@given(shape=shapes(), kind=kinds, entropy=entropies)
def test_a_shape_fixes_prefix_marker_and_length(shape: Shape, kind: TokenKind, entropy: bytes) -> None:
    text = mint(shape, kind, tag_key=KEY, entropy=entropy)

    body = text.removeprefix(shape.prefix).removeprefix(kind.value)
    assert text == shape.prefix + kind.value + body
    assert MIN_BODY <= len(body) <= MAX_BODY
    assert set(body) <= set(BASE62)
    assert shape.length in (None, len(text))


@pytest.mark.parametrize("shape", PROVIDER_SHAPES)
def test_the_detector_for_secret_scanners_finds_placeholders_of_every_shape(shape: Shape) -> None:
    found = re.search(DETECTOR, f"key={placeholder(shape)};")

    assert found is not None
    assert placeholder(shape).endswith(found[0])


def test_different_entropy_gives_a_different_placeholder() -> None:
    seen = {mint(Shape(), TokenKind.PLACEHOLDER, tag_key=KEY, entropy=bytes([n] * ENTROPY_BYTES)) for n in range(256)}

    assert len(seen) == 256


@pytest.mark.parametrize("size", [0, ENTROPY_BYTES - 1, ENTROPY_BYTES + 1])
@pytest.mark.guards(FILE, "if len(entropy) != ENTROPY_BYTES:", "if False:")
def test_too_little_entropy_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match="entropy"):
        mint(Shape(), TokenKind.PLACEHOLDER, tag_key=KEY, entropy=bytes(size))


def test_every_key_of_the_ring_is_accepted_so_that_rotation_has_no_flag_day() -> None:
    assert parse(placeholder(), [FOREIGN_KEY, OLDER_KEY, KEY]).text == placeholder()


@pytest.mark.guards(FILE, "if hmac.compare_digest(_tag(stem, key), tag):", "if len(tag) == TAG_LENGTH:")
def test_a_placeholder_with_the_tag_of_a_foreign_key_is_forged() -> None:
    forged = mint(Shape(), TokenKind.PLACEHOLDER, tag_key=FOREIGN_KEY, entropy=ENTROPY)

    with pytest.raises(ForgedTokenError, match="no known key"):
        parse(forged, [KEY, OLDER_KEY])


def test_an_empty_ring_accepts_nothing() -> None:
    with pytest.raises(ForgedTokenError):
        parse(placeholder(), [])


@pytest.mark.parametrize("shape", PROVIDER_SHAPES)
@pytest.mark.parametrize("kind", TokenKind)
@pytest.mark.guards(
    FILE,
    'digest = hmac.digest(key, stem.encode("ascii"), "sha256")',
    'digest = hmac.digest(key, stem[:20].encode("ascii"), "sha256")',
)
def test_any_changed_character_at_any_place_is_refused(shape: Shape, kind: TokenKind) -> None:
    genuine = placeholder(shape, kind)

    for forged in _every_change(genuine):
        with pytest.raises(ForgedTokenError):
            parse(forged, [KEY])


def _every_change(genuine: str) -> Iterator[str]:
    """Each position replaced by one of every class of character, and by its other case."""
    for at, old in enumerate(genuine):
        for new in (*"0aZ_-", old.swapcase(), "é", "ａ", "\x00", "\n", " ", "%", chr(ord(old) ^ 1)):
            if new != old:
                yield genuine[:at] + new + genuine[at + 1 :]


@pytest.mark.parametrize("shape", PROVIDER_SHAPES)
def test_a_cut_placeholder_is_refused_wherever_it_is_cut(shape: Shape) -> None:
    genuine = placeholder(shape)

    for at in range(len(genuine)):
        for cut in {genuine[:at], genuine[at + 1 :], genuine[:at] + genuine[at + 1 :]} - {genuine}:
            with pytest.raises(ForgedTokenError):
                parse(cut, [KEY])


@pytest.mark.parametrize("extra", [*"0aZ_- \n\r\x00%é", "=", "\u200b"])
@pytest.mark.guards(FILE, "match = _GRAMMAR.fullmatch(untrusted)", "match = _GRAMMAR.search(untrusted)")
def test_an_extended_placeholder_is_refused_at_either_end(extra: str) -> None:
    genuine = placeholder()

    for extended in (genuine + extra, extra + genuine):
        with pytest.raises(ForgedTokenError):
            parse(extended, [KEY])


@pytest.mark.parametrize("altered", [str.upper, str.lower, str.swapcase, str.title])
def test_a_placeholder_in_another_case_is_refused(altered: Callable[[str], str]) -> None:
    with pytest.raises(ForgedTokenError):
        parse(altered(placeholder()), [KEY])


def test_a_placeholder_never_passes_for_a_proxy_credential() -> None:
    relabelled = placeholder().replace(TokenKind.PLACEHOLDER.value, TokenKind.PROXY_CREDENTIAL.value)

    with pytest.raises(ForgedTokenError):
        parse(relabelled, [KEY])


@given(untrusted=st.text())
def test_arbitrary_text_is_refused_and_nothing_else_is_raised(untrusted: str) -> None:
    with pytest.raises(ForgedTokenError):
        parse(untrusted, [KEY])


@given(prefix=st.text(PREFIX_CHARACTERS, max_size=24), body=st.text(BASE62, min_size=MIN_BODY, max_size=MAX_BODY))
def test_a_guessed_placeholder_of_the_right_form_is_refused(prefix: str, body: str) -> None:
    with pytest.raises(ForgedTokenError):
        parse(prefix + TokenKind.PLACEHOLDER.value + body, [KEY])


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "length"),
    [
        ("with space", None),
        ("dot.", None),
        ("p" * 25, None),
        ("ünï", None),
        ("line\n", None),
        ("coatchk1", None),
        ("COATPRX1", None),
        ("ghp_", 39),
        ("ghp_", 4 + 8 + MAX_BODY + 1),
        ("", 0),
        ("", -40),
    ],
)
def test_an_impossible_shape_is_an_error(prefix: str, length: int | None) -> None:
    with pytest.raises(ValueError, match="shape"):
        Shape(prefix, length)


# --- what is stored and shown ----------------------------------------------------------------------------------------


def test_the_fingerprint_is_sha256_in_hex() -> None:
    assert fingerprint("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@given(untrusted=st.text(ANY_CHARACTER))
def test_a_fingerprint_exists_for_every_text_even_with_lone_surrogates(untrusted: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", fingerprint(untrusted))


@pytest.mark.guards(
    FILE,
    'return f"GenuineToken({self.kind.name}, sha256={self.fingerprint[:12]}…)"',
    'return f"GenuineToken({self.text})"',
)
def test_a_token_does_not_show_itself() -> None:
    token = parse(placeholder(), [KEY])

    for shown in (repr(token), str(token), f"{token}", f"{[token]}"):
        assert placeholder() not in shown
        assert not has_marker(shown.encode())


@given(untrusted=st.text())
def test_an_error_about_a_forgery_does_not_quote_it(untrusted: str) -> None:
    with pytest.raises(ForgedTokenError) as raised:
        parse(untrusted + "coatchk1", [KEY])

    assert not has_marker(str(raised.value).encode())


# --- finding ---------------------------------------------------------------------------------------------------------

noise = st.text(st.characters(max_codepoint=0x2FF)).map(lambda text: text.encode("utf-8", "surrogatepass"))
markers = st.sampled_from([kind.value for kind in TokenKind])


@st.composite
def any_case(draw: st.DrawFn, words: st.SearchStrategy[str] = markers) -> bytes:
    word = draw(words)
    upper = draw(st.lists(st.booleans(), min_size=len(word), max_size=len(word)))
    return "".join(c.upper() if up else c for c, up in zip(word, upper, strict=True)).encode()


@given(before=st.binary(), marker=any_case(), after=st.binary())
@pytest.mark.guards(FILE, "lowered = data.lower()", "lowered = data")
def test_a_marker_in_any_case_between_any_bytes_is_seen(before: bytes, marker: bytes, after: bytes) -> None:
    data = before + marker + after

    seen = list(sightings(data))

    assert has_marker(data)
    assert len(before) in [sighting.start for sighting in seen]


@given(data=st.binary())
def test_bytes_without_a_marker_have_no_sighting(data: bytes) -> None:
    lowered = data.lower()
    is_there = b"coatchk1" in lowered or b"coatprx1" in lowered

    assert has_marker(data) == is_there
    assert bool(list(sightings(data))) == is_there


@given(pieces=st.lists(noise | any_case() | st.just(placeholder().encode()), max_size=8))
def test_a_sighting_runs_from_its_marker_to_the_end_of_the_base62_run(pieces: list[bytes]) -> None:
    data = b"".join(pieces)

    for seen in sightings(data):
        body = data[seen.start + 8 : seen.end]
        assert data[seen.start : seen.start + 8].lower() in (b"coatchk1", b"coatprx1")
        assert re.fullmatch(rb"[0-9A-Za-z]*", body)
        assert not re.match(rb"[0-9A-Za-z]", data[seen.end : seen.end + 1])


@given(
    pieces=st.lists(noise | any_case() | st.sampled_from([b"coat", b"coatchk", b"prx1", b"chk1", b"co"]), max_size=10),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
@pytest.mark.guards(FILE, "self._carry = window[max(last, len(window) - (MARKER_LENGTH - 1)) :]", "self._carry = b''")
def test_how_a_stream_is_cut_changes_nothing_about_what_is_found(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces)
    whole = len(list(sightings(data)))
    finder = StreamFinder()

    for begin, end in _ranges(cuts, len(data)):
        finder.feed(data[begin:end])

    assert finder.count == whole


def _ranges(cuts: list[int], length: int) -> list[tuple[int, int]]:
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    return list(pairwise(edges))


@pytest.mark.parametrize("piece_size", range(1, 20))
def test_a_stream_in_pieces_of_every_size_shows_both_kinds(piece_size: int) -> None:
    data = f"x{placeholder()}y {placeholder(kind=TokenKind.PROXY_CREDENTIAL).upper()}coatchk1coatchk1".encode()
    finder = StreamFinder()

    for at in range(0, len(data), piece_size):
        finder.feed(data[at : at + piece_size])

    assert finder.count == 4


# --- which token a sighting belongs to -------------------------------------------------------------------------------

BEFORE = [b"", b"Bearer ", b"key=", b"%22", b"a:b@", b"_-_", b"AbC0", b"x" * 200, b"\xff\x00"]
AFTER = [b"", b" ", b"&b=1", b"%22", b'"', b"-", b"_", b"\xff", b"@host"]


@pytest.mark.parametrize("shape", PROVIDER_SHAPES)
@pytest.mark.parametrize("before", BEFORE)
def test_a_genuine_token_is_recognised_whatever_stands_around_it(shape: Shape, before: bytes) -> None:
    if before.endswith((b"-", b"_", b"0", b"x")) and len(shape.prefix) == 24:
        before += b" "  # a prefix of full length leaves no room to try further beginnings

    for after in AFTER:
        data = before + placeholder(shape).encode() + after
        token = genuine_at(data, next(sightings(data)), [OLDER_KEY, KEY])
        assert token == parse(placeholder(shape), [KEY])


@given(before=st.binary(max_size=40), after=st.binary(max_size=10), shape=shapes())
def test_a_token_found_anywhere_is_one_that_parses(before: bytes, after: bytes, shape: Shape) -> None:
    data = before + mint(shape, TokenKind.PLACEHOLDER, tag_key=KEY, entropy=ENTROPY).encode() + after

    for seen in sightings(data):
        token = genuine_at(data, seen, [KEY])
        assert token is None or parse(token.text, [KEY]) == token


@pytest.mark.parametrize("altered", [bytes.upper, bytes.lower, lambda data: data[:-1], lambda data: data + b"0"])
def test_an_altered_token_is_seen_but_not_genuine(altered: Callable[[bytes], bytes]) -> None:
    data = altered(placeholder().encode())

    seen = next(sightings(data))

    assert genuine_at(data, seen, [KEY]) is None


def test_each_of_several_tokens_is_recognised_by_its_own_sighting() -> None:
    first, second = placeholder(), placeholder(Shape("ghp_", 40), TokenKind.PROXY_CREDENTIAL)
    data = f"{first}.{second}".encode()

    tokens = [genuine_at(data, seen, [KEY]) for seen in sightings(data)]

    assert [token.text for token in tokens if token] == [first, second]


def test_a_sighting_at_the_very_start_is_recognised() -> None:
    bare = placeholder(Shape(""))

    assert genuine_at(bare.encode(), Sighting(0, len(bare)), [KEY]) is not None


# --- redaction -------------------------------------------------------------------------------------------------------


@given(pieces=st.lists(st.text(ANY_CHARACTER) | any_case().map(bytes.decode) | st.just(placeholder()), max_size=8))
@pytest.mark.guards(FILE, "out += data[at:begin] +", "out += data[at : seen.end] +")
def test_redacted_text_holds_no_marker(pieces: list[str]) -> None:
    assert not has_marker(redact("".join(pieces)).encode("utf-8", "surrogatepass"))


@given(text=st.text(ANY_CHARACTER))
def test_redaction_leaves_text_without_a_marker_as_it_is(text: str) -> None:
    if not has_marker(text.encode("utf-8", "surrogatepass")):
        assert redact(text) == text


@pytest.mark.parametrize("shape", PROVIDER_SHAPES)
def test_redaction_names_a_known_placeholder_and_keeps_what_stands_around_it(shape: Shape) -> None:
    names = {fingerprint(placeholder(shape)): "ph_1"}

    redacted = redact(f"/v1/{placeholder(shape)}/x?k={placeholder(shape)}", names)

    assert redacted == "/v1/{placeholder:ph_1}/x?k={placeholder:ph_1}"


def test_redaction_of_an_unknown_or_cut_placeholder_says_only_that_there_was_one() -> None:
    assert redact(f"a/{placeholder()}/b") == "a/{placeholder}/b"
    assert redact(f"a/{placeholder()[:25]}/b") == "a/{placeholder}/b"
