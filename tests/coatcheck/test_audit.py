"""The audit commands, typed: export, heads, keys, verification of the trail and of files taken from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from coatcheck.audit import where
from tests.coatcheck.conftest import Machine

Json = dict[str, Any]


@pytest.fixture
def exported(machine: Machine, tmp_path: Path) -> Path:
    """An export of the local tenant's chain, with the keys beside it."""
    machine.typed("placeholder", "issue", "--subject", "local", "--audience", "weather", "--ttl", "10m")
    wait_until_linked(machine)
    (tmp_path / "export.jsonl").write_text(machine.typed("audit", "export", "--tenant", "local").out)
    (tmp_path / "keys.json").write_text(machine.typed("audit", "keys").out)
    return tmp_path / "export.jsonl"


def wait_until_linked(machine: Machine) -> None:
    for _ in range(100):
        (chain,) = machine.json("audit", "verify", "--tenant", "local")["chains"]
        if not chain["unchained"]:
            return
    raise AssertionError("events wait for too long")


def lines_of(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, lines: list[Json]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_export_verifies_offline_with_the_public_key_alone(machine: Machine, exported: Path) -> None:
    said = machine.typed("audit", "verify", "--file", str(exported), "--key", str(exported.parent / "keys.json"))

    assert "nothing is altered, missing, added or out of order" in said.err
    assert "keep heads elsewhere" in said.err


def test_an_altered_export_is_found_and_the_command_fails(machine: Machine, exported: Path) -> None:
    lines = lines_of(exported)
    event = next(line for line in lines if line["kind"] == "event")
    event["event"]["action"] = "something.else"
    write(exported, lines)

    said = machine.typed("audit", "verify", "--file", str(exported), status=1)

    assert f"PROBLEM: event {event['position']} was altered" in said.err


def test_an_export_does_not_vouch_for_its_own_keys(machine: Machine, exported: Path, tmp_path: Path) -> None:
    jwks = json.loads((exported.parent / "keys.json").read_text())
    jwks["keys"][0]["x"] = "A" * 43
    (tmp_path / "other.json").write_text(json.dumps(jwks))

    said = machine.typed("audit", "verify", "--file", str(exported), "--key", str(tmp_path / "other.json"), status=1)

    assert "not signed by a known key" in said.err
    assert "give that one's public keys with --key" in said.err


def test_a_tail_that_was_cut_off_is_found_by_a_head_taken_earlier(
    machine: Machine, exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "head.json").write_text(machine.typed("audit", "head", "--tenant", "local").out)
    lines = lines_of(exported)
    kept = [at for at, line in enumerate(lines) if line["kind"] == "head"][:-1]
    cut = lines[: kept[-1] + 1]
    write(exported, [*cut, {"kind": "end", "position": cut[-1]["last"], "unchained": 0}])

    alone = machine.typed("audit", "verify", "--file", str(exported))
    said = machine.typed("audit", "verify", "--file", str(exported), "--head", str(tmp_path / "head.json"), status=1)

    assert "nothing is altered" in alone.err
    assert "the end was cut off" in said.err


def test_an_export_is_resumed_and_its_parts_verify_together(machine: Machine, exported: Path, tmp_path: Path) -> None:
    position = lines_of(exported)[-1]["position"]
    machine.typed("placeholder", "issue", "--subject", "local", "--audience", "weather", "--ttl", "10m")
    wait_until_linked(machine)
    rest = tmp_path / "rest.jsonl"
    rest.write_text(machine.typed("audit", "export", "--tenant", "local", "--after", str(position)).out)

    verified = machine.json("audit", "verify", "--file", str(exported), "--file", str(rest))

    (chain,) = verified["chains"]
    assert verified["whole"] is True
    assert (chain["first"], chain["earlier"]) == (1, 0)
    assert chain["last"] > position


def test_the_trail_of_every_tenant_and_of_the_platform_is_verified(machine: Machine) -> None:
    verified = machine.json("audit", "verify")

    assert verified["whole"] is True
    assert {chain["tenant"] for chain in verified["chains"]} >= {"local", None}


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (("verify", "--file", "none.jsonl"), 1, "cannot be read"),
        (("verify", "--file", "README.md"), 1, "is not a JSON object"),
        (("verify", "--head", "none.json"), 1, "cannot be read"),
        (("verify", "--head", "README.md"), 1, "is not a JSON object"),
        (("verify", "--key", "README.md"), 1, "is not JSON"),
        (("verify", "--tenant", "local", "--platform"), 2, "not both"),
        (("export", "--after", "3"), 2, "name it with --tenant or --platform"),
    ],
)
def test_what_cannot_be_verified_says_why(
    machine: Machine, arguments: tuple[str, ...], status: int, reason: str
) -> None:
    assert reason in machine.typed("audit", *arguments, status=status).err


def test_a_request_is_written_as_people_write_it() -> None:
    shown = where({"method": "GET", "scheme": "https", "host": "api.example.com", "port": 443, "path": "/v1"})

    assert shown == "GET https://api.example.com/v1"
