"""Heads and chunks: what passes is read alike by everyone, what does not is refused with its code."""

from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.refusal import RefusedError
from egress_proxy.core.http1 import (
    LAST_CHUNK,
    MAX_HEADERS,
    MAX_REQUEST_LINE_BYTES,
    ChunkedReader,
    ChunkError,
    Framing,
    UpstreamProtocolError,
    chunk,
    parse_request_head,
    parse_response_head,
)

HTTP1 = "egress_proxy/core/http1.py"


def request(*lines: str, first: str = "POST /x HTTP/1.1", host: str = "Host: a.test\r\n") -> bytes:
    return (first + "\r\n" + host + "".join(line + "\r\n" for line in lines) + "\r\n").encode("latin-1")


REFUSED = {
    "length and coding": (request("Content-Length: 3", "Transfer-Encoding: chunked"), "ambiguous_framing"),
    "coding and length": (request("Transfer-Encoding: chunked", "Content-Length: 3"), "ambiguous_framing"),
    "two lengths": (request("Content-Length: 3", "Content-Length: 4"), "ambiguous_framing"),
    "two equal lengths": (request("Content-Length: 3", "Content-Length: 3"), "ambiguous_framing"),
    "a list of lengths": (request("Content-Length: 3, 3"), "ambiguous_framing"),
    "a signed length": (request("Content-Length: +3"), "ambiguous_framing"),
    "a negative length": (request("Content-Length: -1"), "ambiguous_framing"),
    "a hexadecimal length": (request("Content-Length: 0x3"), "ambiguous_framing"),
    "an overflowing length": (request("Content-Length: 99999999999999999999999"), "ambiguous_framing"),
    "another coding": (request("Transfer-Encoding: gzip, chunked"), "ambiguous_framing"),
    "an unknown coding": (request("Transfer-Encoding: xchunked"), "ambiguous_framing"),
    "chunked not last": (request("Transfer-Encoding: chunked, identity"), "ambiguous_framing"),
    "chunked twice": (request("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), "ambiguous_framing"),
    "a folded line": (request("X: a", " b"), "ambiguous_framing"),
    "a space before the colon": (request("X : a"), "ambiguous_framing"),
    "a NUL in a value": (request("X: a\0b"), "ambiguous_framing"),
    "a bare CR": (request("X: a\rY: b"), "ambiguous_framing"),
    "a bare LF": (b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", "ambiguous_framing"),
    "no colon": (request("nonsense"), "ambiguous_framing"),
    "two hosts": (request("Host: b.test"), "ambiguous_framing"),
    "two hosts in one": (request(host="Host: a.test, b.test\r\n"), "malformed_request"),
    "a host with a user": (request(host="Host: user@a.test\r\n"), "malformed_request"),
    "a host with a path": (request(host="Host: a.test/x\r\n"), "malformed_request"),
    "a host above ASCII": (request(host="Host: a.test\xe9\r\n"), "malformed_request"),
    "a host with half a port": (request(host="Host: a.test:\r\n"), "malformed_request"),
    "an empty host": (request(host="Host: \r\n"), "malformed_request"),
    "a fragment": (request(first="GET /x#y HTTP/1.1"), "malformed_request"),
    "no host": (request(host=""), "malformed_request"),
    "a connection that names the length": (
        request("Connection: content-length", "Content-Length: 3"),
        "malformed_request",
    ),
    "another expectation": (request("Expect: magic"), "malformed_request"),
    "no version": (request(first="GET /"), "malformed_request"),
    "two spaces": (request(first="GET  / HTTP/1.1"), "malformed_request"),
    "a tab": (request(first="GET\t/ HTTP/1.1"), "malformed_request"),
    "a space in the target": (request(first="GET /a b HTTP/1.1"), "malformed_request"),
    "a byte over 0x7e in the target": (request(first="GET /\xe9 HTTP/1.1"), "malformed_request"),
    "an unknown method": (request(first="FROBNICATE / HTTP/1.1"), "ambiguous_framing"),
    "a blank line first": (b"\r\n" + request(), "malformed_request"),
    "HTTP/1.0": (request(first="GET / HTTP/1.0"), "protocol_denied"),
    "HTTP/2.0": (b"PRI * HTTP/2.0\r\n\r\n", "protocol_denied"),
    "a CONNECT with a length": (request("Content-Length: 3", first="CONNECT a.test:443 HTTP/1.1"), "ambiguous_framing"),
    "a CONNECT in chunks": (
        request("Transfer-Encoding: chunked", first="CONNECT a.test:443 HTTP/1.1"),
        "ambiguous_framing",
    ),
    "TRACE": (request(first="TRACE / HTTP/1.1"), "method_not_allowed"),
    "trace": (request(first="trace / HTTP/1.1"), "method_not_allowed"),
    "TRACK": (request(first="TRACK / HTTP/1.1"), "method_not_allowed"),
    "a long request line": (request(first=f"GET /{'a' * MAX_REQUEST_LINE_BYTES} HTTP/1.1"), "uri_too_long"),
    "a large head": (request(*[f"X-{n}: {'a' * 4000}" for n in range(17)]), "headers_too_large"),
    "many fields": (request(*[f"X-{n}: a" for n in range(MAX_HEADERS)]), "headers_too_large"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.guards(HTTP1, "            if host is not None:\n", "            if False:\n")
@pytest.mark.guards(HTTP1, "in _MIRRORING_METHODS:", "in ():")
@pytest.mark.guards(HTTP1, "            if not _UNNOMINATABLE.isdisjoint(tokens):", "            if False:")
@pytest.mark.guards(
    HTTP1, '    if version != b"1.1" and not (version == b"1.0" and method == b"CONNECT"):', "    if False:"
)
def test_a_doubtful_request_head_is_refused(case: str) -> None:
    raw, expected = REFUSED[case]

    with pytest.raises(RefusedError) as refused:
        parse_request_head(raw)

    assert refused.value.refusal.code.value == expected


def test_a_plain_request_is_read() -> None:
    head = parse_request_head(request("Content-Length: 3", "X-Api-Key:  value \t", "Expect: 100-continue"))

    assert (head.method, head.target, head.host) == ("POST", b"/x", b"a.test")
    assert (head.framing, head.content_length) == (Framing.LENGTH, 3)
    assert head.keep_alive
    assert head.expects_continue
    assert [(field.name, field.value) for field in head.fields][2] == (b"x-api-key", b"value")


def test_a_connect_may_be_http_1_0_and_without_host() -> None:
    head = parse_request_head(b"CONNECT a.test:443 HTTP/1.0\r\n\r\n")

    assert (head.method, head.target, head.host) == ("CONNECT", b"a.test:443", None)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_a_refusal(noise: bytes) -> None:
    for raw in (noise, b"GET / HTTP/1.1\r\nHost: a\r\n" + noise + b"\r\n\r\n"):
        try:
            head = parse_request_head(raw)
        except RefusedError:
            continue
        assert head.host is not None


@given(
    st.lists(
        st.tuples(st.from_regex(rb"[A-Za-z-]{1,10}", fullmatch=True), st.from_regex(rb"[ -~]{0,20}", fullmatch=True)),
        max_size=8,
    )
)
def test_what_passes_is_read_alike_by_another_parser(fields: list[tuple[bytes, bytes]]) -> None:
    raw = b"POST /x HTTP/1.1\r\nHost: a.test\r\n" + b"".join(b"%b: %b\r\n" % field for field in fields) + b"\r\n"
    try:
        ours = parse_request_head(raw)
    except RefusedError:
        return
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    theirs = connection.next_event()

    assert isinstance(theirs, h11.Request)
    assert [(field.name, field.value) for field in ours.fields] == [(bytes(n), bytes(v)) for n, v in theirs.headers]


REPLIES_REFUSED = {
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "length and coding": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "another coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
    "coding in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a folded line": b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
    "a bare LF": b"HTTP/1.1 200 OK\r\nX: a\nY: b\r\n\r\n",
    "a NUL": b"HTTP/1.1 200 OK\r\nX: a\0\r\n\r\n",
    "HTTP/2": b"HTTP/2.0 200 OK\r\n\r\n",
    "no status line": b"hello\r\n\r\n",
    "an unasked 101": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "a plain 101": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "a nominated length": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: content-length\r\n\r\n",
    "status 099": b"HTTP/1.1 099 Low\r\n\r\n",
    "a large head": b"HTTP/1.1 200 OK\r\n" + b"X: %b\r\n" % (b"a" * 70_000) + b"\r\n",
}


@pytest.mark.parametrize("case", REPLIES_REFUSED)
@pytest.mark.guards(
    HTTP1,
    "        if not websocket_asked:\n            raise UpstreamProtocolError",
    "        if False:\n            raise UpstreamProtocolError",
)
def test_a_doubtful_reply_head_is_an_error(case: str) -> None:
    with pytest.raises(UpstreamProtocolError):
        parse_response_head(REPLIES_REFUSED[case], request_method="GET")


@pytest.mark.parametrize(
    "raw, method, framing",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "GET", Framing.LENGTH),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD", Framing.NONE),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "GET", Framing.CHUNKED),
        (b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n", "GET", Framing.NONE),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "GET", Framing.NONE),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", "GET", Framing.NONE),
        (b"HTTP/1.1 200 OK\r\n\r\n", "GET", Framing.UNTIL_CLOSE),
        (b"HTTP/1.0 200\r\n\r\n", "GET", Framing.UNTIL_CLOSE),
    ],
)
def test_a_replys_framing_follows_the_request(raw: bytes, method: str, framing: Framing) -> None:
    assert parse_response_head(raw, request_method=method).framing is framing


# --- chunks ----------------------------------------------------------------------------------------------------------


def read_chunked(pieces: list[bytes]) -> tuple[bytes, bytes, bool]:
    reader = ChunkedReader()
    body = b"".join(part for piece in pieces for part in (reader.feed(piece) if not reader.complete else ()))
    return body, reader.rest, reader.complete


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 400), max_size=12))
def test_how_a_chunked_body_is_cut_changes_nothing(parts: list[bytes], places: list[int]) -> None:
    encoded = b"".join(chunk(part) for part in parts) + LAST_CHUNK

    body, rest, complete = read_chunked(cut(encoded, places))

    assert (body, rest, complete) == (b"".join(parts), b"", True)


