"""Raising alarms, and telling them: in the trail, in the log, to hooks.

    a proxy asks about, or reports, a placeholder in the wrong hands     → `sighted`, `heard`
    a proxy reports a reply that held the secret                         → `heard`
    the same placeholder and caller within a quarter of an hour          → counted, nobody is told again
    otherwise                                                            → raised: trail, log, a delivery for each hook

Rule: whoever used the placeholder notices nothing. What is seen while somebody waits for an answer is only noted, and
raised afterwards. Revoking because of an alarm is off unless the tenant wants it, and then only where the caller is of
the same tenant: otherwise anybody could revoke what they found.
"""

import asyncio
import json
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog

from control_plane.contract.caller import Caller, ClientId, PlaceholderId, SessionId, SubjectId, TenantId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import LEAK_BLOCKED, AuditEvent
from control_plane.core.alarms import (
    SIGNATURE_HEADER,
    Alarm,
    AlarmHook,
    AlarmKind,
    Delivery,
    Sighting,
    described,
    raised,
    retry_at,
    sentence,
    signature,
)
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.core.records import TokenKind
from control_plane.credentials import require_tenant
from control_plane.hook_keys import HookKeys
from control_plane.ports import (
    Clock,
    CrossTenantReason,
    Entropy,
    Outbound,
    OutboundError,
    OutboundRequest,
    PlatformScope,
    Records,
    Scope,
    Store,
    TenantScope,
    on_behalf_of,
)
from control_plane.revocation import revoke_tokens
from control_plane.trail import Actor, Trail

ROUND_SECONDS: Final = 0.5
MAX_NOTED: Final = 10_000
"""What is seen beyond this, within one round, is the same flood."""
MAX_HOOKS: Final = 16
DELIVERIES_AT_ONCE: Final = 20
CLAIM_SECONDS: Final = 60.0
"""For so long nobody else tries the same delivery: longer than one attempt may take."""
ALARMS_KEPT_SECONDS: Final = 90 * 86_400.0
_SCOPE: Final = PlatformScope(CrossTenantReason.AUDIT)
_ALARM: Final = Actor("alarm", "", is_a_client=False)

_log = structlog.get_logger("control_plane.alarms")


@dataclass(frozen=True, slots=True)
class NewHook:
    hook: AlarmHook
    secret: str
    """Shown once."""


@dataclass(frozen=True, slots=True)
class ToldAlarm:
    alarm: Alarm
    deliveries: Sequence[Delivery]


