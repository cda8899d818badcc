"""Waiting for a fact of another process, without guessing how long it takes."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(seconds: float, fact: Callable[[], T]) -> T:
    """Wait for `fact()` to be true and give it back. Raises `TimeoutError`."""
    deadline = time.monotonic() + seconds
    while not (found := fact()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true within {seconds} s")
        time.sleep(0.02)
    return found
