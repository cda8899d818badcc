"""Schedules: reminders of a secret's age, and rotations by a hook without anybody asking.

Rules:
- What is to be done stands in the database (`look_at`); whoever looks first does it, and replicas may all look at once.
- A hook is asked outside any transaction, by a name that was written down before: whoever crashes asks the same again.
- One that answers slowly delays no other: several are asked at once, each for so long, and few of one tenant.
- What failed rests until an operator says to go on (`core.schedule.why_suspended`).
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import structlog

from control_plane.contract.caller import TenantId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.core.records import (
    Credential,
    CredentialVersion,
    Rotation,
    RotationPhase,
    RotationSchedule,
    VersionState,
)
from control_plane.core.schedule import BY_SCHEDULE, LEASE_SECONDS, RETRY_SECONDS, Doing, due_at, next_of, why_suspended
from control_plane.credentials import check_probe, invalid_field, locked, named
from control_plane.custody import Custody, UnopenableError, open_secret
from control_plane.faults import reach
from control_plane.ports import (
    Created,
    CrossTenantReason,
    Entropy,
    HookAsk,
    HookFailedError,
    PlatformScope,
    Records,
    RotationHook,
    Store,
    TenantScope,
    on_behalf_of,
)
from control_plane.rotation import NewRotation, RotationKeeper
from control_plane.trail import Actor, Trail

SCHEDULES_A_ROUND: Final = 500
ROUND_SECONDS: Final = 15.0
LOOKS_AT_ONCE: Final = 8
LOOKS_AT_ONCE_OF_ONE_TENANT: Final = 2
HOOK_SECONDS: Final = 20.0
"""For one question to a hook, with all that the hook asks others; less than its lease."""

T = TypeVar("T")

_log = structlog.get_logger("control_plane.rotation")


@dataclass(frozen=True, slots=True)
class NewSchedule:
    every_seconds: float
    remind_seconds: float
    hook: Mapping[str, Any] | None
    probes: bool
    proceeds_unproven: bool
    canary_percent: int
    canary_seconds: float
    overlap_seconds: float


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A schedule, with what follows from it now."""

    schedule: RotationSchedule
    due_at: float | None
    """None: nothing is in use."""
    suspended: str


@dataclass(frozen=True, slots=True)
class _Work:
    """What one look found to be done."""

    doing: Doing
    schedule: RotationSchedule
    credential: Credential
    version: CredentialVersion | None
    rotation: Rotation | None
    current: Secret | None


