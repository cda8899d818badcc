"""Is the swap working? A real one, in process, for `/readyz`.

A synthetic tenant's placeholder goes through the same connection protocol, decision, substitution, exchange and
scrubber as any other, over a socket pair, to an upstream at the end of another socket pair that checks what arrives.
Health that only says "the process is up" was green, elsewhere, while nothing was swapped.
"""

import asyncio
import secrets
import socket
from collections.abc import Sequence
from typing import Final

import structlog

from control_plane.contract.caller import Caller, ClientId, CredentialId, PlaceholderId, SessionId, SubjectId, TenantId
from control_plane.contract.destination import Destination, Endpoint
from control_plane.contract.grant import GrantScope
from control_plane.contract.placeholder import ENTROPY_BYTES, Shape, TokenKind, fingerprint, mint
from control_plane.contract.placement import BEARER
from control_plane.contract.secret import Secret
from control_plane.contract.wire import Ask, Binding, BoundLimit, CallerFacts, Policy, Refused, Route
from egress_proxy.audit import AuditSpool
from egress_proxy.ca import LeafContexts
from egress_proxy.client import ClientConnection
from egress_proxy.config import AuditMode
from egress_proxy.core.decision import Mode
from egress_proxy.core.quota import Quotas, Standing
from egress_proxy.core.view import AskQuota, KnownCaller, KnownWorkload, Resolved
from egress_proxy.leaks import LeakWatch
from egress_proxy.load import Loads
from egress_proxy.metrics import Counters
from egress_proxy.outlet import Turn
from egress_proxy.services import Services
from egress_proxy.upstream import Lane, UpstreamConnection

CACHED_SECONDS: Final = 2.0
PROBE_SECONDS: Final = 2.0
_HOST: Final = "readiness.invalid"  # RFC 6761 §6.4: never a real name
_ENDPOINT: Final = Endpoint("https", _HOST, 443)

log = structlog.get_logger("egress_proxy")


class SwapProbe:
    """Remembers its last result for `CACHED_SECONDS`."""

    def __init__(self, leaf_contexts: LeafContexts, counters: Counters, loop: asyncio.AbstractEventLoop) -> None:
        self._leaf_contexts = leaf_contexts
        self._counters = counters
        self._loop = loop
        self._last: tuple[float, bool] | None = None
        self._running: asyncio.Future[bool] | None = None

    async def works(self) -> bool:
        if self._last is not None and self._loop.time() - self._last[0] < CACHED_SECONDS:
            return self._last[1]
        if self._running is None:
            self._running = asyncio.ensure_future(self._probe())
            self._running.add_done_callback(self._probed)
        return await asyncio.shield(self._running)

    def _probed(self, done: "asyncio.Future[bool]") -> None:
        self._running = None
        if not done.cancelled():
            self._last = (self._loop.time(), done.result())

    async def _probe(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._leaf_contexts.context_for(_HOST)  # the CA signs
                works = await swap_once(self._leaf_contexts, self._loop)
        except Exception as error:  # border: whatever went wrong, it does not work
            log.warning("swap_probe_failed", error=type(error).__name__)
            works = False
        if not works:
            self._counters.swap_probes_failed += 1
        return works


async def swap_once(leaf_contexts: LeafContexts, loop: asyncio.AbstractEventLoop) -> bool:
    """One request with a placeholder, through the proxy's own classes, to an upstream that expects the secret."""
    synthetic = SyntheticView()
    far_end, near_end = socket.socketpair()
    lane = Lane("probe", _ENDPOINT)
    turn = Turn(loop)
    upstream = UpstreamConnection(loop=loop, turn=turn, lane=lane, address="", on_closed=lambda _: None)
    upstream_transport, _ = await loop.create_connection(lambda: upstream, sock=near_end)
    client_end, proxy_end = socket.socketpair()
    services = Services(
        loop=loop,
        turn=turn,
        view=synthetic,
        ask=_never_asked,
        upstreams=_OneUpstream(upstream),
        audit=AuditSpool(_nowhere, capacity=8, mode=AuditMode.BEST_EFFORT),
        leaf_contexts=leaf_contexts,
        counters=Counters(),
        clock=lambda: 0.0,
        proxy_id="probe",
        leaks=LeakWatch(suspend=lambda _placeholder, _seconds: None),
        loads=Loads(requests_per_tenant=1, connections_per_tenant=1),
        client_limit=1,
        quotas=Quotas(),
    )
    proxy_transport, _ = await loop.create_connection(lambda: ClientConnection(services, Mode.REVERSE), sock=proxy_end)
    try:
        return await converse(loop, client_end, far_end, synthetic)
    finally:
        proxy_transport.abort()
        upstream_transport.abort()
        client_end.close()
        far_end.close()


async def converse(
    loop: asyncio.AbstractEventLoop, client: socket.socket, upstream: socket.socket, synthetic: "SyntheticView"
) -> bool:
    """Be the client and the upstream. Whether the upstream got the secret, and the client did not."""
    client.setblocking(False)
    upstream.setblocking(False)
    secret = synthetic.secret.reveal().encode()
    await loop.sock_sendall(client, synthetic.request())
    asked = await _read_until(loop, upstream, b"\r\n\r\n")
    # It echoes the secret, so that the way back is tried, too.
    await loop.sock_sendall(upstream, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(secret), secret))
    answered = await _read_until(loop, client, b"*" * len(secret))
    was_swapped = b"Authorization: Bearer " + secret in asked and synthetic.placeholder_text.encode() not in asked
    return was_swapped and answered.startswith(b"HTTP/1.1 200") and secret not in answered


