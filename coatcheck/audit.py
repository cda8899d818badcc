"""`coatcheck audit …`: read the trail, follow it, take it out, check it for holes."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final

import typer

from coatcheck.client import ControlPlane, Json
from coatcheck.stack import control_plane_of
from coatcheck.terminal import (
    CommandError,
    done,
    invocation,
    local_time,
    printable,
    show_json,
    show_json_line,
    show_table,
)

POLL_SECONDS: Final = 0.5
_COLUMNS: Final = ["TIME", "WHAT", "CODE", "REQUEST", "CREDENTIAL", "WHO", "REQUEST ID"]

app = typer.Typer(help="Read, follow, export and check the audit trail.", no_args_is_help=True)


@app.command("tail")
def tail(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as events come, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the newest to begin with.")] = 20,
) -> None:
    """The newest events of every tenant."""
    as_json = invocation(context).as_json
    with control_plane_of(context) as control_plane:
        last = last_sequence(control_plane)
        newest = list(events(control_plane, after=max(0, last - lines))) if lines else []
        if not follow:
            if as_json:
                show_json(newest)
            else:
                show_table(_COLUMNS, map(_row, newest), nothing="the trail is empty")
            return
        _follow(control_plane, newest, after=int(newest[-1]["sequence"]) if newest else last, as_json=as_json)


@app.command("export")
def export(
    context: typer.Context,
    after: Annotated[int, typer.Option(min=0, help="Only events with a higher sequence.")] = 0,
) -> None:
    """Every event as JSON, one a line."""
    with control_plane_of(context) as control_plane:
        for event in events(control_plane, after=after):
            sys.stdout.write(json.dumps(event, ensure_ascii=True) + "\n")


@app.command("verify")
def verify(context: typer.Context) -> None:
    """Check the trail for missing, repeated or reordered events."""
    with control_plane_of(context) as control_plane:
        finding = examine(events(control_plane))
    if invocation(context).as_json:
        show_json(
            {
                "events": finding.count,
                "first": finding.first,
                "last": finding.last,
                "missing": finding.missing,
                "repeated": finding.repeated,
                "lost_by_proxies": finding.lost,
                "whole": finding.is_whole,
            }
        )
    else:
        for line in finding.sentences():
            done(line)
    if not finding.is_whole:
        raise CommandError("the trail has holes", "compare it with an export taken earlier")


@dataclass(slots=True)
class Finding:
    """What a look at the whole trail showed."""

    count: int = 0
    first: int | None = None
    last: int | None = None
    missing: list[list[int]] = field(default_factory=list)
    """[from, to], both inclusive."""
    repeated: list[str] = field(default_factory=list)
    """Event ids that stand in the trail more than once."""
    lost: int = 0
    """Events that proxies reported as lost before they were written."""

    @property
    def is_whole(self) -> bool:
        return not self.missing and not self.repeated and not self.lost

    def sentences(self) -> Iterator[str]:
        if not self.count:
            yield "the trail is empty"
            return
        yield f"{self.count} events, sequence {self.first} to {self.last}"
        for begin, end in self.missing:
            yield f"missing: sequence {begin}" + (f" to {end}" if end != begin else "")
        for event_id in self.repeated:
            yield f"repeated: event {event_id}"
        if self.lost:
            yield f"lost: proxies reported {self.lost} events that never reached the trail (their spool was full)"
        if self.is_whole:
            yield "nothing is missing or repeated between the first and the last"
        yield (
            "not covered: the trail is not signed yet, so this cannot tell whether an event was altered in place, "
            "or whether the newest ones were cut off; keep exports elsewhere"
        )


def examine(trail: Iterator[Json]) -> Finding:
    """Sequences must be without a hole and event ids without a repetition."""
    finding = Finding()
    seen: set[str] = set()
    for event in trail:
        sequence = int(event["sequence"])
        if finding.last is None:
            finding.first = sequence
            if sequence > 1:
                finding.missing.append([1, sequence - 1])
        elif sequence != finding.last + 1:
            finding.missing.append([finding.last + 1, sequence - 1])
        if event["event_id"] in seen:
            finding.repeated.append(str(event["event_id"]))
        seen.add(event["event_id"])
        if event["action"] == "gap":
            finding.lost += int(event.get("extra", {}).get("dropped", 0))
        finding.last = sequence
        finding.count += 1
    return finding


def events(control_plane: ControlPlane, *, after: int = 0) -> Iterator[Json]:
    """Every event from there on, oldest first, fetched page by page."""
    while page := control_plane.audit_page(after=after):
        yield from page
        after = int(page[-1]["sequence"])


def last_sequence(control_plane: ControlPlane) -> int:
    """The newest event's sequence (0: none), found by halving: the API only reads forwards."""
    beyond = 1
    while control_plane.audit_page(after=beyond - 1, limit=1):
        beyond *= 2
    low, high = beyond // 2, beyond  # something lies after `low - 1`, nothing after `high - 1`
    while low + 1 < high:
        middle = (low + high) // 2
        if control_plane.audit_page(after=middle - 1, limit=1):
            low = middle
        else:
            high = middle
    return low


def where(event: Json) -> str:
    """The request as people write it: `GET https://host/path`."""
    if not event.get("host"):
        return str(event.get("path") or "")
    scheme, port = event.get("scheme") or "https", event.get("port")
    shown = f":{port}" if port and (scheme, port) not in (("https", 443), ("http", 80)) else ""
    host = f"[{event['host']}]" if ":" in event["host"] else event["host"]
    return f"{event.get('method') or ''} {scheme}://{host}{shown}{event.get('path') or ''}".strip()


def _row(event: Json) -> tuple[object, ...]:
    return (
        local_time(event["at"]),
        event["action"],
        event.get("code") or event.get("status") or "",
        where(event),
        event.get("credential"),
        event.get("subject"),
        event["request_id"],
    )


def _follow(control_plane: ControlPlane, newest: list[Json], *, after: int, as_json: bool) -> None:
    for event in newest:
        _show_line(event, as_json=as_json)
    while True:
        for event in events(control_plane, after=after):
            _show_line(event, as_json=as_json)
            after = int(event["sequence"])
        time.sleep(POLL_SECONDS)


def _show_line(event: Json, *, as_json: bool) -> None:
    if as_json:
        show_json_line(event)
        return
    sys.stdout.write("  ".join(printable(cell) for cell in _row(event) if cell not in (None, "")) + "\n")
    sys.stdout.flush()
