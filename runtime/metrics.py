"""When the certificates of this runtime end, in Prometheus' text format.

Rule: no label holds anybody's name, so that whoever reaches the listener may read the page, as with `/readyz`.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class _Collector:
    def __init__(self, ends: Mapping[str, float], now: float) -> None:
        self._ends = ends
        self._now = now

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "coatcheck_runtime_certificate_ends_in_seconds",
            "Until a certificate ends; negative once it has",
            labels=["source", "number"],
        )
        for source, at in sorted(self._ends.items()):
            family.add_metric([source, "0"], round(at - self._now))
        yield family


def render_metrics(ends: Mapping[str, float], *, now: float) -> bytes:
    """`ends`: by source (`client`: what proves us to the control plane; `listener`), when what is used now ends."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(ends, now))
    return generate_latest(registry)
