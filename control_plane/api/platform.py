"""`/v1/keys` and `/v1/injectors`: the platform's own keys, and the proxies that registered. For its administrators."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict

from control_plane.access import Access
from control_plane.api.admin import ClientPath
from control_plane.api.guard import AdminRoutes, actor
from control_plane.api.lists import Items
from control_plane.contract.caller import ClientId
from control_plane.core.policy import Action
from control_plane.core.records import Injector, KeyPurpose
from control_plane.injectors import Injectors
from control_plane.keys import DescribedKey, KeyKeeper

PurposePath = Annotated[Literal["signing", "tag", "audit"], Path()]


class KeyRotationIn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    compromised: bool = False
    """The old keys go at once, and with them everything that they made."""


class KeyOut(BaseModel):
    """A key without the key."""

    id: str
    purpose: str
    state: str
    created_at: float
    in_use_from: float

    @classmethod
    def of(cls, described: DescribedKey) -> "KeyOut":
        key = described.key
        return cls(
            id=key.id,
            purpose=key.purpose.value,
            state=described.state.value,
            created_at=key.created_at,
            in_use_from=key.in_use_from,
        )


class InjectorOut(BaseModel):
    id: str
    registered_at: float
    seen_at: float
    silent: bool


@dataclass(frozen=True, slots=True)
class PlatformApi:
    access: Access
    keys: KeyKeeper
    injectors: Injectors

    def router(self) -> APIRouter:
        routes = AdminRoutes(self.access)
        routes.add("GET", "/keys", self.list_keys, Action.KEY_READ)
        routes.add("POST", "/keys/{purpose}/rotate", self.rotate_key, Action.KEY_WRITE, status_code=201)
        routes.add("GET", "/injectors", self.list_injectors, Action.INJECTOR_READ)
        routes.add("DELETE", "/injectors/{client}", self.remove_injector, Action.INJECTOR_WRITE, status_code=204)
        return routes.router

    async def list_keys(self) -> Items[KeyOut]:
        return Items(items=[KeyOut.of(described) for described in await self.keys.list()])

    async def rotate_key(self, request: Request, purpose: PurposePath, body: KeyRotationIn) -> KeyOut:
        """A new key, published at once and used later. Nothing that is good stops working, unless it is compromised."""
        rotated = await self.keys.rotate(KeyPurpose(purpose), compromised=body.compromised, by=actor(request))
        return KeyOut.of(rotated)

    async def list_injectors(self) -> Items[InjectorOut]:
        """Proxies that registered, whether or not they are still heard of."""
        return Items(items=[self._shown(injector) for injector in await self.injectors.list()])

    async def remove_injector(self, request: Request, client: ClientPath) -> Response:
        """One that still runs registers again with its next heartbeat."""
        await self.injectors.remove(ClientId(client), by=actor(request))
        return Response(status_code=204)

    def _shown(self, injector: Injector) -> InjectorOut:
        return InjectorOut(
            id=injector.id,
            registered_at=injector.registered_at,
            seen_at=injector.seen_at,
            silent=self.injectors.is_silent(injector),
        )
