"""The audit trail's way to the control plane: spooled in memory, sent in batches, delivered at least once.

Rules: an event is in the spool before a secret leaves; sending never waits for a request, nor a request for sending; a
batch is repeated until it is taken (the control plane knows an event by its `event_id`); the spool is bounded, in all
and for each tenant, so that one tenant's flood neither fills the memory nor stops the others. When it is full, swaps
stop (`strict`), or events are dropped and counted, which the trail then shows as a gap.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from control_plane.contract.wire import AuditBatch, AuditEvent
from egress_proxy.config import AuditMode

BATCH_SECONDS: Final = 1.0
BATCH_EVENTS: Final = 1_000
RETRY_SECONDS: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
TENANT_SHARE: Final = 0.8
"""How much of the spool one tenant may fill."""

log = structlog.get_logger("egress_proxy.audit")

Deliver = Callable[[AuditBatch], Awaitable[None]]
"""Sends one batch; raises when the control plane has not taken it."""


class AuditSpool:
    """Events on their way to the control plane."""

    def __init__(self, deliver: Deliver, *, capacity: int, mode: AuditMode) -> None:
        self._deliver = deliver
        self._capacity = capacity
        self._tenant_quota = max(1, int(capacity * TENANT_SHARE))
        self._mode = mode
        self._waiting: deque[AuditEvent] = deque()
        self._by_tenant: Counter[str | None] = Counter()
        self._not_yet_told = 0
        self._wake = asyncio.Event()
        self._stopping = False
        self.dropped = 0
        self.delivered = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def admits_swap(self, tenant: str) -> bool:
        """Whether a swap of this tenant may happen: it can be recorded, or need not be."""
        return self._mode is AuditMode.BEST_EFFORT or self._has_room(tenant)

    def record(self, event: AuditEvent) -> None:
        """Spool one event; dropped and counted where there is no room."""
        if not self._has_room(event.tenant):
            self.dropped += 1
            self._not_yet_told += 1
            return
        self._waiting.append(event)
        self._by_tenant[event.tenant] += 1
        if len(self._waiting) == BATCH_EVENTS:
            self._wake.set()

    async def run(self) -> None:
        """Deliver until stopped and empty."""
        while not (self._stopping and not self._waiting and not self._not_yet_told):
            if not self._stopping:
                await self._until_due()
            await self._send_one_batch()

    def stop(self) -> None:
        """What is spooled is still delivered; `run` then returns."""
        self._stopping = True
        self._wake.set()

    def _has_room(self, tenant: str | None) -> bool:
        return len(self._waiting) < self._capacity and self._by_tenant[tenant] < self._tenant_quota

    async def _until_due(self) -> None:
        try:
            async with asyncio.timeout(BATCH_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            pass
        if not self._stopping:
            self._wake.clear()

    async def _send_one_batch(self) -> None:
        events = tuple(self._waiting[at] for at in range(min(len(self._waiting), BATCH_EVENTS)))
        dropped = self._not_yet_told
        if not events and not dropped:
            return
        attempt = 0
        while True:
            try:
                await self._deliver(AuditBatch(events, dropped))
                break
            except Exception as error:  # border: whatever went wrong, the batch is kept and sent again
                log.warning("audit_not_delivered", error=type(error).__name__, spooled=len(self._waiting))
                await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
                attempt += 1
        self._not_yet_told -= dropped
        self.delivered += len(events)
        for event in events:
            self._waiting.popleft()
            self._by_tenant[event.tenant] -= 1
            if not self._by_tenant[event.tenant]:
                del self._by_tenant[event.tenant]
        if len(self._waiting) >= BATCH_EVENTS:
            self._wake.set()
