"""The ring of key-encryption keys over its life: a key is added, seals, is replaced by a newer one, retires (ADR 0016).

Rules.
- The ring is what the settings name, newest first, read again while we run. A key that leaves the settings while
  envelopes are under it stays in memory: losing a file is not retiring a key.
- A key that is new to a running fleet opens at once and seals after `settle_seconds`, when every replica has it.
- A re-wrap gives each envelope's data key a new wrapping and leaves the secret closed. It goes in batches, each one
  transaction; what is left to do is what is still under another key, so that it can be killed anywhere and goes on from
  there. One replica works at a time; two would do no harm (`ports.SealedRows.replace`).
- A key retires only when nothing is under it, and then seals nothing any more, whatever the settings say.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.core.records import Change, ChangeKind, KnownKek, Rewrap
from control_plane.core.sealing import Kek
from control_plane.custody import Custody, RingMember, Sealed, UnopenableError
from control_plane.faults import reach
from control_plane.ports import Clock, CrossTenantReason, Entropy, KekError, PlatformScope, SealedRow, Store
from control_plane.trail import Actor, Trail

BATCH_ROWS: Final = 100
AT_ONCE: Final = 8
"""Envelopes of a batch that a key elsewhere is asked about side by side."""
IDLE_SECONDS: Final = 15.0
"""A re-wrap that has not moved for so long has lost its replica."""
ROUND_SECONDS: Final = 10.0
SETTLE_SECONDS: Final = 120.0
NAMED_UNOPENABLE: Final = 20
_PLACE_CHARACTERS: Final = 512
_TRIED_BYTES: Final = 32
_TRIED_AS: Final = b"coatcheck: is this key there"
"""What a data key is wrapped for that only shows that a key elsewhere answers."""

_SETTINGS: Final = Actor("settings", "start")
_SCOPE: Final = PlatformScope(CrossTenantReason.UPKEEP)

_log = structlog.get_logger("control_plane.keks")

ReadRing = Callable[[], Sequence[RingMember]]
"""The ring as the settings have it now. Raises `ValueError` that says what is wrong, without any key. Blocks."""


@dataclass(frozen=True, slots=True)
class KekStatus:
    id: str
    provider: str
    place: str
    """Its file, or its name elsewhere; where it was last, if it is in the ring no more."""
    in_ring: bool
    seals: bool
    seals_from: float | None
    """When it began, or will begin. None: it only opens."""
    problem: str
    """Why it does not serve, or soon will not; empty where nothing is wrong."""
    envelopes: int
    first_seen_at: float | None
    retired_at: float | None


@dataclass(frozen=True, slots=True)
class RewrapStatus:
    rewrap: Rewrap
    remaining: int
    unopenable: tuple[str, ...]
    """Some of those that do not open, as an operator calls them."""


class KekRing:
    def __init__(
        self,
        store: Store,
        custody: Custody,
        trail: Trail,
        *,
        read_ring: ReadRing,
        clock: Clock,
        entropy: Entropy,
        settle_seconds: float = SETTLE_SECONDS,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        self._store = store
        self._custody = custody
        self._trail = trail
        self._read_ring = read_ring
        self._clock = clock
        self._entropy = entropy
        self._settle_seconds = settle_seconds
        self._batch_rows = batch_rows
        self._runner = new_id("run", entropy(ID_ENTROPY_BYTES))
        self._asked = asyncio.Event()
        self._whole = False
        self._left: frozenset[str] = frozenset()
        """Keys that left the settings, and that we go on with."""
        self._placed: dict[str, str] = {}
        self._unreadable = ""
        """Why the settings could not be read the last time."""

    # --- the ring as it is

    async def reload(self) -> None:
        """Reads the settings' ring again and lets every replica know of it. Raises `ValueError`; the old ring stays."""
        try:
            wanted = list(await asyncio.to_thread(self._read_ring))
        except ValueError as error:
            self._unreadable = str(error)
            raise
        self._unreadable = ""
        async with self._store.read(_SCOPE) as records:
            counts = await records.sealed.count_by_kek()
            known: Mapping[str, KnownKek] = {kek.id: kek for kek in await records.keks.list()}
        # What is in use does not go by itself.
        left = [member for member in self._custody.ring if member.id not in {each.id for each in wanted}]
        for member in left:
            if counts.get(member.id):
                _log.error("kek_missing_from_settings", kek_id=member.id, envelopes=counts[member.id])
                wanted.append(member)
        self._left = frozenset(member.id for member in left if counts.get(member.id))
        if any(member.id not in known or self._placed.get(member.id) != _place(member) for member in wanted):
            known = await self._see(wanted, anew=not known)
        self._custody.arrange(wanted, sealing=self._sealing(wanted, known))

    async def require_whole(self) -> None:
        """At the start: a ring that lacks a key with envelopes under it is not ready. Raises `RefusedError`."""
        if self._whole:
            return
        async with self._store.read(PlatformScope(CrossTenantReason.START)) as records:
            counts = await records.sealed.count_by_kek()
        missing = {kek_id: count for kek_id, count in counts.items() if kek_id not in self._custody.kek_ids}
        if missing:
            raise RefusedError(_missing(missing))
        self._whole = True

    async def statuses(self) -> Sequence[KekStatus]:
        """The ring, newest first; then what is known beside it."""
        async with self._store.read(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            counts, known = await records.sealed.count_by_kek(), {kek.id: kek for kek in await records.keks.list()}
        ring = {member.id: member for member in self._custody.ring}
        others = [kek_id for kek_id in (*known, *sorted(counts)) if kek_id not in ring]
        problems = dict(zip(ring, await asyncio.gather(*map(self._problem, ring.values())), strict=True))
        problems |= {kek_id: _absent(known.get(kek_id)) for kek_id in others if counts.get(kek_id)}
        from_when = self._seal_from(list(ring), known)
        return [
            KekStatus(
                id=kek_id,
                provider=_provider(ring[kek_id]) if kek_id in ring else kek.provider if kek is not None else "unknown",
                place=_place(ring[kek_id]) if kek_id in ring else kek.place if kek is not None else "",
                in_ring=kek_id in ring,
                seals=kek_id == self._custody.sealing_id,
                seals_from=from_when.get(kek_id),
                problem=problems.get(kek_id, ""),
                envelopes=counts.get(kek_id, 0),
                first_seen_at=kek.first_seen_at if kek is not None else None,
                retired_at=kek.retired_at if kek is not None else None,
            )
            for kek_id, kek in ((kek_id, known.get(kek_id)) for kek_id in dict.fromkeys((*ring, *others)))
        ]

    async def _problem(self, member: RingMember) -> str:
        """Of a key of the ring; one elsewhere is asked."""
        if member.id in self._left:
            return (
                "the settings name it no more; this replica has it until it ends: name it again, "
                "or bring what is under it under another key"
            )
        if isinstance(member, Kek):
            return self._unreadable if member.place and member.place in self._unreadable else ""
        try:
            await member.wrap(self._entropy(_TRIED_BYTES), context=_TRIED_AS)
        except KekError as error:
            return f"it cannot be used now: {error.detail}"
        return ""

    def _seal_from(self, ring: Sequence[str], known: Mapping[str, KnownKek]) -> Mapping[str, float]:
        """Of the one that seals, and of newer ones that have not settled."""
        newest = ring[: ring.index(self._custody.sealing_id) + 1] if self._custody.sealing_id in ring else ring
        living = [known[kek_id] for kek_id in newest if kek_id in known and known[kek_id].retired_at is None]
        return {kek.id: kek.first_seen_at + self._settle_seconds for kek in living}

    # --- what an operator does

    async def start_rewrap(self, *, by: Actor) -> RewrapStatus:
        """Begins one, unless one runs; the work itself goes on in the background, on whichever replica takes it.
        Raises `RefusedError` where the settings cannot be read: it would be done without the key that was meant."""
        await self.reload_or_refuse()
        now, target = self._clock(), self._custody.sealing_id
        async with self._store.write(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            latest = await records.keks.latest()
            if latest is None or latest.finished_at is not None or latest.target != target:
                if latest is not None and latest.finished_at is None:
                    # A newer key came meanwhile: what is left goes under that one.
                    await records.keks.claim(latest.id, runner=self._runner, now=now, idle_since=now + 1)
                    await records.keks.finish(latest.id, runner=self._runner, unopenable=latest.unopenable, now=now)
                counts = await records.sealed.count_by_kek()
                rewrap = Rewrap(
                    id=new_id("rew", self._entropy(ID_ENTROPY_BYTES)),
                    target=target,
                    started_at=now,
                    started_by=by.name,
                    total=sum(count for kek_id, count in counts.items() if kek_id != target),
                    rewrapped=0,
                    unopenable=0,
                    runner=None,
                    moved_at=now,
                    finished_at=None,
                )
                await records.keks.start(rewrap)
                reach("kek.rewrap_started")
                await records.audit.append(
                    [self._trail.event("kek.rewrap", by=by, tenant=None, detail=f"under {target}: {rewrap.total}")]
                )
        self._asked.set()
        status = await self.rewrap_status()
        assert status is not None
        return status

    async def rewrap_status(self) -> RewrapStatus | None:
        """The latest one; None where there never was any."""
        async with self._store.read(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            latest = await records.keks.latest()
            if latest is None:
                return None
            counts = await records.sealed.count_by_kek()
            rest = await records.sealed.not_under(latest.target, after="", limit=NAMED_UNOPENABLE)
        remaining = sum(count for kek_id, count in counts.items() if kek_id != latest.target)
        stuck = tuple(_named(row) for row in rest) if latest.finished_at is not None else ()
        return RewrapStatus(latest, remaining, stuck)

    async def retire(self, kek_id: str, *, abandon: bool, by: Actor) -> None:
        """It seals nothing any more. `abandon`: what is under it and does not open is given up, and must be submitted
        again. Raises `RefusedError`."""
        now = self._clock()
        if kek_id == self._custody.sealing_id:
            raise RefusedError(_still_seals(kek_id))
        lost = await self._unopenable_under(kek_id) if abandon else []
        async with self._store.write(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            known = {kek.id for kek in await records.keks.list()}
            for row in lost:
                if await records.sealed.forget(row) and row.tenant is not None:
                    await records.outbox.append([Change(ChangeKind.CREDENTIAL, row.tenant, str(row.key[0]))], now)
                    event = self._trail.event(
                        "kek.abandon", by=by, tenant=row.tenant, credential=row.label, detail=f"was under {kek_id}"
                    )
                    await records.audit.append([event])
            left = (await records.sealed.count_by_kek()).get(kek_id, 0)
            if left:
                raise RefusedError(_not_empty(kek_id, left))
            if kek_id not in known:
                raise RefusedError(NO_SUCH_KEK)
            if await records.keks.retire(kek_id, now):
                reach("kek.retired")
                await records.audit.append([self._trail.event("kek.retire", by=by, tenant=None, detail=kek_id)])
        await self.reload_or_keep()

    async def reload_or_refuse(self) -> None:
        """For whoever asked for it: settings that cannot be read are an answer, and the ring stays as it is. Raises
        `RefusedError`."""
        try:
            await self.reload()
        except ValueError as error:
            _log.error("kek_settings_unreadable", reason=str(error))
            raise RefusedError(_UNREADABLE) from None

    async def reload_or_keep(self) -> None:
        """Settings that cannot be read now leave the ring as it is; the log says why."""
        try:
            await self.reload()
        except ValueError as error:
            _log.error("kek_settings_unreadable", reason=str(error))

    # --- in the background

    async def once(self) -> None:
        """One round: the settings are read again, a re-wrap that nobody works on is taken up; then wait to be woken."""
        try:
            await self.reload_or_keep()
            await self.work()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUND_SECONDS):
                    await self._asked.wait()
            self._asked.clear()

    def wake(self) -> None:
        """Look at once: the settings may have changed."""
        self._asked.set()

    async def work(self) -> None:
        """Carries an unfinished re-wrap to its end, unless another replica does."""
        now = self._clock()
        async with self._store.write(_SCOPE) as records:
            latest = await records.keks.latest()
            if latest is None or latest.finished_at is not None or latest.target not in self._custody.kek_ids:
                return
            idle_since = now - IDLE_SECONDS
            if not await records.keks.claim(latest.id, runner=self._runner, now=now, idle_since=idle_since):
                return
        reach("kek.rewrap_claimed")
        while (unopenable := await self._pass(latest)) is None:
            pass
        async with self._store.write(_SCOPE) as records:
            await records.keks.finish(latest.id, runner=self._runner, unopenable=unopenable, now=self._clock())
        reach("kek.rewrap_finished")
        _log.info("rewrap_finished", rewrap=latest.id, target=latest.target, unopenable=unopenable)

    async def _pass(self, rewrap: Rewrap) -> int | None:
        """Once over everything. How many do not open; None where there was something to do, so that another pass
        shall see that nothing is left. Raises `RefusedError` where the work cannot go on now."""
        after, unopenable, did = "", 0, 0
        while True:
            async with self._store.read(_SCOPE) as records:
                rows = await records.sealed.not_under(rewrap.target, after=after, limit=self._batch_rows)
            if not rows:
                return None if did else unopenable
            sealed = await self._rewrapped(rows, rewrap.target)
            reach("kek.batch_sealed")
            done = await self._write(rewrap, rows, sealed)
            did, unopenable, after = did + done, unopenable + sealed.count(None), rows[-1].place

    async def _rewrapped(self, rows: Sequence[SealedRow], target: str) -> list[Sealed | None]:
        """No transaction is open meanwhile. None for what does not open."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(row: SealedRow) -> Sealed | None:
            async with turns:
                try:
                    return await self._custody.rewrapped(row.envelope, aad=row.aad, by=target)
                except UnopenableError:
                    return None

        return list(await asyncio.gather(*(one(row) for row in rows)))

    async def _write(self, rewrap: Rewrap, rows: Sequence[SealedRow], sealed: Sequence[Sealed | None]) -> int:
        """One batch, with its count, in one transaction. Raises `RefusedError` where another replica has taken over."""
        async with self._store.write(_SCOPE) as records:
            done = 0
            for row, new in zip(rows, sealed, strict=True):
                if new is not None:
                    done += await records.sealed.replace(row, envelope=new.envelope, kek_id=new.kek_id)
            reach("kek.batch_replaced")
            if not await records.keks.move(rewrap.id, runner=self._runner, rewrapped=done, now=self._clock()):
                raise RefusedError(TAKEN_OVER)
        reach("kek.batch_written")
        return done

    async def _unopenable_under(self, kek_id: str) -> list[SealedRow]:
        lost: list[SealedRow] = []
        after = ""
        while True:
            async with self._store.read(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
                rows = await records.sealed.not_under(self._custody.sealing_id, after=after, limit=self._batch_rows)
            if not rows:
                return lost
            under = [row for row in rows if row.kek_id == kek_id]
            sealed = await self._rewrapped(under, self._custody.sealing_id)
            lost += [row for row, new in zip(under, sealed, strict=True) if new is None]
            after = rows[-1].place

    async def _see(self, ring: Sequence[RingMember], *, anew: bool) -> Mapping[str, KnownKek]:
        """Writes down what is new. The ring of a new database has nobody to wait for."""
        now = self._clock()
        async with self._store.write(_SCOPE) as records:
            for member in ring:
                kek = KnownKek(
                    member.id,
                    _provider(member),
                    now - self._settle_seconds * anew,
                    retired_at=None,
                    place=_place(member),
                )
                is_new = await records.keks.see(kek)
                if member.id not in self._left:
                    await records.keks.place(kek.id, kek.place)
                if is_new:
                    await records.audit.append(
                        [self._trail.event("kek.add", by=_SETTINGS, tenant=None, detail=f"{kek.id} ({kek.provider})")]
                    )
            found = {kek.id: kek for kek in await records.keks.list()}
        self._placed = {member.id: _place(member) for member in ring}
        return found

    def _sealing(self, ring: Sequence[RingMember], known: Mapping[str, KnownKek]) -> str:
        """The newest that has settled and is not retired; without one, what seals now, else the newest."""
        now = self._clock()
        for member in ring:
            kek = known.get(member.id)
            if kek is not None and kek.retired_at is None and now >= kek.first_seen_at + self._settle_seconds:
                return member.id
        living = [member.id for member in ring if member.id in known and known[member.id].retired_at is None]
        if self._custody.sealing_id in living:
            return self._custody.sealing_id
        return living[-1] if living else ring[0].id


def _provider(member: RingMember) -> str:
    return "file" if isinstance(member, Kek) else member.provider


def _place(member: RingMember) -> str:
    return member.place[:_PLACE_CHARACTERS]


def _absent(kek: KnownKek | None) -> str:
    """Of a key that envelopes are under, and that this replica does not have."""
    where = f"it was last at {kek.place}" if kek is not None and kek.place else "nobody knows where it was"
    return f"it is missing from the ring: {where}; put it back, or give up what is under it with kek retire --abandon"


def _named(row: SealedRow) -> str:
    return f"{row.tenant}/{row.label}" if row.tenant is not None else row.label


def _missing(missing: Mapping[str, int]) -> Refusal:
    keys = ", ".join(f"{kek_id} ({count})" for kek_id, count in sorted(missing.items()))
    return Refusal(
        RefusalCode.CREDENTIAL_UNAVAILABLE,
        f"the ring lacks key-encryption keys that envelopes are under: {keys}",
        "name them in COATCHECK_CONTROL_PLANE_KEK_FILES again; one that is lost is given up with: "
        "coatcheck kek retire ID --abandon",
    )


def _not_empty(kek_id: str, left: int) -> Refusal:
    return Refusal(
        RefusalCode.INVALID_FIELD,
        f"kek: {left} envelopes are still under {kek_id}",
        "bring them under the newest key with: coatcheck kek rewrap; if this key is lost, put its file back, or give "
        "up what is under it with: coatcheck kek retire ID --abandon",
    )


def _still_seals(kek_id: str) -> Refusal:
    return Refusal(
        RefusalCode.INVALID_FIELD,
        f"kek: {kek_id} is the one that seals",
        "name a newer one first (coatcheck kek add); one that is new to a running fleet seals after two minutes",
    )


_UNREADABLE: Final = Refusal(
    RefusalCode.INVALID_FIELD,
    "kek: the settings' keys cannot be read, and the ring stays as it was",
    "the log says which and why (kek_settings_unreadable): a key's file holds 64 hexadecimal digits and has mode 0600",
)

NO_SUCH_KEK: Final = Refusal(
    RefusalCode.NOT_FOUND, "there is no such key-encryption key", "list them with: coatcheck kek list"
)
NO_REWRAP: Final = Refusal(RefusalCode.NOT_FOUND, "nothing was ever re-wrapped", "begin with: coatcheck kek rewrap")
TAKEN_OVER: Final = Refusal(RefusalCode.STORE_UNAVAILABLE, "another replica has taken the re-wrap over")
