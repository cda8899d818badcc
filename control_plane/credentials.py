"""Credentials: added, changed, deleted (rotated: `rotation`). Their secrets go in and never come out.

Rule: where a secret may go can only be narrowed without it. Every other change of that needs the secret submitted again
in the same call, because whoever may edit a destination is not thereby somebody who knows the key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from control_plane.access import TENANT_NOT_FOUND
from control_plane.contract.caller import CredentialId, TenantId
from control_plane.contract.destination import Destination
from control_plane.contract.kinds import CredentialKind
from control_plane.contract.placement import BEARER, Placement, fits
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.core import kinds
from control_plane.core.kinds import InvalidSecretError, InvalidSettingsError, is_replaced, kind_named
from control_plane.core.names import ID_ENTROPY_BYTES, default_variable, new_id
from control_plane.core.presets import PRESETS, Preset, probe_of
from control_plane.core.probe import SETTING as PROBE_SETTING
from control_plane.core.probe import WITHOUT_PROBE, Probe
from control_plane.core.reach import Reach, widened_fields
from control_plane.core.records import (
    Change,
    ChangeKind,
    Credential,
    CredentialVersion,
    MintedValue,
    MintingState,
    Rotation,
    RotationSchedule,
    VersionState,
)
from control_plane.core.rotation import Lineage
from control_plane.core.schedule import due_at
from control_plane.custody import UnopenableError, open_secret
from control_plane.faults import reach
from control_plane.ports import Clock, Entropy, Records, Store, TakenError, TenantScope
from control_plane.sources import SecretSources
from control_plane.trail import Actor, Trail
from control_plane.versions import Versions

FIRST: Final = Lineage({1: VersionState.ACTIVE})
"""A new credential's versions."""


@dataclass(frozen=True, slots=True)
class NewCredential:
    """None: as the preset has it."""

    name: str
    preset: str | None
    destinations: tuple[Destination, ...] | None
    placements: tuple[Placement, ...] | None
    variables: tuple[str, ...] | None
    credential_required: bool
    secret: Secret | None
    """None: it is read from `secret_source`."""
    secret_source: Mapping[str, str] | None = None
    allow_direct: bool = False
    kind: str = CredentialKind.STATIC.value
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_stale_seconds: float = 0.0
    probe: Probe | None = None
    """How a new version is tried. None: as its preset has it, if that has one."""


@dataclass(frozen=True, slots=True)
class CredentialChange:
    """None: as it is."""

    destinations: tuple[Destination, ...] | None = None
    placements: tuple[Placement, ...] | None = None
    variables: tuple[str, ...] | None = None
    credential_required: bool | None = None
    secret: Secret | None = None
    allow_direct: bool | None = None
    settings: Mapping[str, Any] | None = None
    """All of them, as they are to be."""
    max_stale_seconds: float | None = None
    secret_source: Mapping[str, str] | None = None
    """From now on the secret is read from there."""
    probe: Probe | None = None
    without_probe: bool = False
    """It has none of its own any more."""


@dataclass(frozen=True, slots=True)
class Described:
    """A credential with the history of its versions: everything but the secret."""

    credential: Credential
    versions: Sequence[CredentialVersion]
    rotation: Rotation | None = None
    """The latest one: under way, or how it ended."""
    minted: MintedValue | None = None
    """What its provider gave last, or why it gave nothing."""
    schedule: RotationSchedule | None = None

    @property
    def active(self) -> CredentialVersion | None:
        """The version in use."""
        return next((version for version in self.versions if version.state is VersionState.ACTIVE), None)

    @property
    def due_at(self) -> float | None:
        """When the version in use is too old. None: there is no schedule, or none in use."""
        return due_at(self.schedule, self.active) if self.schedule is not None and self.active is not None else None


