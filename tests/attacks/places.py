"""The placeholder where it does not belong: in another field, altered, encoded, twice; and its field tampered with."""

import base64
import gzip
import json
from collections.abc import Callable
from urllib.parse import quote

from tests.attacks.attack import Attack, Verdict, attacks, carries_as_text, refuses, swaps_cleanly
from tests.attacks.ways import HEADER, Place, Way, head

_IN_SLOTS = (Place.BEARER, Place.HEADER, Place.BASIC)
_REFLECTED = (
    "User-Agent Referer Origin From Via Cookie Forwarded X-Forwarded-For X-Request-Id Accept Accept-Language "
    "Content-Type If-None-Match X-Anything"
).split()


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


ALTERED: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "with something around it": lambda text: f"a{text}b",
    "percent-encoded": _percent,
    "percent-encoded in part": lambda text: text[:9] + _percent(text[9:14]) + text[14:],
    "percent-encoded, lower case": lambda text: _percent(text).lower(),
    "percent-encoded twice": lambda text: quote(_percent(text)),
    "JSON escapes": lambda text: "".join(f"\\u{ord(each):04x}" for each in text),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64, one byte on": lambda text: base64.b64encode(b"x" + text.encode()).decode(),
    "base64, two bytes on": lambda text: base64.b64encode(b"xy" + text.encode()).decode(),
    "base64, unpadded": lambda text: base64.b64encode(text.encode()).decode().rstrip("="),
    "base64url": lambda text: base64.urlsafe_b64encode(b"a:" + text.encode()).decode().rstrip("="),
    "upper case": str.upper,
    "lower case": str.lower,
    "cut by a quote": lambda text: f'"{text}"',
}


def _beside(field: str, altered: Callable[[str], str]) -> Callable[[Way], Verdict]:
    """In its place as it should be, and once more there."""
    return lambda way: refuses(way, way.request(f"{field}: {altered(way.placeholder)}"))


def _alone(altered: Callable[[str], str]) -> Callable[[Way], Verdict]:
    """Nowhere but there."""
    return lambda way: refuses(way, way.request(f"X-Anything: {altered(way.placeholder)}", placeholder=""))


def _in_the_query(altered: Callable[[str], str]) -> Callable[[Way], Verdict]:
    return lambda way: refuses(way, way.request(path=f"/x?other={altered(way.placeholder)}"))


def _in_the_path(altered: Callable[[str], str]) -> Callable[[Way], Verdict]:
    return lambda way: refuses(way, way.request(path=f"/{altered(way.placeholder)}/x"))


def _in_its_own_place(altered: Callable[[str], str]) -> Callable[[Way], Verdict]:
    """Altered where it belongs: it is not that placeholder any more."""
    return lambda way: refuses(way, way.request(placeholder=altered(way.placeholder)))


def _body(text: Callable[[str], bytes], *more: str) -> Callable[[Way], Verdict]:
    def run(way: Way) -> Verdict:
        body = text(way.placeholder)
        return carries_as_text(way, way.request(*more, method="POST", body=body), body)

    return run


_BODIES: list[tuple[str, Callable[[Way], Verdict]]] = [
    ("in JSON", _body(lambda text: json.dumps({"quote me": text}).encode(), "Content-Type: application/json")),
    ("in a form", _body(lambda text: f"a={text}&b=1".encode(), "Content-Type: application/x-www-form-urlencoded")),
    (
        "in multipart",
        _body(
            lambda text: f'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n{text}\r\n--b--\r\n'.encode(),
            "Content-Type: multipart/form-data; boundary=b",
        ),
    ),
    ("in base64", _body(lambda text: base64.b64encode(text.encode()))),
    ("in gzip", _body(lambda text: gzip.compress(text.encode()), "Content-Encoding: gzip")),
]

_TWICE: list[tuple[str, Callable[[Way], Verdict]]] = [
    ("its line twice", lambda way: refuses(way, way.request(*way.slot()))),
    ("twice in one line", lambda way: refuses(way, way.request().replace(*_doubled(way), 1))),
    ("the line again, with another value", lambda way: _only_the_key(way, f"{_name(way)}: something-else")),
    ("its name in capitals, another value", lambda way: _only_the_key(way, f"{_name(way).upper()}: something-else")),
]


