"""The audit trail's way to the control plane: spooled in memory, sent in batches, delivered at least once.

Rules: an event is in the spool before a secret leaves; sending never waits for a request, nor a request for sending; a
batch is repeated until it is taken (the control plane knows an event by its `event_id`); the spool is bounded, in all
and for each tenant, so that one tenant's flood neither fills the memory nor stops the others. When it is full, swaps
stop (`strict`), or events are dropped and counted, which the trail then shows as a gap.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Final
from weakref import WeakValueDictionary

import structlog

from control_plane.contract.wire import AUDIT_EVENT, AuditEvent, write
from egress_proxy.config import AuditMode

BATCH_SECONDS: Final = 1.0
BATCH_EVENTS: Final = 1_000
RETRY_SECONDS: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
REFUSAL_SHARE: Final = 0.25
"""How much of the spool refusals may fill: anybody can cause them, and they must not keep swaps from being recorded."""
TENANT_SHARE: Final = 0.5
"""How much of either part one tenant may fill; whoever is not known yet counts as one."""

log = structlog.get_logger("egress_proxy.audit")

Deliver = Callable[[Sequence[bytes], int], Awaitable[None]]
"""Sends one batch; raises when the control plane has not taken it. Pieces of events in JSON, each event led by a comma,
and how many were dropped before."""


class RepeatedEvent:
    """An event that is recorded again and again, as JSON: all of it is fixed but its id, time and request.

    The hot path records with it: writing an `AuditEvent` out costs twenty times as much, and thousands of events that
    share most of their bytes are kept and sent in a fraction of the memory.
    """

    __slots__ = ("rest",)

    def __init__(self, event: AuditEvent) -> None:
        text = write(AUDIT_EVENT, event)
        self.rest = text[text.index(b'"action":') :]
        """What follows every beginning."""

    def beginning(self, request_id: str, at: float) -> bytes:
        """Of that request at that time. `request_id` is our own, of characters that JSON takes as they are."""
        name = request_id.encode()
        return b',{"event_id":"%b","at":%.6f,"request_id":"%b",' % (name, at, name)


class _Part:
    """Room for one sort of events."""

    __slots__ = ("capacity", "count", "rooms", "tenant_quota")

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.tenant_quota = max(1, int(capacity * TENANT_SHARE))
        self.count = 0
        self.rooms: WeakValueDictionary[str | None, Room] = WeakValueDictionary()

    def room(self, tenant: str | None) -> "Room":
        """The tenant's, the same for as long as anybody holds it or an event waits in it."""
        room = self.rooms.get(tenant)
        if room is None:
            room = self.rooms[tenant] = Room(self)
        return room


class Room:
    """What of a part is one tenant's. Whoever records again and again holds it, and is spared the looking up."""

    __slots__ = ("__weakref__", "_part", "used")

    def __init__(self, part: _Part) -> None:
        self._part = part
        self.used = 0

    @property
    def is_full(self) -> bool:
        part = self._part
        return self.used >= part.tenant_quota or part.count >= part.capacity

    def add(self) -> bool:
        """Take a place; False: there is none."""
        if self.is_full:
            return False
        self.used += 1
        self._part.count += 1
        return True

    def remove(self) -> None:
        self.used -= 1
        self._part.count -= 1


class AuditSpool:
    """Events on their way to the control plane."""

    def __init__(self, deliver: Deliver, *, capacity: int, mode: AuditMode) -> None:
        self._deliver = deliver
        self._mode = mode
        self._refusals = _Part(int(capacity * REFUSAL_SHARE))
        self._requests = _Part(capacity - int(capacity * REFUSAL_SHARE))
        self._waiting: deque[tuple[Room, bytes, bytes]] = deque()
        """Where each event has its place, and the event in two pieces."""
        self._not_yet_told = 0
        self._wake = asyncio.Event()
        self._stopping = False
        self.dropped = 0
        self.delivered = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def room_for_requests(self, tenant: str | None) -> Room:
        """Where the events of a tenant's requests that go have their place."""
        return self._requests.room(tenant)

    def admits_swap(self, room: Room) -> bool:
        """Whether a swap may happen: it can be recorded there, or need not be."""
        return self._mode is AuditMode.BEST_EFFORT or not room.is_full

    def record(self, event: AuditEvent) -> None:
        """Spool one event."""
        part = self._refusals if event.code is not None else self._requests
        self.record_again(part.room(event.tenant), b"," + write(AUDIT_EVENT, event))

    def record_again(self, room: Room, beginning: bytes, rest: bytes = b"") -> None:
        """Spool an event that is JSON already, led by a comma. Dropped and counted where there is no room."""
        if not room.add():
            self.dropped += 1
            self._not_yet_told += 1
            return
        self._waiting.append((room, beginning, rest))
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

    async def _until_due(self) -> None:
        try:
            async with asyncio.timeout(BATCH_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            pass
        if not self._stopping:
            self._wake.clear()

    async def _send_one_batch(self) -> None:
        batch = list(islice(self._waiting, BATCH_EVENTS))
        dropped = self._not_yet_told
        if not batch and not dropped:
            return
        pieces = [piece for _, beginning, rest in batch for piece in (beginning, rest)]
        attempt = 0
        while True:
            try:
                await self._deliver(pieces, dropped)
                break
            except Exception as error:  # border: whatever went wrong, the batch is kept and sent again
                log.warning("audit_not_delivered", error=type(error).__name__, spooled=len(self._waiting))
                await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
                attempt += 1
        self._not_yet_told -= dropped
        self.delivered += len(batch)
        for room, _, _ in batch:
            self._waiting.popleft()
            room.remove()
        if len(self._waiting) >= BATCH_EVENTS:
            self._wake.set()
