"""Moments in unix seconds, from whoever says them.

Rule: what is kept and shown is finite and of the years that a calendar can write (1970 to 9999), so that one odd moment
never stops a reader of the others.
"""

import math
from typing import Final

MAX_UNIX_SECONDS: Final = 253_402_300_799
"""The last second of the year 9999."""


def is_within_calendar(moment: float) -> bool:
    return math.isfinite(moment) and 0 <= moment <= MAX_UNIX_SECONDS


def within_calendar(moment: float) -> float:
    """The moment, or the end of the calendar that is nearest to it. What is no number is the beginning."""
    if math.isnan(moment):
        return 0.0
    return min(max(moment, 0.0), float(MAX_UNIX_SECONDS))
