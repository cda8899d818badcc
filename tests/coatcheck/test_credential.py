"""Credentials, grants, allow rules, placeholders and the trail, by their commands against a real stack."""

import json
from pathlib import Path

import pytest

from tests.coatcheck.conftest import Machine
from tests.support.local_stack import LocalStack


def test_a_credential_is_stored_listed_shown_rotated_and_deleted(machine: Machine, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("sk-second\n")
    machine.typed(
        "credential", "add", "many", "--destination", "https://a.example", "--destination", "https://b.example:8443/v1",
        "--header", "X-Api-Key: {secret}", "--header", "Authorization: token {secret}", "--basic", "x",
        "--query", "key", "--env", "MANY", "--env", "MANY_TOO", given="sk-first\n",
    )  # fmt: skip
    listed = {each["name"]: each for each in machine.json("credential", "list")}
    machine.typed("credential", "rotate", "many", "--secret-file", str(key_file))
    shown = machine.json("credential", "show", "many")
    machine.typed("credential", "delete", "many")
    missing = machine.typed("credential", "show", "many", status=1)

    assert [each["url"] for each in listed["many"]["destinations"]] == [
        "https://a.example",
        "https://b.example:8443/v1",
    ]
    assert listed["many"]["placements"] == [
        {"kind": "header", "name": "x-api-key", "format": "{secret}"},
        {"kind": "header", "name": "authorization", "format": "token {secret}"},
        {"kind": "basic", "username": "x"},
        {"kind": "query", "parameter": "key"},
    ]
    assert listed["many"]["variables"] == ["MANY", "MANY_TOO"]
    assert shown["current_version"] == 2
    assert "sk-" not in json.dumps([listed, shown])
    assert "credential_not_found" in missing.err


def test_the_defaults_are_bearer_and_a_variable_of_the_credentials_name(machine: Machine) -> None:
    machine.typed("credential", "add", "my-service", "--destination", "https://a.example", given="k")

    shown = machine.json("credential", "show", "my-service")

    assert shown["placements"] == [{"kind": "header", "name": "authorization", "format": "Bearer {secret}"}]
    assert shown["variables"] == ["MY_SERVICE_API_KEY"]


def test_a_preset_fills_in_what_was_left_out(machine: Machine) -> None:
    machine.typed("credential", "add", "work", "--preset", "anthropic", given="sk-ant-key")

    shown = machine.json("credential", "show", "work")

    assert shown["preset"] == "anthropic"
    assert shown["variables"] == ["ANTHROPIC_API_KEY"]
    assert shown["destinations"][0]["url"] == "https://api.anthropic.com"


def test_adding_a_credential_grants_it_to_the_local_subject_and_says_so(machine: Machine) -> None:
    added = machine.typed("credential", "add", "mine", "--destination", "https://a.example", given="k")

    (grant,) = [each for each in machine.json("grant", "list") if each["credential"] == "mine"]
    assert grant["subject"] == "local"
    assert f"coatcheck grant delete {grant['id']}" in added.err


@pytest.mark.parametrize(
    "given, says", [("", "holds no secret"), ("a\nb", "control character"), (" a", "white space"), ("\n", "empty")]
)
def test_a_secret_that_cannot_be_one_is_refused_and_not_quoted(machine: Machine, given: str, says: str) -> None:
    refused = machine.typed("credential", "add", "odd", "--destination", "https://a.example", given=given, status=1)

    assert says in refused.err


def test_an_unknown_preset_is_refused_with_the_one_that_was_meant(machine: Machine) -> None:
    refused = machine.typed("credential", "add", "x", "--preset", "antropic", given="k", status=1)

    assert "did you mean 'anthropic'?" in refused.err


def test_grants_are_added_listed_and_withdrawn(machine: Machine) -> None:
    grant = machine.json(
        "grant", "add", "weather", "--subject", "alice", "--client", "local-runtime", "--method", "get",
        "--path", "/v1", "--until", "8h",
    )  # fmt: skip
    listed = [each["id"] for each in machine.json("grant", "list")]
    machine.typed("grant", "delete", grant["id"])
    left = [each["id"] for each in machine.json("grant", "list")]

    assert (grant["subject"], grant["methods"], grant["path_prefixes"]) == ("alice", ["GET"], ["/v1"])
    assert grant["id"] in listed
    assert grant["id"] not in left


def test_hosts_are_allowed_listed_and_no_longer_allowed(machine: Machine) -> None:
    rule = machine.json("allow", "add", "Mirror.Test:8443", "--method", "get")
    listed = [each["host"] for each in machine.json("allow", "list")]
    machine.typed("allow", "delete", "mirror.test:8443")

    assert (rule["host"], rule["port"], rule["methods"]) == ("mirror.test", 8443, ["GET"])
    assert "mirror.test" in listed
    assert machine.json("allow", "list") == []


def test_an_exchange_prints_the_whole_answer(machine: Machine) -> None:
    answer = json.loads(machine.typed("exchange", "--audience", "weather").out)

    assert answer["upstream_credential"]["mode"] == "placeholder"
    assert "coatchk1" in answer["access_token"]
    assert "coatprx1" in answer["proxy_credential"]
    assert answer["base_url"].endswith("/weather")


def test_an_exchange_without_a_grant_is_refused_as_if_there_were_no_credential(machine: Machine) -> None:
    refused = machine.typed("exchange", "--audience", "weather", "--subject", "stranger", status=1)

    assert "credential_not_found" in refused.err


def test_placeholders_are_issued_listed_and_revoked(machine: Machine) -> None:
    issued = machine.json("placeholder", "issue", "--subject", "local", "--audience", "weather", "--ttl", "10m")
    listed = {each["id"]: each for each in machine.json("placeholder", "list")}
    machine.typed("placeholder", "revoke", issued["id"])
    after = {each["id"]: each for each in machine.json("placeholder", "list")}

    assert listed[issued["id"]]["revoked_at"] is None
    assert after[issued["id"]]["revoked_at"] is not None
    assert issued["access_token"] not in json.dumps([listed, after])


def test_the_trail_is_shown_exported_and_verified(machine: Machine) -> None:
    shown = machine.json("audit", "tail", "-n", "3")
    exported = [json.loads(line) for line in machine.typed("audit", "export", "--tenant", "local").out.splitlines()]
    verified = machine.json("audit", "verify")

    assert len(shown) == 3
    positions = [each["position"] for each in exported if each["kind"] == "event"]
    assert positions == list(range(1, len(positions) + 1))
    assert verified["whole"] is True
    assert machine.secret not in json.dumps(exported)


def test_a_refused_exchange_is_explained(machine: Machine) -> None:
    machine.typed("exchange", "--audience", "nothing-here", status=1)
    refused = [each for each in machine.json("audit", "tail") if each.get("code") == "credential_not_found"]

    explained = machine.typed("why", refused[-1]["request_id"]).out

    assert "credential_not_found" in explained
    assert "expected" in explained
    assert "what to do" in explained


def test_a_request_nobody_knows_cannot_be_explained(machine: Machine) -> None:
    refused = machine.typed("why", "req_nobody", status=1)

    assert "no request req_nobody" in refused.err


def test_the_exported_ca_is_ours_and_the_bundle_holds_the_systems_roots_too(shared_stack: LocalStack) -> None:
    own = shared_stack.coatcheck("ca", "export").stdout
    with_roots = shared_stack.coatcheck("ca", "export", "--bundle").stdout

    assert own == (shared_stack.home / "ca" / "ca.pem").read_text()
    assert own.strip() in with_roots
    assert with_roots.count("BEGIN CERTIFICATE") > own.count("BEGIN CERTIFICATE")
    assert "PRIVATE KEY" not in own + with_roots


def test_doctor_finds_nothing_wrong_with_a_running_stack(machine: Machine) -> None:
    checks = {each["link"]: each for each in machine.json("doctor")}

    assert {each["health"] for each in checks.values()} <= {"ok", "warning"}
    assert {"state folder", "secret files", "key-encryption key", "interception CA", "local stack", "control plane",
            "egress proxy", "event stream", "audit spool", "credentials", "sandbox"} <= set(checks)  # fmt: skip


def test_doctor_names_what_is_open_to_others_and_fails(machine: Machine) -> None:
    token = machine.stack.home / "admin-token"
    token.chmod(0o644)
    try:
        failed = machine.typed("doctor", status=1)
    finally:
        token.chmod(0o600)

    assert "admin-token" in failed.out
    assert "secret files" in failed.err


def test_a_probe_and_direct_mode_are_declared_and_changed_and_what_reaches_more_needs_the_secret(
    machine: Machine, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a-key-of-changes-0123456789")
    given = ("--secret-file", str(secret))
    machine.json("credential", "add", "changing", "--destination", "https://changing.example", *given)

    refused = machine.typed("credential", "change", "changing", "--probe-request", "GET /v1/me", status=1)
    probed = machine.json("credential", "change", "changing", "--probe-request", "GET /v1/me", *given)
    shown = machine.typed("credential", "show", "changing")
    direct = machine.json("credential", "change", "changing", "--allow-direct", "--no-probe", *given)
    narrower = machine.json("credential", "change", "changing", "--no-allow-direct", "--required", "--env", "OTHER_KEY")
    nothing = machine.typed("credential", "change", "changing", status=2)
    added = machine.json(
        *("credential", "add", "direct", "--destination", "https://direct.example", "--allow-direct"),
        *("--probe-request", "HEAD /", *given),
    )

    assert "secret" in refused.err
    assert probed["probe"] == {"method": "GET", "path": "/v1/me"}
    assert "GET /v1/me" in shown.out
    assert (direct["allow_direct"], direct["probe"]) == (True, None)
    assert (narrower["allow_direct"], narrower["credential_required"]) == (False, True)
    assert narrower["variables"] == ["OTHER_KEY"]
    assert "name what to change" in nothing.err
    assert (added["allow_direct"], added["probe"]) == (True, {"method": "HEAD", "path": "/"})
