"""Turning the rings of our own keys: nothing good stops working, on any replica, unless the key is compromised."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest

from control_plane.adapters.keyring import read_kek_files
from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.engine import open_database
from control_plane.adapters.sql.store import SqlStore
from control_plane.custody import Custody
from control_plane.keys import KeyKeeper
from control_plane.own_keys import OwnKeyring
from control_plane.trail import Trail
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import PROXY, ControlPlane, control_plane_in
from tests.control_plane.test_exchange import assert_oauth_error
from tests.control_plane.workspace import JWT, Json, Workspace

PUBLISHED = 600
SIGNED = 300
SLACK = 120


@pytest.fixture
def workspace(own_control_plane: OwnControlPlane) -> Workspace:
    made = Workspace(own_control_plane(issuer_url="https://control-plane.example"), "acme")
    made.add_credential()
    made.grant()
    return made


@pytest.fixture
def replica(workspace: Workspace) -> Iterator[Workspace]:
    """Another process's view of the same database, with a clock of its own."""
    folder = workspace.control_plane.folder
    with control_plane_in(folder, issuer_url="https://control-plane.example") as second:
        seen = object.__new__(Workspace)
        seen.__dict__ = {**workspace.__dict__, "control_plane": second}
        yield seen


def rotate(workspace: Workspace, purpose: str, **fields: bool) -> Json:
    return workspace.control_plane.made("POST", f"/v1/keys/{purpose}/rotate", dict(fields))


def states(workspace: Workspace, purpose: str) -> list[str]:
    keys = workspace.control_plane.made("GET", "/v1/keys")["items"]
    return [key["state"] for key in keys if key["purpose"] == purpose]


def published(control_plane: ControlPlane) -> list[str]:
    return [key["kid"] for key in control_plane.http.get("/.well-known/jwks.json").json()["keys"]]


def kid(token: str) -> str:
    text: str = jwt.get_unverified_header(token)["kid"]
    return text


def tag_keys(control_plane: ControlPlane) -> list[str]:
    keys: list[str] = control_plane.http.get("/internal/tag-keys", auth=PROXY).json()["keys_hex"]
    return keys


def exchanged(workspace: Workspace, session: Json) -> int:
    form = {"subject_token": session["session_token"], "subject_token_type": JWT, "audience": "example"}
    return workspace.token(**form).status_code


@pytest.mark.guards(
    "control_plane/keys.py", "in_use_from=now if compromised else now + PUBLISHED_SECONDS", "in_use_from=now"
)
def test_a_new_signing_key_is_published_before_it_signs(workspace: Workspace) -> None:
    (old,) = published(workspace.control_plane)

    rotate(workspace, "signing")

    before = workspace.open_session()["session_token"]
    new = next(key for key in published(workspace.control_plane) if key != old)
    workspace.control_plane.clock.advance(PUBLISHED + 1)
    after = workspace.open_session()["session_token"]
    assert (kid(before), kid(after)) == (old, new)
    assert states(workspace, "signing") == ["in_use", "kept"]


def test_a_token_of_the_old_key_is_good_until_it_expires_and_then_the_key_goes(workspace: Workspace) -> None:
    (old,) = published(workspace.control_plane)
    rotate(workspace, "signing")
    workspace.control_plane.clock.advance(PUBLISHED - 1)
    session = workspace.open_session()
    workspace.control_plane.clock.advance(SIGNED - 10)

    still_good = exchanged(workspace, session)
    run_the_chores(workspace)
    kept = published(workspace.control_plane)
    workspace.control_plane.clock.advance(SIGNED + SLACK)
    run_the_chores(workspace)

    assert kid(session["session_token"]) == old
    assert still_good == 200
    assert old in kept
    assert old not in published(workspace.control_plane)
    assert states(workspace, "signing") == ["in_use"]
    assert exchanged(workspace, workspace.open_session()) == 200


def run_the_chores(workspace: Workspace) -> None:
    """As a replica does them, by the same clock."""
    control_plane = workspace.control_plane
    clock = control_plane.clock

    async def retire() -> None:
        database = open_database(control_plane.settings.database_url)
        try:
            store, trail = SqlStore(database, LocalWake()), Trail(clock, os.urandom)
            custody = Custody(read_kek_files(control_plane.settings.kek_files), entropy=os.urandom)
            own_keys = OwnKeyring(store, custody, clock=clock, entropy=os.urandom)
            await KeyKeeper(store, own_keys, trail, clock=clock).retire()
        finally:
            await database.close()

    asyncio.run(retire())
    clock.advance(16)  # by then everybody has looked again


