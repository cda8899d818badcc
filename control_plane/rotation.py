"""Rotation: a new version of a secret goes live step by step, and back where it does not work.

Rules:
- Every step is one transaction under the credential's lock, with its outbox rows and its audit event. What is to be
  done next stands in the database: whoever crashes is carried on for, and replicas may all look at once.
- Nothing waits for the network inside a transaction. A probe is claimed, made, and its answer taken only where the
  rotation is still the one that asked.
- A compromised secret has no overlap, no canary and no way back.

The pure part, with its tables: `core.rotation`. What an operator sees of it: docs/rotation.md.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import structlog

from control_plane.contract.caller import CredentialId, TenantId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.contract.wire import AuditEvent
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.core.presets import PRESETS
from control_plane.core.probe import SETTING as PROBE_SETTING
from control_plane.core.probe import Probe
from control_plane.core.records import (
    Change,
    ChangeKind,
    Credential,
    ProbeResult,
    Rotation,
    RotationPhase,
    VersionState,
)
from control_plane.core.rotation import (
    AUTHENTICATION_ERROR,
    IllegalTransitionError,
    Judgement,
    Lineage,
    Replies,
    Verdict,
    bucket_of,
    first_bucket_of_window,
    first_step,
    judge,
    judge_probe,
    seconds_of,
    step_after,
)
from control_plane.credentials import (
    CREDENTIAL_NOT_FOUND,
    Described,
    check_probe,
    describe,
    invalid_field,
    locked,
    named,
    settled_secret,
)
from control_plane.faults import reach
from control_plane.ports import (
    Clock,
    CrossTenantReason,
    Entropy,
    PlatformScope,
    Records,
    ReplyCount,
    Store,
    TenantScope,
)
from control_plane.probing import LEASE_SECONDS, ProbeOutcome, Prober
from control_plane.trail import Actor, Trail
from control_plane.versions import Versions

STEPS_AT_ONCE: Final = 100
ROUND_SECONDS: Final = 2.0
BY_ITSELF: Final = "rotation"
"""Who acts where no operator does."""

_log = structlog.get_logger("control_plane.rotation")

_ACTION: Final[Mapping[RotationPhase, str]] = {
    RotationPhase.PROBING: "rotation.probe",
    RotationPhase.CANARY: "rotation.canary",
    RotationPhase.OVERLAP: "rotation.promote",
    RotationPhase.COMPLETED: "rotation.finish",
    RotationPhase.ROLLED_BACK: "rotation.roll_back",
    RotationPhase.CANCELLED: "rotation.cancel",
}
_BACK: Final[Mapping[RotationPhase, RotationPhase]] = {
    RotationPhase.PROBING: RotationPhase.CANCELLED,
    RotationPhase.CANARY: RotationPhase.ROLLED_BACK,
    RotationPhase.OVERLAP: RotationPhase.ROLLED_BACK,
}


@dataclass(frozen=True, slots=True)
class NewRotation:
    """What an operator wants. Without any option: at once, for everybody, and nothing to go back to."""

    secret: Secret | None
    """None for a compromised secret without a successor."""
    compromised: bool = False
    if_version: int | None = None
    """Only while this is the current version."""
    canary_percent: int = 0
    canary_seconds: float = 0.0
    overlap_seconds: float = 0.0
    probes: bool = False
    probe: Probe | None = None
    """Declared in this call; it stays with the credential."""
    proceeds_unproven: bool = False
    """Go on also where the probe gets no answer."""


Afterwards = Callable[[Records, Rotation], Awaitable[None]]


class RotationKeeper:
    def __init__(
        self, store: Store, versions: Versions, prober: Prober, trail: Trail, *, clock: Clock, entropy: Entropy
    ) -> None:
        self._store = store
        self._versions = versions
        self._prober = prober
        self._trail = trail
        self._clock = clock
        self._entropy = entropy

    # --- what operators ask for --------------------------------------------------------------------------------------

    async def start(
        self, tenant: TenantId, name: str, new: NewRotation, *, by: Actor, and_then: Afterwards | None = None
    ) -> Described:
        """`and_then` is carried out in the transaction that begins it.

        Raises `RefusedError`: not found, `invalid_field`, `rotation_in_progress`.
        """
        started = await self._versions.custody.with_keys(
            lambda: self._started(tenant, name, new, by=by, and_then=and_then)
        )
        rotation = started.rotation
        if rotation is None or rotation.phase is not RotationPhase.PROBING:
            return started
        await self._try(rotation)
        async with self._store.read(TenantScope(tenant)) as records:
            return await describe(records, await named(records, name))

    async def _started(
        self, tenant: TenantId, name: str, new: NewRotation, *, by: Actor, and_then: Afterwards | None
    ) -> Described:
        _check_plan(new)
        async with self._store.write(TenantScope(tenant)) as records:
            # (1) Nobody else changes it meanwhile, and nobody has since the operator looked.
            credential = await locked(records, name)
            if new.if_version is not None and credential.current_version != new.if_version:
                raise RefusedError(_overtaken(credential.current_version))
            if credential.secret_source is not None:
                raise RefusedError(READ_FROM_A_SOURCE)
            if new.secret is not None:
                new = replace(new, secret=settled_secret(credential, new.secret))
            # (2) A compromised secret goes at once, whatever is under way.
            if new.compromised:
                credential = await self._compromised(records, credential, new.secret)
                await self._published(records, credential, by=by, action="credential.rotate", revoked=True)
                reach("rotation.compromised")
                return await describe(records, credential)
            # (3) One rotation at a time.
            running = await records.rotations.of(credential.id)
            if running is not None and running.is_running:
                raise RefusedError(IN_PROGRESS)
            # (4) Where the new secret is tried is part of what all are sealed to.
            if new.probe is not None:
                credential = await self._with_probe(records, credential, new.probe)
            if new.probes:
                check_probe(credential)
            # (5) Its first step.
            assert new.secret is not None, "checked above"
            lineage = (await self._versions.lineage(records, credential)).with_pending()
            rotation = self._planned(credential, lineage, new, by=by)
            credential = replace(credential, updated_at=self._clock())
            credential, rotation = await self._entered(
                records, credential, rotation, first_step(rotation), lineage=lineage, secret=new.secret
            )
            if and_then is not None:
                await and_then(records, rotation)
            await self._published(records, credential, by=by, action="credential.rotate", rotation=rotation)
            reach("rotation.started")
            return await describe(records, credential)

    async def get(self, tenant: TenantId, name: str) -> tuple[Rotation | None, Mapping[int, Replies]]:
        """The latest rotation, and how upstreams answered each version in the window."""
        async with self._store.read(TenantScope(tenant)) as records:
            credential = await records.credentials.named(name)
            if credential is None:
                raise RefusedError(CREDENTIAL_NOT_FOUND)
            rotation = await records.rotations.of(credential.id)
            return rotation, await self._replies(records, credential.id)

    async def promote(self, tenant: TenantId, name: str, *, by: Actor) -> Described:
        """The next step, now: a canary goes live, an overlap ends. Raises `RefusedError`."""
        return await self._by_hand(tenant, name, by=by, to=None)

    async def roll_back(self, tenant: TenantId, name: str, *, by: Actor) -> Described:
        """The old version is the one in use again. Raises `RefusedError`."""
        return await self._by_hand(tenant, name, by=by, to=RotationPhase.ROLLED_BACK)

    async def cancel(self, tenant: TenantId, name: str, *, by: Actor) -> Described:
        """Throws the new version away before it went live for everybody. Raises `RefusedError`."""
        return await self._by_hand(tenant, name, by=by, to=RotationPhase.CANCELLED)

    async def _by_hand(self, tenant: TenantId, name: str, *, by: Actor, to: RotationPhase | None) -> Described:
        async with self._store.write(TenantScope(tenant)) as records:
            credential = await locked(records, name)
            rotation = await records.rotations.of(credential.id)
            if rotation is None or not rotation.is_running:
                raise RefusedError(NOT_RUNNING)
            phase = to or step_after(rotation.phase, rotation)
            if to is RotationPhase.CANCELLED and rotation.phase is RotationPhase.OVERLAP:
                raise RefusedError(TOO_LATE_TO_CANCEL)
            if to is RotationPhase.ROLLED_BACK and rotation.phase is RotationPhase.PROBING:
                phase = RotationPhase.CANCELLED
            reason = "an operator said so"
            await self._go(records, credential, rotation, phase, by=by, reason=reason)
            return await describe(records, await named(records, name))

    # --- what happens by itself --------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Looks at every rotation whose step should have ended."""
        async with self._store.read(PlatformScope(CrossTenantReason.UPKEEP)) as records:
            due = await records.rotations.due(await records.now(), limit=STEPS_AT_ONCE)
        for rotation in due:
            with suppress(RefusedError):  # the store is away, and has said so: the next tick looks again
                if rotation.phase is RotationPhase.PROBING:
                    await self._try(rotation)
                else:
                    await self.look_at(rotation)

    async def look_at(self, found: Rotation) -> None:
        """One rotation: on, back, or as it is."""
        async with self._store.write(TenantScope(found.tenant)) as records:
            credential, rotation = await _still(records, found)
            if credential is None or rotation is None or rotation.phase is RotationPhase.PROBING:
                return
            judgement = await self._judged(records, rotation)
            await self._carried_out(records, credential, rotation, judgement)

    async def heard(self, records: Records, events: Sequence[AuditEvent]) -> Sequence[Rotation]:
        """Counts what proxies reported of how upstreams answered versions that are being rotated. Returns the rotations
        to `reconsider` when the transaction is over.

        Rule: `events` were recorded by this transaction and by no other, so that each counts once, however often it is
        delivered.
        """
        reported = [event for event in events if event.action == "replies" and event.tenant and event.version]
        by_credential: dict[tuple[TenantId, CredentialId], list[AuditEvent]] = {}
        for event in reported:
            key = TenantId(event.tenant or ""), CredentialId(event.extra.get("credential_id", ""))
            by_credential.setdefault(key, []).append(event)
        counted = []
        for (tenant, credential_id), of_it in sorted(by_credential.items()):  # in one order: they are locked
            rotation = await self._count(records, tenant, credential_id, of_it)
            if rotation is not None:
                counted.append(rotation)
        return counted

    async def _count(
        self, records: Records, tenant: TenantId, credential_id: CredentialId, events: Sequence[AuditEvent]
    ) -> Rotation | None:
        credential = await records.credentials.locked(credential_id)
        if credential is None or credential.tenant != tenant:
            return None
        rotation = await records.rotations.of(credential_id)
        if rotation is None or not rotation.is_running:
            return None  # it is over, and nobody asks any more
        now, ours = await records.now(), {rotation.old_version, rotation.new_version}
        statuses = authentication_errors(credential)
        counts = [
            _counted(event, rotation, statuses, bucket=bucket_of(now)) for event in events if event.version in ours
        ]
        await records.rotations.count([count for count in counts if count.replies])
        return rotation

    async def reconsider(self, counted: Sequence[Rotation]) -> None:
        for rotation in counted:
            with suppress(RefusedError):  # the counts stand: the next report, or the step's end, looks again
                await self.look_at(rotation)

    async def _try(self, found: Rotation) -> None:
        """The new version's probe, by whoever claims it first; and what follows from it."""
        await self._prober.prepare()
        # (1) Claimed, with a placeholder that stands for the pending version.
        async with self._store.write(TenantScope(found.tenant)) as records:
            credential, rotation = await _still(records, found)
            if credential is None or rotation is None or rotation.probe_due_at != found.probe_due_at:
                return
            ready = await self._prober.ready(records, credential)
            if ready is None:
                outcome = ProbeOutcome(ProbeResult.UNKNOWN, None, "the credential has no probe any more")
                await self._took(records, credential, rotation, outcome)
                return
            due_at = await records.now() + LEASE_SECONDS
            claimed = replace(rotation, probe_sha256=ready.placeholder_sha256, probe_due_at=due_at)
            await records.rotations.put(claimed)
        reach("rotation.probe_claimed")
        # (2) Made, outside any transaction.
        outcome = await self._prober.ask(ready)
        reach("rotation.probe_answered")
        # (3) Taken, where it is still what was asked for.
        async with self._store.write(TenantScope(found.tenant)) as records:
            credential, rotation = await _still(records, claimed)
            if credential is not None and rotation is not None and rotation.probe_sha256 == claimed.probe_sha256:
                await self._took(records, credential, rotation, outcome)

    async def _took(self, records: Records, credential: Credential, rotation: Rotation, outcome: ProbeOutcome) -> None:
        tried = replace(rotation, probe_result=outcome.result, probe_status=outcome.status, probe_detail=outcome.detail)
        await self._carried_out(records, credential, tried, judge_probe(tried, outcome.result))

    # --- steps -------------------------------------------------------------------------------------------------------

    def _planned(self, credential: Credential, lineage: Lineage, new: NewRotation, *, by: Actor) -> Rotation:
        now = self._clock()
        return Rotation(
            credential_id=credential.id,
            tenant=credential.tenant,
            id=new_id("rot", self._entropy(ID_ENTROPY_BYTES)),
            phase=RotationPhase.PROBING,
            old_version=lineage.active,
            new_version=lineage.next_number - 1,
            probes=new.probes,
            proceeds_unproven=new.proceeds_unproven,
            canary_percent=new.canary_percent,
            canary_seconds=new.canary_seconds,
            canary_key=self._entropy(32).hex(),
            overlap_seconds=new.overlap_seconds,
            started_at=now,
            since=now,
            ends_at=None,
            started_by=by.name,
        )

    async def _with_probe(self, records: Records, old: Credential, probe: Probe) -> Credential:
        credential = replace(old, settings={**old.settings, PROBE_SETTING: probe.to_setting()})
        if credential.settings != old.settings:
            await self._versions.sealed_again(records, old, credential)
        return credential

    async def _compromised(self, records: Records, credential: Credential, secret: Secret | None) -> Credential:
        """Whatever was in use is so no longer. A successor that waits takes over where no other is given."""
        credential = replace(credential, updated_at=self._clock())
        if secret is not None:
            return await self._versions.replace_all(
                records, credential, secret, over=VersionState.REVOKED, reason=COMPROMISED
            )
        running, lineage = await records.rotations.of(credential.id), await self._versions.lineage(records, credential)
        await self._versions.overtake(records, credential, reason=COMPROMISED)
        waits = running is not None and lineage.states.get(running.new_version) is VersionState.PENDING
        after = lineage.taken_over_by(running.new_version) if running and waits else lineage.without_any()
        return await self._versions.write(records, credential, after)

    async def _judged(self, records: Records, rotation: Rotation) -> Judgement:
        replies = await self._replies(records, rotation.credential_id)
        old = replies.get(rotation.old_version, Replies()) if rotation.old_version is not None else Replies()
        new = replies.get(rotation.new_version, Replies())
        return judge(old=old, new=new, ends_at=rotation.ends_at, now=await records.now())

    async def _carried_out(
        self, records: Records, credential: Credential, rotation: Rotation, judgement: Judgement
    ) -> None:
        by = Actor(BY_ITSELF, rotation.id, is_a_client=False)
        match judgement.verdict:
            case Verdict.GO_ON:
                await self._go(records, credential, rotation, step_after(rotation.phase, rotation), by=by)
            case Verdict.ROLL_BACK:
                phase = _BACK[rotation.phase]
                await self._go(records, credential, rotation, phase, by=by, reason=judgement.reason)
                _log.warning("rotation_rolled_back", credential=credential.name, tenant=credential.tenant)
            case Verdict.WAIT:
                pass

    async def _go(
        self,
        records: Records,
        credential: Credential,
        rotation: Rotation,
        phase: RotationPhase,
        *,
        by: Actor,
        reason: str = "",
    ) -> None:
        """From one step to another, with everything that belongs to it."""
        lineage = await self._versions.lineage(records, credential)
        try:
            credential, rotation = await self._entered(
                records, credential, replace(rotation, reason=reason), phase, lineage=lineage
            )
        except IllegalTransitionError:
            # A version that was revoked never comes back.
            raise RefusedError(NOT_RUNNING) from None
        await self._published(records, credential, by=by, action=_ACTION[phase], rotation=rotation)
        reach("rotation.step_taken")

    async def _entered(
        self,
        records: Records,
        credential: Credential,
        rotation: Rotation,
        phase: RotationPhase,
        *,
        lineage: Lineage,
        secret: Secret | None = None,
    ) -> tuple[Credential, Rotation]:
        now, seconds = await records.now(), seconds_of(phase, rotation)
        rotation = replace(
            rotation,
            phase=phase,
            since=now,
            ends_at=now + seconds if seconds is not None else None,
            probe_sha256=None,
            probe_due_at=now if phase is RotationPhase.PROBING else None,
        )
        after = lineage.entered(phase, old=rotation.old_version, new=rotation.new_version)
        credential = await self._versions.write(records, credential, after, secret=secret)
        await records.rotations.put(rotation)
        if not rotation.is_running:
            await records.rotations.forget_replies(credential.id)
        return credential, rotation

    async def _replies(self, records: Records, credential_id: CredentialId) -> dict[int, Replies]:
        window = first_bucket_of_window(await records.now())
        found = await records.rotations.replies(credential_id, from_bucket=window)
        return {version: Replies(*counts) for version, counts in found.items()}

    async def _published(
        self,
        records: Records,
        credential: Credential,
        *,
        by: Actor,
        action: str,
        rotation: Rotation | None = None,
        revoked: bool = False,
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
            version=rotation.new_version if rotation is not None else credential.current_version,
            detail=_in_words(rotation),
        )
        await self._trail.record(records, [event])


