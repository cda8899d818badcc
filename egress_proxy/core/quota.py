"""What this proxy has of the limits that several proxies share: slices, and what becomes of them.

    the decision asks `Quotas.standing`: is there anything left, is it used up, or has the control plane to be asked?
    a request that goes takes from its slice (`take`), and one that counts tokens settles when it is over (`settle`)

Rules: nothing goes that no slice covers. Tokens are known only afterwards: a request goes while there is something left
and sets aside what one like it used to need; what it needed beyond that is reported, and counted. A slice is of one
window; what is idle is given back. When the control plane cannot be asked, what there is may be used, and then no more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from control_plane.contract.wire import BoundLimit, Measure, QuotaEntry, QuotaGrant

ASK_AGAIN_SECONDS: Final = 1.0
"""What was used up, or could not be asked, is not asked again sooner."""
IDLE_SECONDS: Final = 2.0
"""A slice that nobody took from for so long is given back, for other proxies."""
FIRST_GUESS: Final = 1_000
"""Tokens of a request, before one of its bucket was seen."""
_SMOOTHING: Final = 0.2

Key = tuple[str, str]
"""Limit and bucket."""


class Standing(StrEnum):
    LEFT = "left"
    UNKNOWN = "unknown"
    """Ask the control plane."""
    USED_UP = "used_up"
    UNAVAILABLE = "unavailable"
    """The control plane was asked, and did not answer."""


@dataclass(slots=True)
class _Slice:
    balance: int = 0
    """What may still be used. Less than nothing: a request needed more than there was."""
    beyond: int = 0
    """Used beyond what was given, and not told yet."""
    window: int = 0
    ends_at: float = 0.0
    is_free: bool = False
    """There is no such limit any more."""
    used_up_at: float = -1e9
    """When the control plane last had nothing to give."""
    failed_at: float = -1e9
    used_at: float = -1e9
    typical: float = FIRST_GUESS
    """Tokens that a request needs, as seen lately."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one request took: of each limit, in which window, and how much was set aside."""

    shares: tuple[tuple[BoundLimit, int, int], ...]


@dataclass(slots=True)
class Quotas:
    """One worker's slices. `now` is monotonic, in seconds."""

    _slices: dict[Key, _Slice] = field(default_factory=dict)

    def standing(self, limit: BoundLimit, now: float) -> Standing:
        found = self._slices.get((limit.id, limit.bucket))
        if found is None:
            return Standing.UNKNOWN
        if now < found.ends_at and (found.balance > 0 or found.is_free):
            return Standing.LEFT
        if now - found.failed_at < ASK_AGAIN_SECONDS:
            return Standing.UNAVAILABLE
        if now < found.ends_at and now - found.used_up_at < ASK_AGAIN_SECONDS:
            return Standing.USED_UP
        return Standing.UNKNOWN

    def resets_in_seconds(self, limit: BoundLimit, now: float) -> float:
        found = self._slices.get((limit.id, limit.bucket))
        return max(0.0, found.ends_at - now) if found is not None else 0.0

    def take(self, limits: Sequence[BoundLimit], now: float) -> "Taken | None":
        """From every limit what one request takes; None, and nothing is taken, where one of them has nothing left."""
        if any(self.standing(limit, now) is not Standing.LEFT for limit in limits):
            return None
        shares = []
        for limit in limits:
            found = self._slices[limit.id, limit.bucket]
            reserved = 0 if found.is_free else self._reserve(limit, found)
            found.balance -= reserved
            found.used_at = now
            shares.append((limit, found.window, reserved))
        return Taken(tuple(shares))

    def put_back(self, taken: "Taken") -> None:
        """The request did not go after all."""
        for limit, window, reserved in taken.shares:
            found = self._slices.get((limit.id, limit.bucket))
            if found is not None and found.window == window:
                found.balance += reserved

    def settle(self, taken: "Taken", tokens: int, now: float) -> None:
        """What a request that was taken for turned out to need."""
        for limit, window, reserved in taken.shares:
            if limit.measure is not Measure.TOKENS:
                continue
            found = self._slices.setdefault((limit.id, limit.bucket), _Slice())
            found.typical += _SMOOTHING * (tokens - found.typical)
            if found.is_free:
                continue
            if window != found.window or now >= found.ends_at:
                found.beyond += tokens  # its slice is over: it counts in the window that runs now
                continue
            found.balance += reserved - tokens
            if found.balance < 0:
                found.beyond -= found.balance
                found.balance = 0

    @staticmethod
    def _reserve(limit: BoundLimit, found: _Slice) -> int:
        return 1 if limit.measure is Measure.REQUESTS else max(1, int(found.typical))

    # --- what the control plane is told, and says

    def question(self, limit: BoundLimit) -> QuotaEntry:
        """More of this one, with what is still to be told of it."""
        found = self._slices.setdefault((limit.id, limit.bucket), _Slice())
        wanted = max(1, self._reserve(limit, found) - found.balance)
        return QuotaEntry(limit.id, limit.bucket, wanted=wanted, used=found.beyond)

    def reports(self, now: float, *, idle_seconds: float = IDLE_SECONDS) -> Iterator[QuotaEntry]:
        """What was used beyond, and slices that lie idle: those are given up here and now."""
        for (limit_id, bucket), found in list(self._slices.items()):
            returned = 0
            if now >= found.ends_at and not found.beyond:
                del self._slices[limit_id, bucket]  # of a window that is over; nothing is owed
                continue
            if found.balance > 0 and now < found.ends_at and now - found.used_at >= idle_seconds:
                returned, found.balance = found.balance, 0
            if returned or found.beyond:
                yield QuotaEntry(limit_id, bucket, used=found.beyond, returned=returned, window=found.window)

    def answered(self, entry: QuotaEntry, grant: QuotaGrant, now: float) -> None:
        """The control plane took what was told, and gave."""
        found = self._slices.setdefault((entry.limit_id, entry.bucket), _Slice())
        found.beyond = max(0, found.beyond - entry.used)
        if not entry.wanted:
            return
        if grant.window != found.window or now >= found.ends_at:
            found.balance = 0  # what was left was of another window
        found.balance += grant.granted
        found.window, found.ends_at = grant.window, now + grant.ends_in_seconds
        found.is_free = not grant.exists
        found.used_at = now
        if grant.exists and not grant.granted:
            found.used_up_at = now

    def failed(self, entry: QuotaEntry, now: float) -> None:
        """It could not be asked: what was to be given back is gone, what was used beyond is told again."""
        found = self._slices.setdefault((entry.limit_id, entry.bucket), _Slice())
        if entry.wanted:
            found.failed_at = now
