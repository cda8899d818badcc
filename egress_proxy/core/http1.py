"""HTTP/1.1 heads and chunks, read strictly: what passes is read alike by every other reader.

Rule: any doubt about framing is an error, toward the client `RefusedError` (400, 414, 431, 505), for a reply
`UpstreamProtocolError` (502), and the connection closes. llhttp (httptools) does the parsing; this file adds what it
leaves open: HTTP/0.9 and 1.0, `Host`, sizes, codings other than exactly `chunked`, hop-by-hop nominations.
(RFC 9112; RFC 9110 §5-7.)
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Final

import httptools

from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from egress_proxy.core.fields import MAX_REMEMBERED_LINE_BYTES, Field, reply_fields, request_fields

MAX_HEAD_BYTES: Final = 65_536
MAX_REQUEST_LINE_BYTES: Final = 16_384
MAX_HEADERS: Final = 200
MAX_TRAILER_BYTES: Final = 16_384
MAX_CHUNK_LINE_BYTES: Final = 18  # 16 hex digits and CRLF

HEAD_END: Final = b"\r\n\r\n"

_REQUEST_LINE = re.compile(rb"([A-Z]+(?:-[A-Z]+)*) ([\x21-\x7e]+) HTTP/([0-9]\.[0-9])")
_HOST = re.compile(rb"(?:[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
"""RFC 9110 §7.2, without what no host name has: a second reader could find another host in it."""
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([0-9]{3})(?: ([\t\x20-\x7e\x80-\xff]*))?")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_MIRRORING_METHODS = (b"TRACE", b"TRACK")
_NO_NAMES: Final[frozenset[bytes]] = frozenset()
_CONNECTION_OPTIONS = frozenset((b"close", b"keep-alive"))
_UNNOMINATABLE = frozenset((b"host", b"content-length", b"transfer-encoding"))


class UpstreamProtocolError(Exception):
    """The upstream's reply is not unambiguous HTTP/1.1."""


class Framing(Enum):
    """How a message's body ends."""

    NONE = auto()
    LENGTH = auto()
    CHUNKED = auto()
    UNTIL_CLOSE = auto()


@dataclass(slots=True)
class RequestHead:
    """A request's head, checked. Not frozen: one is built for every request, and freezing doubles what that costs."""

    line: bytes
    """The request line, as sent."""
    method: str
    target: bytes
    """As sent: origin-form, absolute-form, authority-form (CONNECT) or `*`."""
    fields: list[Field]
    special: list[Field]
    """The fields that need a look, in order; the others go as they came."""
    host: bytes | None
    """The one `Host` field; None only for CONNECT, whose HTTP/1.0 clients leave it out."""
    framing: Framing
    content_length: int
    keep_alive: bool
    expects_continue: bool
    opens_websocket: bool
    """RFC 6455 §4.1: a GET that asks to upgrade to WebSocket. Every other Upgrade is dropped (RFC 9110 §7.8)."""


@dataclass(slots=True)
class ResponseHead:
    """A reply's head, checked. `reason` is kept as sent."""

    status: int
    reason: bytes
    fields: list[Field]
    special: list[Field]
    framing: Framing
    content_length: int
    keep_alive: bool
    is_coded: bool
    """Whether the content is in a coding (gzip, …), and so cannot be searched."""
    removed: frozenset[bytes]
    """The fields that Connection declares hop-by-hop."""


