"""The chain in the database, on SQLite and on PostgreSQL: several write at once, nothing is left out, all is shown."""

import asyncio
import json
import os
from typing import Any

import pytest
from sqlalchemy import text

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.engine import Database
from control_plane.adapters.sql.store import SqlStore
from control_plane.audit_keys import HANDED_OVER_SECONDS, AuditKeys
from control_plane.chaining import EVENTS_AT_ONCE, Chaining
from control_plane.contract.caller import TenantId
from control_plane.contract.wire import AuditEvent
from control_plane.core.chain import (
    Finding,
    Head,
    Verification,
    end_line,
    event_line,
    head_from_line,
    head_line,
    next_head,
    signed_head,
    trail_line,
)
from control_plane.core.records import KeyPurpose
from control_plane.core.sealing import Kek
from control_plane.custody import Custody
from control_plane.own_keys import OwnKeyring
from control_plane.ports import CrossTenantReason, PlatformScope, Scope, TenantScope
from control_plane.trail import Trail
from control_plane.trail_export import TrailExport
from tests.control_plane.databases import BOTH

CHAINING = "control_plane/chaining.py"
PLATFORM = PlatformScope(CrossTenantReason.AUDIT)
ACME, EVIL = TenantId("acme"), TenantId("evil")
DAY = 86_400.0
NOW = 1_000 * DAY


def entropy(count: int) -> bytes:
    return b"e" * count


def of(tenant: TenantId | None) -> Scope:
    return TenantScope(tenant) if tenant is not None else PLATFORM


