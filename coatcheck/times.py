"""Times as people type them: `90`, `15m`, `8h`, `7d`, or a date."""

import re
from datetime import datetime
from typing import Final

from coatcheck.terminal import WrongUsageError

_UNIT_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,9})([smhd]?)")


def seconds_of(text: str, *, option: str) -> int:
    """A duration in seconds. Raises `WrongUsageError`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise WrongUsageError(f"{option} is a number of seconds, or one with a unit such as 15m, 8h or 7d")
    return int(found[1]) * _UNIT_SECONDS[found[2]]


def moment_of(text: str, *, option: str, now: float) -> float:
    """Unix seconds: a duration from now, or a date and time (ISO 8601; local time without an offset)."""
    if _DURATION.fullmatch(text.strip()):
        return now + seconds_of(text, option=option)
    try:
        moment = datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise WrongUsageError(f"{option} is a duration such as 8h, or a date such as 2030-01-31T18:00") from None
    if moment <= now:
        raise WrongUsageError(f"{option} lies in the past")
    return moment