def parse_request_head(raw: bytes) -> RequestHead:
    """One request head, from its first byte to the blank line. Raises `RefusedError`."""
    # (1) Sizes.
    line_end = raw.find(b"\r\n")
    if line_end > MAX_REQUEST_LINE_BYTES:
        raise _refused(RefusalCode.URI_TOO_LONG, f"The request line is longer than {MAX_REQUEST_LINE_BYTES} bytes.")
    if len(raw) > MAX_HEAD_BYTES:
        raise _refused(RefusalCode.HEADERS_TOO_LARGE, f"The head is longer than {MAX_HEAD_BYTES} bytes.")

    # (2) The request line.
    line = raw[:line_end]
    method, target, version = (
        _remembered_request_line(line) if len(line) <= MAX_REMEMBERED_LINE_BYTES else _judge_request_line(line)
    )

    # (3) llhttp judges the head as a whole; then every line is one field (it refuses bare CR, bare LF and folding).
    verdict = _Verdict()
    try:
        httptools.HttpRequestParser(verdict).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # CONNECT, or an Upgrade that is not passed on; body bytes are never fed here
    except httptools.HttpParserError:
        verdict.complete = False
    if not verdict.complete:
        raise _refused(RefusalCode.AMBIGUOUS_FRAMING, "The head is not unambiguous HTTP/1.1.")
    fields = request_fields(raw[line_end + 2 : -len(HEAD_END)])
    if len(fields) > MAX_HEADERS:
        raise _refused(RefusalCode.HEADERS_TOO_LARGE, f"The head has more than {MAX_HEADERS} fields.")

    # (4) What llhttp leaves open.
    special = [field for field in fields if field.special]
    host: bytes | None = None
    framing, content_length = Framing.NONE, 0
    keep_alive, expects_continue = version == b"1.1", False
    upgrades, to_websocket = False, False
    for field in special:
        name, value = field.name, field.value
        if name == b"host":
            if host is not None:
                raise _refused(RefusalCode.AMBIGUOUS_FRAMING, "The request has more than one Host field.")
            host = value
        elif name == b"content-length":
            framing, content_length = Framing.LENGTH, int(value)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or framing is not Framing.NONE:
                raise _refused(RefusalCode.AMBIGUOUS_FRAMING, "The only transfer coding understood is one 'chunked'.")
            framing = Framing.CHUNKED
        elif name == b"connection":
            tokens = connection_tokens(value)
            if not _UNNOMINATABLE.isdisjoint(tokens):
                raise _refused(RefusalCode.MALFORMED_REQUEST, "Connection names a field that frames the message.")
            keep_alive = keep_alive and b"close" not in tokens
            upgrades = upgrades or b"upgrade" in tokens
        elif name == b"upgrade":
            to_websocket = value.lower() == b"websocket"
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise _refused(RefusalCode.MALFORMED_REQUEST, "The only expectation understood is 100-continue.")
            expects_continue = True
    if host is not None and not _HOST.fullmatch(host):
        raise _refused(RefusalCode.MALFORMED_REQUEST, "The Host field is not one host, with a port or without.")
    if host is None and method != "CONNECT":
        raise _refused(RefusalCode.MALFORMED_REQUEST, "The request has no Host field.")
    if method == "CONNECT" and (framing is Framing.CHUNKED or content_length):
        # RFC 9110 §9.3.6: it has no content, so what follows would be read differently by others.
        raise _refused(RefusalCode.AMBIGUOUS_FRAMING, "A CONNECT has no body.")
    opens_websocket = upgrades and to_websocket and method == "GET" and framing is Framing.NONE
    return RequestHead(
        line,
        method,
        target,
        fields,
        special,
        host,
        framing,
        content_length,
        keep_alive,
        expects_continue,
        opens_websocket,
    )


def judge_partial_head(part: bytes | bytearray, *, new_at: int) -> None:
    """What will never become a head is refused before it has all come. `new_at`: from here on it is looked at for the
    first time. Raises `RefusedError`."""
    if not part[:1].isalpha() and part != b"\r":
        raise _refused(RefusalCode.MALFORMED_REQUEST, "This is not HTTP/1.1.")
    if len(part) > MAX_REQUEST_LINE_BYTES and part.find(b"\r\n", 0, MAX_REQUEST_LINE_BYTES) < 0:
        raise _refused(RefusalCode.URI_TOO_LONG, f"The request line is longer than {MAX_REQUEST_LINE_BYTES} bytes.")
    if len(part) > MAX_HEAD_BYTES:
        raise _refused(RefusalCode.HEADERS_TOO_LARGE, f"The head is longer than {MAX_HEAD_BYTES} bytes.")
    if _BARE_LF.search(part, new_at):
        raise _refused(RefusalCode.AMBIGUOUS_FRAMING, "A line ends without CR.")


