"""The key in what comes back: in every part of a reply, in every form, and however it is cut."""

import base64
import gzip
import json
import zlib
from collections.abc import Callable
from urllib.parse import quote

from tests.attacks.attack import (
    Attack,
    Direction,
    Verdict,
    answered,
    attacks,
    blocks,
    nothing_comes_back,
)
from tests.attacks.ways import Place, Seen, Way
from tests.support.upstream import Behaviour, chunk, message, plain, sends, sends_then_closes, sse

_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"Content-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"

FORMS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda key: key,
    "percent-encoded": lambda key: quote(key.decode(), safe="").encode(),
    "in JSON": lambda key: json.dumps({"you sent": key.decode()}).encode(),
    "base64": base64.b64encode,
    "base64, one byte on": lambda key: base64.b64encode(b"x" + key),
    "base64, two bytes on": lambda key: base64.b64encode(b"xy" + key),
    "base64url, unpadded": lambda key: base64.urlsafe_b64encode(b"x-access-token:" + key).rstrip(b"="),
    "twice": lambda key: key + b"," + key,
    "overlapping itself": lambda key: key[:-1] + key + key[1:],
}


def _parts(key: bytes) -> dict[str, Behaviour]:
    text = key.decode()
    return {
        "in the reason": sends(b"HTTP/1.1 403 No key " + key + b"\r\nContent-Length: 0\r\n\r\n"),
        "in a header": plain(b"ok", headers=[("X-Echo", f"Bearer {text}")]),
        "in a header's name": plain(b"ok", headers=[(text, "1")]),
        "in Set-Cookie": plain(b"ok", headers=[("Set-Cookie", f"k={text}; Path=/")]),
        "in WWW-Authenticate": plain(
            b"", status="401 Unauthorized", headers=[("WWW-Authenticate", f'Bearer x="{text}"')]
        ),
        "in Location": plain(b"", status="302 Found", headers=[("Location", f"https://example.com/?key={text}")]),
        "in an interim reply": sends(b"HTTP/1.1 103 Early Hints\r\nLink: <" + key + b">\r\n\r\n", message(b"ok")),
        "in an event": sse([b"data: 1\n\n", b"data: " + key + b"\n\n", b"data: 2\n\n"]),
        "in an event that the end of the connection ends": sse([b"data: " + key + b"\n\n"], chunked=False),
        "in a body without a length": sends_then_closes(_OK + b"Connection: close\r\n\r\nkey: " + key),
        "in a trailer": sends(_CHUNKED + chunk(b"ok") + b"0\r\nX-Late: " + key + b"\r\n\r\n"),
        "in a chunk's extension": sends(_CHUNKED + b"2;x=" + key + b"\r\nok\r\n0\r\n\r\n"),
        "after the reply's end": sends(message(b"ok") + key),
    }


_PART_NAMES = list(_parts(b"k"))


def _part(name: str) -> Callable[[Way], Verdict]:
    return lambda way: nothing_comes_back(way, _parts(way.secret.encode())[name])


def _form(form: Callable[[bytes], bytes], frame: Callable[[bytes], Behaviour]) -> Callable[[Way], Verdict]:
    return lambda way: nothing_comes_back(way, frame(b"before " + form(way.secret.encode()) + b" after"))


def _in_chunks(body: bytes) -> Behaviour:
    return sends(_CHUNKED + b"".join(chunk(body[at : at + 5]) for at in range(0, len(body), 5)) + b"0\r\n\r\n")


def _until_close(body: bytes) -> Behaviour:
    return sends_then_closes(_OK + b"\r\n" + body)


_FRAMES: dict[str, Callable[[bytes], Behaviour]] = {
    "with a length": plain,
    "in chunks of five": _in_chunks,
    "until the end": _until_close,
}


def _cut(way: Way) -> Verdict:
    """At every place: between two writes, and between two chunks."""
    for at in range(1, len(way.secret)):
        for how, cut in {"writes": _two_writes, "chunks": _two_chunks}.items():
            way = way.renewed()
            if verdict := nothing_comes_back(way, cut(way.secret.encode(), at)):
                return f"cut after {at}, between two {how}: {verdict}"
    return ""


def _two_writes(key: bytes, at: int) -> Behaviour:
    whole = message(b"key: " + key)
    begin = len(whole) - len(key) + at
    return sends(whole[:begin], whole[begin:])


def _two_chunks(key: bytes, at: int) -> Behaviour:
    return sends(_CHUNKED + chunk(key[:at]) + chunk(key[at:]) + b"0\r\n\r\n")


def _coded(coding: str, code: Callable[[bytes], bytes]) -> Callable[[Way], Verdict]:
    def run(way: Way) -> Verdict:
        return blocks(way, plain(code(b"key: " + way.secret.encode()), headers=[("Content-Encoding", coding)]))

    return run


_CODINGS: list[tuple[str, Callable[[Way], Verdict]]] = [
    ("gzip", _coded("gzip", gzip.compress)),
    ("deflate", _coded("deflate", zlib.compress)),
    ("gzip, in upper case", _coded("GZIP", gzip.compress)),
    ("gzip twice", _coded("gzip, gzip", lambda data: gzip.compress(gzip.compress(data)))),
    ("an unknown coding", _coded("x-secret", lambda data: bytes(each ^ 1 for each in data))),
]


def _asks_for_no_coding(way: Way) -> Verdict:
    """The client takes anything; the origin must not be asked for what cannot be searched, nor for a part."""
    seen = Seen(way.origin)
    answered(way, plain(b"ok"), "Accept-Encoding: gzip, br, zstd", "Range: bytes=0-3", "If-Range: x")
    request = seen.requests[0]
    if any(each not in ("identity", "") for each in request.values("accept-encoding")):
        return f"asked for {request.values('accept-encoding')}"
    return "asked for a part" if request.values("range") else ""


def _redirected(way: Way) -> Verdict:
    """The client is told; nobody goes there for it."""
    seen = Seen(way.other_origin)
    location = f"{way.other_origin.url}/x"
    _, response = answered(way, plain(b"", status="307 Temporary Redirect", headers=[("Location", location)]))
    if response is None or response.status != 307 or response.values("location") != [location]:
        return "the client was not told of it as it was"
    return "it was followed" if seen.requests or seen.bytes.strip(b"-\n") else ""


ATTACKS: list[Attack] = [
    *attacks("echo in responses", [(name, _part(name)) for name in _PART_NAMES], direction=Direction.REPLY),
    *attacks(
        "echo in responses",
        [(f"{name}, {how}", _form(form, frame)) for name, form in FORMS.items() for how, frame in _FRAMES.items()],
        direction=Direction.REPLY,
        places=(Place.BEARER, Place.BASIC),
    ),
    *attacks("split at chunk borders", [("at every place", _cut)], direction=Direction.REPLY, places=(Place.BEARER,)),
    *attacks("compressed echo", _CODINGS, direction=Direction.REPLY),
    *attacks("compressed echo", [("asked for", _asks_for_no_coding)]),
    *attacks("redirects", [("to another host", _redirected)], direction=Direction.REPLY),
]