def authentication_errors(credential: Credential) -> frozenset[int]:
    """The statuses by which this credential's provider says "wrong secret"."""
    preset = PRESETS.get(credential.preset) if credential.preset else None
    return preset.authentication_errors if preset else frozenset({AUTHENTICATION_ERROR})


def _counted(event: AuditEvent, rotation: Rotation, statuses: frozenset[int], *, bucket: int) -> ReplyCount:
    by_status = {int(name): int(count) for name, count in event.extra.items() if _are_numbers(name, count)}
    return ReplyCount(
        credential_id=rotation.credential_id,
        tenant=rotation.tenant,
        version=event.version or 0,
        subject_sha256=hashlib.sha256((event.subject or "").encode("utf-8", "surrogatepass")).hexdigest(),
        bucket=bucket,
        replies=sum(by_status.values()),
        failures=sum(count for status, count in by_status.items() if status in statuses),
    )


def _are_numbers(name: str, count: str) -> bool:
    return all(text.isascii() and text.isdigit() and len(text) <= 9 for text in (name, count))


def _check_plan(new: NewRotation) -> None:
    if new.secret is None and not new.compromised:
        raise invalid_field("secret", "a rotation has a new secret; only a compromised one may go without a successor")
    if bool(new.canary_percent) != bool(new.canary_seconds):
        missing = "canary_seconds" if new.canary_percent else "canary_percent"
        raise invalid_field(missing, "a canary has a share and a time: canary_percent and canary_seconds go together")
    for field, value in (
        ("canary_percent", new.canary_percent),
        ("overlap_seconds", new.overlap_seconds),
        ("probe", new.probes),
    ):
        if new.compromised and value:
            raise invalid_field(field, "a compromised secret is replaced at once: no probe, no canary, no overlap")


