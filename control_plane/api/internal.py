"""`/internal`: what an egress proxy asks and tells (`contract.wire`). For clients of kind `egress_proxy` alone.

Rule: what is read is of a contract that we serve, and nothing that must be understood is passed over
(`contract.wire.read`).
"""

import json
import time
from collections.abc import AsyncIterator, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter

from control_plane.access import Access
from control_plane.alarms import Alarms
from control_plane.api.errors import request_id
from control_plane.api.peer import peer_certificate
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import (
    AUDIT_BATCH,
    EVENT,
    HEARTBEAT_SECONDS,
    QUOTA_ANSWER,
    QUOTA_REQUEST,
    RESOLVE_ANSWER,
    RESOLVE_REQUEST,
    TAG_KEYS,
    AuditBatch,
    AuditEvent,
    Event,
    Refused,
    TagKeys,
    WireError,
    read,
    write,
)
from control_plane.core.audit import cleaned, dated, gap
from control_plane.core.records import Client, ClientKind, PublishedChange
from control_plane.core.uses import uses_in
from control_plane.faults import reach
from control_plane.injectors import Injectors
from control_plane.limits import Quotas
from control_plane.metrics import Counters
from control_plane.own_keys import OwnKeyring
from control_plane.ports import Clock, CrossTenantReason, PlatformScope, Position, Store, Wake
from control_plane.resolution import Resolution
from control_plane.rotation import RotationKeeper
from control_plane.suspension import Suspensions
from control_plane.trail import Actor

_EVENTS_AT_ONCE: Final = 500
_JSON: Final = "application/json"
_CODES: Final = frozenset(code.value for code in RefusalCode)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InternalApi:
    access: Access
    resolution: Resolution
    own_keys: OwnKeyring
    store: Store
    wake: Wake
    rotations: RotationKeeper
    injectors: Injectors
    quotas: Quotas
    alarms: Alarms
    suspensions: Suspensions
    counters: Counters
    clock: Clock

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/internal", include_in_schema=False)
        router.add_api_route("/resolve", self.resolve, methods=["POST"])
        router.add_api_route("/tag-keys", self.tag_keys, methods=["GET"])
        router.add_api_route("/events", self.events, methods=["GET"])
        router.add_api_route("/audit", self.audit, methods=["POST"])
        router.add_api_route("/injector", self.injector, methods=["POST"])
        router.add_api_route("/quota", self.quota, methods=["POST"])
        return router

    async def resolve(self, request: Request) -> Response:
        await self._proxy(request)
        asked = _read(RESOLVE_REQUEST, await request.body())
        resolved = await self.resolution(asked)
        answer = resolved.answer
        self.counters.resolves[answer.code.value if isinstance(answer, Refused) else "answered"] += 1
        return Response(write(RESOLVE_ANSWER, resolved), media_type=_JSON)

    async def tag_keys(self, request: Request) -> Response:
        await self._proxy(request)
        rings = await self.own_keys.rings()
        async with self.store.read(PlatformScope(CrossTenantReason.EVENTS)) as records:
            position = await records.outbox.position()
        keys = TagKeys(tuple(key.hex() for key in rings.tags), epoch=position.epoch, as_of=position.sequence)
        return Response(write(TAG_KEYS, keys), media_type=_JSON)

    async def injector(self, request: Request) -> Response:
        """That this proxy is there and swaps: registered by the first call, alive by every further one."""
        proxy = await self._proxy(request)
        await self.injectors.seen(proxy, by=Actor(proxy.id, request_id(request)))
        return Response(status_code=204)

    async def events(self, request: Request) -> Response:
        proxy = await self._proxy(request)
        after = _after(request)
        return StreamingResponse(self._counted_stream(after, proxy), media_type="text/event-stream")

    async def _counted_stream(self, after: int | None, proxy: Client) -> AsyncIterator[bytes]:
        stream = _Told()
        self.counters.streams.add(stream)
        try:
            async for message in self._stream(after, stream, proxy):
                yield message
        finally:
            self.counters.streams.discard(stream)

    async def _stream(self, after: int | None, stream: "_Told", proxy: Client) -> AsyncIterator[bytes]:
        """Every change after that sequence, then a heartbeat, then each change as it happens and heartbeats between."""
        last, quiet_since, caught_up = after, time.monotonic(), False
        while not self.wake.closed:
            grew = self.wake.listen()
            if (looked := await self._look(last, proxy)) is None:
                return  # it is not who it was any more: whoever it is now asks again, and proves it
            position, changes = looked
            # A number that is ahead of ours is of another history (a restored database): the heartbeat shows it.
            last = position.sequence if last is None else min(last, position.sequence)
            stream.sequence = last
            for published in changes:
                stream.sequence = last = published.sequence
                yield _message(_event(published, position.epoch))
            if len(changes) == _EVENTS_AT_ONCE:
                continue
            now = time.monotonic()
            if not caught_up or (not changes and now - quiet_since >= HEARTBEAT_SECONDS):
                yield _message(Event(sequence=last, epoch=position.epoch, kind="heartbeat"))
                caught_up, quiet_since = True, now
            elif changes:
                quiet_since = now
            await grew(max(0.0, HEARTBEAT_SECONDS - (time.monotonic() - quiet_since)))

    async def _look(self, last: int | None, proxy: Client) -> tuple[Position, Sequence[PublishedChange]] | None:
        """None for a proxy that was removed, or proves itself otherwise, since it was let in."""
        async with self.store.read(PlatformScope(CrossTenantReason.EVENTS)) as records:
            if await records.clients.get(proxy.id) != proxy:
                return None
            position = await records.outbox.position()
            if last is None or last >= position.sequence:
                return position, ()
            return position, await records.outbox.after(last, _EVENTS_AT_ONCE)

    async def quota(self, request: Request) -> Response:
        await self._proxy(request)
        asked = _read(QUOTA_REQUEST, await request.body())
        answer = await self.quotas(asked)
        wanted = {(entry.limit_id, entry.bucket) for entry in asked.entries if entry.wanted}
        for grant in answer.grants:
            self.counters.quota_granted += grant.granted
            self.counters.quota_used_up += (
                grant.exists and not grant.granted and (grant.limit_id, grant.bucket) in wanted
            )
        return Response(write(QUOTA_ANSWER, answer), media_type=_JSON)

    async def audit(self, request: Request) -> Response:
        proxy = await self._proxy(request)
        batch = _read_batch(await request.body())
        async with self.store.write(PlatformScope(CrossTenantReason.AUDIT)) as records:
            events = self._events_of(batch, proxy, request_id(request))
            # What follows from an event follows from it once: a batch may be delivered again, whole or in part.
            added = await records.audit.append_new([each for event in events for each in _told_apart(event)])
            news = _first_of_each(events, added)
            counted = await self.rotations.heard(records, news)
            await records.uses.note(uses_in(news))
            reach("audit.appended")
        reach("audit.received")
        await self.rotations.reconsider(counted)
        await self.alarms.heard(events, added)
        await self.suspensions.heard(events)
        return Response(status_code=204)

    def _events_of(self, batch: AuditBatch, proxy: Client, own_request_id: str) -> list[AuditEvent]:
        events = [_reported(event, proxy, now=self.clock()) for event in batch.events]
        if batch.dropped > 0:
            # Named after the batch, so that a batch that is sent again does not report its gap again.
            name = batch.events[0].event_id if batch.events else own_request_id
            missing = gap(
                event_id="gap_" + sha256(f"{proxy.id} {name}".encode()).hexdigest()[:32],
                at=self.clock(),
                request_id=own_request_id,
                proxy=proxy.id,
                dropped=batch.dropped,
            )
            events.insert(0, missing)
        return events

    async def _proxy(self, request: Request) -> Client:
        return await self.access.client_of_kind(
            request.headers.get("authorization"), ClientKind.EGRESS_PROXY, certificate=peer_certificate(request)
        )


