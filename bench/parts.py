"""The parts of the measurement beside the table of requests: each is one figure, or a few, of this proxy and its peers.

Like the table they are measured in rounds, contestants in turn; a ratio is taken inside a round, and the median counts.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from rich.console import Console

from bench import idle, peers
from bench.contestants import (
    EVENTS,
    FORWARD_TLS,
    REVERSE,
    TLS,
    Contestant,
    Origin,
    Way,
    pin_control_plane,
    start_proxy,
    through,
)
from bench.download import cpu_seconds_per_gigabyte, write_download
from bench.driver import drive, read_events
from bench.load import Plan, prove
from bench.measures import Measure
from bench.origin import DOWNLOAD_PATH, OPEN_DOWNLOAD_PATH, UPLOAD_PATH
from bench.placeholders import microseconds_of_a_decision
from tests.support.processes import Deployment, Proxy

T = TypeVar("T")

FIELD_COUNTS: Final = (11, 17, 50, 100)
FIELDS_OF_A_GET: Final = 11
BODY_SIZES: Final = {"1 KiB": 1 << 10, "16 KiB": 1 << 14, "64 KiB": 1 << 16, "1 MiB": 1 << 20}
PLACEHOLDER_COUNTS: Final = (1_000, 10_000, 100_000)
ASKED_FIRST: Final = 16
"""Connections, so that no worker is left out."""
BALANCED_OVER: Final = 400
"""Connections."""


@dataclass(frozen=True, slots=True)
class Field:
    """All that runs, and how long to measure it."""

    contestants: dict[str, Contestant]
    deployment: Deployment
    origin: Origin
    rounds: int
    seconds: float
    connections: int
    console: Console

    def ways(self, name: str) -> dict[str, Way]:
        """Of every contestant that has it."""
        return {found.name: found.ways[name] for found in self.contestants.values() if name in found.ways}

    def in_turn(self, names: Sequence[str], measure: Callable[[str], T], *, rounds: int = 0) -> dict[str, list[T]]:
        """Each of them once a round, beginning with another one each time."""
        found: dict[str, list[T]] = {name: [] for name in names}
        for number in range(rounds or self.rounds):
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                found[name].append(measure(name))
        return found


def one_connection(field: Field) -> list[Measure]:
    """What a hop costs where nothing else goes on."""
    ways = {name: way for name, way in field.ways(REVERSE).items() if name != "mitmproxy"}
    seconds = field.seconds / 2

    def p50(name: str) -> float:
        plan = ways[name].get()
        return drive(plan, name=name, connections=1, seconds=seconds, warm_up_seconds=0.1).p50_microseconds

    found = field.in_turn(list(ways), p50)
    return _ratios("p50 of one connection", found, "µs", "one connection")


def events(field: Field) -> list[Measure]:
    """What a proxy adds to an event of a stream, over none at all."""
    ways = field.ways(EVENTS)
    found = field.in_turn(
        list(ways), lambda name: read_events(ways[name].get("/v1/events"), name=name).p50_microseconds
    )
    added = {
        name: statistics.median(mine - none for mine, none in zip(delays, found["direct"], strict=True))
        for name, delays in found.items()
        if name != "direct"
    }
    others = ", ".join(f"{name} {value:.0f}" for name, value in added.items() if name != "this proxy")
    measures = [Measure("p50 added to an event, 2,000 a second", added["this proxy"], "µs", "events", others)]
    if "nginx" in added:
        beyond = added["this proxy"] - added["nginx"]
        measures.append(Measure("p50 added to an event beyond nginx's", beyond, "µs", "events"))
    return measures


def download(field: Field) -> list[Measure]:
    """A gigabyte, forwarded as it comes, and searched for every form of a key."""
    write_download(field.origin.folder / "download")
    ours, nginx = field.ways(REVERSE)["this proxy"], field.ways(REVERSE).get("nginx")
    plans = {
        "searched": ours.get(DOWNLOAD_PATH),
        "as it comes": ours.get(OPEN_DOWNLOAD_PATH, is_bare=True),
    } | ({"nginx": nginx.get(DOWNLOAD_PATH)} if nginx else {})
    found = field.in_turn(list(plans), lambda name: cpu_seconds_per_gigabyte(plans[name]), rounds=min(3, field.rounds))
    return [
        measure
        for kind, name in (("searched", "that is searched"), ("as it comes", "that is not searched"))
        for measure in _ratios(f"CPU of a download {name}", found, "s/GB", "download", ours=kind, of=("nginx",))
    ]


def memory(field: Field) -> list[Measure]:
    """What a kept-alive connection costs that says nothing. Each in processes that nothing else was measured on."""
    measures = []
    for name, label in ((REVERSE, "clear"), (TLS, "TLS"), (FORWARD_TLS, "TLS inside CONNECT")):
        kibibytes = {}
        for peer, start in (("nginx", peers.nginx), ("haproxy", peers.haproxy)):
            with ExitStack() as stack:
                contestant = start(stack, field.origin)
                if contestant is not None and name in contestant.ways:
                    kibibytes[peer] = idle.kibibytes_a_connection(contestant.ways[name])
        with _further_proxy(field, field.ways(name)["this proxy"], is_tls=name == TLS) as (way, _):
            ours = idle.kibibytes_a_connection(way)
        beside = ", ".join(f"{peer} {value:.1f}" for peer, value in kibibytes.items())
        measures.append(Measure(f"memory of an idle connection, {label}", ours, "KiB", "memory", beside))
    return measures


def workers(field: Field) -> list[Measure]:
    """Whether a second process costs anything, and gets its share. Both are on the proxy's core."""
    way = field.ways(REVERSE)["this proxy"]
    with _further_proxy(field, way) as (one, _), _further_proxy(field, way, workers="2") as (two, proxy):
        found = _cpu(field, {"one worker": one.get(), "two workers": two.get()})
        share = idle.share_of_the_busiest(two, proxy.served.pids(), connections=BALANCED_OVER)
    single, both = found["one worker"], found["two workers"]
    ratio = statistics.median(its / mine for its, mine in zip(single, both, strict=True))
    detail = f"{statistics.median(both):.3g} and {statistics.median(single):.3g} µs a request"
    return [
        Measure("requests a CPU second, two workers ÷ one", ratio, "×", "workers", detail),
        Measure("the busier of two workers", 100 * share, "%", "workers", f"of {BALANCED_OVER} connections"),
    ]


