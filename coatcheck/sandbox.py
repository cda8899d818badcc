"""CMD inside bubblewrap: its own network, processes, IPC and host name; the file system read-only but for its folder.

What it sees: the system and the home folder read-only, the current folder writable, fresh `/tmp`, `/var/tmp`, `/run`.
What it does not see: the state folder; any network but its own loopback, on which two listeners lead to the proxy; any
Unix socket that listens now (an agent, a container engine, a database: each would be a way out).

Rule: no secret and no placeholder ever stands in bubblewrap's arguments, which everybody can read.
"""

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import coatcheck.launcher
from coatcheck.terminal import CommandError

FORWARD_PORT: Final = 8471
REVERSE_PORT: Final = 8472
"""In the sandbox's own network: nothing outside can be in their way."""
PROBE_SECONDS: Final = 10.0
START_SECONDS: Final = 20.0
_FRESH: Final = ("/tmp", "/var/tmp", "/run")  # noqa: S108 - these are the ones that are hidden
_LAUNCHER: Final = Path(coatcheck.launcher.__file__)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Where CMD runs and what is kept from it."""

    bubblewrap: str
    folder: Path
    """The current folder: writable."""
    state_folder: Path
    run_folder: Path
    """The certificates of this run: readable."""

    def command(self, channel: int, command: Sequence[str], *, terminal: bool) -> list[str]:
        """What to start. `channel` is the descriptor that the listeners come out of."""
        return [
            *self._bubblewrap(),
            "--",
            sys.executable,
            "-I",
            "-S",
            str(_LAUNCHER),
            str(channel),
            str(FORWARD_PORT),
            str(REVERSE_PORT),
            "terminal" if terminal else "none",
            *command,
        ]

    def why_it_does_not_work(self) -> str:
        """Tried once, with everything that CMD will get; empty when it works."""
        try:
            tried = subprocess.run(  # noqa: S603 - bubblewrap itself
                [*self._bubblewrap(), "--", "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"bubblewrap does not start ({type(error).__name__})"
        if tried.returncode == 0:
            return ""
        said = tried.stderr.decode(errors="replace").strip().splitlines()
        return f"bubblewrap does not work here ({said[-1] if said else f'status {tried.returncode}'})"

    def _bubblewrap(self) -> list[str]:
        arguments = [self.bubblewrap, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--ro-bind", "/", "/"]
        arguments += ["--dev", "/dev", "--proc", "/proc"]
        for place in _FRESH:
            if Path(place).is_dir() and not Path(place).is_symlink():
                arguments += ["--tmpfs", place]
        for needed in self._needed_in_hidden_places():
            arguments += ["--ro-bind", needed, needed]
        if self.folder != Path("/"):
            arguments += ["--bind", str(self.folder), str(self.folder)]
        for listening in _listening_sockets():
            if self._is_visible(listening):
                arguments += ["--ro-bind", "/dev/null", str(listening)]
        arguments += ["--perms", "0700", "--tmpfs", str(self.state_folder)]
        arguments += ["--ro-bind", str(self.run_folder), str(self.run_folder)]
        return [*arguments, "--chdir", str(self.folder)]

    def _needed_in_hidden_places(self) -> Iterator[str]:
        """The interpreter and this package, where they lie under a folder that is replaced by an empty one."""
        places = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent), str(_LAUNCHER.parent)}
        places |= {"/run/current-system"} if Path("/run/current-system").exists() else set()  # NixOS: every program
        yield from sorted(place for place in places if _is_under(Path(place), _FRESH))

    def _is_visible(self, path: Path) -> bool:
        if _is_under(path, (str(self.state_folder),)):
            return False
        return _is_under(path, (str(self.folder),)) or not _is_under(path, _FRESH)


def sandbox_for(folder: Path, *, state_folder: Path, run_folder: Path) -> Sandbox | str:
    """A sandbox that was tried and works, or why there is none."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        return "bubblewrap is not installed"
    if not hasattr(os, "pidfd_open"):
        return "this system has no pidfd"
    folder, state_folder = folder.resolve(), state_folder.resolve()
    if folder == state_folder or state_folder in folder.parents:
        raise CommandError(f"the current folder is inside the state folder {state_folder}", "run from another folder")
    sandbox = Sandbox(bubblewrap, folder, state_folder, run_folder.resolve())
    return sandbox.why_it_does_not_work() or sandbox


@dataclass(frozen=True, slots=True)
class HandedOut:
    """What came out of the sandbox: its listeners, and a handle on CMD."""

    forward: socket.socket
    reverse: socket.socket
    pidfd: int


def receive(channel: socket.socket) -> HandedOut:
    """Wait for the launcher. Raises `CommandError` when the sandbox ends instead."""
    channel.settimeout(START_SECONDS)
    try:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 3)
    except OSError:
        descriptors = []
    if len(descriptors) != 3:
        raise CommandError("the sandbox did not start", "see what it said above, or run with --sandbox off")
    forward, reverse, pidfd = descriptors
    return HandedOut(socket.socket(fileno=forward), socket.socket(fileno=reverse), pidfd)


def _listening_sockets() -> Iterator[Path]:
    """Unix sockets with a path that lead to a process outside, as the kernel lists them now (proc(5))."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]
    except OSError:
        return
    paths = {line.split(maxsplit=7)[7] for line in lines if len(line.split(maxsplit=7)) == 8}
    # One bound by a relative path cannot be told from here; nor one of another network namespace.
    yield from sorted({Path(path).resolve() for path in paths if path.startswith("/") and _is_socket(Path(path))})


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _is_under(path: Path, folders: Sequence[str]) -> bool:
    return any(path == Path(folder) or Path(folder) in path.parents for folder in folders)
