"""The secrets that are kept elsewhere (ADR 0019): read from their source, followed when they change.

What was read is sealed as the credential's current version, like any secret, so that an edited row does not open, and
a new value is a new version that every proxy is told of. What this process knows beside it is when the source last
confirmed that value.

Rule: a value is used while it is fresh (the source's `ttl_seconds`). After that the source is asked. Where nobody
answers, and only then, the value goes on for the credential's `max_stale_seconds` (none unless somebody said so); past
that moment it is refused, with the reason, until the source answers. No source is asked while a transaction is open.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from control_plane.contract.caller import CredentialId, TenantId
from control_plane.contract.kinds import CredentialKind
from control_plane.contract.placement import fits
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.core import kinds
from control_plane.core.kinds import InvalidSecretError, InvalidSettingsError, kind_named
from control_plane.core.records import (
    Change,
    ChangeKind,
    Credential,
    CredentialVersion,
    Source,
    SourceKind,
    VersionState,
)
from control_plane.core.sealing import source_aad
from control_plane.core.sources import InvalidSourceError, filled, may_name, path_of
from control_plane.custody import Custody, UnopenableError, open_secret, seal_secret
from control_plane.faults import reach
from control_plane.ports import (
    Clock,
    CrossTenantReason,
    PlatformScope,
    Records,
    SourceError,
    SourceFailure,
    SourceReader,
    Store,
    TenantScope,
    on_behalf_of,
)
from control_plane.trail import Actor, Trail

RETRY_SECONDS: Final = 2.0
"""A source that did not answer is not asked again before."""
SETTLE_SECONDS: Final = 120.0
"""A version this young is not replaced by whoever has not seen it at the source: copies of a source lag behind."""
WATCHED_SECONDS: Final = 900.0
"""What was used this recently is kept fresh ahead of its use."""
REFRESH_SECONDS: Final = 5.0
_AHEAD: Final = 0.75
_WATCHED: Final = 10_000
_AT_ONCE: Final = 8

_BY_SOURCE: Final = Actor("source", "source")

_log = structlog.get_logger("control_plane.sources")


@dataclass(frozen=True, slots=True)
class Sourced:
    """A secret as its source has it."""

    secret: Secret
    version: int
    good_until: float
    """Unix seconds. Nobody may use it after that without asking again."""


@dataclass(slots=True)
class _Known:
    """What this process knows about one credential's value."""

    version: int
    source_changed_at: float
    confirmed_at: float | None = None
    seen: bool = False
    """Whether the source itself has shown this version's value to us."""
    good_until: float = 0.0
    """Until when the value may be used as it is."""
    failed_at: float | None = None
    failure: SourceError | None = None
    used_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Kept:
    """Of one moment: the credential, its version opened, and the source it is read from."""

    credential: Credential
    version: CredentialVersion
    secret: Secret
    source: Source


