"""An upstream that agrees to a WebSocket (RFC 6455 §4.2.2), and gives back whatever comes."""

import base64
import hashlib

from tests.support.upstream import Behaviour, PeerGoneError, Request, Wire

FIRST_FRAME = b"\x81\x05hello"


def switched(request: Request) -> bytes:
    """The head that agrees to this handshake."""
    key = request.header("sec-websocket-key").encode()
    accept = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + base64.b64encode(accept) + b"\r\n\r\n"
    )


def echoing(first: bytes = FIRST_FRAME) -> Behaviour:
    """Accepts, with a first frame in the same write, and gives back each byte that comes."""

    async def behave(request: Request, wire: Wire) -> None:
        await wire.write(switched(request) + first)
        try:
            while True:
                await wire.write(await wire.exactly(1) + bytes(wire._take(len(wire._unread))))
        except PeerGoneError:
            wire.finished = True

    return behave
