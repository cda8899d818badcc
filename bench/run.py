"""`make bench`: the whole measurement in one run.

Every row is measured once in each round, rows in turn, so that what the machine does in one minute falls on all of
them; a ratio is taken inside a round, and the median of the rounds is what counts. Requests a second, the median and
the 99th percentile of the time to a whole reply; then the parts beside that table. Ends with one line of JSON.

    python -m bench.run [--only PART …] [--rounds 5] [--seconds 2] [--connections 96] [--json FILE] [--update FILE]
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from rich.console import Console

from bench import contestants, peers, report
from bench.contestants import EVENTS, FORWARD_TLS, REVERSE, TLS, TO_TLS, Contestant, Row, pin_control_plane
from bench.driver import drive, drive_by_wrk
from bench.load import Measured, prove
from bench.measures import Measure
from bench.parts import PARTS, Field

QUIET: Final = 0.5
"""Above this load average something else runs here."""
POST: Final = f"{REVERSE}, POST"
BODY_BYTES: Final = 1024
GROUPS: Final = (REVERSE, POST, TO_TLS, TLS, FORWARD_TLS)
PEERS: Final = {
    "nginx (Debian: nginx-light)": peers.nginx,
    "haproxy (Debian: haproxy)": peers.haproxy,
    "Envoy (its own venv: .venv-bench)": peers.envoy,
    "mitmproxy (its own venv: .venv-bench)": peers.mitmproxy,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(width=120)
    if len(os.sched_getaffinity(0)) < 2:
        console.print("two cores are needed: one for the proxy, one for load and origin")
        return 1
    options.load_before = round(os.getloadavg()[0], 2)
    if options.load_before > QUIET:
        console.print(f"this machine is busy (load {options.load_before}): the numbers below are of little worth")
    wanted = options.only or [*GROUPS, *PARTS]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coatcheck-bench-")))
        folder.chmod(0o755)  # nginx may give up its privileges
        field, missing = _start(stack, folder, options, console)
        for name in missing:
            console.print(f"MISSING: {name}; its rows and the ratios to it are left out")
        rows = [row for row in _rows(list(field.contestants.values())) if row.group in wanted]
        _prove(field)
        measured, by_wrk = _measure(rows, options, console)
        measures = report.ratios(rows, measured, by_wrk)
        for name in (name for name in PARTS if name in wanted):
            measures += _part(name, field)
    result = report.result_of(rows, measured, by_wrk, measures, key=field.origin.key, missing=missing, options=options)
    report.show(result, console)
    line = json.dumps(result)
    print(line)
    if options.json:
        Path(options.json).write_text(line + "\n")
    if options.update:
        report.update(Path(options.update), result)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--warm-up-seconds", type=float, default=0.4)
    parser.add_argument("--connections", type=int, default=96)
    parser.add_argument("--json", metavar="FILE", help="also write the result to this file")
    parser.add_argument("--update", metavar="FILE", help="put the tables into this document, between its markers")
    parser.add_argument(
        "--only", metavar="PART", action="append", choices=[*GROUPS, *PARTS],
        help=f"this part alone, or several: {', '.join([*GROUPS, *PARTS])}",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.only and options.update:
        parser.error("--update writes the whole document; leave --only out")
    return options


def _start(stack: ExitStack, folder: Path, options: argparse.Namespace, console: Console) -> tuple[Field, list[str]]:
    deployment = contestants.start_control_plane(stack, folder)
    origin = contestants.open_origin(stack, folder, deployment.upstream_ca)
    started = {name: start(stack, origin) for name, start in PEERS.items()}
    found = [contestants.direct(origin), *filter(None, started.values()), contestants.this_proxy(deployment, origin)]
    field = Field(
        {contestant.name: contestant for contestant in found}, deployment, origin,
        options.rounds, options.seconds, options.connections, console,
    )  # fmt: skip
    return field, [name for name, contestant in started.items() if contestant is None]


def _rows(found: list[Contestant]) -> list[Row]:
    rows = [
        Row(f"{contestant.name}, {group}", group, way.get(), wrk=way.is_clear)
        for group in (REVERSE, TO_TLS, TLS, FORWARD_TLS)
        for contestant in found
        if (way := contestant.ways.get(group)) is not None
    ]
    posts = [
        Row(f"{contestant.name}, {POST}", POST, contestant.ways[REVERSE].post(BODY_BYTES))
        for contestant in found
        if contestant.name != "mitmproxy"
    ]
    return sorted(rows + posts, key=lambda row: GROUPS.index(row.group))


def _prove(field: Field) -> None:
    """One request each before any is timed: the origin's 200 is the proof that the real key arrived."""
    for contestant in field.contestants.values():
        for name, way in contestant.ways.items():
            if name != EVENTS:
                prove(way.get())
    pin_control_plane(field.deployment, os.SCHED_IDLE)


def _measure(
    rows: list[Row], options: argparse.Namespace, console: Console
) -> tuple[dict[str, list[Measured]], dict[str, list[dict[str, float]]]]:
    measured: dict[str, list[Measured]] = {row.name: [] for row in rows}
    by_wrk: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows if row.wrk and shutil.which("wrk")}
    for number in range(options.rounds if rows else 0):
        started = time.monotonic()
        turn = rows[number % len(rows) :] + rows[: number % len(rows)]
        for row in turn:
            measured[row.name].append(
                drive(
                    row.plan,
                    name=row.name,
                    connections=options.connections,
                    seconds=options.seconds,
                    warm_up_seconds=options.warm_up_seconds,
                )
            )
        for row in turn:
            if row.name in by_wrk:
                by_wrk[row.name].append(
                    drive_by_wrk(row.plan, name=row.name, connections=options.connections, seconds=options.seconds)
                )
        console.print(f"round {number + 1} of {options.rounds}: {time.monotonic() - started:.0f} s")
    return measured, by_wrk


def _part(name: str, field: Field) -> list[Measure]:
    started = time.monotonic()
    measures = PARTS[name](field)
    field.console.print(f"{name}: {time.monotonic() - started:.0f} s")
    return measures


if __name__ == "__main__":
    sys.exit(main())