def headers(field: Field) -> list[Measure]:
    """What a request costs as its head grows."""
    ways = {name: way for name, way in field.ways(REVERSE).items() if name in ("this proxy", "nginx")}
    measures = []
    for count in FIELD_COUNTS:
        more = "".join(
            f"X-Field-{number:03}: a value of about this length\r\n" for number in range(count - FIELDS_OF_A_GET)
        )
        found = _cpu(field, {name: way.get(more=more) for name, way in ways.items()})
        measures += _ratios(f"CPU of a request with {count} fields", found, "µs", "headers", of=("nginx",))
    return measures


def bodies(field: Field) -> list[Measure]:
    """What a request costs as its body grows."""
    ways = {name: way for name, way in field.ways(REVERSE).items() if name in ("this proxy", "nginx")}
    measures = []
    for label, size in BODY_SIZES.items():
        found = _cpu(field, {name: way.post(size, path=UPLOAD_PATH) for name, way in ways.items()})
        measures += _ratios(f"CPU of a request with a body of {label}", found, "µs", "bodies", of=("nginx",))
    return measures


def placeholders(field: Field) -> list[Measure]:
    """What deciding anew costs as the cache fills up: the decision and the cache alone, in this process."""
    return [
        Measure(
            f"a decision with {count:,} placeholders cached", microseconds_of_a_decision(count), "µs", "placeholders"
        )
        for count in PLACEHOLDER_COUNTS
    ]


PARTS: Final[dict[str, Callable[[Field], list[Measure]]]] = {
    "one connection": one_connection,
    "events": events,
    "download": download,
    "memory": memory,
    "workers": workers,
    "headers": headers,
    "bodies": bodies,
    "placeholders": placeholders,
}


@contextmanager
def _further_proxy(field: Field, way: Way, *, workers: str = "1", is_tls: bool = False) -> Iterator[tuple[Way, Proxy]]:
    """Another process of this proxy, and the same way through it; every worker of it knows the placeholder."""
    pin_control_plane(field.deployment, os.SCHED_OTHER)
    proxy = start_proxy(field.deployment, field.origin, workers=workers, is_tls=is_tls)
    found = through(proxy, way)
    for _ in range(ASKED_FIRST):
        prove(found.get())
    pin_control_plane(field.deployment, os.SCHED_IDLE)
    try:
        yield found, proxy
    finally:
        field.deployment.proxies.remove(proxy)
        proxy.served.stop()


def _cpu(field: Field, plans: dict[str, Plan]) -> dict[str, list[float]]:
    return field.in_turn(
        list(plans),
        lambda name: (
            drive(
                plans[name], name=name, connections=field.connections, seconds=field.seconds / 2
            ).cpu_microseconds_per_request
        ),
        rounds=min(3, field.rounds),
    )


def _ratios(
    what: str,
    found: dict[str, list[float]],
    unit: str,
    part: str,
    *,
    ours: str = "this proxy",
    of: Sequence[str] = ("nginx", "haproxy", "Envoy"),
) -> list[Measure]:
    """To each of `of` that was measured."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    return [
        Measure(
            f"{what} ÷ {other}",
            statistics.median(mine / its for mine, its in zip(found[ours], found[other], strict=True)),
            "×",
            part,
            f"{medians[ours]:.3g} and {medians[other]:.3g} {unit}",
        )
        for other in of
        if other in found
    ]