class SecretSources:
    def __init__(
        self, store: Store, custody: Custody, readers: Mapping[SourceKind, SourceReader], trail: Trail, *, clock: Clock
    ) -> None:
        self._store = store
        self._custody = custody
        self._readers = readers
        self._trail = trail
        self._clock = clock
        self._known: OrderedDict[CredentialId, _Known] = OrderedDict()
        self._asking: dict[CredentialId, asyncio.Task[Sourced]] = {}

    async def secret_of(self, credential: Credential) -> Secret:
        """The base secret of a credential that has a source. Not for use in a transaction.

        Raises `RefusedError(credential_unavailable)` with the reason, and `UnopenableError` for an edited row.
        """
        return (await self.current(credential)).secret

    async def current(self, credential: Credential) -> Sourced:
        """The same, with its version and how long it is good. Not for use in a transaction."""
        kept = await self._kept(credential)
        known = self._known_of(kept)
        now = known.used_at = self._clock()
        # (1) Fresh: nobody is asked.
        if known.confirmed_at is not None and now < known.confirmed_at + kept.source.ttl_seconds:
            return self._sourced(kept, known)
        # (2) Just asked, without an answer.
        if known.failure is not None and known.failed_at is not None and now < known.failed_at + RETRY_SECONDS:
            return self._bridged(kept, known)
        # (3) Known not to answer: go on with what may be gone on with, and let somebody else wait.
        asking = self._ask(kept)
        if known.failure is not None and self._may_bridge(kept, known):
            return self._bridged(kept, known)
        # (4) Ask.
        return await asyncio.shield(asking)

    def at_hand(self, credential: Credential, *, version: int) -> float | None:
        """Until when that version, opened, may be used without asking anybody. None: ask `current`, outside of any
        transaction, and look again."""
        known, now = self._known.get(credential.id), self._clock()
        if known is None or known.version != version or now >= known.good_until:
            return None
        known.used_at = now
        return known.good_until

    async def read_for(self, tenant: TenantId, reference: Mapping[str, str], *, by_platform: bool) -> Secret:
        """The raw text that a new reference means, for a credential that is about to be sealed to it.

        Raises `RefusedError`: `invalid_field`, `credential_unavailable`.
        """
        source = await self.nameable(tenant, reference["source"], by_platform=by_platform)
        try:
            return await self._raw(source, tenant, reference["name"])
        except SourceError as error:
            raise RefusedError(_refusal(source, error)) from None

    async def nameable(self, tenant: TenantId, name: str, *, by_platform: bool) -> Source:
        """One that a credential of this tenant may be made to read from. What may not be named looks like nothing."""
        try:
            source = await self._custody.with_keys(lambda: self._genuine(name))
        except UnopenableError:
            raise RefusedError(SOURCE_EDITED) from None
        if source is None or not may_name(source, tenant=tenant, by_platform=by_platform):
            raise RefusedError(NO_SUCH_SOURCE)
        return source

    async def tried(self, source: Source, tenant: TenantId, name: str) -> None:
        """Reads once and tells nothing. Raises `SourceError`."""
        await self._raw(source, tenant, name)

    async def refresh(self) -> None:
        """One round: what is in use is looked at before it is due."""
        now, turns = self._clock(), asyncio.Semaphore(_AT_ONCE)

        async def look(credential_id: CredentialId) -> None:
            async with turns:
                await self._look_again(credential_id)

        watched = [each for each, known in self._known.items() if now - known.used_at < WATCHED_SECONDS]
        await asyncio.gather(*(look(each) for each in watched))

    async def _look_again(self, credential_id: CredentialId) -> None:
        async with self._store.read(PlatformScope(CrossTenantReason.UPKEEP)) as records:
            credential = await records.credentials.get(credential_id)
        if credential is None or credential.secret_source is None:
            self._known.pop(credential_id, None)
            return
        try:
            kept = await self._kept(credential)
            known = self._known_of(kept)
            due = known.confirmed_at is None or (
                self._clock() >= known.confirmed_at + _AHEAD * kept.source.ttl_seconds
                and (known.failed_at is None or self._clock() >= known.failed_at + RETRY_SECONDS)
            )
            if due:
                await asyncio.shield(self._ask(kept))
        except (RefusedError, UnopenableError):
            pass  # whoever uses it is told

    # --- asking, one at a time for each credential

    def _ask(self, kept: _Kept) -> "asyncio.Task[Sourced]":
        task = self._asking.get(kept.credential.id)
        if task is None:
            task = asyncio.create_task(self._asked(kept), name="secret source")
            self._asking[kept.credential.id] = task
            task.add_done_callback(lambda done: self._answered(kept.credential.id, done))
        return task

    def _answered(self, credential_id: CredentialId, task: "asyncio.Task[Sourced]") -> None:
        self._asking.pop(credential_id, None)
        if not task.cancelled():
            task.exception()  # somebody may not have waited for it

    async def _asked(self, kept: _Kept) -> Sourced:
        known, credential, source = self._known_of(kept), kept.credential, kept.source
        try:
            value = await self._value(source, credential)
        except SourceError as error:
            if known.failure is None or known.failure.failure is not error.failure:
                _log.warning(
                    "source_gives_no_value", source=source.name, credential=credential.id, failure=error.failure.value
                )
            known.failed_at, known.failure = self._clock(), error
            return self._bridged(kept, known)
        seen = value == kept.secret
        if not seen:
            kept, seen = await self._changed(kept, value)
            known = self._known_of(kept)
        known.confirmed_at = self._clock()
        known.failed_at, known.failure, known.seen = None, None, known.seen or seen
        return self._sourced(kept, known)

    async def _value(self, source: Source, credential: Credential) -> Secret:
        """By the rules of a submitted secret of its kind, at every reading. Raises `SourceError`."""
        reference = credential.secret_source or {}
        raw = await self._raw(source, credential.tenant, reference.get("name", ""))
        try:
            kind = kind_named(credential.kind)
            value = kinds.settled_secret(kind, credential.settings, raw)
        except (InvalidSecretError, InvalidSettingsError) as error:
            raise SourceError(SourceFailure.UNUSABLE, str(error)) from None
        if kind is CredentialKind.STATIC and not all(fits(value.reveal(), each) for each in credential.placements):
            raise SourceError(SourceFailure.UNUSABLE, "a header carries ASCII only, and this secret has more in it")
        return value

    async def _raw(self, source: Source, tenant: TenantId, name: str) -> Secret:
        reader = self._readers.get(source.kind)
        if reader is None:
            raise SourceError(SourceFailure.MISCONFIGURED, "this control plane reads from no source of that kind")
        try:
            path = path_of(source, tenant=tenant, name=name)
        except InvalidSourceError as error:
            raise SourceError(SourceFailure.MISCONFIGURED, str(error)) from None
        with on_behalf_of(tenant):
            return await reader.read(source, path=path, field=_field(source, tenant, name))

    # --- a value that changed

    async def _changed(self, kept: _Kept, value: Secret) -> tuple[_Kept, bool]:
        """What is current from now on, and whether it is what we have read. Raises `RefusedError`."""
        known = self._known_of(kept)
        if not known.seen and self._clock() < kept.version.created_at + SETTLE_SECONDS:
            # Another replica has just read that version where we look: our copy of the source lags behind.
            _log.info("source_lags_behind", source=kept.source.name, credential=kept.credential.id)
            return kept, False
        adopted = await self._custody.with_keys(lambda: self._adopted(kept, value))
        if adopted is not None:
            return adopted, True
        # Somebody else was faster. What was written counts, until the source shows us something else.
        return await self._kept(kept.credential), False

    async def _adopted(self, kept: _Kept, value: Secret) -> _Kept | None:
        """Written as a new version; None where the credential is not what it was any more."""
        now = self._clock()
        async with self._store.write(TenantScope(kept.credential.tenant)) as records:
            credential = await records.credentials.locked(kept.credential.id)
            if credential is None or credential.current_version != kept.version.version:
                return None
            if credential.secret_source != kept.credential.secret_source:
                return None
            new = replace(credential, current_version=credential.current_version + 1, updated_at=now)
            sealed = seal_secret(self._custody, value, new, version=new.current_version)
            version = CredentialVersion(
                credential_id=new.id,
                version=new.current_version,
                tenant=new.tenant,
                state=VersionState.ACTIVE,
                kek_id=sealed.kek_id,
                envelope=sealed.envelope,
                created_at=now,
            )
            await records.versions.replace(
                replace(kept.version, state=VersionState.RETIRED, envelope=None, kek_id=None)
            )
            await records.versions.add(version)
            await records.credentials.replace(new)
            await records.outbox.append([Change(ChangeKind.CREDENTIAL, new.tenant, new.id)], now)
            reach("source.changed")
            event = self._trail.event(
                "credential.source_change",
                by=_BY_SOURCE,
                tenant=new.tenant,
                credential=new.name,
                version=new.current_version,
                detail=f"its value at {kept.source.name} changed",
            )
            await self._trail.record(records, [event])
        return _Kept(new, version, value, kept.source)

    # --- what is known here

    async def _kept(self, credential: Credential) -> _Kept:
        return await self._custody.with_keys(lambda: self._looked_up(credential))

    async def _looked_up(self, credential: Credential) -> _Kept:
        """The credential as it is now: a version that was replaced since it was read is not opened any more."""
        # Sources are the platform's: a tenant's own transaction would not see them.
        async with self._store.read(PlatformScope(CrossTenantReason.RESOLVE)) as records:
            current = await records.credentials.get(credential.id)
            if current is None or current.tenant != credential.tenant or current.secret_source is None:
                raise UnopenableError
            version = await records.versions.get(current.id, current.current_version)
            secret = open_secret(self._custody, version, current)
            source = await self._opened_source(records, str(current.secret_source.get("source")))
        if source is None or version is None:
            raise RefusedError(SOURCE_GONE)
        return _Kept(current, version, secret, source)

    async def _genuine(self, name: str) -> Source | None:
        async with self._store.read(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            return await self._opened_source(records, name)

    async def _opened_source(self, records: Records, name: str) -> Source | None:
        source = await records.sources.get(name)
        if source is not None:
            require_genuine(self._custody, source)
        return source

    def _known_of(self, kept: _Kept) -> _Known:
        """Knowledge of another version, or of the source as it was before, does not count."""
        known = self._known.get(kept.credential.id)
        if known is None or known.version != kept.version.version or known.source_changed_at != kept.source.updated_at:
            used_at = known.used_at if known is not None else 0.0
            known = _Known(kept.version.version, kept.source.updated_at, used_at=used_at)
            self._known[kept.credential.id] = known
            while len(self._known) > _WATCHED:
                self._known.popitem(last=False)
        self._known.move_to_end(kept.credential.id)
        return known

    def _sourced(self, kept: _Kept, known: _Known) -> Sourced:
        """Confirmed by the source."""
        assert known.confirmed_at is not None
        known.good_until = known.confirmed_at + kept.source.ttl_seconds
        return Sourced(kept.secret, kept.version.version, known.good_until)

    def _may_bridge(self, kept: _Kept, known: _Known) -> bool:
        return (
            known.confirmed_at is not None
            and known.failure is not None
            and known.failure.failure is SourceFailure.UNAVAILABLE
            and self._clock() < _last_moment(kept, known.confirmed_at)
        )

    def _bridged(self, kept: _Kept, known: _Known) -> Sourced:
        """The value read before, if it may still serve. Raises `RefusedError`."""
        assert known.failure is not None
        if known.confirmed_at is None or not self._may_bridge(kept, known):
            known.good_until = 0.0
            raise RefusedError(_refusal(kept.source, known.failure))
        known.good_until = _last_moment(kept, known.confirmed_at)
        return Sourced(kept.secret, kept.version.version, known.good_until)


def require_genuine(custody: Custody, source: Source) -> None:
    """Raises `UnopenableError` for a row that is not the one that was written, `KeyNeededError`."""
    custody.open(source.seal, aad=source_aad(source))


def _last_moment(kept: _Kept, confirmed_at: float) -> float:
    return confirmed_at + kept.source.ttl_seconds + kept.credential.max_stale_seconds


def _field(source: Source, tenant: TenantId, name: str) -> str | None:
    template = source.settings.get("field")
    return filled(template, tenant=tenant, name=name) if isinstance(template, str) else None


def _refusal(source: Source, error: SourceError) -> Refusal:
    where = f"the source '{source.name}' that the secret is read from"
    match error.failure:
        case SourceFailure.UNAVAILABLE:
            return Refusal(
                RefusalCode.CREDENTIAL_UNAVAILABLE,
                f"{where} does not answer: {error.detail}",
                f"try again in a moment; an operator looks with: coatcheck source test {source.name}",
                retry_after_seconds=5,
            )
        case SourceFailure.NOT_FOUND:
            return Refusal(
                RefusalCode.CREDENTIAL_UNAVAILABLE,
                f"{where} has no such secret: {error.detail}",
                "put it there, or correct the name",
            )
        case SourceFailure.DENIED | SourceFailure.UNUSABLE | SourceFailure.MISCONFIGURED:
            return Refusal(
                RefusalCode.CREDENTIAL_UNAVAILABLE,
                f"{where} gives nothing that can be used: {error.detail}",
                f"an operator looks with: coatcheck source test {source.name}",
            )


NO_SUCH_SOURCE: Final = Refusal(
    RefusalCode.INVALID_FIELD,
    "secret_source.source: there is no source of that name that this tenant may read from",
    "the platform's administrator lists them with: coatcheck source list",
)
SOURCE_EDITED: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the source's row was edited in the database, so nobody uses it",
    "the platform's administrator puts it again with: coatcheck source add",
)
SOURCE_GONE: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the source that the secret is read from does not exist any more",
    "the platform's administrator adds it again with: coatcheck source add",
)
