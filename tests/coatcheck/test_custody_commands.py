"""`coatcheck kek` and `coatcheck source`, by their commands against a real stack."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coatcheck.doctor import Health, examine
from coatcheck.state import StateFolder, prepare
from tests.coatcheck.conftest import Machine
from tests.control_plane.serving import private_file
from tests.support.local_stack import LocalStack


@pytest.fixture
def own_machine(upstream_ca_file: Path, tmp_path: Path, machine: Machine) -> Iterator[Machine]:
    """A stack of this test's own: what it seals with changes."""
    with LocalStack(tmp_path / "own", upstream_ca=upstream_ca_file) as stack:
        yield Machine(stack, machine.upstream, machine.secret)


def test_a_key_is_added_everything_brought_under_it_and_the_old_one_retired(own_machine: Machine) -> None:
    own_machine.add("weather", secret="sk-real-of-this-test")
    (old,) = own_machine.json("kek", "list")

    made = own_machine.typed("kek", "add")
    early = own_machine.typed("kek", "retire", old["kek_id"], status=1)
    done = own_machine.json("kek", "rewrap")
    status = own_machine.json("kek", "rewrap", "--status")
    own_machine.typed("kek", "retire", old["kek_id"])
    table = own_machine.typed("kek", "list").out

    assert "2.hex" in made.err
    assert "still under" in early.err
    assert "kek rewrap" in early.err
    assert (done["state"], done["remaining"], done["unopenable"]) == ("done", 0, 0)
    assert status["id"] == done["id"]
    assert [kek["seals"] for kek in own_machine.json("kek", "list")] == [True, False]
    assert "retired" in table
    key = (own_machine.stack.home / "kek" / "2.hex").read_text().strip()
    assert key not in table + made.out + made.err
    assert (own_machine.stack.home / "kek" / "2.hex").stat().st_mode & 0o777 == 0o600


def test_the_doctor_says_which_key_is_not_there_any_more(own_machine: Machine) -> None:
    (kek,) = own_machine.json("kek", "list")
    file = own_machine.stack.home / "kek" / "1.hex"
    own_machine.typed("kek", "add")
    file.rename(own_machine.stack.home / "elsewhere.hex")
    own_machine.typed("kek", "reload")

    listed = own_machine.typed("kek", "list")
    failed = own_machine.typed("doctor", status=1)

    assert kek["place"] == str(file)
    assert f"{kek['kek_id']}: the settings name it no more" in listed.out + listed.err
    assert f"key {kek['kek_id']} (file {file})" in failed.out
    assert "envelopes are under it" in failed.out


def test_the_doctor_says_that_the_database_is_gone(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "home")
    prepare(state)

    checks = {check.link: check for check in examine(state, dial_upstreams=False)}

    assert checks["database"].health is Health.FAILED
    assert "control-plane.sqlite is not there" in checks["database"].found
    assert "backup" in checks["database"].todo


def test_a_source_is_defined_tried_used_and_taken_away(own_machine: Machine) -> None:
    folder = own_machine.stack.home / "sources" / "local"
    folder.mkdir(parents=True, mode=0o700)
    private_file(folder / "weather_key", "sk-of-a-file\n")

    own_machine.typed("source", "add", "files", "--kind", "file", "--path", "{tenant}/{name}")
    good = own_machine.typed("source", "test", "files", "--name", "weather_key")
    bad = own_machine.typed("source", "test", "files", "--name", "nothing", status=1)
    url = own_machine.upstream.url
    own_machine.typed(
        *("credential", "add", "weather", "--destination", url, "--allow-private"),
        *("--source", "files", "--source-name", "weather_key"),
    )
    in_use = own_machine.typed("source", "delete", "files", status=1)
    shown = own_machine.json("credential", "show", "weather")
    own_machine.typed("credential", "delete", "weather")
    own_machine.typed("source", "delete", "files")

    assert "local/weather_key" in good.err
    assert "not_found" in bad.err
    assert "sk-of-a-file" not in good.out + good.err + bad.out + bad.err
    assert shown["secret_source"] == {"source": "files", "name": "weather_key"}
    assert "read from it" in in_use.err
    assert own_machine.json("source", "list") == []


def test_a_vault_is_described_by_options_and_shown_as_it_is_kept(machine: Machine) -> None:
    machine.typed(
        *("source", "add", "team", "--kind", "vault", "--path", "x/{tenant}/{name}", "--tenant", "local"),
        *("--address", "https://vault.example:8200", "--auth", "kubernetes", "--role", "r", "--token-file", "jwt"),
        *("--mount", "kv", "--kv-version", "1", "--field", "token", "--ttl-seconds", "30"),
    )
    shown, text = machine.json("source", "show", "team"), machine.typed("source", "show", "team").out
    table = machine.typed("source", "list").out
    machine.typed("source", "delete", "team")

    assert shown["settings"] == {
        "address": "https://vault.example:8200",
        "auth": {"method": "kubernetes", "role": "r", "token_file": "jwt"},
        "field": "token",
        "kv_version": "1",
        "mount": "kv",
    }
    assert (shown["tenants"], shown["ttl_seconds"]) == (["local"], 30.0)
    assert "https://vault.example:8200" in text
    assert "x/{tenant}/{name}" in table


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("--kind", "ftp", "--path", "{tenant}/{name}"), 2, "--kind"),
        (("--kind", "file", "--path", "{tenant}/{name}", "--address", "https://x.example"), 2, "no address"),
        (("--kind", "file", "--path", "{name}"), 1, "path_template"),
        (("--kind", "vault", "--path", "{tenant}/{name}", "--auth", "token", "--token-file", "t"), 1, "address"),
        (("--kind", "aws_secrets_manager", "--path", "{tenant}/{name}", "--auth", "keys"), 1, "region"),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused_with_the_reason(
    machine: Machine, options: tuple[str, ...], status: int, said: str
) -> None:
    refused = machine.typed("source", "add", "wrong", *options, status=status)

    assert said in refused.err


@pytest.mark.parametrize(
    "options",
    [("--source", "files"), ("--source-name", "x"), ("--source", "f", "--source-name", "x", "--secret-file", "-")],
)
def test_a_secret_has_one_place_to_come_from(machine: Machine, options: tuple[str, ...]) -> None:
    said = machine.typed(
        "credential", "add", "two", "--destination", "https://two.example", *options, given="k", status=2
    )

    assert "--source" in said.err
