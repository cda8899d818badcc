"""HTTP as Hypothesis writes it: mostly well formed, with one thing or another that is not.

What is well formed is drawn from small sets, so that streams get past the first line; then bytes are put in, taken out
or doubled at places where parsers differ.
"""

from typing import Final

from hypothesis import strategies as st

from tests.attacks.framing import CHUNKED_BODIES, DOUBTFUL_FIELDS, DOUBTFUL_LENGTHS, DOUBTFUL_LINES, DOUBTFUL_REPLIES
from tests.fuzz.path import HOST, ROUTE

_METHODS: Final = "GET POST PUT DELETE HEAD OPTIONS PATCH M-SEARCH PROPFIND QUERY".split()
_TELLING: Final = (
    b"\r",
    b"\n",
    b"\r\n",
    b" ",
    b"\t",
    b"\x00",
    b"\x0b",
    b"\x0c",
    b"\x7f",
    b"\x80",
    b"\x85",
    b"\xa0",
    b":",
    b",",
    b";",
    b"0",
    b"+",
    b"_",
    b'"',
    b"#",
    b"\xff",
)
_FIELDS: Final = (
    "Authorization: Bearer {placeholder}",
    "Connection: close",
    "Connection: keep-alive",
    "Connection: keep-alive, X-Anything",
    "Connection: Upgrade",
    "Connection: content-length",
    "Upgrade: websocket",
    "Upgrade: h2c",
    "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    "Expect: 100-continue",
    "Proxy-Connection: keep-alive",
    "TE: trailers",
    "Trailer: X-Anything",
    "Range: bytes=0-1",
    "Accept-Encoding: gzip",
    "X-Anything: a",
    "X-Anything:",
    "X-Anything:\t a \t",
    "x_anything: b",
    "Content_Length: 5",
    "Content-Type: text/plain; charset=\xe9",
    "Cookie: a=b; c=d",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Content-Encoding: gzip",
    "Keep-Alive: timeout=5",
)
_REPLY_FIELDS: Final = (
    *(line for line in _FIELDS if "placeholder" not in line and not line.startswith("Connection: content")),
    "Alt-Svc: clear",
    "Location: /x",
    "WWW-Authenticate: Basic",
    "X-Echo: {secret}",
)
_BODIES: Final = (b"", b"abc", b"0\r\n\r\n", b"GET /smuggled HTTP/1.1\r\nHost: api.test\r\n\r\n", b"\x00\xff\n")
places = st.lists(st.integers(0, 2000), max_size=6)
"""Where a stream is cut."""


def _seldom(strategy: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Else an empty string."""
    return st.integers(0, 11).flatmap(lambda at: strategy if at == 7 else st.just(""))


@st.composite
def _chunked(draw: st.DrawFn) -> bytes:
    pieces = draw(st.lists(st.sampled_from(_BODIES[1:]), max_size=3))
    size = draw(st.sampled_from(("%x", "%X", "0%x")))
    trailers = draw(st.sampled_from((b"", b"", b"X-Trailer: a\r\n", b"Content-Length: 9\r\n")))
    body = b"".join((size % len(piece)).encode() + b"\r\n" + piece + b"\r\n" for piece in pieces)
    return body + b"0\r\n" + trailers + b"\r\n"


@st.composite
def _framed(draw: st.DrawFn) -> tuple[list[str], bytes]:
    """Fields that frame a body, and the body."""
    match draw(
        st.sampled_from(("none", "none", "length", "length", "chunked", "chunked", "doubtful", "doubtful chunks"))
    ):
        case "length":
            body = draw(st.sampled_from(_BODIES))
            return [draw(st.sampled_from((f"Content-Length: {len(body)}", f"content-length:0{len(body)}")))], body
        case "chunked":
            coding = draw(st.sampled_from(("chunked", "chunked", "Chunked", "CHUNKED\t")))
            return [f"Transfer-Encoding: {coding}"], draw(_chunked())
        case "doubtful":
            lines, body = draw(st.sampled_from(list(DOUBTFUL_LENGTHS.values())))
            return list(lines), body
        case "doubtful chunks":
            return ["Transfer-Encoding: chunked"], draw(st.sampled_from(list(CHUNKED_BODIES.values())))
        case _:
            return [], b""


@st.composite
def _request(draw: st.DrawFn, is_absolute: bool) -> bytes:
    path = draw(st.sampled_from(("/", "/x", "/x?a=b", "/x?a=b", "/a%2fb", "/a//b", "?a", "")))
    target = f"http://{HOST}{path}" if is_absolute else f"/{ROUTE}{path}"
    method = draw(st.sampled_from(_METHODS))
    odd_lines = [f"CONNECT {HOST}:443 HTTP/1.1", f"POST {target} HTTP/1.0", *DOUBTFUL_LINES.values()]
    first = draw(_seldom(st.sampled_from(odd_lines))) or f"{method} {{target}} HTTP/1.1"
    first = first.replace("{target}", target)
    fields = draw(st.lists(st.sampled_from(_FIELDS), max_size=4))
    if doubtful := draw(_seldom(st.sampled_from(list(DOUBTFUL_FIELDS.values())))):
        fields.append(doubtful)
    framing, body = draw(_framed())
    lines = [f"Host: {HOST}", *draw(st.permutations([*fields, *framing]))]
    return (draw(st.sampled_from(("", "", "", "\r\n"))) + "\r\n".join([first, *lines, "", ""])).encode("latin-1") + body


@st.composite
def _altered(draw: st.DrawFn, data: bytes) -> bytes:
    """With a few bytes put in, taken out, or doubled."""
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        telling = draw(st.sampled_from(_TELLING))
        match draw(st.sampled_from(("put in", "put in", "instead", "out", "twice"))):
            case "put in":
                data = data[:at] + telling + data[at:]
            case "instead":
                data = data[:at] + telling + data[at + 1 :]
            case "out":
                data = data[:at] + data[at + draw(st.integers(1, 4)) :]
            case _:
                end = data.find(b"\n", at) + 1
                data = data[:end] + data[at:end] + data[end:]
    return data


@st.composite
def request_streams(draw: st.DrawFn, *, is_absolute: bool = False) -> bytes:
    """What one client sends."""
    stream = b"".join(draw(st.lists(_request(is_absolute), min_size=1, max_size=3)))
    return draw(_altered(stream))


@st.composite
def replies(draw: st.DrawFn) -> bytes:
    """What one upstream sends, for one request."""
    if draw(st.integers(0, 7)) == 0:
        return draw(_altered(draw(st.sampled_from(list(DOUBTFUL_REPLIES.values())))))
    interim = draw(st.sampled_from(((), (), (), (100,), (102,), (103, 100), (101,))))
    status = draw(st.sampled_from((200, 200, 200, 204, 205, 301, 304, 401, 404, 500, 999)))
    version = draw(st.sampled_from(("1.1",) * 6 + ("1.0", "1.2")))
    fields = draw(st.lists(st.sampled_from(_REPLY_FIELDS), max_size=3))
    framing, body = draw(_framed())
    if not framing:
        body = draw(st.sampled_from(_BODIES))
    reason = draw(st.sampled_from((" OK", " ", "", " \xe9\t", "  OK")))
    lines = [f"HTTP/{version} {status}{reason}", *draw(st.permutations([*fields, *framing]))]
    before = "".join(f"HTTP/1.1 {code} Wait\r\nX-Early: a\r\n\r\n" for code in interim)
    after = draw(st.sampled_from((b"", b"", b"", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"\r\n")))
    return draw(_altered((before + "\r\n".join([*lines, "", ""])).encode("latin-1") + body + after))
