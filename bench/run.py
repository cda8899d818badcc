"""`make bench`: the whole measurement in one run.

Every row is measured once in each round, rows in turn, so that what the machine does in one minute falls on all of
them; a ratio is taken inside a round, and the median of the rounds is what counts. Requests a second, the median and
the 99th percentile of the time to a whole reply. Ends with one line of JSON. Bounded: under five minutes.

    python -m bench.run [--rounds 5] [--seconds 2] [--connections 32] [--json FILE]
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench import contestants
from bench.contestants import LOAD_CORE, PROXY_CORE, Row, pin
from bench.load import Measured
from bench.origin import nginx_command

SATURATED: Final = 0.9
"""A proxy whose core was busier than this was the limit of its row."""


QUIET: Final = 0.5
"""Above this load average something else runs here."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a row must reach, as a multiple of another."""

    row: str
    of: str
    at_least: float | None
    """None: shown, with nothing demanded."""


TARGETS: Final = (
    Target("this proxy, reverse", "nginx, reverse", 0.6),
    Target("this proxy, reverse to TLS", "nginx, reverse to TLS", None),
    Target("this proxy, reverse", "mitmproxy, reverse", None),
    Target("this proxy, forward TLS", "mitmproxy, forward TLS", 30.0),
)


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
    result = _result(rows, measured, by_wrk, missing, options)
    _print(result, console)
    line = json.dumps(result)
    print(line)
    if options.json:
        Path(options.json).write_text(line + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--warm-up-seconds", type=float, default=0.4)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--json", help="also write the result to this file")
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
        capture_output=True, text=True, timeout=60, preexec_fn=lambda: pin(os.getpid(), LOAD_CORE),
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
        capture_output=True, text=True, timeout=60, preexec_fn=lambda: pin(os.getpid(), LOAD_CORE),
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


def _result(
    rows: list[Row],
    measured: dict[str, list[Measured]],
    by_wrk: dict[str, list[dict[str, float]]],
    missing: list[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    table = []
    for row in rows:
        runs = measured[row.name]
        fields = asdict(runs[0]).keys()
        line: dict[str, Any] = {"row": row.name, "group": row.group}
        line |= {name: statistics.median(getattr(run, name) for run in runs) for name in fields}
        if by_wrk.get(row.name):
            line["wrk"] = {
                name: statistics.median(run[name] for run in by_wrk[row.name]) for name in by_wrk[row.name][0]
            }
        table.append(line)
    return {
        "machine": {
            "load_average_before": options.load_before,
            "cpu": _processor(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "method": {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "connections": options.connections,
            "proxy_core": PROXY_CORE,
            "load_core": LOAD_CORE,
            "origin": "nginx" if nginx_command() else "own",
        },
        "missing": missing,
        "rows": table,
        "ratios": [ratio for target in TARGETS if (ratio := _ratio(target, measured, by_wrk))],
    }


def _ratio(
    target: Target, measured: dict[str, list[Measured]], by_wrk: dict[str, list[dict[str, float]]]
) -> dict[str, Any] | None:
    if target.row not in measured or target.of not in measured:
        return None
    pairs = list(zip(measured[target.row], measured[target.of], strict=True))
    median = statistics.median(a.requests_per_second / b.requests_per_second for a, b in pairs)
    ratio: dict[str, Any] = {
        "row": target.row,
        "of": target.of,
        "median": median,
        "target": target.at_least,
        "met": target.at_least is None or median >= target.at_least,
    }
    wrk_pairs = list(zip(by_wrk.get(target.row, []), by_wrk.get(target.of, []), strict=True))
    if wrk_pairs:
        ratio["median_by_wrk"] = statistics.median(
            a["requests_per_second"] / b["requests_per_second"] for a, b in wrk_pairs
        )
    return ratio


def _processor() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def _print(result: dict[str, Any], console: Console) -> None:
    table = Table(title="medians of the rounds, times to a whole reply")
    for heading in ("", "req/s", "p50 µs", "p99 µs", "core", "CPU µs/req", "wrk: req/s", "p50 µs", "p99 µs"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for line in result["rows"]:
        wrk = line.get("wrk", {})
        busy = line["watched_cpu_share"]
        table.add_row(
            line["row"],
            f"{line['requests_per_second']:,.0f}",
            f"{line['p50_microseconds']:,.0f}",
            f"{line['p99_microseconds']:,.0f}",
            f"{busy:.0%}" + ("" if busy >= SATURATED else " *") if busy else "–",
            f"{line['cpu_microseconds_per_request']:.1f}" if busy else "–",
            f"{wrk['requests_per_second']:,.0f}" if wrk else "–",
            f"{wrk['p50_microseconds']:,.0f}" if wrk else "–",
            f"{wrk['p99_microseconds']:,.0f}" if wrk else "–",
        )
    console.print(table)
    console.print("core: how busy the proxy kept its own; *: the load or the machine was the limit, not the proxy")
    for ratio in result["ratios"]:
        by_wrk = f", by wrk {ratio['median_by_wrk']:.2f}" if "median_by_wrk" in ratio else ""
        verdict = (
            "" if ratio["target"] is None else f"; target {ratio['target']:g}: {'met' if ratio['met'] else 'MISSED'}"
        )
        console.print(f"{ratio['row']} = {ratio['median']:.2f} × {ratio['of']}{by_wrk}{verdict}")


if __name__ == "__main__":
    sys.exit(main())
