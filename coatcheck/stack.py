"""The local stack from outside: find it, start it, join it, stop it; `up`, `down` and `status`.

Rules. A stack counts as running only when the process of its record still is that process *and* its control plane takes
this folder's admin token: a `stack.json` left behind by a crash is recognised by that. Whoever needs the stack holds
`use.lock` (shared) meanwhile; a stack that was started for a command ends when nobody holds it any more, one started by
`up` stays until `down`.
"""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from coatcheck.client import ControlPlane
from coatcheck.record import RunningStack, is_unlocked, living_stack, read_record, write_record
from coatcheck.state import StateFolder, own_folder
from coatcheck.terminal import (
    CommandError,
    WrongUsageError,
    done,
    invocation,
    local_time,
    show_fields,
    show_json,
)

DEFAULT_PORTS: Final = {"control-plane": 8470, "proxy": 8471, "reverse": 8472, "admin": 8473}
START_SECONDS: Final = 40.0
LONGEST_START_SECONDS: Final = 80.0
"""One more stack may have to end first."""
STOP_SECONDS: Final = 45.0
"""Longer than the stack's own grace for streams that are still open."""
_POLL_SECONDS: Final = 0.05
_PASSED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""What a stack in the background keeps of the shell's environment, beside `COATCHECK_*`: not the user's own keys."""


@dataclass(frozen=True, slots=True)
class Ports:
    """0 means any free one."""

    control_plane: int
    proxy: int
    reverse: int
    admin: int


def find_stack(state: StateFolder) -> RunningStack | None:
    """The stack of this folder, if it runs."""
    stack = living_stack(state)
    if stack is None:
        return None
    with ControlPlane.of(state) as control_plane:
        return stack if control_plane.answers() else None


@contextlib.contextmanager
def joined_stack(state: StateFolder) -> Iterator[RunningStack]:
    """The folder's stack, started when it does not run, kept for as long as this is held."""
    own_folder(state.home)
    with _in_use(state):
        yield find_stack(state) or start_in_background(state, _convenient_ports(), until_unused=True)


@contextlib.contextmanager
def control_plane_of(context: typer.Context) -> Iterator[ControlPlane]:
    """The control plane that a command talks to."""
    asked = invocation(context)
    if asked.elsewhere is not None:
        with ControlPlane.elsewhere(asked.elsewhere, tenant=asked.tenant) as control_plane:
            yield control_plane
        return
    state = StateFolder(asked.home)
    with joined_stack(state), ControlPlane.of(state, tenant=asked.tenant) as control_plane:
        yield control_plane


def start_in_background(
    state: StateFolder, ports: Ports, *, until_unused: bool, upstream_ca: tuple[str, ...] = ()
) -> RunningStack:
    """Start a stack that outlives us, and wait until it is ready. Raises `CommandError` with its own last words."""
    command = [sys.executable, "-m", "coatcheck", "--home", str(state.home), "up"]
    for name, port in zip(DEFAULT_PORTS, (ports.control_plane, ports.proxy, ports.reverse, ports.admin), strict=True):
        command += [f"--{name}-port", str(port)]
    for file in upstream_ca:
        command += ["--upstream-ca", file]
    if until_unused:
        command.append("--until-unused")
    log = os.open(state.stack_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd="/",
            env=_background_environment(),
            start_new_session=True,
        )
    finally:
        os.close(log)
    return _wait_until_ready(state, process)


