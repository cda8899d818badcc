"""`make bench`: the whole measurement in one run.

Every row is measured once in each round, rows in turn, so that what the machine does in one minute falls on all of
them; a ratio is taken inside a round, and the median of the rounds is what counts. Requests a second, the median and
the 99th percentile of the time to a whole reply. Ends with one line of JSON. Bounded: under five minutes.

    python -m bench.run [--rounds 5] [--seconds 2] [--connections 96] [--json FILE]
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from bench import contestants, report
from bench.contestants import Row, pin_to_load_core
from bench.load import Measured

QUIET: Final = 0.5
"""Above this load average something else runs here."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(width=120)
    if len(os.sched_getaffinity(0)) < 2:
        console.print("two cores are needed: one for the proxy, one for load and origin")
        return 1
    options.load_before = round(os.getloadavg()[0], 2)
    if options.load_before > QUIET:
        console.print(f"this machine is busy (load {options.load_before}): the numbers below are of little worth")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coatcheck-bench-")))
        folder.chmod(0o755)  # nginx may give up its privileges
        rows, missing = _start(stack, folder)
        for name in missing:
            console.print(f"MISSING: {name}; its rows and the ratios to it are left out")
        _prove(rows, options)
        measured, by_wrk = _measure(rows, options, console)
    result = report.result_of(rows, measured, by_wrk, missing=missing, options=options)
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
    parser.add_argument("--update", metavar="FILE", help="put the table into this document, between its markers")
    return parser.parse_args(arguments)


def _start(stack: ExitStack, folder: Path) -> tuple[list[Row], list[str]]:
    deployment = contestants.start_this_proxy(stack, folder)
    origin = contestants.open_origin(stack, folder, deployment.upstream_ca)
    rows, missing = contestants.direct(origin), []
    for name, found in (
        ("nginx (Debian: nginx-light)", contestants.nginx(stack, origin)),
        ("mitmproxy (its own venv: .venv-bench)", contestants.mitmproxy(stack, origin)),
        ("this proxy", contestants.this_proxy(deployment, origin)),
    ):
        rows += found or []
        missing += [] if found else [name]
    return rows, missing


def _prove(rows: list[Row], options: argparse.Namespace) -> None:
    """One short run each before any is timed: the origin's 200 is the proof that the real key arrived."""
    for row in rows:
        _load(row, replace_seconds=0.2, options=options)


def _measure(
    rows: list[Row], options: argparse.Namespace, console: Console
) -> tuple[dict[str, list[Measured]], dict[str, list[dict[str, float]]]]:
    measured: dict[str, list[Measured]] = {row.name: [] for row in rows}
    by_wrk: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows if row.wrk and shutil.which("wrk")}
    for number in range(options.rounds):
        started = time.monotonic()
        turn = rows[number % len(rows) :] + rows[: number % len(rows)]
        for row in turn:
            measured[row.name].append(_load(row, replace_seconds=options.seconds, options=options))
        for row in turn:
            if row.name in by_wrk:
                by_wrk[row.name].append(_wrk(row, options))
        console.print(f"round {number + 1} of {options.rounds}: {time.monotonic() - started:.0f} s")
    return measured, by_wrk


def _load(row: Row, *, replace_seconds: float, options: argparse.Namespace) -> Measured:
    plan = replace(
        row.plan,
        connections=options.connections,
        warm_up_seconds=options.warm_up_seconds,
        seconds=replace_seconds,
    )
    run = subprocess.run(
        [sys.executable, "-m", "bench.load", json.dumps(asdict(plan))],
        capture_output=True, text=True, timeout=60, preexec_fn=lambda: pin_to_load_core(os.getpid()),
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"{row.name}: {run.stderr.strip().splitlines()[-1]}")
    return Measured(**json.loads(run.stdout))


def _wrk(row: Row, options: argparse.Namespace) -> dict[str, float]:
    """The same row driven by wrk: requests a second and microseconds. Raises `RuntimeError` for anything but 2xx."""
    first, *lines = row.plan.request.split("\r\n")
    headers = [part for line in lines if line for part in ("-H", line)]
    url = f"http://{row.plan.host}:{row.plan.port}{first.split(' ')[1]}"
    run = subprocess.run(
        ["wrk", "-t1", f"-c{options.connections}", f"-d{max(1, round(options.seconds))}s", "--latency", *headers, url],
        capture_output=True, text=True, timeout=60, preexec_fn=lambda: pin_to_load_core(os.getpid()),
    )  # fmt: skip
    if "Non-2xx" in run.stdout or "Socket errors" in run.stdout or run.returncode:
        raise RuntimeError(f"{row.name}, by wrk: {run.stdout}{run.stderr}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", run.stdout)
    assert rate is not None
    return {"requests_per_second": float(rate[1])} | {
        f"p{percent}_microseconds": _microseconds(run.stdout, percent) for percent in (50, 99)
    }


def _microseconds(text: str, percent: int) -> float:
    found = re.search(rf"{percent}%\s+([\d.]+)(us|ms|s)", text)
    assert found is not None
    return float(found[1]) * {"us": 1, "ms": 1e3, "s": 1e6}[found[2]]


if __name__ == "__main__":
    sys.exit(main())
