"""Memory that was freed goes back to the system.

The C library keeps what it was given: after an outage, in which thousands of audit events waited, or after many large
heads, it holds on to the most that was ever needed, in pieces. (malloc_trim(3): glibc's own; elsewhere there is nothing
to do.)
"""

import ctypes
from collections.abc import Callable
from typing import Final


def _found() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    return trim


_TRIM: Final = _found()


def give_back() -> None:
    """Takes some milliseconds where there is much to give."""
    if _TRIM is not None:
        _TRIM(0)