class ScheduleKeeper:
    def __init__(
        self,
        store: Store,
        custody: Custody,
        rotations: RotationKeeper,
        hooks: Mapping[str, RotationHook],
        trail: Trail,
        *,
        entropy: Entropy,
    ) -> None:
        self._store = store
        self._custody = custody
        self._rotations = rotations
        self._hooks = hooks
        self._trail = trail
        self._entropy = entropy

    # --- what operators ask for --------------------------------------------------------------------------------------

    async def put(self, tenant: TenantId, name: str, new: NewSchedule, *, by: Actor) -> Scheduled:
        """In the place of the last one; what had been suspended goes on. Raises `RefusedError`."""
        if new.remind_seconds >= new.every_seconds:
            raise invalid_field("remind_seconds", "it is less than every_seconds")
        if bool(new.canary_percent) != bool(new.canary_seconds):
            raise invalid_field("canary_seconds", "canary_percent and canary_seconds go together")
        async with self._store.write(TenantScope(tenant)) as records:
            credential = await locked(records, name)
            if new.probes:
                check_probe(credential)
            before = await records.rotations.schedule_of(credential.id)
            rotation = await records.rotations.of(credential.id)
            now = await records.now()
            schedule = RotationSchedule(
                credential_id=credential.id,
                tenant=tenant,
                every_seconds=new.every_seconds,
                remind_seconds=new.remind_seconds,
                hook=new.hook,
                probes=new.probes,
                proceeds_unproven=new.proceeds_unproven,
                canary_percent=new.canary_percent,
                canary_seconds=new.canary_seconds,
                overlap_seconds=new.overlap_seconds,
                look_at=now,
                created_at=now,
                forgiven_rotation=rotation.id if rotation is not None else None,
            )
            if before is not None and before.hook == new.hook:
                schedule = replace(schedule, unsettled_rotation=before.unsettled_rotation, hook_state=before.hook_state)
            await records.rotations.put_schedule(schedule)
            await self._noted(records, "rotation.schedule", credential, by=by, detail=_in_words(schedule))
            return _scheduled(schedule, await _active(records, credential), rotation)

    async def get(self, tenant: TenantId, name: str) -> Scheduled:
        """Raises `RefusedError(not_found)`."""
        async with self._store.read(TenantScope(tenant)) as records:
            credential = await named(records, name)
            schedule = await records.rotations.schedule_of(credential.id)
            if schedule is None:
                raise RefusedError(NO_SCHEDULE)
            version, rotation = await _active(records, credential), await records.rotations.of(credential.id)
            return _scheduled(schedule, version, rotation)

    async def remove(self, tenant: TenantId, name: str, *, by: Actor) -> None:
        """Raises `RefusedError(not_found)`."""
        async with self._store.write(TenantScope(tenant)) as records:
            credential = await locked(records, name)
            if not await records.rotations.remove_schedule(credential.id):
                raise RefusedError(NO_SCHEDULE)
            await self._noted(records, "rotation.unschedule", credential, by=by)

    # --- what happens by itself --------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Looks at every schedule whose time has come; what is not begun within a round is left to the next."""
        async with self._store.read(PlatformScope(CrossTenantReason.UPKEEP)) as records:
            found = await records.rotations.schedules_to_look_at(await records.now(), limit=SCHEDULES_A_ROUND)
        round_ends = asyncio.get_running_loop().time() + ROUND_SECONDS
        at_once = asyncio.Semaphore(LOOKS_AT_ONCE)
        of_one: dict[TenantId, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(LOOKS_AT_ONCE_OF_ONE_TENANT))

        async def look(schedule: RotationSchedule) -> None:
            async with of_one[schedule.tenant], at_once:
                if asyncio.get_running_loop().time() < round_ends:
                    with suppress(RefusedError):  # the store is away, or somebody was faster: the next looks again
                        await self._look_at(schedule)

        looks = await asyncio.gather(*map(look, _tenant_by_tenant(found)), return_exceptions=True)
        for failed in filter(None, looks):
            raise failed  # after the others are done

    async def _look_at(self, found: RotationSchedule) -> None:
        work = await self._custody.with_keys(lambda: self._claimed(found))
        if work is None:
            return
        match work.doing:
            case Doing.ROTATE:
                await self._rotate(work)
            case Doing.SETTLE:
                await self._settle(work)
            case Doing.REMIND | Doing.NOTHING:
                pass

    async def _claimed(self, found: RotationSchedule) -> _Work | None:
        """What is to be done, put off for everybody else. None: somebody was faster, or it is gone."""
        async with self._store.write(TenantScope(found.tenant)) as records:
            credential = await records.credentials.locked(found.credential_id)
            schedule = await records.rotations.schedule_of(found.credential_id)
            if credential is None or schedule is None or schedule.look_at != found.look_at:
                return None
            version, rotation = await _active(records, credential), await records.rotations.of(credential.id)
            now = await records.now()
            following = next_of(schedule, version, rotation, now)
            schedule = replace(schedule, look_at=following.look_at)
            if following.doing is Doing.ROTATE and schedule.attempt is None:
                schedule = replace(schedule, attempt=new_id("att", self._entropy(ID_ENTROPY_BYTES)))
            await records.rotations.put_schedule(schedule)
            if following.doing is Doing.REMIND and version is not None:
                await self._remind(records, credential, schedule, version, rotation)
            return _Work(following.doing, schedule, credential, version, rotation, self._opened(credential, version))

    async def _remind(
        self,
        records: Records,
        credential: Credential,
        schedule: RotationSchedule,
        version: CredentialVersion,
        rotation: Rotation | None,
    ) -> None:
        now = await records.now()
        days = (now - version.created_at) / 86_400
        left = (due_at(schedule, version) - now) / 86_400
        when = f"due in {left:.0f} days" if left >= 1 else "due now" if left > -1 else f"due for {-left:.0f} days"
        detail = f"version {version.version} is {days:.0f} days old, {when}"
        if suspended := why_suspended(schedule, rotation):
            detail += f"; {suspended}"
        await self._noted(records, "rotation.due", credential, by=_ITSELF, detail=detail)
        _log.warning("rotation_due", tenant=credential.tenant, credential=credential.name, version=version.version)

    async def _rotate(self, work: _Work) -> None:
        schedule = work.schedule
        try:
            with on_behalf_of(schedule.tenant):
                created = await _in_time(self._hook(schedule).create(self._ask(work)))
        except HookFailedError as error:
            await self._failed(work, str(error))
            return
        reach("rotation.hook_created")
        new = NewRotation(
            secret=created.secret,
            if_version=work.credential.current_version,
            canary_percent=schedule.canary_percent,
            canary_seconds=schedule.canary_seconds,
            overlap_seconds=schedule.overlap_seconds,
            probes=schedule.probes,
            proceeds_unproven=schedule.proceeds_unproven,
        )
        try:
            await self._rotations.start(
                work.credential.tenant,
                work.credential.name,
                new,
                by=_ITSELF,
                and_then=lambda records, rotation: self._begun(records, schedule, created, rotation),
            )
        except RefusedError as refused:
            await self._failed(work, f"what the hook gave was refused: {refused.refusal.detail}")

    async def _begun(self, records: Records, schedule: RotationSchedule, created: Created, rotation: Rotation) -> None:
        """In the transaction that begins the rotation. Raises `RefusedError` where the hook is not the one any more."""
        # The credential is locked: what the operator has said while the hook was asked stands.
        present = await records.rotations.schedule_of(rotation.credential_id)
        if present is None or present.hook != schedule.hook:
            raise RefusedError(HOOK_TAKEN_AWAY)
        await records.rotations.put_schedule(
            replace(
                present,
                attempt=None,
                unsettled_rotation=rotation.id,
                hook_state=dict(created.state),
                last_failure="",
                look_at=await records.now() + LEASE_SECONDS,
            )
        )

    async def _settle(self, work: _Work) -> None:
        """Whichever way it ended: what is not in use is put away. (Where it was overtaken, nobody knows what is.)"""
        rotation, version, unsettled = work.rotation, work.version, work.schedule.unsettled_rotation
        try:
            if rotation is not None and rotation.id == unsettled and rotation.phase is not RotationPhase.OVERTAKEN:
                new_is_in_use = version is not None and version.version == rotation.new_version
                with on_behalf_of(work.schedule.tenant):
                    asked = self._hook(work.schedule).settle(self._ask(work), new_is_in_use=new_is_in_use)
                    await _in_time(asked)
        except HookFailedError as error:
            await self._failed(work, str(error))
            return
        async with self._store.write(TenantScope(work.credential.tenant)) as records:
            credential = await records.credentials.locked(work.credential.id)
            schedule = await records.rotations.schedule_of(work.credential.id)
            if credential is None or schedule is None or schedule.unsettled_rotation != unsettled:
                return
            now = await records.now()
            settled = replace(schedule, unsettled_rotation=None, hook_state={}, last_failure="", look_at=now)
            await records.rotations.put_schedule(settled)
            await self._noted(records, "rotation.settle", credential, by=_ITSELF)

    async def _failed(self, work: _Work, reason: str) -> None:
        async with self._store.write(TenantScope(work.credential.tenant)) as records:
            credential = await records.credentials.locked(work.credential.id)
            schedule = await records.rotations.schedule_of(work.credential.id)
            if credential is None or schedule is None or schedule.look_at != work.schedule.look_at:
                return
            later = await records.now() + RETRY_SECONDS
            await records.rotations.put_schedule(replace(schedule, last_failure=reason[:255], look_at=later))
            await self._noted(records, "rotation.hook_failed", credential, by=_ITSELF, detail=reason)
        _log.warning("rotation_hook_failed", tenant=work.credential.tenant, credential=work.credential.name)

    def _hook(self, schedule: RotationSchedule) -> RotationHook:
        hook = self._hooks.get(str((schedule.hook or {}).get("kind", "")))
        if hook is None:
            raise HookFailedError("there is no such hook any more")
        return hook

    def _ask(self, work: _Work) -> HookAsk:
        return HookAsk(
            settings=work.schedule.hook or {},
            tenant=work.credential.tenant,
            credential=work.credential.name,
            attempt=work.schedule.attempt or work.schedule.unsettled_rotation or "",
            current=work.current,
            state=work.schedule.hook_state,
        )

    def _opened(self, credential: Credential, version: CredentialVersion | None) -> Secret | None:
        try:
            return open_secret(self._custody, version, credential)
        except UnopenableError:
            return None

    async def _noted(
        self, records: Records, action: str, credential: Credential, *, by: Actor, detail: str = ""
    ) -> None:
        event = self._trail.event(
            action,
            by=by,
            tenant=credential.tenant,
            credential=credential.name,
            version=credential.current_version,
            detail=detail,
        )
        await self._trail.record(records, [event])


