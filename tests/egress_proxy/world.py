"""The proxy as tests of its rim see it: real listeners in a thread, real TLS, a simulated control plane."""

import asyncio
import contextlib
import itertools
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import trustme
import uvloop

from egress_proxy.bootstrap import RunningProxy, running
from egress_proxy.ca import create_ca
from egress_proxy.config import Settings
from egress_proxy.listen import ListenAddress
from tests.support.control_plane_simulator import ControlPlaneSimulator, Ticket
from tests.support.raw_client import Line, connected, dial, proxy_authorization, tunnel

LOOPBACK = ListenAddress("127.0.0.1", 0)


class ProxyThread:
    """`bootstrap.running` in a thread, until the block ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._proxy: RunningProxy | None = None
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    @property
    def proxy(self) -> RunningProxy:
        assert self._proxy is not None
        return self._proxy

    def drain(self) -> threading.Thread:
        """Begin to drain; the thread ends when it is over."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(_awaited(self.proxy), self._loop)
        thread = threading.Thread(target=future.result, args=(60,), daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        try:
            uvloop.run(self._main())
        except BaseException as error:
            self._error = error
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with running(self.settings) as self._proxy:
            self._ready.set()
            await self._stop.wait()


async def _awaited(proxy: RunningProxy) -> None:
    await proxy.drain()


class World:
    """A proxy, its control plane and its CAs."""

    def __init__(self, folder: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA) -> None:
        self.folder = folder
        self.control_plane = control_plane
        self.upstream_ca = upstream_ca
        self._numbers = itertools.count(1)
        folder.mkdir(exist_ok=True)
        create_ca(folder, now=datetime.now(UTC))
        upstream_ca.cert_pem.write_to_path(str(folder / "upstream-ca.pem"))
        (folder / "secret").write_text(control_plane.client_secret)
        self.thread: ProxyThread | None = None

    @classmethod
    @contextlib.contextmanager
    def start(
        cls, folder: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, **settings: Any
    ) -> Iterator["World"]:
        world = cls(folder, control_plane, upstream_ca)
        with world.proxy_with(**settings) as world.thread:
            world.wait_until_ready()
            yield world

    def proxy_with(self, **settings: Any) -> ProxyThread:
        own: dict[str, Any] = {
            "control_plane_url": self.control_plane.url,
            "client_id": self.control_plane.client_id,
            "client_secret_file": self.folder / "secret",
            "forward_listen": LOOPBACK,
            "reverse_listen": LOOPBACK,
            "admin_listen": LOOPBACK,
            "ca_cert_file": self.folder / "ca.pem",
            "ca_key_file": self.folder / "ca.key",
            "upstream_ca_files": (self.folder / "upstream-ca.pem",),
            "reverse_path_credential": True,
        }
        return ProxyThread(Settings(**(own | settings)))

    @property
    def forward_port(self) -> int:
        assert self.thread is not None
        return self.thread.proxy.forward_port

    @property
    def reverse_port(self) -> int:
        assert self.thread is not None
        return self.thread.proxy.reverse_port

    @property
    def admin_port(self) -> int:
        assert self.thread is not None
        return self.thread.proxy.admin_port

    def wait_until_ready(self) -> None:
        for _ in range(500):
            if self.admin("/readyz")[0] == 200:
                return
            threading.Event().wait(0.01)
        raise TimeoutError("the proxy does not become ready")

    def admin(self, path: str) -> tuple[int, str]:
        with dial(self.admin_port) as line:
            response = line.ask(f"GET {path} HTTP/1.1\r\nHost: admin\r\n\r\n".encode())
            return response.status, response.body.decode()

    def metric(self, name: str) -> float:
        """One sample, by its whole name with labels."""
        for row in self.admin("/metrics")[1].splitlines():
            if row.startswith(f"coatcheck_proxy_{name} "):
                return float(row.rpartition(" ")[2])
        return 0.0

    def client_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.folder / "ca.pem")
        return context

    def tenant(self) -> str:
        """A name that no other test uses."""
        return f"t{next(self._numbers)}-{id(self) & 0xFFFF:x}"

    def ticket(self, url: str, **more: Any) -> Ticket:
        """In a tenant of its own, unless one is named."""
        if "of" not in more:
            more.setdefault("tenant", self.tenant())
        return self.control_plane.ticket(url, **more)

    def tunnel(self, ticket: Ticket, authority: str, **options: Any) -> Line:
        return tunnel(
            self.forward_port,
            authority,
            proxy_credential=ticket.proxy_credential,
            context=options.pop("context", None) or self.client_context(),
            **options,
        )

    def connected(self, ticket: Ticket, authority: str) -> Line:
        return connected(self.forward_port, authority, proxy_credential=ticket.proxy_credential)

    def forward(self) -> Line:
        return dial(self.forward_port)

    def reverse(self) -> Line:
        return dial(self.reverse_port)


def proof(ticket: Ticket) -> bytes:
    """The proxy credential as a header line."""
    return proxy_authorization(ticket.proxy_credential)


def get(path: str, *, host: str = "proxy", headers: dict[str, str] | None = None, method: str = "GET") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def reverse_path(ticket: Ticket, path: str = "/") -> str:
    return f"/~{ticket.proxy_credential}/{ticket.credential}{path}"
