"""CMD inside bubblewrap: its own network, processes, IPC and host name; the file system read-only but for its folder.

What it sees: the system and the home folder read-only, the current folder writable, fresh `/tmp`, `/var/tmp`, `/run`.
What it does not see: the state folder, by whichever path, nor any other that we know of; any network but its own
loopback, on which two listeners lead to the proxy; any Unix socket that listens now (an agent, a container engine, a
database: each would be a way out), nor the folder it lies in, where that can be spared.

Rules. No secret and no placeholder ever stands in bubblewrap's arguments, which everybody can read. What lies under the
current folder and is ours (this code, a state folder) is out of reach, and so is every folder on the way to it: each is
a mount point, which cannot be moved away and replaced.
"""

import os
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import coatcheck.launcher
from coatcheck.mounts import Mount, leads_somewhere, mounts, other_ways_to
from coatcheck.terminal import DEFAULT_HOME, CommandError

FORWARD_PORT: Final = 8471
REVERSE_PORT: Final = 8472
"""In the sandbox's own network: nothing outside can be in their way."""
PROBE_SECONDS: Final = 10.0
START_SECONDS: Final = 20.0
_FRESH: Final = ("/tmp", "/var/tmp", "/run")  # noqa: S108 - these are the ones that are hidden
_REPLACED: Final = ("/dev", "/proc")
_LAUNCHER: Final = Path(coatcheck.launcher.__file__)
_PACKAGES: Final = ("coatcheck", "control_plane", "egress_proxy", "runtime")
_STATE_FILES: Final = ("admin-token", "kek", "control-plane.sqlite")
"""What a folder has that is a state folder."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Where CMD runs and what is kept from it."""

    bubblewrap: str
    folder: Path
    """The current folder: writable."""
    state_folder: Path
    run_folder: Path
    """The certificates of this run: readable."""
    hidden: tuple[Path, ...] = ()
    """Other state folders, and other paths to any of them."""
    own_code: tuple[Path, ...] = ()
    """What this program is made of, by each path that leads to it."""

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

    def what_may_be_run_later(self) -> str:
        """What CMD can leave behind that somebody else runs, outside of any sandbox; empty where there is nothing."""
        home = Path.home().resolve()
        if _is_under(home, [str(self.folder)]):
            return f"{self.folder} holds your home folder, and CMD may write there what your shell runs"
        if _is_under(self.state_folder, [str(self.folder)]):
            return f"{self.folder} holds the state folder {self.state_folder}, and CMD may write beside it"
        return ""

    def _bubblewrap(self) -> list[str]:
        arguments = [self.bubblewrap, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--ro-bind", "/", "/"]
        arguments += ["--dev", "/dev", "--proc", "/proc"]
        for place in _FRESH:
            if Path(place).is_dir() and not Path(place).is_symlink():
                arguments += ["--tmpfs", place]
        for needed in self._needed_under(_FRESH):
            arguments += ["--ro-bind", needed, needed]
        arguments += self._current_folder()
        sockets = self._visible_sockets()
        covered = _folders_to_cover(sockets, keep=self._kept())
        for folder in covered:
            arguments += ["--perms", "0755", "--tmpfs", str(folder)]
        for listening in sockets:
            if not _is_under(listening, list(map(str, covered))):
                arguments += ["--ro-bind", "/dev/null", str(listening)]
        for hidden in self.hidden:
            arguments += _hiding(hidden)
        arguments += ["--perms", "0700", "--tmpfs", str(self.state_folder)]
        for needed in self._needed_under([str(self.state_folder), *map(str, self.hidden)]):
            arguments += ["--ro-bind", needed, needed]
        arguments += ["--ro-bind", str(self.run_folder), str(self.run_folder)]
        return [*arguments, "--chdir", str(self.folder)]

    def _current_folder(self) -> list[str]:
        """Writable, but for our own code in it, and for the folders on the way to what it must not replace."""
        if self.folder == Path("/"):
            return []
        if any(_is_under(self.folder, [str(place)]) for place in self.own_code):
            return ["--ro-bind", str(self.folder), str(self.folder)]
        read_only = [place for place in self.own_code if self.folder in place.parents]
        read_only = [place for place in read_only if not set(place.parents) & set(read_only)]
        kept = [*read_only, self.state_folder, *self.hidden]
        on_the_way = {parent for place in kept for parent in place.parents if self.folder in parent.parents}
        on_the_way -= {parent for parent in on_the_way if _is_under(parent, list(map(str, kept)))}
        arguments = []
        for place in [self.folder, *sorted(on_the_way)]:  # outer ones first
            arguments += ["--bind", str(place), str(place)]
        for place in read_only:
            arguments += ["--ro-bind", str(place), str(place)]
        return arguments

    def _needed_under(self, folders: Sequence[str]) -> Iterator[str]:
        """The interpreter and this package, where they lie under a folder that is replaced by an empty one."""
        places = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent), str(_LAUNCHER.parent)}
        places |= {"/run/current-system"} if Path("/run/current-system").exists() else set()  # NixOS: every program
        yield from sorted(place for place in places if _is_under(Path(place), folders))

    def _kept(self) -> list[Path]:
        """What is never covered as a whole, sockets or not."""
        paths = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder.startswith("/")]
        return [self.folder, self.run_folder, Path.home(), Path("/etc"), *paths, *own_code()]

    def _visible_sockets(self) -> list[Path]:
        return [listening for listening in _listening_sockets() if self._is_visible(listening)]

    def _is_visible(self, path: Path) -> bool:
        if _is_under(path, (str(self.state_folder), *map(str, self.hidden), *_REPLACED)):
            return False
        return _is_under(path, (str(self.folder),)) or not _is_under(path, _FRESH)


