"""Somebody edits the database, SQLite or PostgreSQL: what they moved or changed does not open, all else works on."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.control_plane.databases import new_database
from tests.control_plane.serving import PROXY, ControlPlane, control_plane_in
from tests.control_plane.workspace import ENDPOINT, HOST, SECRET, Json, Workspace

VICTIM_SECRET, ATTACKER_SECRET = "victims-key-0123456789", "attackers-key-0123456789"


WRAPPED, NONCE = 1 + 12 + 32 + 16, 12
"""An envelope: format and wrapped data key, then a nonce, then the ciphertext."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return asyncio.run(new_database(request.param, request, tmp_path_factory.mktemp("moved-database")))


@pytest.fixture(scope="module")
def control_plane(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """In the place of the one that all tests share."""
    folder = tmp_path_factory.mktemp("moved")
    if database_url.startswith("sqlite"):
        database_url = f"sqlite+aiosqlite:///{folder / 'control-plane.sqlite'}"
    with control_plane_in(folder, database_url=database_url) as serving:
        yield serving


def envelope_of(workspace: Workspace, credential: Json) -> bytes:
    (row,) = workspace.control_plane.look(
        "SELECT envelope FROM credential_versions WHERE credential_id = ? AND version = ?",
        credential["id"],
        credential["current_version"],
    )
    envelope: bytes = row[0]
    return envelope


def set_envelope(workspace: Workspace, credential: Json, envelope: bytes) -> None:
    changed = workspace.control_plane.edit(
        "UPDATE credential_versions SET envelope = ? WHERE credential_id = ? AND version = ?",
        envelope,
        credential["id"],
        credential["current_version"],
    )
    assert changed == 1


@pytest.fixture
def attacker(granted: Workspace) -> Workspace:
    """A tenant with a credential of its own, and a hand in the database."""
    granted.control_plane.made("DELETE", granted.path("credentials/example"))
    granted.add_credential(secret=ATTACKER_SECRET)
    granted.grant()
    return granted


@pytest.fixture
def victim(other_workspace: Workspace) -> Workspace:
    other_workspace.add_credential(secret=VICTIM_SECRET)
    other_workspace.grant()
    return other_workspace


def assert_unavailable(answer: Json, *secrets: str) -> None:
    assert (answer["kind"], answer["code"]) == ("refused", "credential_unavailable")
    assert not any(secret in str(answer) for secret in secrets)


def test_another_tenants_ciphertext_does_not_open(attacker: Workspace, victim: Workspace) -> None:
    issued = attacker.exchange()
    set_envelope(attacker, attacker.credential(), envelope_of(victim, victim.credential()))

    answer = attacker.resolve(issued)

    assert_unavailable(answer, VICTIM_SECRET, ATTACKER_SECRET)
    assert victim.resolve(victim.exchange())["secret"] == VICTIM_SECRET


def test_two_credentials_of_one_tenant_cannot_be_swapped(attacker: Workspace) -> None:
    first = attacker.credential()
    second = attacker.add_credential("second", secret="second-key-0123456789")
    attacker.grant("second")
    one, two = envelope_of(attacker, first), envelope_of(attacker, second)
    set_envelope(attacker, first, two)
    set_envelope(attacker, second, one)

    assert_unavailable(attacker.resolve(attacker.exchange()), ATTACKER_SECRET, "second-key")
    assert_unavailable(attacker.resolve(attacker.exchange(audience="second")), ATTACKER_SECRET, "second-key")


def test_an_older_versions_ciphertext_does_not_open_as_the_newer_one(attacker: Workspace) -> None:
    old = envelope_of(attacker, attacker.credential())
    attacker.rotate("newer-key-0123456789")
    set_envelope(attacker, attacker.credential(), old)

    assert_unavailable(attacker.resolve(attacker.exchange()), ATTACKER_SECRET, "newer-key")


def test_a_wrapped_data_key_moved_alone_does_not_open(attacker: Workspace, victim: Workspace) -> None:
    mine = envelope_of(attacker, attacker.credential())
    theirs = envelope_of(victim, victim.credential())
    set_envelope(attacker, attacker.credential(), mine[:WRAPPED] + theirs[WRAPPED:])

    assert_unavailable(attacker.resolve(attacker.exchange()), VICTIM_SECRET, ATTACKER_SECRET)


@pytest.mark.parametrize("part", ["nonce", "ciphertext", "nonce and ciphertext", "wrapped data key"])
def test_no_part_of_another_tenants_envelope_works_in_the_place_of_ours(
    attacker: Workspace, victim: Workspace, part: str
) -> None:
    mine = envelope_of(attacker, attacker.credential())
    theirs = envelope_of(victim, victim.credential())
    start, end = {
        "nonce": (WRAPPED, WRAPPED + NONCE),
        "ciphertext": (WRAPPED + NONCE, None),
        "nonce and ciphertext": (WRAPPED, None),
        "wrapped data key": (0, WRAPPED),
    }[part]
    set_envelope(attacker, attacker.credential(), mine[:start] + theirs[start:end] + (mine[end:] if end else b""))

    assert_unavailable(attacker.resolve(attacker.exchange()), VICTIM_SECRET, ATTACKER_SECRET)
    assert victim.resolve(victim.exchange())["secret"] == VICTIM_SECRET


def test_a_use_that_fails_is_in_the_audit_trail_and_no_key_or_secret_in_the_log(
    attacker: Workspace, victim: Workspace, capfd: pytest.CaptureFixture[str]
) -> None:
    issued = attacker.exchange()
    set_envelope(attacker, attacker.credential(), envelope_of(victim, victim.credential()))

    answer = attacker.resolve(issued)
    event = {"event_id": f"ev_{attacker.credential()['id']}", "at": 0, "request_id": "req_moved", "action": "swap"}
    reported = {"events": [event | {"tenant": attacker.tenant, "code": answer["code"]}]}
    attacker.control_plane.http.post("/internal/audit", json=reported, auth=PROXY).raise_for_status()

    logged = "".join(capfd.readouterr())
    kek = (attacker.control_plane.folder / "kek.hex").read_text().strip()
    assert "envelope_does_not_open" in logged
    assert not any(text in logged for text in (kek, VICTIM_SECRET, ATTACKER_SECRET, issued["access_token"]))
    (recorded,) = attacker.audit(request_id="req_moved")
    assert recorded["code"] == "credential_unavailable"


@pytest.mark.parametrize("place", [0, 1, 20, WRAPPED - 1, WRAPPED, WRAPPED + NONCE, -1])
def test_one_flipped_bit_makes_that_credential_unavailable_and_no_other(attacker: Workspace, place: int) -> None:
    attacker.add_credential("second", secret="second-key-0123456789")
    attacker.grant("second")
    envelope = bytearray(envelope_of(attacker, attacker.credential()))
    envelope[place] ^= 1
    set_envelope(attacker, attacker.credential(), bytes(envelope))

    assert_unavailable(attacker.resolve(attacker.exchange()), ATTACKER_SECRET)
    assert attacker.resolve(attacker.exchange(audience="second"))["secret"] == "second-key-0123456789"


EVIL = {"scheme": "https", "host": "evil.example", "port": 443}

EDITS: dict[str, tuple[str, str, Json]] = {
    "its destination": (
        "destinations",
        '[{"url": "https://evil.example", "methods": null, "allow_private": false}]',
        EVIL,
    ),
    "one more destination": (
        "destinations",
        f'[{{"url": "https://{HOST}"}}, {{"url": "https://evil.example"}}]',
        EVIL,
    ),
    "its allow_private": (
        "destinations",
        f'[{{"url": "https://{HOST}", "methods": null, "allow_private": true}}]',
        ENDPOINT,
    ),
    "its placement": ("placements", '[{"kind": "query", "parameter": "key"}]', ENDPOINT),
    "its kind": ("kind", "other", ENDPOINT),
}


@pytest.mark.parametrize(("column", "value", "endpoint"), EDITS.values(), ids=EDITS.keys())
def test_a_row_edited_in_the_database_does_not_open(
    attacker: Workspace, column: str, value: str, endpoint: Json
) -> None:
    issued, credential = attacker.exchange(), attacker.credential()
    attacker.control_plane.edit(f"UPDATE credentials SET {column} = ? WHERE id = ?", value, credential["id"])

    answer = attacker.resolve(issued, endpoint=endpoint)

    assert_unavailable(answer, ATTACKER_SECRET)


@pytest.mark.guards("control_plane/adapters/sql/repositories.py", " & (CREDENTIALS.c.tenant == TOKENS.c.tenant)", "")
def test_a_token_moved_to_another_tenants_credential_yields_nothing(attacker: Workspace, victim: Workspace) -> None:
    issued, theirs = attacker.exchange(), victim.credential()
    attacker.control_plane.edit("UPDATE tokens SET credential_id = ? WHERE id = ?", theirs["id"], issued["id"])

    # The victim granted it to an `alice` too; hers is another one.
    answer = attacker.resolve(issued)

    assert answer["code"] == "revoked_placeholder"
    assert VICTIM_SECRET not in str(answer)


GARBAGE: dict[str, Callable[[ControlPlane, str], int]] = {
    "destinations that are no JSON list": lambda plane, credential: plane.edit(
        "UPDATE credentials SET destinations = '7' WHERE id = ?", credential
    ),
    "a destination that is none": lambda plane, credential: plane.edit(
        """UPDATE credentials SET destinations = '[{"url": "nowhere"}]' WHERE id = ?""", credential
    ),
    "a version in no known state": lambda plane, credential: plane.edit(
        "UPDATE credential_versions SET state = 'new' WHERE credential_id = ?", credential
    ),
    "an envelope that is empty": lambda plane, credential: plane.edit(
        "UPDATE credential_versions SET envelope = ? WHERE credential_id = ?", b"", credential
    ),
    "no envelope": lambda plane, credential: plane.edit(
        "UPDATE credential_versions SET envelope = NULL WHERE credential_id = ?", credential
    ),
}


@pytest.mark.parametrize("garble", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_row_that_cannot_be_read_is_unavailable_and_the_others_work(
    attacker: Workspace, garble: Callable[[ControlPlane, str], int]
) -> None:
    issued, credential = attacker.exchange(), attacker.credential()
    attacker.add_credential("second", secret="second-key-0123456789")
    attacker.grant("second")

    assert garble(attacker.control_plane, credential["id"]) == 1

    assert_unavailable(attacker.resolve(issued), ATTACKER_SECRET)
    assert attacker.resolve(attacker.exchange(audience="second"))["secret"] == "second-key-0123456789"
    assert attacker.control_plane.admin("GET", attacker.path("credentials")).status_code == 200


# --- rows put back as they were --------------------------------------------------------------------------------------


@pytest.mark.guards(
    "control_plane/credentials.py",
    "return await self._replaced(records, new, secret)",
    "await self._versions.sealed_again(records, old, new)\n        return new",
)
def test_a_narrowed_credential_put_back_to_its_wider_rows_does_not_open(workspace: Workspace) -> None:
    old_endpoint = ENDPOINT | {"host": "old.example"}
    credential = workspace.add_credential(destinations=[{"url": f"https://{HOST}"}, {"url": "https://old.example"}])
    workspace.grant()
    plane = workspace.control_plane
    ((destinations,),) = plane.look("SELECT destinations FROM credentials WHERE id = ?", credential["id"])
    envelope = envelope_of(workspace, credential)
    workspace.patch_credential({"destinations": [{"url": f"https://{HOST}"}]}).raise_for_status()
    issued = workspace.exchange()
    assert workspace.resolve(issued, endpoint=old_endpoint)["code"] == "destination_denied"

    plane.edit("UPDATE credentials SET destinations = ? WHERE id = ?", destinations, credential["id"])
    plane.edit("UPDATE credential_versions SET envelope = ? WHERE credential_id = ?", envelope, credential["id"])

    for current_version in (2, 1):
        plane.edit("UPDATE credentials SET current_version = ? WHERE id = ?", current_version, credential["id"])
        assert_unavailable(workspace.resolve(issued, endpoint=old_endpoint), SECRET)


def test_a_compromised_version_put_back_does_not_open(attacker: Workspace) -> None:
    credential = attacker.credential()
    envelope = envelope_of(attacker, credential)
    attacker.rotate("newer-key-0123456789", compromised=True)
    set_envelope(attacker, credential, envelope)
    attacker.control_plane.edit("UPDATE credentials SET current_version = 1 WHERE id = ?", credential["id"])

    answer = attacker.resolve(attacker.exchange())

    assert_unavailable(answer, ATTACKER_SECRET, "newer-key")
