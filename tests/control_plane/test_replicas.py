"""Two replicas on one PostgreSQL and one Valkey: what one does the other knows. Valkey is a hint, never authority."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis as redis_client

from tests.control_plane.postgresql import database_with_two_logins
from tests.control_plane.serving import ControlPlane, control_plane_in, private_file
from tests.control_plane.test_events import Stream, streaming
from tests.control_plane.valkey import PASSWORD, Valkey, valkey
from tests.control_plane.workspace import SECRET, Json, Workspace

PUSHED_SECONDS = 2.0
"""Less than a heartbeat (3 s): whoever hears it so soon was woken."""


@pytest.fixture(scope="module")
def hints() -> Iterator[Valkey]:
    with valkey() as server:
        yield server


class Replicas:
    def __init__(self, planes: list[ControlPlane]) -> None:
        self.one, self.other = planes
        self.workspace = Workspace(self.one, "acme")
        self.workspace.add_credential()
        self.workspace.grant()

    @property
    def elsewhere(self) -> Workspace:
        """The same tenant, at the other replica."""
        workspace = Workspace.__new__(Workspace)
        workspace.__dict__.update(self.workspace.__dict__ | {"control_plane": self.other})
        return workspace


@pytest.fixture(scope="module")
def replicas(server: str, hints: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder, logins = tmp_path_factory.mktemp("replicas"), asyncio.run(database_with_two_logins(server))
    shared = {
        "database_url": logins.app,
        "migration_database_url": logins.owner,
        "unbound_database_login": "",
        "issuer_url": "https://coatcheck.example",
        "redis_url": hints.url,
        "redis_password_file": private_file(folder / "redis-password", PASSWORD),
    }
    with control_plane_in(folder, **shared) as one, control_plane_in(folder, **shared) as other:
        yield Replicas([one, other])


def pushed(replicas: Replicas, stream: Stream) -> tuple[Json, float]:
    """What the other replica says of an exchange and its revocation, and after how long."""
    issued = replicas.workspace.exchange()
    began = time.monotonic()
    replicas.one.made("DELETE", replicas.workspace.path(f"placeholders/{issued['id']}"))
    (*_, event) = stream.until(lambda event: event["kind"] == "placeholder")
    assert event["id"] == issued["id"]
    return issued, time.monotonic() - began


@pytest.mark.guards("control_plane/adapters/redis/wake.py", "await self._redis.ask(self._publish)", "pass")
def test_a_change_at_one_replica_is_pushed_by_the_other(replicas: Replicas) -> None:
    with streaming(replicas.other) as stream:
        stream.next()

        issued, took = pushed(replicas, stream)

    assert took < PUSHED_SECONDS
    assert replicas.elsewhere.resolve(issued)["code"] == "revoked_placeholder"


def test_what_one_replica_issued_the_other_resolves_renews_and_revokes(replicas: Replicas) -> None:
    session = replicas.workspace.open_session()
    issued = replicas.workspace.exchange(session)

    assert replicas.elsewhere.resolve(issued)["secret"] == SECRET
    assert replicas.elsewhere.renew(issued)["access_token"] == issued["access_token"]
    replicas.elsewhere.end_session(session)

    assert replicas.workspace.resolve(issued)["code"] == "revoked_placeholder"


def test_with_valkey_away_everything_works_and_a_change_comes_with_the_heartbeat(
    replicas: Replicas, hints: Valkey
) -> None:
    with streaming(replicas.other) as stream:
        stream.next()
        hints.kill()
        try:
            _, took = pushed(replicas, stream)
            ready = replicas.other.http.get("/readyz").status_code
        finally:
            hints.start()
        deadline = time.monotonic() + 20
        while pushed(replicas, stream)[1] > PUSHED_SECONDS:
            assert time.monotonic() < deadline, "it never woke the other replica again"

    assert took < 5
    assert ready == 200


def test_with_valkey_frozen_requests_do_not_wait_for_it(replicas: Replicas, hints: Valkey) -> None:
    with streaming(replicas.other) as stream:
        stream.next()
        hints.freeze()
        try:
            began = time.monotonic()
            for _ in range(5):
                replicas.workspace.exchange()
            exchanges = time.monotonic() - began
            _, took = pushed(replicas, stream)
        finally:
            hints.thaw()

    assert exchanges < 3
    assert took < 5


# --- an attacker who may write anything into it ----------------------------------------------------------------------


class Attacker:
    """Has the password: deletes, injects, replays, floods, and puts other things under the names it finds."""

    def __init__(self, server: Valkey) -> None:
        self.client: Any = redis_client.Redis(port=server.port, password=PASSWORD)
        self.seen: list[bytes] = []
        self.stopped = threading.Event()

    def channels(self) -> list[bytes]:
        return list(self.client.pubsub_channels("*"))

    def the_channel(self) -> bytes:
        """The one that both replicas listen to, once they do."""
        deadline = time.monotonic() + 20
        while [number for _, number in self.client.pubsub_numsub(*self.channels())] != [2]:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.02)
        (channel,) = self.channels()
        return channel

    def run(self) -> None:
        lies = [
            b"look",
            b"",
            b"\xff" * 4096,
            json.dumps({"kind": "grant", "tenant": "acme", "id": "gr_x", "revoked": False}).encode(),
            json.dumps({"sequence": 10**9, "epoch": "0" * 16, "kind": "tag_keys"}).encode(),
        ]
        while not self.stopped.is_set():
            for channel in self.channels():
                for lie in lies:
                    self.client.publish(channel, lie)
            for key in self.client.keys("*"):
                self.seen += [key, self.client.dump(key) or b""]
                self.client.delete(key)
                self.client.rpush(key, "a list where a text was")
            self.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            time.sleep(0.01)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stopped.set()
            thread.join(10)


def outbox(replicas: Replicas) -> list[Json]:
    """Everything that was published, as the replica that was left alone tells it."""
    with streaming(replicas.one, after=0) as stream:
        return stream.until(lambda event: event["kind"] == "heartbeat")[:-1]


def test_who_writes_all_of_valkey_gains_delay_and_nothing_else(replicas: Replicas, hints: Valkey) -> None:
    attacker = Attacker(hints)
    session = replicas.workspace.open_session()
    events: list[Json] = []

    with streaming(replicas.other, after=0) as stream, attacker.at_work():
        for number in range(3):
            issued = replicas.workspace.exchange(session)
            assert replicas.elsewhere.resolve(issued)["secret"] == SECRET
            stranger = {**replicas.workspace.caller(issued), "tenant": "evil"}
            assert replicas.elsewhere.resolve(issued, caller=stranger)["code"] == "unknown_placeholder"
            began = time.monotonic()
            replicas.one.made("DELETE", replicas.workspace.path(f"placeholders/{issued['id']}"))
            assert replicas.elsewhere.resolve(issued)["code"] == "revoked_placeholder"
            events += stream.until(lambda event, token=issued["id"]: event["id"] == token)  # type: ignore[misc]
            assert time.monotonic() - began < 5, number
        replicas.workspace.end_session(session)
        assert (
            replicas.elsewhere.token(
                subject_token=session["session_token"],
                subject_token_type="urn:ietf:params:oauth:token-type:jwt",
                audience="example",
            ).status_code
            == 400
        )

    told = [event for event in events if event["kind"] != "heartbeat"]
    assert told == [event for event in outbox(replicas) if event["sequence"] <= told[-1]["sequence"]]
    assert [event["sequence"] for event in told] == sorted({event["sequence"] for event in told})
    written = b"\n".join(attacker.seen)
    assert SECRET.encode() not in written
    assert b"coatchk1" not in written


def test_a_flood_of_wake_ups_does_not_hold_up_a_change(replicas: Replicas, hints: Valkey) -> None:
    attacker = Attacker(hints)
    channel = attacker.the_channel()

    with streaming(replicas.other) as stream:
        stream.next()
        with attacker.client.pipeline() as pipeline:
            for _ in range(20_000):
                pipeline.publish(channel, b"look")
            pipeline.execute()
        _, took = pushed(replicas, stream)

    assert took < PUSHED_SECONDS
