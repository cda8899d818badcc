"""Secrets that came back in replies: each is told to the audit trail, and too many suspend their placeholder.

Rule: once may be an upstream's error message that quotes a field; `LEAKS` times within `WINDOW_SECONDS` is somebody who
uses an upstream as a mirror. The suspension is this worker's own and begins at once; the control plane counts what all
of them report, and suspends for all of them. It ends by itself after the same time, and touches no other placeholder.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

import structlog

LEAKS: Final = 3
WINDOW_SECONDS: Final = 600.0
_MAX_PLACEHOLDERS: Final = 4096

log = structlog.get_logger("egress_proxy")


class LeakWatch:
    """`suspend` takes a placeholder's id, and for how many seconds."""

    def __init__(self, suspend: Callable[[str, float], None]) -> None:
        self._suspend = suspend
        self._seen: OrderedDict[str, deque[float]] = OrderedDict()
        self.suspensions = 0

    def note(self, placeholder_id: str, now: float) -> bool:
        """A reply to a request of this placeholder held its secret. Whether it is suspended for it."""
        seen = self._seen.setdefault(placeholder_id, deque(maxlen=LEAKS))
        self._seen.move_to_end(placeholder_id)
        if len(self._seen) > _MAX_PLACEHOLDERS:
            self._seen.popitem(last=False)
        seen.append(now)
        if len(seen) < LEAKS or now - seen[0] > WINDOW_SECONDS:
            return False
        del self._seen[placeholder_id]
        self.suspensions += 1
        log.warning("placeholder_suspended", placeholder=placeholder_id, seconds=WINDOW_SECONDS)
        self._suspend(placeholder_id, WINDOW_SECONDS)
        return True
