"""The local stack as a process: started once, found by everybody, stopped in an orderly way."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from coatcheck.client import ControlPlane
from coatcheck.record import RunningStack, is_unlocked, read_record, start_identity, write_record
from coatcheck.stack import find_stack, joined_stack
from coatcheck.state import StateFolder, prepare
from coatcheck.terminal import CommandError
from control_plane.contract.secret import Secret
from tests.coatcheck.waiting import wait_until
from tests.support.local_stack import ANY_PORTS, LocalStack
from tests.support.processes import COMMAND, clean_environment


@pytest.fixture
def own_stack(tmp_path: Path, upstream_ca_file: Path) -> Iterator[LocalStack]:
    """Not started yet; stopped at the end, whatever the test did."""
    stack = LocalStack(tmp_path, upstream_ca=upstream_ca_file)
    yield stack
    stack.coatcheck("down")


def record(stack: LocalStack) -> dict[str, object]:
    found: dict[str, object] = json.loads((stack.home / "stack.json").read_text())
    return found


def test_a_stack_in_the_background_is_found_joined_and_stopped(own_stack: LocalStack) -> None:
    own_stack.coatcheck("up", "--detach", *ANY_PORTS)
    first = record(own_stack)

    again = own_stack.coatcheck("up", "--detach")
    shown = own_stack.json("status")
    stopped = own_stack.coatcheck("down")

    assert "already running" in again.stdout
    assert shown["running"] is True
    assert shown["pid"] == first["pid"]
    assert "stopped" in stopped.stderr
    assert not (own_stack.home / "stack.json").exists()
    assert is_unlocked(own_stack.home / "stack.lock")


def test_a_second_up_in_the_foreground_says_that_it_runs_and_ends(shared_stack: LocalStack) -> None:
    again = shared_stack.coatcheck("up")

    assert "already running" in again.stdout


def test_other_options_than_the_running_stacks_are_refused(shared_stack: LocalStack, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.touch()

    refused = shared_stack.coatcheck("up", "--detach", "--upstream-ca", str(other), status=1)

    assert "coatcheck down" in refused.stderr


def test_everything_the_stack_writes_is_the_owners_alone(shared_stack: LocalStack) -> None:
    files = [file for file in shared_stack.files() if file.name != "ca.pem"]

    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(shared_stack.home.stat().st_mode) == 0o700


@pytest.mark.guards("coatcheck/stack.py", "env=_background_environment(),", "")
def test_the_stacks_process_has_no_key_of_the_shell_in_its_environment(own_stack: LocalStack) -> None:
    own_stack.coatcheck("up", "--detach", *ANY_PORTS, OPENAI_API_KEY="sk-of-the-shell")

    environment = Path(f"/proc/{record(own_stack)['pid']}/environ").read_bytes()

    assert b"sk-of-the-shell" not in environment


def test_a_stack_json_left_behind_is_recognised_and_replaced(own_stack: LocalStack) -> None:
    own_stack.coatcheck("up", "--detach", *ANY_PORTS)
    killed = record(own_stack)["pid"]
    assert isinstance(killed, int)
    os.kill(killed, signal.SIGKILL)
    wait_until(10, lambda: is_unlocked(own_stack.home / "stack.lock"))

    status = own_stack.coatcheck("status", status=1)
    own_stack.coatcheck("up", "--detach", *ANY_PORTS)

    assert "left behind" in status.stderr
    assert record(own_stack)["pid"] != killed


@pytest.mark.guards("coatcheck/stack.py", "return stack if control_plane.answers() else None", "return stack")
def test_another_control_plane_at_the_recorded_address_is_not_taken_for_ours(
    shared_stack: LocalStack, tmp_path: Path
) -> None:
    other = StateFolder(tmp_path / "other")
    (other.home / "secrets").mkdir(parents=True)
    other.admin_token_file.write_text("not-the-token-of-that-stack")
    other.client_secret_file("local-runtime").write_text("nor-its-secret")
    other.stack_file.write_text((shared_stack.home / "stack.json").read_text())

    with held(other.stack_lock):
        found = find_stack(other)

    assert found is None
    assert read_record(other) is not None


@pytest.mark.guards("coatcheck/record.py", "if stack is None or is_unlocked(state.stack_lock):", "if stack is None:")
@pytest.mark.guards(
    "coatcheck/record.py", "return stack if stack.start_identity == start_identity(stack.pid) else None", "return stack"
)
@pytest.mark.parametrize("ended", ["its lock is free", "its process is another one"])
def test_nothing_secret_is_sent_to_a_port_that_the_stack_no_longer_holds(tmp_path: Path, ended: str) -> None:
    state = StateFolder(tmp_path)
    (state.home / "secrets").mkdir()
    state.admin_token_file.write_text("the-admin-token")
    state.client_secret_file("local-runtime").write_text("the-runtime-secret")
    with socket.create_server(("127.0.0.1", 0)) as thief:
        identity = start_identity(os.getpid()) if ended == "its lock is free" else "another-boot/1"
        url = f"http://127.0.0.1:{thief.getsockname()[1]}"
        write_record(state, RunningStack(os.getpid(), url, 1, 2, 3, 0.0, until_unused=False, start_identity=identity))
        with (
            contextlib.nullcontext() if ended == "its lock is free" else held(state.stack_lock),
            ControlPlane.of(state) as control_plane,
        ):
            for call in (
                control_plane.credentials,
                lambda: control_plane.open_session("local"),
                lambda: control_plane.exchange("token", "weather"),
            ):
                with pytest.raises(CommandError, match="has ended"):
                    call()
        found = find_stack(state)

        thief.setblocking(False)
        with pytest.raises(BlockingIOError):
            thief.accept()
    assert found is None


def test_what_does_not_answer_as_a_control_plane_is_told_in_one_line(tmp_path: Path) -> None:
    with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}") as url:
        odd = ControlPlane(lambda: url, admin_token=Secret.submitted("a"), runtime_secret=Secret.submitted("r"))
        for call in (odd.credentials, lambda: odd.open_session("local"), lambda: odd.exchange("token", "weather")):
            with pytest.raises(CommandError, match="does not answer as a control plane"):
                call()


def test_a_stack_that_moved_to_another_port_is_found_there(tmp_path: Path) -> None:
    with socket.socket() as nobody, serving(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"items":[]}') as url:
        nobody.bind(("127.0.0.1", 0))
        places = iter([f"http://127.0.0.1:{nobody.getsockname()[1]}", url, url])
        moved = ControlPlane(
            lambda: next(places), admin_token=Secret.submitted("a"), runtime_secret=Secret.submitted("r")
        )

        assert moved.credentials() == []


def test_whoever_finds_a_stack_that_is_ending_becomes_the_next_one(own_stack: LocalStack) -> None:
    own_stack.home.mkdir(mode=0o700)
    with held(own_stack.home / "stack.lock"):  # as one does that drains: it holds its lock, and has no record
        starting = subprocess.Popen(
            [str(COMMAND), "--home", str(own_stack.home), "--json", "up", "--detach", *ANY_PORTS],
            env=clean_environment(HOME=str(own_stack.user_home)), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_until(20, (own_stack.home / "stack.log").exists)
        released = time.monotonic()

    out, _ = starting.communicate(timeout=60)

    assert json.loads(out)["running"] is True
    assert time.monotonic() - released < 30


@pytest.mark.guards("coatcheck/host.py", "            await _require_ready(control_plane.url)\n", "")
def test_a_wrong_key_encryption_key_stops_the_start_at_once_with_the_reason(own_stack: LocalStack) -> None:
    own_stack.coatcheck("credential", "list")
    wait_until(20, lambda: is_unlocked(own_stack.home / "stack.lock"))
    (own_stack.home / "kek" / "1.hex").write_text("ab" * 32 + "\n")
    began = time.monotonic()

    refused = own_stack.coatcheck("up", "--detach", *ANY_PORTS, status=1)

    assert "the control plane is not ready" in refused.stderr
    assert "kek/" in refused.stderr
    assert time.monotonic() - began < 20


def test_a_file_that_is_no_database_stops_the_start_with_its_name(own_stack: LocalStack) -> None:
    prepare(StateFolder(own_stack.home))
    database = own_stack.home / "control-plane.sqlite"
    database.touch(mode=0o600)
    database.write_bytes(b"this is no database " * 100)

    refused = own_stack.coatcheck("up", "--detach", *ANY_PORTS, status=1)

    assert f"{database} cannot be used as a database" in refused.stderr
    assert "backup" in refused.stderr


def test_stacks_of_several_folders_that_start_at_once_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    commands = [
        subprocess.Popen(
            [str(COMMAND), "--home", str(tmp_path / name), "credential", "list"],
            env=clean_environment(HOME=str(tmp_path)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for name in ("first", "second", "third")
    ]  # fmt: skip

    said = [command.communicate(timeout=80)[1] for command in commands]

    assert [command.returncode for command in commands] == [0, 0, 0], said


@contextlib.contextmanager
def held(lock: Path) -> Iterator[None]:
    """The lock as a living stack holds it."""
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def serving(answer: bytes) -> Iterator[str]:
    """A loopback port that gives every request the same answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def test_a_taken_port_is_named_with_the_option_that_takes_another(own_stack: LocalStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        refused = own_stack.coatcheck("up", "--detach", *ANY_PORTS[2:], "--control-plane-port", str(port), status=1)

    assert refused.stderr.strip() == (
        f"coatcheck: port {port} is taken by another program; "
        "free it, or choose another with '--control-plane-port N' (0 takes any free one)"
    )


def test_a_stack_that_a_command_started_is_kept_by_up(own_stack: LocalStack) -> None:
    with joined_stack(StateFolder(own_stack.home)) as started:
        own_stack.coatcheck("up", "--detach")
        kept = record(own_stack)

    assert started.until_unused
    assert kept["pid"] == started.pid
    assert kept["until_unused"] is False


def test_a_stack_nobody_uses_any_more_is_gone_soon(own_stack: LocalStack) -> None:
    own_stack.coatcheck("credential", "list")

    assert wait_until(20, lambda: is_unlocked(own_stack.home / "stack.lock"))
    assert not (own_stack.home / "stack.json").exists()


def test_in_the_foreground_it_says_where_it_listens_and_ends_by_sigterm(own_stack: LocalStack) -> None:
    own_stack.home.mkdir(mode=0o700)
    process = subprocess.Popen(
        [str(COMMAND), "--home", str(own_stack.home), "--json", "up", *ANY_PORTS],
        env=clean_environment(HOME=str(own_stack.user_home)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(40, lambda: (own_stack.home / "stack.json").exists())

    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)

    assert json.loads(out)["pid"] == process.pid
    assert process.returncode == 0
    assert err == ""


def test_the_proxys_readiness_is_what_status_asks(shared_stack: LocalStack) -> None:
    found = shared_stack.json("status")

    assert httpx.get(f"http://127.0.0.1:{found['admin_port']}/readyz", trust_env=False).status_code == 200


def test_two_that_start_at_once_end_up_with_one_stack(own_stack: LocalStack) -> None:
    command = [str(COMMAND), "--home", str(own_stack.home), "--json", "up", "--detach", *ANY_PORTS]
    environment = clean_environment(HOME=str(own_stack.user_home))
    began = time.monotonic()
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    answers = [process.communicate(timeout=60)[0] for process in both]

    assert time.monotonic() - began < 60
    assert len({json.loads(answer)["pid"] for answer in answers if answer}) == 1
