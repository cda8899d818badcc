"""The commands that limit and that watch: limits, alarms, hooks, decoys."""

import pytest

from tests.coatcheck.conftest import Machine


def test_a_limit_is_set_shown_and_taken_away(machine: Machine) -> None:
    made = machine.json("limit", "add", "--requests", "600", "--per", "1m", "--credential", "weather", "--each-subject")
    (listed,) = machine.json("limit", "list")
    shown = machine.typed("limit", "list").out
    machine.typed("limit", "delete", made["id"])

    assert listed == made
    assert (made["measure"], made["amount"], made["window_seconds"], made["each_subject"]) == (
        "requests",
        600,
        60,
        True,
    )
    assert "600 requests in 60 s" in shown
    assert machine.json("limit", "list") == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--per", "1m"),
        ("--per", "1m", "--requests", "1", "--tokens", "1"),
        ("--per", "1m", "--tokens", "1", "--subject", "s", "--each-subject"),
        ("--requests", "1"),
        ("--requests", "0", "--per", "1m"),
    ],
)
def test_a_limit_that_makes_no_sense_is_wrong_usage(machine: Machine, arguments: tuple[str, ...]) -> None:
    machine.typed("limit", "add", *arguments, status=2)


def test_an_alarm_is_tested_and_listed(machine: Machine) -> None:
    said = machine.typed("alarm", "test").err
    (newest, *_) = machine.json("alarm", "list")

    assert newest["id"] in said
    assert "nobody is told" in said
    assert newest["kind"] == "test"
    assert "test" in machine.typed("alarm", "list").out


def test_a_hook_shows_its_secret_once(machine: Machine) -> None:
    made = machine.json("alarm", "add-hook", "https://hooks.example.com/alarms")
    listed = machine.json("alarm", "list-hooks")
    machine.typed("alarm", "delete-hook", made["id"])
    refused = machine.typed("alarm", "add-hook", "http://hooks.example.com/", status=1)

    assert made["secret"].startswith("whsec_")
    assert [sorted(hook) for hook in listed] == [["created_at", "id", "tenant", "url"]]
    assert machine.json("alarm", "list-hooks") == []
    assert "https://" in refused.err


def test_what_is_done_because_of_an_alarm_is_set_and_shown(machine: Machine) -> None:
    before = machine.json("alarm", "settings")
    changed = machine.json("alarm", "settings", "--revoke-on-mismatch")
    machine.typed("alarm", "settings", "--no-revoke-on-mismatch")

    assert before == {"revoke_on_mismatch": False}
    assert changed == {"revoke_on_mismatch": True}
    assert "no" in machine.typed("alarm", "settings").out


def test_a_decoy_is_printed_once(machine: Machine) -> None:
    made = machine.json("decoy", "add", "--preset", "github", "--note", "old wiki page")
    (listed,) = machine.json("decoy", "list")
    shown = machine.typed("decoy", "list").out
    machine.typed("decoy", "delete", made["id"])

    assert "coatchk1" in made["placeholder"]
    assert made["placeholder"].startswith("ghp_")
    assert "placeholder" not in listed
    assert "old wiki page" in shown
    assert made["placeholder"] not in shown
    assert machine.json("decoy", "list") == []
