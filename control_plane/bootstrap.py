"""Puts the control plane together by hand, and runs it.

    async with running(settings) as control_plane: …     inside another program: tests, the local stack
    await serve(settings)                                 as a process: until SIGTERM or SIGINT
    await migrate(settings)                               as a process: until the database's tables are this release's

Rule: what is wrong with the settings shows here, before anything listens.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import structlog
import uvicorn
from starlette.types import ASGIApp

from control_plane import logs
from control_plane.access import Access
from control_plane.access_review import AccessReview
from control_plane.adapters.hooks.aws_iam import IamAccessKeyHook
from control_plane.adapters.hooks.http import TYP as HOOK_TYP
from control_plane.adapters.hooks.http import HttpHook
from control_plane.adapters.jwks import FetchedKeys
from control_plane.adapters.outbound import Exceptions, HttpOutbound
from control_plane.adapters.outbound_proxy import HttpProbeCaller
from control_plane.adapters.providers.table import providers
from control_plane.adapters.sql.engine import Database
from control_plane.adapters.sql.store import SqlStore
from control_plane.adapters.tls import ClientTrust
from control_plane.alarms import ROUND_SECONDS as ALARM_SECONDS
from control_plane.alarms import Alarms, HookDelivery, HookKeeper
from control_plane.api.access import AccessApi
from control_plane.api.admin import AdminApi
from control_plane.api.alarms import AlarmsApi
from control_plane.api.app import build_app
from control_plane.api.audit import AuditApi
from control_plane.api.custody import CustodyApi
from control_plane.api.http import BoundedHttp
from control_plane.api.internal import InternalApi
from control_plane.api.issuers import IssuersApi
from control_plane.api.limits import LimitsApi
from control_plane.api.metrics import MetricsApi, metrics_alone
from control_plane.api.oauth import OAuthApi
from control_plane.api.platform import PlatformApi
from control_plane.api.sessions import SessionsApi
from control_plane.api.wellknown import WellKnownApi
from control_plane.audit_keys import AuditKeys
from control_plane.chaining import RETENTION_SECONDS, Chaining
from control_plane.chaining import ROUND_SECONDS as CHAINING_SECONDS
from control_plane.client_assertions import ClientAssertions
from control_plane.client_tokens import ClientTokens
from control_plane.clients_file import read_clients_file, read_secret_file
from control_plane.config import DatabaseSettings, Settings
from control_plane.contract.destination import split_authority
from control_plane.contract.refusal import RefusedError
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.credentials import CredentialKeeper
from control_plane.custody import Custody
from control_plane.custody_wiring import ring_reader, source_readers
from control_plane.database import migrate_once, opened
from control_plane.decoys import DecoyKeeper
from control_plane.direct import DirectMode
from control_plane.exchange import Exchange
from control_plane.faults import AtPoint, armed, nothing_happens
from control_plane.grants import AllowRuleKeeper, GrantKeeper
from control_plane.hardening import forbid_core_dumps
from control_plane.hook_keys import HookKeys
from control_plane.identification import Identification
from control_plane.injectors import Injectors
from control_plane.introspection import Introspection
from control_plane.issuance import Issuance
from control_plane.issuers import IssuerKeeper
from control_plane.kek_ring import SETTLE_SECONDS, KekRing
from control_plane.keys import KeyKeeper
from control_plane.limits import LimitKeeper, Quotas
from control_plane.material import Material
from control_plane.metrics import Counters, Gauges, Metrics
from control_plane.own_keys import OwnKeyring
from control_plane.pacing import Pacing
from control_plane.placeholders import PlaceholderKeeper
from control_plane.ports import Clock, CrossTenantReason, Entropy, Outbound, PlatformScope, RotationHook, Store, Wake
from control_plane.probing import Prober
from control_plane.proof import Proofs
from control_plane.registry import Registry
from control_plane.resolution import Resolution
from control_plane.rotation import ROUND_SECONDS as ROTATION_SECONDS
from control_plane.rotation import RotationKeeper
from control_plane.scheduling import ROUND_SECONDS as SCHEDULE_SECONDS
from control_plane.scheduling import ScheduleKeeper
from control_plane.sessions import Sessions
from control_plane.sharing import Hints, shared
from control_plane.source_registry import SourceRegistry
from control_plane.sources import REFRESH_SECONDS, SecretSources
from control_plane.suspension import Suspensions
from control_plane.trail import Actor, Trail
from control_plane.trail_export import TrailExport
from control_plane.upkeep import ROUND_SECONDS, Chore, Upkeep, keep_up
from control_plane.versions import Versions
from control_plane.workloads import Workloads

ADMISSION_SECONDS: Final = 2.0
_DEFAULT_PORT: Final = 8470
_SHUTDOWN_SECONDS: Final = 5
_KEEP_ALIVE_SECONDS: Final = 60

_log = structlog.get_logger("control_plane")

GARBAGE_OBJECTS: Final = 20_000
"""So many are made before anybody looks for cycles among them."""


@dataclass(frozen=True, slots=True)
class RunningControlPlane:
    url: str
    """Where it listens, without a final slash."""
    reload: Callable[[], None]
    """Look again at files that may have changed: key-encryption keys."""
    metrics_port: int | None = None
    """Of the listener that shows metrics alone, where there is one."""


@asynccontextmanager
async def running(
    settings: Settings,
    *,
    clock: Clock = time.time,
    database_time: Clock | None = None,
    entropy: Entropy = os.urandom,
    at_fault_point: AtPoint = nothing_happens,
) -> AsyncIterator[RunningControlPlane]:
    """The control plane, listening for as long as the block runs. Raises what is wrong with the settings.

    `database_time` stands in for the database's own clock, where a test moves time for all replicas.
    """
    if not structlog.is_configured():
        logs.configure_own(settings.log_level)
    with armed(at_fault_point), _listening_socket(settings.listen) as listener:
        url, outbound = _own_url(settings, listener), _outbound(settings, listener)
        trust = ClientTrust(settings.client_ca_files)
        async with (
            opened(settings) as database,
            shared(settings, database) as hints,
            contextlib.AsyncExitStack() as at_the_end,
        ):
            store = SqlStore(database, hints.wake, time=database_time)
            assembled = await _assembled(
                settings, database, store, hints, outbound, trust, url, at_the_end, clock=clock, entropy=entropy
            )
            async with (
                _upkept(assembled.chores),
                _serving(_uvicorn_config(assembled.app, settings, trust), listener, hints.wake),
                _showing_metrics(settings.metrics_listen, assembled.metrics) as metrics_port,
            ):
                yield RunningControlPlane(url, metrics_port=metrics_port, reload=assembled.keks.wake)


async def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT."""
    forbid_core_dumps()
    logs.configure(settings.log_level)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running(settings) as control_plane:
        collect_garbage_seldom()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, control_plane.reload)
        port = int(control_plane.url.rpartition(":")[2])
        _log.info("listening", part="control_plane", url=control_plane.url, port=port)
        await stop.wait()
        _log.info("stopping", part="control_plane")