async def _read_until(loop: asyncio.AbstractEventLoop, sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        piece = await loop.sock_recv(sock, 65_536)
        if not piece:
            break
        data += piece
    return data


class SyntheticView:
    """A tenant, its caller, its credential and its placeholder, as the cache would show them."""

    def __init__(self) -> None:
        tag_key = secrets.token_bytes(32)
        caller = Caller(ClientId("probe"), TenantId("probe"), SubjectId("probe"), SessionId("probe"))
        self.tag_keys = (tag_key,)
        self.revision = 0
        self.secret = Secret(secrets.token_urlsafe(24))
        self.placeholder_text = _token(TokenKind.PLACEHOLDER, tag_key)
        self._proxy_credential = _token(TokenKind.PROXY_CREDENTIAL, tag_key)
        destinations = (Destination(_ENDPOINT),)
        self._caller = KnownCaller(CallerFacts(caller, 1.0), 0.0)
        self._route = Route("probe", CredentialId("probe"), destinations, (GrantScope(),), (BEARER,))
        self._policy = Policy(caller, (self._route,), ())
        binding = Binding(
            placeholder_id=PlaceholderId("probe"),
            caller=caller,
            credential_id=CredentialId("probe"),
            credential_name="probe",
            version=1,
            grant_ids=(),
            destinations=destinations,
            placements=(BEARER,),
            scopes=(GrantScope(),),
            expires_at=1.0,
        )
        self._resolved = Resolved(binding, self.secret, 0.0)

    def request(self) -> bytes:
        return (
            f"GET /probe/ HTTP/1.1\r\nHost: proxy\r\nProxy-Authorization: Bearer {self._proxy_credential}\r\n"
            f"Authorization: Bearer {self.placeholder_text}\r\n\r\n"
        ).encode()

    def caller(self, key: str) -> KnownCaller | Refused | None:
        return self._caller if key == fingerprint(self._proxy_credential) else None

    def workload(self, _key: str) -> KnownWorkload | Refused | None:
        return None  # its caller brings a proxy credential

    def policy(self, caller: Caller) -> Policy | Refused | None:
        return self._policy if caller == self._policy.caller else None

    def quota(self, _limit: BoundLimit) -> Standing:
        return Standing.USED_UP  # its credential has no limits

    def quota_resets_in_seconds(self, _limit: BoundLimit) -> float:
        return 0.0

    def placeholder(self, key: str, _caller: Caller, _endpoint: Endpoint) -> Resolved | Refused | None:
        return self._resolved if key == fingerprint(self.placeholder_text) else None


class _OneUpstream:
    """A pool of the one connection that is there."""

    def __init__(self, connection: UpstreamConnection) -> None:
        self._connection = connection

    def lane(self, _tenant: str, _endpoint: Endpoint, _ca_pem: str | None) -> Lane:
        return self._connection.lane

    def take(self, _lane: Lane, *, allow_private: bool) -> UpstreamConnection | None:
        return self._connection

    async def connect(self, _lane: Lane, *, allow_private: bool, unopened: bool = False) -> UpstreamConnection:
        return self._connection

    def give_back(self, connection: UpstreamConnection) -> None:
        connection.close()


def _token(kind: TokenKind, tag_key: bytes) -> str:
    return mint(Shape(), kind, tag_key=tag_key, entropy=secrets.token_bytes(ENTROPY_BYTES))


async def _never_asked(_: Ask | AskQuota) -> None:
    raise AssertionError("the probe's view knows everything")


async def _nowhere(_: Sequence[bytes], _dropped: int) -> None:
    pass
