"""`/v1/…/alarms`, `/v1/…/alarm-hooks`, `/v1/…/decoys`: what was seen in the wrong hands, and who is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from control_plane.access import Access
from control_plane.alarms import Alarms, HookKeeper, NewHook, ToldAlarm
from control_plane.api.admin import Items
from control_plane.api.guard import AdminRoutes, actor
from control_plane.api.messages import (
    AlarmHookIn,
    AlarmHookOut,
    AlarmSettings,
    DecoyIn,
    DecoyOut,
    NewAlarmHookOut,
    NewDecoyOut,
)
from control_plane.contract.caller import TenantId
from control_plane.core.alarms import AlarmHook, described
from control_plane.core.names import OBJECT_ID, TENANT_ID
from control_plane.core.policy import Action
from control_plane.decoys import DecoyKeeper
from control_plane.ports import CrossTenantReason, PlatformScope, TenantScope

TenantPath = Annotated[str, Path(pattern=TENANT_ID)]
IdPath = Annotated[str, Path(pattern=OBJECT_ID)]
LimitQuery = Annotated[int, Query(ge=1, le=1000)]


@dataclass(frozen=True, slots=True)
class AlarmsApi:
    access: Access
    alarms: Alarms
    hooks: HookKeeper
    decoys: DecoyKeeper

    def router(self) -> APIRouter:
        routes = AdminRoutes(self.access)
        add = routes.add
        add("GET", "/tenants/{tenant}/alarms", self.list_alarms, Action.ALARM_READ)
        add("POST", "/tenants/{tenant}/alarms/test", self.test, Action.ALARM_WRITE, status_code=201)
        add("GET", "/tenants/{tenant}/alarm-settings", self.settings, Action.ALARM_READ)
        add("PUT", "/tenants/{tenant}/alarm-settings", self.change_settings, Action.ALARM_WRITE)
        add("GET", "/tenants/{tenant}/alarm-hooks", self.list_hooks, Action.ALARM_READ)
        add("POST", "/tenants/{tenant}/alarm-hooks", self.add_hook, Action.ALARM_WRITE, status_code=201)
        add("DELETE", "/tenants/{tenant}/alarm-hooks/{hook}", self.remove_hook, Action.ALARM_WRITE, status_code=204)
        add("GET", "/alarms", self.list_every_alarm, Action.ALARM_READ_ALL)
        add("GET", "/alarm-hooks", self.list_platform_hooks, Action.ALARM_READ_ALL)
        add("POST", "/alarm-hooks", self.add_platform_hook, Action.ALARM_WRITE_ALL, status_code=201)
        add("DELETE", "/alarm-hooks/{hook}", self.remove_platform_hook, Action.ALARM_WRITE_ALL, status_code=204)
        add("GET", "/tenants/{tenant}/decoys", self.list_decoys, Action.DECOY_READ)
        add("POST", "/tenants/{tenant}/decoys", self.add_decoy, Action.DECOY_WRITE, status_code=201)
        add("DELETE", "/tenants/{tenant}/decoys/{decoy}", self.remove_decoy, Action.DECOY_WRITE, status_code=204)
        return routes.router

    # --- alarms

    async def list_alarms(self, tenant: TenantPath, limit: LimitQuery = 100) -> Items[dict[str, Any]]:
        """The newest first. Of a caller of another tenant nothing is shown but that it was one."""
        told = await self.alarms.list(TenantScope(TenantId(tenant)), limit=limit)
        return Items(items=[_shown(one, to_platform=False) for one in told])

    async def list_every_alarm(self, limit: LimitQuery = 100) -> Items[dict[str, Any]]:
        told = await self.alarms.list(PlatformScope(CrossTenantReason.ADMINISTER), limit=limit)
        return Items(items=[_shown(one, to_platform=True) for one in told])

    async def test(self, request: Request, tenant: TenantPath) -> dict[str, Any]:
        """Raises an alarm that is none: to see that it arrives."""
        return described(await self.alarms.test(TenantId(tenant), by=actor(request)), to_platform=False)

    async def settings(self, tenant: TenantPath) -> AlarmSettings:
        return AlarmSettings(revoke_on_mismatch=await self.alarms.revokes(TenantId(tenant)))

    async def change_settings(self, request: Request, tenant: TenantPath, body: AlarmSettings) -> AlarmSettings:
        await self.alarms.set_revokes(TenantId(tenant), body.revoke_on_mismatch, by=actor(request))
        return body

    # --- hooks

    async def list_hooks(self, tenant: TenantPath) -> Items[AlarmHookOut]:
        return _listed(await self.hooks.list(TenantId(tenant)))

    async def list_platform_hooks(self) -> Items[AlarmHookOut]:
        return _listed(await self.hooks.list(None))

    async def add_hook(self, request: Request, tenant: TenantPath, body: AlarmHookIn) -> NewAlarmHookOut:
        """The secret that signs is in this answer and nowhere else."""
        return _made(await self.hooks.add(TenantId(tenant), body.url, by=actor(request)))

    async def add_platform_hook(self, request: Request, body: AlarmHookIn) -> NewAlarmHookOut:
        """It is told the alarms of every tenant."""
        return _made(await self.hooks.add(None, body.url, by=actor(request)))

    async def remove_hook(self, request: Request, tenant: TenantPath, hook: IdPath) -> Response:
        await self.hooks.remove(TenantId(tenant), hook, by=actor(request))
        return Response(status_code=204)

    async def remove_platform_hook(self, request: Request, hook: IdPath) -> Response:
        await self.hooks.remove(None, hook, by=actor(request))
        return Response(status_code=204)

    # --- decoys

    async def list_decoys(self, tenant: TenantPath) -> Items[DecoyOut]:
        return Items(items=[DecoyOut.of(decoy) for decoy in await self.decoys.list(TenantId(tenant))])

    async def add_decoy(self, request: Request, tenant: TenantPath, body: DecoyIn) -> NewDecoyOut:
        """The decoy is in this answer and nowhere else."""
        new = await self.decoys.add(TenantId(tenant), preset=body.preset, note=body.note, by=actor(request))
        return NewDecoyOut.with_placeholder(new.decoy, new.placeholder)

    async def remove_decoy(self, request: Request, tenant: TenantPath, decoy: IdPath) -> Response:
        await self.decoys.remove(TenantId(tenant), decoy, by=actor(request))
        return Response(status_code=204)


def _shown(told: ToldAlarm, *, to_platform: bool) -> dict[str, Any]:
    deliveries = [
        {
            "hook": one.hook_id,
            "attempts": one.attempts,
            "delivered": one.done_at is not None and one.error is None,
            "given_up": one.done_at is not None and one.error is not None,
            "error": one.error,
        }
        for one in told.deliveries
    ]
    return {**described(told.alarm, to_platform=to_platform), "deliveries": deliveries}


def _listed(hooks: Sequence[AlarmHook]) -> Items[AlarmHookOut]:
    return Items(items=[AlarmHookOut.of(hook) for hook in hooks])


def _made(new: NewHook) -> NewAlarmHookOut:
    return NewAlarmHookOut.with_secret(new.hook, new.secret)
