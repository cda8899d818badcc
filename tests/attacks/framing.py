"""Messages that two readers could read in two ways (RFC 9112): requests are refused, replies are failed."""

from collections.abc import Callable
from typing import Final

from tests.attacks.attack import Attack, Direction, Verdict, attacks, fails, never_whole, refuses
from tests.attacks.ways import Place, Way, head
from tests.support.upstream import sends_then_closes

_SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: smuggled\r\n\r\n"
_OK = b"HTTP/1.1 200 OK\r\n"
_SECOND = _OK + b"Content-Length: 8\r\n\r\nsmuggled"


def _headed(*more: str, body: bytes = b"", method: str = "POST") -> Callable[[Way], Verdict]:
    return lambda way: refuses(way, way.request(*more, method=method) + body)


def _edited(old: bytes, new: bytes, *more: str) -> Callable[[Way], Verdict]:
    return lambda way: refuses(way, way.request(*more).replace(old, new, 1))


def _first_line(line: str) -> Callable[[Way], Verdict]:
    return lambda way: refuses(way, head(line.format(target=way.target()), *way.lines()))


def _chunked(body: bytes) -> Callable[[Way], Verdict]:
    return lambda way: never_whole(way, way.request("Transfer-Encoding: chunked", method="POST") + body)


DOUBTFUL_LENGTHS = {
    "length and chunked": (("Content-Length: 4", "Transfer-Encoding: chunked"), b"0\r\n\r\n" + _SMUGGLED),
    "chunked and length": (("Transfer-Encoding: chunked", "Content-Length: 4"), b"0\r\n\r\n" + _SMUGGLED),
    "two lengths": (("Content-Length: 0", f"Content-Length: {len(_SMUGGLED)}"), _SMUGGLED),
    "the same length twice": (("Content-Length: 2", "Content-Length: 2"), b"ab"),
    "a list of lengths": (("Content-Length: 2, 2",), b"ab"),
    "a signed length": (("Content-Length: +2",), b"ab"),
    "a negative length": (("Content-Length: -2",), b"ab"),
    "a hexadecimal length": (("Content-Length: 0x2",), b"ab"),
    "a length with a space in it": (("Content-Length: 1 2",), b"ab"),
    "an empty length": (("Content-Length: ",), b"ab"),
    "a length beyond 64 bits": (("Content-Length: 99999999999999999999",), b"ab"),
    "a length with a point": (("Content-Length: 2.0",), b"ab"),
    "chunked twice": (("Transfer-Encoding: chunked, chunked",), b"0\r\n\r\n"),
    "two codings": (("Transfer-Encoding: gzip, chunked",), b"0\r\n\r\n"),
    "chunked not last": (("Transfer-Encoding: chunked, identity",), b"0\r\n\r\n"),
    "an unknown coding": (("Transfer-Encoding: xchunked",), b"0\r\n\r\n"),
    "a coding with a parameter": (("Transfer-Encoding: chunked;q=1",), b"0\r\n\r\n"),
    "a vertical tab before chunked": (("Transfer-Encoding: \x0bchunked",), b"0\r\n\r\n"),
    "two coding lines": (("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), b"0\r\n\r\n"),
    "an empty coding": (("Transfer-Encoding: ",), b"0\r\n\r\n"),
    "a coding behind a space before the colon": (("Transfer-Encoding : chunked",), b"0\r\n\r\n"),
}
DOUBTFUL_FIELDS = {
    "a folded line": "X-Anything: a\r\n b",
    "a folded length": "Content-Length:\r\n 2",
    "a space before the colon": "X-Anything : a",
    "a line without a colon": "X-Anything",
    "a line without a name": ": a",
    "a space in a name": "X Anything: a",
    "a control character in a name": "X-Any\x01thing: a",
    "a control character in a value": "X-Anything: a\x08b",
    "a parenthesis in a name": "X(Anything): a",
    "DEL in a value": "X-Anything: a\x7fb",
}
DOUBTFUL_LINES = {
    "HTTP/0.9": "GET {target}",
    "HTTP/2": "GET {target} HTTP/2.0",
    "HTTP/1.10": "GET {target} HTTP/1.10",
    "a protocol in lower case": "GET {target} http/1.1",
    "two spaces": "GET  {target} HTTP/1.1",
    "a tab": "GET\t{target} HTTP/1.1",
    "a space at the end": "GET {target} HTTP/1.1 ",
    "a space in the target": "GET {target} x HTTP/1.1",
    "a method in lower case": "get {target} HTTP/1.1",
    "a fragment in the target": "GET {target}#x HTTP/1.1",
    "a control character in the target": "GET {target}\x01 HTTP/1.1",
    "TRACE": "TRACE {target} HTTP/1.1",
    "TRACK": "TRACK {target} HTTP/1.1",
    "no target": "GET HTTP/1.1",
}
CHUNKED_BODIES = {
    "a size with 0x": b"0x2\r\nab\r\n0\r\n\r\n",
    "a signed size": b"+2\r\nab\r\n0\r\n\r\n",
    "a negative size": b"-2\r\nab\r\n0\r\n\r\n",
    "a size with a space before it": b" 2\r\nab\r\n0\r\n\r\n",
    "a size with a space after it": b"2 \r\nab\r\n0\r\n\r\n",
    "a size that is none": b"g\r\nab\r\n0\r\n\r\n",
    "no size": b"\r\nab\r\n0\r\n\r\n",
    "a size beyond 64 bits": b"10000000000000002\r\nab\r\n0\r\n\r\n",
    "an extension": b"2;a=b\r\nab\r\n0\r\n\r\n",
    "an extension with a line feed": b"2;a\nab\r\n0\r\n\r\n",
    "a size line that ends in a line feed": b"2\nab\r\n0\r\n\r\n",
    "a chunk that ends in a line feed": b"2\r\nab\n0\r\n\r\n",
    "a chunk that is longer than it says": b"2\r\nabc\r\n0\r\n\r\n",
    "a chunk that is shorter than it says": b"3\r\nab\r\n0\r\n\r\n",
    "a trailer that is a coding": b"2\r\nab\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a trailer that is a length": b"2\r\nab\r\n0\r\nContent-Length: 9\r\n\r\n",
}


def _reply(data: bytes) -> Callable[[Way], Verdict]:
    return lambda way: fails(way, sends_then_closes(data))


DOUBTFUL_REPLIES = {
    "length and chunked": _OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + _SECOND,
    "two lengths": _OK + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n" + _SECOND,
    "a list of lengths": _OK + b"Content-Length: 2, 2\r\n\r\nab",
    "a signed length": _OK + b"Content-Length: +2\r\n\r\nab",
    "two codings": _OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": _OK + b"Transfer-Encoding: xchunked\r\n\r\nab",
    "a folded line": _OK + b"X-A: 1\r\n 2\r\nContent-Length: 2\r\n\r\nab",
    "a bare line feed": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nab",
    "a bare carriage return": _OK + b"X-A: 1\rX-B: 2\r\nContent-Length: 2\r\n\r\nab",
    "NUL": _OK + b"X-A: \x00\r\nContent-Length: 2\r\n\r\nab",
    "a space before the colon": _OK + b"Content-Length : 2\r\n\r\nab",
    "a line without a colon": _OK + b"X-A\r\nContent-Length: 2\r\n\r\nab",
    "a status of two digits": b"HTTP/1.1 20 OK\r\nContent-Length: 2\r\n\r\nab",
    "another protocol": b"ICY 200 OK\r\nContent-Length: 2\r\n\r\nab",
    "HTTP/0.9": b"just text",
    "an upgrade that nobody asked for": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "a chunk size that is none": _OK + b"Transfer-Encoding: chunked\r\n\r\ng\r\nab\r\n0\r\n\r\n",
    "a signed chunk size": _OK + b"Transfer-Encoding: chunked\r\n\r\n+2\r\nab\r\n0\r\n\r\n",
    "a chunk without its end": _OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc0\r\n\r\n",
    "cut in the body": _OK + b"Content-Length: 20\r\n\r\nab",
    "cut in a chunk": _OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\nab",
    "cut before the last chunk": _OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
    "interim replies without end": b"HTTP/1.1 103 Early Hints\r\n\r\n" * 200,
}

_HEADED: list[tuple[str, Callable[[Way], Verdict]]] = [
    *((name, _headed(*more, body=body)) for name, (more, body) in DOUBTFUL_LENGTHS.items()),
    *((name, _headed(line, body=b"ab")) for name, line in DOUBTFUL_FIELDS.items()),
    *((name, _first_line(line)) for name, line in DOUBTFUL_LINES.items()),
    *((f"chunks: {name}", _chunked(body)) for name, body in CHUNKED_BODIES.items()),
    ("line feeds for line ends", lambda way: refuses(way, way.request().replace(b"\r\n", b"\n"))),
    ("one bare line feed", _edited(b"\r\nX-A", b"\nX-A", "X-A: 1")),
    ("a space before the first line", lambda way: refuses(way, b" " + way.request())),
    ("something that is not HTTP", lambda way: refuses(way, b"\x16\x03\x01\x00\x05hello\r\n\r\n")),
]
_ENOUGH: Final = (Place.BEARER, Place.QUERY)
"""Framing is judged before anybody looks for a placeholder: one that stands in a field, and one in the target."""

ATTACKS: list[Attack] = [
    *attacks("request smuggling", _HEADED, places=_ENOUGH),
    *attacks(
        "request smuggling",
        [(name, _reply(data)) for name, data in DOUBTFUL_REPLIES.items()],
        direction=Direction.REPLY,
        places=_ENOUGH,
    ),
]
