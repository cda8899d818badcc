"""`coatcheck credential rotate` and `rotation`, by their commands against a real stack."""

import json

import pytest

from coatcheck.doctor import Health, ages
from tests.coatcheck.conftest import Machine
from tests.support.upstream import Behaviour, Request, Wire, message

NEW = "sk-new-0123456789abcdef"


def knows(*keys: str) -> Behaviour:
    """An upstream's answer: 200 to one of its keys, 401 to anything else."""

    async def behave(request: Request, wire: Wire) -> None:
        is_known = request.header("authorization").removeprefix("Bearer ") in keys
        await wire.write(message(b"{}", status="200 OK" if is_known else "401 Unauthorized"))

    return behave


def states(machine: Machine) -> list[str]:
    return [version["state"] for version in machine.json("credential", "show", "weather")["versions"]]


def test_a_secret_is_tried_and_only_a_good_one_goes_live(machine: Machine) -> None:
    machine.upstream.default = knows(machine.secret, NEW)
    probe = ("--probe-request", "GET /v1/me")

    wrong = machine.typed("credential", "rotate", "weather", *probe, given="sk-wrong", status=1)
    right = machine.typed("credential", "rotate", "weather", "--probe", given=NEW)

    assert "probe rejected: the upstream answered 401" in wrong.err
    assert "the new secret of weather is not in use" in wrong.err
    assert "probe accepted: the upstream answered 200" in right.err
    assert "weather is at version 3" in right.err
    assert states(machine) == ["retired", "retired", "active"]
    assert "sk-wrong" not in wrong.out + wrong.err


def test_a_rotation_is_watched_to_its_end_a_line_a_step(machine: Machine) -> None:
    said = machine.typed(
        "credential", "rotate", "weather", "--canary", "10%", "--canary-for", "1", "--overlap", "1", given=NEW
    )

    steps = [line.split(";")[0] for line in said.err.splitlines()]
    assert steps == [
        "10% of the subjects use version 2, the others version 1",
        "everybody uses version 2",
        "version 2 is in use",
    ]
    assert states(machine) == ["retired", "active"]


def test_with_json_each_step_is_a_line(machine: Machine) -> None:
    said = machine.typed("--json", "credential", "rotate", "weather", "--overlap", "1", given=NEW)

    assert [json.loads(line)["rotation"]["phase"] for line in said.out.splitlines()] == ["overlap", "completed"]


def test_a_rotation_is_looked_at_helped_along_and_taken_back(machine: Machine) -> None:
    never = machine.typed("credential", "rotation", "weather")
    canary = ("--canary", "10", "--canary-for", "10m", "--overlap", "1h", "--detach")
    machine.typed("credential", "rotate", "weather", *canary, given=NEW)
    under_way = machine.typed("credential", "rotation", "weather")
    second = machine.typed("credential", "rotate", "weather", given="sk-other", status=1)
    promoted = machine.typed("credential", "rotation", "weather", "--promote")
    too_late = machine.typed("credential", "rotation", "weather", "--cancel", status=1)
    machine.typed("credential", "rotation", "weather", "--roll-back")

    over = machine.json("credential", "rotation", "weather")

    assert "never rotated" in never.err
    assert "10% of subjects" in under_way.out
    assert "rotation_in_progress" in second.err
    assert "overlap" in promoted.out
    assert "rotation_not_running" in too_late.err
    assert (over["rotation"]["phase"], over["rotation"]["reason"]) == ("rolled_back", "an operator said so")
    assert states(machine) == ["active", "retired"]


def test_a_leaked_secret_is_stopped_before_there_is_another(machine: Machine) -> None:
    stopped = machine.typed("credential", "rotate", "weather", "--compromised", "--no-successor")
    without = states(machine)
    machine.typed("credential", "rotate", "weather", given=NEW)

    assert "nothing of weather is in use any more" in stopped.err
    assert (without, states(machine)) == (["revoked"], ["revoked", "active"])


def test_a_schedule_says_when_a_secret_is_due_and_goes_again(machine: Machine) -> None:
    machine.typed("credential", "rotate", "weather", "--schedule", "90d", "--hook", "https://hook.example/rotate")
    scheduled = machine.json("credential", "rotation", "weather")["schedule"]
    listed = machine.typed("credential", "list").out
    machine.typed("credential", "rotate", "weather", "--schedule", "off")

    assert (scheduled["every_seconds"], scheduled["remind_seconds"]) == (90 * 86_400, 9 * 86_400)
    assert scheduled["hook"] == {"kind": "http", "url": "https://hook.example/rotate"}
    assert "DUE" in listed
    assert "0 h" in listed
    assert machine.json("credential", "rotation", "weather")["schedule"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--canary", "10%"), "--canary and --canary-for go together"),
        (("--canary", "0%", "--canary-for", "1m"), "from 1% to 99%"),
        (("--canary", "much", "--canary-for", "1m"), "from 1% to 99%"),
        (("--overlap", "soon"), "--overlap is a number of seconds"),
        (("--probe-request", "/v1/me"), "a method and a path"),
        (("--compromised", "--overlap", "1h"), "at once"),
        (("--no-successor",), "--no-successor goes with --compromised"),
        (("--remind", "7d"), "go with --schedule"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_secret_is_asked_for(
    machine: Machine, arguments: tuple[str, ...], says: str
) -> None:
    said = machine.typed("credential", "rotate", "weather", *arguments, given=NEW, status=2)

    assert says in said.err
    assert states(machine) == ["active"]


def test_the_doctor_warns_of_secrets_that_are_due_and_of_schedules_that_rest() -> None:
    fresh = {"name": "fresh", "rotation_due_at": 2_000.0, "rotation": None}
    old = {"name": "old", "rotation_due_at": 999.0, "rotation": None}
    none = {"name": "none", "rotation_due_at": None, "rotation": None}

    assert [check.health for check in ages([fresh, none], now=1_000.0)] == [Health.OK]
    [warning] = ages([fresh, old, none], now=1_000.0)
    assert (warning.health, "old" in warning.found) == (Health.WARNING, True)
    assert list(ages([none], now=1_000.0)) == []
