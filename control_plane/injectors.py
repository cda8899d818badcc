"""Injectors: the proxies that swap placeholders. They register themselves; only an administrator takes one out.

Rule: whether a key may be handed out is decided by what is registered, never by what answers. Heartbeats tell health
alone: while something is registered and nothing is heard of any of it, an exchange is refused and says so, and nothing
else takes its place (ADR 0022).
"""

from collections.abc import Sequence
from typing import Final

from control_plane.contract.caller import ClientId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.records import Client, Injector
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Store
from control_plane.trail import Actor, Trail

SILENT_SECONDS: Final = 30.0
"""An injector that was not heard of for longer is silent: it has missed several heartbeats."""
_REMEMBERED_SECONDS: Final = 2.0


class Injectors:
    def __init__(self, store: Store, trail: Trail, *, clock: Clock) -> None:
        self._store = store
        self._trail = trail
        self._clock = clock
        self._remembered: tuple[Sequence[Injector], float] | None = None

    async def seen(self, proxy: Client, *, by: Actor) -> None:
        """A heartbeat. The first one registers."""
        async with self._store.write(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            if await records.injectors.seen(proxy.id, self._clock()):
                event = self._trail.event("injector.register", by=by, tenant=None, detail=proxy.id)
                await self._trail.record(records, [event])
        self._remembered = None

    async def list(self) -> Sequence[Injector]:
        async with self._store.read(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            return await records.injectors.list()

    async def remove(self, injector: ClientId, *, by: Actor) -> None:
        """Raises `RefusedError(not_found)`. One that still runs registers again with its next heartbeat."""
        async with self._store.write(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            if not await records.injectors.remove(injector):
                raise RefusedError(INJECTOR_NOT_FOUND)
            event = self._trail.event("injector.remove", by=by, tenant=None, detail=injector)
            await self._trail.record(records, [event])
        self._remembered = None

    async def require_heard(self) -> None:
        """Raises `RefusedError(credential_unavailable)` where injectors are registered and all of them are silent.

        Looked up every other second at most: it is about health, and every exchange asks.
        """
        now = self._clock()
        if self._remembered is None or abs(now - self._remembered[1]) >= _REMEMBERED_SECONDS:
            self._remembered = await self.list(), now
        require_one_heard(self._remembered[0], now)

    def is_silent(self, injector: Injector) -> bool:
        return is_silent(injector, self._clock())


def is_silent(injector: Injector, now: float) -> bool:
    return now - injector.seen_at > SILENT_SECONDS


def require_one_heard(injectors: Sequence[Injector], now: float) -> None:
    """Raises `RefusedError(credential_unavailable)`. Where none is registered there is nobody to be heard of."""
    if injectors and all(is_silent(injector, now) for injector in injectors):
        raise RefusedError(SILENT)


SILENT: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "no egress proxy is heard of, so nothing would swap a placeholder",
    "see that a proxy runs; an operator looks with: coatcheck injector list",
    retry_after_seconds=5,
)
INJECTOR_NOT_FOUND: Final = Refusal(
    RefusalCode.NOT_FOUND, "there is no such injector", "list them with: coatcheck injector list"
)
