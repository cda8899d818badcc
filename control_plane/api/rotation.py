"""The administrators' API of rotations: started, looked at, helped along, taken back.

Rule: as in `api.admin`: each handler turns one message into one call and back.
"""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Path, Request, Response

from control_plane.api.guard import AdminRoutes, actor
from control_plane.api.messages import CredentialOut, RotationIn, RotationStateOut, ScheduleIn, ScheduleOut
from control_plane.contract.caller import TenantId
from control_plane.core.names import CREDENTIAL_NAME, TENANT_ID
from control_plane.core.policy import Action
from control_plane.core.probe import Probe
from control_plane.rotation import NewRotation, RotationKeeper
from control_plane.scheduling import NewSchedule, ScheduleKeeper

TenantPath = Annotated[str, Path(pattern=TENANT_ID)]
NamePath = Annotated[str, Path(pattern=CREDENTIAL_NAME)]

_CREDENTIAL = "/tenants/{tenant}/credentials/{name}"


@dataclass(frozen=True, slots=True)
class RotationApi:
    rotations: RotationKeeper
    schedules: ScheduleKeeper

    def add_to(self, routes: AdminRoutes) -> None:
        routes.add("POST", f"{_CREDENTIAL}/rotate", self.rotate_credential, Action.ROTATION_WRITE)
        routes.add("GET", f"{_CREDENTIAL}/rotation", self.get_rotation, Action.ROTATION_READ)
        routes.add("POST", f"{_CREDENTIAL}/rotation/promote", self.promote_rotation, Action.ROTATION_WRITE)
        routes.add("POST", f"{_CREDENTIAL}/rotation/rollback", self.roll_rotation_back, Action.ROTATION_WRITE)
        routes.add("POST", f"{_CREDENTIAL}/rotation/cancel", self.cancel_rotation, Action.ROTATION_WRITE)
        routes.add("GET", f"{_CREDENTIAL}/rotation/schedule", self.get_schedule, Action.ROTATION_READ)
        routes.add("PUT", f"{_CREDENTIAL}/rotation/schedule", self.put_schedule, Action.ROTATION_WRITE)
        routes.add(
            "DELETE",
            f"{_CREDENTIAL}/rotation/schedule",
            self.delete_schedule,
            Action.ROTATION_WRITE,
            status_code=204,
        )

    async def rotate_credential(
        self, request: Request, tenant: TenantPath, name: NamePath, body: RotationIn
    ) -> CredentialOut:
        """A new version of the secret. Placeholders stay as they are. Without options it is in use at once."""
        new = NewRotation(
            secret=body.secret,
            compromised=body.compromised,
            if_version=body.if_version,
            canary_percent=body.canary_percent,
            canary_seconds=body.canary_seconds,
            overlap_seconds=body.overlap_seconds,
            probes=bool(body.probe),
            probe=body.probe if isinstance(body.probe, Probe) else None,
            proceeds_unproven=body.proceed_if_unknown,
        )
        return CredentialOut.of(await self.rotations.start(TenantId(tenant), name, new, by=actor(request)))

    async def get_rotation(self, tenant: TenantPath, name: NamePath) -> RotationStateOut:
        """The latest rotation, under way or over, and how upstreams answered each version lately."""
        return RotationStateOut.of(*await self.rotations.get(TenantId(tenant), name))

    async def promote_rotation(self, request: Request, tenant: TenantPath, name: NamePath) -> CredentialOut:
        """The next step, now: a canary goes live for everybody, an overlap ends."""
        return CredentialOut.of(await self.rotations.promote(TenantId(tenant), name, by=actor(request)))

    async def roll_rotation_back(self, request: Request, tenant: TenantPath, name: NamePath) -> CredentialOut:
        """The old version is the one in use again; the new one is over."""
        return CredentialOut.of(await self.rotations.roll_back(TenantId(tenant), name, by=actor(request)))

    async def cancel_rotation(self, request: Request, tenant: TenantPath, name: NamePath) -> CredentialOut:
        """Throws a new version away that is not yet in use by everybody."""
        return CredentialOut.of(await self.rotations.cancel(TenantId(tenant), name, by=actor(request)))

    # --- schedules

    async def get_schedule(self, tenant: TenantPath, name: NamePath) -> ScheduleOut:
        return ScheduleOut.of(await self.schedules.get(TenantId(tenant), name))

    async def put_schedule(self, request: Request, tenant: TenantPath, name: NamePath, body: ScheduleIn) -> ScheduleOut:
        """How old the secret may become. What had been suspended after a failed rotation goes on."""
        new = NewSchedule(
            every_seconds=body.every_seconds,
            remind_seconds=body.remind_seconds,
            hook=body.hook.to_settings() if body.hook is not None else None,
            probes=body.probe,
            proceeds_unproven=body.proceed_if_unknown,
            canary_percent=body.canary_percent,
            canary_seconds=body.canary_seconds,
            overlap_seconds=body.overlap_seconds,
        )
        return ScheduleOut.of(await self.schedules.put(TenantId(tenant), name, new, by=actor(request)))

    async def delete_schedule(self, request: Request, tenant: TenantPath, name: NamePath) -> Response:
        await self.schedules.remove(TenantId(tenant), name, by=actor(request))
        return Response(status_code=204)
