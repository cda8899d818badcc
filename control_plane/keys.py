"""Turning the control plane's own rings of keys without a flag day (ADR 0023).

    rotate            a new key is made, and published at once: in the key set, and to every proxy
    PUBLISHED_SECONDS later it comes into use: by then every replica, runtime and proxy knows it
    and the old one   is kept until the last thing that it made is dead, and then taken out

Rule: nothing that is good stops working because a key was changed, unless the key is compromised: then it goes in the
transaction that replaces it, and all that it made with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from control_plane.core import client_token, session_token
from control_plane.core.records import NO_TENANT, Change, ChangeKind, KeyPurpose, OwnKey
from control_plane.own_keys import LOOK_AGAIN_SECONDS, OwnKeyring, key_in_use
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Records, Store
from control_plane.trail import Actor, Trail

PUBLISHED_SECONDS: Final = 600.0
"""How long a key is known before it is used: longer than a runtime goes on with a key set that it has fetched, and much
longer than a proxy that hears events, or a replica, goes on with what it knows."""
_SLACK_SECONDS: Final = 2 * LOOK_AGAIN_SECONDS + session_token.CLOCK_SKEW_SECONDS
"""How much later than the others a replica may still use an old key."""
_LONGEST_SIGNED_SECONDS: Final = max(session_token.LIFETIME_SECONDS, client_token.LIFETIME_SECONDS)
TURNED: Final = (KeyPurpose.SIGNING, KeyPurpose.TAG, KeyPurpose.AUDIT)
_PROVES: Final = frozenset({KeyPurpose.AUDIT})
"""What it signed is checked for as long as the trail is kept: an old one never goes, not even one that leaked."""


class KeyState(StrEnum):
    PUBLISHED = "published"
    """Known to all, not in use yet."""
    IN_USE = "in_use"
    KEPT = "kept"
    """No longer in use; something that it made may still live."""


@dataclass(frozen=True, slots=True)
class DescribedKey:
    key: OwnKey
    state: KeyState


class KeyKeeper:
    def __init__(self, store: Store, own_keys: OwnKeyring, trail: Trail, *, clock: Clock) -> None:
        self._store = store
        self._own_keys = own_keys
        self._trail = trail
        self._clock = clock

    async def list(self) -> Sequence[DescribedKey]:
        """Every ring, each newest first."""
        now = self._clock()
        async with self._store.read(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            rings = [await records.own_keys.list(purpose) for purpose in TURNED]
        return [_described(key, ring, now) for ring in rings for key in ring]

    async def rotate(self, purpose: KeyPurpose, *, compromised: bool, by: Actor) -> DescribedKey:
        """A new key. Raises `RefusedError` where the stored keys do not open."""
        await self._own_keys.rings()
        now = self._clock()
        new = await self._own_keys.made(purpose, in_use_from=now if compromised else now + PUBLISHED_SECONDS)
        async with self._store.write(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            if compromised and purpose not in _PROVES:
                await records.own_keys.remove(await records.own_keys.list(purpose))
            await records.own_keys.add(new)
            await self._told(records, purpose)
            detail = f"{purpose.value} {new.id}" + (", the old ones compromised" if compromised else "")
            await self._trail.record(records, [self._trail.event("key.rotate", by=by, tenant=None, detail=detail)])
        self._own_keys.forget()
        return _described(new, [new], now) if compromised else DescribedKey(new, KeyState.PUBLISHED)

    async def retire(self) -> None:
        """Takes out the keys that nothing living was made with. A chore: several replicas may do it at once."""
        for purpose in TURNED:
            async with self._store.read(PlatformScope(CrossTenantReason.UPKEEP)) as records:
                over = await self._over(records, purpose)
            if over:
                await self._taken_out(purpose, over)

    async def _over(self, records: Records, purpose: KeyPurpose) -> Sequence[OwnKey]:
        now = self._clock()
        ring = await records.own_keys.list(purpose)
        if not ring or purpose in _PROVES:
            return ()
        in_use = key_in_use(ring, now)
        old = [key for key in ring if key.in_use_from <= in_use.in_use_from and key.id != in_use.id]
        # The last moment at which a replica may have used one of them.
        last_used = in_use.in_use_from + _SLACK_SECONDS
        if not old or now < last_used:
            return ()
        match purpose:
            case KeyPurpose.SIGNING:
                return old if now >= last_used + _LONGEST_SIGNED_SECONDS else ()
            case _:
                # A placeholder keeps its string, and so its tag, for as long as it is renewed.
                still = await records.tokens.any_usable_of_before(last_used, now)
                # A decoy lies where it was laid for as long as it is wanted.
                return () if still or await records.decoys.any_from_before(last_used) else old

    async def _taken_out(self, purpose: KeyPurpose, keys: Sequence[OwnKey]) -> None:
        by = Actor("upkeep", "upkeep", is_a_client=False)
        async with self._store.write(PlatformScope(CrossTenantReason.UPKEEP)) as records:
            still = {key.id for key in await records.own_keys.list(purpose)}
            gone = [key for key in keys if key.id in still]
            if not gone:
                return
            await records.own_keys.remove(gone)
            await self._told(records, purpose)
            await self._trail.record(
                records,
                [
                    self._trail.event("key.retire", by=by, tenant=None, detail=f"{purpose.value} {key.id}")
                    for key in gone
                ],
            )
        self._own_keys.forget()

    async def _told(self, records: Records, purpose: KeyPurpose) -> None:
        """To every proxy: it fetches the ring anew."""
        if purpose is KeyPurpose.TAG:
            await records.outbox.append([Change(ChangeKind.TAG_KEYS, NO_TENANT, "tag_keys")], self._clock())


def _described(key: OwnKey, ring: Sequence[OwnKey], now: float) -> DescribedKey:
    if key.id == key_in_use(ring, now).id:
        return DescribedKey(key, KeyState.IN_USE)
    return DescribedKey(key, KeyState.PUBLISHED if key.in_use_from > now else KeyState.KEPT)
