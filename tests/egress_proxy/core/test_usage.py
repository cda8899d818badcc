"""What a reply says it used, in the forms of the providers, however it is cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egress_proxy.core.needles import Needles
from egress_proxy.core.usage import MeteringScrubber, UsageReader, tokens_used

FILE = "egress_proxy/core/usage.py"
SECRET = "sk-real-9f1c2b7e5a4d3c2b1a0f"

ANTHROPIC = json.dumps(
    {
        "id": "msg_1",
        "content": [{"type": "text", "text": 'it says {"usage": {"output_tokens": 9999999}} in a text'}],
        "usage": {
            "input_tokens": 100,
            "cache_creation_input_tokens": 20,
            "cache_read_input_tokens": 3,
            "output_tokens": 50,
            "service_tier": "standard",
        },
    }
).encode()
ANTHROPIC_STREAM = b"".join(
    b"event: %b\ndata: %b\n\n" % (name, json.dumps(data).encode())
    for name, data in (
        (b"message_start", {"message": {"usage": {"input_tokens": 100, "output_tokens": 1}}}),
        (b"content_block_delta", {"delta": {"text": "hello"}}),
        (b"message_delta", {"delta": {}, "usage": {"output_tokens": 75}}),
        (b"message_stop", {}),
    )
)
OPENAI = b'{"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":7,"total_tokens":17,"details":{"a":{"b":1}}}}'
OPENAI_STREAM = (
    b'data: {"choices":[{"delta":{"content":"x"}}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":7,"total_tokens":17}}\n\ndata: [DONE]\n\n'
)
OPENAI_RESPONSES = (
    b'data: {"type":"response.completed","response":{"usage" : {"input_tokens":12,"output_tokens":8}}}\n\n'
)

REPLIES = [(ANTHROPIC, 173), (ANTHROPIC_STREAM, 175), (OPENAI, 17), (OPENAI_STREAM, 17), (OPENAI_RESPONSES, 20)]


def used(body: bytes, *cuts: int, request_bytes: int = 0, is_whole: bool = True) -> int:
    reader, at = UsageReader(), 0
    for cut in (*sorted(cuts), len(body)):
        reader.feed(body[at:cut])
        at = cut
    return reader.tokens(request_bytes=request_bytes, is_whole=is_whole)


@pytest.mark.parametrize(("body", "tokens"), REPLIES)
def test_a_reply_that_says_what_it_used_is_believed(body: bytes, tokens: int) -> None:
    assert used(body) == tokens


@pytest.mark.parametrize(("body", "tokens"), REPLIES)
@given(data=st.data())
@pytest.mark.guards(FILE, 'b"" if self._is_open else window[max(at, len(window) - len(_KEY) + 1) :]', 'b""')
def test_how_a_reply_is_cut_changes_nothing(body: bytes, tokens: int, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=20))

    assert used(body, *cuts) == tokens


def test_a_reply_cut_into_single_bytes_is_read_the_same() -> None:
    assert used(ANTHROPIC, *range(len(ANTHROPIC))) == 173


@pytest.mark.guards(FILE, "max(number, self._found.get(name, 0))", "number")
def test_whatever_else_a_reply_says_can_only_make_it_more() -> None:
    tool_use = b'{"usage":{"output_tokens":50,"input_tokens":100},"content":[{"input":{"usage":{"output_tokens":1}}}]}'

    assert used(tool_use) == 150


def test_a_stream_that_was_left_early_counts_by_what_passed() -> None:
    begun = ANTHROPIC_STREAM[: ANTHROPIC_STREAM.index(b"event: message_delta")]

    assert used(begun, is_whole=False) == 100 + 2
    assert used(b"data: {}\n\n" * 30, request_bytes=400, is_whole=False) == 100 + 30


def test_a_reply_that_does_not_say_counts_by_its_bytes() -> None:
    assert used(b"x" * 400, request_bytes=200) == 50 + 100


@pytest.mark.parametrize(
    "body",
    [
        b'{"usage":null}',
        b'{"usage":7}',
        b'{"usage":{"output_tokens":"many","input_tokens":-5,"prompt_tokens":true}}',
        b'{"usage":{' + b'"a":"' + b"x" * 10_000 + b'"}}',
        b'{"usage":{"output_tokens":1' + b" " * 10_000,
        b'{"usage":{"text":"}\\"}{","output_tokens":1e3}}',
        b'{"usage"',
    ],
)
def test_odd_usage_is_no_usage_and_no_error(body: bytes) -> None:
    reader = UsageReader()

    reader.feed(body)

    assert not reader.says
    reader.feed(OPENAI)
    assert reader.says or body.count(b"{") != body.count(b"}")


@pytest.mark.parametrize(
    ("method", "status", "body", "tokens"),
    [
        ("POST", 200, ANTHROPIC, 173),
        ("POST", 200, b"x" * 40, 35),
        ("GET", 200, b"x" * 40, 0),
        ("POST", 429, b"x" * 40, 0),
        ("POST", None, b"", 25),
    ],
)
def test_only_what_a_model_was_asked_for_counts_where_nothing_is_said(
    method: str, status: int | None, body: bytes, tokens: int
) -> None:
    scrubber = MeteringScrubber(Needles.of((SECRET, 0)))

    scrubber.last(body)

    assert (
        tokens_used(scrubber.usage, method=method, status=status, request_bytes=100, is_whole=status is not None)
        == tokens
    )


def test_a_metering_scrubber_scrubs_as_any_other() -> None:
    scrubber = MeteringScrubber(Needles.of((SECRET, 0)))

    half = len(SECRET) // 2
    out = scrubber.feed(b"a " + SECRET[:half].encode()) + scrubber.feed(SECRET[half:].encode() + b" b\n")
    out += scrubber.last(OPENAI)

    assert out == b"a " + b"*" * len(SECRET) + b" b\n" + OPENAI
    assert scrubber.usage.tokens(request_bytes=0, is_whole=True) == 17
    assert scrubber.whole(SECRET.encode()) == b"*" * len(SECRET)
