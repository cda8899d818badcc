"""The wiring, by hand: settings in, a serving runtime out."""

import asyncio
import secrets
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog
import uvicorn

from control_plane.contract.caller import ClientId
from control_plane.contract.secret import Secret
from runtime import logs
from runtime.adapters.client_proof import ByCertificate, BySecret, ByToken, ClientProof, certificate_end
from runtime.adapters.control_plane import Exchange, SessionTokens
from runtime.adapters.memory import SessionsInMemory
from runtime.adapters.models import MessagesModel
from runtime.adapters.session_ends import SessionEndsOverHttp
from runtime.ambient import scrub_ambient_credentials
from runtime.api import Parts, make_app
from runtime.config import Settings
from runtime.endings import Endings
from runtime.hardening import forbid_core_dumps
from runtime.http import BoundedHttp
from runtime.metrics import render_metrics
from runtime.placeholders import PlaceholderStore
from runtime.runner import Runner

CONTROL_PLANE_TIMEOUT = httpx.Timeout(10.0, connect=5.0)

log = structlog.get_logger("runtime")


@dataclass(slots=True)
class RunningRuntime:
    """A runtime that accepts turns."""

    url: str
    port: int
    is_draining: bool = False


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[RunningRuntime]:
    """A runtime on this event loop, until the block ends; then turns under way finish, up to the grace."""
    scrub_ambient_credentials()
    listener = _listen(*settings.listen)
    scheme = "https" if settings.tls_cert_file else "http"
    host, port = listener.getsockname()[:2]
    runtime = RunningRuntime(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", port)
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        control_plane_context = _trust(settings.control_plane_ca_file)
        control_plane = await stack.enter_async_context(_http(CONTROL_PLANE_TIMEOUT, control_plane_context))
        proxy = await stack.enter_async_context(
            _http(httpx.Timeout(settings.model_timeout_seconds, connect=10.0), _trust(settings.proxy_ca_file))
        )
        proof = _client_proof(settings, control_plane_context)
        parts = _parts(settings, control_plane, proof, proxy, runtime)
        server = _Server(
            uvicorn.Config(
                make_app(parts),
                http=BoundedHttp,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ssl_certfile=settings.tls_cert_file,
                ssl_keyfile=settings.tls_key_file,
                timeout_graceful_shutdown=int(settings.drain_grace_seconds),
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        ending = asyncio.create_task(parts.endings.run())
        try:
            await _listening(server, serving)
            yield runtime
        finally:
            runtime.is_draining = True
            server.should_exit = True
            await serving
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    forbid_core_dumps()
    logs.configure(settings.log_level)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as runtime:
        log.info("listening", port=runtime.port, url=runtime.url)
        await stop.wait()
        log.info("draining", seconds=settings.drain_grace_seconds)


def _parts(
    settings: Settings,
    control_plane: httpx.AsyncClient,
    proof: ClientProof,
    proxy: httpx.AsyncClient,
    runtime: RunningRuntime,
) -> Parts:
    client_id = ClientId(settings.client_id)
    tokens = SessionTokens(
        control_plane,
        control_plane_url=settings.control_plane_url,
        issuer=settings.issuer,
        client_id=client_id,
        clock=time.time,
    )
    exchange = Exchange(
        control_plane,
        control_plane_url=settings.control_plane_url,
        proof=proof,
        clock=time.time,
    )
    sessions = SessionsInMemory(clock=time.time)
    placeholders = PlaceholderStore(exchange, clock=time.time)
    runner = Runner(
        sessions=sessions,
        placeholders=placeholders,
        model=MessagesModel(proxy, model=settings.model, max_tokens=settings.model_max_tokens),
        audience=settings.model_audience,
    )

    endings = Endings(
        SessionEndsOverHttp(control_plane, control_plane_url=settings.control_plane_url, proof=proof),
        sessions,
        placeholders,
        grace_seconds=settings.erase_grace_seconds,
        monotonic=time.monotonic,
    )

    async def ready() -> bool:
        await tokens.refresh()
        return tokens.knows_keys and endings.is_known and not runtime.is_draining

    listener_ends_at = certificate_end(settings.tls_cert_file) if settings.tls_cert_file is not None else None

    def metrics() -> bytes:
        ends = {"client": proof.certificate_ends_at(), "listener": listener_ends_at}
        return render_metrics({name: at for name, at in ends.items() if at is not None}, now=time.time())

    return Parts(tokens, sessions, runner, endings, ready, metrics, new_request_id=lambda: secrets.token_hex(12))


async def _listening(server: "_Server", serving: asyncio.Task[None]) -> None:
    """Until the server listens, or has failed to."""
    waiting = asyncio.create_task(server.listening.wait())
    await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _client_proof(settings: Settings, context: ssl.SSLContext) -> ClientProof:
    """`context`: of the connections to the control plane. Raises `OSError` and `UnusableSecretError`."""
    client_id = ClientId(settings.client_id)
    if settings.client_secret_file is not None:
        return BySecret(client_id, _secret(settings.client_secret_file))
    if settings.client_token_file is not None:
        return ByToken(client_id, settings.client_token_file, clock=time.time)
    assert settings.client_cert_file is not None, "the settings were checked"
    assert settings.client_key_file is not None, "it goes with the certificate"
    return ByCertificate(
        client_id, settings.client_cert_file, settings.client_key_file, context=context, clock=time.time
    )


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    """The system's roots, or these alone; nothing of the environment."""
    return ssl.create_default_context(cafile=ca_file) if ca_file else httpx.create_ssl_context(trust_env=False)


def _http(timeout: httpx.Timeout, trust: ssl.SSLContext) -> httpx.AsyncClient:
    """For our own peers alone: nothing of the environment's proxies and certificates, and no redirect is followed."""
    return httpx.AsyncClient(timeout=timeout, verify=trust, trust_env=False, follow_redirects=False)


def _secret(file: Path) -> Secret:
    return Secret.submitted(file.read_text("utf-8"))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to `serve`, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()