async def _still(records: Records, found: Rotation) -> tuple[Credential | None, Rotation | None]:
    """What was found, locked, where it is still at the same step: replicas may all have found it."""
    credential = await records.credentials.locked(found.credential_id)
    rotation = await records.rotations.of(found.credential_id)
    if rotation is None or (rotation.id, rotation.phase, rotation.since) != (found.id, found.phase, found.since):
        return None, None
    return credential, rotation


def _in_words(rotation: Rotation | None) -> str:
    if rotation is None:
        return ""
    said = [f"version {rotation.old_version or 'none'} to {rotation.new_version}: {rotation.phase.value}"]
    if rotation.probe_result is not None:
        said.append(f"probe {rotation.probe_result.value} ({rotation.probe_detail})")
    return "; ".join([*said, rotation.reason] if rotation.reason else said)


def _overtaken(current: int) -> Refusal:
    return Refusal(
        RefusalCode.ROTATION_IN_PROGRESS,
        f"the credential was rotated meanwhile: it is at version {current}",
        "look at it again, and rotate it if that is still what you want",
    )


COMPROMISED: Final = "a compromised secret was replaced"
READ_FROM_A_SOURCE: Final = Refusal(
    RefusalCode.INVALID_FIELD,
    "secret: this credential's secret is read from a source, and a change there is followed by itself",
    "change it at the source; or submit one with PATCH, and it is read from nowhere any more",
)
IN_PROGRESS: Final = Refusal(
    RefusalCode.ROTATION_IN_PROGRESS,
    "this credential is being rotated already",
    "see it with: coatcheck credential rotation NAME; promote it, roll it back or cancel it first",
)
NOT_RUNNING: Final = Refusal(
    RefusalCode.ROTATION_NOT_RUNNING,
    "no rotation of this credential is under way that this could be done to",
    "see the last one with: coatcheck credential rotation NAME",
)
TOO_LATE_TO_CANCEL: Final = Refusal(
    RefusalCode.ROTATION_NOT_RUNNING,
    "the new version is in use by everybody: there is nothing left to cancel",
    "go back to the old one with: coatcheck credential rotation NAME --roll-back",
)
