"""Tenants, clients and trusted issuers, by their commands against a real stack."""

import json
from pathlib import Path

from tests.coatcheck.conftest import Machine
from tests.control_plane.issuing import Provider, SigningKey
from tests.control_plane.workspace import Json


def test_a_tenant_is_made_listed_and_deleted_only_knowingly(machine: Machine) -> None:
    machine.typed("tenant", "add", "acme")
    listed = [each["id"] for each in machine.json("tenant", "list")]
    hesitant = machine.typed("tenant", "delete", "acme", status=1)
    machine.typed("tenant", "delete", "acme", "--with-everything")

    assert "acme" in listed
    assert "--yes" in hesitant.err
    assert "acme" not in [each["id"] for each in machine.json("tenant", "list")]


def test_a_client_gets_a_secret_once_or_registers_its_own_proof(machine: Machine, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [SigningKey("mine").jwk]}))

    with_secret = machine.typed("client", "add", "r1", "--kind", "runtime")
    with_keys = machine.typed("client", "add", "r2", "--kind", "runtime", "--keys-file", str(keys))
    machine.typed("client", "add", "p1", "--kind", "egress_proxy", "--certificate-dns", "proxy.test")
    new = machine.json("client", "change", "r1", "--new-secret")
    listed = {each["id"]: each for each in machine.json("client", "list")}
    table = machine.typed("client", "list")
    for name in ("r1", "r2", "p1"):
        machine.typed("client", "delete", name)

    assert len(with_secret.out.strip()) == 43
    assert with_keys.out == ""
    assert new["client_secret"] != with_secret.out.strip()
    assert (listed["r1"]["proven_by"], listed["r2"]["proven_by"]) == (["client_secret_basic"], ["private_key_jwt"])
    assert listed["p1"]["proofs"]["certificate"]["san_dns"] == "proxy.test"
    assert "private_key_jwt" in table.out
    assert with_secret.out.strip() not in table.out


def test_half_a_proof_is_wrong_usage(machine: Machine) -> None:
    half = machine.typed("client", "add", "x", "--kind", "runtime", "--workload-issuer", "k8s", status=2)
    nothing = machine.typed("client", "change", "x", status=2)
    unreadable = machine.typed("client", "add", "x", "--kind", "runtime", "--keys-file", "/nowhere", status=1)

    assert "come together" in half.err
    assert "nothing to change" in nothing.err
    assert "cannot read" in unreadable.err


def test_an_issuer_is_trusted_tried_shown_and_trusted_no_more(machine: Machine, tmp_path: Path) -> None:
    provider, record = Provider("corp"), tmp_path / "corp.json"
    groups: Json = {"claim": "groups", "map": {"ops": {"role": "platform_admin"}}}
    claims: Json = {"subject": {"claim": "sub"}, "admin": groups, "ignore": ["email"]}
    record.write_text(
        json.dumps(provider.record(tenant="", uses=["session", "admin"], keys=[], claims=claims, name="other"))
    )
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps(provider.key.jwk))

    machine.typed(
        "issuer", "add", "corp", "--file", str(record), "--tenant", "local", "--keys-file", str(keys)
    )  # fmt: skip
    listed = machine.json("issuer", "list")
    shown = machine.typed("issuer", "show", "corp")
    good = machine.typed("issuer", "test", "corp", given=provider.token("alice", groups=["ops"], email="a@x.test"))
    bad = machine.typed("issuer", "test", "corp", given=provider.token("alice", surprise=1), status=1)
    admin = machine.typed("issuer", "test", "corp", "--use", "admin", given=provider.token(groups=["ops"]))
    machine.typed("issuer", "delete", "corp")

    assert [each["name"] for each in listed] == ["corp"]
    assert "always local" in shown.out
    assert "ops → platform_admin" in shown.out
    assert "known and ignored" in good.out
    assert "alice" in good.out
    assert "not in the table: surprise" in bad.err
    assert "platform_admin" in admin.out
    assert machine.json("issuer", "list") == []


def test_a_record_without_sense_is_one_line_that_names_the_field(machine: Machine) -> None:
    refused = machine.typed("issuer", "add", "x", "--issuer", "https://x.test", "--use", "session", status=1)

    assert "claims" in refused.err
    assert len(refused.err.strip().splitlines()) == 1


def test_presets_are_listed(machine: Machine) -> None:
    assert {each["id"] for each in machine.json("issuer", "presets")} >= {"kubernetes", "spiffe", "github_actions"}