class CredentialKeeper:
    def __init__(
        self,
        store: Store,
        versions: Versions,
        sources: SecretSources,
        trail: Trail,
        *,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._store = store
        self._versions = versions
        self._sources = sources
        self._trail = trail
        self._clock = clock
        self._entropy = entropy

    async def add(self, tenant: TenantId, new: NewCredential, *, by: Actor, by_platform: bool = True) -> Described:
        """`by_platform`: the platform's administrator asks, who may name more sources than a tenant's.

        Raises `RefusedError` (`not_found` for the tenant, `invalid_field`, `credential_unavailable`).
        """
        credential = self._settled(tenant, new)
        submitted = await self._submitted(tenant, new.secret, new.secret_source, by_platform=by_platform)
        if submitted is None:
            raise invalid_field("secret", "it is needed, or 'secret_source' where it is to be read from")
        secret = settled_secret(credential, submitted)
        return await self._versions.custody.with_keys(lambda: self._added(credential, secret, by))

    async def _added(self, credential: Credential, secret: Secret, by: Actor) -> Described:
        tenant = credential.tenant
        async with self._store.write(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            try:
                await records.credentials.add(credential)
            except TakenError:
                raise RefusedError(NAME_TAKEN) from None
            await self._versions.write(records, credential, FIRST, secret=secret)
            reach("credential.added")
            await self._published(records, "credential.add", credential, by)
            return await describe(records, credential)

    async def list(self, tenant: TenantId) -> Sequence[Described]:
        async with self._store.read(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            return [await describe(records, credential) for credential in await records.credentials.list()]

    async def get(self, tenant: TenantId, name: str) -> Described:
        async with self._store.read(TenantScope(tenant)) as records:
            return await describe(records, await named(records, name))

    async def change(
        self, tenant: TenantId, name: str, change: CredentialChange, *, by: Actor, by_platform: bool = True
    ) -> Described:
        """Raises `RefusedError`: not found, `secret_required`, `invalid_field`, `credential_unavailable`."""
        submitted = await self._submitted(tenant, change.secret, change.secret_source, by_platform=by_platform)
        change = replace(change, secret=submitted)
        return await self._versions.custody.with_keys(lambda: self._change(tenant, name, change, by))

    async def _submitted(
        self, tenant: TenantId, secret: Secret | None, source: Mapping[str, str] | None, *, by_platform: bool
    ) -> Secret | None:
        """What was submitted, or what its source has. No transaction is open meanwhile."""
        if source is None:
            return secret
        if secret is not None:
            raise invalid_field("secret", "it is read from 'secret_source', or given here, not both")
        return await self._sources.read_for(tenant, source, by_platform=by_platform)

    async def _change(self, tenant: TenantId, name: str, change: CredentialChange, by: Actor) -> Described:
        async with self._store.write(TenantScope(tenant)) as records:
            # (1) What it is now, and what it is to be.
            old = await locked(records, name)
            new = self._changed(old, change)
            # (2) Wider needs the secret again, in this call.
            widened = widened_fields(_reach(new), old=_reach(old))
            if widened and change.secret is None:
                raise RefusedError(_secret_required(widened))
            # (3) The secret, a submitted one or the same again, is sealed to where it may go now.
            if change.secret is not None:
                new = await self._replaced(records, new, settled_secret(new, change.secret))
            elif _reach(new) != _reach(old):
                new = await self._sealed_again(records, old, new)
            await records.credentials.replace(new)
            # (4) What was bound to the old reach is not bound to the new one. A probe binds no placeholder but its own.
            is_bound_anew = _without_probe(_reach(new)) != _without_probe(_reach(old))
            if is_bound_anew:
                await records.tokens.revoke_of_credential(new.id, self._clock())
                reach("credential.narrowed")
            await self._published(records, "credential.change", new, by, revoked=is_bound_anew)
            return await describe(records, new)

    async def delete(self, tenant: TenantId, name: str, *, by: Actor) -> None:
        """Its envelopes, grants and placeholders go with it. Raises `RefusedError(credential_not_found)`."""
        async with self._store.write(TenantScope(tenant)) as records:
            credential = await locked(records, name)
            await records.tokens.revoke_of_credential(credential.id, self._clock())
            reach("credential.tokens_revoked")
            await records.credentials.remove(credential.id)
            reach("credential.removed")
            await self._published(records, "credential.delete", credential, by, revoked=True)

    def _settled(self, tenant: TenantId, new: NewCredential) -> Credential:
        preset = _preset(new)
        now = self._clock()
        credential = Credential(
            id=CredentialId(new_id("cred", self._entropy(ID_ENTROPY_BYTES))),
            tenant=tenant,
            name=new.name,
            preset=new.preset,
            kind=new.kind,
            settings=_new_settings(new),
            secret_source=new.secret_source,
            max_stale_seconds=new.max_stale_seconds,
            destinations=new.destinations or (preset.destinations if preset else ()),
            placements=new.placements or (preset.placements if preset else (BEARER,)),
            variables=_variables(new, preset),
            credential_required=new.credential_required,
            allow_direct=new.allow_direct,
            current_version=1,
            created_at=now,
            updated_at=now,
        )
        _require_settled(credential)
        if new.probe is not None:
            check_probe(credential)
        return credential

    def _changed(self, old: Credential, change: CredentialChange) -> Credential:
        new = replace(
            old,
            destinations=old.destinations if change.destinations is None else change.destinations,
            placements=old.placements if change.placements is None else change.placements,
            variables=old.variables if change.variables is None else change.variables,
            allow_direct=old.allow_direct if change.allow_direct is None else change.allow_direct,
            credential_required=(
                old.credential_required if change.credential_required is None else change.credential_required
            ),
            settings=_changed_settings(old, change),
            max_stale_seconds=old.max_stale_seconds if change.max_stale_seconds is None else change.max_stale_seconds,
            # A secret that is submitted is not read from anywhere any more.
            secret_source=old.secret_source if change.secret is None else change.secret_source,
            updated_at=self._clock(),
        )
        _require_settled(new)
        if change.probe is not None:
            check_probe(new)
        return new

    async def _sealed_again(self, records: Records, old: Credential, new: Credential) -> Credential:
        """As a new version: the envelope of the wider reach is no longer one of the credential's."""
        version = await records.versions.get(old.id, old.current_version)
        await self._require_at_rest(records, old, version)
        try:
            secret = open_secret(self._versions.custody, version, old)
        except UnopenableError:
            raise RefusedError(SECRET_DOES_NOT_OPEN) from None
        return await self._replaced(records, new, secret)

    async def _replaced(self, records: Records, credential: Credential, secret: Secret) -> Credential:
        # A rotation that is under way ends: its versions are sealed to where they may no longer go.
        return await self._versions.replace_all(
            records, credential, secret, over=VersionState.RETIRED, reason="the credential was changed"
        )

    async def _require_at_rest(
        self, records: Records, credential: Credential, version: CredentialVersion | None
    ) -> None:
        """A secret that its provider replaces is not copied while that may be happening. Raises `RefusedError`."""
        if version is None or not is_replaced(credential.kind):
            return
        row = await records.minted.lease(version, seconds=COPY_SECONDS)
        if row is None:
            raise RefusedError(BEING_REPLACED)
        if row.asked_fence is not None or row.state is MintingState.CONSENT_LOST:
            raise RefusedError(MAY_BE_USED_UP)

    async def _published(
        self, records: Records, action: str, credential: Credential, by: Actor, *, revoked: bool = False
    ) -> None:
        """To every proxy, and into the trail."""
        await records.outbox.append(
            [
                Change(ChangeKind.CREDENTIAL, credential.tenant, credential.id, revoked=revoked),
                Change(ChangeKind.POLICY, credential.tenant, credential.tenant),
            ],
            self._clock(),
        )
        event = self._trail.event(
            action,
            by=by,
            tenant=credential.tenant,
            credential=credential.name,
            version=credential.current_version,
        )
        await self._trail.record(records, [event])


async def require_tenant(records: Records, tenant: TenantId) -> None:
    """Raises `RefusedError(not_found)`."""
    if await records.tenants.get(tenant) is None:
        raise RefusedError(TENANT_NOT_FOUND)


async def describe(records: Records, credential: Credential) -> Described:
    return Described(
        credential,
        await records.versions.of(credential.id),
        await records.rotations.of(credential.id),
        await records.minted.get(credential.id, credential.current_version),
        await records.rotations.schedule_of(credential.id),
    )


def _reach(credential: Credential) -> Reach:
    return Reach(
        credential.destinations,
        credential.placements,
        allow_direct=credential.allow_direct,
        settings=credential.settings,
    )


async def locked(records: Records, name: str) -> Credential:
    """To be changed by this transaction alone. Raises `RefusedError(credential_not_found)`."""
    credential = await records.credentials.locked((await named(records, name)).id)
    if credential is None:
        raise RefusedError(CREDENTIAL_NOT_FOUND)
    return credential


async def named(records: Records, name: str) -> Credential:
    """Raises `RefusedError(credential_not_found)`."""
    credential = await records.credentials.named(name)
    if credential is None:
        raise RefusedError(CREDENTIAL_NOT_FOUND)
    return credential


def _preset(new: NewCredential) -> Preset | None:
    if new.preset is not None and new.preset not in PRESETS:
        raise invalid_field("preset", "there is no such preset; GET /v1/presets lists them")
    # An audience is looked up as a name before it is looked up as a provider: the name must not take its place.
    if new.name in PRESETS and new.preset != new.name:
        raise invalid_field("name", "it is a provider's id, which only a credential of that preset may have")
    return PRESETS[new.preset] if new.preset is not None else None


def _variables(new: NewCredential, preset: Preset | None) -> tuple[str, ...]:
    if new.variables is not None:
        return new.variables
    return preset.variables if preset else (default_variable(new.name),)


def _without_probe(reach: Reach) -> Reach:
    return replace(reach, settings={name: value for name, value in reach.settings.items() if name != PROBE_SETTING})


def _require_settled(credential: Credential) -> None:
    if not credential.destinations:
        raise invalid_field("destinations", "a credential has at least one, such as https://api.example.com")
    if not credential.placements:
        raise invalid_field("placements", "a credential has at least one")
    if credential.secret_source is not None and is_replaced(credential.kind):
        raise invalid_field(
            "secret_source",
            f"the secret of a credential of kind '{credential.kind}' is replaced here; submit it",
        )
    for name, values in (
        ("destinations", credential.destinations),
        ("placements", credential.placements),
        ("variables", credential.variables),
    ):
        if len(set(values)) != len(values):
            raise invalid_field(name, "the same one is there twice")


def check_probe(credential: Credential) -> None:
    """Raises `RefusedError(invalid_field)` where its secret cannot be tried."""
    probe = probe_of(credential)
    if credential.kind in WITHOUT_PROBE:
        raise invalid_field("probe", f"a secret of the kind {credential.kind} cannot be tried by one request")
    if probe is None:
        raise invalid_field("probe", "neither the credential nor its preset has one: give {method, path}")
    if not probe.is_within(credential.destinations[0]):
        raise invalid_field("probe", "it is not within the credential's first destination")


def settled_secret(credential: Credential, submitted: Secret) -> Secret:
    """The secret in its kind's one form. Raises `RefusedError(invalid_field)`."""
    kind = kind_named(credential.kind)
    try:
        secret = kinds.settled_secret(kind, credential.settings, submitted)
    except InvalidSecretError as error:
        raise invalid_field("secret", str(error)) from None
    if kind is CredentialKind.STATIC:
        _require_fit(secret, credential.placements)
    return secret


def _new_settings(new: NewCredential) -> dict[str, Any]:
    _require_no_probe(new.settings)
    probe = {PROBE_SETTING: new.probe.to_setting()} if new.probe is not None else {}
    return {**_settings(new.kind, new.settings), **probe}


def _changed_settings(old: Credential, change: CredentialChange) -> dict[str, Any]:
    """Its kind's, and how a new version is tried: each as it was, unless it is to be another."""
    own = {name: value for name, value in old.settings.items() if name != PROBE_SETTING}
    probe = {name: value for name, value in old.settings.items() if name == PROBE_SETTING}
    if change.settings is not None:
        _require_no_probe(change.settings)
        own = _settings(old.kind, change.settings)
    if change.probe is not None:
        probe = {PROBE_SETTING: change.probe.to_setting()}
    return {**own, **({} if change.without_probe else probe)}


def _require_no_probe(untrusted: Mapping[str, Any]) -> None:
    if PROBE_SETTING in untrusted:
        raise invalid_field(f"settings.{PROBE_SETTING}", "it is no setting of the kind; give it as 'probe'")


def _settings(kind: str, untrusted: Mapping[str, Any]) -> dict[str, Any]:
    try:
        known = kind_named(kind)
    except InvalidSettingsError as error:
        raise invalid_field("kind", str(error)) from None
    try:
        return kinds.settled_settings(known, untrusted)
    except InvalidSettingsError as error:
        raise invalid_field(f"settings.{error.field}" if error.field else "settings", str(error)) from None


def _require_fit(secret: Secret, placements: Sequence[Placement]) -> None:
    if not all(fits(secret.reveal(), placement) for placement in placements):
        raise invalid_field("secret", "a header carries ASCII only, and this secret has other characters in it")


def invalid_field(field: str, detail: str) -> RefusedError:
    return RefusedError(Refusal(RefusalCode.INVALID_FIELD, f"{field}: {detail}"))


def _secret_required(fields: Sequence[str]) -> Refusal:
    return Refusal(
        RefusalCode.SECRET_REQUIRED,
        f"this sends the secret where it could not go before: {', '.join(fields)}",
        "submit the secret again in the same call, in the field 'secret' (or name its 'secret_source' again)",
    )


COPY_SECONDS: Final = 10.0
"""Longer than the transaction that seals a secret again."""
BEING_REPLACED: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "a new token is being asked for at this moment, and the secret may change with it",
    "try again in a moment, or submit the secret in the field 'secret'",
    retry_after_seconds=5,
)
MAY_BE_USED_UP: Final = Refusal(
    RefusalCode.SECRET_REQUIRED,
    "a new token was asked for and the answer was lost, so that the secret may be used up",
    "submit the secret again in the same call, in the field 'secret'",
)
NAME_TAKEN: Final = Refusal(
    RefusalCode.INVALID_FIELD,
    "name: there is a credential of that name already",
    "rotate it for a new secret, or change it",
)
CREDENTIAL_NOT_FOUND: Final = Refusal(
    RefusalCode.CREDENTIAL_NOT_FOUND, "there is no credential of that name", "list them with: coatcheck credential list"
)
SECRET_DOES_NOT_OPEN: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the credential's secret does not open, so it cannot be sealed again",
    "submit the secret in the field 'secret'",
)
