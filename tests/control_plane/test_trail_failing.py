"""The trail takes nothing any more: then nothing is issued, and everything that takes something back still works."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from control_plane.contract.caller import TenantId
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.core.records import Tenant
from control_plane.ports import CrossTenantReason, PlatformScope, TenantScope
from control_plane.trail import ADMINISTRATOR, Actor, Trail
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.databases import BOTH
from tests.control_plane.serving import ADMIN_TOKEN, ControlPlane
from tests.control_plane.test_chaining import Ledger, ledger  # noqa: F401 (a fixture)
from tests.control_plane.workspace import JWT, Json, Workspace

PLATFORM = PlatformScope(CrossTenantReason.ADMINISTER)
ACME = TenantId("acme")


@pytest.fixture
def own_workspace(own_control_plane: OwnControlPlane) -> Workspace:
    """A control plane of its own, since its trail is going to be broken."""
    workspace = Workspace(own_control_plane(), "acme")
    workspace.add_credential()
    workspace.grant()
    return workspace


@contextmanager
def broken_trail(control_plane: ControlPlane) -> Iterator[None]:
    control_plane.edit(
        "CREATE TRIGGER trail_is_broken BEFORE INSERT ON audit_events BEGIN SELECT RAISE(ABORT, 'no'); END"
    )
    yield
    control_plane.edit("DROP TRIGGER trail_is_broken")


def refused(response: httpx.Response) -> str:
    return str(response.json()["code"])


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py", "raise RefusedError(AUDIT_UNAVAILABLE) from error", "return"
)
def test_nothing_is_issued_that_the_trail_does_not_have(own_workspace: Workspace) -> None:
    session = own_workspace.open_session()
    issued = own_workspace.exchange(session)

    with broken_trail(own_workspace.control_plane):
        exchange = own_workspace.token(
            subject_token=session["session_token"], subject_token_type=JWT, audience="example"
        )
        renewal = own_workspace.renewal(issued)
        by_hand = own_workspace.control_plane.admin(
            "POST", own_workspace.path("placeholders"), {"subject": "alice", "audience": "example", "ttl_seconds": 60}
        )
        opening = own_workspace.control_plane.admin(
            "POST", "/v1/sessions", {"tenant": "acme", "subject": "alice", "runtime": own_workspace.runtime}
        )
        grant = own_workspace.control_plane.admin(
            "POST", own_workspace.path("grants"), {"credential": "example", "subject": "bob"}
        )

    answers = (exchange, renewal, by_hand, opening, grant)
    assert [(answer.status_code, refused(answer)) for answer in answers] == [(503, "audit_unavailable")] * 5
    assert all(answer.headers["retry-after"] == "5" for answer in answers)
    tokens = own_workspace.control_plane.look("SELECT count(*) FROM tokens")
    assert tokens == [(2,)]  # the placeholder and proxy credential from before


def repairs(workspace: Workspace, session: Json, issued: Json, grant: Json) -> dict[str, Callable[[], httpx.Response]]:
    http = workspace.control_plane.http

    def admin(method: str, path: str, body: Json | None = None) -> httpx.Response:
        return http.request(method, path, json=body, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})

    runtime = (workspace.runtime, workspace.runtime_secret)
    return {
        "credential.rotate": lambda: admin(
            "POST", workspace.path("credentials/example/rotate"), {"secret": "the-new-one", "compromised": True}
        ),
        "placeholder.revoke": lambda: admin("DELETE", workspace.path(f"placeholders/{issued['id']}")),
        "proxy_credential.revoke": lambda: http.post(
            "/oauth/revoke", data={"token": issued["proxy_credential"]}, auth=runtime
        ),
        "grant.remove": lambda: admin("DELETE", workspace.path(f"grants/{grant['id']}")),
        "session.end": lambda: admin("DELETE", f"/v1/sessions/{session['session_id']}"),
        "credential.delete": lambda: admin("DELETE", workspace.path("credentials/example")),
        "client.delete": lambda: admin("DELETE", f"/v1/clients/{workspace.runtime}"),
        "tenant.delete": lambda: admin("DELETE", "/v1/tenants/acme?confirm=acme"),
    }


@pytest.mark.guards(
    "control_plane/trail.py", "if not REPAIRS.issuperset(event.action for event in events):", "if True:"
)
def test_what_takes_something_back_works_and_says_that_the_trail_does_not_have_it(
    own_workspace: Workspace,
) -> None:
    grant = own_workspace.grant(subject="bob")
    session = own_workspace.open_session()
    issued = own_workspace.exchange(session)
    acts = repairs(own_workspace, session, issued, grant)

    with broken_trail(own_workspace.control_plane):
        answers = {action: act() for action, act in acts.items()}

    assert {action: answer.status_code for action, answer in answers.items() if not answer.is_success} == {}
    assert {action: answer.headers.get("coatcheck-audit") for action, answer in answers.items()} == dict.fromkeys(
        acts, "unavailable"
    )
    assert own_workspace.control_plane.look("SELECT count(*) FROM tenants") == [(0,)]


def test_what_the_trail_could_not_take_is_in_it_as_soon_as_it_can(own_workspace: Workspace) -> None:
    issued = own_workspace.exchange()
    with broken_trail(own_workspace.control_plane):
        own_workspace.control_plane.made("DELETE", own_workspace.path(f"placeholders/{issued['id']}"))
        before = [event["action"] for event in own_workspace.audit()]

    deadline = time.monotonic() + 10
    while (after := [event["action"] for event in own_workspace.audit()]) == before and time.monotonic() < deadline:
        time.sleep(0.05)

    assert "placeholder.revoke" not in before
    assert after == [*before, "placeholder.revoke"]


def test_an_answer_says_nothing_of_the_trail_where_it_took_everything(own_workspace: Workspace) -> None:
    issued = own_workspace.exchange()

    answer = own_workspace.control_plane.admin("DELETE", own_workspace.path(f"placeholders/{issued['id']}"))

    assert answer.status_code == 204
    assert "coatcheck-audit" not in answer.headers


@BOTH
async def test_a_repair_is_committed_although_its_record_failed(ledger: Ledger) -> None:  # noqa: F811
    by = Actor(ADMINISTRATOR, "req_1")
    await ledger.tamper_table("ALTER TABLE audit_events RENAME TO elsewhere")

    async with ledger.store.write(PLATFORM) as records:
        await records.tenants.add(Tenant(ACME, 1.0))
        await ledger.trail.record(records, [ledger.trail.event("credential.rotate", by=by, tenant=ACME)])

    async with ledger.store.read(TenantScope(ACME)) as records:
        assert await records.tenants.get(ACME) is not None
    assert (ledger.trail.unrecorded, ledger.trail.failures) == (1, 1)
    await ledger.tamper_table("ALTER TABLE elsewhere RENAME TO audit_events")
    await ledger.chaining.repay()
    await ledger.chaining.link()
    assert ledger.trail.unrecorded == 0
    assert (await ledger.found(ACME)).last == 1


@BOTH
async def test_an_issue_is_rolled_back_with_its_failing_record(ledger: Ledger) -> None:  # noqa: F811
    by = Actor(ADMINISTRATOR, "req_1")
    await ledger.tamper_table("ALTER TABLE audit_events RENAME TO elsewhere")

    async def issue() -> None:
        async with ledger.store.write(PLATFORM) as records:
            await records.tenants.add(Tenant(ACME, 1.0))
            await ledger.trail.record(records, [ledger.trail.event("exchange", by=by, tenant=ACME)])

    with pytest.raises(RefusedError) as raised:
        await issue()

    assert raised.value.refusal.code is RefusalCode.AUDIT_UNAVAILABLE
    async with ledger.store.read(TenantScope(ACME)) as records:
        assert await records.tenants.get(ACME) is None


async def test_more_than_can_be_kept_becomes_a_gap(ledger: Ledger) -> None:  # noqa: F811
    trail = Trail(lambda: 1.0, os.urandom, max_owed=2)
    await ledger.tamper_table("ALTER TABLE audit_events RENAME TO elsewhere")

    for _ in range(5):
        async with ledger.store.write(PLATFORM) as records:
            await trail.record(records, [trail.event("grant.remove", by=Actor("a", "r"), tenant=ACME)])
    first = trail.owed()
    trail.repaid(len(first))
    (gap,) = trail.owed()
    trail.repaid(1)

    assert len(first) == 2
    assert (gap.action, gap.extra["dropped"]) == ("gap", "3")
    assert trail.owed() == []