def stop_stack(state: StateFolder, stack: RunningStack) -> None:
    """SIGTERM, and wait until it has drained. Raises `CommandError` when it has not in time."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(stack.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline:
        if is_unlocked(state.stack_lock):
            return
        time.sleep(_POLL_SECONDS)
    raise CommandError(
        f"the stack (process {stack.pid}) still drains after {STOP_SECONDS:.0f} s",
        f"end its open streams, or stop it at once with 'kill -9 {stack.pid}'",
    )


# --- commands ---------------------------------------------------------------------------------------------------------


def up(
    context: typer.Context,
    control_plane_port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes any free port.")] = None,
    proxy_port: Annotated[int | None, typer.Option(min=0, max=65535, help="Forward proxy; 0 takes any.")] = None,
    reverse_port: Annotated[int | None, typer.Option(min=0, max=65535, help="Base URLs; 0 takes any.")] = None,
    admin_port: Annotated[int | None, typer.Option(min=0, max=65535, help="Health and metrics; 0 takes any.")] = None,
    upstream_ca: Annotated[
        list[Path] | None, typer.Option(help="Trust this CA at upstreams too, beside the system's. Repeatable.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background; return when it is ready.")] = False,
    until_unused: Annotated[bool, typer.Option("--until-unused", hidden=True)] = False,
) -> None:
    """Start it: control plane and egress proxy in one process."""
    invoked = invocation(context)
    state = StateFolder(invoked.home)
    asked = dict(zip(DEFAULT_PORTS, (control_plane_port, proxy_port, reverse_port, admin_port), strict=True))
    ports = Ports(*(DEFAULT_PORTS[name] if port is None else port for name, port in asked.items()))
    upstream_files = _checked_files(upstream_ca or [])
    own_folder(state.home)
    if detach:
        with _in_use(state):
            running = _running_for_good(state)
            stack = running or start_in_background(state, ports, until_unused=False, upstream_ca=upstream_files)
    else:
        from coatcheck.host import host_stack  # imports both servers: slow, and only needed here

        def show(ready: RunningStack) -> None:
            show_stack(ready, as_json=invoked.as_json, heading="running", stop="Ctrl-C; twice: at once")
            sys.stdout.flush()

        running = host_stack(state, ports, upstream_ca=upstream_files, until_unused=until_unused, on_ready=show)
        if running is None:
            if sys.stderr.isatty():
                sys.stderr.write("\nstopped\n")
            return
        with _in_use(state):
            stack = running = _running_for_good(state) or running
    if running is not None and _runs_otherwise(running, asked, upstream_files):
        raise CommandError(
            f"the stack already runs (process {running.pid}) with other options",
            "stop it with 'coatcheck down', then start it with these",
        )
    show_stack(stack, as_json=invoked.as_json, heading="already running" if running else "running in the background")


def down(context: typer.Context) -> None:
    """Stop it. Streams that are open may finish, up to its grace."""
    state = StateFolder(invocation(context).home)
    stack = find_stack(state) if state.exists() else None
    if stack is None:
        if state.stack_lock.exists() and not is_unlocked(state.stack_lock):
            raise CommandError(
                "a stack is starting, stopping, or no longer answers", f"try again, or look at {state.stack_log}"
            )
        state.stack_file.unlink(missing_ok=True)
        done("the local stack is not running")
        return
    stop_stack(state, stack)
    done(f"stopped (process {stack.pid})")


def status(context: typer.Context) -> None:
    """Say whether it runs, and where."""
    invoked = invocation(context)
    state = StateFolder(invoked.home)
    stack = find_stack(state) if state.exists() else None
    if stack is None:
        if invoked.as_json:
            show_json({"running": False, "home": str(state.home)})
            raise typer.Exit(1)
        left_behind = "; a stack.json was left behind by one that ended" if state.stack_file.exists() else ""
        raise CommandError(
            f"the local stack of {state.home} is not running{left_behind}", "start it with 'coatcheck up --detach'"
        )
    show_stack(stack, as_json=invoked.as_json, heading="running")
    if not stack.is_ready():
        raise CommandError("the proxy says it is not ready", "see 'coatcheck doctor'")


def show_stack(stack: RunningStack, *, as_json: bool, heading: str, stop: str = "") -> None:
    if as_json:
        show_json({"running": True, **asdict(stack)})
        return
    show_fields(
        [
            ("stack", f"{heading}, process {stack.pid}, since {local_time(stack.started_at)}"),
            ("control plane", stack.control_plane_url),
            ("forward proxy", stack.forward_url),
            ("base URLs", f"{stack.reverse_url}/~<proxy credential>/<credential name>"),
            ("health, metrics", f"{stack.admin_url}/readyz  {stack.admin_url}/metrics"),
            ("trusts also", ", ".join(stack.upstream_ca)),
            ("stop", stop),
            ("ends", "with the last command that uses it ('coatcheck up' keeps it)" if stack.until_unused else ""),
        ]
    )


# --- locks, ports, processes ------------------------------------------------------------------------------------------


def open_lock(lock: Path) -> int:
    """A descriptor to lock. It is never given to a child, so a lock ends with its process."""
    return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def port_is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _in_use(state: StateFolder) -> Iterator[None]:
    descriptor = open_lock(state.use_lock)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits only for a stack that is just ending
        yield
    finally:
        os.close(descriptor)


def _running_for_good(state: StateFolder) -> RunningStack | None:
    """The running stack, which from now on stays until `down`."""
    stack = find_stack(state)
    if stack is not None and stack.until_unused:
        stack = replace(stack, until_unused=False)
        write_record(state, stack)
    return stack


def _wait_until_ready(state: StateFolder, process: "subprocess.Popen[bytes]") -> RunningStack:
    deadline = time.monotonic() + LONGEST_START_SECONDS
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        # One that lost the race to start has found the other, and ends; then the other is the one we wait for.
        if (ended or read_record(state) is not None) and (stack := find_stack(state)) is not None:
            return stack
        if ended:
            raise CommandError(*_last_words(state))
        time.sleep(_POLL_SECONDS)
    process.terminate()
    raise CommandError(f"the stack was not ready in {LONGEST_START_SECONDS:.0f} s", f"look at {state.stack_log}")


def _last_words(state: StateFolder) -> tuple[str, str]:
    with contextlib.suppress(OSError):
        for line in reversed(state.stack_log.read_text(errors="replace").splitlines()):
            if line.startswith("coatcheck: "):
                return line.removeprefix("coatcheck: "), ""
    return "the stack ended while it started", f"look at {state.stack_log}"


def _background_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("COATCHECK_")}


def _convenient_ports() -> Ports:
    """The usual ones where they are free: everything finds the others through `stack.json`."""
    return Ports(*(port if port_is_free(port) else 0 for port in DEFAULT_PORTS.values()))


def _runs_otherwise(stack: RunningStack, asked: Mapping[str, int | None], upstream_ca: tuple[str, ...]) -> bool:
    """Whether something was asked for by name that the running stack does not have."""
    port_of_control_plane = int(stack.control_plane_url.rpartition(":")[2])
    actual = (port_of_control_plane, stack.forward_port, stack.reverse_port, stack.admin_port)
    other_port = any(port and port != has for port, has in zip(asked.values(), actual, strict=True))
    return other_port or bool(upstream_ca and upstream_ca != stack.upstream_ca)


def _checked_files(files: list[Path]) -> tuple[str, ...]:
    for file in files:
        if not file.is_file():
            raise WrongUsageError(f"--upstream-ca {file} is not a file")
        if "," in str(file):
            raise WrongUsageError(f"--upstream-ca {file} has a comma in its path; give the file another name")
    return tuple(str(file.resolve()) for file in files)
