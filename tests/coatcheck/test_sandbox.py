"""Inside the sandbox: what a hostile program finds when it looks around."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import coatcheck
from coatcheck.sandbox import sandbox_for
from tests.coatcheck.conftest import Machine
from tests.coatcheck.waiting import wait_until
from tests.support.local_stack import has_working_bubblewrap
from tests.support.processes import COMMAND, clean_environment

pytestmark = pytest.mark.skipif(not has_working_bubblewrap(), reason="bubblewrap does not work here")


def inside(machine: Machine, script: str, *, cwd: Path | None = None, **variables: str) -> str:
    """What a shell script prints inside, errors included."""
    done = subprocess.run(
        [str(COMMAND), "--home", str(machine.stack.home), "run", "--sandbox", "require", "--", "sh", "-c", script],
        env=clean_environment(**{"HOME": str(machine.stack.user_home), **variables}), cwd=cwd or machine.stack.project,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout


@pytest.mark.guards("coatcheck/sandbox.py", '"--tmpfs", str(self.state_folder)]', '"--tmpfs", "/mnt"]')
def test_the_state_folder_is_empty_even_when_the_home_folder_is_the_current_one(machine: Machine) -> None:
    home = machine.stack.home

    seen = inside(machine, f"ls -A {home} && cat {home}/admin-token", cwd=home.parent)

    assert "admin-token: No such file" in seen
    assert "control-plane.sqlite" not in seen


@pytest.mark.guards("coatcheck/sandbox.py", '"--unshare-all", ', '"--unshare-pid", ')
@pytest.mark.needs("curl")
def test_there_is_no_network_but_the_way_to_the_proxy(machine: Machine) -> None:
    stack = machine.json("status")
    with socket.create_server(("127.0.0.1", 0)) as open_on_the_machine:
        port = open_on_the_machine.getsockname()[1]
        script = (
            f"for p in {port} {stack['forward_port']} {stack['control_plane_url'].rpartition(':')[2]}; do "
            "curl -sS --noproxy '*' -m 2 http://127.0.0.1:$p/ -o /dev/null && echo reached $p; done; "
            "grep -c : /proc/net/dev; printenv HTTPS_PROXY; cat /proc/net/tcp | grep -c ' 0A '"
        )

        seen = inside(machine, script)

    assert "reached" not in seen
    assert seen.splitlines()[-3:] == ["1", "http://127.0.0.1:8471", "2"], "loopback alone, two listeners on it"


def test_processes_of_the_machine_cannot_be_seen_or_signalled(machine: Machine) -> None:
    seen = inside(machine, f"ls /proc | grep -c '^[0-9]'; kill -0 {os.getpid()} && echo signalled")

    assert int(seen.split()[0]) < 10
    assert "signalled" not in seen


def test_only_the_current_folder_is_writable(machine: Machine, tmp_path: Path) -> None:
    script = "touch here; touch $HOME/there; touch /etc/there; touch /tmp/scratch && rm /tmp/scratch && echo scratch"

    seen = inside(machine, script, cwd=tmp_path)

    assert (tmp_path / "here").exists()
    assert not (machine.stack.user_home / "there").exists()
    assert not Path("/etc/there").exists()
    assert "scratch" in seen


@pytest.mark.guards("coatcheck/sandbox.py", '["--ro-bind", "/dev/null", str(listening)]', "[]")
@pytest.mark.needs("curl")
def test_a_unix_socket_that_listens_outside_leads_nowhere(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        seen = inside(
            machine, f"curl -sS -m 2 --unix-socket {path} http://x/ && echo reached; stat -c %F {path}", cwd=tmp_path
        )

    assert "reached" not in seen
    assert "socket" not in seen.splitlines()[-1]


def test_no_capability_is_left(machine: Machine) -> None:
    seen = inside(machine, "grep -E 'Cap(Eff|Prm|Bnd)|NoNewPrivs' /proc/self/status")

    assert [line.split()[1] for line in seen.splitlines()] == ["0" * 16, "0" * 16, "0" * 16, "1"]


def test_no_descriptor_of_ours_is_left_open_inside(machine: Machine) -> None:
    seen = inside(machine, "ls /proc/self/fd | tr '\\n' ' '")

    assert set(seen.split()) <= {"0", "1", "2", "3"}, "3 is the folder that ls reads"


def test_a_current_folder_inside_the_state_folder_is_refused(machine: Machine) -> None:
    seen = inside(machine, "true", cwd=machine.stack.home / "kek")

    assert "inside the state folder" in seen


def test_a_program_that_expects_the_default_for_broken_pipes_gets_it(machine: Machine) -> None:
    ignored = int(inside(machine, "yes | head -1; grep SigIgn /proc/self/status").split()[-1], 16)

    assert ignored & 1 << signal.SIGPIPE - 1 == 0


# --- what is ours is out of reach, by every path ----------------------------------------------------------------------


@pytest.mark.guards("coatcheck/sandbox.py", "        for place in read_only:", "        for place in ():")
def test_our_own_code_is_read_only_where_the_current_folder_holds_it(machine: Machine) -> None:
    package = Path(coatcheck.__file__).parent
    checked = [package / "cli.py", Path(sys.prefix) / "pyvenv.cfg", Path(sys.executable).parent / "coatcheck"]
    script = "; ".join(f"test -e {file} && echo there; test -w {file} && echo could write" for file in checked)

    seen = inside(machine, f"{script}; test -w {package.parent} && echo works", cwd=package.parent)

    assert seen.split("\n")[:-1] == ["there", "there", "there", "works"]


def test_a_current_folder_that_is_our_own_code_is_read_only_as_a_whole(machine: Machine) -> None:
    seen = inside(machine, "test -w . || echo read-only", cwd=Path(coatcheck.__file__).parent)

    assert "read-only" in seen


@pytest.mark.guards("coatcheck/sandbox.py", "    hidden = state_folders[1:]", "    hidden: list[Path] = []")
@pytest.mark.parametrize("named_by", ["HOME", "COATCHECK_HOME"])
def test_another_state_folder_is_hidden_too(machine: Machine, tmp_path: Path, named_by: str) -> None:
    other = tmp_path / ".coatcheck"
    other.mkdir(mode=0o700)
    (other / "admin-token").write_text("token-of-another-stack\n")
    named = str(tmp_path if named_by == "HOME" else other)

    seen = inside(machine, f"cat {other}/admin-token; echo looked", cwd=tmp_path, **{named_by: named})

    assert "token-of-another-stack" not in seen
    assert "looked" in seen


@pytest.mark.guards("coatcheck/sandbox.py", "*sorted(on_the_way)]:", "]:")
def test_what_leads_to_a_state_folder_cannot_be_moved_away(machine: Machine, tmp_path: Path) -> None:
    parent = tmp_path / "settings"
    other = parent / "coatcheck"
    other.mkdir(parents=True, mode=0o700)
    (other / "admin-token").write_text("token-of-another-stack\n")

    seen = inside(
        machine,
        f"touch {parent}/x && echo may write; mv {parent} {parent}.away && echo moved",
        cwd=tmp_path,
        COATCHECK_HOME=str(other),
    )

    assert "may write" in seen
    assert "moved" not in seen
    assert parent.exists()


@pytest.mark.guards("coatcheck/sandbox.py", "arguments += _hiding(hidden)", "pass")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_state_folder_is_hidden_at_every_mount_that_leads_to_it(machine: Machine, tmp_path: Path) -> None:
    alias = tmp_path / "alias"
    alias.mkdir()
    if subprocess.run(["mount", "--bind", str(machine.stack.home.parent), str(alias)], check=False).returncode:
        pytest.skip("bind mounts are not allowed here")
    try:
        seen = inside(machine, f"ls -A {alias}/{machine.stack.home.name} && echo looked", cwd=tmp_path)
    finally:
        subprocess.run(["umount", str(alias)], check=True)

    assert "admin-token" not in seen
    assert "looked" in seen


@pytest.mark.guards("coatcheck/sandbox.py", "        if ways is None:", "        if False:")
def test_where_the_mount_table_does_not_explain_the_state_folder_there_is_no_sandbox(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()

    found = sandbox_for(tmp_path / "here", state_folder=tmp_path / "state", run_folder=tmp_path, read_mounts=list)

    assert isinstance(found, str)
    assert "mount table" in found


@pytest.mark.guards("coatcheck/sandbox.py", 'arguments += ["--perms", "0755", "--tmpfs", str(folder)]', "pass")
@pytest.mark.needs("curl")
def test_a_socket_that_listens_again_while_the_program_runs_leads_nowhere(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "service"
    folder.mkdir()
    place, ready, again = folder / "engine.sock", tmp_path / "ready", tmp_path / "again"
    script = (
        f"touch {ready}; while [ ! -e {again} ]; do sleep 0.02; done; ls {folder}; "
        f"curl -sS -m 2 --unix-socket {place} http://x/; echo status $?"
    )
    first = listening(place)
    with subprocess.Popen(
        [str(COMMAND), "--home", str(machine.stack.home), "run", "--sandbox", "require", "--", "sh", "-c", script],
        env=clean_environment(HOME=str(machine.stack.user_home)), cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as run:  # fmt: skip
        wait_until(30, ready.exists)
        first.close()
        place.unlink()
        with listening(place):
            again.touch()
            seen, _ = run.communicate(timeout=60)

    assert "engine.sock" not in seen.splitlines()
    assert "status 7" in seen, "curl cannot connect"


def test_a_folder_that_the_program_works_on_is_never_covered_for_a_socket_in_it(
    machine: Machine, tmp_path: Path
) -> None:
    repository = tmp_path / ".git"
    repository.mkdir()
    (repository / "HEAD").touch()
    with listening(repository / "monitor.sock"):
        seen = inside(machine, f"ls {repository}; stat -c %F {repository}/monitor.sock", cwd=tmp_path)

    assert "HEAD" in seen
    assert "character special file" in seen


def test_a_current_folder_that_the_shell_reads_is_told_of(machine: Machine) -> None:
    told = inside(machine, "true", cwd=machine.stack.user_home)
    quiet = inside(machine, "true")
    beside = inside(machine, "true", cwd=machine.stack.home.parent, HOME="/nonexistent")

    assert "what your shell runs" in told
    assert quiet == ""
    assert "holds the state folder" in beside


def listening(place: Path) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX)
    opened.bind(str(place))
    opened.listen()
    return opened


_PTY_MAJOR = 136  # Unix98 pseudo-terminals
_TIOCGPTN = 0x80045430  # asks a pseudo-terminal for its number (ioctl_tty(2)); Python does not name it


# --- the relayed terminal ---------------------------------------------------------------------------------------------


class Terminal:
    """A person at a terminal, in which `coatcheck run` was typed."""

    def __init__(self, machine: Machine, *command: str, sandbox: str = "require") -> None:
        self._pid, self.fd = pty.fork()
        if self._pid == 0:
            os.chdir(machine.stack.project)
            arguments = ["coatcheck", "--home", str(machine.stack.home), "run", "--sandbox", sandbox, "--", *command]
            os.execve(COMMAND, arguments, clean_environment(HOME=str(machine.stack.user_home), TERM="dumb"))
        self.resize(24, 80)
        self.shown = ""

    @property
    def number(self) -> int:
        """N of /dev/pts/N."""
        return int(struct.unpack("i", fcntl.ioctl(self.fd, _TIOCGPTN, b"\0" * 4))[0])

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, text: str, *, seconds: float = 20) -> str:
        """Everything shown up to and with this text. Raises `TimeoutError` with what was shown instead."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            readable, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError(f"{text!r} was not shown: {self.shown!r}")
            self._read()
        return self.shown

    def status(self) -> int:
        """How it ended; everything it showed is in `shown`."""
        with contextlib.suppress(OSError):
            while True:
                self._read()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self.fd)

    def _read(self) -> None:
        data = os.read(self.fd, 65536)
        if not data:
            raise OSError
        self.shown += data.decode(errors="replace")


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_a_sandboxed_program_has_a_terminal_of_its_own_with_our_size(
    machine: Machine, terminals: list[Terminal]
) -> None:
    script = "trap 'echo now $(stty size)' WINCH; echo is $(stty size); until read line; do :; done; echo read $line"
    terminals.append(terminal := Terminal(machine, "sh", "-c", script))

    terminal.until("is 24 80")
    terminal.resize(30, 100)
    terminal.until("now 30 100")
    terminal.type("hello\r")

    assert terminal.status() == 0
    assert "read hello" in terminal.shown


