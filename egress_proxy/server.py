"""Listeners, the tick, the drain: one worker's connections from outside.

Rule: time is watched by one tick for all connections, twice a second, never by a timer for each. A client that is not
being read (its upstream is slower) is asked by `poll` whether it hung up, because no read would tell.
"""

import asyncio
import select
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from control_plane.contract.refusal import Refusal, RefusalCode
from control_plane.contract.wire import Event
from egress_proxy import memory
from egress_proxy.addresses import OwnListeners
from egress_proxy.ca import harden_server_context
from egress_proxy.client import ClientConnection
from egress_proxy.core.decision import Mode
from egress_proxy.core.proofs import Accepted, asks_for_certificates, demands_certificates
from egress_proxy.exchange import Exchange
from egress_proxy.listen import ListenAddress
from egress_proxy.services import Services
from egress_proxy.upstream import Upstreams

TICK_SECONDS: Final = 0.5
GIVES_BACK_SECONDS: Final = 30.0
BACKLOG: Final = 1024
_GONE: Final = select.POLLERR | select.POLLHUP
_HUNG_UP: Final = _GONE | getattr(select, "POLLRDHUP", 0)

log = structlog.get_logger("egress_proxy")


def open_socket(address: ListenAddress, *, is_shared: bool) -> socket.socket:
    """A bound socket. Shared: other processes bind the same port, and the kernel spreads connections over them."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.setblocking(False)
    sock.bind((address.host, address.port))
    return sock


Contexts = Mapping[Mode, ssl.SSLContext]
"""A listener without one speaks no TLS."""


def listener_contexts(
    cert_file: Path | None, key_file: Path | None, *, client_ca_files: Sequence[Path], accepts: Mapping[Mode, Accepted]
) -> Contexts:
    """For listeners that other machines reach. Raises `OSError` (`ssl.SSLError` is one) for files that are no good."""
    if cert_file is None:
        return {}
    contexts = {}
    for mode, accepted in accepts.items():
        contexts[mode] = context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        harden_server_context(context)
        context.load_cert_chain(cert_file, key_file)
        if asks_for_certificates(accepted):
            # RFC 8446 §4.3.2. OpenSSL verifies the chain, and that the certificate is one for clients.
            context.verify_mode = ssl.CERT_REQUIRED if demands_certificates(accepted) else ssl.CERT_OPTIONAL
            for file in client_ca_files:
                context.load_verify_locations(cafile=file)
    return contexts


class Server:
    """Accepts clients of both modes, and sees to it that each of them ends."""

    def __init__(
        self,
        services: Services,
        upstreams: Upstreams,
        own: OwnListeners,
        *,
        contexts: Contexts,
        on_tick: Callable[[float], None] = lambda _now: None,
    ) -> None:
        self._services = services
        self._upstreams = upstreams
        self.own = own
        self._contexts = contexts
        self._on_tick = on_tick
        self._listeners: list[asyncio.Server] = []
        self._tick_timer: asyncio.TimerHandle | None = None
        self._gives_back_at = services.loop.time() + GIVES_BACK_SECONDS
        self._rechecks: set[asyncio.Task[None]] = set()

    async def listen(self, mode: Mode, sock: socket.socket) -> int:
        """Start accepting; gives the port."""
        host, port = sock.getsockname()[:2]
        self.own.add(host, port)
        listener = await self._services.loop.create_server(
            lambda: ClientConnection(self._services, mode, listener_context=self._contexts.get(mode)),
            sock=sock,
            backlog=BACKLOG,
        )
        self._listeners.append(listener)
        if self._tick_timer is None:
            self._tick()
        return int(port)

    def use(self, contexts: Contexts) -> None:
        """For connections from now on. Whom a client certificate proves comes again, to be verified by these CAs."""
        self._contexts = contexts
        for client in list(self._services.clients):
            if client.is_certified:
                client.retire()

    async def drain(self, grace_seconds: float) -> None:
        """No new connections, idle ones closed, the rest let finish up to the grace, then cut."""
        services = self._services
        services.is_draining = True
        for listener in self._listeners:
            listener.close()
        for client in list(services.clients):
            client.drain()
        if services.clients:
            try:
                async with asyncio.timeout(grace_seconds):
                    await services.all_gone.wait()
            except TimeoutError:
                log.warning("drain_cut", connections=len(services.clients))
        self.close()

    def close(self) -> None:
        """Everything, at once."""
        self._services.is_draining = True
        for listener in self._listeners:
            listener.close()
        for client in list(self._services.clients):
            client.abort()
        self._upstreams.close()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_timer = None

    def cut_revoked(self, event: Event) -> None:
        """End every exchange whose authority this event takes away."""
        if event.kind == "policy":  # a rule was taken back: which exchanges went by it, deciding again shows
            self._recheck([each for each in self._services.exchanges if each.forward.caller.tenant == event.tenant])
            return
        if event.kind == "proxy_credential":  # a client or an issuer changed: whether it still proves the caller
            self._recheck([each for each in self._services.exchanges if event.id in each.forward.proof.vouchers])
        refusal = Refusal(RefusalCode.REVOKED_PLACEHOLDER, "What this request was allowed by has been revoked.")
        for exchange in [each for each in self._services.exchanges if is_touched(each, event)]:
            self._services.counters.streams_cut += 1
            exchange.cut(refusal)

    def recheck(self) -> None:
        """Decide again on whatever is under way: what allowed it may have been taken back."""
        self._recheck(self._services.exchanges)

    def _recheck(self, exchanges: list[Exchange]) -> None:
        for exchange in exchanges:
            task = asyncio.ensure_future(exchange.recheck())
            self._rechecks.add(task)
            task.add_done_callback(self._rechecks.discard)

    def _tick(self) -> None:
        loop = self._services.loop
        self._tick_timer = loop.call_later(TICK_SECONDS, self._tick)
        now = loop.time()
        for client in list(self._services.clients):
            try:
                client.tick(now)
            except Exception as error:  # border: one connection's trouble is not the others'
                client.internal_error(error)
        self._upstreams.tick(now)
        self._on_tick(now)
        self._notice_hang_ups()
        if now >= self._gives_back_at:
            self._gives_back_at = now + GIVES_BACK_SECONDS
            memory.give_back()

    def _notice_hang_ups(self) -> None:
        paused = {
            descriptor: client
            for client in self._services.clients
            if (descriptor := client.paused_descriptor) is not None
        }
        if not paused:
            return
        poll = select.poll()
        for descriptor, client in paused.items():
            poll.register(descriptor, _GONE if client.may_send_no_more else _HUNG_UP)
        for descriptor, _ in poll.poll(0):
            paused[descriptor].hung_up()


def is_touched(exchange: Exchange, event: Event) -> bool:
    """Whether the authority of a request under way is what this event is about."""
    forward = exchange.forward
    caller = forward.caller
    match event.kind:
        case "placeholder":
            return any(binding.placeholder_id == event.id for binding in forward.bindings)
        case "grant":
            return any(event.id in binding.grant_ids for binding in forward.bindings)
        case "credential":
            return any(binding.credential_id == event.id for binding in forward.bindings)
        case "session":
            return caller.session == event.id
        case "tenant":
            return caller.tenant == (event.tenant or event.id)
        case "proxy_credential":
            credential = forward.proof.credential
            return credential is not None and event.id == credential.fingerprint
        case "policy" | "tag_keys" | "heartbeat":
            return False
