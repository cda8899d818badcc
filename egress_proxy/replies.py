"""How upstreams answer the versions of a credential that is being rotated: counted here, told in the audit trail.

Rule: counted only where the binding asks for it (`reports_replies`), by credential, version and subject; told within
`TELL_SECONDS` as one event for each of them, statuses and counts alone. What it means is the control plane's to say.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from control_plane.contract.wire import AuditEvent, Binding

TELL_SECONDS: Final = 0.5
MAX_STATUSES: Final = 12
"""An event has room for so many; client errors first, which is where a rejected secret shows."""

_Key = tuple[str, str, str, int, str]
"""Tenant, credential id and name, version, subject."""


class ReplyTally:
    """One worker's."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        record: Callable[[AuditEvent], None],
        clock: Callable[[], float],
        new_id: Callable[[], str],
        proxy_id: str,
    ) -> None:
        self._loop = loop
        self._record = record
        self._clock = clock
        self._new_id = new_id
        self._proxy_id = proxy_id
        self._counts: dict[_Key, Counter[int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def count(self, binding: Binding, status: int) -> None:
        caller = binding.caller
        key = (caller.tenant, binding.credential_id, binding.credential_name, binding.version, caller.subject)
        self._counts.setdefault(key, Counter())[status] += 1
        if self._timer is None:
            self._timer = self._loop.call_later(TELL_SECONDS, self.tell)

    def tell(self) -> None:
        """Everything counted so far, into the spool."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts, self._counts = self._counts, {}
        for (tenant, credential_id, credential, version, subject), statuses in counts.items():
            name = self._new_id()
            self._record(
                AuditEvent(
                    event_id=name,
                    at=self._clock(),
                    request_id=name,
                    action="replies",
                    tenant=tenant,
                    subject=subject,
                    credential=credential,
                    version=version,
                    proxy=self._proxy_id,
                    extra={"credential_id": credential_id} | _told(statuses),
                )
            )


def _told(statuses: Counter[int]) -> dict[str, str]:
    ordered = sorted(statuses.items(), key=lambda item: (not 400 <= item[0] < 500, -item[1]))
    return {str(status): str(count) for status, count in ordered[:MAX_STATUSES]}