def test_ctrl_c_goes_to_the_sandboxed_program_and_to_nobody_else(machine: Machine, terminals: list[Terminal]) -> None:
    terminals.append(terminal := Terminal(machine, "sh", "-c", "trap 'echo got INT; exit 9' INT; echo ready; read x"))

    terminal.until("ready")
    terminal.type("\x03")
    terminal.until("got INT")

    assert terminal.status() == 9


def test_ctrl_c_goes_to_an_unsandboxed_program_once(machine: Machine, terminals: list[Terminal]) -> None:
    script = "trap 'echo got INT' INT; echo ready; read x; echo first; read y; exit 4"
    terminals.append(terminal := Terminal(machine, "sh", "-c", script, sandbox="off"))

    terminal.until("ready")
    terminal.type("\x03")
    terminal.until("got INT")
    terminal.type("a\r")
    terminal.type("b\r")

    assert terminal.status() == 4
    assert terminal.shown.count("got INT") == 1


@pytest.mark.guards("coatcheck/run.py", "start_new_session=True,  # not even", "start_new_session=False,  # not even")
def test_no_process_in_the_sandbox_holds_our_terminal(machine: Machine, terminals: list[Terminal]) -> None:
    """Whoever holds it, as a descriptor or as /dev/tty, can type into the shell behind it (TIOCSTI)."""
    script = (
        "for p in /proc/[0-9]*; do echo controls $(sed 's/.*) //' $p/stat | cut -d' ' -f5); "
        "for f in $p/fd/*; do echo holds $(stat -Lc %Hr:%Lr $f); done; done; echo done"
    )
    terminals.append(terminal := Terminal(machine, "sh", "-c", script))

    assert terminal.status() == 0
    seen = terminal.shown.split("\r\n")
    assert "done" in seen
    assert f"controls {(_PTY_MAJOR << 8) | terminal.number}" not in seen
    assert f"holds {_PTY_MAJOR}:{terminal.number}" not in seen
    assert any(line.startswith(f"holds {_PTY_MAJOR}:") for line in seen), "it has one of its own"


def test_the_terminal_is_as_it_was_afterwards(machine: Machine, terminals: list[Terminal]) -> None:
    terminals.append(terminal := Terminal(machine, "sh", "-c", "echo ready; read x; exit 3"))
    before = termios.tcgetattr(terminal.fd)

    terminal.until("ready")
    during = termios.tcgetattr(terminal.fd)
    terminal.type("\r")
    status = terminal.status()

    assert status == 3
    assert not during[3] & termios.ICANON
    assert termios.tcgetattr(terminal.fd) == before