class Ledger:
    """A store with its chain, as one replica has it."""

    def __init__(self, database: Database, *, retention_days: int | None = None) -> None:
        self.database = database
        self.now = NOW
        self.store = SqlStore(database, LocalWake())
        self.custody = Custody([Kek.of(b"k" * 32)], entropy=entropy)
        self.trail = Trail(lambda: self.now, entropy)
        self.chaining = self.replica(retention_days=retention_days)
        self._count = 0

    def clock(self) -> float:
        return self.now

    def replica_keys(self) -> AuditKeys:
        return AuditKeys(self.store, self.custody, clock=lambda: self.now, entropy=entropy)

    def replica(self, *, retention_days: int | None = None) -> Chaining:
        return Chaining(self.store, self.replica_keys(), self.trail, clock=self.clock, retention_days=retention_days)

    def event(self, tenant: TenantId | None = ACME, **fields: Any) -> AuditEvent:
        self._count += 1
        given: dict[str, Any] = {"event_id": f"ev_{self._count}", "at": self.now, "request_id": "req", "action": "swap"}
        return AuditEvent(tenant=tenant, **(given | fields))

    async def write(self, count: int = 1, tenant: TenantId | None = ACME) -> None:
        async with self.store.write(of(tenant)) as records:
            await records.audit.append([self.event(tenant) for _ in range(count)])

    async def chained(self, *sizes: int, tenant: TenantId | None = ACME) -> None:
        """Batches of these sizes."""
        for size in sizes:
            await self.write(size, tenant)
            await self.chaining.link()

    async def rotate_key(self, *, in_use_from: float) -> None:
        own_keys = OwnKeyring(self.store, self.custody, clock=lambda: self.now, entropy=os.urandom)
        async with self.store.write(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            await records.own_keys.add(await own_keys.made(KeyPurpose.AUDIT, in_use_from=in_use_from))

    async def export(self, tenant: TenantId | None = ACME, *, after: int = 0) -> list[dict[str, Any]]:
        pages = TrailExport(self.store).lines(of(tenant), tenant, after=after)
        return [json.loads(json.dumps(line)) async for page in pages for line in page]

    async def found(self, tenant: TenantId | None = ACME, *, after: int = 0, heads: tuple[Head, ...] = ()) -> Finding:
        keys = await self.replica_keys().ring()
        verification = Verification(keys.public_keys, known_heads=heads)
        for line in await self.export(tenant, after=after):
            verification.read(line)
        (finding,) = verification.findings()
        return finding

    async def heads(self) -> list[Head]:
        return [head_from_line(line) for line in await self.export() if line["kind"] == "head"]

    async def tamper(self, statement: str, **values: Any) -> None:
        """By somebody with the database in his hands."""
        async with self.database.engine.begin() as connection:
            changed = await connection.execute(text(statement), values)
            assert changed.rowcount > 0

    async def tamper_table(self, statement: str) -> None:
        async with self.database.engine.begin() as connection:
            await connection.execute(text(statement))


@pytest.fixture
async def ledger(database: Database) -> Ledger:
    return Ledger(database)


async def test_each_tenant_has_a_chain_of_its_own_and_so_have_the_events_of_none(ledger: Ledger) -> None:
    await ledger.write(2, ACME)
    await ledger.write(3, EVIL)
    await ledger.write(1, None)
    await ledger.write(2, ACME)

    linked = await ledger.chaining.link()

    assert linked == 8
    findings = [await ledger.found(tenant) for tenant in (ACME, EVIL, None)]
    assert [(finding.count, finding.last, finding.is_whole) for finding in findings] == [
        (4, 4, True),
        (3, 3, True),
        (1, 1, True),
    ]


async def test_an_event_that_belongs_to_no_request_is_as_whole_as_any_other(ledger: Ledger) -> None:
    async with ledger.store.write(of(ACME)) as records:
        await records.audit.append([ledger.event(request_id=""), ledger.event(code=None)])
    await ledger.chaining.link()

    finding = await ledger.found()

    assert (finding.count, finding.is_whole) == (2, True)


async def test_batches_follow_each_other_and_the_newest_events_are_shown_as_not_linked_yet(ledger: Ledger) -> None:
    await ledger.chained(2, 1, 3)
    await ledger.write(2)

    finding = await ledger.found()

    assert (finding.number, finding.last, finding.unchained, finding.is_whole) == (3, 6, 2, True)


async def test_more_than_fits_into_one_batch_is_linked_in_several(ledger: Ledger) -> None:
    await ledger.write(EVENTS_AT_ONCE + 5)

    await ledger.chaining.link()

    finding = await ledger.found()
    assert (finding.number, finding.last, finding.unchained, finding.is_whole) == (2, EVENTS_AT_ONCE + 5, 0, True)


@BOTH
async def test_replicas_that_link_at_once_link_every_event_once(ledger: Ledger) -> None:
    replicas = [ledger.replica() for _ in range(4)]

    for _ in range(5):
        await asyncio.gather(*(ledger.write(3) for _ in range(4)), *(replica.link() for replica in replicas))
    await ledger.chaining.link()

    finding = await ledger.found()
    assert (finding.last, finding.unchained, finding.problems) == (60, 0, [])


@BOTH
async def test_an_event_whose_transaction_ends_late_is_linked_late_and_not_left_out(database: Database) -> None:
    ledger = Ledger(database)
    if database.reader is not None:
        pytest.skip("SQLite has one writer at a time: nobody is numbered before and ends after")

    async with ledger.store.write(TenantScope(ACME)) as slow:
        await slow.audit.append([ledger.event(event_id="slow")])
        await ledger.chained(2)  # numbered later, linked now
    await ledger.chaining.link()

    events = [line["event"]["event_id"] for line in await ledger.export() if line["kind"] == "event"]
    assert events[-1] == "slow"
    assert (await ledger.found()).is_whole


async def test_a_transaction_that_fails_leaves_nothing_to_link(ledger: Ledger) -> None:
    async def write_and_fail() -> None:
        async with ledger.store.write(TenantScope(ACME)) as records:
            await records.audit.append([ledger.event()])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await write_and_fail()

    assert await ledger.chaining.link() == 0


async def test_a_batch_that_a_proxy_sends_again_is_linked_once(ledger: Ledger) -> None:
    event = ledger.event()

    for _ in range(2):
        async with ledger.store.write(PLATFORM) as records:
            await records.audit.append([event])
        await ledger.chaining.link()

    assert (await ledger.found()).last == 1


async def test_a_chain_goes_on_under_a_new_key_and_verifies_with_both(ledger: Ledger) -> None:
    await ledger.chained(2)
    await ledger.rotate_key(in_use_from=ledger.now + 600)
    await ledger.chained(1)
    ledger.now += 601
    await ledger.chained(3)

    finding = await ledger.found()

    signers = [head.key_id for head in await ledger.heads()]
    assert finding.is_whole
    assert signers[0] == signers[1] != signers[2]
    assert finding.key_ids == set(signers)


@BOTH
@pytest.mark.parametrize("compromised", [False, True])
async def test_every_chain_is_handed_over_to_a_new_key_also_one_to_which_nothing_happens(
    ledger: Ledger, compromised: bool
) -> None:
    await ledger.chained(2, 1)
    await ledger.chained(1, tenant=EVIL)
    await ledger.chaining.once()
    await ledger.rotate_key(in_use_from=ledger.now + (0 if compromised else 600))
    ledger.now += 20 if compromised else 601

    await ledger.chaining.once()
    handed_over = [len(await ledger.heads())]
    await ledger.chaining.once()
    ledger.now += HANDED_OVER_SECONDS + 1

    heads = await ledger.heads()
    assert [len(heads), *handed_over] == [3, 3]
    assert heads[0].key_id == heads[1].key_id != heads[2].key_id
    assert (heads[2].leaves, heads[2].last) == ((), 3)
    findings = [await ledger.found(tenant) for tenant in (ACME, EVIL)]
    assert [(finding.count, finding.problems) for finding in findings] == [(3, []), (1, [])]
    await ledger.chained(1)
    assert (await ledger.found()).is_whole


@pytest.mark.guards(CHAINING, "!= ring.stored:", "== set():")
async def test_a_replica_signs_nothing_with_a_key_that_was_replaced_a_moment_ago(ledger: Ledger) -> None:
    other = ledger.replica()
    await ledger.chained(1)
    await ledger.rotate_key(in_use_from=ledger.now)
    await ledger.write(1)

    await ledger.chaining.link()
    await ledger.write(1)
    await other.link()

    signers = [head.key_id for head in await ledger.heads()]
    assert signers[0] != signers[1] == signers[2]


async def test_what_a_replica_with_a_slow_clock_signs_is_no_older_than_what_was_signed_before(ledger: Ledger) -> None:
    await ledger.chained(1)
    await ledger.rotate_key(in_use_from=ledger.now + 600)
    slow = ledger.replica()
    ledger.now += 601
    await ledger.write(1)
    await ledger.replica().link()
    ledger.now -= 60
    await ledger.write(1)

    await slow.link()
    await slow.hand_over()

    signers = [head.key_id for head in await ledger.heads()]
    assert signers[0] != signers[1] == signers[2]
    assert len(signers) == 3


@BOTH
async def test_what_stands_for_removed_events_is_handed_over_too(database: Database) -> None:
    ledger = Ledger(database, retention_days=30)
    await ledger.chained(3)
    ledger.now += 31 * DAY
    await ledger.chaining.forget()
    await ledger.rotate_key(in_use_from=ledger.now)
    ledger.now += 20.0

    await ledger.chaining.once()
    ledger.now += HANDED_OVER_SECONDS

    finding = await ledger.found()
    assert (finding.problems, finding.removed) == ([], 3)


@pytest.mark.guards(CHAINING, "        await self.hand_over()\n", "        pass\n")
async def test_a_head_forged_with_the_old_key_after_the_change_is_not_believed(ledger: Ledger) -> None:
    """By somebody who has that key, and writes in the database."""
    old = await ledger.replica_keys().ring()
    await ledger.chained(2, 1)
    await ledger.rotate_key(in_use_from=ledger.now)
    ledger.now += 20.0
    await ledger.chaining.once()
    ledger.now += HANDED_OVER_SECONDS
    first, second, handed_over = await ledger.heads()
    forged = signed_head(
        next_head(first, tenant=ACME, events=[{"event_id": "ev_3", "action": "nothing"}], at=second.at), old.sign
    )

    async def found(heads: list[Head], *lines: dict[str, Any]) -> Finding:
        verification = Verification((await ledger.replica_keys().ring()).public_keys)
        events = [line for line in await ledger.export() if line["kind"] == "event"][:2]
        for line in [trail_line(ACME, after=0), *events, head_line(first), *lines, *map(head_line, heads)]:
            verification.read(line)
        verification.read(end_line(3, unchained=0))
        (finding,) = verification.findings()
        return finding

    event = event_line(3, {"event_id": "ev_3", "action": "nothing"})
    assert (await ledger.found()).is_whole
    assert "prove nothing" in (await found([forged], event)).problems[0]
    assert "one of them was replaced" in (await found([forged, handed_over], event)).problems[0]


# --- what somebody with the database in his hands can do --------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        (
            "UPDATE audit_events SET action = 'forward' WHERE event_id = 'ev_2'",
            "event 2 was altered: its column action",
        ),
        ("UPDATE audit_events SET at = 5 WHERE event_id = 'ev_2'", "event 2 was altered: its column at"),
        ("DELETE FROM audit_events WHERE event_id = 'ev_2'", "event 2 was deleted"),
        ("UPDATE audit_heads SET previous = 'x' WHERE number = 2", "batch 2 is not signed by a known key"),
        ("UPDATE audit_heads SET at = 5 WHERE number = 2", "batch 2 is not signed by a known key"),
        ("UPDATE audit_heads SET sequences = '[2, 1, 3]' WHERE number = 1", "events were reordered"),
        ("UPDATE audit_heads SET sequences = '7' WHERE number = 1", "events 1 to 3 are missing"),
        ("DELETE FROM audit_heads WHERE number = 2", "batches 2 to 2 are missing"),
        ("DELETE FROM audit_heads WHERE number = 1", "batches 1 to 1 are missing"),
        ("UPDATE audit_heads SET number = 9 WHERE number = 2", "batches 2 to 2 are missing"),
    ],
)
async def test_what_was_done_to_the_rows_is_found(ledger: Ledger, statement: str, problem: str) -> None:
    await ledger.chained(3, 2, 1)

    await ledger.tamper(statement)

    finding = await ledger.found()
    assert any(problem in each for each in finding.problems), finding.problems


