"""The wiring, by hand: one worker in this process (`running`), or a production process until told to stop (`serve`).

`serve` with several workers starts each in a process of its own (`workers`); this one then only supervises.
"""

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import structlog

from egress_proxy.addresses import AddressBook, OwnListeners
from egress_proxy.admin import Page, Pages, serve_pages
from egress_proxy.audit import AuditSpool
from egress_proxy.ca import CertificateAuthority, LeafContexts, utc_now
from egress_proxy.cache import Cache
from egress_proxy.certificates import Certificates, Source
from egress_proxy.client_proof import ByCertificate, BySecret, ByToken, ClientProof
from egress_proxy.config import Settings
from egress_proxy.core.decision import Mode
from egress_proxy.core.proofs import Accepted
from egress_proxy.core.view import AskQuota
from egress_proxy.hardening import forbid_core_dumps, keep_files_private
from egress_proxy.leaks import LeakWatch
from egress_proxy.load import Loads, client_limit, tenant_connection_limit
from egress_proxy.logs import log_loop_errors, log_to_stderr
from egress_proxy.metrics import Counters, Gauges, render_metrics
from egress_proxy.names import SystemNames
from egress_proxy.outlet import Turn
from egress_proxy.probe import SwapProbe
from egress_proxy.quotas import QuotaLink
from egress_proxy.replies import ReplyTally
from egress_proxy.resolver import ControlPlaneClient, Resolver, stay_registered
from egress_proxy.server import Contexts, Server, listener_contexts, open_socket
from egress_proxy.services import Services, Timeouts
from egress_proxy.upstream import Upstreams, upstream_tls_context

FLUSH_SECONDS = 5.0
"""How long a stopping worker goes on delivering its audit events."""
GARBAGE_OBJECTS = 50_000
"""How many more objects there are before cycles are looked for."""

log = structlog.get_logger("egress_proxy")


@dataclass(frozen=True, slots=True)
class Sockets:
    """Bound, not yet listening."""

    forward: socket.socket
    reverse: socket.socket


@dataclass(frozen=True, slots=True)
class RunningProxy:
    """One worker that accepts connections."""

    forward_port: int
    reverse_port: int
    admin_port: int
    drain: Callable[[], Awaitable[None]]
    """Not ready at once, no new connections, requests under way finish up to the grace."""


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[RunningProxy]:
    """One worker with its admin listener, in this event loop, until the block ends."""
    sockets = open_sockets(settings, is_shared=False)
    async with worker(settings, sockets) as (server, pages):
        admin = await listen_admin(open_socket(settings.admin_listen, is_shared=False), pages, server.own)
        try:
            yield RunningProxy(
                forward_port=sockets.forward.getsockname()[1],
                reverse_port=sockets.reverse.getsockname()[1],
                admin_port=admin.sockets[0].getsockname()[1],
                drain=lambda: server.drain(settings.drain_grace_seconds),
            )
        finally:
            admin.close()


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT, then drain. A second signal cuts the drain short."""
    log_to_stderr(settings.log_level)
    log_loop_errors(asyncio.get_running_loop())
    forbid_core_dumps()
    keep_files_private()
    if settings.workers > 1:
        from egress_proxy.workers import supervise

        await supervise(settings)
        return
    async with running(settings) as proxy:
        collect_garbage_seldom()
        log_listening(proxy.forward_port, proxy.reverse_port, proxy.admin_port)
        await until_told_to_stop(proxy.drain)


def collect_garbage_seldom() -> None:
    """What a request leaves behind is freed by reference counts. Looking for cycles among everything that is alive
    (modules, caches, a spool of thousands of events) each time some hundreds of objects were made takes a twentieth of
    the processor (`make bench`); what connections that broke leave behind in cycles can wait a little."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 20, 20)


def log_listening(forward_port: int, reverse_port: int, admin_port: int) -> None:
    """The line by which whoever started us learns the ports."""
    log.info("listening", forward_port=forward_port, reverse_port=reverse_port, admin_port=admin_port)
    sys.stderr.flush()


async def until_told_to_stop(drain: Callable[[], Awaitable[None]]) -> None:
    """Wait for a signal, then drain; a second signal ends the drain."""
    loop = asyncio.get_running_loop()
    asked, urgent = asyncio.Event(), asyncio.Event()

    def ask() -> None:
        if asked.is_set():
            urgent.set()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    await asked.wait()
    log.info("draining")
    draining = asyncio.ensure_future(drain())
    waiting = asyncio.ensure_future(urgent.wait())
    await asyncio.wait({draining, waiting}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, waiting):
        task.cancel()
    await asyncio.gather(draining, waiting, return_exceptions=True)


