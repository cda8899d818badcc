"""The upstream of the demo: a TLS server that wants its key, and writes down every byte it gets.

/v1/models   200 for the right key, else 401
/v1/echo     the request's own head, as the body of the answer: the worst a server can do with a key
/v1/stream   server-sent events; the last ones come only when `finish` is set
"""

import asyncio
import contextlib
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY: Final = timedelta(days=1)
_FIRST_EVENTS: Final = 3
_LAST_EVENTS: Final = 3
_STREAM_SECONDS: Final = 15.0


@dataclass(slots=True)
class Upstream:
    """A running upstream. What it `heard` is raw: heads and bodies as they came off the wire."""

    accepted_keys: set[str]
    port: int = 0
    heard: list[bytes] = field(default_factory=list)
    connections: int = 0
    finish: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def everything(self) -> bytes:
        return b"".join(self.heard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heard.append(head)
                await self._answer(head, writer)
                await writer.drain()
        writer.close()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        path = head.split(b" ", 2)[1]
        if not any(f"authorization: bearer {key}\r\n".encode() in _lowered_names(head) for key in self.accepted_keys):
            writer.write(_message(b"401 Unauthorized", b"wrong key\n"))
        elif path == b"/v1/echo":
            writer.write(_message(b"200 OK", head))
        elif path == b"/v1/stream":
            await self._stream(writer)
        else:
            writer.write(_message(b"200 OK", b'{"models": ["demo-1"]}\n'))

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(_FIRST_EVENTS + _LAST_EVENTS):
            if number == _FIRST_EVENTS:
                await asyncio.to_thread(self.finish.wait, _STREAM_SECONDS)
            event = b"data: token %d\n\n" % number
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")


@contextlib.contextmanager
def running_upstream(accepted_keys: set[str], folder: Path) -> Iterator[Upstream]:
    """Serve on any free port of 127.0.0.1, with a certificate from a CA of its own (`folder`/upstream-ca.pem)."""
    upstream = Upstream(accepted_keys)
    context = _server_context(folder)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    def run() -> None:
        async def listen() -> None:
            server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, ssl=context)
            upstream.port = server.sockets[0].getsockname()[1]
            started.set()

        loop.run_until_complete(listen())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True, name="demo upstream")
    thread.start()
    started.wait(5)
    try:
        yield upstream
    finally:
        upstream.finish.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


def ca_file(folder: Path) -> Path:
    return folder / "upstream-ca.pem"


def _lowered_names(head: bytes) -> bytes:
    """The head with `Authorization: Bearer` in lower case, and the key as it is."""
    return head.replace(b"Authorization:", b"authorization:").replace(b": Bearer ", b": bearer ")


def _message(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def _server_context(folder: Path) -> ssl.SSLContext:
    """Two upstreams may share a folder: they share its CA."""
    chain = folder / "upstream.pem"
    if not chain.exists():
        ca_key, leaf_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        ca = _certificate("Demo upstream CA", ca_key, "Demo upstream CA", ca_key, is_ca=True)
        leaf = _certificate("127.0.0.1", leaf_key, "Demo upstream CA", ca_key, is_ca=False)
        ca_file(folder).write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        key = leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        chain.touch(mode=0o600)
        chain.write_bytes(key + leaf.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return context


def _certificate(
    subject: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey, *, is_ca: bool
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_ca,
                key_cert_sign=is_ca,
                crl_sign=is_ca,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    if not is_ca:
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(subject))])
        builder = builder.add_extension(address, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