def test_trailers_are_dropped_and_the_next_request_is_left_over() -> None:
    body, rest, complete = read_chunked([b"3\r\nabc\r\n0\r\nX-Trailer: secret\r\nY: z\r\n\r\nGET / HTTP/1.1\r\n"])

    assert (body, rest, complete) == (b"abc", b"GET / HTTP/1.1\r\n", True)


@pytest.mark.parametrize(
    "body",
    [
        b"3;ext=1\r\nabc\r\n0\r\n\r\n",
        b"3 \r\nabc\r\n0\r\n\r\n",
        b"+3\r\nabc\r\n0\r\n\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n",
        b"-1\r\n\r\n",
        b"\r\nabc\r\n",
        b"3\nabc\r\n0\r\n\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"3\r\nabc\n0\r\n\r\n",
        b"3\r\nabc0\r\n\r\n",
        b"11111111111111111\r\n",
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"0\r\nX: a\0b\r\n\r\n",
        b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"0\r\ncontent-length: 9\r\n\r\n",
        b"0\r\n" + b"X: a\r\n" * 4000 + b"\r\n",
    ],
)
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.guards(HTTP1, "                if text:\n", "                if False:\n")
@pytest.mark.guards(HTTP1, "                if not _CHUNK_SIZE.fullmatch(text):", "                if False:")
@pytest.mark.guards(HTTP1, 'elif text.partition(b":")[0].lower() in _UNNOMINATABLE:', "elif False:")
def test_a_doubtful_chunk_is_an_error(body: bytes, one_by_one: bool) -> None:
    pieces = [body[i : i + 1] for i in range(len(body))] if one_by_one else [body]

    with pytest.raises(ChunkError):
        read_chunked(pieces)