def open_sockets(settings: Settings, *, is_shared: bool) -> Sockets:
    return Sockets(
        forward=open_socket(settings.forward_listen, is_shared=is_shared),
        reverse=open_socket(settings.reverse_listen, is_shared=is_shared),
    )


@contextlib.asynccontextmanager
async def worker(settings: Settings, sockets: Sockets) -> AsyncIterator[tuple[Server, Pages]]:
    """Everything of one worker but its admin listener."""
    loop = asyncio.get_running_loop()
    counters = Counters()
    accepts = {Mode.FORWARD: settings.forward_identity, Mode.REVERSE: settings.reverse_identity}
    certificates = Certificates(
        _certificate_sources(
            settings,
            accepts,
            use_contexts=lambda contexts: server.use(contexts),
            use_ca=lambda ca: leaf_contexts.use(ca),
            trust=lambda context: upstreams.trust(context),
            show=lambda: _show_anew(settings, control_plane_context),
        ),
        counters,
        loop=loop,
        clock=time.time,
    )
    ca = _interception_ca(settings)
    leaf_contexts = LeafContexts(ca, limit=settings.leaf_contexts, clock=utc_now)
    cache = Cache(limit=settings.cache_entries, monotonic=loop.time, clock=time.time)
    own, turn = OwnListeners(), Turn(loop)
    control_plane_context = _control_plane_trust(settings.control_plane_ca_file)
    proof = _client_proof(settings)
    if isinstance(proof, ByCertificate):
        proof.shown_by(control_plane_context)
    names = SystemNames(loop, servers=settings.dns_servers)
    upstreams = Upstreams(
        loop=loop,
        turn=turn,
        book=AddressBook(names, monotonic=loop.time),
        own=own,
        context=upstream_tls_context(settings.upstream_ca_files),
        connect_timeout_seconds=settings.connect_timeout_seconds,
        idle_seconds=settings.upstream_idle_seconds,
        per_key=settings.pool_connections_per_key,
        counters=counters,
    )
    client = ControlPlaneClient(
        url=settings.control_plane_url,
        proof=proof,
        verify=control_plane_context,
    )
    audit = AuditSpool(client.deliver, capacity=settings.audit_spool_events, mode=settings.audit_mode)
    resolver = Resolver(
        client, cache, counters, on_revoked=lambda event: server.cut_revoked(event), on_missed=lambda: server.recheck()
    )
    quota_link = QuotaLink(cache.quotas, client.quota, monotonic=loop.time)
    clients = client_limit(settings.client_connections)
    services = Services(
        loop=loop,
        turn=turn,
        view=cache,
        ask=lambda question: (
            quota_link.ask(question.limit) if isinstance(question, AskQuota) else resolver.ask(question)
        ),
        upstreams=upstreams,
        audit=audit,
        leaf_contexts=leaf_contexts,
        counters=counters,
        clock=time.time,
        proxy_id=settings.client_id,
        leaks=LeakWatch(suspend=cache.suspend),
        loads=Loads(
            requests_per_tenant=settings.tenant_requests,
            connections_per_tenant=tenant_connection_limit(settings.tenant_connections, clients=clients),
        ),
        client_limit=clients,
        quotas=cache.quotas,
        timeouts=Timeouts(
            header=settings.header_timeout_seconds,
            idle=settings.idle_timeout_seconds,
            silence=settings.silence_timeout_seconds,
            total=settings.total_timeout_seconds,
        ),
        path_credential_allowed=settings.reverse_path_credential,
        accepts=accepts,
    )
    services.tally = tally = ReplyTally(
        loop=loop,
        record=audit.record,
        clock=time.time,
        new_id=services.request_ids.next,
        proxy_id=settings.client_id,
    )
    server = Server(services, upstreams, own, contexts=_contexts(settings, accepts), on_tick=certificates.tick)
    probe = SwapProbe(leaf_contexts, counters, loop)

    def is_warm() -> bool:
        return bool(cache.tag_keys) and client.is_known and not services.is_draining

    gauges = Gauges(
        open_clients=lambda: len(services.clients),
        open_exchanges=lambda: len(services.exchanges),
        open_upstreams=lambda: upstreams.open_count,
        spooled_events=lambda: len(audit),
        dropped_events=lambda: audit.dropped,
        cache_entries=lambda: cache.entry_count,
        control_plane_silence_seconds=lambda: cache.silence_seconds,
        tasks=lambda: len(asyncio.all_tasks(loop)),
        is_ready=is_warm,
        certificates=lambda: certificates.seconds_left,
    )
    following = asyncio.create_task(resolver.run())
    reporting = asyncio.create_task(quota_link.run())
    delivering = asyncio.create_task(audit.run())
    registering = asyncio.create_task(stay_registered(client))
    try:
        await server.listen(Mode.FORWARD, sockets.forward)
        await server.listen(Mode.REVERSE, sockets.reverse)
        yield server, _pages(counters, gauges, probe, is_warm)
    finally:
        server.close()
        certificates.stop()
        tally.tell()
        audit.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(delivering, FLUSH_SECONDS)
        if len(audit):
            log.error("audit_events_lost", events=len(audit))
        following.cancel()
        registering.cancel()
        reporting.cancel()
        await asyncio.gather(following, registering, reporting, delivering, return_exceptions=True)
        await quota_link.give_everything_back()
        await client.close()
        names.close()