def sandbox_for(
    folder: Path, *, state_folder: Path, run_folder: Path, read_mounts: Callable[[], list[Mount]] = mounts
) -> Sandbox | str:
    """A sandbox that was tried and works, or why there is none."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        return "bubblewrap is not installed"
    if not hasattr(os, "pidfd_open"):
        return "this system has no pidfd"
    folder, state_folder = folder.resolve(), state_folder.resolve()
    state_folders = [state_folder, *(other for other in known_state_folders() if other != state_folder)]
    for each in state_folders:
        if _is_under(folder, (str(each),)):
            raise CommandError(f"the current folder is inside the state folder {each}", "run from another folder")
    table = read_mounts()
    hidden = state_folders[1:]
    for each in state_folders:
        ways = other_ways_to(each, table)
        if ways is None:
            return f"the mount table does not say which other paths lead to {each}"
        hidden += [way for way in ways if leads_somewhere(way) and not _is_under(way, _REPLACED)]
    if any(_is_under(folder, (str(each),)) for each in hidden):
        raise CommandError("the current folder is inside a state folder", "run from another folder")
    hidden = [each for each in hidden if _is_under(each, (str(folder),)) or not _is_under(each, _FRESH)]
    code = [way for place in own_code() for way in (place, *_reachable(place, table))]
    sandbox = Sandbox(
        bubblewrap, folder, state_folder, run_folder.resolve(), tuple(sorted(set(hidden))), _within(code, folder)
    )
    return sandbox.why_it_does_not_work() or sandbox


def known_state_folders() -> list[Path]:
    """The usual one, and the one that the environment names, where they are there and are state folders."""
    named = [str(DEFAULT_HOME.expanduser()), os.environ.get("COATCHECK_HOME", "")]
    found = {Path(name).expanduser().resolve() for name in named if name}
    return sorted(folder for folder in found if any((folder / name).exists() for name in _STATE_FILES))


def own_code() -> list[Path]:
    """The interpreter with what is installed in it, our packages, and the command itself."""
    places = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve(), *_package_folders()]
    places += [Path(path) for path in sysconfig.get_paths().values()]
    command = Path(sys.argv[0])
    if command.is_absolute() and command.is_file():
        places.append(command)
    return sorted({place.resolve() for place in places if place.exists()})


def _package_folders() -> Iterator[Path]:
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is not None:
            yield from map(Path, spec.submodule_search_locations or ())


def _within(code: Iterable[Path], folder: Path) -> tuple[Path, ...]:
    """Those places of our code that matter to this folder. Of a prefix that holds the folder, its parts count alone."""
    prefixes = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    found = set()
    for place in code:
        if folder in place.parents or (_is_under(folder, (str(place),)) and place not in prefixes):
            found.add(place)
        elif folder == place:
            found |= {place / name for name in ("bin", "lib", "pyvenv.cfg") if (place / name).exists()}
    return tuple(sorted(found))


def _reachable(place: Path, table: Sequence[Mount]) -> list[Path]:
    return [way for way in other_ways_to(place, table) or [] if leads_somewhere(way)]


def _hiding(place: Path) -> list[str]:
    if place.is_dir():
        return ["--perms", "0700", "--tmpfs", str(place)]
    return ["--ro-bind", "/dev/null", str(place)]


def _folders_to_cover(sockets: Iterable[Path], *, keep: Sequence[Path]) -> list[Path]:
    """The folders of these sockets that can be replaced by empty ones: a service that starts again comes back there.

    Not one that holds something CMD needs; and of the current folder's own only what holds sockets and nothing else,
    because CMD works on the rest.
    """
    current = keep[0]
    found = {socket.parent for socket in sockets}
    found = {folder for folder in found if not any(_is_under(place, (str(folder),)) for place in keep)}
    found = {folder for folder in found if current not in folder.parents or _holds_sockets_alone(folder)}
    return sorted(folder for folder in found if not set(folder.parents) & found)


def _holds_sockets_alone(folder: Path) -> bool:
    try:
        return all(_is_socket(entry) for entry in folder.iterdir())
    except OSError:
        return False


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
