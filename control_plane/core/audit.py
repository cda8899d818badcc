"""The trail's records: how one is written down, and the last cleaning before it is stored.

Rule: names, never values. Whatever a record's texts hold, a placeholder in them is replaced, and they are cut to size.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any, Final

from control_plane.contract.placeholder import redact
from control_plane.contract.wire import AuditEvent
from control_plane.core.moments import is_within_calendar, within_calendar

MAX_TEXT: Final = 256
_LIMITS: Final = {
    "event_id": 64,
    "request_id": 64,
    "action": 32,
    "tenant": 64,
    "client": 64,
    "session": 64,
    "placeholder_id": 64,
    "method": 32,
    "scheme": 16,
    "path": MAX_TEXT,
    "subject": MAX_TEXT,
    "credential": MAX_TEXT,
    "host": MAX_TEXT,
    "detail": MAX_TEXT,
    "hint": MAX_TEXT,
    "listener": MAX_TEXT,
    "proxy": MAX_TEXT,
}
_OUR_OWN: Final = "the trail could not take them"
_CONTROLS: Final = dict.fromkeys((*range(32), 127), "�")


def cleaned(event: AuditEvent) -> AuditEvent:
    """The event as it may be stored."""
    texts: dict[str, Any] = {
        name: _clean(text)[:limit] for name, limit in _LIMITS.items() if (text := getattr(event, name)) is not None
    }
    extra = {_clean(name)[:64]: _clean(value)[:MAX_TEXT] for name, value in list(event.extra.items())[:16]}
    return replace(event, **texts, extra=extra)


def readable(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A record as it is shown, also one that was stored with a moment of no calendar."""
    at = stored.get("at")
    return {**stored, "at": within_calendar(at)} if isinstance(at, int | float) else dict(stored)


_NAMES: Final = tuple(field.name for field in fields(AuditEvent))


def event_to_json(event: AuditEvent) -> dict[str, Any]:
    """Without what is absent: most events fill a third of the fields."""
    return {name: _plain(value) for name in _NAMES if (value := getattr(event, name)) not in (None, "", {})}


def dated(event: AuditEvent, *, now: float) -> AuditEvent:
    """The event at a moment that there is: its own, or else now, and what it said is noted."""
    if is_within_calendar(event.at):
        return event
    return replace(event, at=now, extra={**event.extra, "reported_at": repr(event.at)})


def gap(*, event_id: str, at: float, request_id: str, proxy: str, dropped: int) -> AuditEvent:
    """Says that events are missing here, and how many."""
    return AuditEvent(
        event_id=event_id,
        at=at,
        request_id=request_id,
        action="gap",
        proxy=proxy or None,
        detail=f"{dropped} events were lost before this point: "
        + ("the proxy's spool was full" if proxy else _OUR_OWN),
        extra={"dropped": str(dropped)},
    )


def _clean(text: str) -> str:
    path_alone = text.split("?", 1)[0] if text.startswith("/") else text
    return redact(path_alone).translate(_CONTROLS)


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return value.value
    return dict(value) if isinstance(value, dict) else value
