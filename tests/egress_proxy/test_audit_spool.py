"""The audit trail's way: at least once, bounded, and what happens when it is full."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from control_plane.contract.refusal import RefusalCode
from control_plane.contract.wire import AUDIT_BATCH, AuditBatch, AuditEvent, join_audit_batch, read
from egress_proxy.audit import AuditSpool, RepeatedEvent
from egress_proxy.config import AuditMode
from tests.egress_proxy.world import World, get, reverse_path
from tests.support.control_plane_simulator import ControlPlaneSimulator
from tests.support.upstream import Upstream, plain


def event(number: int, tenant: str = "acme") -> AuditEvent:
    return AuditEvent(f"e{number}", 0.0, f"r{number}", "swap", tenant=tenant)


class Trail:
    """A control plane that takes batches, or does not."""

    def __init__(self, takes: Callable[[], bool] = lambda: True) -> None:
        self.batches: list[AuditBatch] = []
        self.attempts = 0
        self._takes = takes

    async def deliver(self, pieces: Sequence[bytes], dropped: int) -> None:
        self.attempts += 1
        if not self._takes():
            raise ConnectionError
        self.batches.append(read(AUDIT_BATCH, join_audit_batch(pieces, dropped=dropped)))

    @property
    def ids(self) -> list[str]:
        return [each.event_id for batch in self.batches for each in batch.events]


def admits(spool: AuditSpool, tenant: str) -> bool:
    return spool.admits_swap(spool.room_for_requests(tenant))


async def flushed(spool: AuditSpool) -> None:
    spool.stop()
    await asyncio.wait_for(spool.run(), 10)


async def test_events_are_delivered_in_order_and_in_batches() -> None:
    trail = Trail()
    spool = AuditSpool(trail.deliver, capacity=20_000, mode=AuditMode.STRICT)
    for number in range(2_500):
        spool.record(event(number))

    await flushed(spool)

    assert trail.ids == [f"e{number}" for number in range(2_500)]
    assert [len(batch.events) for batch in trail.batches] == [1000, 1000, 500]
    assert len(spool) == 0


async def test_a_batch_that_was_not_taken_is_sent_again_with_the_same_names() -> None:
    trail = Trail(lambda: trail.attempts > 2)
    spool = AuditSpool(trail.deliver, capacity=10, mode=AuditMode.STRICT)
    spool.record(event(1))

    await flushed(spool)

    assert (trail.attempts, trail.ids) == (3, ["e1"])


async def test_a_repeated_event_differs_in_its_id_time_and_request_alone() -> None:
    trail = Trail()
    spool = AuditSpool(trail.deliver, capacity=10, mode=AuditMode.STRICT)
    first = event(1)
    again = RepeatedEvent(first)
    spool.record(first)
    spool.record_again(spool.room_for_requests("acme"), again.beginning("r2", 1795966773.25), again.rest)

    await flushed(spool)

    assert trail.batches[0].events == (first, replace(first, event_id="r2", at=1795966773.25, request_id="r2"))


@pytest.mark.guards("egress_proxy/audit.py", "self._mode is AuditMode.BEST_EFFORT or", "True or")
async def test_a_full_spool_stops_swaps() -> None:
    spool = AuditSpool(Trail().deliver, capacity=20, mode=AuditMode.STRICT)
    for number in range(7):
        assert admits(spool, "acme")
        spool.record(event(number))

    assert not admits(spool, "acme")
    assert admits(spool, "other")


async def test_a_full_spool_drops_and_counts_when_that_is_wanted() -> None:
    trail = Trail()
    spool = AuditSpool(trail.deliver, capacity=20, mode=AuditMode.BEST_EFFORT)
    for number in range(20):
        assert admits(spool, "acme")
        spool.record(event(number))

    await flushed(spool)

    assert len(trail.ids) == 7
    assert spool.dropped == 13
    assert sum(batch.dropped for batch in trail.batches) == 13


async def test_one_tenants_flood_leaves_room_for_the_others() -> None:
    spool = AuditSpool(Trail().deliver, capacity=20, mode=AuditMode.STRICT)
    for number in range(50):
        spool.record(event(number, "loud"))

    assert not admits(spool, "loud")
    assert admits(spool, "quiet")


@pytest.mark.parametrize("tenants", [[None], ["loud"], [None, "loud", "louder", "quiet"]])
@pytest.mark.guards(
    "egress_proxy/audit.py", "self._refusals if event.code is not None else self._requests", "self._requests"
)
async def test_no_flood_of_refusals_keeps_a_swap_from_being_recorded(tenants: list[str | None]) -> None:
    spool = AuditSpool(Trail().deliver, capacity=40, mode=AuditMode.STRICT)
    refused = replace(event(0), action="refuse", code=RefusalCode.UNKNOWN_PLACEHOLDER)
    for number in range(200):
        for tenant in tenants:
            spool.record(replace(refused, event_id=f"{tenant}{number}", tenant=tenant))

    assert admits(spool, "loud")
    assert admits(spool, "quiet")
    assert len(spool) <= 10


async def test_room_is_there_again_after_delivery() -> None:
    spool = AuditSpool(Trail().deliver, capacity=4, mode=AuditMode.STRICT)
    for number in range(3):
        spool.record(event(number))
    assert not admits(spool, "acme")

    await flushed(spool)

    assert admits(spool, "acme")


@pytest.mark.guards(
    "egress_proxy/audit.py",
    "or not room.is_full",
    "or True",
)
def test_a_swap_that_cannot_be_recorded_does_not_happen(
    tmp_path: Path, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    with (
        ControlPlaneSimulator() as plane,
        World.start(tmp_path, plane, upstream_ca, audit_spool_events=11) as world,
    ):
        plane.takes_audit = False
        ticket = world.ticket(upstream.url)
        upstream.default = plain(b"ok")
        with world.reverse() as line:
            statuses = []
            for _ in range(6):
                response = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
                statuses.append(response.status)
            bare = line.ask(get(reverse_path(ticket)))
        plane.takes_audit = True

        assert statuses == [200, 200, 200, 200, 503, 503]
        assert response.refusal == "audit_unavailable"
        assert response.header("retry-after")
        assert bare.status == 200
        assert len(upstream.requests) == 5
        plane.wait_for(lambda p: len([e for e in p.audited if e.action == "swap"]) == 4)
        plane.wait_for(lambda p: p.audit_gaps == 2)
