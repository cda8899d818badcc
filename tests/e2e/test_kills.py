"""Kill any replica, PostgreSQL or Valkey at any point: afterwards nothing is lost and nothing is doubled.

Every fault point of the control plane's sources is one test, and each is hit: by the scenario that reaches it, once for
each of the three that may die there. The table under the run lists them.

Rule: whoever asked and got no answer asks again, as a client would; then it has happened once.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import httpx
import pytest

from tests.control_plane.minting import refresh_secret
from tests.control_plane.serving import PROXY, private_file
from tests.control_plane.workspace import HOST, JWT, PROXY_CREDENTIAL, SECRET, Json, Workspace
from tests.e2e.killing import ProcessEndedError, Stand, fresh, standing, wait_for
from tests.support.fault_points import fault_points

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

AT_LEAST: Final = 25
NEW: Final = "another-real-key-0123456789"

_numbers = count(1)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with standing(tmp_path_factory.mktemp("kills")) as stand:
        stand.start()
        yield stand


# --- what is done while something dies -------------------------------------------------------------------------------


class Scenario:
    """Something that a client or an operator asks for. `again` asks once more, where it has not happened."""

    def __init__(self, stand: Stand) -> None:
        self.w = Workspace(stand.plane, f"kill-{next(_numbers)}")
        self.stand = stand
        self.prepare()

    def prepare(self) -> None:
        self.w.add_credential()
        self.kept = self.w.grant()

    def act(self) -> Any:
        raise NotImplementedError

    def again(self) -> None:
        """Repeats it as a client would, and says what is true then."""
        raise NotImplementedError


class Exchanging(Scenario):
    def prepare(self) -> None:
        super().prepare()
        self.session = self.w.open_session()

    def act(self) -> Any:
        return self.w.exchange(self.session)

    def again(self) -> None:
        issued = self.act()
        assert self.w.resolve(issued)["secret"] == SECRET
        assert self.w.who(issued["proxy_credential"])["caller"] == self.w.caller(issued)


class ProvingTheCaller(Exchanging):
    def act(self) -> Json:
        answer = self.w.token(
            subject_token=self.session["session_token"],
            subject_token_type=JWT,
            requested_token_type=PROXY_CREDENTIAL,
        )
        answer.raise_for_status()
        issued: Json = answer.json()
        renewed = self.w.token(
            subject_token=issued["access_token"],
            subject_token_type=PROXY_CREDENTIAL,
            requested_token_type=PROXY_CREDENTIAL,
        )
        renewed.raise_for_status()
        return issued

    def again(self) -> None:
        assert self.w.who(self.act()["access_token"])["caller"]["tenant"] == self.w.tenant


class Renewing(Exchanging):
    def prepare(self) -> None:
        super().prepare()
        self.issued = self.w.exchange(self.session)

    def act(self) -> Any:
        return self.w.renew(self.issued)

    def again(self) -> None:
        assert self.act()["access_token"] == self.issued["access_token"]
        assert self.w.resolve(self.issued)["secret"] == SECRET


class Revoking(Renewing):
    def act(self) -> Any:
        return self.stand.plane.made("DELETE", self.w.path(f"placeholders/{self.issued['id']}"))

    def again(self) -> None:
        self.act()
        assert self.w.resolve(self.issued)["code"] == "revoked_placeholder"
        changes = self.stand.rows("SELECT 1 FROM outbox WHERE subject_id = :id", id=self.issued["id"])
        assert len(changes) == 1


class OpeningASession(Scenario):
    def act(self) -> Any:
        return self.w.open_session()

    def again(self) -> None:
        assert self.w.resolve(self.w.exchange(self.act()))["secret"] == SECRET


class EndingASession(Renewing):
    def prepare(self) -> None:
        super().prepare()
        rule = {"host": "mirror.test", "session": self.session["session_id"]}
        self.stand.plane.made("POST", self.w.path("allow-rules"), rule)

    def act(self) -> Any:
        self.w.end_session(self.session)

    def again(self) -> None:
        self.act()
        assert self.w.resolve(self.issued)["code"] == "revoked_placeholder"


class Rotating(Renewing):
    more: Json = {}  # noqa: RUF012 (never changed)

    def act(self) -> Any:
        return self.w.rotate(NEW, if_version=1, **self.more)

    def again(self) -> None:
        if self.w.credential()["current_version"] == 1:
            self.act()
        assert self.w.credential()["current_version"] == 2
        assert self.w.resolve(self.issued)["secret"] == NEW
        assert len(self.stand.rows("SELECT 1 FROM credential_versions WHERE tenant = :t", t=self.w.tenant)) == 2


class RotatingAKeyThatLeaked(Rotating):
    more = {"compromised": True}  # noqa: RUF012


class RotatingWithAProbe(Rotating):
    """No proxy answers here, so that the probe says "unknown", and the rotation goes on all the same."""

    more = {"probe": {"method": "GET", "path": "/"}, "proceed_if_unknown": True}  # noqa: RUF012

    def again(self) -> None:
        rotation = self.w.control_plane.made("GET", self.w.path("credentials/example/rotation"))
        if rotation.get("running") or (rotation.get("rotation") or {}).get("running"):
            self.w.control_plane.made("POST", self.w.path("credentials/example/rotation/cancel"))
        if self.w.credential()["current_version"] == 1:
            self.w.rotate(NEW)
        assert self.w.resolve(self.issued)["secret"] == NEW


class RotatingByItself(Renewing):
    """A schedule asks an endpoint of the operator's for a new value, some time after the old one became too old."""

    def prepare(self) -> None:
        super().prepare()
        hook = {"kind": "http", "url": f"{self.stand.outside.hook.url}/hook"}
        self.w.control_plane.made(
            "PUT", self.w.path("credentials/example/rotation/schedule"), {"every_seconds": 3600, "hook": hook}
        )

    def act(self) -> Any:
        self.is_old_now()

    def again(self) -> None:
        self.is_old_now()  # the lease of whoever died is over, too
        wait_for(self.has_rotated, timeout_seconds=40)
        made = self.w.resolve(self.issued)["secret"]
        assert [made] == [value for key, value in self.stand.outside.hook_secrets.items() if key in made]
        assert len(self.stand.rows("SELECT 1 FROM credential_versions WHERE tenant = :t", t=self.w.tenant)) == 2

    def is_old_now(self) -> None:
        self.stand.change(
            "UPDATE credential_versions SET created_at = created_at - 7200 WHERE tenant = :t AND version = 1",
            t=self.w.tenant,
        )
        self.stand.change("UPDATE rotation_schedules SET look_at = 0 WHERE tenant = :t", t=self.w.tenant)

    def has_rotated(self) -> bool:
        try:
            return bool(self.w.credential()["current_version"] == 2)
        except (httpx.HTTPError, AssertionError):
            return False


