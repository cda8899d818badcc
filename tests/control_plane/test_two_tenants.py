"""Any history of two tenants: neither ever sees or uses anything of the other's. On SQLite and on PostgreSQL.

Everything that a tenant has carries the tenant's mark: names, subjects, secrets. Every answer that a tenant gets is
searched for the other's mark. Beside that a small model says what must work, so that refusing everything is no way out.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.control_plane.postgresql import database_with_two_logins
from tests.control_plane.serving import ControlPlane, control_plane_in
from tests.control_plane.workspace import JWT, PLACEHOLDER, Json, Workspace

_numbers = count(1)

SIDES: Final = (0, 1)
side = st.sampled_from(SIDES)
which = st.integers(0, 3)
SUBJECTS: Final = ("alice", "bob")


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder, database = tmp_path_factory.mktemp(request.param), {}
    if request.param == "postgresql":
        logins = asyncio.run(database_with_two_logins(request.getfixturevalue("server")))
        database = {
            "database_url": logins.app,
            "migration_database_url": logins.owner,
            "unbound_database_login": "",
        }
    with control_plane_in(folder, **database) as running:
        yield running


@dataclass
class Issued:
    answer: Json
    credential: str
    subject: str
    session: Json
    is_revoked: bool = False


@dataclass
class Side:
    """What one tenant has, as the model knows it."""

    workspace: Workspace
    mark: str
    credentials: dict[str, str] = field(default_factory=dict)
    """Name → the secret in use."""
    grants: list[tuple[str, str, Json]] = field(default_factory=list)
    """(Credential, subject, as answered)."""
    sessions: list[tuple[str, Json]] = field(default_factory=list)
    """Live ones, with their subjects."""
    issued: list[Issued] = field(default_factory=list)

    def is_granted(self, credential: str, subject: str) -> bool:
        return any((name, whom) == (credential, subject) for name, whom, _ in self.grants)

    def is_alive(self, issued: Issued) -> bool:
        return (
            not issued.is_revoked
            and issued.credential in self.credentials
            and any(session is issued.session for _, session in self.sessions)
            and self.is_granted(issued.credential, issued.subject)
        )


def machine_on(plane: ControlPlane) -> type[RuleBasedStateMachine]:
    class TwoTenants(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            number = next(_numbers)
            self.sides = []
            for letter in "xy":
                mark = f"{letter}mark{number}{letter}"
                self.sides.append(Side(Workspace(plane, f"{mark}-tenant"), mark))

        # --- what every answer is searched for

        def told(self, index: int, response: httpx.Response) -> httpx.Response:
            """An answer to this tenant, searched for the other."""
            other = self.sides[1 - index]
            assert other.mark not in response.text, (index, response.request.url, response.text)
            for issued in other.issued:
                assert issued.answer["access_token"] not in response.text
            return response

        def admin(self, index: int, method: str, path: str, body: Any = None) -> httpx.Response:
            workspace = self.sides[index].workspace
            return self.told(index, plane.admin(method, workspace.path(path), body))

        # --- what each may do with its own

        @rule(index=side, n=which)
        def add_a_credential(self, index: int, n: int) -> None:
            mine = self.sides[index]
            name, secret = f"{mine.mark}-{n}", f"sk-{mine.mark}-{next(_numbers)}-0123456789"
            body = {"name": name, "destinations": [{"url": "https://api.example.com"}], "secret": secret}
            answer = self.admin(index, "POST", "credentials", body)
            assert answer.status_code == (422 if name in mine.credentials else 201), answer.text
            mine.credentials.setdefault(name, secret)

        @rule(index=side, n=which)
        def rotate_a_credential(self, index: int, n: int) -> None:
            mine = self.sides[index]
            name, secret = f"{mine.mark}-{n}", f"sk-{mine.mark}-{next(_numbers)}-0123456789"
            answer = self.admin(index, "POST", f"credentials/{name}/rotate", {"secret": secret})
            assert answer.status_code == (200 if name in mine.credentials else 404), answer.text
            if name in mine.credentials:
                mine.credentials[name] = secret

        @rule(index=side, n=which)
        def delete_a_credential(self, index: int, n: int) -> None:
            mine = self.sides[index]
            name = f"{mine.mark}-{n}"
            answer = self.admin(index, "DELETE", f"credentials/{name}")
            assert answer.status_code == (204 if mine.credentials.pop(name, None) else 404)
            mine.grants = [grant for grant in mine.grants if grant[0] != name]
            for issued in mine.issued:
                issued.is_revoked |= issued.credential == name

        @rule(index=side, n=which, subject=st.sampled_from(SUBJECTS))
        def grant(self, index: int, n: int, subject: str) -> None:
            mine = self.sides[index]
            name, whom = f"{mine.mark}-{n}", f"{mine.mark}-{subject}"
            answer = self.admin(index, "POST", "grants", {"credential": name, "subject": whom})
            assert answer.status_code == (201 if name in mine.credentials else 404), answer.text
            if answer.status_code == 201:
                mine.grants.append((name, whom, answer.json()))

        @rule(index=side, n=which)
        def take_a_grant_away(self, index: int, n: int) -> None:
            mine = self.sides[index]
            if not mine.grants:
                return
            name, whom, grant = mine.grants.pop(n % len(mine.grants))
            assert self.admin(index, "DELETE", f"grants/{grant['id']}").status_code == 204
            if not mine.is_granted(name, whom):
                for issued in mine.issued:
                    issued.is_revoked |= (issued.credential, issued.subject) == (name, whom)

        @rule(index=side, subject=st.sampled_from(SUBJECTS))
        def open_a_session(self, index: int, subject: str) -> None:
            mine = self.sides[index]
            whom = f"{mine.mark}-{subject}"
            mine.sessions.append((whom, mine.workspace.open_session(whom)))

        @rule(index=side, n=which)
        def end_a_session(self, index: int, n: int) -> None:
            mine = self.sides[index]
            if mine.sessions:
                mine.workspace.end_session(mine.sessions.pop(n % len(mine.sessions))[1])

        @rule(index=side, n=which, session=which)
        def exchange(self, index: int, n: int, session: int) -> None:
            mine = self.sides[index]
            if not mine.sessions:
                return
            whom, opened = mine.sessions[session % len(mine.sessions)]
            name = f"{mine.mark}-{n}"
            answer = self.told(index, self.exchanged(mine, opened, name))
            works = name in mine.credentials and mine.is_granted(name, whom)
            assert answer.status_code == (200 if works else 400), answer.text
            if works:
                mine.issued.append(Issued(answer.json(), name, whom, opened))

        def exchanged(self, mine: Side, session: Json, audience: str) -> httpx.Response:
            return mine.workspace.token(
                subject_token=session["session_token"], subject_token_type=JWT, audience=audience
            )

        @rule(index=side, n=which)
        def renew(self, index: int, n: int) -> None:
            mine = self.sides[index]
            if not mine.issued:
                return
            issued = mine.issued[n % len(mine.issued)]
            answer = self.told(index, mine.workspace.renewal(issued.answer))
            assert answer.is_success == mine.is_alive(issued), answer.text

        @rule(index=side, n=which)
        def revoke(self, index: int, n: int) -> None:
            mine = self.sides[index]
            if mine.issued:
                issued = mine.issued[n % len(mine.issued)]
                answer = self.admin(index, "DELETE", f"placeholders/{issued.answer['id']}")
                assert answer.status_code == 204
                issued.is_revoked = True

        @rule(index=side, n=which)
        def resolve(self, index: int, n: int) -> None:
            mine = self.sides[index]
            if not mine.issued:
                return
            issued = mine.issued[n % len(mine.issued)]
            answer = mine.workspace.resolve(issued.answer)
            if mine.is_alive(issued):
                assert answer["secret"] == mine.credentials[issued.credential]
            else:
                assert answer["code"] == "revoked_placeholder"
            assert self.sides[1 - index].mark not in str(answer)

        # --- what each tries with the other's

        @rule(index=side, n=which)
        def use_the_others_session(self, index: int, n: int) -> None:
            mine, other = self.sides[index], self.sides[1 - index]
            if other.sessions:
                _, session = other.sessions[n % len(other.sessions)]
                for audience in (*other.credentials, *mine.credentials):
                    assert self.told(index, self.exchanged(mine, session, audience)).status_code == 400
                owner = {"Authorization": f"Bearer {session['session_token']}"}
                path = f"/v1/sessions/{session['session_id']}"
                stranger = {"Authorization": f"Bearer {mine.sessions[0][1]['session_token']}"} if mine.sessions else {}
                assert plane.http.get(path, headers=owner).status_code == 200
                assert self.told(index, plane.http.get(path, headers=stranger)).status_code in (401, 404)
                assert self.told(index, plane.http.delete(path, headers=stranger)).status_code in (401, 404)

        @rule(index=side, n=which)
        def use_the_others_placeholder(self, index: int, n: int) -> None:
            mine, other = self.sides[index], self.sides[1 - index]
            if not other.issued:
                return
            issued = other.issued[n % len(other.issued)]
            renewal = mine.workspace.token(subject_token=issued.answer["access_token"], subject_token_type=PLACEHOLDER)
            assert self.told(index, renewal).status_code == 400
            for caller in (
                {**other.workspace.caller(issued.answer), "tenant": mine.workspace.tenant},
                {
                    "client": mine.workspace.runtime,
                    "tenant": mine.workspace.tenant,
                    "subject": f"{mine.mark}-alice",
                    "session": mine.sessions[0][1]["session_id"] if mine.sessions else None,
                },
            ):
                answer = mine.workspace.resolve(issued.answer, caller=caller)
                assert (answer["code"], "secret" in answer) == ("unknown_placeholder", False)

        @rule(index=side, n=which)
        def reach_for_the_others_things_by_their_ids(self, index: int, n: int) -> None:
            other = self.sides[1 - index]
            tried = [f"placeholders/{issued.answer['id']}" for issued in other.issued[-1:]]
            tried += [f"grants/{grant['id']}" for _, _, grant in other.grants[-1:]]
            tried += [f"credentials/{name}" for name in list(other.credentials)[-1:]]
            for path in tried:
                mine = plane.admin("DELETE", self.sides[index].workspace.path(path))
                nothing = plane.admin("DELETE", self.sides[index].workspace.path(f"{path[:-4]}none"))
                assert (mine.status_code, nothing.status_code) == (404, 404)
                assert mine.json()["code"] == nothing.json()["code"]

        @rule(index=side, n=which)
        def revoke_the_others_by_rfc_7009(self, index: int, n: int) -> None:
            mine, other = self.sides[index], self.sides[1 - index]
            if other.issued:
                issued = other.issued[n % len(other.issued)]
                alive = other.is_alive(issued)
                answer = plane.http.post(
                    "/oauth/revoke",
                    data={"token": issued.answer["access_token"]},
                    auth=(mine.workspace.runtime, mine.workspace.runtime_secret),
                )
                assert self.told(index, answer).status_code == 200
                assert ("secret" in other.workspace.resolve(issued.answer)) == alive

        # --- what each can see

        @rule(index=side)
        def look_at_every_list(self, index: int) -> None:
            mine = self.sides[index]
            for listed in ("credentials", "grants", "placeholders", "allow-rules", "audit?limit=1000"):
                assert self.admin(index, "GET", listed).status_code == 200
            names = {item["name"] for item in self.admin(index, "GET", "credentials").json()["items"]}
            assert names == set(mine.credentials)
            grants = {item["id"] for item in self.admin(index, "GET", "grants").json()["items"]}
            assert grants == {grant["id"] for _, _, grant in mine.grants}

        @invariant()
        def policies_show_their_own(self) -> None:
            for index in SIDES if hasattr(self, "sides") else ():
                mine = self.sides[index]
                for whom, session in mine.sessions[-1:]:
                    caller = {
                        "client": mine.workspace.runtime,
                        "tenant": mine.workspace.tenant,
                        "subject": whom,
                        "session": session["session_id"],
                    }
                    assert self.sides[1 - index].mark not in str(mine.workspace.policy(caller))

    return TwoTenants


def play(plane: ControlPlane, *, examples: int, steps: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        machine_on(plane),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.guards(
    "control_plane/exchange.py",
    "if token is None or token.client != client.id or not client.serves(token.tenant):",
    "if token is None:",
)
@pytest.mark.guards("control_plane/resolution.py", "if facts.token.tenant != ask.caller.tenant:", "if False:")
def test_neither_sees_or_uses_anything_of_the_others(plane: ControlPlane) -> None:
    # A history that fails is told as it is: making it shorter takes ten times as long.
    play(plane, examples=6, steps=40, phases=(Phase.generate,))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_neither_sees_or_uses_anything_of_the_others_in_long_histories(plane: ControlPlane) -> None:
    play(plane, examples=40, steps=80)
