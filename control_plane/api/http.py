"""uvicorn's HTTP protocol, with what it lacks: bounds on how large a head may grow and how long it and its body may
take, and the client certificate of a connection.

Rule: whoever has not yet sent a whole message has not shown anything, and costs little. (RFC 6585 §5: 431; RFC 9110
§15.5.9: 408.) Everything about a request that is whole is judged in `edge`.
"""

import asyncio
import json
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from control_plane.api.errors import refusal_headers, refusal_of_status
from control_plane.api.peer import PEER_CERTIFICATE, verified_peer
from control_plane.contract.headers import PROBLEM_JSON
from control_plane.contract.refusal import problem
from control_plane.core.certificates import PeerCertificate

MAX_OPEN_HEAD_BYTES: Final = 256 * 1024
HEAD_SECONDS: Final = 15.0
BODY_SECONDS: Final = 30.0
"""From a head's end to its body's. Some bodies are read before it is known who sends them."""


class BoundedHttp(HttpToolsProtocol):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._head_is_open = True
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._peer: PeerCertificate | None = None
        super().__init__(*arguments, **options)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = verified_peer(transport.get_extra_info("ssl_object"))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_is_open:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_OPEN_HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._peer is not None:
            self.scope[PEER_CERTIFICATE] = self._peer  # type: ignore[typeddict-unknown-key]
        self._head_is_open, self._head_bytes = True, 0
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_open = False
        self._await_body()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_waiting()
        super().on_message_complete()

    def _await_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _await_body(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(BODY_SECONDS, self._refuse_body)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_body(self) -> None:
        if self.cycle.response_started:
            self.transport.close()  # it was answered without being read
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)

    def _refuse(self, status: HTTPStatus) -> None:
        self._stop_waiting()
        if self.transport.is_closing():
            return
        refusal = refusal_of_status(status)
        body = json.dumps(problem(refusal, request_id="")).encode()
        head = {
            **refusal_headers(refusal),
            "Content-Type": PROBLEM_JSON,
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in head.items())]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self.transport.close()
