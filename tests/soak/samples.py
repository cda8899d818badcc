"""What a process holds over time, and whether that grows.

Rule: caches fill and pools warm up, so the first half is not judged. Of the second half, the median of its later
part may lie above the median of its earlier part by a stated bound and no more; and once all clients are gone, what was
theirs is gone, too. A process that was started again in between is not judged.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

PAGE_BYTES: Final = 4096
MEBIBYTE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    """Seconds since the beginning."""
    descriptors: int
    tasks: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """By how much the later part of the second half may lie above its earlier part; and the end above the beginning."""

    descriptors: int = 12
    tasks: int = 12
    resident_bytes: int = 6 * MEBIBYTE
    left_over: int = 6
    """Descriptors and tasks that may be more after all clients have gone than there were before the first."""


MEASURES: Final = ("descriptors", "tasks", "resident_bytes")


@dataclass(slots=True)
class Series:
    """One process's samples. `before` and `after`: without any client."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list)
    before: Sample | None = None
    after: Sample | None = None

    def growth(self, measure: str) -> float:
        """Within the second half: the middle of its later part above that of its earlier part."""
        half = self.samples[len(self.samples) // 2 :]
        values = [float(getattr(sample, measure)) for sample in half]
        cut = len(values) // 2
        return median(values[cut:]) - median(values[:cut])

    def faults(self, bounds: Bounds) -> list[str]:
        """Each bound that is broken, in words."""
        if len(self.samples) < 8:
            return [f"{self.name}: only {len(self.samples)} samples"]
        found = [
            f"{self.name}: {measure} grew by {self.growth(measure):,.0f} in the second half"
            for measure in MEASURES
            if self.growth(measure) > getattr(bounds, measure)
        ]
        if self.before is not None and self.after is not None:
            for measure in ("descriptors", "tasks"):
                more = getattr(self.after, measure) - getattr(self.before, measure)
                if more > bounds.left_over:
                    found.append(f"{self.name}: {more} {measure} are left over after all clients have gone")
        return found


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def sampled(pid: int, *, tasks: int, since: float) -> Sample:
    return Sample(time.monotonic() - since, descriptors_of(pid), tasks, resident_bytes_of(pid))


def table(series: Sequence[Series]) -> str:
    """Every process: before, at the half, at the end under load, after; and the growth that is judged."""
    rows = [f"{'process':18}{'measure':14}{'before':>9}{'half':>9}{'end':>9}{'after':>9}{'growth':>9}"]
    for each in series:
        if len(each.samples) < 8:
            continue
        for measure in MEASURES:
            unit = MEBIBYTE if measure == "resident_bytes" else 1
            half = each.samples[len(each.samples) // 2 :]
            cells = [
                getattr(each.before, measure) / unit if each.before else float("nan"),
                median(getattr(sample, measure) for sample in half[: len(half) // 2]) / unit,
                median(getattr(sample, measure) for sample in half[len(half) // 2 :]) / unit,
                getattr(each.after, measure) / unit if each.after else float("nan"),
                each.growth(measure) / unit,
            ]
            label = "resident MiB" if measure == "resident_bytes" else measure
            rows.append(f"{each.name:18}{label:14}" + "".join(f"{cell:9.1f}" for cell in cells))
    return "\n".join(rows)
