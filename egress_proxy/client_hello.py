"""What a TLS client asks for in its first message: the server name, and the application protocols (ALPN).

Read before OpenSSL sees it, because Python's `ssl` can neither show the ALPN offer nor answer it with an alert.
Rule: pure, and only as much of RFC 8446 §4.1.2 as these two answers need; whatever does not add up is an error.
"""

from dataclasses import dataclass
from typing import Final

_RECORD_START: Final = bytes((22, 3))
"""A handshake record of any TLS version."""
_CLIENT_HELLO: Final = 1
_EXTENSION_SERVER_NAME: Final = 0  # RFC 6066 §3
_EXTENSION_ALPN: Final = 16  # RFC 7301 §3.1
_HOST_NAME: Final = 0
MAX_CLIENT_HELLO_BYTES: Final = 65_536
MAX_RECORDS: Final = 16
"""A record holds 16 KiB: a ClientHello in more of them than this is there to be put together again and again."""

NO_APPLICATION_PROTOCOL_ALERT: Final = bytes((21, 3, 3, 0, 2, 2, 120))
"""A fatal alert record (RFC 7301 §3.2), for a client that speaks nothing that we speak."""


class NotTlsError(ValueError):
    """The bytes are not the beginning of a TLS connection."""


class IncompleteError(Exception):
    """More bytes are needed."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    server_name: str | None
    """As sent; not yet canonical, not yet trusted."""
    application_protocols: tuple[bytes, ...]
    """Empty when the client did not offer any."""


def read_client_hello(data: bytes) -> ClientHello:
    """Raises `IncompleteError` while the message is not all there, `NotTlsError` when it is something else."""
    try:
        return _hello(_Reader(_handshake_message(data)))
    except IndexError:
        raise NotTlsError("the ClientHello's lengths do not add up") from None


def _handshake_message(data: bytes) -> bytes:
    """The first handshake message, put together from its records (RFC 8446 §5.1)."""
    message, at = b"", 0
    for _ in range(MAX_RECORDS):
        if not _RECORD_START.startswith(data[at : at + 2]):
            raise NotTlsError("not a TLS handshake record")
        if len(data) < at + 5:
            break
        length = int.from_bytes(data[at + 3 : at + 5])
        if length == 0:
            raise NotTlsError("an empty handshake record")
        message += data[at + 5 : at + 5 + length]
        at += 5 + length
        if message and message[0] != _CLIENT_HELLO:
            raise NotTlsError("the first handshake message is not a ClientHello")
        if len(message) >= 4:
            wanted = 4 + int.from_bytes(message[1:4])
            if wanted > MAX_CLIENT_HELLO_BYTES:
                raise NotTlsError("the ClientHello is too long")
            if len(message) >= wanted:
                return message[4:wanted]
        if at > len(data):
            break
    else:
        raise NotTlsError("the ClientHello is in too many records")
    raise IncompleteError


class _Reader:
    """Takes length-prefixed pieces off the front. Raises `IndexError` where one is cut short."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._data)

    def take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) != count:
            raise IndexError
        self._at += count
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size_of_length: int) -> "_Reader":
        return _Reader(self.take(self.number(size_of_length)))

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)


def _hello(reader: _Reader) -> ClientHello:
    reader.take(2 + 32)  # legacy_version, random
    reader.vector(1)  # legacy_session_id
    reader.vector(2)  # cipher_suites
    reader.vector(1)  # legacy_compression_methods
    server_name: str | None = None
    protocols: tuple[bytes, ...] = ()
    if reader.is_at_end:
        return ClientHello(None, ())
    extensions = reader.vector(2)
    while not extensions.is_at_end:
        kind, body = extensions.number(2), extensions.vector(2)
        if kind == _EXTENSION_SERVER_NAME:
            server_name = _server_name(body)
        elif kind == _EXTENSION_ALPN:
            protocols = _protocols(body.vector(2))
    return ClientHello(server_name, protocols)


def _server_name(body: _Reader) -> str | None:
    names = body.vector(2)
    while not names.is_at_end:
        kind, name = names.number(1), names.vector(2)
        if kind == _HOST_NAME:
            return name.rest().decode("latin-1")
    return None


def _protocols(names: _Reader) -> tuple[bytes, ...]:
    found = []
    while not names.is_at_end:
        found.append(names.vector(1).rest())
    return tuple(found)
