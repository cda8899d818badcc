"""How fast one subject may be issued placeholders: so that one of them does not fill the store for all.

Rule: what is refused here is refused before anything is written but its audit event. Counted over all replicas where
they share a Redis, otherwise by each (ADR 0012).
"""

import math
from dataclasses import dataclass
from typing import Final

from control_plane.contract.caller import SubjectId, TenantId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.ports import Rates

_WINDOW_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Pacing:
    rates: Rates
    per_minute: int
    """0: as fast as they like."""

    async def require(self, tenant: TenantId, subject: SubjectId) -> None:
        """Raises `RefusedError(rate_limited)`."""
        if not self.per_minute:
            return
        taken = await self.rates.take(
            f"exchange {subject}", tenant=tenant, limit=self.per_minute, window_seconds=_WINDOW_SECONDS
        )
        if not taken.allowed:
            raise RefusedError(
                Refusal(
                    RefusalCode.RATE_LIMITED,
                    f"more than {self.per_minute} exchanges a minute for this subject",
                    "keep placeholders and renew them, instead of exchanging for each request",
                    retry_after_seconds=max(1, math.ceil(taken.retry_after_seconds)),
                )
            )
