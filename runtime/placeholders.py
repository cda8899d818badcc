"""Placeholders by their holder: asked for once, renewed in place while they are in use, gone when they are taken back.

Rule: one is used for exactly the holder that it was exchanged for. However many want it, it is asked for once. It is
kept in this process's memory and nowhere else. What was forgotten while an answer was on its way stays forgotten.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from control_plane.contract.caller import SessionId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from runtime.core.subject import Owner
from runtime.core.turn import Holder, Placeholder
from runtime.ports import ExchangesPlaceholders, PlaceholderRefusedError

MAX_KEPT: Final = 10_000
LEAST_LEFT: Final = 0.1
"""Nearer to its end than this share of its life, one is renewed before it is used: a request takes its time, too."""
AGAIN_SECONDS: Final = 2.0
"""So long after a renewal that nobody answered it is tried again."""

Clock = Callable[[], float]
"""Unix seconds."""

log = structlog.get_logger("runtime.placeholders")


@dataclass(slots=True)
class _Kept:
    placeholder: Placeholder
    renew_at: float
    """At half its life."""
    usable_until: float


@dataclass(slots=True)
class _InUse:
    """A session in which something is under way, and what renews for it."""

    turns: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    renewing: asyncio.Task[None] | None = None


class PlaceholderStore:
    """See `runtime.ports.Placeholders`."""

    def __init__(self, exchange: ExchangesPlaceholders, *, clock: Clock, capacity: int = MAX_KEPT) -> None:
        self._exchange = exchange
        self._clock = clock
        self._capacity = capacity
        self._kept: OrderedDict[Holder, _Kept] = OrderedDict()
        self._asking: dict[Holder, asyncio.Task[Placeholder]] = {}
        self._in_use: dict[tuple[Owner, SessionId], _InUse] = {}

    async def placeholder(self, holder: Holder, *, session_token: str) -> Placeholder:
        kept, now = self._kept.get(holder), self._clock()
        if kept is not None and now < kept.usable_until:
            self._kept.move_to_end(holder)
            if now >= kept.renew_at:
                self._ask(holder, self._renewed(holder, kept.placeholder))  # beside: this one is good still
            return kept.placeholder
        if (under_way := self._asking.get(holder)) is not None:
            with suppress(RefusedError):  # by somebody else's token, which may be worse than ours
                return await asyncio.shield(under_way)
        return await asyncio.shield(self._ask(holder, self._obtained(holder, kept, session_token)))

    def forget(self, owner: Owner, session: SessionId) -> None:
        for holder in [*self._kept, *self._asking]:
            if (holder.owner, holder.session) == (owner, session):
                self._kept.pop(holder, None)
                self._asking.pop(holder, None)

    @asynccontextmanager
    async def in_use(self, owner: Owner, session: SessionId) -> AsyncIterator[None]:
        """While this lasts, every placeholder of the session stays alive: a turn may wait for a person, and programs
        that it started hold the very strings."""
        used = self._in_use.setdefault((owner, session), _InUse())
        used.turns += 1
        if used.renewing is None:
            used.renewing = asyncio.create_task(self._keep_alive(owner, session, used), name="renewing placeholders")
        try:
            yield
        finally:
            used.turns -= 1
            if used.turns == 0:
                del self._in_use[owner, session]
                used.renewing.cancel()

    async def _keep_alive(self, owner: Owner, session: SessionId, used: _InUse) -> None:
        while True:
            used.changed.clear()
            mine = [holder for holder in self._kept if (holder.owner, holder.session) == (owner, session)]
            due_at = min((self._kept[holder].renew_at for holder in mine), default=None)
            with suppress(TimeoutError):
                await asyncio.wait_for(used.changed.wait(), None if due_at is None else due_at - self._clock())
            now = self._clock()
            for holder in mine:
                if (kept := self._kept.get(holder)) is not None and now >= kept.renew_at:
                    with suppress(RefusedError):
                        await asyncio.shield(self._ask(holder, self._renewed(holder, kept.placeholder)))

    # --- one question at a time

    def _ask(self, holder: Holder, question: Coroutine[Any, Any, Placeholder]) -> asyncio.Task[Placeholder]:
        if (under_way := self._asking.get(holder)) is not None:
            question.close()
            return under_way
        asking = asyncio.create_task(self._answered(holder, question), name="asking for a placeholder")
        self._asking[holder] = asking
        asking.add_done_callback(lambda done: self._asked(holder, done))
        return asking

    async def _answered(self, holder: Holder, question: Coroutine[Any, Any, Placeholder]) -> Placeholder:
        fresh = await question
        if self._asking.get(holder) is asyncio.current_task():
            self._keep(holder, fresh)
        return fresh

    def _asked(self, holder: Holder, done: asyncio.Task[Placeholder]) -> None:
        if self._asking.get(holder) is done:
            del self._asking[holder]
        if not done.cancelled():
            done.exception()  # looked at: perhaps nobody waits for it

    def _keep(self, holder: Holder, fresh: Placeholder) -> None:
        now = self._clock()
        life = fresh.expires_at - now
        self._kept[holder] = _Kept(fresh, now + life / 2, fresh.expires_at - life * LEAST_LEFT)
        self._kept.move_to_end(holder)
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)
        if (used := self._in_use.get((holder.owner, holder.session))) is not None:
            used.changed.set()

    async def _obtained(self, holder: Holder, kept: _Kept | None, session_token: str) -> Placeholder:
        """The same string for longer where there is one, since programs hold it; otherwise a new one."""
        if kept is not None:
            with suppress(PlaceholderRefusedError):
                return await self._exchange.renew(kept.placeholder, holder)
            self._kept.pop(holder, None)
        return await self._exchange.exchange(session_token, holder)

    async def _renewed(self, holder: Holder, placeholder: Placeholder) -> Placeholder:
        try:
            return await self._exchange.renew(placeholder, holder)
        except PlaceholderRefusedError:
            self._kept.pop(holder, None)  # taken back: the next who wants one exchanges, or hears why not
            log.info("placeholder_is_over", tenant=holder.owner.tenant, subject=holder.owner.subject)
            raise RefusedError(_TAKEN_BACK) from None
        except RefusedError as error:
            if (kept := self._kept.get(holder)) is not None:
                kept.renew_at = self._clock() + AGAIN_SECONDS
            log.warning("placeholder_not_renewed", tenant=holder.owner.tenant, code=error.refusal.code.value)
            raise


_TAKEN_BACK: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the placeholder was taken back",
    "try again: it is exchanged anew, or says why not",
)