def collect_garbage_seldom() -> None:
    """What a request leaves behind is freed by reference counts. To look for cycles among all that is alive each time
    some hundreds of objects were made is a part of every exchange that nobody sees (`bench/control_plane.py`)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 20, 20)


async def migrate(settings: DatabaseSettings) -> None:
    """Brings the database to the tables of this release, and ends."""
    logs.configure(settings.log_level)
    await migrate_once(settings)
    _log.info("migrated", part="control_plane")


async def _assembled(
    settings: Settings,
    database: Database,
    store: SqlStore,
    hints: Hints,
    outbound: Outbound,
    trust: ClientTrust,
    url: str,
    at_the_end: contextlib.AsyncExitStack,
    *,
    clock: Clock,
    entropy: Entropy,
) -> "_Assembled":
    # (1) What the settings name: the key ring, the administrator, the clients. Files are read once, here; the ring's
    # again and again.
    read_ring = ring_reader(settings, outbound)
    custody = Custody(
        read_ring(),
        entropy=entropy,
        clock=clock,
        cache_seconds=settings.kek_cache_seconds,
        max_stale_seconds=settings.kek_max_stale_seconds,
    )
    admin_token = read_secret_file(settings.admin_token_file) if settings.admin_token_file else None
    clients = read_clients_file(settings.clients_file) if settings.clients_file else None
    issuer = settings.issuer_url or url
    # (2) The store.
    trail = Trail(clock, entropy)
    registry = Registry(store, trail, clock=clock, entropy=entropy, admit=trust.admit)
    if clients is not None:
        await registry.reconcile(clients, by=Actor("settings", "start"))
    # (3) The ring as every replica has seen it, and our own keys under it. Where they do not open we still start, not
    # ready, so that it can be seen why.
    keks = KekRing(
        store,
        custody,
        trail,
        read_ring=read_ring,
        clock=clock,
        entropy=entropy,
        settle_seconds=0 if database.reader is not None else SETTLE_SECONDS,  # SQLite has one replica
    )
    await keks.reload()
    own_keys = OwnKeyring(store, custody, clock=clock, entropy=entropy)
    with contextlib.suppress(RefusedError):
        await own_keys.rings()
    audit_keys = AuditKeys(store, custody, clock=clock, entropy=entropy)
    # (4) The use cases. Answers of providers that are on their way at the end are waited for.
    sources = SecretSources(store, custody, source_readers(settings, outbound), trail, clock=clock)
    material = Material(store, custody, sources, trail, providers(outbound, entropy=entropy), hints.turns, clock=clock)
    at_the_end.push_async_callback(material.close)
    keys = FetchedKeys(outbound, clock=clock)
    identification = Identification(store, keys, clock=clock, own_issuer=issuer)
    access = Access(
        store,
        identification,
        ClientAssertions(store, keys, identification, clock=clock, own_issuer=issuer),
        admin_token=admin_token,
        client_authorities=trust.authorities,
    )
    issuance = Issuance(own_keys, clock=clock, entropy=entropy, proxy_base_url=settings.proxy_base_url)
    sessions = Sessions(
        store,
        own_keys,
        trail,
        clock=clock,
        entropy=entropy,
        issuer=issuer,
        session_seconds=settings.session_seconds,
    )
    injectors = Injectors(store, trail, clock=clock)
    alarms = Alarms(store, trail, clock=clock, entropy=entropy)
    exchange = Exchange(
        store,
        own_keys,
        Proofs(store, own_keys, identification, clock=clock, issuer=issuer),
        sessions,
        issuance,
        injectors,
        DirectMode(store, material, clock=clock, is_single_tenant=settings.platform_tenancy == "single"),
        trail,
        Pacing(hints.rates, settings.exchanges_per_minute),
        clock=clock,
        placeholder_ttl_seconds=settings.placeholder_ttl_seconds,
        on_sighting=alarms.sighted,
    )
    versions = Versions(custody, clock)
    probe_caller = HttpProbeCaller(proxy_base_url=settings.proxy_base_url, ca_files=settings.outbound_ca_files)
    prober = Prober(issuance, probe_caller, entropy=entropy)
    rotations = RotationKeeper(store, versions, prober, trail, clock=clock, entropy=entropy)
    oauth = OAuthApi(
        access,
        exchange,
        ClientTokens(store, own_keys, trail, clock=clock, entropy=entropy, issuer=issuer),
        Introspection(store, own_keys, trail, clock=clock, issuer=issuer),
    )
    key_keeper = KeyKeeper(store, own_keys, trail, clock=clock)
    hooks: dict[str, RotationHook] = {
        "http": HttpHook(outbound, sign=lambda claims: own_keys.sign(claims, typ=HOOK_TYP), issuer=issuer, clock=clock),
        "aws_iam": IamAccessKeyHook(outbound),
    }
    schedules = ScheduleKeeper(store, custody, rotations, hooks, trail, entropy=entropy)
    # (5) The API, one module a kind of caller.
    admin = AdminApi(
        access=access,
        registry=registry,
        credentials=CredentialKeeper(store, versions, sources, trail, clock=clock, entropy=entropy),
        rotations=rotations,
        schedules=schedules,
        grants=GrantKeeper(store, trail, clock=clock, entropy=entropy),
        rules=AllowRuleKeeper(store, trail, clock=clock, entropy=entropy),
        placeholders=PlaceholderKeeper(store, issuance, sessions, trail, clock=clock),
        store=store,
    )
    of_custody = CustodyApi(
        access=access, sources=SourceRegistry(store, custody, sources, trail, clock=clock), keks=keks
    )
    quotas = Quotas(store, clock=clock)
    hook_keys = HookKeys(store, custody, own_keys)
    counters = Counters()
    internal = InternalApi(
        access=access,
        resolution=Resolution(
            store, material, Workloads(identification, clock=clock), clock=clock, on_sighting=alarms.sighted
        ),
        own_keys=own_keys,
        store=store,
        wake=hints.wake,
        rotations=rotations,
        injectors=injectors,
        quotas=quotas,
        alarms=alarms,
        suspensions=Suspensions(store, trail, clock=clock),
        counters=counters,
        clock=clock,
    )
    issuers = IssuerKeeper(store, identification, trail, clock=clock, own_issuer=issuer)
    audit = AuditApi(access, TrailExport(store), audit_keys, store)
    chaining = Chaining(store, audit_keys, trail, clock=clock, retention_days=settings.audit_retention_days)
    telling = HookDelivery(store, hook_keys, outbound, clock=clock)
    metrics = Metrics(
        store,
        counters,
        Gauges(
            alarms=lambda: alarms.raised,
            hooks_told=lambda: telling.delivered,
            hooks_given_up=lambda: telling.given_up,
            chains_truncated=lambda: chaining.truncations,
            trail_failures=lambda: trail.failures,
            trail_owed=lambda: trail.unrecorded,
            keks=lambda: custody.kek_ids,
        ),
        clock=clock,
        version=version("coatcheck"),
    )
    routers = [  # looked through in this order: what requests wait for first
        internal.router(),
        oauth.router(),
        SessionsApi(access, sessions).router(),
        WellKnownApi(own_keys, keks, store, issuer, settings.asks_for_certificates).router(),
        admin.router(),
        PlatformApi(access, key_keeper, injectors).router(),
        AccessApi(access, AccessReview(store, issuance, clock=clock), registry).router(),
        IssuersApi(access, issuers).router(),
        AlarmsApi(
            access,
            alarms,
            HookKeeper(store, hook_keys, trail, clock=clock, entropy=entropy),
            DecoyKeeper(store, own_keys, trail, clock=clock, entropy=entropy),
        ).router(),
        LimitsApi(access, LimitKeeper(store, trail, clock=clock, entropy=entropy)).router(),
        MetricsApi(access, metrics).router(),
        audit.router(),
        audit.public_router(),
        of_custody.router(),
    ]
    app = build_app(
        routers,
        straight={("POST", "/internal/resolve"): internal.resolve, ("POST", "/oauth/token"): oauth.token},
        version=version("coatcheck"),
        new_request_id=lambda: new_id("req", entropy(ID_ENTROPY_BYTES)),
        counters=counters,
    )
    # (6) What is done without anybody asking.
    chores = [
        Chore("audit_chain", CHAINING_SECONDS, chaining.once),
        Chore("audit_retention", RETENTION_SECONDS, chaining.forget),
        Chore("alarms", ALARM_SECONDS, alarms.once),
        Chore("alarm_hooks", ALARM_SECONDS, telling.once),
        Chore("alarm_retention", ROUND_SECONDS, alarms.forget),
        Chore("limits", ROUND_SECONDS, quotas.forget),
        Chore("forget", ROUND_SECONDS, Upkeep(store).once),
        Chore("keys", ROUND_SECONDS, key_keeper.retire),
        Chore("rotation", ROTATION_SECONDS, rotations.tick),
        Chore("rotation schedules", SCHEDULE_SECONDS, schedules.tick),
        Chore("keks", 0, keks.once),
        Chore("sources", REFRESH_SECONDS, sources.refresh),
    ]
    if settings.client_self_signed:
        admission = _admission(store, trust)
        await admission()
        chores.append(Chore("client certificates", ADMISSION_SECONDS, admission))
    return _Assembled(app, metrics, keks, chores)


@dataclass(frozen=True, slots=True)
class _Assembled:
    app: ASGIApp
    metrics: Metrics
    keks: KekRing
    chores: Sequence[Chore]


def _admission(store: Store, trust: ClientTrust) -> Callable[[], Awaitable[None]]:
    """Lets certificates of clients' own making through the handshake, also those that another replica registered."""

    async def admit() -> None:
        async with store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            clients = await records.clients.with_self_signed()
        trust.admit([client.proofs.self_signed for client in clients if client.proofs.self_signed is not None])

    return admit


