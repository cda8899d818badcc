"""The local stack as a process: started once, found by everybody, stopped in an orderly way."""

import json
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from coatcheck.stack import find_stack, is_unlocked, joined_stack, read_record
from coatcheck.state import StateFolder
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

    found = find_stack(other)

    assert found is None
    assert read_record(other) is not None


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
