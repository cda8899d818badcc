"""Counts, for `/metrics`.

Rule: the hot path adds to plain integers; Prometheus' own objects are made when somebody scrapes. No label holds
anything a tenant, a client or an upstream chose: codes, modes and outcomes come from closed lists.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CERTIFICATE_SECONDS: Final = "certificate_ends_in_seconds"


@dataclass(slots=True)
class Counters:
    """One worker's counts since its start."""

    connections: int = 0
    connections_refused: int = 0
    """Because there were as many as are taken."""
    tunnels: int = 0
    swaps: int = 0
    forwards: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    replies: list[int] = field(default_factory=lambda: [0] * 10)
    """By status class, the first digit."""
    broken: int = 0
    """Exchanges that ended in the middle of a reply."""
    client_gone: int = 0
    secrets_scrubbed: int = 0
    upstream_connections: int = 0
    upstream_reuses: int = 0
    retries: int = 0
    streams_cut: int = 0
    resolves: Counter[str] = field(default_factory=Counter)
    """By outcome: answered, refused, failed."""
    cache_drops: int = 0
    swap_probes_failed: int = 0
    certificate_reloads: Counter[str] = field(default_factory=Counter)
    """By outcome: adopted, refused."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is looked up when somebody scrapes."""

    open_clients: Callable[[], int]
    open_exchanges: Callable[[], int]
    open_upstreams: Callable[[], int]
    spooled_events: Callable[[], int]
    dropped_events: Callable[[], int]
    cache_entries: Callable[[], int]
    control_plane_silence_seconds: Callable[[], float]
    tasks: Callable[[], int]
    is_ready: Callable[[], bool]
    certificates: Callable[[], Sequence[tuple[str, int, float]]] = tuple
    """(source, number, seconds until it ends)."""


class _Collector:
    def __init__(self, counters: Counters, gauges: Gauges) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        c, g = self._counters, self._gauges
        for name, help_text, number in (
            ("client_connections", "Client connections accepted", c.connections),
            ("client_connections_refused", "Client connections closed unheard: too many", c.connections_refused),
            ("tunnels", "CONNECT tunnels intercepted", c.tunnels),
            ("swaps", "Requests forwarded with a secret", c.swaps),
            ("forwards", "Requests forwarded without a secret", c.forwards),
            ("broken_replies", "Replies that broke off in the middle", c.broken),
            ("clients_gone", "Clients that left before their reply was complete", c.client_gone),
            ("secrets_scrubbed", "Secrets overwritten in replies", c.secrets_scrubbed),
            ("upstream_connections", "Upstream connections opened", c.upstream_connections),
            ("upstream_reuses", "Requests sent on a pooled upstream connection", c.upstream_reuses),
            ("upstream_retries", "Requests repeated because a pooled connection had died", c.retries),
            ("streams_cut", "Exchanges cut because their authority was revoked", c.streams_cut),
            ("cache_drops", "Times the whole cache was dropped", c.cache_drops),
            ("swap_probes_failed", "Readiness probes whose swap failed", c.swap_probes_failed),
            ("audit_events_dropped", "Audit events lost because the spool was full", g.dropped_events()),
        ):
            yield CounterMetricFamily(f"coatcheck_proxy_{name}", help_text, value=number)
        yield _by_label("refusals", "Requests refused", "code", c.refusals)
        yield _by_label("certificate_reloads", "Changed certificate files read", "outcome", c.certificate_reloads)
        yield _by_label("resolves", "Questions to the control plane", "outcome", c.resolves)
        yield _by_label("replies", "Replies passed on", "class", {f"{k}xx": n for k, n in enumerate(c.replies) if n})
        for name, help_text, level in (
            ("open_client_connections", "Client connections open now", g.open_clients()),
            ("open_exchanges", "Requests being answered now", g.open_exchanges()),
            ("open_upstream_connections", "Upstream connections open now", g.open_upstreams()),
            ("audit_spool_events", "Audit events not yet delivered", g.spooled_events()),
            ("cache_entries", "Answers of the control plane held", g.cache_entries()),
            ("tasks", "Tasks of the event loop now", g.tasks()),
            (
                "control_plane_silence_seconds",
                "Since the event stream was last heard",
                g.control_plane_silence_seconds(),
            ),
            ("ready", "Whether this worker would answer /readyz with 200", float(g.is_ready())),
        ):
            yield GaugeMetricFamily(f"coatcheck_proxy_{name}", help_text, value=level)
        yield _certificates(g.certificates())


def _certificates(seconds_left: Sequence[tuple[str, int, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        f"coatcheck_proxy_{CERTIFICATE_SECONDS}",
        "Until a certificate ends; negative once it has",
        labels=["source", "number"],
    )
    for source, number, seconds in seconds_left:
        family.add_metric([source, str(number)], round(seconds))
    return family


def render_metrics(counters: Counters, gauges: Gauges) -> bytes:
    """In Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(counters, gauges))
    return generate_latest(registry)


def _by_label(name: str, help_text: str, label: str, counts: "dict[str, int] | Counter[str]") -> CounterMetricFamily:
    family = CounterMetricFamily(f"coatcheck_proxy_{name}", help_text, labels=[label])
    for value, number in sorted(counts.items()):
        family.add_metric([value], number)
    return family