async def _in_time(asked: Awaitable[T]) -> T:
    """Raises `HookFailedError`."""
    try:
        async with asyncio.timeout(HOOK_SECONDS):
            return await asked
    except TimeoutError:
        raise HookFailedError(f"the hook did not answer within {HOOK_SECONDS:g} seconds") from None


def _tenant_by_tenant(found: Sequence[RotationSchedule]) -> Sequence[RotationSchedule]:
    """The first of each tenant, then the second of each: whoever has many waits for his own."""
    seen: dict[TenantId, int] = defaultdict(int)
    turns: list[tuple[int, RotationSchedule]] = []
    for schedule in found:
        turns.append((seen[schedule.tenant], schedule))
        seen[schedule.tenant] += 1
    return [schedule for _, schedule in sorted(turns, key=lambda turn: turn[0])]


async def _active(records: Records, credential: Credential) -> CredentialVersion | None:
    version = await records.versions.get(credential.id, credential.current_version)
    return version if version is not None and version.state is VersionState.ACTIVE else None


def _scheduled(schedule: RotationSchedule, version: CredentialVersion | None, rotation: Rotation | None) -> Scheduled:
    due = due_at(schedule, version) if version is not None else None
    return Scheduled(schedule, due, why_suspended(schedule, rotation))


def _in_words(schedule: RotationSchedule) -> str:
    by = f"by the hook {schedule.hook['kind']}" if schedule.hook is not None else "by hand"
    return f"every {schedule.every_seconds / 86_400:g} days, {by}"


_ITSELF: Final = Actor(BY_SCHEDULE, "schedule", is_a_client=False)
HOOK_TAKEN_AWAY: Final = Refusal(
    RefusalCode.ROTATION_NOT_RUNNING,
    "the hook was taken away, or another put in its place, while it was asked: its value is not used",
)
NO_SCHEDULE: Final = Refusal(
    RefusalCode.NOT_FOUND,
    "this credential has no schedule",
    "give it one with: coatcheck credential rotate NAME --schedule 90d",
)
