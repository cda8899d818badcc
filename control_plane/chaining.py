"""Links the audit trail into its chains, and forgets what is past its time.

Exchanges and proxies append events without knowing of the chain, each in its own transaction and at the same time.
A moment later one replica takes what waits, in the order in which it was numbered, and writes one signed head a chain.

Rule: linking never makes anybody wait who appends, and an event is linked once. Whoever else links meanwhile loses: a
chain's batch numbers are taken once. Retention removes whole batches from a chain's beginning, and leaves a signed
anchor in their place, so that the rest still verifies. When another key comes into use, every chain gets a head of it,
also those to which nothing happens: from then on the old key proves nothing that the new one has not signed (ADR 0027).
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import structlog

from control_plane.audit_keys import AuditKeyRing, AuditKeys
from control_plane.core.chain import (
    Anchor,
    Head,
    anchor_at,
    is_signed_anchor,
    next_head,
    removable,
    signed_anchor,
    signed_head,
)
from control_plane.core.records import KeyPurpose
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
CHAINS_HANDED_OVER_AT_ONCE: Final = 200
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
        self._handed_over_to = ""
        """The key which, as we saw it, has signed the end of every chain."""
        self.truncations = 0

    async def once(self) -> None:
        """What the trail is owed, then what waits to be linked, then the ends that an old key signed."""
        await self.repay()
        await self.link()
        await self.hand_over()

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
                await self._require_current(records, ring)
                waiting = await records.chain.unchained(EVENTS_AT_ONCE)
                for tenant, events in groupby(sorted(waiting, key=_trail_then_sequence), key=lambda one: one.tenant):
                    batch = list(events)
                    previous = await records.chain.last(tenant)
                    self._notice_truncation(tenant, previous)
                    head = next_head(previous, tenant=tenant, events=_records(batch), at=self._clock())
                    sign = ring.sign_after(previous.key_id if previous is not None else None)
                    await records.chain.add(signed_head(head, sign), [event.sequence for event in batch])
                    linked[tenant] = (head.number, head.hash)
        except _ReplacedError:
            return await self._link_some()
        except TakenError:
            return 0  # another replica was quicker
        self._seen.update(linked)
        return len(waiting)

    async def hand_over(self) -> int:
        """Puts an empty head of the key in use where an older key signed a chain's end; how many signatures."""
        ring, done = await self._keys.ring(), 0
        while self._handed_over_to != ring.in_use.id:
            try:
                signed, is_more = await self._hand_over_some(ring)
            except _ReplacedError:
                return done + await self.hand_over()
            except TakenError:
                return done
            if signed is None:
                return done  # another replica is at it: a moment later, again
            done += signed
            if not is_more:
                self._handed_over_to = ring.in_use.id
        return done

    async def _hand_over_some(self, ring: AuditKeyRing) -> tuple[int | None, bool]:
        """How many, and whether there may be more."""
        heads, anchors, known = [], 0, [ring.in_use.id, *ring.newer]
        async with self._store.write(_SCOPE) as records:
            if not await records.chain.lease():
                return None, True
            await self._require_current(records, ring)
            ends = await records.chain.ends_not_signed_by(known, limit=CHAINS_HANDED_OVER_AT_ONCE)
            for end in ends:
                if isinstance(end, Head):
                    head = next_head(end, tenant=end.tenant, events=[], at=self._clock())
                    heads.append(signed_head(head, ring.sign))
                    await records.chain.add(heads[-1], [])
                elif is_signed_anchor(end, ring.public_keys):  # no head states what stands for removed events
                    await records.chain.forget([], signed_anchor(end, ring.sign))
                    anchors += 1
        self._seen.update({head.tenant: (head.number, head.hash) for head in heads})
        done = len(heads) + anchors
        return done, done > 0 and len(ends) == CHAINS_HANDED_OVER_AT_ONCE

    async def _require_current(self, records: Records, ring: AuditKeyRing) -> None:
        """One that leaked must not sign once more. Raises `_ReplacedError` where there are keys that we do not know."""
        if {key.id for key in await records.own_keys.list(KeyPurpose.AUDIT)} != ring.stored:
            self._keys.forget()
            raise _ReplacedError

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
            try:
                of_these, is_more = await self._forget_some(before)
            except _ReplacedError:
                continue
            forgotten += of_these
            if not is_more:
                return forgotten

    async def _forget_some(self, before: float) -> tuple[int, bool]:
        """How many events, and whether there may be more."""
        ring, forgotten = await self._keys.ring(), 0
        async with self._store.write(_SCOPE) as records:
            if not await records.chain.lease():
                return 0, False
            await self._require_current(records, ring)
            oldest = await records.chain.oldest(before=before, limit=HEADS_FORGOTTEN_AT_ONCE)
            for tenant, heads in groupby(oldest, key=lambda head: head.tenant):
                forgotten += await self._forget_of(records, ring, tenant, list(heads))
        return forgotten, len(oldest) == HEADS_FORGOTTEN_AT_ONCE and forgotten > 0

    async def _forget_of(self, records: Records, ring: AuditKeyRing, tenant: str | None, heads: Sequence[Head]) -> int:
        heads = removable(heads, await records.chain.anchor(tenant), ring.public_keys)
        if not heads:
            _log.error("audit_retention_stopped", tenant=tenant, reason="the chain's beginning is not as it was signed")
            return 0
        anchor = signed_anchor(anchor_at(heads[-1], at=self._clock()), ring.sign_after(heads[-1].key_id))
        removed = await records.chain.forget(heads, anchor)
        await records.audit.append([self._trail.retention(tenant, removed=removed, through=anchor.position)])
        return removed

    async def repay(self) -> None:
        """Appends what the trail could not take when it happened. Raises `RefusedError` while it still cannot."""
        while owed := self._trail.owed():
            async with self._store.write(_SCOPE) as records:
                await records.audit.append(owed)
            self._trail.repaid(len(owed))


class _ReplacedError(Exception):
    """The ring is not what it was; the next look finds what it is."""


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
