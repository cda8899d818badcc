"""TLS over a transport whose bytes we already read: one layer, used toward clients and toward upstreams.

`loop.start_tls` loses a ClientHello that came in the same segment as the CONNECT, and hands over bytes before it
returns; a MemoryBIO has neither trap, uses only public API, and is as fast. It also lets one connection protocol keep
its one object: the layer is fed by it and calls it back.

Rules: an end without close_notify is not an end (RFC 8446 §6.1), and is told apart; a paused layer decrypts no more, so
that backpressure reaches the socket; nothing that OpenSSL says about a peer is shown to anybody but the log.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Final, Protocol

READ_BYTES: Final = 16_384
"""A record holds no more (RFC 8446 §5.1), so nothing decrypted stays behind in OpenSSL; the buffer is allocated for
every read."""


class Lower(Protocol):
    """What a layer needs of the transport, or the other layer, below it."""

    def write(self, data: bytes) -> None: ...
    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...


class TlsLayer:
    """One side of one TLS connection.

    Feed it what arrives (`feed`, `feed_eof`); it calls `on_established` once, `on_data` with plaintext, `on_end(clean)`
    when the peer is done, and `on_failure` when the handshake or a record fails (an alert has been sent by then).
    """

    __slots__ = (
        "_established",
        "_incoming",
        "_is_paused",
        "_loop",
        "_lower",
        "_object",
        "_on_data",
        "_on_end",
        "_on_established",
        "_on_failure",
        "_outgoing",
        "_resuming",
        "_stopped",
    )

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        lower: Lower,
        context: ssl.SSLContext,
        server_hostname: str | None,
        session: ssl.SSLSession | None = None,
        on_established: Callable[[], None],
        on_data: Callable[[bytes], None],
        on_end: Callable[[bool], None],
        on_failure: Callable[[ssl.SSLError], None],
    ) -> None:
        """`server_hostname` None: we are the server."""
        self._loop = loop
        self._lower = lower
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            session=session,
        )
        self._on_established = on_established
        self._on_data = on_data
        self._on_end = on_end
        self._on_failure = on_failure
        self._established = False
        self._is_paused = False
        self._resuming = False
        self._stopped = False

    @property
    def has_unread(self) -> bool:
        """Whether the peer sent more than has been handed on."""
        return self._incoming.pending > 0

    @property
    def context(self) -> ssl.SSLContext:
        return self._object.context

    @property
    def session(self) -> ssl.SSLSession | None:
        """What a later handshake of the same context may go on with."""
        return self._object.session

    @property
    def peer_certificate(self) -> bytes | None:
        """The other end's, as DER, where it was asked for one: its chain is verified, or the handshake has failed."""
        return self._object.getpeercert(binary_form=True)

    def start(self) -> None:
        """The client's side speaks first."""
        self._advance()

    def feed(self, data: bytes) -> None:
        """Bytes from below."""
        self._incoming.write(data)
        if self._established:
            self._read()
        else:
            self._advance()

    def feed_eof(self) -> None:
        """The end from below, without a close_notify so far."""
        if not self._stopped:
            self._stopped = True
            self._on_end(False)

    # --- what a protocol does with a transport ---

    def write(self, data: bytes) -> None:
        if self._stopped and not self._established:
            return
        try:
            self._object.write(data)
        except ssl.SSLError as error:  # after a close_notify or a fatal alert
            self._fail(error)
            return
        self._lower.write(self._outgoing.read())

    def pause_reading(self) -> None:
        self._is_paused = True
        self._lower.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_paused:
            return
        self._is_paused = False
        self._lower.resume_reading()
        if self._incoming.pending and not self._resuming:
            # What was decrypted late arrives as late as if it had just been received: never inside the caller.
            self._resuming = True
            self._loop.call_soon(self._resume)

    def close(self) -> None:
        """With a close_notify, so that the peer can tell this end from a cut."""
        if self._established and not self._lower.is_closing():
            self._stopped = True
            self._notify_close()
        self._lower.close()

    def write_eof(self) -> None:
        """A close_notify, and the end of our bytes; the peer's are still taken in below."""
        if self._established and not self._lower.is_closing():
            self._stopped = True
            self._notify_close()
        self._lower.write_eof()

    def abort(self) -> None:
        """Without a close_notify: the peer sees an incomplete message."""
        self._stopped = True
        self._lower.abort()

    def is_closing(self) -> bool:
        return self._lower.is_closing()

    def release(self) -> None:
        """The connection is over: whoever was called back is let go, so that neither keeps the other in memory."""
        self._stopped = True
        self._on_established = _nobody
        self._on_data = self._on_end = self._on_failure = _nobody_told

    # --- the state machine ---

    def _resume(self) -> None:
        self._resuming = False
        if not self._is_paused:
            self._advance()

    def _advance(self) -> None:
        try:
            if not self._established:
                self._object.do_handshake()
                self._established = True
                self._flush()
                self._on_established()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            self._fail(error)
        else:
            self._read()

    def _read(self) -> None:
        """Hand on what can be decrypted. Hot path: each call of OpenSSL or a BIO that is not needed shows."""
        incoming, read = self._incoming, self._object.read
        try:
            while not self._is_paused and not self._stopped:
                data = read(READ_BYTES)
                if not data:
                    self._end_cleanly()
                    return
                self._on_data(data)
                if not incoming.pending:
                    # Asking OpenSSL once more, only to be told that it wants to read, costs as much as the reading.
                    break
            if self._outgoing.pending:
                self._flush()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLZeroReturnError:
            self._end_cleanly()
        except ssl.SSLError as error:
            self._fail(error)

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data:
            self._lower.write(data)

    def _notify_close(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # the peer's own close_notify is not waited for (RFC 8446 §6.1)
            self._object.unwrap()
        self._flush()

    def _end_cleanly(self) -> None:
        self._flush()
        if not self._stopped:
            self._stopped = True
            self._on_end(True)

    def _fail(self, error: ssl.SSLError) -> None:
        self._flush()  # the alert
        if not self._stopped:
            self._stopped = True
            self._on_failure(error)


def _nobody() -> None:
    pass


def _nobody_told(_what: object) -> None:
    pass
