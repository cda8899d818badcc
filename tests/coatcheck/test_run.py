"""`run`: what CMD gets, what it does not, how it ends, and what is left of it."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from coatcheck.environment import variables_of
from coatcheck.record import is_unlocked
from coatcheck.run import rule_for_one_run
from coatcheck.terminal import WrongUsageError
from tests.coatcheck.conftest import Machine
from tests.coatcheck.waiting import wait_until
from tests.support.local_stack import ANY_PORTS, LocalStack, has_working_bubblewrap
from tests.support.processes import COMMAND, clean_environment
from tests.support.upstream import Upstream, plain

MODES = [
    "off",
    pytest.param(
        "require", marks=pytest.mark.skipif(not has_working_bubblewrap(), reason="bubblewrap does not work here")
    ),
]


def curl(url: str, *more: str) -> list[str]:
    script = (
        f'curl -sS -o /dev/null -w "%{{http_code}}" -H "Authorization: Bearer $WEATHER_API_KEY" {" ".join(more)} {url}'
    )
    return ["sh", "-c", script]


@contextmanager
def running(machine: Machine, *arguments: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """`coatcheck run …` while it runs. Killed at the end, if the test has not ended it."""
    process = subprocess.Popen(
        [str(COMMAND), "--home", str(machine.stack.home), "run", *arguments],
        env=clean_environment(HOME=str(machine.stack.user_home), **variables), cwd=machine.stack.project,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def own_values(machine: Machine) -> list[bytes]:
    """Everything that must never be seen at a child."""
    files = [machine.stack.home / "admin-token", *(machine.stack.home / "secrets").iterdir()]
    files += list((machine.stack.home / "kek").iterdir())
    return [machine.secret.encode(), b"coatprx1", *(file.read_text().strip().encode() for file in files)]


# --- what CMD gets ----------------------------------------------------------------------------------------------------


@pytest.mark.guards(
    "coatcheck/environment.py", "return {**kept, **_proxy(way_out)", "return {**parent, **_proxy(way_out)"
)
def test_neither_the_environment_nor_the_arguments_of_any_process_hold_a_secret(machine: Machine) -> None:
    shell = {
        "WEATHER_API_KEY": machine.secret,
        "ADMIN": (machine.stack.home / "admin-token").read_text().strip(),
    }
    with running(machine, "--sandbox", "off", "--", "sh", "-c", "echo $$; exec sleep 60", **shell) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        # Between the shell and what it becomes, a process has no environment to read.
        wait_until(10, lambda: Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep"))
        environment = wait_until(10, Path(f"/proc/{child}/environ").read_bytes)
        arguments = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (child, process.pid)]

    assert b"WEATHER_API_KEY=coat_coatchk1" in environment
    for value in own_values(machine):
        assert value not in environment
        assert not any(value in shown for shown in arguments)


@pytest.mark.skipif(not has_working_bubblewrap(), reason="bubblewrap does not work here")
def test_the_sandboxs_own_arguments_hold_no_placeholder_either(machine: Machine) -> None:
    with running(machine, "--sandbox", "require", "--", "sh", "-c", "echo ready; exec sleep 60") as process:
        assert process.stdout is not None
        process.stdout.readline()
        (bubblewrap,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        arguments = Path(f"/proc/{bubblewrap}/cmdline").read_bytes()

    assert b"--unshare-all" in arguments
    assert b"coatchk1" not in arguments
    assert not any(value in arguments for value in own_values(machine))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.needs("curl")
def test_a_program_reaches_its_upstream_with_the_real_key_and_without_having_it(machine: Machine, mode: str) -> None:
    ran = machine.stack.coatcheck("run", "--sandbox", mode, "--", *curl(f"{machine.upstream.url}/today"))

    assert ran.stdout == "200"
    assert machine.upstream.seen("/today")[0].header("authorization") == f"Bearer {machine.secret}"
    assert b"coatchk1" not in machine.upstream.received()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.needs("curl")
def test_the_reverse_url_leads_to_each_credential_by_its_name(machine: Machine, mode: str) -> None:
    command = curl('"$COATCHECK_REVERSE_URL/weather/today"', "--noproxy", "'*'")

    ran = machine.stack.coatcheck("run", "--sandbox", mode, "--", *command)

    assert ran.stdout == "200"
    assert machine.upstream.seen("/today")[0].header("authorization") == f"Bearer {machine.secret}"


def test_the_bundle_holds_the_systems_roots_and_our_ca_and_is_gone_afterwards(machine: Machine) -> None:
    script = "stat -c '%a %n' $SSL_CERT_FILE; cat $SSL_CERT_FILE"

    ran = machine.stack.coatcheck("run", "--sandbox", "off", "--", "sh", "-c", script)

    mode, _, rest = ran.stdout.partition(" ")
    assert mode == "644"
    assert (machine.stack.home / "ca" / "ca.pem").read_text().strip() in rest
    assert rest.count("BEGIN CERTIFICATE") > 1
    assert not Path(rest.splitlines()[0]).exists()


@pytest.mark.skipif(shutil.which("keytool") is None, reason="no Java here")
def test_java_can_read_its_trust_store_and_finds_our_ca_in_it(machine: Machine) -> None:
    script = (
        'store=$(echo "$JAVA_TOOL_OPTIONS" | sed "s/.*trustStore=\\([^ ]*\\).*/\\1/"); JAVA_TOOL_OPTIONS= '
        "keytool -list -rfc -keystore $store -storepass changeit"
    )

    ran = machine.stack.coatcheck("run", "--sandbox", "off", "--", "sh", "-c", script)

    ca = (machine.stack.home / "ca" / "ca.pem").read_text()
    assert "".join(ca.split()[2:-2]) in "".join(ran.stdout.split())


def test_a_presets_base_url_leads_an_sdk_to_its_own_route(machine: Machine) -> None:
    machine.typed("credential", "add", "work", "--preset", "openai", given="sk-work")

    ran = machine.stack.coatcheck("run", "--credential", "work", "--sandbox", "off", "--", "env")
    with_loopback = machine.stack.coatcheck("run", "--sandbox", "off", "--", "env")

    variables = dict(line.partition("=")[::2] for line in ran.stdout.splitlines())
    assert variables["OPENAI_BASE_URL"] == variables["COATCHECK_REVERSE_URL"] + "/work/v1"
    assert variables["OPENAI_API_KEY"].startswith("sk-coatchk1")
    assert variables["NO_PROXY"] == "localhost,127.0.0.1,::1"
    assert "OPENAI_BASE_URL" not in with_loopback.stdout, "loopback goes through the proxy then, and so would it"


def test_only_the_credentials_that_were_named_are_given(machine: Machine) -> None:
    machine.add("other")

    ran = machine.stack.coatcheck("run", "--credential", "weather", "--sandbox", "off", "--", "env", OTHER_API_KEY="x")

    assert "WEATHER_API_KEY=" in ran.stdout
    assert "OTHER_API_KEY" not in ran.stdout


def test_two_credentials_with_one_variable_are_wrong_usage_that_names_both(machine: Machine) -> None:
    machine.add("climate", more=("--env", "WEATHER_API_KEY"))

    refused = machine.typed("run", "--", "true", status=2)

    assert "climate and weather both use WEATHER_API_KEY" in refused.err or (
        "weather and climate both use WEATHER_API_KEY" in refused.err
    )


def test_a_credential_without_a_grant_is_refused_with_the_command_that_grants_it(machine: Machine) -> None:
    (grant,) = machine.json("grant", "list")
    machine.typed("grant", "delete", grant["id"])

    refused = machine.typed("run", "--credential", "weather", "--", "true", status=1)

    assert "coatcheck grant add weather --subject local" in refused.err


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.needs("curl")
def test_with_nothing_granted_a_program_reaches_what_is_allowed_and_nothing_else(machine: Machine, mode: str) -> None:
    machine.typed("credential", "delete", "weather")
    script = (
        f"curl -sS {machine.upstream.url}/free; curl -sS -o /dev/null https://mirror.test; env | grep -c coatchk1; true"
    )

    ran = machine.stack.coatcheck(
        "run", "--sandbox", mode, "--allow", machine.upstream.authority, "--", "sh", "-c", script
    )

    assert ran.stdout == "sunny\n0\n"
    assert "CMD gets no placeholder" in ran.stderr
    assert "refused mirror.test" in ran.stderr


@pytest.mark.guards(
    "coatcheck/environment.py", "            if why := why_not_a_variable(variable):", "            if False:"
)
def test_a_variable_that_programs_need_is_not_given_to_a_placeholder(machine: Machine) -> None:
    machine.typed("credential", "add", "needed", "--destination", "https://a.example", given="k")
    needed = {**machine.json("credential", "show", "needed"), "variables": ["PATH"]}

    with pytest.raises(WrongUsageError, match="needed uses PATH: programs need"):
        variables_of([needed])


def test_keys_of_the_shell_that_nothing_replaces_are_named(machine: Machine) -> None:
    ran = machine.stack.coatcheck("run", "--sandbox", "off", "--", "true", ANTHROPIC_API_KEY="sk-ant-real")

    assert "ANTHROPIC_API_KEY from your shell" in ran.stderr
    assert "sk-ant-real" not in ran.stderr


# --- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_standard_input_and_output_are_the_programs_own(machine: Machine, mode: str) -> None:
    ran = machine.stack.coatcheck("run", "--sandbox", mode, "--", "cat", given="line\n" * 10_000)

    assert ran.stdout == "line\n" * 10_000
    assert ran.stderr == ""


@pytest.mark.parametrize("mode", MODES)
def test_run_ends_with_its_programs_own_status(machine: Machine, mode: str) -> None:
    for command, status in (
        (["sh", "-c", "exit 37"], 37),
        (["sh", "-c", "kill -9 $$"], 137),
        (["no-such-program"], 127),
        (["/etc/hostname"], 126),
    ):
        machine.stack.coatcheck("run", "--sandbox", mode, "--", *command, status=status)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_the_program_decides(machine: Machine, mode: str, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    script = f'trap "echo got {name}; exit 5" {name}; echo ready; while :; do sleep 0.05; done'
    with running(machine, "--sandbox", mode, "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        process.send_signal(number)
        said = process.stdout.read()

        assert process.wait(15) == 5
        assert said == f"got {name}\n"


@pytest.mark.guards("coatcheck/run.py", "control_plane.end_session(session_id)", "pass")
def test_after_the_program_its_session_is_over_and_its_placeholder_revoked(machine: Machine) -> None:
    ran = machine.stack.coatcheck("run", "--sandbox", "off", "--", "printenv", "WEATHER_API_KEY")

    (placeholder,) = [each for each in machine.json("placeholder", "list") if each["credential"] == "weather"]
    ended = [event for event in machine.json("audit", "tail") if event["action"] == "session.end"]
    assert "coatchk1" in ran.stdout
    assert placeholder["revoked_at"] is not None
    assert ended[-1]["session"] == placeholder["session"]


def test_a_run_that_is_told_to_end_before_its_program_has_ended_revokes_too(machine: Machine) -> None:
    with running(machine, "--sandbox", "off", "--", "sh", "-c", "echo ready; exec sleep 60") as process:
        assert process.stdout is not None
        process.stdout.readline()

        process.terminate()

        assert process.wait(15) == 128 + signal.SIGTERM
    (placeholder,) = [each for each in machine.json("placeholder", "list") if each["credential"] == "weather"]
    assert placeholder["revoked_at"] is not None


@pytest.mark.skipif(not has_working_bubblewrap(), reason="bubblewrap does not work here")
def test_a_killed_run_takes_its_sandboxed_program_with_it(machine: Machine) -> None:
    marker = f"sleep {60 + os.getpid() / 1e6:.6f}"
    with running(
        machine, "--sandbox", "require", "--", "sh", "-c", f"echo ready; {marker} & setsid {marker}"
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()

        process.kill()

        wait_until(5, lambda: not _processes_named(marker))


def _processes_named(arguments: str) -> list[str]:
    wanted = "\0".join(arguments.split()).encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().rstrip(b"\0") == wanted:
                found.append(folder.name)
        except OSError:
            continue
    return found


@pytest.mark.long
@pytest.mark.needs("curl")
def test_a_run_outlives_a_stack_that_comes_back_on_other_ports(
    tmp_path: Path, upstream_ca: trustme.CA, upstream_ca_file: Path, upstream: Upstream
) -> None:
    with LocalStack(tmp_path, upstream_ca=upstream_ca_file) as stack:
        stack.add_credential("weather", url=upstream.url, secret="sk-real")
        again = tmp_path / "again"
        request = " ".join(curl(upstream.url)[-1:])
        script = f"echo ready; while [ ! -e {again} ]; do sleep 0.05; done; {request}"
        with running(Machine(stack, upstream, "sk-real"), "--sandbox", "off", "--", "sh", "-c", script) as process:
            assert process.stdout is not None
            process.stdout.readline()
            os.kill(stack.json("status")["pid"], signal.SIGKILL)
            wait_until(10, lambda: is_unlocked(stack.home / "stack.lock"))
            stack.coatcheck("up", "--detach", *ANY_PORTS, "--upstream-ca", str(upstream_ca_file))
            again.touch()
            said, told = process.communicate(timeout=30)
        left = stack.json("placeholder", "list")

    assert said == "200"
    assert told == ""
    assert all(each["revoked_at"] for each in left)


# --- hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.needs("curl")
def test_each_refused_host_is_told_once_with_the_command_that_allows_it(machine: Machine) -> None:
    script = "curl -sS https://mirror.test; curl -sS https://mirror.test; curl -sS http://unknown.example:8080/; true"

    ran = machine.stack.coatcheck("run", "--", "sh", "-c", script)

    told = [line for line in ran.stderr.splitlines() if line.startswith("coatcheck: refused")]
    prefix = f"coatcheck --home {machine.stack.home} allow add"
    assert told == [
        f"coatcheck: refused mirror.test: allow it with '{prefix} mirror.test' (2 times)",
        f"coatcheck: refused unknown.example:8080: allow it with '{prefix} unknown.example:8080'",
    ]


@pytest.mark.needs("curl")
def test_an_internal_address_that_was_refused_comes_without_advice_to_allow_it(machine: Machine) -> None:
    script = "curl -s http://169.254.169.254/; curl -s https://10.1.2.3/; curl -s https://127.0.0.2/; true"

    ran = machine.stack.coatcheck("run", "--", "sh", "-c", script)

    told = [line for line in ran.stderr.splitlines() if line.startswith("coatcheck: refused")]
    assert len(told) == 3
    for line in told:
        assert "an internal address" in line
        assert "allow add" not in line


@pytest.mark.guards("coatcheck/run.py", '{**rule, "session": session_id}', "rule")
@pytest.mark.needs("curl")
def test_a_host_is_allowed_for_one_run_alone(machine: Machine, upstream_ca: trustme.CA) -> None:
    with Upstream(upstream_ca) as other:
        other.default = plain(b"ok")

        ran = machine.stack.coatcheck("run", "--allow", other.authority, "--", "curl", "-sS", f"{other.url}/free")
        without = machine.stack.coatcheck("run", "--", "curl", "-sS", f"{other.url}/again", status=56)

    assert ran.stdout == "ok"
    assert "coatchk1" not in other.received().decode("latin-1")
    assert f"refused {other.authority}" in without.stderr
    assert machine.json("allow", "list") == []


@pytest.mark.guards("coatcheck/run.py", 'if is_ip_literal(host) or host == "localhost":', "if True:")
def test_a_private_address_is_meant_only_where_it_is_spelt_out() -> None:
    assert rule_for_one_run("10.0.0.1:8443") == {"host": "10.0.0.1", "port": 8443, "allow_private": True}
    assert rule_for_one_run("localhost") == {"host": "localhost", "allow_private": True}
    assert rule_for_one_run("intranet.example") == {"host": "intranet.example"}


@pytest.mark.needs("curl")
def test_a_placeholder_of_one_run_is_refused_in_another(machine: Machine) -> None:
    stolen = machine.stack.coatcheck("run", "--sandbox", "off", "--", "printenv", "WEATHER_API_KEY").stdout.strip()
    command = [part.replace("$WEATHER_API_KEY", stolen) for part in curl(machine.upstream.url)]

    ran = machine.stack.coatcheck("run", "--", *command)

    assert ran.stdout == "403"
    assert machine.upstream.requests == []
    assert stolen not in ran.stderr


# --- what people are told ---------------------------------------------------------------------------------------------


def test_without_bubblewrap_one_line_says_what_is_not_protected(machine: Machine) -> None:
    with running(machine, "--", "/bin/true", PATH=str(COMMAND.parent)) as process:
        _, told = process.communicate(timeout=30)

    assert process.returncode == 0
    assert "no sandbox: bubblewrap is not installed" in told
    assert str(machine.stack.home) in told


def test_without_bubblewrap_a_sandbox_that_is_required_is_refused(machine: Machine) -> None:
    with running(machine, "--sandbox", "require", "--", "/bin/true", PATH=str(COMMAND.parent)) as process:
        _, told = process.communicate(timeout=30)

    assert process.returncode == 1
    assert "sandbox_unavailable" in told


def test_an_old_node_is_told_about_its_fetch(machine: Machine, tmp_path: Path) -> None:
    node = tmp_path / "node"
    for version, is_told in (("v20.11.0", True), ("v22.22.0", False), ("v24.1.0", False)):
        node.write_text(f"#!/bin/sh\necho {version}\n")
        node.chmod(0o755)

        with running(machine, "--sandbox", "off", "--", "node", PATH=f"{tmp_path}:{os.environ['PATH']}") as process:
            _, told = process.communicate(timeout=30)

        assert ("fetch()" in told) is is_told


def test_a_quiet_run_says_nothing_of_its_own(machine: Machine) -> None:
    ran = machine.stack.coatcheck("run", "--sandbox", "off", "--", "true")

    assert ran.stdout + ran.stderr == ""
