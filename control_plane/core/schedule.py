"""How old a secret may become: when its version is due, who is told, and when a hook is asked for a new one.

Rule: what failed is not tried again by itself. A scheduled rotation that was rolled back, or thrown away after its
probe, rests until an operator says otherwise; and a value that was rolled back is gone in any case. Pure.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from control_plane.core.records import CredentialVersion, Rotation, RotationPhase, RotationSchedule

BY_SCHEDULE: Final = "schedule"
"""Who started a rotation that nobody asked for."""
REMIND_AGAIN_SECONDS: Final = 86_400.0
RETRY_SECONDS: Final = 300.0
LEASE_SECONDS: Final = 60.0
LOOK_AGAIN_SECONDS: Final = 30.0
_FAILED: Final = frozenset({RotationPhase.ROLLED_BACK, RotationPhase.CANCELLED})


class Doing(StrEnum):
    NOTHING = "nothing"
    REMIND = "remind"
    """It will be due soon, or is."""
    ROTATE = "rotate"
    """Ask the hook for a new value."""
    SETTLE = "settle"
    """The rotation is over: the hook puts away what is no longer used."""


@dataclass(frozen=True, slots=True)
class Next:
    """What to do now, and when to look again."""

    doing: Doing
    look_at: float


def due_at(schedule: RotationSchedule, version: CredentialVersion) -> float:
    return version.created_at + schedule.every_seconds


def why_suspended(schedule: RotationSchedule, rotation: Rotation | None) -> str:
    """Why no rotation is started by itself; empty where one may be."""
    if rotation is None or rotation.started_by != BY_SCHEDULE or rotation.id == schedule.forgiven_rotation:
        return ""
    return f"the last scheduled rotation was {rotation.phase.value}: {rotation.reason}" if _has_failed(rotation) else ""


def next_of(
    schedule: RotationSchedule, version: CredentialVersion | None, rotation: Rotation | None, now: float
) -> Next:
    """`version` is the active one."""
    if schedule.unsettled_rotation is not None:
        is_over = rotation is None or rotation.id != schedule.unsettled_rotation or not rotation.is_running
        return Next(Doing.SETTLE if is_over else Doing.NOTHING, now + LOOK_AGAIN_SECONDS)
    if version is None:
        return Next(Doing.NOTHING, now + RETRY_SECONDS)
    due = due_at(schedule, version)
    if now < due - schedule.remind_seconds:
        return Next(Doing.NOTHING, due - schedule.remind_seconds)
    if now >= due and schedule.hook is not None and not why_suspended(schedule, rotation):
        is_running = rotation is not None and rotation.is_running
        return Next(Doing.NOTHING if is_running else Doing.ROTATE, now + LEASE_SECONDS)
    return Next(Doing.REMIND, now + REMIND_AGAIN_SECONDS if now >= due else min(due, now + REMIND_AGAIN_SECONDS))


def _has_failed(rotation: Rotation) -> bool:
    return rotation.phase in _FAILED