class Minting(Scenario):
    """A refresh token that its provider replaces with each use: it is never sent twice, whoever dies.

    Who dies between the provider's answer and the database loses that consent at most, and the credential says so.
    """

    def prepare(self) -> None:
        provider = self.stand.outside.provider
        self.reused_before = provider.reused
        self.w.add_credential(
            kind="oauth_refresh_token",
            settings={
                "client_id": "our-app",
                "client_authentication": "client_secret_post",
                "token_url": provider.token_url,
            },
            secret=refresh_secret(provider.consent()),
        )
        self.w.grant()
        self.issued = self.w.exchange()

    def act(self) -> Any:
        return self.w.resolve(self.issued)

    def again(self) -> None:
        self.stand.change("UPDATE minted SET leased_until = 0 WHERE tenant = :t", t=self.w.tenant)
        answer = self.act()
        if "secret" not in answer:
            assert answer["code"] == "credential_unavailable"
            assert "consent" in f"{answer['detail']} {answer['hint']}"
            self.w.rotate(refresh_secret(self.stand.outside.provider.consent()))
            answer = self.act()
        assert answer["secret"].startswith("at-")
        assert self.stand.outside.provider.reused == self.reused_before


class Rewrapping(Renewing):
    """A newer key-encryption key, and every envelope is wrapped by it, in the background."""

    def prepare(self) -> None:
        super().prepare()
        newest, older = self.stand.folder / "kek.hex", self.stand.folder / "older-kek.hex"
        private_file(older, newest.read_text())
        private_file(newest, os.urandom(32).hex())
        self.w.control_plane.made("POST", "/v1/keks/reload")
        self.stand.change("UPDATE keks SET first_seen_at = first_seen_at - 3600")  # every replica has it by now

    def act(self) -> Any:
        return self.w.control_plane.made("POST", "/v1/keks/rewrap")

    def again(self) -> None:
        self.rewrap()
        assert self.w.resolve(self.issued)["secret"] == SECRET

    def rewrap(self) -> None:
        self.stand.change("UPDATE rewraps SET moved_at = 0")  # whoever died is waited for no longer
        self.w.control_plane.made("POST", "/v1/keks/rewrap")
        wait_for(self.is_finished, timeout_seconds=40)
        newest = [kek for kek in self.keks() if kek["seals"]]
        assert [kek["envelopes"] > 0 for kek in newest] == [True]
        assert sum(kek["envelopes"] for kek in self.keks()) == newest[0]["envelopes"]

    def keks(self) -> list[Json]:
        items: list[Json] = self.w.control_plane.made("GET", "/v1/keks")["items"]
        return items

    def is_finished(self) -> bool:
        self.stand.change("UPDATE rewraps SET moved_at = 0 WHERE moved_at < extract(epoch FROM now()) - 5")
        status = self.w.control_plane.made("GET", "/v1/keks/rewrap")
        return status["finished_at"] is not None and status["remaining"] == 0


