"""Other people's HTTP/1.1 parsers, and what they make of a stream of bytes.

Two that share no line with the proxy's own (llhttp, in C): h11 (pure Python, by the book), and aiohttp's pure-Python
parser, of a server that many run (its usual one is llhttp again). A reading is in the terms that framing is about:
which messages, with which first line, fields and body, and whether each is whole.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

import h11
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParserPy, HttpResponseParserPy
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

_LARGE: Final = 1 << 24


@dataclass(slots=True)
class Message:
    """A request or a reply, as a reader sees it."""

    first: tuple[bytes, ...]
    """Method and target, or the status."""
    fields: list[tuple[bytes, bytes]]
    """Names in lower case."""
    body: bytes = b""
    is_whole: bool = False

    @property
    def is_interim(self) -> bool:
        return len(self.first) == 1 and self.first[0] < b"200"


@dataclass(slots=True)
class Reading:
    """`error`: why the reader stopped. `is_told_apart`: False behind what this reader takes for another protocol."""

    messages: list[Message] = field(default_factory=list)
    error: str = ""
    rest: bytes = b""
    """What it was not asked for, behind the last message."""
    is_told_apart: bool = True


RequestReader = Callable[[bytes], Reading]
"""All the requests of a connection, each answered with 200 at once."""
ReplyReader = Callable[[bytes, str, bool], Reading]
"""The reply to one request of that method; whether the sender ended the connection cleanly behind it."""

# --- h11 --------------------------------------------------------------------------------------------------------------


def h11_requests(data: bytes) -> Reading:
    reading, connection = Reading(), h11.Connection(h11.SERVER, max_incomplete_event_size=_LARGE)
    if data:  # nothing would be an end
        connection.receive_data(data)
    try:
        for event in _h11_events(connection):
            if isinstance(event, h11.Request):
                reading.messages.append(Message((event.method, event.target), _h11_fields(event.headers)))
            elif isinstance(event, h11.Data):
                reading.messages[-1].body += event.data
            elif isinstance(event, h11.EndOfMessage):
                reading.messages[-1].is_whole = True
                status = 404 if reading.messages[-1].first[0] == b"CONNECT" else 200
                connection.send(h11.Response(status_code=status, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    break
                connection.start_next_cycle()
    except h11.RemoteProtocolError as error:
        reading.error = str(error)
    return reading


def h11_replies(data: bytes, method: str, ends: bool) -> Reading:
    reading, connection = Reading(), h11.Connection(h11.CLIENT, max_incomplete_event_size=_LARGE)
    connection.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
    connection.send(h11.EndOfMessage())
    if data:  # nothing would be an end
        connection.receive_data(data)
    if ends:
        connection.receive_data(b"")
    try:
        for event in _h11_events(connection):
            if isinstance(event, h11.Response | h11.InformationalResponse):
                status = b"%d" % event.status_code
                reading.messages.append(Message((status,), _h11_fields(event.headers), is_whole=status < b"200"))
            elif isinstance(event, h11.Data):
                reading.messages[-1].body += event.data
            elif isinstance(event, h11.EndOfMessage):
                reading.messages[-1].is_whole = True
                break
    except h11.RemoteProtocolError as error:
        reading.error = str(error)
    reading.rest = connection.trailing_data[0]
    return reading


def _h11_events(connection: h11.Connection) -> Iterator[Any]:
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
            return
        yield event


def _h11_fields(headers: Any) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in headers]


# --- aiohttp ----------------------------------------------------------------------------------------------------------


def aiohttp_requests(data: bytes) -> Reading:
    reading, payloads = Reading(), _Payloads()
    parser = HttpRequestParserPy(
        _Nobody(), _loop(), _LARGE, _LARGE, _LARGE, _LARGE, auto_decompress=False, max_msg_queue_size=0
    )
    try:
        for line in _lines(data):
            rest = line
            while rest:
                heads, upgraded, rest = parser.feed_data(rest)
                for head, payload in heads:
                    first = (head.method.encode("utf-8", "surrogateescape"), _bytes(head.path))
                    payloads.add(reading, Message(first, _aiohttp_fields(head.raw_headers)), payload)
                    if head.method == "CONNECT":
                        # Its parser always believes that the tunnel is opened.
                        reading.is_told_apart = False
                        payloads.collect()
                        reading.messages[-1].body, reading.messages[-1].is_whole = b"", True
                        return reading
                if not upgraded:
                    break
                parser.set_upgraded(False)  # as its server does, which switches only where it answers with 101
    except HttpProcessingError as error:
        reading.error = f"{type(error).__name__}: {error.message}"
    except (ValueError, UnicodeError) as error:  # what its server answers with 400, too
        reading.error = f"{type(error).__name__}: {error}"
    payloads.collect()
    return reading


def aiohttp_replies(data: bytes, method: str, ends: bool) -> Reading:
    reading, payloads = Reading(), _Payloads()
    parser = HttpResponseParserPy(
        cast("Any", _Nobody()),
        _loop(),
        _LARGE,
        _LARGE,
        _LARGE,
        _LARGE,
        method=method,
        read_until_eof=True,
        response_with_body=method != "HEAD",
        auto_decompress=False,
    )
    pieces = _lines(data)
    try:
        while pieces:
            heads, upgraded, tail = parser.feed_data(pieces.pop(0))
            for head, payload in heads:
                first = (b"%d" % head.code,)
                payloads.add(reading, Message(first, _aiohttp_fields(head.raw_headers)), payload)
            if upgraded:
                reading.is_told_apart = False
                reading.rest = tail + b"".join(pieces)
                break
            if reading.messages and not reading.messages[-1].is_interim and payloads.is_last_whole:
                reading.rest = tail + b"".join(pieces)
                # The end of a body may stand in the middle of a line: what follows it is in the parser.
                reading.rest = parser._tail + reading.rest
                break
        if ends and not payloads.is_last_whole:
            parser.feed_eof()
    except HttpProcessingError as error:
        reading.error = f"{type(error).__name__}: {error.message}"
    payloads.collect()
    return reading


class _Payloads:
    """The bodies, which come beside the messages."""

    def __init__(self) -> None:
        self._all: list[tuple[Message, StreamReader]] = []

    def add(self, reading: Reading, message: Message, payload: StreamReader) -> None:
        reading.messages.append(message)
        self._all.append((message, payload))

    @property
    def is_last_whole(self) -> bool:
        return bool(self._all) and (self._all[-1][1] is EMPTY_PAYLOAD or self._all[-1][1].is_eof())

    def collect(self) -> None:
        for message, payload in self._all:
            if payload is EMPTY_PAYLOAD:
                message.is_whole = True
                continue
            message.is_whole = payload.is_eof() and payload.exception() is None
            message.body = b"".join(payload._buffer)
        self._all.clear()


class _Nobody(BaseProtocol):
    """Has nothing to pause."""

    def __init__(self) -> None:
        super().__init__(_loop())

    def pause_reading(self) -> None: ...

    def resume_reading(self, resume_parser: bool = True) -> None: ...


def _lines(data: bytes) -> list[bytes]:
    """A head ends with a line, so that what was read before an error is not lost with it."""
    return [line + b"\n" for line in data.split(b"\n")[:-1]] + [data.rpartition(b"\n")[2] or b""]


def _aiohttp_fields(raw: Any) -> list[tuple[bytes, bytes]]:
    return [(bytes(name).lower(), bytes(value)) for name, value in raw]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


_LOOPS: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """Its parser wants one, and does not run it."""
    if not _LOOPS:
        _LOOPS.append(asyncio.new_event_loop())
    return _LOOPS[0]


REQUEST_READERS: Final[dict[str, RequestReader]] = {"h11": h11_requests, "aiohttp": aiohttp_requests}
REPLY_READERS: Final[dict[str, ReplyReader]] = {"h11": h11_replies, "aiohttp": aiohttp_replies}
