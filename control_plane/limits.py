"""Limits: how many requests, or tokens of a model, a tenant's subjects may use in each window of time.

They are decided here and enforced by proxies, which several share one limit: each takes slices of what is left
(`Quotas`), uses them up without asking, and comes back for more. What was given out is in the database, so that all
proxies together never use more than the limit, but for what a request turns out to need after it was let go.

Rule: what is given out counts as used until it is given back. A proxy that dies takes its slice with it, to the
window's end: too little is used, never too much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from control_plane.contract.caller import SubjectId, TenantId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import Measure, QuotaAnswer, QuotaEntry, QuotaGrant, QuotaRequest
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.core.records import Change, ChangeKind, Limit
from control_plane.credentials import CREDENTIAL_NOT_FOUND, invalid_field, require_tenant
from control_plane.ports import Clock, CrossTenantReason, Entropy, PlatformScope, Records, Store, TenantScope
from control_plane.trail import Actor, Trail

SLICES: Final = 20
"""A slice is one in so many parts of a limit: few questions on the way to it, little that lies idle at a proxy."""
USAGE_KEPT_SECONDS: Final = 86_400.0
_ROWS_AT_ONCE: Final = 500
MAX_ENTRIES: Final = 1_000
_QUOTA: Final = PlatformScope(CrossTenantReason.RESOLVE)


@dataclass(frozen=True, slots=True)
class NewLimit:
    credential: str | None
    subject: SubjectId | None
    each_subject: bool
    measure: Measure
    amount: int
    window_seconds: int


@dataclass(frozen=True, slots=True)
class NamedLimit:
    limit: Limit
    credential_name: str | None
    granted: int
    """What was given out in the window that runs now, of all its buckets together."""


class LimitKeeper:
    def __init__(self, store: Store, trail: Trail, *, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._trail = trail
        self._clock = clock
        self._entropy = entropy

    async def add(self, tenant: TenantId, new: NewLimit, *, by: Actor) -> NamedLimit:
        """Raises `RefusedError` (`not_found`, `credential_not_found`, `invalid_field`)."""
        if new.subject is not None and new.each_subject:
            raise invalid_field("each_subject", "a limit of one subject is that subject's alone already")
        async with self._store.write(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            credential = None
            if new.credential is not None:
                credential = await records.credentials.named(new.credential)
                if credential is None:
                    raise RefusedError(CREDENTIAL_NOT_FOUND)
            limit = Limit(
                id=new_id("lim", self._entropy(ID_ENTROPY_BYTES)),
                tenant=tenant,
                credential_id=credential.id if credential is not None else None,
                subject=new.subject,
                each_subject=new.each_subject,
                measure=new.measure,
                amount=new.amount,
                window_seconds=new.window_seconds,
                created_at=self._clock(),
            )
            await records.limits.add(limit)
            await self._published(records, "limit.add", limit, new.credential, by)
            return NamedLimit(limit, new.credential, granted=0)

    async def list(self, tenant: TenantId) -> Sequence[NamedLimit]:
        async with self._store.read(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            names = {credential.id: credential.name for credential in await records.credentials.list()}
            limits = await records.limits.list()
            granted = await records.limits.granted_now(limits, now=self._clock())
        return [
            NamedLimit(limit, names.get(limit.credential_id) if limit.credential_id else None, granted[limit.id])
            for limit in limits
        ]

    async def remove(self, tenant: TenantId, limit_id: str, *, by: Actor) -> None:
        """Raises `RefusedError(not_found)`."""
        async with self._store.write(TenantScope(tenant)) as records:
            limit = await records.limits.get(limit_id)
            if limit is None:
                raise RefusedError(LIMIT_NOT_FOUND)
            names = {credential.id: credential.name for credential in await records.credentials.list()}
            await records.limits.remove(limit_id)
            name = names.get(limit.credential_id) if limit.credential_id else None
            await self._published(records, "limit.remove", limit, name, by)

    async def _published(self, records: Records, action: str, limit: Limit, name: str | None, by: Actor) -> None:
        # Any answer that a proxy has of this tenant may name limits.
        await records.outbox.append([Change(ChangeKind.TENANT, limit.tenant, limit.tenant)], self._clock())
        event = self._trail.event(
            action,
            by=by,
            tenant=limit.tenant,
            subject=limit.subject,
            credential=name,
            detail=f"{limit.amount} {limit.measure.value} in {limit.window_seconds} s"
            + (", each subject" if limit.each_subject else ""),
        )
        await self._trail.record(records, [event])


class Quotas:
    """What proxies ask for, give back and report."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def __call__(self, request: QuotaRequest) -> QuotaAnswer:
        """Raises `RefusedError(malformed_request)`."""
        if len(request.entries) > MAX_ENTRIES:
            raise RefusedError(Refusal(RefusalCode.MALFORMED_REQUEST, f"entries: at most {MAX_ENTRIES} in one request"))
        # Rows are locked in one order, so that two proxies never wait for each other.
        entries = sorted(request.entries, key=lambda entry: (entry.limit_id, entry.bucket))
        async with self._store.write(_QUOTA) as records:
            return QuotaAnswer(tuple([await self._grant(records, entry) for entry in entries]))

    async def _grant(self, records: Records, entry: QuotaEntry) -> QuotaGrant:
        now, limit = self._clock(), await records.limits.get(entry.limit_id)
        if limit is None or len(entry.bucket) > _BUCKET_LENGTH:
            return QuotaGrant(entry.limit_id, entry.bucket, granted=0, window=0, ends_in_seconds=1.0, exists=False)
        window, ends_in = limit.window(now)
        if entry.used > 0:
            await records.limits.use(limit, bucket=entry.bucket, now=now, amount=min(entry.used, _MOST))
        if entry.returned > 0 and entry.window == window:
            await records.limits.give_back(limit, bucket=entry.bucket, now=now, amount=min(entry.returned, _MOST))
        granted = 0
        if entry.wanted > 0:
            slice_ = max(1, limit.amount // SLICES)
            least = min(entry.wanted, limit.amount)
            granted = await records.limits.take(
                limit, bucket=entry.bucket, now=now, least=least, most=max(least, slice_)
            )
        return QuotaGrant(entry.limit_id, entry.bucket, granted=granted, window=window, ends_in_seconds=ends_in)

    async def forget(self) -> None:
        """What was given out in windows that are long over."""
        async with self._store.write(PlatformScope(CrossTenantReason.UPKEEP)) as records:
            await records.limits.purge(over_before=self._clock() - USAGE_KEPT_SECONDS, limit=_ROWS_AT_ONCE)


_BUCKET_LENGTH: Final = 32
_MOST: Final = 2**50
LIMIT_NOT_FOUND: Final = Refusal(
    RefusalCode.NOT_FOUND, "there is no such limit", "list them with: coatcheck limit list"
)
