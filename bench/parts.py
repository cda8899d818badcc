"""The parts of the measurement beside the table of requests: each is one figure, or a few, of this proxy and its peers.

Like the table they are measured in rounds, contestants in turn; a ratio is taken inside a round, and the median counts.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from rich.console import Console

from bench import idle, peers
from bench.contestants import (
    EVENTS,
    FORWARD_TLS,
    PROXY_CORE,
    REVERSE,
    SPOOL_EVENTS,
    TLS,
    Contestant,
    Origin,
    Way,
    granted,
    pin,
    reverse_way,
    start_tls_proxy,
    this_proxy,
)
from bench.download import cpu_seconds_per_gigabyte, write_download
from bench.driver import drive, read_events
from bench.load import Plan
from bench.measures import Measure
from bench.origin import DOWNLOAD_PATH, OPEN_DOWNLOAD_PATH
from bench.placeholders import microseconds_of_a_decision
from tests.support.processes import Deployment

T = TypeVar("T")

FIELD_COUNTS: Final = (11, 17, 50, 100)
FIELDS_OF_A_GET: Final = 11
BODY_SIZES: Final = {"1 KiB": 1 << 10, "16 KiB": 1 << 14, "64 KiB": 1 << 16, "1 MiB": 1 << 20}
PLACEHOLDER_COUNTS: Final = (1_000, 10_000, 100_000)
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
    return [Measure("p50 added to an event, 2,000 a second", added["this proxy"], "µs", "events", others)]


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
    found: dict[str, dict[str, float]] = {REVERSE: {}, TLS: {}, FORWARD_TLS: {}}
    for start in (peers.nginx, peers.haproxy, partial(_fresh, field.deployment)):
        for name, kibibytes in found.items():
            with ExitStack() as stack:
                contestant = start(stack, field.origin)
                if contestant is not None and name in contestant.ways:
                    kibibytes[contestant.name] = idle.kibibytes_a_connection(contestant.ways[name])
    labels = {REVERSE: "clear", TLS: "TLS", FORWARD_TLS: "TLS inside CONNECT"}
    return [
        Measure(
            f"memory of an idle connection, {labels[name]}",
            kibibytes["this proxy"],
            "KiB",
            "memory",
            _beside(kibibytes),
        )
        for name, kibibytes in found.items()
    ]


def workers(field: Field) -> list[Measure]:
    """Whether a second process costs anything, and gets its share. Both are on the proxy's core."""
    ticket = granted(
        field.deployment.workspace(), "workers", f"http://localhost:{field.origin.clear_port}", field.origin
    )
    proxies = {
        count: field.deployment.start_proxy(WORKERS=count, AUDIT_SPOOL_EVENTS=SPOOL_EVENTS) for count in ("1", "2")
    }
    for proxy in proxies.values():
        for pid in proxy.served.pids():
            pin(pid, PROXY_CORE)
    ways = {count: reverse_way(proxy, ticket, "workers") for count, proxy in proxies.items()}
    found = field.in_turn(
        list(ways),
        lambda name: (
            1e6
            / drive(
                ways[name].get(), name=f"{name} workers", connections=field.connections, seconds=field.seconds
            ).cpu_microseconds_per_request
        ),
    )
    share = idle.share_of_the_busiest(ways["2"], proxies["2"].served.pids(), connections=BALANCED_OVER)
    for proxy in proxies.values():
        proxy.served.stop()
        field.deployment.proxies.remove(proxy)
    ratio = statistics.median(two / one for two, one in zip(found["2"], found["1"], strict=True))
    rates = f"{statistics.median(found['2']):,.0f} and {statistics.median(found['1']):,.0f}"
    return [
        Measure("requests a CPU second, two workers ÷ one", ratio, "×", "workers", rates),
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
        found = _cpu(field, {name: way.post(size) for name, way in ways.items()})
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


def _fresh(deployment: Deployment, stack: ExitStack, origin: Origin) -> Contestant:
    """This proxy in processes of its own, ended with the stack."""
    proxy, tls_proxy = deployment.start_proxy(AUDIT_SPOOL_EVENTS=SPOOL_EVENTS), start_tls_proxy(deployment, origin)
    for started in (proxy, tls_proxy):
        stack.callback(deployment.proxies.remove, started)
        stack.callback(started.served.stop)
    return this_proxy(deployment, proxy, tls_proxy, origin)


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


def _beside(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in values.items() if name != "this proxy")
