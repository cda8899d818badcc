"""The ring of key-encryption keys as operators see it: over HTTP, with keys in files and in a Vault."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import ControlPlane, private_file
from tests.control_plane.workspace import SECRET, Json, Workspace
from tests.support.fake_vault import FakeVault, serving_vault
from tests.support.processes import wait_for


def keks(plane: ControlPlane) -> list[Json]:
    items: list[Json] = plane.made("GET", "/v1/keks")["items"]
    return items


def rewrapped(plane: ControlPlane) -> Json:
    """The re-wrap, at its end."""
    plane.made("POST", "/v1/keks/rewrap")
    wait_for(lambda: plane.made("GET", "/v1/keks/rewrap")["state"] == "done", timeout_seconds=20)
    return plane.made("GET", "/v1/keks/rewrap")


@pytest.fixture
def in_a_folder(own_control_plane: OwnControlPlane, tmp_path: Path) -> Workspace:
    """With a credential, sealed under the one key of a folder."""
    (tmp_path / "keks").mkdir()
    private_file(tmp_path / "keks" / "1.hex", os.urandom(32).hex())
    workspace = Workspace(own_control_plane(kek_files=(tmp_path / "keks",)), "acme")
    workspace.add_credential()
    workspace.grant()
    return workspace


def test_a_key_is_added_while_it_runs_and_everything_brought_under_it_and_the_old_one_retired(
    in_a_folder: Workspace, tmp_path: Path
) -> None:
    plane, issued = in_a_folder.control_plane, in_a_folder.exchange()
    (old,) = keks(plane)
    private_file(tmp_path / "keks" / "2.hex", os.urandom(32).hex())

    plane.made("POST", "/v1/keks/reload")
    new, still = keks(plane)
    done = rewrapped(plane)
    plane.made("POST", f"/v1/keks/{old['kek_id']}/retire", {})
    (tmp_path / "keks" / "1.hex").unlink()
    plane.made("POST", "/v1/keks/reload")

    assert (new["seals"], still["seals"], still["kek_id"]) == (True, False, old["kek_id"])
    assert (done["unopenable"], done["remaining"], done["rewrapped"]) == (0, 0, done["total"])
    assert [(kek["in_ring"], kek["envelopes"] > 0, kek["retired_at"] is None) for kek in keks(plane)] == [
        (True, True, True),
        (False, False, False),
    ]
    assert in_a_folder.resolve(issued)["secret"] == SECRET
    actions = [event["action"] for event in plane.made("GET", "/v1/audit?limit=1000")["items"]]
    assert [action for action in actions if action.startswith("kek.")] == [
        "kek.add",
        "kek.add",
        "kek.rewrap",
        "kek.retire",
    ]


@pytest.mark.parametrize(
    ("what", "status", "code"),
    [
        ("the one that seals", 422, "invalid_field"),
        ("one with envelopes", 422, "invalid_field"),
        ("nobody", 404, "not_found"),
    ],
)
def test_a_key_that_cannot_retire_is_refused_with_the_reason(
    in_a_folder: Workspace, tmp_path: Path, what: str, status: int, code: str
) -> None:
    plane = in_a_folder.control_plane
    private_file(tmp_path / "keks" / "2.hex", os.urandom(32).hex())
    plane.made("POST", "/v1/keks/reload")
    new, old = keks(plane)
    kek_id = {"the one that seals": new["kek_id"], "one with envelopes": old["kek_id"]}.get(what, "nobody")

    response = plane.admin("POST", f"/v1/keks/{kek_id}/retire", {})

    assert (response.status_code, response.json()["code"]) == (status, code)
    assert response.json()["hint"]


@pytest.mark.parametrize("asked", ["/v1/keks/reload", "/v1/keks/rewrap"])
def test_a_key_file_that_cannot_be_read_is_said_to_whoever_has_it_read(
    in_a_folder: Workspace, tmp_path: Path, asked: str
) -> None:
    plane = in_a_folder.control_plane
    before = keks(plane)
    private_file(tmp_path / "keks" / "2.hex", os.urandom(32).hex())
    (tmp_path / "keks" / "2.hex").chmod(0o644)

    response = plane.admin("POST", asked, {})

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")
    assert "kek_settings_unreadable" in response.json()["hint"]
    assert keks(plane) == before
    assert plane.admin("GET", "/v1/keks/rewrap").status_code == 404


def test_without_any_rewrap_there_is_no_status(in_a_folder: Workspace) -> None:
    assert in_a_folder.control_plane.admin("GET", "/v1/keks/rewrap").status_code == 404


def test_a_ring_that_lacks_a_key_in_use_is_not_ready_and_says_which(
    in_a_folder: Workspace, own_control_plane: OwnControlPlane, tmp_path: Path
) -> None:
    plane = in_a_folder.control_plane
    private_file(tmp_path / "keks" / "2.hex", os.urandom(32).hex())
    plane.made("POST", "/v1/keks/reload")
    new, _old = keks(plane)
    in_a_folder.add_credential("second")
    plane.stop()

    # Our own keys open: it is a credential's key that is missing.
    plane = own_control_plane(kek_files=(tmp_path / "keks" / "1.hex",))
    ready = plane.http.get("/readyz")

    assert (ready.status_code, ready.json()["code"]) == (503, "credential_unavailable")
    assert f"{new['kek_id']} (1)" in ready.json()["detail"]
    missing = {kek["kek_id"]: kek for kek in keks(plane)}[new["kek_id"]]
    assert (missing["in_ring"], missing["place"]) == (False, str(tmp_path / "keks" / "2.hex"))
    assert "2.hex" in missing["problem"]
    assert missing["seals_from"] is None


def test_a_file_of_the_ring_that_cannot_be_read_any_more_is_named(in_a_folder: Workspace, tmp_path: Path) -> None:
    plane, file = in_a_folder.control_plane, tmp_path / "keks" / "1.hex"
    file.chmod(0o644)
    plane.admin("POST", "/v1/keks/reload")

    (kek,) = keks(plane)
    file.chmod(0o600)
    plane.made("POST", "/v1/keks/reload")

    assert kek["problem"] == f"{file} can be read by others; do: chmod 600 {file}"
    assert keks(plane)[0]["problem"] == ""


# --- in a Vault ------------------------------------------------------------------------------------------------------


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[FakeVault]:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "vault-ca.pem")
    with serving_vault(ca) as running:
        running.transit["coatcheck"] = [os.urandom(32)]
        private_file(tmp_path / "vault-token", running.issue_token("transit/"))
        yield running


def settings(vault: FakeVault, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "kek_provider": "vault_transit",
        "kek_files": (),
        "kek_vault_address": vault.url,
        "kek_vault_key": "coatcheck",
        "kek_vault_token_file": folder / "vault-token",
        "outbound_allow": (f"127.0.0.1:{vault.port}",),
        "outbound_ca_files": (folder / "vault-ca.pem",),
    } | more


def test_everything_works_under_a_key_that_never_leaves_its_vault(
    own_control_plane: OwnControlPlane, vault: FakeVault, tmp_path: Path
) -> None:
    workspace = Workspace(own_control_plane(**settings(vault, tmp_path)), "acme")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()

    first = workspace.resolve(issued)["secret"]
    workspace.rotate("a-rotated-key")
    second = workspace.resolve(issued)["secret"]
    workspace.patch_credential({"destinations": [{"url": "https://api.example.com/v1"}]}).raise_for_status()

    assert (first, second) == (SECRET, "a-rotated-key")
    assert workspace.resolve(workspace.exchange())["secret"] == "a-rotated-key"
    (kek,) = keks(workspace.control_plane)
    assert (kek["provider"], kek["seals"], kek["envelopes"] > 3) == ("Vault transit", True, True)
    assert (kek["place"], kek["problem"]) == (f"transit/keys/coatcheck at {vault.url}", "")
    vault.transit.clear()
    assert "it cannot be used now" in keks(workspace.control_plane)[0]["problem"]


def test_a_ring_moves_from_files_into_a_vault(
    in_a_folder: Workspace, own_control_plane: OwnControlPlane, vault: FakeVault, tmp_path: Path
) -> None:
    issued = in_a_folder.exchange()
    in_a_folder.control_plane.stop()

    plane = own_control_plane(**settings(vault, tmp_path, kek_files=(tmp_path / "keks",)))
    in_a_folder.control_plane = plane
    done = rewrapped(plane)
    plane.stop()
    plane = in_a_folder.control_plane = own_control_plane(**settings(vault, tmp_path))

    assert (done["unopenable"], done["remaining"]) == (0, 0)
    assert plane.http.get("/readyz").status_code == 200
    assert in_a_folder.resolve(issued)["secret"] == SECRET


def test_a_start_while_the_vault_is_away_is_not_ready_says_why_and_recovers_by_itself(
    own_control_plane: OwnControlPlane, vault: FakeVault, tmp_path: Path
) -> None:
    workspace = Workspace(own_control_plane(**settings(vault, tmp_path)), "acme")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()
    workspace.control_plane.stop()
    vault.sealed = True

    plane = workspace.control_plane = own_control_plane(**settings(vault, tmp_path))
    ready, refused = plane.http.get("/readyz"), workspace.resolve(issued)
    vault.sealed = False
    plane.clock.advance(3)

    assert (ready.status_code, ready.json()["code"]) == (503, "credential_unavailable")
    assert "Vault transit" in ready.json()["detail"]
    assert refused["code"] == "credential_unavailable"
    assert plane.http.get("/readyz").status_code == 200
    assert workspace.resolve(issued)["secret"] == SECRET


def test_a_vault_that_goes_away_is_bridged_for_a_while_and_then_refused_with_its_name(
    own_control_plane: OwnControlPlane, vault: FakeVault, tmp_path: Path
) -> None:
    given = settings(vault, tmp_path, kek_cache_seconds=60, kek_max_stale_seconds=120)
    workspace = Workspace(own_control_plane(**given), "acme")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()
    workspace.resolve(issued)
    vault.sealed = True

    workspace.control_plane.clock.advance(100)
    bridged = workspace.resolve(issued)
    workspace.control_plane.clock.advance(100)
    refused = workspace.resolve(issued)
    vault.sealed = False
    workspace.control_plane.clock.advance(3)

    assert bridged["secret"] == SECRET
    assert (refused["kind"], refused["code"]) == ("refused", "credential_unavailable")
    assert "Vault transit" in refused["detail"]
    assert workspace.resolve(issued)["secret"] == SECRET