class Alarms:
    def __init__(self, store: Store, trail: Trail, *, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._trail = trail
        self._clock = clock
        self._entropy = entropy
        self._noted: dict[tuple[str, str, int], tuple[Sighting, int]] = {}
        """The first of each placeholder, caller and window, and how often it was seen: a flood costs one entry."""
        self.raised: dict[str, int] = dict.fromkeys((kind.value for kind in AlarmKind), 0)

    def sighted(self, sighting: Sighting, *, times: int = 1) -> None:
        """Notes it; costs nothing that whoever waits could measure. `times` 0: it may have been counted already."""
        key = (sighting.placeholder_id, sighting.caller_key, sighting.window)
        first, count = self._noted.get(key, (sighting, 0))
        if key in self._noted or len(self._noted) < MAX_NOTED:
            self._noted[key] = (first, count + times)

    async def heard(self, events: Sequence[AuditEvent], new: Set[str]) -> None:
        """What proxies decided by what they remembered, without asking. An event that is not among the `new` ones was
        delivered before; whether its alarm was raised then is not known, so it is looked at, and not counted."""
        for event in events:
            kind = _kind_of(event)
            if kind is None or event.placeholder_id is None:
                continue
            if event.tenant is None or event.client is None or event.subject is None:
                continue
            async with self._store.read(_SCOPE) as records:
                token = await records.tokens.get(PlaceholderId(event.placeholder_id))
            if token is None or token.kind is not TokenKind.PLACEHOLDER:
                continue
            caller = Caller(
                client=ClientId(event.client),
                tenant=TenantId(event.tenant),
                subject=SubjectId(event.subject),
                session=SessionId(event.session) if event.session is not None else None,
            )
            sighting = Sighting(
                kind=kind,
                tenant=token.tenant,
                placeholder_id=token.id,
                credential=event.credential,
                caller=caller,
                host=event.host,
                at=self._clock(),
                request_id=event.request_id,
            )
            if (caller == token.caller) is (kind is AlarmKind.SECRET_RETURNED):
                self.sighted(sighting, times=1 if event.event_id in new else 0)

    async def once(self) -> None:
        """Raises what was noted."""
        noted, self._noted = self._noted, {}
        while noted:
            key, (sighting, count) = next(iter(noted.items()))
            try:
                await self._raise(sighting, count)
            except RefusedError:  # the store is away, or the trail takes nothing: in the next round
                self._noted = noted | self._noted
                raise
            del noted[key]

    async def _raise(self, sighting: Sighting, count: int = 1) -> Alarm | None:
        alarm = raised(sighting, alarm_id=new_id("al", self._entropy(ID_ENTROPY_BYTES)), count=max(1, count))
        async with self._store.write(_SCOPE) as records:
            if await records.tenants.get(alarm.tenant) is None:
                return None
            if not await records.alarms.add(alarm):
                await records.alarms.again(sighting, count)
                return None
            if alarm.kind is AlarmKind.DECOY_USED:
                await records.decoys.used(alarm.placeholder_id, alarm.first_at)
            await self._recorded(records, alarm, sighting)
            await self._revoked(records, alarm)
            for hook in await records.alarms.hooks_for(alarm.tenant):
                await records.alarms.send(alarm, hook, at=await records.now())
        self.raised[alarm.kind.value] += 1
        _log.warning("alarm", **described(alarm, to_platform=True))
        return alarm

    async def _recorded(self, records: Records, alarm: Alarm, sighting: Sighting) -> None:
        shown = described(alarm, to_platform=False)
        caller = shown["caller"] or {}
        event = self._trail.event(
            f"alarm.{alarm.kind.value}",
            by=Actor("alarm", sighting.request_id if not alarm.is_foreign else "", is_a_client=False),
            tenant=alarm.tenant,
            subject=caller.get("subject"),
            session=caller.get("session"),
            credential=alarm.credential,
            placeholder_id=alarm.placeholder_id,
            detail=sentence(alarm),
        )
        await records.audit.append([event])

    async def _revoked(self, records: Records, alarm: Alarm) -> None:
        is_theft = alarm.kind is AlarmKind.STOLEN_PLACEHOLDER
        if not is_theft or alarm.is_foreign or not await records.alarms.revokes(alarm.tenant):
            return
        token = await records.tokens.get(alarm.placeholder_id)
        if token is None or token.tenant != alarm.tenant or token.revoked_at is not None:
            return
        await revoke_tokens(records, [token], at=self._clock())
        await records.alarms.mark_revoked(alarm)
        event = self._trail.event(
            "placeholder.revoke",
            by=_ALARM,
            tenant=token.tenant,
            subject=token.subject,
            session=token.session,
            placeholder_id=token.id,
            detail="because of an alarm",
        )
        await self._trail.record(records, [event])

    async def forget(self) -> None:
        async with self._store.write(PlatformScope(CrossTenantReason.UPKEEP)) as records:
            await records.alarms.purge(before=await records.now() - ALARMS_KEPT_SECONDS, limit=1_000)

    # --- for administrators

    async def list(self, scope: Scope, *, limit: int) -> Sequence[ToldAlarm]:
        """The newest first."""
        async with self._store.read(scope) as records:
            if isinstance(scope, TenantScope):
                await require_tenant(records, scope.tenant)
            alarms = await records.alarms.list(limit=limit)
            deliveries = await records.alarms.deliveries([alarm.id for alarm in alarms])
        return [ToldAlarm(alarm, [one for one in deliveries if one.alarm_id == alarm.id]) for alarm in alarms]

    async def test(self, tenant: TenantId, *, by: Actor) -> Alarm:
        """An alarm that is none, told like any other. Raises `RefusedError(not_found)`."""
        async with self._store.read(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
        nobody = Caller(client=ClientId(""), tenant=tenant, subject=SubjectId(by.name), session=None)
        test_id = PlaceholderId(new_id("test", self._entropy(ID_ENTROPY_BYTES)))
        sighting = Sighting(AlarmKind.TEST, tenant, test_id, None, nobody, None, self._clock(), by.request_id)
        alarm = await self._raise(sighting)
        assert alarm is not None, "its id is new"
        return alarm

    async def revokes(self, tenant: TenantId) -> bool:
        async with self._store.read(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            return await records.alarms.revokes(tenant)

    async def set_revokes(self, tenant: TenantId, value: bool, *, by: Actor) -> None:
        async with self._store.write(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            await records.alarms.set_revokes(tenant, value)
            detail = (
                "a placeholder in the wrong hands is revoked" if value else "nothing is revoked because of an alarm"
            )
            event = self._trail.event("alarm.settings", by=by, tenant=tenant, detail=detail)
            await self._trail.record(records, [event])


class HookKeeper:
    """Where alarms are told."""

    def __init__(self, store: Store, keys: HookKeys, trail: Trail, *, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._keys = keys
        self._trail = trail
        self._clock = clock
        self._entropy = entropy

    async def add(self, tenant: TenantId | None, url: str, *, by: Actor) -> NewHook:
        """`url` in its one spelling. Raises `RefusedError` (`not_found`, `invalid_field`)."""
        hook = AlarmHook(
            id=new_id("hook", self._entropy(ID_ENTROPY_BYTES)),
            tenant=tenant,
            url=url,
            key_id=await self._keys.newest(),
            created_at=self._clock(),
        )
        secret = await self._keys.secret(hook.key_id, hook.id)
        async with self._store.write(_scope_of(tenant)) as records:
            if tenant is not None:
                await require_tenant(records, tenant)
            if len(await records.alarms.hooks(tenant)) >= MAX_HOOKS:
                raise RefusedError(TOO_MANY_HOOKS)
            await records.alarms.add_hook(hook)
            await self._trail.record(records, [self._event("alarm_hook.add", hook, by)])
        return NewHook(hook, secret)

    async def list(self, tenant: TenantId | None) -> Sequence[AlarmHook]:
        async with self._store.read(_scope_of(tenant)) as records:
            if tenant is not None:
                await require_tenant(records, tenant)
            return await records.alarms.hooks(tenant)

    async def remove(self, tenant: TenantId | None, hook_id: str, *, by: Actor) -> None:
        """Raises `RefusedError(not_found)`."""
        async with self._store.write(_scope_of(tenant)) as records:
            hook = await records.alarms.hook(hook_id)
            if hook is None or hook.tenant != tenant:
                raise RefusedError(HOOK_NOT_FOUND)
            await records.alarms.remove_hook(hook_id)
            await self._trail.record(records, [self._event("alarm_hook.remove", hook, by)])

    def _event(self, action: str, hook: AlarmHook, by: Actor) -> AuditEvent:
        # A URL may hold a token in its path: its host says enough.
        return self._trail.event(action, by=by, tenant=hook.tenant, detail=hook.url.split("/", 3)[2])


class HookDelivery:
    """Tells alarms to hooks. Several replicas may do it at once: each delivery is claimed."""

    def __init__(self, store: Store, keys: HookKeys, outbound: Outbound, *, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._outbound = outbound
        self._clock = clock
        self.delivered = 0
        self.given_up = 0

    async def once(self) -> None:
        """Tries what is due, once each, side by side: a hook that takes its time holds up no other."""
        async with self._store.read(_SCOPE) as records:
            due = await records.alarms.due(now=await records.now(), limit=DELIVERIES_AT_ONCE)
        async with asyncio.TaskGroup() as tries:
            for delivery in due:
                tries.create_task(self._tried(delivery), name="alarm delivery")

    async def _tried(self, delivery: Delivery) -> None:
        with suppress(RefusedError):  # the store is away, and has said so: it is tried again when its claim ends
            await self._try(delivery)

    async def _try(self, delivery: Delivery) -> None:
        async with self._store.write(_SCOPE) as records:
            if not await records.alarms.claim(delivery, until=await records.now() + CLAIM_SECONDS):
                return  # another replica has it
            alarm = await records.alarms.get(delivery.alarm_id)
            hook = await records.alarms.hook(delivery.hook_id)
        if alarm is None or hook is None:
            return
        error = await self._send(alarm, hook)
        async with self._store.write(_SCOPE) as records:
            now = await records.now()
            again = None if error is None else retry_at(delivery.attempts + 1, now=now)
            await records.alarms.settle(
                delivery, due_at=again or now, done_at=now if again is None else None, error=error
            )
        if error is None:
            self.delivered += 1
        elif again is None:
            self.given_up += 1
            _log.error("alarm_not_delivered", alarm=alarm.id, hook=hook.id, tenant=alarm.tenant, error=error)

    async def _send(self, alarm: Alarm, hook: AlarmHook) -> str | None:
        """None: it was taken."""
        body = json.dumps(described(alarm, to_platform=hook.tenant is None), ensure_ascii=True).encode("ascii")
        try:
            secret = await self._keys.secret(hook.key_id, hook.id)
            signed = signature(secret, body, at=int(self._clock()))
            asked = OutboundRequest(
                "POST",
                hook.url,
                headers={"Content-Type": "application/json", SIGNATURE_HEADER: signed},
                body=body,
            )
            with on_behalf_of(hook.tenant):
                reply = await self._outbound.send(asked)
        except OutboundError as failed:
            return failed.failure.value
        except RefusedError as refused:
            return refused.refusal.code.value
        return None if 200 <= reply.status < 300 else f"status {reply.status}"


def _kind_of(event: AuditEvent) -> AlarmKind | None:
    if event.true_code is RefusalCode.CALLER_MISMATCH:
        return AlarmKind.STOLEN_PLACEHOLDER
    return AlarmKind.SECRET_RETURNED if event.action == LEAK_BLOCKED else None


def _scope_of(tenant: TenantId | None) -> Scope:
    return TenantScope(tenant) if tenant is not None else PlatformScope(CrossTenantReason.ADMINISTER)


HOOK_NOT_FOUND: Final = Refusal(
    RefusalCode.NOT_FOUND, "there is no such hook", "list them with: coatcheck alarm list-hooks"
)
TOO_MANY_HOOKS: Final = Refusal(
    RefusalCode.INVALID_FIELD, f"url: there are {MAX_HOOKS} hooks already", "remove one that is not needed"
)