def _certificate_sources(
    settings: Settings,
    accepts: Mapping[Mode, Accepted],
    *,
    use_contexts: Callable[[Contexts], None],
    use_ca: Callable[[CertificateAuthority], None],
    trust: Callable[[ssl.SSLContext], None],
    show: Callable[[], None],
) -> list[Source]:
    """Every certificate that is used, and what becomes of it when its files change."""

    def source(name: str, files: Sequence[Path | None], **what: Any) -> Source:
        there = tuple(file for file in files if file is not None)
        keys = (settings.listener_tls_key_file, settings.ca_key_file, settings.client_key_file)
        return Source(name, there, tuple(file for file in there if file not in keys), **what)

    def contexts() -> Contexts:
        return _contexts(settings, accepts)

    listener = (settings.listener_tls_cert_file, settings.listener_tls_key_file)
    found = [
        source("listener", listener, load=contexts, adopt=use_contexts, is_shown=True),
        source("client_ca", settings.client_ca_files, load=contexts, adopt=use_contexts),
        source(
            "interception_ca",
            (settings.ca_cert_file, settings.ca_key_file),
            load=lambda: _interception_ca(settings),
            adopt=use_ca,
            is_shown=True,
        ),
        source(
            "upstream_ca",
            settings.upstream_ca_files,
            load=lambda: upstream_tls_context(settings.upstream_ca_files),
            adopt=trust,
        ),
        source(
            "client",
            (settings.client_cert_file, settings.client_key_file),
            load=lambda: _show_anew(settings, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)),
            adopt=lambda _: show(),
            is_shown=True,
        ),
        # Its connections are made anew all the time, and none outlives a restart: it is looked at alone.
        source("control_plane_ca", (settings.control_plane_ca_file,), load=None, adopt=lambda _: None),
    ]
    return [each for each in found if each.files]


def _contexts(settings: Settings, accepts: Mapping[Mode, Accepted]) -> Contexts:
    return listener_contexts(
        settings.listener_tls_cert_file,
        settings.listener_tls_key_file,
        client_ca_files=settings.client_ca_files,
        accepts=accepts,
    )


def _interception_ca(settings: Settings) -> CertificateAuthority:
    return CertificateAuthority.load(cert_file=settings.ca_cert_file, key_file=settings.ca_key_file)


async def listen_admin(sock: socket.socket, pages: Pages, own: OwnListeners) -> asyncio.Server:
    host, port = sock.getsockname()[:2]
    own.add(host, port)
    return await asyncio.start_server(lambda reader, writer: serve_pages(reader, writer, pages), sock=sock)


def _pages(counters: Counters, gauges: Gauges, probe: SwapProbe, is_warm: Callable[[], bool]) -> Pages:
    async def healthz() -> Page:
        return Page(HTTPStatus.OK, b"alive\n")

    async def readyz() -> Page:
        if not is_warm():
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready\n")
        if not await probe.works():
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"the swap does not work\n")
        return Page(HTTPStatus.OK, b"ready\n")

    async def metrics() -> Page:
        return Page(HTTPStatus.OK, render_metrics(counters, gauges), "text/plain; version=0.0.4; charset=utf-8")

    return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}


def _client_proof(settings: Settings) -> ClientProof:
    """Raises `OSError` and `UnusableSecretError`."""
    if settings.client_secret_file is not None:
        return BySecret(settings.client_id, settings.client_secret_file)
    if settings.client_token_file is not None:
        return ByToken(settings.client_token_file)
    assert settings.client_cert_file is not None, "the settings were checked"
    assert settings.client_key_file is not None, "it goes with the certificate"
    return ByCertificate(settings.client_cert_file, settings.client_key_file)


def _show_anew(settings: Settings, context: ssl.SSLContext) -> None:
    """The certificate of the files, to whoever is connected to from now on. Raises `OSError`."""
    proof = _client_proof(settings)
    assert isinstance(proof, ByCertificate)
    proof.shown_by(context)


def _control_plane_trust(ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca_file) if ca_file is not None else None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
