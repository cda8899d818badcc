"""How often something may happen: a limit for each window, spread evenly (generic cell rate algorithm, ITU-T I.371).

One number is kept for what is counted: the moment up to which it is used up. Taking moves that moment on; it may never
be further away than one window.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    limit: float
    window_seconds: float

    def after(self, used_up_to: float, *, amount: float, now: float) -> tuple[float | None, float]:
        """(The new moment, 0), or (None, seconds until that amount would be allowed)."""
        # A moment further away than a window was written by somebody else: it counts as a full window.
        begins = min(max(used_up_to, now), now + self.window_seconds)
        ends = begins + amount * self.window_seconds / self.limit
        too_far = ends - (now + self.window_seconds)
        return (ends, 0.0) if too_far <= 1e-9 else (None, too_far)
