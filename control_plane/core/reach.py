"""Where a secret may go, and whether a change makes that wider.

Rule: narrower is free, wider needs the secret again. Whatever cannot be shown to be narrower counts as wider.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.contract.destination import Destination
from control_plane.contract.placement import Placement
from control_plane.core.kinds import narrows
from control_plane.core.probe import SETTING as PROBE_SETTING


@dataclass(frozen=True, slots=True)
class Reach:
    """Everything of a credential that decides where its secret travels."""

    destinations: tuple[Destination, ...]
    placements: tuple[Placement, ...]
    allow_direct: bool = False
    """Whether an exchange may hand the secret out itself: then it may go anywhere."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of its kind (`core.kinds`): where tokens are fetched, what they are for."""


def widened_fields(new: Reach, *, old: Reach) -> tuple[str, ...]:
    """The fields by which `new` could send the secret somewhere that `old` could not. Empty: `new` is within `old`."""
    widened = []
    if not all(_is_covered(destination, old.destinations) for destination in new.destinations):
        widened.append("destinations")
    if not set(new.placements) <= set(old.placements):
        widened.append("placements")
    if new.allow_direct and not old.allow_direct:
        widened.append("allow_direct")
    for name in sorted({*new.settings, *old.settings}):
        before, after = old.settings.get(name), new.settings.get(name)
        if before != after and not narrows(name, after, old=before):
            widened.append(name if name == PROBE_SETTING else f"settings.{name}")
    return tuple(widened)


def _is_covered(new: Destination, olds: Sequence[Destination]) -> bool:
    return any(_is_within(new, old) for old in olds)


def _is_within(new: Destination, old: Destination) -> bool:
    return (
        new.endpoint == old.endpoint
        and _prefix_is_within(new.path_prefix, old.path_prefix)
        and _methods_are_within(new.methods, old.methods)
        and (old.allow_private or not new.allow_private)
        and (old.websocket or not new.websocket)
        and (old.ranges or not new.ranges)
        and (old.unsearchable or not new.unsearchable)
        and new.ca_pem == old.ca_pem
    )


def _prefix_is_within(new: str, old: str) -> bool:
    # `/v1/` is within `/v1`, not the other way round: only `/v1` admits the path `/v1` itself.
    return old == "/" or new == old or new.startswith(old.rstrip("/") + "/")


def _methods_are_within(new: frozenset[str] | None, old: frozenset[str] | None) -> bool:
    return old is None or (new is not None and new <= old)
