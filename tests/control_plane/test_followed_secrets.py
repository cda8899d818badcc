"""A secret in a source, over HTTP: read, followed when it changes, bridged as long as somebody said, then refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import ControlPlane, private_file
from tests.control_plane.workspace import HOST, Json, Workspace
from tests.support.fake_vault import FakeVault, serving_vault

SOURCES = "control_plane/sources.py"
REFERENCE = {"source": "vault", "name": "key"}


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[FakeVault]:
    with serving_vault(authority(tmp_path)) as running:
        running.kv2["secret/acme/key"] = {"value": "first-value"}
        yield running


def authority(folder: Path) -> trustme.CA:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(folder / "vault-ca.pem")
    return ca


@pytest.fixture
def plane(own_control_plane: OwnControlPlane, tmp_path: Path, vault: FakeVault) -> ControlPlane:
    (tmp_path / "auth").mkdir()
    private_file(tmp_path / "auth" / "token", vault.issue_token("secret/"))
    (tmp_path / "files" / "acme").mkdir(parents=True)
    private_file(tmp_path / "files" / "acme" / "key", "from-a-file\n")
    private_file(tmp_path / "files" / "outside", "of-the-platform")
    return own_control_plane(
        outbound_allow=(f"127.0.0.1:{vault.port}",),
        outbound_ca_files=(tmp_path / "vault-ca.pem",),
        sources_auth_folder=tmp_path / "auth",
        sources_folder=tmp_path / "files",
    )


@pytest.fixture
def acme(plane: ControlPlane, vault: FakeVault) -> Workspace:
    put_vault(plane, vault)
    return Workspace(plane, "acme")


def put_vault(plane: ControlPlane, vault: FakeVault, **fields: object) -> Json:
    auth = {"method": "token", "token_file": "token"}
    body = {"kind": "vault", "path_template": "{tenant}/{name}", "vault": {"address": vault.url, "auth": auth}}
    return plane.made("PUT", "/v1/sources/vault", body | fields)


def followed(workspace: Workspace, **fields: object) -> Json:
    """A placeholder of a credential whose secret is in the vault."""
    credential: Json = {"name": "example", "destinations": [{"url": f"https://{HOST}"}], "secret_source": REFERENCE}
    response = workspace.post_credential(credential | fields)
    assert response.is_success, response.text
    workspace.grant()
    return workspace.exchange()


def test_a_secret_is_read_from_its_source(acme: Workspace) -> None:
    issued = followed(acme)

    assert acme.resolve(issued)["secret"] == "first-value"
    assert acme.credential()["secret_source"] == REFERENCE
    assert "first-value" not in str(acme.credential())


def test_a_value_that_changes_is_a_new_version_that_proxies_are_told_of(acme: Workspace, vault: FakeVault) -> None:
    issued = followed(acme)
    acme.resolve(issued)
    vault.kv2["secret/acme/key"] = {"value": "second-value"}
    still_fresh = acme.resolve(issued)["secret"]

    acme.control_plane.clock.advance(61)
    answer = acme.resolve(issued)

    assert (still_fresh, answer["secret"], answer["binding"]["version"]) == ("first-value", "second-value", 2)
    assert acme.credential()["current_version"] == 2
    assert [event["action"] for event in acme.audit()].count("credential.source_change") == 1
    changes = acme.control_plane.look("SELECT kind FROM outbox ORDER BY sequence DESC LIMIT 1")
    assert changes == [("credential",)]


def test_proxies_are_told_until_when_a_value_is_good(acme: Workspace) -> None:
    issued = followed(acme)

    binding = acme.resolve(issued)["binding"]

    assert 0 < binding["secret_expires_at"] - acme.control_plane.clock() <= 60


@pytest.mark.guards(SOURCES, "and self._clock() < _last_moment(kept, known.confirmed_at)", "and True")
def test_a_source_that_does_not_answer_is_bridged_to_the_bound_and_not_beyond(
    acme: Workspace, vault: FakeVault
) -> None:
    issued, clock = followed(acme, max_stale_seconds=300), acme.control_plane.clock
    acme.resolve(issued)
    vault.sealed = True

    clock.advance(200)
    bridged = acme.resolve(issued)
    clock.advance(200)
    refused = acme.resolve(issued)
    vault.sealed = False
    clock.advance(3)
    back = acme.resolve(issued)

    assert bridged["secret"] == "first-value"
    assert bridged["binding"]["secret_expires_at"] <= clock() + 200
    assert (refused["kind"], refused["code"]) == ("refused", "credential_unavailable")
    assert "source 'vault'" in refused["detail"]
    assert "first-value" not in str(refused)
    assert back["secret"] == "first-value"


def test_without_a_bound_a_source_that_does_not_answer_is_not_bridged_at_all(acme: Workspace, vault: FakeVault) -> None:
    issued = followed(acme)
    acme.resolve(issued)
    vault.sealed = True

    acme.control_plane.clock.advance(61)

    assert acme.resolve(issued)["code"] == "credential_unavailable"


@pytest.mark.guards(SOURCES, "and known.failure.failure is SourceFailure.UNAVAILABLE", "and True")
@pytest.mark.parametrize("how", ["deleted", "denied", "unusable"])
def test_a_source_that_says_no_is_not_bridged(acme: Workspace, vault: FakeVault, how: str) -> None:
    issued = followed(acme, max_stale_seconds=3600)
    acme.resolve(issued)
    if how == "deleted":
        vault.kv2["secret/acme/key"] = None
    elif how == "denied":
        vault.tokens.clear()
    else:
        vault.kv2["secret/acme/key"] = {"value": "two\r\nlines: evil"}

    acme.control_plane.clock.advance(61)
    answer = acme.resolve(issued)

    assert answer["code"] == "credential_unavailable"
    assert "first-value" not in str(answer)
    assert "evil" not in str(answer)


@pytest.mark.parametrize("answer", [(500, b""), (200, b""), (200, b'{"data": 1}'), (200, b"<html>")])
def test_an_answer_that_is_none_is_never_taken_for_a_secret(
    acme: Workspace, vault: FakeVault, answer: tuple[int, bytes]
) -> None:
    issued = followed(acme)
    acme.resolve(issued)
    vault.answer_instead = (*answer, "application/json")

    acme.control_plane.clock.advance(61)
    refused = acme.resolve(issued)

    assert (refused["kind"], refused["code"]) == ("refused", "credential_unavailable")
    assert acme.credential()["current_version"] == 1


def test_a_process_that_starts_while_the_source_is_away_serves_nothing_from_it(
    acme: Workspace, vault: FakeVault, own_control_plane: OwnControlPlane, tmp_path: Path
) -> None:
    issued = followed(acme, max_stale_seconds=3600)
    acme.resolve(issued)
    settings = acme.control_plane.settings
    acme.control_plane.stop()
    vault.sealed = True

    acme.control_plane = own_control_plane(
        outbound_allow=settings.outbound_allow,
        outbound_ca_files=settings.outbound_ca_files,
        sources_auth_folder=settings.sources_auth_folder,
    )
    cold = acme.resolve(issued)
    vault.sealed = False
    acme.control_plane.clock.advance(3)

    assert cold["code"] == "credential_unavailable"
    assert acme.resolve(issued)["secret"] == "first-value"


def test_many_requests_ask_the_source_once(acme: Workspace, vault: FakeVault) -> None:
    issued = followed(acme)
    for _ in range(5):
        acme.resolve(issued)

    assert len([path for _, path in vault.asked if path.endswith("/acme/key")]) <= 2


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_followed_without_its_line_end(acme: Workspace) -> None:
    body = {"kind": "file", "path_template": "{tenant}/{name}", "ttl_seconds": 1}
    acme.control_plane.made("PUT", "/v1/sources/files", body)
    issued = followed(acme, secret_source={"source": "files", "name": "key"})
    before = acme.resolve(issued)["secret"]

    private_file(acme.control_plane.folder / "files" / "acme" / "key", "changed\r\n")
    acme.control_plane.clock.advance(2)

    assert (before, acme.resolve(issued)["secret"]) == ("from-a-file", "changed")


@pytest.mark.parametrize("name", ["../outside", "..", "a/b", "", "a b", "/etc/hostname"])
def test_a_name_that_leads_elsewhere_is_refused_by_its_field(acme: Workspace, name: str) -> None:
    reference = {"source": "vault", "name": name}
    response = acme.post_credential(
        {"name": "x", "destinations": [{"url": f"https://{HOST}"}], "secret_source": reference}
    )

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")
    assert "secret_source.name" in response.json()["detail"]


# --- what administrators may do --------------------------------------------------------------------------------------


def test_a_credential_has_a_secret_or_a_source_and_not_both(acme: Workspace) -> None:
    body: Json = {"name": "x", "destinations": [{"url": f"https://{HOST}"}]}

    for fields in ({}, {"secret": "s", "secret_source": REFERENCE}):
        response = acme.post_credential(body | fields)
        assert (response.status_code, response.json()["code"]) == (422, "invalid_field"), response.text


def test_a_reference_that_means_nothing_is_refused_when_it_is_made(acme: Workspace) -> None:
    body: Json = {"name": "x", "destinations": [{"url": f"https://{HOST}"}]}

    unknown = acme.post_credential(body | {"secret_source": {"source": "nobody", "name": "key"}})
    missing = acme.post_credential(body | {"secret_source": {"source": "vault", "name": "missing"}})

    assert (unknown.status_code, unknown.json()["code"]) == (422, "invalid_field")
    assert (missing.status_code, missing.json()["code"]) == (503, "credential_unavailable")
    assert "has no such secret" in missing.json()["detail"]


def test_a_tenant_that_is_not_listed_cannot_be_given_a_source(acme: Workspace, vault: FakeVault) -> None:
    put_vault(acme.control_plane, vault, tenants=["evil"])

    response = acme.post_credential(
        {"name": "x", "destinations": [{"url": f"https://{HOST}"}], "secret_source": REFERENCE}
    )

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")


def test_wider_needs_the_source_named_again_and_narrower_does_not(acme: Workspace) -> None:
    followed(acme, destinations=[{"url": f"https://{HOST}"}, {"url": "https://two.example"}])
    wider = {"destinations": [{"url": f"https://{HOST}"}, {"url": "https://three.example"}]}

    refused = acme.patch_credential(wider)
    narrowed = acme.patch_credential({"destinations": [{"url": f"https://{HOST}"}]})
    widened = acme.patch_credential(wider | {"secret_source": REFERENCE})

    assert refused.json()["code"] == "secret_required"
    assert (narrowed.status_code, widened.status_code) == (200, 200)
    assert acme.resolve(acme.exchange())["secret"] == "first-value"


def test_a_secret_that_is_submitted_is_read_from_nowhere_any_more(acme: Workspace, vault: FakeVault) -> None:
    followed(acme)

    acme.patch_credential({"secret": "submitted-by-hand"}).raise_for_status()
    vault.sealed = True
    acme.control_plane.clock.advance(61)

    assert acme.credential()["secret_source"] is None
    assert acme.resolve(acme.exchange())["secret"] == "submitted-by-hand"


def test_a_secret_in_a_source_is_not_rotated_here(acme: Workspace) -> None:
    followed(acme)

    response = acme.control_plane.admin("POST", acme.path("credentials/example/rotate"), {"secret": "new"})

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")
    assert "source" in response.json()["detail"]


def test_a_source_in_use_does_not_go(acme: Workspace) -> None:
    followed(acme)

    refused = acme.control_plane.admin("DELETE", "/v1/sources/vault")
    acme.control_plane.made("DELETE", acme.path("credentials/example"))
    gone = acme.control_plane.admin("DELETE", "/v1/sources/vault")

    assert (refused.status_code, refused.json()["code"], gone.status_code) == (422, "invalid_field", 204)


EDITS = {
    "its address": ("settings", """{"address": "https://evil.example", "auth": {"method": "token"}}"""),
    "its template": ("path_template", "evil/{tenant}/{name}"),
    "its tenants": ("tenants", '["acme", "evil"]'),
    "its time": ("ttl_seconds", 86_400.0),
}


@pytest.mark.guards(SOURCES, "custody.open(source.seal, aad=source_aad(source))", "pass")
@pytest.mark.parametrize(("column", "value"), EDITS.values(), ids=EDITS.keys())
def test_a_source_edited_in_the_database_is_used_by_nobody(acme: Workspace, column: str, value: object) -> None:
    issued = followed(acme)
    acme.control_plane.edit(f"UPDATE sources SET {column} = ?", value)

    acme.control_plane.clock.advance(61)
    answer = acme.resolve(issued)
    tried = acme.control_plane.made("POST", "/v1/sources/vault/test", {"tenant": "acme", "name": "key"})

    assert answer["code"] == "credential_unavailable"
    assert (tried["readable"], tried["failure"]) == (False, "edited")


def test_a_reference_edited_in_the_database_does_not_open(acme: Workspace, vault: FakeVault) -> None:
    vault.kv2["secret/acme/other"] = {"value": "another-secret"}
    issued = followed(acme)
    acme.control_plane.edit("""UPDATE credentials SET secret_source = '{"source": "vault", "name": "other"}'""")

    acme.control_plane.clock.advance(61)

    assert acme.resolve(issued)["code"] == "credential_unavailable"


def test_trying_a_source_out_tells_how_it_went_and_never_what_was_there(acme: Workspace, vault: FakeVault) -> None:
    def tried(name: str) -> Json:
        return acme.control_plane.made("POST", "/v1/sources/vault/test", {"tenant": "acme", "name": name})

    good, missing = tried("key"), tried("missing")
    vault.sealed = True
    sealed = tried("key")

    assert (good["readable"], missing["failure"], sealed["failure"]) == (True, "not_found", "unavailable")
    assert "first-value" not in str((good, missing, sealed))


def test_what_a_source_is_asked_with_shows_nowhere(acme: Workspace, vault: FakeVault) -> None:
    followed(acme)

    listed = acme.control_plane.admin("GET", "/v1/sources").text

    assert not any(token in listed for token in vault.tokens)
    assert '"token_file":"token"' in listed
