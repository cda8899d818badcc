"""What was measured, as a table for people, one line of JSON for programs, and Markdown for docs/performance.md."""

import argparse
import platform
import re
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.contestants import LOAD_CORE, PROXY_CORE, Row
from bench.load import Measured
from bench.origin import nginx_command

BEGIN: Final = "<!-- begin: measured by make bench -->"
END: Final = "<!-- end: measured by make bench -->"

SATURATED: Final = 0.9
"""A proxy whose core was busier than this was the limit of its row."""


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


def result_of(
    rows: list[Row],
    measured: dict[str, list[Measured]],
    by_wrk: dict[str, list[dict[str, float]]],
    *,
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
        "median_by_cpu_time": statistics.median(
            b.cpu_microseconds_per_request / a.cpu_microseconds_per_request for a, b in pairs
        ),
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


def show(result: dict[str, Any], console: Console) -> None:
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
        console.print(_sentence(ratio))


def update(document: Path, result: dict[str, Any]) -> None:
    """Replace what stands between the markers by this result. Raises `ValueError` without them."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no {BEGIN} … {END}")
    document.write_text(f"{before}{BEGIN}\n\n{_markdown(result)}\n{END}{after}")


def _markdown(result: dict[str, Any]) -> str:
    machine, method = result["machine"], result["method"]
    lines = [
        "| | req/s | p50 µs | p99 µs | CPU µs/req | by wrk: req/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for line in result["rows"]:
        wrk = f"{line['wrk']['requests_per_second']:,.0f}" if "wrk" in line else "–"
        cpu = f"{line['cpu_microseconds_per_request']:.1f}" if line["watched_cpu_share"] else "–"
        lines.append(
            f"| {line['row']} | {line['requests_per_second']:,.0f} | {line['p50_microseconds']:,.0f} "
            f"| {line['p99_microseconds']:,.0f} | {cpu} | {wrk} |"
        )
    lines += ["", *(f"- {_sentence(ratio)}" for ratio in result["ratios"]), ""]
    lines.append(
        f"Two cores of {machine['cpu']}, Linux {machine['kernel']}, Python {machine['python']}; "
        f"{method['rounds']} rounds of {method['seconds']:g} s, {method['connections']} connections, "
        f"load average before it began: {machine['load_average_before']}."
    )
    return "\n".join(lines) + "\n"


def _sentence(ratio: dict[str, Any]) -> str:
    by_wrk = f", by wrk {ratio['median_by_wrk']:.2f}" if "median_by_wrk" in ratio else ""
    verdict = "" if ratio["target"] is None else f"; target {ratio['target']:g}: {'met' if ratio['met'] else 'missed'}"
    by_cpu_time = f"by CPU time {ratio['median_by_cpu_time']:.2f}"
    return f"{ratio['row']} = {ratio['median']:.2f} × {ratio['of']} ({by_cpu_time}{by_wrk}){verdict}"