class RetiringAKek(Rewrapping):
    def prepare(self) -> None:
        super().prepare()
        self.rewrap()
        (self.old,) = [kek["kek_id"] for kek in self.keks() if kek["in_ring"] and not kek["seals"]]

    def act(self) -> Any:
        return self.w.control_plane.admin("POST", f"/v1/keks/{self.old}/retire", {})

    def again(self) -> None:
        assert self.act().status_code == 204
        (retired,) = [kek for kek in self.keks() if kek["kek_id"] == self.old]
        assert retired["retired_at"] is not None
        events = self.stand.rows(
            "SELECT 1 FROM audit_events WHERE action = 'kek.retire' AND record ->> 'detail' = :id", id=self.old
        )
        assert len(events) == 1
        assert self.w.resolve(self.issued)["secret"] == SECRET


class Narrowing(Renewing):
    def act(self) -> Any:
        return self.w.patch_credential({"destinations": [{"url": "https://api.example.com", "methods": ["GET"]}]})

    def again(self) -> None:
        assert self.act().status_code == 200
        assert self.w.resolve(self.issued)["code"] == "revoked_placeholder"
        assert self.w.resolve(self.w.exchange(self.session))["secret"] == SECRET


class AddingACredential(Scenario):
    def prepare(self) -> None:
        return

    def act(self) -> Any:
        return self.w.add_credential("second")

    def again(self) -> None:
        with suppress(AssertionError):  # it is there already
            self.act()
        assert self.w.credential("second")["current_version"] == 1


class DeletingACredential(Renewing):
    def act(self) -> Any:
        return self.w.control_plane.admin("DELETE", self.w.path("credentials/example"))

    def again(self) -> None:
        assert self.act().status_code in (204, 404)
        assert self.w.control_plane.admin("GET", self.w.path("credentials/example")).status_code == 404
        assert self.w.resolve(self.issued)["code"] == "revoked_placeholder"


class Granting(Renewing):
    def act(self) -> Any:
        return self.w.grant(subject="bob")

    def again(self) -> None:
        self.act()
        assert self.w.resolve(self.w.exchange(self.w.open_session("bob")))["secret"] == SECRET


