"""The process behind the local stack: control plane and egress proxy on one event loop.

Rule: one process a folder, held by `stack.lock`; `stack.json` is written only once both are ready, and removed before
anything stops. A first SIGTERM or Ctrl-C drains, a second one ends at once.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import uvloop

from coatcheck.record import TRUSTS_NOBODY, RunningStack, read_record, start_identity, write_record
from coatcheck.stack import DEFAULT_PORTS, START_SECONDS, Ports, find_stack, open_lock, port_is_free
from coatcheck.state import PROXY_CLIENT, StateFolder, prepare
from coatcheck.terminal import CommandError

if TYPE_CHECKING:
    from control_plane.bootstrap import RunningControlPlane
    from control_plane.config import Settings as ControlPlaneSettings
    from egress_proxy.config import Settings as ProxySettings

DRAIN_GRACE_SECONDS: Final = 10.0
LINGER_SECONDS: Final = 3.0
"""A stack nobody uses stays this long, so that a row of commands does not start one each."""
_POLL_SECONDS: Final = 0.05
_READY_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Plan:
    state: StateFolder
    ports: Ports
    upstream_ca: tuple[str, ...]
    until_unused: bool
    on_ready: Callable[[RunningStack], None]


def host_stack(
    state: StateFolder,
    ports: Ports,
    *,
    upstream_ca: tuple[str, ...],
    until_unused: bool,
    on_ready: Callable[[RunningStack], None],
) -> RunningStack | None:
    """Be the stack until told to stop, and return None; or return the one that already runs."""
    other = _lock_or_other(state)
    if other is not None:
        return other
    state.stack_file.unlink(missing_ok=True)  # left behind by one that crashed: we hold its lock
    prepare(state)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no image of our memory behind
    plan = _Plan(state, _settled(ports, insist=not until_unused), upstream_ca, until_unused, on_ready)
    try:
        uvloop.run(_host(plan))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        if not until_unused:
            raise CommandError("a port was taken while the stack started", "start it again") from None
        # Somebody was faster; nobody typed these ports, so any will do.
        uvloop.run(_host(replace(plan, ports=_settled(Ports(0, 0, 0, 0), insist=False))))
    return None


@contextlib.contextmanager
def _logging_to_file(state: StateFolder, level: str) -> Iterator[None]:
    """Everything both servers log goes to `stack.log`, in the foreground too."""
    from control_plane.logs import configure

    descriptor = os.open(state.stack_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", buffering=1) as log, contextlib.redirect_stderr(log):
        configure(level)
        yield


async def _host(plan: _Plan) -> None:
    # Both servers' modules are heavy; whoever only joins a stack never imports them.
    from control_plane.bootstrap import running as running_control_plane
    from egress_proxy.bootstrap import running as running_proxy

    settings = _control_plane_settings(plan)
    stop = _Stop()
    with _logging_to_file(plan.state, settings.log_level), stop.on_signals():
        async with contextlib.AsyncExitStack() as parts:
            control_plane = await parts.enter_async_context(_with_a_database(running_control_plane(settings), plan))
            await _require_ready(control_plane.url)
            proxy = await parts.enter_async_context(running_proxy(_proxy_settings(plan, control_plane.url)))
            stack = RunningStack(
                pid=os.getpid(),
                control_plane_url=control_plane.url,
                forward_port=proxy.forward_port,
                reverse_port=proxy.reverse_port,
                admin_port=proxy.admin_port,
                started_at=time.time(),
                until_unused=plan.until_unused,
                upstream_ca=plan.upstream_ca,
                start_identity=start_identity(os.getpid()),
            )
            await _until_ready(stack, stop)
            try:
                write_record(plan.state, stack)
                plan.on_ready(stack)
                if plan.until_unused:
                    _stop_when_unused(plan.state, stop)
                await stop.asked.wait()
            finally:
                plan.state.stack_file.unlink(missing_ok=True)
            await stop.unless_urgent(proxy.drain())


class _Stop:
    """Asked once: drain. Asked twice: now."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._urgent = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            self._loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in signals:
                self._loop.remove_signal_handler(number)

    def ask(self) -> None:
        if self.asked.is_set():
            self._urgent.set()
        self.asked.set()

    def ask_from_thread(self) -> None:
        self._loop.call_soon_threadsafe(self.ask)

    async def unless_urgent(self, draining: Awaitable[object]) -> None:
        drained = asyncio.ensure_future(draining)
        urgent = asyncio.ensure_future(self._urgent.wait())
        done, left = await asyncio.wait({drained, urgent}, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if drained in done:
            drained.result()


@contextlib.asynccontextmanager
async def _with_a_database(
    starting: "contextlib.AbstractAsyncContextManager[RunningControlPlane]", plan: _Plan
) -> AsyncIterator["RunningControlPlane"]:
    """The control plane. Raises `CommandError` for a file that is no database, or not one of ours."""
    from sqlalchemy.exc import DatabaseError

    async with contextlib.AsyncExitStack() as parts:
        try:
            control_plane = await parts.enter_async_context(starting)
        except DatabaseError as error:
            raise CommandError(
                f"{plan.state.database} cannot be used as a database ({error.orig})",
                "put it back from your backup; or move it away, and the next start makes an empty one",
            ) from None
        yield control_plane


async def _require_ready(control_plane_url: str) -> None:
    """Waiting does not help a control plane whose keys do not open. Raises `CommandError` with its reason."""
    async with httpx.AsyncClient(verify=TRUSTS_NOBODY, trust_env=False, timeout=_READY_SECONDS) as client:
        answer = await client.get(f"{control_plane_url}/readyz")
    if answer.is_success:
        return
    try:
        said = str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        said = f"status {answer.status_code}"
    raise CommandError(
        f"the control plane is not ready: {said.rstrip('.')}",
        "put the files in kek/ back that the secrets were stored under ('coatcheck doctor' looks at the rest)",
    )


async def _until_ready(stack: RunningStack, stop: _Stop) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not await asyncio.to_thread(stack.is_ready):
        if time.monotonic() > deadline or stop.asked.is_set():
            raise CommandError("the proxy did not become ready", "run 'coatcheck doctor' while it starts again")
        await asyncio.sleep(_POLL_SECONDS)


def _stop_when_unused(state: StateFolder, stop: _Stop) -> None:
    threading.Thread(target=_watch_use, args=(state, stop), daemon=True, name="unused").start()


def _watch_use(state: StateFolder, stop: _Stop) -> None:
    lock = open_lock(state.use_lock)
    while True:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until nobody uses the stack
        fcntl.flock(lock, fcntl.LOCK_UN)
        time.sleep(LINGER_SECONDS)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        record = read_record(state)
        if record is not None and not record.until_unused:  # somebody said `up` meanwhile
            os.close(lock)
            return
        # The lock is kept to our end: whoever comes now waits for it, and then starts a stack of its own.
        state.stack_file.unlink(missing_ok=True)
        stop.ask_from_thread()
        return


def _lock_or_other(state: StateFolder) -> RunningStack | None:
    """Take `stack.lock` for as long as this process lives, or find who has it. One that ends is waited for."""
    lock = open_lock(state.stack_lock)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if (stack := find_stack(state)) is not None:
                os.close(lock)
                return stack
            time.sleep(_POLL_SECONDS)
        else:
            return None
    os.close(lock)
    raise CommandError(
        f"another stack holds {state.stack_lock} and does not answer", f"look at {state.stack_log}, or end that process"
    )


def _settled(ports: Ports, *, insist: bool) -> Ports:
    """Every port decided and free: addresses that name each other must be known before anything listens.

    A stack that is started for a command takes another port where one is taken; nobody typed it.
    """
    asked = dict(zip(DEFAULT_PORTS, (ports.control_plane, ports.proxy, ports.reverse, ports.admin), strict=True))
    if not insist:
        asked = {name: port if port_is_free(port) else 0 for name, port in asked.items()}
    for name, port in asked.items():
        if port and not port_is_free(port):
            raise CommandError(
                f"port {port} is taken by another program",
                f"free it, or choose another with '--{name}-port N' (0 takes any free one)",
            )
    given = [port for port in asked.values() if port]
    if len(set(given)) != len(given):
        raise CommandError("two of the ports are the same", "give each its own")
    # All held at once, so that no two are the same.
    with contextlib.ExitStack() as held:
        settled = [port or _held_port(held) for port in asked.values()]
    return Ports(*settled)


def _held_port(held: contextlib.ExitStack) -> int:
    probe = held.enter_context(socket.create_server(("127.0.0.1", 0)))
    port: int = probe.getsockname()[1]
    return port


def _control_plane_settings(plan: _Plan) -> "ControlPlaneSettings":
    from control_plane.config import Settings

    listen = f"127.0.0.1:{plan.ports.control_plane}"
    more: dict[str, Any] = {}
    if "COATCHECK_CONTROL_PLANE_LOG_LEVEL" not in os.environ:
        more["log_level"] = "warning"  # nobody rotates the file
    if plan.upstream_ca:  # who has upstreams of its own has a token endpoint of its own
        more["outbound_ca_files"] = tuple(Path(file) for file in plan.upstream_ca)
    return Settings(
        listen=listen,
        issuer_url=f"http://{listen}",
        database_url=f"sqlite+aiosqlite:///{plan.state.database}",
        kek_files=(plan.state.home / "kek",),
        sources_folder=plan.state.home / "sources",
        sources_auth_folder=plan.state.home / "source-auth",
        admin_token_file=plan.state.admin_token_file,
        clients_file=plan.state.clients_file,
        proxy_base_url=f"http://127.0.0.1:{plan.ports.reverse}",
        **more,
    )


def _proxy_settings(plan: _Plan, control_plane_url: str) -> "ProxySettings":
    from egress_proxy.config import Settings
    from egress_proxy.listen import ListenAddress

    # What is not named here, the settings read from COATCHECK_PROXY_* themselves.
    more: dict[str, Any] = {}
    if "COATCHECK_PROXY_DRAIN_GRACE_SECONDS" not in os.environ:
        more["drain_grace_seconds"] = DRAIN_GRACE_SECONDS
    if plan.upstream_ca:
        more["upstream_ca_files"] = tuple(Path(file) for file in plan.upstream_ca)
    return Settings(
        control_plane_url=control_plane_url,
        client_id=PROXY_CLIENT,
        client_secret_file=plan.state.client_secret_file(PROXY_CLIENT),
        forward_listen=ListenAddress("127.0.0.1", plan.ports.proxy),
        reverse_listen=ListenAddress("127.0.0.1", plan.ports.reverse),
        admin_listen=ListenAddress("127.0.0.1", plan.ports.admin),
        ca_cert_file=plan.state.ca_certificate,
        ca_key_file=plan.state.ca_key,
        reverse_path_credential=True,
        **more,
    )
