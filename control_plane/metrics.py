"""Counts and levels, for `/metrics` (Prometheus' text format).

Rule: requests add to plain numbers; Prometheus' own objects are made when somebody scrapes. No label holds anything
that a tenant, a client or a request chose: routes are those of the API, codes and outcomes come from closed lists,
key-encryption keys are the few that the settings name, by fingerprint.
What the database says is asked once a scrape, and a database that is away is a level, not an error.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.contract.wire import QuotaAnswer, QuotaRequest
from control_plane.ports import AGES, Clock, CrossTenantReason, Figures, PlatformScope, Store

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "coatcheck_control_plane_"
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CODES: Final = frozenset(code.value for code in RefusalCode)


@dataclass(slots=True)
class _Timing:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    seconds: float = 0.0


class Stream(Protocol):
    @property
    def sequence(self) -> int | None:
        """What it has come to."""
        ...


@dataclass(slots=True)
class Counters:
    """One process's counts since its start."""

    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By method, route and status class."""
    timings: dict[str, _Timing] = field(default_factory=dict)
    """By route."""
    refusals: Counter[str] = field(default_factory=Counter)
    resolves: Counter[str] = field(default_factory=Counter)
    """By outcome: answered, or the code of what the proxy was told."""
    quota_granted: int = 0
    quota_used_up: int = 0
    streams: set[Stream] = field(default_factory=set)
    """The event streams that are open."""

    def request(self, *, method: str, route: str, status: int, refusal: str | None, seconds: float) -> None:
        """`route` is a template of the API, or empty."""
        name = route or "other"
        self.requests[method if method in _METHODS else "other", name, f"{status // 100}xx"] += 1
        timing = self.timings.get(name)
        if timing is None:
            timing = self.timings[name] = _Timing()
        timing.counts[bisect_left(BUCKETS, seconds)] += 1
        timing.seconds += seconds
        if refusal in _CODES:
            self.refusals[refusal] += 1

    def quotas(self, asked: QuotaRequest, answer: QuotaAnswer) -> None:
        wanted = {(entry.limit_id, entry.bucket) for entry in asked.entries if entry.wanted}
        for grant in answer.grants:
            self.quota_granted += grant.granted
            if grant.exists and not grant.granted and (grant.limit_id, grant.bucket) in wanted:
                self.quota_used_up += 1


@dataclass(frozen=True, slots=True)
class Gauges:
    """What other parts count by themselves."""

    alarms: Callable[[], Mapping[str, int]]
    hooks_told: Callable[[], int]
    hooks_given_up: Callable[[], int]
    chains_truncated: Callable[[], int]
    trail_failures: Callable[[], int]
    trail_owed: Callable[[], int]
    keks: Callable[[], Sequence[str]]
    """Ids of the ring, the one that seals first."""


class Metrics:
    def __init__(self, store: Store, counters: Counters, gauges: Gauges, *, clock: Clock, version: str) -> None:
        self._store = store
        self._counters = counters
        self._gauges = gauges
        self._clock = clock
        self._version = version

    async def page(self) -> bytes:
        """Also where the database is away."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self._counters, self._gauges, await self._figures(), self._version, self._clock()))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        return generate_latest(registry)

    async def _figures(self) -> Figures | None:
        try:
            async with self._store.read(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
                return await records.figures(now=self._clock())
        except RefusedError:
            return None


class _Collector:
    def __init__(self, counters: Counters, gauges: Gauges, figures: Figures | None, version: str, now: float) -> None:
        self._counters = counters
        self._gauges = gauges
        self._figures = figures
        self._version = version
        self._now = now

    def collect(self) -> Iterator[Metric]:
        yield from self._of_requests()
        yield from self._of_parts()
        yield from self._of_database()

    def _of_requests(self) -> Iterator[Metric]:
        c = self._counters
        requests = CounterMetricFamily(f"{PREFIX}requests", "Requests", labels=["method", "route", "status"])
        for labels, number in sorted(c.requests.items()):
            requests.add_metric(labels, number)
        yield requests
        seconds = HistogramMetricFamily(f"{PREFIX}request_seconds", "From a request to its answer", labels=["route"])
        for route, timing in sorted(c.timings.items()):
            seconds.add_metric([route], _cumulated(timing.counts), timing.seconds)
        yield seconds
        yield _by_label("refusals", "Requests refused", "code", c.refusals)
        yield _by_label("resolves", "Questions of proxies", "outcome", c.resolves)
        yield _count("quota_granted", "Units of limits given out to proxies", c.quota_granted)
        yield _count("quota_used_up", "Questions about a limit of which nothing was left", c.quota_used_up)
        yield _level("event_streams", "Proxies that follow the events now", len(c.streams))
        yield _level("tasks", "Tasks of the event loop now", len(asyncio.all_tasks()))

    def _of_parts(self) -> Iterator[Metric]:
        g = self._gauges
        build = GaugeMetricFamily(f"{PREFIX}build", "Which release this is", labels=["version"])
        build.add_metric([self._version], 1)
        yield build
        yield _by_label("alarms", "Alarms raised", "kind", g.alarms())
        yield _count("alarm_hooks_told", "Alarms that a hook has taken", g.hooks_told())
        yield _count("alarm_hooks_given_up", "Alarms that a hook did not take, given up", g.hooks_given_up())
        yield _count("audit_failures", "Events that the trail did not take when they happened", g.trail_failures())
        yield _level("audit_events_owed", "Events that the trail has still to take", g.trail_owed())
        yield _count("audit_chains_truncated", "Chains that were found shorter than before", g.chains_truncated())

    def _of_database(self) -> Iterator[Metric]:
        figures = self._figures
        yield _level("store_up", "Whether the database answers", float(figures is not None))
        if figures is None:
            return
        told = [stream.sequence for stream in self._counters.streams if stream.sequence is not None]
        slowest = min(told, default=figures.outbox_sequence)
        lag = max(0, figures.outbox_sequence - slowest)
        waited = max(0.0, self._now - figures.unchained_since) if figures.unchained_since is not None else 0.0
        for name, help_text, level in (
            ("outbox_sequence", "The newest change", figures.outbox_sequence),
            ("outbox_lag_changes", "Changes that the slowest event stream here has not been told", lag),
            ("audit_unchained_events", "Events in no signed batch yet", figures.unchained_events),
            ("audit_unchained_seconds", "How long the oldest of them waits", waited),
            ("tenants", "Tenants", figures.tenants),
            ("credentials", "Credentials", figures.credentials),
            ("credentials_due", "Credentials whose scheduled rotation is due", figures.credentials_due),
            ("credentials_reminded", "Credentials past the reminder of their schedule", figures.credentials_reminded),
            ("credential_oldest_seconds", "How old the oldest version in use is", figures.oldest_seconds),
            ("alarm_deliveries_open", "Alarms that hooks have not been told yet", figures.deliveries_open),
        ):
            yield _level(name, help_text, level)
        ages = zip((*map(str, AGES), "+Inf"), map(float, (*figures.ages, figures.in_use)), strict=True)
        age = HistogramMetricFamily(f"{PREFIX}credential_age_seconds", "How old the versions in use are")
        age.add_metric([], list(ages), figures.ages_seconds)
        yield age
        yield self._envelopes(figures.envelopes)

    def _envelopes(self, envelopes: Mapping[str, int]) -> Metric:
        """Also of keys under which there is nothing any more: one that may be retired is a zero, not a gap."""
        ring = self._gauges.keks()
        family = GaugeMetricFamily(
            f"{PREFIX}envelopes", "Envelopes under each key-encryption key", labels=["kek", "state"]
        )
        for kek in dict.fromkeys((*ring, *sorted(envelopes))):
            state = "missing" if kek not in ring else "seals" if kek == ring[0] else "opens"
            family.add_metric([kek, state], envelopes.get(kek, 0))
        return family


def _cumulated(counts: list[int]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip((*BUCKETS, float("inf")), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
    return buckets


def _count(name: str, help_text: str, number: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}{name}", help_text, value=number)


def _level(name: str, help_text: str, level: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}{name}", help_text, value=level)


def _by_label(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{PREFIX}{name}", help_text, labels=[label])
    for value, number in sorted(counts.items()):
        family.add_metric([value], number)
    return family
