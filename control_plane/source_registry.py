"""Sources as the platform's administrator keeps them: added, changed, looked at, tried out, taken away.

Rule: each row is sealed to everything that it says, so that one edited in the database is used by nobody. A source
that credentials read from does not go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from control_plane.contract.caller import TenantId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.records import Source, SourceKind
from control_plane.core.sealing import source_aad
from control_plane.core.sources import InvalidSourceError, check_source, path_of
from control_plane.custody import Custody, UnopenableError
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, SourceError, Store
from control_plane.sources import SecretSources, require_genuine
from control_plane.trail import Actor, Trail

_SCOPE: Final = PlatformScope(CrossTenantReason.ADMINISTER)


@dataclass(frozen=True, slots=True)
class NewSource:
    name: str
    kind: SourceKind
    settings: Mapping[str, Any]
    path_template: str
    ttl_seconds: float
    tenants: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Reading:
    """How trying a source out went. Never what was there."""

    readable: bool
    failure: str | None
    detail: str


class SourceRegistry:
    def __init__(self, store: Store, custody: Custody, sources: SecretSources, trail: Trail, *, clock: Clock) -> None:
        self._store = store
        self._custody = custody
        self._sources = sources
        self._trail = trail
        self._clock = clock

    async def put(self, new: NewSource, *, by: Actor) -> Source:
        """Adds it, or replaces it by this. Raises `RefusedError(invalid_field)`."""
        source = Source(
            name=new.name,
            kind=new.kind,
            settings=new.settings,
            path_template=new.path_template,
            ttl_seconds=float(new.ttl_seconds),
            tenants=new.tenants,
            seal=b"",
            kek_id="",
            created_at=self._clock(),
            updated_at=self._clock(),
        )
        try:
            check_source(source)
        except InvalidSourceError as error:
            raise RefusedError(Refusal(RefusalCode.INVALID_FIELD, f"{error.field}: {error}")) from None
        return await self._custody.with_keys(lambda: self._put(source, by))

    async def _put(self, source: Source, by: Actor) -> Source:
        sealed = self._custody.seal(b"", aad=source_aad(source))
        source = replace(source, seal=sealed.envelope, kek_id=sealed.kek_id)
        async with self._store.write(_SCOPE) as records:
            old = await records.sources.get(source.name)
            if old is None:
                await records.sources.add(source)
            else:
                await self._require_same_places(await records.sources.users_of(source.name), old, source)
                source = replace(source, created_at=old.created_at)
                await records.sources.replace(source)
            action = "source.add" if old is None else "source.change"
            await records.audit.append([self._trail.event(action, by=by, tenant=None, detail=source.name)])
        return source

    async def list(self) -> Sequence[Source]:
        async with self._store.read(_SCOPE) as records:
            return await records.sources.list()

    async def get(self, name: str) -> Source:
        """Raises `RefusedError(not_found)`."""
        async with self._store.read(_SCOPE) as records:
            source = await records.sources.get(name)
        if source is None:
            raise RefusedError(SOURCE_NOT_FOUND)
        return source

    async def remove(self, name: str, *, by: Actor) -> None:
        """Raises `RefusedError`: `not_found`, `invalid_field` while credentials read from it."""
        async with self._store.write(_SCOPE) as records:
            users = await records.sources.users_of(name)
            if users:
                raise RefusedError(_in_use(len(users)))
            if not await records.sources.remove(name):
                raise RefusedError(SOURCE_NOT_FOUND)
            await records.audit.append([self._trail.event("source.delete", by=by, tenant=None, detail=name)])

    async def try_out(self, name: str, tenant: TenantId, name_there: str) -> Reading:
        """Raises `RefusedError(not_found)`."""
        source = await self.get(name)
        try:
            await self._custody.with_keys(lambda: self._genuine(source))
            await self._sources.tried(source, tenant, name_there)
        except UnopenableError:
            return Reading(False, "edited", "its row was edited in the database: put the source again")
        except SourceError as error:
            return Reading(False, error.failure.value, error.detail)
        return Reading(True, None, f"there is a usable secret at {path_of(source, tenant=tenant, name=name_there)}")

    async def _genuine(self, source: Source) -> None:
        require_genuine(self._custody, source)

    async def _require_same_places(self, users: Sequence[object], old: Source, new: Source) -> None:
        """Other bytes at the same name are a rotation; another kind of place is another source."""
        if users and old.kind is not new.kind:
            raise RefusedError(_in_use(len(users)))


def _in_use(count: int) -> Refusal:
    return Refusal(
        RefusalCode.INVALID_FIELD,
        f"name: {count} credentials read from it",
        "give them another source or a secret of their own first: coatcheck credential list",
    )


SOURCE_NOT_FOUND: Final = Refusal(
    RefusalCode.NOT_FOUND, "there is no such source", "list them with: coatcheck source list"
)
