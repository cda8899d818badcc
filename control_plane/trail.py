"""The control plane's own decisions, for the audit trail that the proxies' decisions are in too.

Rule: a change and its record are written in one transaction; there is never one without the other.
"""

from dataclasses import dataclass
from typing import Final

from control_plane.contract.refusal import Refusal
from control_plane.contract.wire import AuditEvent
from control_plane.core.audit import cleaned
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.ports import Clock, Entropy

ADMINISTRATOR: Final = "administrator"


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
