"""The slices' way from and to the control plane (`POST /internal/quota`).

Rules: each bucket is asked for once at a time, however many requests wait for it. What lies idle is given back within
seconds, what was used beyond a slice is told until it was heard, and when a worker stops it gives back what it has.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from control_plane.contract.wire import BoundLimit, QuotaAnswer, QuotaEntry
from egress_proxy.core.quota import Quotas

REPORT_SECONDS: Final = 1.0
ENTRIES_AT_ONCE: Final = 500

Tell = Callable[[Sequence[QuotaEntry]], Awaitable[QuotaAnswer]]
"""Raises when the control plane did not answer."""

log = structlog.get_logger("egress_proxy.quotas")


class QuotaLink:
    def __init__(self, quotas: Quotas, tell: Tell, *, monotonic: Callable[[], float]) -> None:
        self._quotas = quotas
        self._tell = tell
        self._monotonic = monotonic
        self._asking: dict[tuple[str, str], asyncio.Future[None]] = {}

    async def ask(self, limit: BoundLimit) -> None:
        """A slice of this limit, or word that there is none. Raises nothing for an outage."""
        key = (limit.id, limit.bucket)
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(self._ask(key, limit))
        # Shielded: one client that leaves does not take the answer from the others that wait for it.
        await asyncio.shield(asking)

    async def _ask(self, key: tuple[str, str], limit: BoundLimit) -> None:
        try:
            await self._send([self._quotas.question(limit)])
        finally:
            # Before anybody goes on: who finds the answer used up asks anew, and does not wait for this one again.
            del self._asking[key]

    async def run(self) -> None:
        """Report, for ever."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            await self.report()

    async def report(self) -> None:
        entries = [entry for entry in self._quotas.reports(self._monotonic()) if self._is_free(entry)]
        for at in range(0, len(entries), ENTRIES_AT_ONCE):
            await self._send(entries[at : at + ENTRIES_AT_ONCE])

    async def give_everything_back(self) -> None:
        """At the end of a worker."""
        entries = list(self._quotas.reports(self._monotonic(), idle_seconds=0.0))
        for at in range(0, len(entries), ENTRIES_AT_ONCE):
            await self._send(entries[at : at + ENTRIES_AT_ONCE])

    def _is_free(self, entry: QuotaEntry) -> bool:
        """What is being asked for tells its own."""
        return (entry.limit_id, entry.bucket) not in self._asking

    async def _send(self, entries: Sequence[QuotaEntry]) -> None:
        try:
            grants = (await self._tell(entries)).grants
            by_key = {(grant.limit_id, grant.bucket): grant for grant in grants}
            answers = [(entry, by_key[entry.limit_id, entry.bucket]) for entry in entries]
        except Exception as error:  # border: whatever went wrong, nothing more is used than was given
            log.warning("quota_not_answered", error=type(error).__name__)
            for entry in entries:
                self._quotas.failed(entry, self._monotonic())
            return
        for entry, grant in answers:
            self._quotas.answered(entry, grant, self._monotonic())
