"""The command from outside: exit statuses, one helpful line, and no secret in any of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck.cli import json_first, run_command
from tests.coatcheck.conftest import Machine, type_command
from tests.support.processes import COMMAND, clean_environment


def coatcheck(*arguments: str, home: Path, given: str = "", **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = clean_environment(HOME=str(home), **variables)
    return subprocess.run(
        [str(COMMAND), "--home", str(home / "state"), *arguments],
        input=given, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["nonsense"], "no such command 'nonsense'"),
        (["credental", "list"], "Did you mean 'credential'"),
        (["status", "--nonsense"], "no such option: --nonsense"),
        (["grant", "add", "weather"], "give either --subject S or --role R"),
        (["grant", "add", "weather", "--subject", "s", "--role", "r"], "give either --subject S or --role R"),
        (["grant", "add", "weather", "--subject", "s", "--until", "later"], "--until is a duration"),
        (["grant", "add", "weather", "--subject", "s", "--until", "0001-01-01"], "--until"),
        (["credential", "add", "weather"], "give --destination https://host, or --preset P"),
        (["credential", "add", "Weather!", "--preset", "openai"], "is no credential name"),
        (["credential", "add", "weather", "--destination", "ftp://x"], "a destination is https://host"),
        (["credential", "add", "w", "--destination", "https://x", "--header", "X-Key"], "{secret}"),
        (["credential", "add", "w", "--destination", "https://x", "--header", "Host: {secret}"], "frames or routes"),
        (["credential", "add", "w", "--preset", "openai", "--allow-private"], "give --destination too"),
        (["allow", "add", "https://mirror.test/simple"], "allow its host alone"),
        (["credential", "add", "w", "--preset", "openai", "--env", "PATH"], "programs need that variable"),
        (["credential", "add", "w", "--preset", "openai", "--env", "Https_Proxy"], "'run' itself sets that variable"),
        (["credential", "add", "w", "--preset", "openai", "--env", "LD_PRELOAD"], "programs need that variable"),
        (["credential", "add", "w", "--preset", "openai", "--env", "a-b"], "a variable's name is letters"),
        (["credential", "show", "\udcff"], "is not text (UTF-8)"),
        (["run", "--credential", "\udcff", "--", "true"], "is not text (UTF-8)"),
        (["allow", "add", "a b"], "is not HOST[:PORT]"),
        (["placeholder", "issue", "--subject", "s", "--audience", "a", "--ttl", "5w"], "--ttl is a number of seconds"),
        (["run"], "missing argument"),
        (["run", "--sandbox", "maybe", "--", "true"], "--sandbox"),
        (["up", "--proxy-port", "70000"], "--proxy-port"),
        (["up", "--upstream-ca", "/nowhere.pem"], "is not a file"),
    ],
)
def test_wrong_usage_is_status_2_and_one_line_that_helps(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run_command(["--home", str(tmp_path), *arguments])

    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert len(lines(captured.err)) == 1
    assert captured.err.startswith("coatcheck: ")
    assert says in captured.err


@pytest.mark.guards("coatcheck/cli.py", 'getattr(error, "option_name", None) in OPTIONS_PEOPLE_TRY', "False")
@pytest.mark.guards("coatcheck/cli.py", '"unexpected extra argument" in error.message', "False")
def test_a_secret_given_as_an_argument_is_refused_with_the_reason_and_never_repeated(tmp_path: Path) -> None:
    for wrong in (
        ["credential", "add", "weather", "--destination", "https://x.example", "--secret", "sk-typed"],
        ["credential", "add", "weather", "--preset", "openai", "sk-typed"],
        ["credential", "rotate", "weather", "sk-typed"],
        ["credential", "rotate", "weather", "--key", "sk-typed"],
    ):
        done = coatcheck(*wrong, home=tmp_path)

        assert done.returncode == 2
        assert "a secret is never an argument" in done.stderr
        assert "sk-typed" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["credential", "add", "w", "--destination", "https://u:sk-Typed@h.example"],
        ["credential", "add", "w", "--destination", "https://h.example", "--secret-file", "sk-Typed"],
        ["credential", "add", "sk-Typed", "--destination", "https://h.example"],
        ["credential", "add", "w", "--destination", "https://h.example", "--env", "sk-Typed"],
        ["credential", "sk-Typed"],
        ["grant", "add", "w", "--subject", "s", "sk-Typed"],
        ["allow", "add", "https://u:sk-Typed@h.example"],
        ["allow", "add", "u:sk-Typed@h.example"],
        ["allow", "delete", "sk-Typed"],
        ["run", "--allow", "https://u:sk-Typed@h.example", "--", "true"],
    ],
)
def test_what_may_be_a_secret_in_the_wrong_place_is_not_repeated(arguments: list[str], machine: Machine) -> None:
    said = type_command("--home", str(machine.stack.home), *arguments)

    assert said.status in (1, 2)
    assert said.err.startswith("coatcheck: ")
    assert "sk-Typed" not in said.out + said.err


def test_a_program_that_is_run_may_have_arguments_of_any_bytes(machine: Machine) -> None:
    done = subprocess.run(
        [os.fsencode(str(COMMAND)), b"--home", os.fsencode(machine.stack.home), b"run", b"--sandbox", b"off", b"--",
         b"printf", b"%s", b"\xff"],
        env=clean_environment(HOME=str(machine.stack.user_home)), capture_output=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.stdout == b"\xff"


def test_no_command_shows_the_list_and_is_wrong_usage(tmp_path: Path) -> None:
    done = coatcheck(home=tmp_path)

    assert done.returncode == 2
    assert "credential" in done.stdout + done.stderr


def test_every_command_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        "up", "down", "status", "serve", "serve control-plane", "serve migrate", "serve proxy", "serve runtime",
        "credential add", "credential list", "credential show", "credential rotate", "credential delete",
        "credential rotation",
        "grant add", "grant list", "grant delete", "allow add", "allow list", "allow delete", "exchange",
        "placeholder list", "placeholder issue", "placeholder revoke", "run", "audit tail", "audit export",
        "audit verify", "audit head", "audit keys", "alarm list", "alarm test",
        "alarm settings", "alarm add-hook", "alarm list-hooks", "alarm delete-hook",
        "decoy add", "decoy list", "decoy delete", "limit add", "limit list", "limit delete",
        "why", "ca export", "doctor", "demo",
    ):  # fmt: skip
        assert run_command([*command.split(), "--help"]) == 0, command

        assert "Usage: coatcheck " + command in capsys.readouterr().out


def test_without_a_stack_status_says_how_to_start_one(tmp_path: Path) -> None:
    done = coatcheck("status", home=tmp_path)

    assert done.returncode == 1
    assert lines(done.stderr) == [lines(done.stderr)[0]]
    assert "coatcheck up --detach" in done.stderr


def test_without_a_stack_down_has_nothing_to_do(tmp_path: Path) -> None:
    done = coatcheck("down", home=tmp_path)

    assert done.returncode == 0


def test_an_error_nobody_expected_is_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "stack.lock").mkdir()  # a folder where a file belongs

    status = run_command(["--home", str(tmp_path / "state"), "up"])

    captured = capsys.readouterr()
    assert status == 1
    assert len(lines(captured.err)) == 1
    assert "Traceback" not in captured.err


def test_a_reader_that_has_had_enough_is_no_error(tmp_path: Path) -> None:
    script = f"{COMMAND} --home {tmp_path / 'state'} --help | head -1"

    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert done.stderr == ""


def test_json_is_taken_after_the_command_too_but_never_from_a_program_that_is_run() -> None:
    assert json_first(["credential", "list", "--json"]) == ["--json", "credential", "list"]
    assert json_first(["--json", "status"]) == ["--json", "status"]
    assert json_first(["run", "tool", "--json"]) == ["run", "tool", "--json"]
    assert json_first(["run", "--", "tool", "--json"]) == ["run", "--", "tool", "--json"]


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "coatcheck", "--home", str(tmp_path), "--json", "status"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert '"running": false' in done.stdout


@pytest.mark.parametrize(
    "part, said",
    [
        ("control-plane", ["give one of COATCHECK_CONTROL_PLANE_DATABASE_URL and"]),
        ("proxy", [f"{name} is not set" for name in ("CONTROL_PLANE_URL", "CLIENT_ID", "CA_KEY_FILE")]),
    ],
)
def test_serve_without_its_settings_names_every_one_that_is_missing(part: str, said: list[str], tmp_path: Path) -> None:
    done = coatcheck("serve", part, home=tmp_path)

    assert done.returncode == 1
    assert len(lines(done.stderr)) == 1
    assert all(each in done.stderr for each in said)


def test_serve_with_an_unknown_setting_suggests_the_right_one(tmp_path: Path) -> None:
    done = coatcheck("serve", "proxy", home=tmp_path, COATCHECK_PROXY_CONTROL_PLAN_URL="http://x")

    assert done.returncode == 1
    assert "did you mean COATCHECK_PROXY_CONTROL_PLANE_URL?" in done.stderr


def test_serve_never_shows_a_settings_value(tmp_path: Path) -> None:
    done = coatcheck(
        "serve", "control-plane", home=tmp_path,
        COATCHECK_CONTROL_PLANE_DATABASE_URL="postgresql+asyncpg://u:s3cr3t@h/db",
        COATCHECK_CONTROL_PLANE_SESSION_SECONDS="s3cr3t",
    )  # fmt: skip

    assert done.returncode == 1
    assert "COATCHECK_CONTROL_PLANE_SESSION_SECONDS" in done.stderr
    assert "s3cr3t" not in done.stdout + done.stderr
