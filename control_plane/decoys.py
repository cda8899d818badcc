"""Decoys: placeholders that nobody was given, laid out where only a thief looks.

Rule: a decoy looks like every other placeholder, and whoever uses it is told what they would be told of any string that
nobody knows. It opens nothing; it only ever alarms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from control_plane.contract.caller import PlaceholderId, TenantId
from control_plane.contract.placeholder import ENTROPY_BYTES, Shape, fingerprint, mint
from control_plane.contract.placeholder import TokenKind as Marker
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.alarms import Decoy
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.core.presets import PRESETS
from control_plane.credentials import invalid_field, require_tenant
from control_plane.own_keys import OwnKeyring
from control_plane.ports import Clock, Entropy, Store, TenantScope
from control_plane.trail import Actor, Trail


@dataclass(frozen=True, slots=True, repr=False)
class NewDecoy:
    """The only value that holds the decoy's string. Never logged."""

    decoy: Decoy
    placeholder: str


class DecoyKeeper:
    def __init__(self, store: Store, own_keys: OwnKeyring, trail: Trail, *, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._own_keys = own_keys
        self._trail = trail
        self._clock = clock
        self._entropy = entropy

    async def add(self, tenant: TenantId, *, preset: str | None, note: str, by: Actor) -> NewDecoy:
        """In the shape of that provider's keys. Raises `RefusedError` (`not_found`, `invalid_field`)."""
        if preset is not None and preset not in PRESETS:
            raise invalid_field("preset", "there is no such preset; GET /v1/presets lists them")
        shape = PRESETS[preset].shape if preset is not None else Shape()
        tag_key = (await self._own_keys.rings()).tags[0]
        text = mint(shape, Marker.PLACEHOLDER, tag_key=tag_key, entropy=self._entropy(ENTROPY_BYTES))
        decoy = Decoy(
            id=PlaceholderId(new_id("dc", self._entropy(ID_ENTROPY_BYTES))),
            tenant=tenant,
            sha256=fingerprint(text),
            preset=preset,
            note=note,
            created_at=self._clock(),
            used_at=None,
        )
        async with self._store.write(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            await records.decoys.add(decoy)
            event = self._trail.event("decoy.add", by=by, tenant=tenant, placeholder_id=decoy.id, detail=note)
            await self._trail.record(records, [event])
        return NewDecoy(decoy, text)

    async def list(self, tenant: TenantId) -> Sequence[Decoy]:
        async with self._store.read(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            return await records.decoys.list()

    async def remove(self, tenant: TenantId, decoy_id: str, *, by: Actor) -> None:
        """Raises `RefusedError(not_found)`."""
        async with self._store.write(TenantScope(tenant)) as records:
            decoy = await records.decoys.get(decoy_id)
            if decoy is None:
                raise RefusedError(DECOY_NOT_FOUND)
            await records.decoys.remove(decoy_id)
            event = self._trail.event("decoy.remove", by=by, tenant=tenant, placeholder_id=decoy.id, detail=decoy.note)
            await self._trail.record(records, [event])


DECOY_NOT_FOUND: Final = Refusal(
    RefusalCode.NOT_FOUND, "there is no such decoy", "list them with: coatcheck decoy list"
)