def _judge_request_line(line: bytes) -> tuple[str, bytes, bytes]:
    """(method, target, version). Raises `RefusedError`."""
    # A method that mirrors the request would hand the secret back: it is refused before anything else is read.
    if line[:6].partition(b" ")[0].upper() in _MIRRORING_METHODS:
        raise _refused(
            RefusalCode.METHOD_NOT_ALLOWED, "TRACE and TRACK mirror the request, and with it the credential."
        )
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise _refused(RefusalCode.MALFORMED_REQUEST, "The request line is not 'METHOD target HTTP/1.1'.")
    method, target, version = match.groups()
    if b"#" in target:  # RFC 9112 §3.2: others cut it there
        raise _refused(RefusalCode.MALFORMED_REQUEST, "The request's target has a fragment.")
    if version != b"1.1" and not (version == b"1.0" and method == b"CONNECT"):
        raise _refused(RefusalCode.PROTOCOL_DENIED, "The proxy speaks HTTP/1.1.")
    return method.decode("ascii"), target, version


_remembered_request_line = lru_cache(maxsize=4096)(_judge_request_line)


def parse_response_head(raw: bytes, *, request_method: str, websocket_asked: bool = False) -> ResponseHead:
    """One reply head (interim replies included), from its first byte to the blank line.

    Raises `UpstreamProtocolError`. A 101 is an error unless it is to WebSocket, and that was asked for.
    """
    if len(raw) > MAX_HEAD_BYTES:
        raise UpstreamProtocolError("the reply's head is too large")
    verdict = _Verdict()
    # One parser for each reply: after the reply to a HEAD, llhttp would wait for a body that never comes.
    parser = httptools.HttpResponseParser(verdict)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        if not websocket_asked:
            raise UpstreamProtocolError("the upstream switched protocols unasked") from None
    except httptools.HttpParserError:
        raise UpstreamProtocolError("the reply's head is not unambiguous HTTP/1.1") from None
    status_line, _, field_lines = raw[: -len(HEAD_END)].partition(b"\r\n")
    if not verdict.complete:
        raise UpstreamProtocolError("the reply is not HTTP/1.1")
    minor_version, status, reason = (
        _remembered_status_line(status_line)
        if len(status_line) <= MAX_REMEMBERED_LINE_BYTES
        else _judge_status_line(status_line)
    )
    fields = reply_fields(field_lines)
    if len(fields) > MAX_HEADERS:
        raise UpstreamProtocolError("the reply has too many fields")

    special = [field for field in fields if field.special]
    framing, content_length = Framing.UNTIL_CLOSE, 0
    is_coded, to_websocket, removed = False, False, _NO_NAMES
    for field in special:
        name = field.name
        if name == b"content-length":
            framing, content_length = Framing.LENGTH, int(field.value)
        elif name == b"transfer-encoding":
            if field.value.lower() != b"chunked" or framing is not Framing.UNTIL_CLOSE or minor_version == b"0":
                raise UpstreamProtocolError("the reply's transfer coding is not one 'chunked'")
            framing = Framing.CHUNKED
        elif name == b"connection":
            removed |= connection_tokens(field.value)
            if not _UNNOMINATABLE.isdisjoint(removed):
                raise UpstreamProtocolError("Connection names a field that frames the reply")
        elif name == b"upgrade":
            to_websocket = field.value.lower() == b"websocket"
        elif name == b"content-encoding":
            is_coded = is_coded or field.value.lower() != b"identity"
    if status == 101 and not (websocket_asked and to_websocket and b"upgrade" in removed):
        raise UpstreamProtocolError("the upstream switched protocols unasked")
    if request_method == "HEAD" or status < 200 or status in (204, 304):  # RFC 9112 §6.3
        framing = Framing.NONE
    # llhttp is not asked: after a reply of no content it has forgotten the length, and says "close".
    keep_alive = minor_version == b"1" and framing is not Framing.UNTIL_CLOSE and b"close" not in removed
    return ResponseHead(
        status, reason, fields, special, framing, content_length, keep_alive, is_coded, removed - _CONNECTION_OPTIONS
    )