@asynccontextmanager
async def _upkept(chores: Sequence[Chore]) -> AsyncIterator[None]:
    task = asyncio.create_task(keep_up(chores), name="upkeep")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@contextlib.contextmanager
def _listening_socket(listen: str) -> Iterator[socket.socket]:
    host, port = _host_and_port(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=2048) as listener:
        listener.setblocking(False)
        yield listener


def _host_and_port(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if colon and port == "0":  # any free one, which is no port that could be connected to
        return host.strip("[]"), 0
    return split_authority(listen, default_port=_DEFAULT_PORT)


def _own_url(settings: Settings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.tls_cert_file else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _outbound(settings: Settings, listener: socket.socket) -> HttpOutbound:
    allowed = frozenset(split_authority(entry, default_port=443) for entry in settings.outbound_allow)
    return HttpOutbound(
        ca_files=settings.outbound_ca_files,
        exceptions=Exceptions(allowed),
        own=[listener.getsockname()[:2]],
    )


def _uvicorn_config(app: ASGIApp, settings: Settings, trust: ClientTrust) -> uvicorn.Config:
    def with_client_certificates(_config: uvicorn.Config, usual: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        return trust.applied_to(usual())

    return uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
        ssl_context_factory=with_client_certificates if settings.asks_for_certificates else None,
    )


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs us, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@asynccontextmanager
async def _showing_metrics(listen: str, metrics: Metrics) -> AsyncIterator[int | None]:
    """On a listener of its own, where one is wanted; its port."""
    if not listen:
        yield None
        return
    config = uvicorn.Config(
        metrics_alone(metrics), ws="none", lifespan="off", log_config=None, access_log=False, server_header=False
    )
    with _listening_socket(listen) as listener:
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listener]), name="metrics")
        try:
            await server.listening.wait()
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await serving


@asynccontextmanager
async def _serving(config: uvicorn.Config, listener: socket.socket, wake: Wake) -> AsyncIterator[None]:
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]), name="control plane http")
    try:
        await server.listening.wait()
        yield
    finally:
        wake.close()  # event streams end by themselves: nobody waits for them
        server.should_exit = True
        await serving
