"""The trail's records: how one is written down, and the last cleaning before it is stored.

Rule: names, never values. Whatever a record's texts hold, a placeholder in them is replaced, and they are cut to size.
"""

from dataclasses import asdict, replace
from enum import StrEnum
from typing import Any, Final

from control_plane.contract.placeholder import redact
from control_plane.contract.wire import AuditEvent

MAX_TEXT: Final = 256
_TEXTS: Final = ("subject", "detail", "hint", "method", "scheme", "host", "path", "listener", "proxy", "credential")


def cleaned(event: AuditEvent) -> AuditEvent:
    """The event as it may be stored."""
    texts: dict[str, Any] = {name: _clean(getattr(event, name)) for name in _TEXTS if getattr(event, name) is not None}
    extra = {_clean(name): _clean(value) for name, value in list(event.extra.items())[:16]}
    return replace(event, **texts, extra=extra)


def event_to_json(event: AuditEvent) -> dict[str, Any]:
    """Without what is absent: most events fill a third of the fields."""
    return {name: _plain(value) for name, value in asdict(event).items() if value not in (None, "", {})}


def gap(*, event_id: str, at: float, request_id: str, proxy: str, dropped: int) -> AuditEvent:
    """Says that events are missing here, and how many."""
    return AuditEvent(
        event_id=event_id,
        at=at,
        request_id=request_id,
        action="gap",
        proxy=proxy,
        detail=f"{dropped} events were lost before this point: the proxy's spool was full",
        extra={"dropped": str(dropped)},
    )


def _clean(text: str) -> str:
    return redact(text.split("?", 1)[0] if text.startswith("/") else text)[:MAX_TEXT]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value
