"""The control plane's own decisions, for the audit trail that the proxies' decisions are in too.

Rule: a change and its record are written in one transaction, and what issues something is not done without its record.
What takes something back is (`REPAIRS`): a broken trail must not keep a stolen key alive. It is then said where
it can be said (the answer, the log, a metric), and recorded as soon as the trail takes it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

import structlog

from control_plane.contract.refusal import Refusal
from control_plane.contract.wire import AuditEvent
from control_plane.core.audit import cleaned, gap
from control_plane.core.delegation import Chain, in_words
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.ports import Clock, Entropy, Records

ADMINISTRATOR: Final = "administrator"
REPAIRS: Final = frozenset(
    {
        "allow.remove",
        "client.delete",
        "credential.delete",
        "credential.rotate",
        "direct.revoke",
        "grant.remove",
        "placeholder.revoke",
        "placeholder.suspend",
        "proxy_credential.revoke",
        "rotation.canary",
        "rotation.cancel",
        "rotation.finish",
        "rotation.probe",
        "rotation.promote",
        "rotation.roll_back",
        "session.end",
        "tenant.delete",
    }
)
"""What takes something back, or puts a good secret in a bad one's place."""
MAX_OWED: Final = 10_000
_REPAID_AT_ONCE: Final = 200

_log = structlog.get_logger("control_plane.trail")
_unrecorded: ContextVar[list[str] | None] = ContextVar("unrecorded", default=None)


@contextmanager
def noticing_unrecorded() -> Iterator[list[str]]:
    """The actions that are carried out inside and that the trail could not take."""
    actions: list[str] = []
    token = _unrecorded.set(actions)
    try:
        yield actions
    finally:
        _unrecorded.reset(token)


class _Debt:
    """Events that the trail could not take yet, the oldest first, and how many were too many."""

    def __init__(self) -> None:
        self.events: deque[AuditEvent] = deque()
        self.lost = 0
        self.failures = 0
        """Ever since the start."""

    def add(self, event: AuditEvent, *, limit: int) -> None:
        self.failures += 1
        if len(self.events) < limit:
            self.events.append(event)
        else:
            self.lost += 1


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asked, and in which request."""

    name: str
    """`administrator`, `<issuer>:<subject>` of one that an issuer vouches for, `settings`, or a client's id."""
    request_id: str
    is_a_client: bool = True
    """False: an administrator, or a person of an issuer of ours."""


@dataclass(frozen=True, slots=True)
class Trail:
    clock: Clock
    entropy: Entropy
    max_owed: int = MAX_OWED
    """How many events are kept for a trail that takes none; what is beyond is counted."""
    _debt: _Debt = field(default_factory=_Debt)

    async def record(self, records: Records, events: Sequence[AuditEvent]) -> None:
        """In the transaction of what they record. Raises `RefusedError(audit_unavailable)` where the trail takes
        nothing, unless every one of them takes something back (`REPAIRS`)."""
        if not REPAIRS.issuperset(event.action for event in events):
            await records.audit.append(events)
        elif not await records.audit.append_if_possible(events):
            self._owe(events)

    def _owe(self, events: Sequence[AuditEvent]) -> None:
        for event in events:
            self._debt.add(event, limit=self.max_owed)
            _log.error(
                "audit_not_recorded",
                event_id=event.event_id,
                action=event.action,
                tenant=event.tenant,
                credential=event.credential,
                by=event.extra.get("by"),
                request_id=event.request_id,
            )
            if (noticed := _unrecorded.get()) is not None:
                noticed.append(event.action)

    @property
    def unrecorded(self) -> int:
        """How many events are still owed to the trail."""
        return len(self._debt.events) + self._debt.lost

    @property
    def failures(self) -> int:
        """How many events the trail has not taken since the start."""
        return self._debt.failures

    def owed(self) -> list[AuditEvent]:
        """What the trail could not take when it happened, the oldest first, with a gap for what was too much."""
        owed = list(islice(self._debt.events, _REPAID_AT_ONCE))
        if not owed and self._debt.lost:
            name = new_id("gap", self.entropy(ID_ENTROPY_BYTES))
            return [gap(event_id=name, at=self.clock(), request_id="", proxy="", dropped=self._debt.lost)]
        return owed

    def repaid(self, count: int) -> None:
        if not self._debt.events:
            self._debt.lost = 0
        for _ in range(min(count, len(self._debt.events))):
            self._debt.events.popleft()

    def retention(self, tenant: str | None, *, removed: int, through: int) -> AuditEvent:
        """Says that the beginning of a chain is gone because its time was over."""
        return self.event(
            "audit.forget",
            by=Actor("retention", new_id("req", self.entropy(ID_ENTROPY_BYTES))),
            tenant=tenant,
            detail=f"{removed} events up to position {through} were removed: their time was over",
        )

    def event(
        self,
        action: str,
        *,
        by: Actor,
        tenant: str | None,
        subject: str | None = None,
        session: str | None = None,
        credential: str | None = None,
        version: int | None = None,
        placeholder_id: str | None = None,
        detail: str = "",
    ) -> AuditEvent:
        """A decision that was carried out."""
        return cleaned(
            AuditEvent(
                event_id=new_id("ev", self.entropy(ID_ENTROPY_BYTES)),
                at=self.clock(),
                request_id=by.request_id,
                action=action,
                tenant=tenant,
                subject=subject,
                session=session,
                client=None if not by.is_a_client or by.name == ADMINISTRATOR else by.name,
                credential=credential,
                version=version,
                placeholder_id=placeholder_id,
                detail=detail,
                extra={"by": by.name},
            )
        )

    def refusal(
        self,
        action: str,
        refusal: Refusal,
        *,
        by: Actor,
        tenant: str | None,
        subject: str | None = None,
        session: str | None = None,
    ) -> AuditEvent:
        """A decision that was a "no"."""
        return cleaned(
            AuditEvent(
                event_id=new_id("ev", self.entropy(ID_ENTROPY_BYTES)),
                at=self.clock(),
                request_id=by.request_id,
                action=action,
                tenant=tenant,
                subject=subject,
                session=session,
                client=by.name if by.is_a_client else None,
                code=refusal.code,
                true_code=refusal.true_code,
                detail=refusal.detail,
                hint=refusal.hint,
                extra={"by": by.name},
            )
        )


def acted(event: AuditEvent, chain: Chain) -> AuditEvent:
    """The event with who acted for its subject."""
    return cleaned(replace(event, extra={**event.extra, "act": in_words(chain)})) if chain else event
