"""The audit trail as lines of JSON that verify by themselves (`core.chain`): one chain, from a position on.

Rule: whole batches, each followed by its signed head, read in short transactions of their own: an export of millions of
events holds nothing open. What retention removes meanwhile is answered with its anchor.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from control_plane.core.chain import (
    Anchor,
    Head,
    anchor_line,
    end_line,
    event_line,
    head_line,
    trail_line,
    unchained_line,
)
from control_plane.ports import Records, Scope, Store

HEADS_AT_ONCE: Final = 50
UNCHAINED_AT_MOST: Final = 10_000
Line = dict[str, Any]


class TrailExport:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def lines(self, scope: Scope, tenant: str | None, *, after: int) -> AsyncIterator[list[Line]]:
        """Pages of lines. `after` is the last position that is there already; batches are never cut."""
        begin, number, position = await self._begin(scope, tenant, after)
        yield begin
        while page := await self._page(scope, tenant, number):
            yield [line for _, lines in page for line in lines]
            number, position = page[-1][0].number, page[-1][0].last
        yield await self._end(scope, tenant, number, position)

    async def last_head(self, scope: Scope, tenant: str | None) -> Head | Anchor | None:
        async with self._store.read(scope) as records:
            return await records.chain.last(tenant)

    async def _begin(self, scope: Scope, tenant: str | None, after: int) -> tuple[list[Line], int, int]:
        lines = [trail_line(tenant, after=after)]
        async with self._store.read(scope) as records:
            anchor = await records.chain.anchor(tenant)
            reached = await records.chain.head_through(tenant, after) if after > 0 else None
        if reached is not None:
            return [*lines, head_line(reached, kind="resume")], reached.number, reached.last
        if anchor is not None:
            return [*lines, anchor_line(anchor)], anchor.number, anchor.position
        return lines, 0, 0

    async def _page(self, scope: Scope, tenant: str | None, number: int) -> Sequence[tuple[Head, list[Line]]]:
        async with self._store.read(scope) as records:
            heads = await records.chain.heads(tenant, after_number=number, limit=HEADS_AT_ONCE)
            page = [(head, await _lines_of(records, head)) for head in heads]
            if heads and heads[0].number != number + 1:
                # Removed while we were reading: its anchor explains the hole. Without one the hole is the finding.
                anchor = await records.chain.anchor(tenant)
                if anchor is not None and anchor.number >= number:
                    page[0][1].insert(0, anchor_line(anchor))
        return page

    async def _end(self, scope: Scope, tenant: str | None, number: int, position: int) -> list[Line]:
        async with self._store.read(scope) as records:
            # Linked since the last page: left to the next export.
            waiting = await records.chain.unchained_of(tenant, limit=UNCHAINED_AT_MOST)
        lines = [unchained_line(None if event is None else event.record) for event in waiting]
        return [*lines, end_line(position, unchained=len(lines))]


async def _lines_of(records: Records, head: Head) -> list[Line]:
    events = await records.chain.events_of(head)
    lines = [
        event_line(head.first + offset, None)
        if event is None
        else event_line(head.first + offset, event.record, differs=event.differs)
        for offset, event in enumerate(events)
    ]
    return [*lines, head_line(head)]
