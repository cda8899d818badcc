"""Framing: whatever the proxy passes, h11 and aiohttp's own parser read alike, both ways, however it is cut.

Short here; `make fuzz` goes on for as long as it is given.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from egress_proxy.core.decision import Mode
from tests.attacks.framing import (
    CHUNKED_BODIES,
    DOUBTFUL_FIELDS,
    DOUBTFUL_LENGTHS,
    DOUBTFUL_LINES,
    DOUBTFUL_REPLIES,
)
from tests.fuzz.framing import check_reply, check_requests
from tests.fuzz.messages import places, replies, request_streams
from tests.fuzz.path import HOST, ROUTE

HTTP1 = "egress_proxy/core/http1.py"
EXCHANGE = "egress_proxy/exchange.py"
FIELDS = "egress_proxy/core/fields.py"
TARGET = f"/{ROUTE}/x"
NEXT = f"GET {TARGET} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {{placeholder}}\r\n\r\n".encode()
SOME = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def request(*lines: str, first: str = f"POST {TARGET} HTTP/1.1") -> bytes:
    return "\r\n".join([first, f"Host: {HOST}", *lines, "", ""]).encode("latin-1")


STREAMS = {
    **{f"length: {name}": request(*lines) + body for name, (lines, body) in DOUBTFUL_LENGTHS.items()},
    **{f"field: {name}": request(line, "Content-Length: 2") + b"ab" for name, line in DOUBTFUL_FIELDS.items()},
    **{f"line: {name}": request(first=line.format(target=TARGET)) for name, line in DOUBTFUL_LINES.items()},
    **{
        f"chunks: {name}": request("Transfer-Encoding: chunked") + body + b"\r\n"
        for name, body in CHUNKED_BODIES.items()
    },
    "line feeds for line ends": request().replace(b"\r\n", b"\n"),
    "a trailer that frames": request("Transfer-Encoding: chunked") + b"1\r\na\r\n0\r\nContent-Length: 9\r\n\r\n",
    "a length that is not its own": request("Connection: content-length", "Content-Length: 2") + b"ab",
    "a CONNECT with a body": request("Content-Length: 3", first=f"CONNECT {HOST}:443 HTTP/1.1") + b"abc",
}
"""Each goes between two requests that are well formed."""


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.guards(
    HTTP1, "                if not _CHUNK_SIZE.fullmatch(text):", "                if not text[:1].isalnum():"
)
@pytest.mark.guards(HTTP1, "                if text:\n", "                if False:\n")
@pytest.mark.guards(
    HTTP1, '        if not line.endswith(b"\\r\\n"):', '        line = line.rstrip() + b"\\r\\n"\n        if False:'
)
def test_a_doubtful_request_between_two_others_is_read_alike_by_everyone(stream: str, bytewise: bool) -> None:
    data = NEXT + STREAMS[stream] + NEXT

    went = check_requests(data, range(len(data)) if bytewise else ())

    assert 1 <= went <= 3


@pytest.mark.parametrize("reply", DOUBTFUL_REPLIES)
@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.guards(
    EXCHANGE,
    "upstream, self._upstream = self._upstream, None\n            upstream.close()",
    "pass",
)
def test_a_doubtful_reply_is_read_alike_by_everyone(reply: str, bytewise: bool) -> None:
    data = DOUBTFUL_REPLIES[reply]

    for method in ("GET", "HEAD"):
        for ends in (False, True):
            check_reply(data, range(len(data)) if bytewise else (), method=method, ends=ends)


@SOME
@given(request_streams(), places)
def test_requests_to_a_base_url_are_read_alike_by_everyone(stream: bytes, cuts: list[int]) -> None:
    check_requests(stream, cuts)


@SOME
@given(request_streams(is_absolute=True), places)
def test_requests_in_absolute_form_are_read_alike_by_everyone(stream: bytes, cuts: list[int]) -> None:
    check_requests(stream, cuts, mode=Mode.FORWARD)


@SOME
@given(replies(), places, st.sampled_from(("GET", "HEAD", "DELETE")), st.booleans(), st.booleans())
def test_replies_are_read_alike_by_everyone(
    raw: bytes, cuts: list[int], method: str, ends: bool, swapped: bool
) -> None:
    check_reply(raw, cuts, method=method, ends=ends, swapped=swapped)


@pytest.mark.parametrize(
    "raw, ends",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX: y\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", True),
        (b"HTTP/1.0 200\r\n\r\nabc", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False),
        (b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\nHTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", False),
    ],
)
@pytest.mark.guards(HTTP1, 'if request_method == "HEAD" or status < 200 or status in (204, 304):', "if False:")
def test_a_well_formed_reply_passes_whole_however_it_is_cut(raw: bytes, ends: bool) -> None:
    for step in (len(raw), 3, 1):
        assert check_reply(raw, range(0, len(raw), step), ends=ends)
