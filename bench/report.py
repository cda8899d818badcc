"""What was measured, as tables for people, one line of JSON for programs, and Markdown for docs/performance.md."""

import argparse
import platform
import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.contestants import FORWARD_TLS, LOAD_CORE, PROXY_CORE, TLS, Row
from bench.load import Measured
from bench.measures import Measure
from bench.origin import nginx_command
from egress_proxy.core.needles import Needles

BEGIN: Final = "<!-- begin: measured by make bench -->"
END: Final = "<!-- end: measured by make bench -->"

SATURATED: Final = 0.9
"""A proxy whose core was busier than this was the limit of its row."""
COMPARED: Final = ("nginx", "haproxy", "Envoy", "mitmproxy")
FORMS: Final = (
    "as it is, percent-encoded (as in a URL, and as in a form), JSON-escaped, and in base64 and base64url at each of "
    "the three places where it can begin in a group"
)

Measurements = dict[str, list[Measured]]
WrkMeasurements = dict[str, list[dict[str, float]]]


def ratios(rows: list[Row], measured: Measurements, by_wrk: WrkMeasurements) -> list[Measure]:
    """This proxy to each other one in the same group, by requests a second; and with TLS inside of CONNECT, which few
    of them open, to nginx with TLS on both sides as well."""
    names = {row.name for row in rows}
    groups = dict.fromkeys(row.group for row in rows)
    pairs = [(group, f"{other}, {group}", other) for group in groups for other in COMPARED]
    pairs.append((FORWARD_TLS, f"nginx, {TLS}", f"nginx, {TLS}"))
    return [
        _ratio(group, its, other, measured, by_wrk)
        for group, its, other in pairs
        if {f"this proxy, {group}", its} <= names
    ]


def _ratio(group: str, its: str, other: str, measured: Measurements, by_wrk: WrkMeasurements) -> Measure:
    ours = f"this proxy, {group}"
    pairs = list(zip(measured[ours], measured[its], strict=True))
    median = statistics.median(a.requests_per_second / b.requests_per_second for a, b in pairs)
    by_cpu = statistics.median(b.cpu_microseconds_per_request / a.cpu_microseconds_per_request for a, b in pairs)
    detail = f"by CPU time {by_cpu:.2f}"
    wrk_pairs = list(zip(by_wrk.get(ours, []), by_wrk.get(its, []), strict=True))
    if wrk_pairs:
        by_load = statistics.median(a["requests_per_second"] / b["requests_per_second"] for a, b in wrk_pairs)
        detail += f", by wrk {by_load:.2f}"
    return Measure(f"{group} ÷ {other}", median, "×", group, detail)


def result_of(
    rows: list[Row],
    measured: Measurements,
    by_wrk: WrkMeasurements,
    measures: list[Measure],
    *,
    key: str,
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
            "needles": [len(text) for text in Needles.of((key, len("sk-"))).texts],
        },
        "missing": missing,
        "rows": table,
        "measures": [measure.as_json() for measure in measures],
    }


def _processor() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def show(result: dict[str, Any], console: Console) -> None:
    if result["rows"]:
        _show_rows(result["rows"], console)
    table = Table()
    for heading in ("this proxy", "", "goal", "", "beside it"):
        table.add_column(heading, justify="right" if not heading else "left")
    for measure in result["measures"]:
        table.add_row(measure["name"], _value(measure), measure["goal"] or "–", _verdict(measure), measure["detail"])
    console.print(table)
    console.print(_needles(result["method"]))


def _show_rows(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="medians of the rounds, times to a whole reply")
    for heading in ("", "req/s", "p50 µs", "p99 µs", "core", "CPU µs/req", "wrk: req/s", "p50 µs", "p99 µs"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for line in rows:
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


def update(document: Path, result: dict[str, Any]) -> None:
    """Replace what stands between the markers by this result. Raises `ValueError` without them."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no {BEGIN} … {END}")
    document.write_text(f"{before}{BEGIN}\n\n{_markdown(result)}\n{END}{after}")


def _markdown(result: dict[str, Any]) -> str:
    machine, method = result["machine"], result["method"]
    lines = ["| this proxy | measured | goal | beside it | again by |", "|---|---:|---:|---|---|"]
    for measure in result["measures"]:
        goal = f"{measure['goal']}: {_verdict(measure)}" if measure["goal"] else "–"
        detail, part = measure["detail"] or "–", measure["part"]
        lines.append(f"| {measure['name']} | {_value(measure)} | {goal} | {detail} | `--only '{part}'` |")
    lines += ["", "| | req/s | p50 µs | p99 µs | CPU µs/req | by wrk: req/s |", "|---|---:|---:|---:|---:|---:|"]
    for line in result["rows"]:
        wrk = f"{line['wrk']['requests_per_second']:,.0f}" if "wrk" in line else "–"
        cpu = f"{line['cpu_microseconds_per_request']:.1f}" if line["watched_cpu_share"] else "–"
        lines.append(
            f"| {line['row']} | {line['requests_per_second']:,.0f} | {line['p50_microseconds']:,.0f} "
            f"| {line['p99_microseconds']:,.0f} | {cpu} | {wrk} |"
        )
    missing = f" Not installed: {', '.join(result['missing'])}." if result["missing"] else ""
    lines += [
        "",
        f"Two cores of {machine['cpu']}, Linux {machine['kernel']}, Python {machine['python']}; "
        f"{method['rounds']} rounds of {method['seconds']:g} s, {method['connections']} connections, "
        f"load average before it began: {machine['load_average_before']}.{missing}",
        "",
        _needles(method),
    ]
    return "\n".join(lines) + "\n"


def _value(measure: dict[str, Any]) -> str:
    value = measure["value"]
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {measure['unit']}"


def _verdict(measure: dict[str, Any]) -> str:
    return {True: "met", False: "missed", None: ""}[measure["met"]]


def _needles(method: dict[str, Any]) -> str:
    lengths = method["needles"]
    return (
        f"A reply to a swapped request is searched for {len(lengths)} needles of {min(lengths)} to {max(lengths)} "
        f"bytes: the key {FORMS}; forms that are the same text are searched for once. Content encodings: the request "
        "is sent with `Accept-Encoding: identity`, the reply comes as it is."
    )