@pytest.mark.parametrize("kind", ["other", "[1]", "7", "no JSON at all"])
async def test_a_record_that_was_edited_is_found_even_where_it_is_no_record_any_more(
    database: Database, ledger: Ledger, kind: str
) -> None:
    await ledger.chained(3)
    if kind == "no JSON at all" and database.reader is None:
        pytest.skip("PostgreSQL stores no such thing in a column of JSON")
    cast = "" if database.reader is not None else "CAST(:record AS JSON)"
    record = '{"event_id": "ev_2", "action": "forward"}' if kind == "other" else kind

    await ledger.tamper(f"UPDATE audit_events SET record = {cast or ':record'} WHERE event_id = 'ev_2'", record=record)

    assert "event 2 was altered" in (await ledger.found()).problems


async def test_events_that_are_deleted_before_they_are_linked_are_missed(ledger: Ledger) -> None:
    await ledger.write(3)

    await ledger.tamper("DELETE FROM audit_events WHERE event_id = 'ev_2'")
    await ledger.chaining.link()

    assert (await ledger.found()).problems == ["event 2 was deleted before it was chained"]


async def test_a_tail_that_was_cut_off_is_found_by_a_head_from_earlier(ledger: Ledger) -> None:
    await ledger.chained(2, 2)
    earlier = (await ledger.heads())[-1]

    await ledger.tamper("DELETE FROM audit_events WHERE event_id IN ('ev_3', 'ev_4')")
    await ledger.tamper("DELETE FROM audit_heads WHERE number = 2")

    assert (await ledger.found()).is_whole  # which is why heads are kept elsewhere
    assert "the end was cut off: batch 2" in (await ledger.found(heads=(earlier,))).problems[0]
    await ledger.chained(1)
    assert "the chain was written anew" in (await ledger.found(heads=(earlier,))).problems[0]