class TakingAGrantAway(Renewing):
    def act(self) -> Any:
        return self.w.control_plane.admin("DELETE", self.w.path(f"grants/{self.kept['id']}"))

    def again(self) -> None:
        assert self.act().status_code in (204, 404)
        assert self.w.resolve(self.issued)["code"] == "revoked_placeholder"


class RemovingAClient(Renewing):
    def act(self) -> Any:
        return self.w.control_plane.admin("DELETE", f"/v1/clients/{self.w.runtime}")

    def again(self) -> None:
        assert self.act().status_code in (204, 404)
        assert self.w.resolve(self.issued)["code"] == "revoked_placeholder"
        assert self.w.renewal(self.issued).status_code == 401


class RemovingATenant(Renewing):
    def act(self) -> Any:
        return self.w.control_plane.admin("DELETE", f"/v1/tenants/{self.w.tenant}?confirm={self.w.tenant}")

    def again(self) -> None:
        assert self.act().status_code in (204, 404)
        assert self.w.resolve(self.issued)["code"] == "unknown_placeholder"
        for table in ("credentials", "credential_versions", "grants", "sessions", "tokens", "clients"):
            assert self.stand.rows(f"SELECT 1 FROM {table} WHERE tenant = :t", t=self.w.tenant) == []
        told = self.stand.rows("SELECT 1 FROM outbox WHERE kind = 'tenant' AND subject_id = :t", t=self.w.tenant)
        assert len(told) == 1


class Reporting(Scenario):
    """A proxy hands over what it decided, and again where it got no answer."""

    def act(self) -> Any:
        events = [
            {"event_id": f"ev_{self.w.tenant}_{number}", "at": 0, "request_id": "req_x", "action": "swap",
             "tenant": self.w.tenant, "path": "/"}
            for number in range(3)
        ]  # fmt: skip
        return self.stand.plane.http.post("/internal/audit", json={"events": events}, auth=PROXY)

    def again(self) -> None:
        assert self.act().status_code == 204
        assert [event["action"] for event in self.w.audit()].count("swap") == 3


class FollowingASource(Renewing):
    """A value changes where it is read from."""

    def prepare(self) -> None:
        self.file = self.stand.folder / "sources" / self.w.tenant / "key"
        self.file.parent.mkdir(parents=True)
        private_file(self.file, SECRET)
        body = {"kind": "file", "path_template": "{tenant}/{name}", "ttl_seconds": 1}
        self.w.control_plane.made("PUT", "/v1/sources/files", body)
        reference = {"source": "files", "name": "key"}
        made = {"name": "example", "destinations": [{"url": f"https://{HOST}"}], "secret_source": reference}
        assert self.w.post_credential(made).status_code == 201
        self.kept = self.w.grant()
        self.issued = self.w.exchange()
        assert self.w.resolve(self.issued)["secret"] == SECRET
        self.stand.change("UPDATE credential_versions SET created_at = 0")
        private_file(self.file, NEW)

    def act(self) -> Any:
        wait_for(lambda: self.w.resolve(self.issued).get("secret") == NEW, timeout_seconds=20)

    def again(self) -> None:
        self.act()
        assert self.w.credential()["current_version"] == 2
        assert [event["action"] for event in self.w.audit()].count("credential.source_change") == 1


SCENARIOS: Final[tuple[type[Scenario], ...]] = (
    Exchanging,
    ProvingTheCaller,
    Renewing,
    Revoking,
    OpeningASession,
    EndingASession,
    Rotating,
    RotatingAKeyThatLeaked,
    RotatingWithAProbe,
    RotatingByItself,
    Minting,
    Rewrapping,
    RetiringAKek,
    Narrowing,
    AddingACredential,
    DeletingACredential,
    Granting,
    TakingAGrantAway,
    RemovingAClient,
    RemovingATenant,
    Reporting,
    FollowingASource,
)