def _judge_status_line(line: bytes) -> tuple[bytes, int, bytes]:
    """(minor version, status, reason). Raises `UpstreamProtocolError`."""
    match = _STATUS_LINE.fullmatch(line)
    if match is None or match[2] < b"100":
        raise UpstreamProtocolError("the reply is not HTTP/1.1")
    return match[1], int(match[2]), match[3] or b""


_remembered_status_line = lru_cache(maxsize=256)(_judge_status_line)


def connection_tokens(value: bytes) -> frozenset[bytes]:
    """The options of a Connection field, lower case."""
    return _remembered_tokens(value) if len(value) <= MAX_REMEMBERED_LINE_BYTES else _tokens(value)


def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in value.split(b","))


_remembered_tokens = lru_cache(maxsize=1024)(_tokens)


def nominated(special: list[Field]) -> frozenset[bytes]:
    """Every field that this message's Connection fields declare hop-by-hop."""
    named = _NO_NAMES
    for field in special:
        if field.name == b"connection":
            named |= connection_tokens(field.value)
    return named - _CONNECTION_OPTIONS


class _Verdict:
    """llhttp's: whether it read a whole head."""

    __slots__ = ("complete",)

    def __init__(self) -> None:
        self.complete = False

    def on_headers_complete(self) -> None:
        self.complete = True


class ChunkError(ValueError):
    """The chunked body is not read alike by everyone: the message says where. Nothing after it can be trusted."""


class ChunkedReader:
    """Takes a chunked body apart (RFC 9112 §7.1), strictly: no extensions, no bare LF, CRLF after every chunk.

    `feed` yields the data between the chunk lines; once `complete`, `rest` holds the bytes after the body. Trailers are
    checked for form, and dropped: nothing of ours needs them, and merged into a head they would be a hole.
    """

    __slots__ = ("_buffer", "_left", "_state", "_trailer_bytes", "complete", "rest")

    def __init__(self) -> None:
        self.complete = False
        self.rest = b""
        self._buffer = b""
        self._left = 0
        self._state = "size"
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The body bytes in `data`, piece by piece. Raises `ChunkError`."""
        buffer = self._buffer + data if self._buffer else data
        self._buffer = b""
        at = 0
        while not self.complete:
            if self._state == "data":
                piece = buffer[at : at + self._left]
                if not piece:
                    return
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = "end of chunk"
                yield piece
                continue
            line_end = buffer.find(b"\n", at)
            if line_end < 0:
                self._buffer = buffer[at:]
                if len(self._buffer) > (MAX_TRAILER_BYTES if self._state == "trailer" else MAX_CHUNK_LINE_BYTES):
                    raise ChunkError("a line of the chunked coding is too long")
                return
            line = buffer[at : line_end + 1]
            at = line_end + 1
            self._read_line(line)
        self.rest = buffer[at:]

    def _read_line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise ChunkError("a line of the chunked coding ends without CR")
        text = line[:-2]
        match self._state:
            case "end of chunk":
                if text:
                    raise ChunkError("a chunk is longer than its size says")
                self._state = "size"
            case "size":
                if not _CHUNK_SIZE.fullmatch(text):
                    raise ChunkError("a chunk size is not plain hexadecimal")
                self._left = int(text, 16)
                self._state = "data" if self._left else "trailer"
            case _:
                self._trailer_bytes += len(line)
                if self._trailer_bytes > MAX_TRAILER_BYTES:
                    raise ChunkError("the trailers are too large")
                if not text:
                    self.complete = True
                elif not _TRAILER.fullmatch(text):
                    raise ChunkError("a trailer is not a field line")
                elif text.partition(b":")[0].lower() in _UNNOMINATABLE:
                    # RFC 9110 §6.5.1: it must not be sent; there are readers that merge it into the head.
                    raise ChunkError("a trailer names a field that frames the message")


_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


def chunk(data: bytes) -> bytes:
    """`data` (not empty) as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK: Final = b"0\r\n\r\n"


def _refused(code: RefusalCode, detail: str) -> RefusedError:
    return RefusedError(Refusal(code, detail, "Send one well-formed HTTP/1.1 request."))
