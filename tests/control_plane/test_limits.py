"""Limits: set by an administrator, told to proxies with what they bind, and given out once however many ask at once."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.engine import Database
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.caller import SubjectId, TenantId
from control_plane.contract.wire import Measure, QuotaEntry, QuotaRequest
from control_plane.core.records import Limit, Tenant
from control_plane.limits import SLICES, USAGE_KEPT_SECONDS, Quotas
from control_plane.ports import CrossTenantReason, PlatformScope, TenantScope
from tests.control_plane.databases import BOTH
from tests.control_plane.serving import PROXY
from tests.control_plane.workspace import ENDPOINT, Json, Workspace, sha256

PLATFORM = PlatformScope(CrossTenantReason.ADMINISTER)
ACME = TenantId("acme")
FILE = "control_plane/adapters/sql/limits.py"
NOW = 1_800_000_000.0


def add_limit(workspace: Workspace, **fields: Any) -> httpx.Response:
    body: Json = {"measure": "requests", "amount": 100, "window_seconds": 60}
    return workspace.control_plane.admin("POST", workspace.path("limits"), body | fields)


def listed(workspace: Workspace) -> list[Json]:
    items: list[Json] = workspace.control_plane.made("GET", workspace.path("limits"))["items"]
    return items


def quota(workspace: Workspace, *entries: Json) -> list[Json]:
    response = workspace.control_plane.http.post("/internal/quota", json={"entries": list(entries)}, auth=PROXY)
    assert response.status_code == 200, response.text
    grants: list[Json] = response.json()["grants"]
    return grants


def test_a_limit_is_set_listed_and_taken_away(granted: Workspace) -> None:
    made = add_limit(granted, credential="example", each_subject=True, measure="tokens").json()

    (limit,) = listed(granted)
    granted.control_plane.made("DELETE", granted.path(f"limits/{made['id']}"))

    assert limit == made
    assert (limit["credential"], limit["subject"], limit["each_subject"]) == ("example", None, True)
    assert (limit["measure"], limit["amount"], limit["window_seconds"], limit["granted"]) == ("tokens", 100, 60, 0)
    assert listed(granted) == []
    assert [event["action"] for event in granted.audit()][-2:] == ["limit.add", "limit.remove"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"measure": "euros"}, "measure"),
        ({"measure": 3}, "measure"),
        ({"amount": 0}, "amount"),
        ({"amount": "many"}, "amount"),
        ({"window_seconds": 0}, "window_seconds"),
        ({"window_seconds": 100 * 86_400}, "window_seconds"),
        ({"subject": "alice", "each_subject": True}, "each_subject"),
        ({"per": "hour"}, "per"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_with_its_field(workspace: Workspace, fields: Json, named: str) -> None:
    response = add_limit(workspace, **fields)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field")
    assert response.json()["detail"].startswith(f"{named}:")


def test_a_limit_of_what_is_not_there_is_not_found(workspace: Workspace, other_workspace: Workspace) -> None:
    made = add_limit(other_workspace).json()

    assert add_limit(workspace, credential="nothing").status_code == 404
    foreign = workspace.control_plane.admin("DELETE", workspace.path(f"limits/{made['id']}"))
    absent = workspace.control_plane.admin("DELETE", workspace.path("limits/lim_0"))
    assert foreign.status_code == absent.status_code == 404
    assert foreign.json()["detail"] == absent.json()["detail"]
    assert len(listed(other_workspace)) == 1


@pytest.mark.guards("control_plane/resolution.py", '*(("limits",) if binding.limits else ()),', "")
def test_an_answer_tells_the_limits_that_apply_and_insists_that_they_are_understood(granted: Workspace) -> None:
    granted.add_credential("other")
    every: dict[str, Json] = {
        "all": {},
        "credential": {"credential": "example"},
        "subject": {"subject": "alice"},
        "each": {"each_subject": True},
        "other credential": {"credential": "other"},
        "other subject": {"subject": "bob"},
    }
    limits = {name: add_limit(granted, **fields).json()["id"] for name, fields in every.items()}
    issued = granted.exchange()

    answer = granted.ask(
        {
            "kind": "placeholder",
            "placeholder_sha256": sha256(issued["access_token"]),
            "caller": granted.caller(issued),
            "endpoint": dict(ENDPOINT),
        }
    )

    told = {limit["id"]: limit for limit in answer["answer"]["binding"]["limits"]}
    assert told.keys() == {limits[name] for name in ("all", "credential", "subject", "each")}
    assert answer["must_understand"] == ["limits"]
    assert told[limits["all"]]["bucket"] == ""
    assert len(told[limits["each"]]["bucket"]) == 32
    assert "alice" not in told[limits["each"]]["bucket"]


def test_an_answer_without_limits_is_as_it_always_was(granted: Workspace) -> None:
    issued = granted.exchange()

    answer = granted.resolve(issued)

    assert "limits" not in answer["binding"]


def test_proxies_hear_of_a_change(workspace: Workspace) -> None:
    before = position(workspace)
    made = add_limit(workspace).json()
    workspace.control_plane.made("DELETE", workspace.path(f"limits/{made['id']}"))

    changes = workspace.control_plane.look(
        "SELECT kind, subject_id, revoked FROM outbox WHERE sequence > ? AND tenant = ?", before, workspace.tenant
    )

    assert changes == [("tenant", workspace.tenant, 0)] * 2


def position(workspace: Workspace) -> int:
    ((newest,),) = workspace.control_plane.look("SELECT coalesce(max(sequence), 0) FROM outbox")
    return int(newest)


def test_a_proxy_gets_slices_until_there_is_nothing_left(workspace: Workspace) -> None:
    limit = add_limit(workspace, amount=45, window_seconds=86_400).json()
    entry = {"limit_id": limit["id"], "wanted": 1}

    granted = [quota(workspace, entry)[0]["granted"] for _ in range(24)]

    assert granted == [2] * 22 + [1, 0]
    assert listed(workspace)[0]["granted"] == 45


def test_what_is_given_back_is_given_out_again_and_what_was_used_beyond_is_counted(workspace: Workspace) -> None:
    limit = add_limit(workspace, amount=100, window_seconds=86_400).json()
    (first,) = quota(workspace, {"limit_id": limit["id"], "wanted": 60})

    quota(workspace, {"limit_id": limit["id"], "returned": 20, "window": first["window"]})
    quota(workspace, {"limit_id": limit["id"], "returned": 30, "window": first["window"] - 1})  # of another window
    quota(workspace, {"limit_id": limit["id"], "used": 50})
    (rest,) = quota(workspace, {"limit_id": limit["id"], "wanted": 100})

    assert first["granted"] == 60
    assert rest["granted"] == 10
    assert 0 < rest["ends_in_seconds"] <= 86_400


def test_a_limit_that_does_not_exist_is_said_not_to(workspace: Workspace) -> None:
    (grant,) = quota(workspace, {"limit_id": "lim_0", "wanted": 1})

    assert (grant["exists"], grant["granted"]) == (False, 0)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"entries": [{"wanted": 1}]}', b'{"entries": 7}'])
def test_what_is_no_question_about_quotas_is_an_error(workspace: Workspace, body: bytes) -> None:
    response = workspace.control_plane.http.post("/internal/quota", content=body, auth=PROXY)

    assert (response.status_code, response.json()["code"]) == (400, "malformed_request")


def test_too_many_questions_at_once_are_an_error(workspace: Workspace) -> None:
    entries = [{"limit_id": f"lim_{number}", "wanted": 1} for number in range(1_001)]

    response = workspace.control_plane.http.post("/internal/quota", json={"entries": entries}, auth=PROXY)

    assert response.status_code == 400


def test_a_credentials_limits_go_with_it(granted: Workspace) -> None:
    add_limit(granted, credential="example")

    granted.control_plane.made("DELETE", granted.path("credentials/example"))

    assert listed(granted) == []


# --- the store, on both databases ------------------------------------------------------------------------------------


@pytest.fixture
async def store(database: Database) -> SqlStore:
    store = SqlStore(database, LocalWake())
    async with store.write(PLATFORM) as records:
        await records.tenants.add(Tenant(ACME, 1.0))
        await records.limits.add(LIMIT)
    return store


LIMIT = Limit(
    id="lim_1",
    tenant=ACME,
    credential_id=None,
    subject=SubjectId("alice"),
    each_subject=False,
    measure=Measure.REQUESTS,
    amount=100,
    window_seconds=60,
    created_at=1.0,
)


async def test_a_limit_is_read_back_unchanged(store: SqlStore) -> None:
    async with store.read(TenantScope(ACME)) as records:
        assert await records.limits.get("lim_1") == LIMIT
        assert await records.limits.list() == [LIMIT]
    async with store.read(TenantScope(TenantId("evil"))) as records:
        assert await records.limits.get("lim_1") is None
        assert await records.limits.of_tenant(ACME) == []


@BOTH
@pytest.mark.guards(FILE, "more = USAGE.c.granted + wanted <= limit.amount", "more = USAGE.c.granted >= 0")
async def test_proxies_that_ask_at_once_never_get_more_than_there_is(store: SqlStore) -> None:
    dice, taken = random.Random(7), 0

    async def proxy() -> None:
        nonlocal taken
        quotas = Quotas(store, clock=lambda: NOW)
        for _ in range(10):
            wanted = dice.randint(1, 9)
            (grant,) = (await quotas(QuotaRequest((QuotaEntry("lim_1", wanted=wanted),)))).grants
            taken += grant.granted
            if grant.granted and dice.random() < 0.3:
                back = dice.randint(1, grant.granted)
                taken -= back
                entry = QuotaEntry("lim_1", returned=back, window=grant.window)
                await quotas(QuotaRequest((entry,)))

    await asyncio.gather(*(proxy() for _ in range(6)))

    async with store.read(TenantScope(ACME)) as records:
        granted = await records.limits.granted(LIMIT, bucket="", now=NOW)
    assert taken == granted == LIMIT.amount


async def test_a_new_window_begins_with_the_whole_amount_and_old_ones_are_forgotten(store: SqlStore) -> None:
    now = NOW
    quotas = Quotas(store, clock=lambda: now)
    everything = QuotaRequest((QuotaEntry("lim_1", wanted=100),))

    first = (await quotas(everything)).grants[0].granted
    none = (await quotas(everything)).grants[0].granted
    now += 60
    second = (await quotas(everything)).grants[0].granted
    now += USAGE_KEPT_SECONDS + 60
    await quotas.forget()

    assert (first, none, second) == (100, 0, 100)
    async with store.read(TenantScope(ACME)) as records:
        assert await records.limits.granted(LIMIT, bucket="", now=NOW) == 0


async def test_each_bucket_has_the_whole_amount(store: SqlStore) -> None:
    quotas = Quotas(store, clock=lambda: NOW)
    entries = tuple(QuotaEntry("lim_1", bucket, wanted=1) for bucket in ("b", "a"))

    for _ in range(SLICES):
        await quotas(QuotaRequest(entries))
    grants = (await quotas(QuotaRequest(entries))).grants

    assert [(grant.bucket, grant.granted) for grant in grants] == [("a", 0), ("b", 0)]
