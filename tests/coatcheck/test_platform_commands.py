"""Who can use what, own keys and registered proxies, by their commands against a real stack."""

from tests.coatcheck.conftest import Machine
from tests.support.processes import wait_for


def test_access_is_listed_and_a_request_is_tried_without_being_made(machine: Machine) -> None:
    before = len(machine.upstream.requests)

    listed = machine.json("access", "list", "--subject", "local")
    table = machine.typed("access", "list")
    allowed = machine.typed("access", "check", "GET", f"{machine.upstream.url}/v1", "--credential", "weather")
    bare = machine.typed("access", "check", "GET", f"{machine.upstream.url}/v1")
    refused = machine.typed("access", "check", "get", "https://nobody.example/", status=1)
    unknown = machine.typed("access", "check", "GET", "nobody.example", status=1)
    asked = ("access", "check", "GET", f"{machine.upstream.url}/v1", "--credential", "weather")
    elsewhere = machine.typed(*asked, "--header", "X-Other: {secret}", status=1)
    websocket = machine.typed(*asked, "--websocket", status=1)
    twice = machine.typed(*asked, "--header", "X-Other: {secret}", "--query", "key", status=2)

    assert "weather" in [each["credential"] for each in listed]
    assert "weather" in table.out
    assert "allowed\n" in allowed.out
    assert "allowed, without any credential" in bare.out
    assert "destination_denied" in refused.out
    assert "coatcheck allow add nobody.example" in refused.out
    assert "url" in unknown.err
    assert "placement_denied" in elsewhere.out
    assert "seen in the header x-other" in elsewhere.out
    assert "protocol_denied" in websocket.out
    assert "one place" in twice.err
    assert len(machine.upstream.requests) == before


def test_keys_are_listed_and_turned(machine: Machine) -> None:
    before = machine.json("key", "list")
    turned = machine.json("key", "rotate", "tag")
    after = {each["id"]: each["state"] for each in machine.json("key", "list")}
    wrong = machine.typed("key", "rotate", "everything", status=2)

    assert {each["purpose"] for each in before} == {"signing", "tag", "audit"}
    assert after[turned["id"]] == "published"
    assert [after[each["id"]] for each in before] == ["in_use"] * len(before)
    assert "signing, tag, audit" in wrong.err
    assert "published" in machine.typed("key", "list").out


def test_the_stacks_own_proxy_is_registered_and_comes_back_when_it_is_taken_out(machine: Machine) -> None:
    wait_for(lambda: machine.json("injector", "list"))
    table = machine.typed("injector", "list")

    machine.typed("injector", "remove", "local-proxy")

    unknown = machine.typed("injector", "remove", "nobody", status=1)
    assert "heard" in table.out
    assert "no such injector" in unknown.err
    assert wait_for(lambda: machine.json("injector", "list"), timeout_seconds=20)