class _Told:
    """An event stream that is open, and the sequence it has come to."""

    sequence: int | None = None


def _told_apart(event: AuditEvent) -> tuple[AuditEvent, ...]:
    """Of another tenant's placeholder the tenant of whoever tried it reads what that one was told, and no more: not
    even that there is one. What was true stands in the platform's own trail."""
    if event.code is not RefusalCode.UNKNOWN_PLACEHOLDER or event.true_code is not RefusalCode.CALLER_MISMATCH:
        return (event,)
    told = replace(event, true_code=event.code, credential=None, version=None, placeholder_id=None)
    name = "true_" + sha256(event.event_id.encode()).hexdigest()[:32]
    true = replace(event, event_id=name, tenant=None, extra={**event.extra, "tenant_of_caller": event.tenant or ""})
    return told, true


def _first_of_each(events: Sequence[AuditEvent], ids: Set[str]) -> Sequence[AuditEvent]:
    by_id = {event.event_id: event for event in reversed(events) if event.event_id in ids}
    return list(reversed(by_id.values()))


def _read(adapter: TypeAdapter[T], raw: bytes) -> T:
    try:
        return read(adapter, raw.replace(b"\\u0000", b"\\ufffd"))  # PostgreSQL has no NUL in its texts
    except WireError as error:
        hint = "the control plane is updated before the proxies"
        raise RefusedError(Refusal(RefusalCode.MALFORMED_REQUEST, str(error), hint)) from None


def _read_batch(raw: bytes) -> AuditBatch:
    """Also of a newer proxy, whose codes are not all known here: what it did is recorded all the same."""
    try:
        return _read(AUDIT_BATCH, raw)
    except RefusedError:
        known = _with_known_codes(raw)
        if known is None:
            raise
        return _read(AUDIT_BATCH, known)


def _with_known_codes(raw: bytes) -> bytes | None:
    """The batch with unknown codes moved from their fields to `extra`. None where it is none of that form."""
    try:
        batch = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    events = batch.get("events") if isinstance(batch, dict) else None
    if not isinstance(events, list):
        return None
    for event in events:
        if not isinstance(event, dict):
            return None
        for field in ("code", "true_code"):
            code = event.get(field)
            if isinstance(code, str) and code not in _CODES and isinstance(event.setdefault("extra", {}), dict):
                event[field] = None
                event["extra"][f"unknown_{field}"] = code
    return json.dumps(batch).encode()


def _after(request: Request) -> int | None:
    """The last sequence that the proxy has seen; None: from now on."""
    text = request.headers.get("last-event-id") or request.query_params.get("after")
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise RefusedError(Refusal(RefusalCode.MALFORMED_REQUEST, "after: a sequence number is digits"))
    return int(text)


def _event(published: PublishedChange, epoch: str) -> Event:
    change = published.change
    return Event(
        sequence=published.sequence,
        epoch=epoch,
        kind=change.kind.value,
        tenant=change.tenant,
        id=change.id,
        revoked=change.revoked,
    )


def _message(event: Event) -> bytes:
    return f"id: {event.sequence}\nevent: {event.kind}\ndata: ".encode() + write(EVENT, event) + b"\n\n"


def _reported(event: AuditEvent, proxy: Client, *, now: float) -> AuditEvent:
    event = cleaned(dated(event, now=now))
    return replace(event, extra={**event.extra, "reported_by": proxy.id})