async def test_a_chain_that_gets_shorter_while_we_run_is_noticed_at_the_next_link(ledger: Ledger) -> None:
    await ledger.chained(2, 2)

    await ledger.tamper("DELETE FROM audit_heads WHERE number = 2")
    await ledger.chained(1)

    assert ledger.chaining.truncations == 1


@BOTH
async def test_a_tenant_reads_its_own_chain_alone(ledger: Ledger) -> None:
    await ledger.chained(2, tenant=ACME)
    await ledger.chained(3, tenant=EVIL)
    await ledger.write(1, ACME)

    lines = [line async for page in TrailExport(ledger.store).lines(TenantScope(EVIL), ACME, after=0) for line in page]

    assert [line["kind"] for line in lines] == ["trail", "end"]
    assert lines[-1] == {"kind": "end", "position": 0, "unchained": 0}


# --- resumption and retention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("after", "first"), [(0, 1), (1, 1), (3, 4), (4, 4), (5, 6), (6, None), (99, None)])
async def test_an_export_is_resumed_at_the_batch_that_follows(ledger: Ledger, after: int, first: int | None) -> None:
    await ledger.chained(3, 2, 1)

    finding = await ledger.found(after=after)

    assert finding.is_whole
    assert finding.first == first


async def test_retention_removes_whole_batches_and_leaves_an_anchor_from_which_the_rest_verifies(
    database: Database,
) -> None:
    ledger = Ledger(database, retention_days=30)
    await ledger.chained(3, 2)
    earlier = await ledger.heads()
    ledger.now += 20 * DAY
    await ledger.chained(4)
    ledger.now += 11 * DAY

    removed = await ledger.chaining.forget()
    await ledger.chaining.link()

    finding = await ledger.found(heads=tuple(earlier))
    assert removed == 5
    assert (finding.removed, finding.first, finding.is_whole) == (5, 6, True)
    last = [line["event"] for line in await ledger.export() if line["kind"] == "event"][-1]
    assert (last["action"], last["detail"]) == (
        "audit.forget",
        "5 events up to position 5 were removed: their time was over",
    )


async def test_retention_goes_on_from_its_own_anchor(database: Database) -> None:
    ledger = Ledger(database, retention_days=30)
    for _ in range(3):
        await ledger.chained(2)
        ledger.now += 31 * DAY
        await ledger.chaining.forget()
        await ledger.chaining.link()

    finding = await ledger.found()

    assert finding.is_whole
    assert finding.removed > 0


@pytest.mark.guards("control_plane/chaining.py", "        if not heads:", "        if False:")
@pytest.mark.parametrize(
    "statement",
    [
        f"UPDATE audit_heads SET at = {NOW - 90 * DAY}",
        f"UPDATE audit_heads SET at = {NOW - 90 * DAY} WHERE number = 2",
    ],
)
async def test_what_was_only_made_to_look_old_is_not_removed(database: Database, statement: str) -> None:
    ledger = Ledger(database, retention_days=30)
    await ledger.chained(3, 2)

    await ledger.tamper(statement)

    assert await ledger.chaining.forget() == 0
    assert not (await ledger.found()).is_whole


async def test_without_retention_nothing_is_ever_removed(ledger: Ledger) -> None:
    await ledger.chained(3)
    ledger.now += 10_000 * DAY

    assert await ledger.chaining.forget() == 0