@pytest.mark.guards(
    "control_plane/own_keys.py",
    "if found is None and self._clock() - self._asked_at >= ASK_AGAIN_SECONDS:",
    "if False:",
)
def test_a_replica_looks_at_once_for_a_key_that_it_does_not_know(workspace: Workspace, replica: Workspace) -> None:
    exchanged(replica, replica.open_session())
    rotate(workspace, "signing", compromised=True)
    replica.control_plane.clock.advance(3)

    assert exchanged(replica, workspace.open_session()) == 200


def test_a_compromised_signing_key_goes_at_once_and_its_tokens_with_it(workspace: Workspace) -> None:
    (old,) = published(workspace.control_plane)
    session = workspace.open_session()

    rotate(workspace, "signing", compromised=True)

    assert old not in published(workspace.control_plane)
    form = {"subject_token": session["session_token"], "subject_token_type": JWT, "audience": "example"}
    assert_oauth_error(workspace.token(**form), "invalid_request", "token_invalid")
    assert exchanged(workspace, workspace.open_session()) == 200


def test_a_new_tag_key_is_told_to_every_proxy_before_anything_is_minted_with_it(workspace: Workspace) -> None:
    (old,) = tag_keys(workspace.control_plane)
    events_before = workspace.control_plane.look("SELECT count(*) FROM outbox WHERE kind = 'tag_keys'")

    rotate(workspace, "tag")

    told = tag_keys(workspace.control_plane)
    assert told[0] == old
    assert len(told) == 2
    assert workspace.control_plane.look("SELECT count(*) FROM outbox WHERE kind = 'tag_keys'") == [
        (events_before[0][0] + 1,)
    ]
    workspace.control_plane.clock.advance(PUBLISHED + 1)
    assert tag_keys(workspace.control_plane) == [told[1], told[0]]


@pytest.mark.guards(
    "control_plane/keys.py",
    "return () if still or await records.decoys",
    "return () if await records.decoys",
)
def test_an_old_tag_key_is_kept_while_a_placeholder_of_it_could_be_renewed(workspace: Workspace) -> None:
    (old,) = tag_keys(workspace.control_plane)
    session = workspace.open_session()
    issued = workspace.exchange(session)
    rotate(workspace, "tag")
    workspace.control_plane.clock.advance(PUBLISHED + 3_600)

    run_the_chores(workspace)

    assert old in tag_keys(workspace.control_plane)
    assert workspace.renew(issued)["access_token"] == issued["access_token"]
    workspace.end_session(session)
    run_the_chores(workspace)
    assert old not in tag_keys(workspace.control_plane)
    assert states(workspace, "tag") == ["in_use"]


def test_a_compromised_tag_key_goes_at_once_and_its_placeholders_with_it(workspace: Workspace) -> None:
    issued = workspace.exchange()

    rotate(workspace, "tag", compromised=True)

    assert_oauth_error(workspace.renewal(issued), "invalid_request", "unknown_placeholder")
    assert workspace.exchange()["access_token"] != issued["access_token"]


def test_turning_a_ring_is_in_the_trail_and_shows_no_key(workspace: Workspace) -> None:
    rotated = rotate(workspace, "tag")

    events = workspace.control_plane.made("GET", "/v1/audit")["items"]
    (event,) = [event for event in events if event["action"] == "key.rotate"]
    assert rotated["id"] in event["detail"]
    shown = str(events) + str(workspace.control_plane.made("GET", "/v1/keys"))
    assert not any(key in shown for key in tag_keys(workspace.control_plane))


@pytest.mark.guards("control_plane/keys.py", "if compromised and purpose not in _PROVES:", "if compromised:")
def test_a_key_of_the_audit_trail_stays_even_where_it_leaked(workspace: Workspace) -> None:
    """What it signed could not be checked any more."""
    before = audit_keys(workspace)
    assert before

    made = workspace.control_plane.made("POST", "/v1/keys/audit/rotate", {"compromised": True})
    workspace.control_plane.clock.advance(30)

    assert made["state"] == "in_use"
    assert audit_keys(workspace)[1:] == before


def audit_keys(workspace: Workspace) -> list[str]:
    """Key ids, the one in use first."""
    keys = workspace.control_plane.made("GET", "/.well-known/coatcheck-audit-keys.json")["keys"]
    return [key["kid"] for key in keys]


def test_there_is_no_other_ring_to_turn(workspace: Workspace) -> None:
    for purpose in ("webhook", "nothing"):
        assert workspace.control_plane.admin("POST", f"/v1/keys/{purpose}/rotate", {}).status_code == 422


def test_replicas_that_start_at_once_make_one_key_of_each(tmp_path: Path) -> None:
    with control_plane_in(tmp_path) as first, control_plane_in(tmp_path) as second:
        assert published(first) == published(second)
        assert tag_keys(first) == tag_keys(second)