def _only_the_key(way: Way, *more: str) -> Verdict:
    return swaps_cleanly(way, way.request(*more), unwanted=[b"something-else"])


def _name(way: Way) -> str:
    return HEADER if way.place is Place.HEADER else "Authorization"


def _doubled(way: Way) -> tuple[bytes, bytes]:
    (line,) = way.slot()
    value = line.partition(": ")[2]
    return line.encode(), f"{line}, {value}".encode()


def _nominated(way: Way) -> Verdict:
    """`Connection` names the field that the key goes into: it must not go without it, nor with both."""
    return swaps_cleanly(way, way.request(f"Connection: keep-alive, {_name(way)}"))


def _injected(separator: str) -> Callable[[Way], Verdict]:
    def run(way: Way) -> Verdict:
        return refuses(way, way.request(f"X-Anything: a{separator}X-Injected: b"))

    return run


def _proof_stays(*more: str) -> Callable[[Way], Verdict]:
    def run(way: Way) -> Verdict:
        unwanted = [line.partition(": ")[2].rpartition(" ")[2].encode() for line in way.proof]
        return swaps_cleanly(way, way.request(*more), unwanted=[*unwanted, b"proxy-", way.placeholder.encode()])

    return run


def _trailer(way: Way) -> Verdict:
    raw = head(f"POST {way.target()} HTTP/1.1", *way.lines("Transfer-Encoding: chunked", "Trailer: X-Late"))
    return swaps_cleanly(way, raw + f"0\r\nX-Late: {way.placeholder}\r\n\r\n".encode(), unwanted=[b"x-late: "])


_UNDERSCORED: list[tuple[str, Callable[[Way], Verdict]]] = [
    ("the placeholder there", lambda way: refuses(way, way.request(f"X_Api_Key: {way.placeholder}", placeholder=""))),
    ("another value there", lambda way: _only_the_key(way, "X_Api_Key: something-else")),
]
_SEPARATORS = {"CR": "\r", "LF": "\n", "NUL": "\0", "LF CR": "\n\r"}
_IN_TARGETS = {name: form for name, form in ALTERED.items() if name not in ("JSON escapes", "cut by a quote")}
_NOT_ITSELF = {name: form for name, form in ALTERED.items() if name not in ("as it is", "JSON escapes")}

ATTACKS: list[Attack] = [
    *attacks("reflection by headers", [(name, _beside(name, ALTERED["as it is"])) for name in _REFLECTED]),
    *attacks("encoded placeholders", [(f"in a header: {name}", _alone(form)) for name, form in ALTERED.items()]),
    *attacks("encoded placeholders", [(f"beside: {n}", _beside("X-Other", form)) for n, form in ALTERED.items()]),
    *attacks("encoded placeholders", [(f"in the query: {n}", _in_the_query(form)) for n, form in _IN_TARGETS.items()]),
    *attacks("encoded placeholders", [(f"in the path: {n}", _in_the_path(form)) for n, form in _IN_TARGETS.items()]),
    *attacks(
        "encoded placeholders",
        [(f"in its place: {name}", _in_its_own_place(form)) for name, form in _NOT_ITSELF.items()],
        places=_IN_SLOTS,
    ),
    *attacks("reflection by content", _BODIES),
    *attacks("duplicate and underscore headers", _TWICE, places=_IN_SLOTS),
    *attacks("duplicate and underscore headers", _UNDERSCORED, places=(Place.HEADER,)),
    *attacks("Connection names a header", [("the key's field", _nominated)], places=_IN_SLOTS),
    *attacks(
        "proxy credential leaks upstream",
        [
            ("as it is", _proof_stays()),
            ("with Proxy-Connection", _proof_stays("Proxy-Connection: keep-alive")),
            ("named in Connection", _proof_stays("Connection: Proxy-Authorization")),
        ],
    ),
    *attacks("CR, LF, NUL in a header", [(name, _injected(each)) for name, each in _SEPARATORS.items()]),
    *attacks("trailers", [("a placeholder in a trailer", _trailer)]),
]
