"""How a connection begins, before there is a request on it: what its opener says, and what follows a CONNECT's 200.

Rule: each of the two takes the client's bytes until it knows enough, tells the connection once, and is gone. What a
tunnel's first bytes show decides what becomes of it: its own TLS server name is the host of the CONNECT, or there is no
tunnel (RFC 6066 §3); a client that speaks nothing we speak gets an alert (RFC 7301 §3.2); anything but TLS is refused.
"""

import ssl
from typing import TYPE_CHECKING, Final

from control_plane.contract.destination import Endpoint, InvalidDestinationError, canonical_host, is_ip_literal
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from egress_proxy.client_hello import (
    MAX_CLIENT_HELLO_BYTES,
    NO_APPLICATION_PROTOCOL_ALERT,
    ClientHello,
    IncompleteError,
    NotTlsError,
    read_client_hello,
)
from egress_proxy.core.decision import Forward
from egress_proxy.preamble import MalformedPreambleError, may_begin_preamble, read_preamble

if TYPE_CHECKING:
    from egress_proxy.client import ClientConnection

NO_PREAMBLE_OF_OURS: Final = Refusal(RefusalCode.MALFORMED_REQUEST, "The PROXY header is not one of ours.")
NOT_TLS: Final = Refusal(
    RefusalCode.MALFORMED_REQUEST, "Inside a tunnel the client speaks TLS; http:// goes to the proxy in absolute form."
)
ANOTHER_NAME: Final = Refusal(
    RefusalCode.MISDIRECTED_REQUEST, "The TLS server name is not the host of the CONNECT.", "One tunnel for each host."
)


class Preamble:
    """What the opener of a session's listener puts before the program's first byte, if there is an opener."""

    __slots__ = ("_client", "_held")

    def __init__(self, client: "ClientConnection") -> None:
        self._client = client
        self._held = b""

    def feed(self, data: bytes) -> None:
        self._held += data
        credential, rest = None, self._held
        if may_begin_preamble(rest):
            try:
                found = read_preamble(rest)
            except MalformedPreambleError:
                self._client.refuse_opening(NO_PREAMBLE_OF_OURS)
                return
            if found is None:
                return
            credential, used = found
            rest = rest[used:]
        self._client.begin_requests(credential, rest)


class Hello:
    """What comes inside a CONNECT, before TLS."""

    __slots__ = ("_client", "_context", "_endpoint", "_held", "_unopened")

    def __init__(
        self,
        client: "ClientConnection",
        *,
        endpoint: Endpoint,
        context: ssl.SSLContext | None,
        unopened: Forward | None,
    ) -> None:
        """`context`: by which it is intercepted; or `unopened`: what is carried on where nothing is looked at."""
        self._client = client
        self._endpoint = endpoint
        self._context = context
        self._unopened = unopened
        self._held = b""

    def feed(self, data: bytes) -> None:
        self._held += data
        try:
            hello = read_client_hello(self._held)
        except IncompleteError:
            if len(self._held) > MAX_CLIENT_HELLO_BYTES:
                self._client.abort()
            return
        except NotTlsError:
            self._client.refuse_opening(NOT_TLS)
            return
        if self._unopened is not None:
            self._carry(self._unopened, hello)
        elif hello.application_protocols and b"http/1.1" not in hello.application_protocols:
            self._client.end_tunnel(NO_APPLICATION_PROTOCOL_ALERT)
        else:
            assert self._context is not None, "it is intercepted where it is not carried on"
            # Said in answer to the first request inside: until then there is nobody to say it to.
            self._client.intercept(self._context, self._held, is_misdirected=not self._is_for_it(hello))

    def _carry(self, unopened: Forward, hello: ClientHello) -> None:
        """What the rule lets through is TLS to that host: another name inside would be another destination."""
        if not self._is_for_it(hello):
            self._client.refuse_opening(ANOTHER_NAME, forward=unopened)
            return
        self._client.wait_inside(self._dial(unopened), self._held)

    async def _dial(self, unopened: Forward) -> None:
        upstreams = self._client.services.upstreams
        lane = upstreams.lane(unopened.caller.tenant, unopened.endpoint, unopened.handling.ca_pem)
        try:
            upstream = await upstreams.connect(lane, allow_private=unopened.allow_private, unopened=True)
        except RefusedError as refused:
            self._client.refuse_opening(refused.refusal, forward=unopened)
        except Exception as error:  # border: this runs in a task of its own, and nobody would hear of it
            self._client.internal_error(error)
        else:
            self._client.carry(unopened, upstream)

    def _is_for_it(self, hello: ClientHello) -> bool:
        """The TLS server name must be the CONNECT host; only an address goes without one (RFC 6066 §3)."""
        if hello.server_name is None:
            return is_ip_literal(self._endpoint.host)
        try:
            return canonical_host(hello.server_name) == self._endpoint.host
        except InvalidDestinationError:
            return False