AFTERWARDS: Final[dict[str, type[Scenario] | str]] = {
    "source.changed": FollowingASource,
    "wake.told": Revoking,
    "rotation.hook_created": RotatingByItself,
    **dict.fromkeys(
        ("kek.rewrap_claimed", "kek.batch_sealed", "kek.batch_replaced", "kek.batch_written", "kek.rewrap_finished"),
        Rewrapping,
    ),
}
"""Points of tasks of their own, which are reached some time after the answer."""

STARTING: Final = "starting on an empty database"


@pytest.fixture(scope="module")
def where(stand: Stand) -> dict[str, type[Scenario] | str]:
    """Which scenario reaches which point: each is played once with nobody dying."""
    found: dict[str, type[Scenario] | str] = {}
    for scenario in SCENARIOS:
        played = scenario(stand)
        stand.reached()
        played.act()
        for point in stand.reached() - set(AFTERWARDS):
            found.setdefault(point, scenario)
        played.again()
    empty = fresh(stand)
    empty.start()
    for point in empty.reached():
        found.setdefault(point, STARTING)
    empty.kill()
    assert stand.faults() == []
    return found | AFTERWARDS


# --- who dies --------------------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """The request that is under way while somebody dies."""

    outcome: Any = None

    def make(self, act: Callable[[], Any]) -> None:
        try:
            self.outcome = act()
        except (httpx.HTTPError, AssertionError) as error:
            self.outcome = error


def with_the_replica_killed(stand: Stand, point: str, scenario: Scenario) -> None:
    stand.arm(point, "kill")
    Attempt().make(scenario.act)
    wait_for(stand.has_died, timeout_seconds=40)
    assert not stand.disarm(), f"{point} was not reached"
    stand.start()


def with_a_server_killed(server: Any) -> Callable[[Stand, str, Scenario], None]:
    def play(stand: Stand, point: str, scenario: Scenario) -> None:
        stand.arm(point, "wait")
        attempt = Attempt()
        thread = threading.Thread(target=attempt.make, args=(scenario.act,), daemon=True)
        thread.start()
        wait_for(stand.waits, timeout_seconds=40)
        server(stand).kill()
        stand.go_on()
        thread.join(60)
        assert not thread.is_alive(), "it waits for ever"
        server(stand).start()
        # Connections of before are noticed to be dead one by one.
        wait_for(lambda: stand.plane.http.get("/readyz").status_code == 200, timeout_seconds=20)

    return play


VICTIMS: Final[dict[str, Callable[[Stand, str, Scenario], None]]] = {
    "replica": with_the_replica_killed,
    "postgresql": with_a_server_killed(lambda stand: stand.database),
    "valkey": with_a_server_killed(lambda stand: stand.hints),
}


def test_there_are_enough_points() -> None:
    assert len(fault_points()) >= AT_LEAST


@pytest.mark.parametrize("point", fault_points())
def test_nothing_is_lost_or_doubled_by_a_death_at(
    point: str,
    stand: Stand,
    where: dict[str, type[Scenario] | str],
    record_property: Callable[[str, object], None],
) -> None:
    assert point in where, f"no scenario reaches {point}: add one"
    scenario = where[point]
    record_property("fault_point", point)
    if isinstance(scenario, str):
        record_property("fault_scenario", scenario)
        record_property("fault_victims", "replica")
        dies_while_starting(fresh(stand), point)
        return
    record_property("fault_scenario", scenario.__name__)
    record_property("fault_victims", " ".join(VICTIMS))
    for victim, play in VICTIMS.items():
        played = scenario(stand)

        play(stand, point, played)

        assert stand.faults() == [], victim
        played.again()
        assert stand.faults() == [], victim


def dies_while_starting(empty: Stand, point: str) -> None:
    empty.arm(point, "kill")

    with pytest.raises(ProcessEndedError):
        empty.start()

    empty.served = None
    empty.start()
    try:
        assert empty.faults() == []
        played = Exchanging(empty)
        played.act()
        played.again()
        assert empty.faults() == []
    finally:
        empty.kill()
