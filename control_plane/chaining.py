"""Links the audit trail into its chains, and forgets what is past its time.

Exchanges and proxies append events without knowing of the chain, each in its own transaction and at the same time.
A moment later one replica takes what waits, in the order in which it was numbered, and writes one signed head a chain.

Rule: linking never makes anybody wait who appends, and an event is linked once. Whoever else links meanwhile loses: a
chain's batch numbers are taken once. Retention removes whole batches from a chain's beginning, and leaves a signed
anchor in their place, so that the rest still verifies.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import structlog

from control_plane.audit_keys import AuditKeys
from control_plane.core.chain import Anchor, Head, anchor_at, next_head, removable, signed_anchor, signed_head
from control_plane.ports import (
    Clock,
    CrossTenantReason,
    PlatformScope,
    Records,
    Store,
    TakenError,
    UnchainedEvent,
)
from control_plane.trail import Trail

ROUND_SECONDS: Final = 0.5
"""How long an event may wait, and how long one batch is."""
EVENTS_AT_ONCE: Final = 1_000
HEADS_FORGOTTEN_AT_ONCE: Final = 200
RETENTION_SECONDS: Final = 60.0
_DAY: Final = 86_400.0

_SCOPE: Final = PlatformScope(CrossTenantReason.AUDIT)
_log = structlog.get_logger("control_plane.chaining")


class Chaining:
    def __init__(
        self, store: Store, keys: AuditKeys, trail: Trail, *, clock: Clock, retention_days: int | None
    ) -> None:
        """`retention_days` None: nothing is ever removed."""
        self._store = store
        self._keys = keys
        self._trail = trail
        self._clock = clock
        self._retention_days = retention_days
        self._seen: dict[str | None, tuple[int, str]] = {}
        """The last head of each chain that was linked here: number and hash."""
        self.truncations = 0

    async def once(self) -> None:
        """What the trail is owed, then what waits to be linked."""
        await self.repay()
        await self.link()

    async def link(self) -> int:
        """Links everything that waits; how many events."""
        linked = 0
        async with self._store.read(_SCOPE) as records:
            if not await records.chain.unchained(1):
                return 0
        while (done := await self._link_some()) == EVENTS_AT_ONCE:
            linked += done
        return linked + done

    async def _link_some(self) -> int:
        ring, linked = await self._keys.ring(), dict[str | None, tuple[int, str]]()
        try:
            async with self._store.write(_SCOPE) as records:
                if not await records.chain.lease():
                    return 0  # another replica is at it
                waiting = await records.chain.unchained(EVENTS_AT_ONCE)
                for tenant, events in groupby(sorted(waiting, key=_trail_then_sequence), key=lambda one: one.tenant):
                    batch = list(events)
                    previous = await records.chain.last(tenant)
                    self._notice_truncation(tenant, previous)
                    head = next_head(previous, tenant=tenant, events=_records(batch), at=self._clock())
                    await records.chain.add(signed_head(head, ring.sign), [event.sequence for event in batch])
                    linked[tenant] = (head.number, head.hash)
        except TakenError:
            return 0  # another replica was quicker
        self._seen.update(linked)
        return len(waiting)

    def _notice_truncation(self, tenant: str | None, previous: Head | Anchor | None) -> None:
        """A chain that is shorter than it was, or another one, was cut while we ran."""
        number, found = self._seen.get(tenant, (0, ""))
        present = previous.number if previous is not None else 0
        if number > present or (number == present and _hash_of(previous) not in ("", found)):
            self.truncations += 1
            _log.error("audit_chain_truncated", tenant=tenant, expected_number=number, number=present)
            self._seen.pop(tenant, None)

    async def forget(self) -> int:
        """Removes what is older than it may be; how many events. Says so in the trail of whom it was."""
        if self._retention_days is None:
            return 0
        before, forgotten = self._clock() - self._retention_days * _DAY, 0
        while True:
            async with self._store.write(_SCOPE) as records:
                if not await records.chain.lease():
                    return forgotten
                oldest = await records.chain.oldest(before=before, limit=HEADS_FORGOTTEN_AT_ONCE)
                forgotten_now = 0
                for tenant, heads in groupby(oldest, key=lambda head: head.tenant):
                    forgotten_now += await self._forget_of(records, tenant, list(heads))
                forgotten += forgotten_now
            if len(oldest) < HEADS_FORGOTTEN_AT_ONCE or not forgotten_now:
                return forgotten

    async def _forget_of(self, records: Records, tenant: str | None, heads: Sequence[Head]) -> int:
        ring, now = await self._keys.ring(), self._clock()
        heads = removable(heads, await records.chain.anchor(tenant), ring.public_keys)
        if not heads:
            _log.error("audit_retention_stopped", tenant=tenant, reason="the chain's beginning is not as it was signed")
            return 0
        anchor = signed_anchor(anchor_at(heads[-1], at=now), ring.sign)
        removed = await records.chain.forget(heads, anchor)
        await records.audit.append([self._trail.retention(tenant, removed=removed, through=anchor.position)])
        return removed

    async def repay(self) -> None:
        """Appends what the trail could not take when it happened. Raises `RefusedError` while it still cannot."""
        while owed := self._trail.owed():
            async with self._store.write(_SCOPE) as records:
                await records.audit.append(owed)
            self._trail.repaid(len(owed))


def _hash_of(previous: Head | Anchor | None) -> str:
    match previous:
        case Head():
            return previous.hash
        case Anchor():
            return previous.head
        case None:
            return ""


def _trail_then_sequence(event: UnchainedEvent) -> tuple[str, int]:
    return event.tenant or "", event.sequence


def _records(batch: Sequence[UnchainedEvent]) -> list[dict[str, object] | None]:
    return [event.stored.record if event.stored is not None else None for event in batch]
