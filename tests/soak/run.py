"""Runs a soak, and judges it: `make soak`.

    python -m tests.soak.run --minutes 30 [--embedded]

Exit status: 1 when anything was wrong, broke inside, or grows.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.soak.faults import Faults
from tests.soak.load import CREDENTIAL, Load
from tests.soak.origin import Origin
from tests.soak.place import Place, place_in
from tests.soak.samples import MEBIBYTE, Bounds, Series, sampled, table
from tests.support.processes import Served

SAMPLES = 120
QUIET_SECONDS = 60.0
"""How long what was a client's may take to go after the client."""
ENOUGH = 0.7
"""Of the requests that nothing is wrong with, this share at least is answered well, faults and all."""
GOOD = ("small, kept alive", "small, in a tunnel", "upload", "upload in chunks", "event stream", "WebSocket")
WARMING_UP = Bounds(descriptors=30, tasks=30, resident_bytes=40 * MEBIBYTE)
"""For runs so short that caches and pools still fill in their second half."""


@dataclass(slots=True)
class Verdict:
    series: list[Series]
    outcomes: Counter[tuple[str, str]]
    done: Counter[str]
    faults: list[str] = field(default_factory=list)

    def shown(self) -> str:
        lines = [table(self.series), "", "clients:"]
        lines += [f"  {name:22}{outcome:32}{count:8}" for (name, outcome), count in sorted(self.outcomes.items())]
        lines += ["faults:", *(f"  {name:54}{count:8}" for name, count in sorted(self.done.items()))]
        lines += ["", *(f"FAULT {fault}" for fault in self.faults)] if self.faults else ["", "held"]
        return "\n".join(lines)


def soak(folder: Path, *, seconds: float, embedded: bool = False, bounds: Bounds | None = None) -> Verdict:
    """The whole of it. `seconds` are those under load."""
    with place_in(folder, embedded=embedded) as place, Origin(place.deployment.upstream_ca) as origin:
        workspace = place.deployment.workspace()
        origin.keys.add("sk-real-first-0123456789abcdef")
        workspace.credential(
            CREDENTIAL, url=origin.url, secret="sk-real-first-0123456789abcdef", destination={"websocket": True}
        )
        load, faults = Load(place, origin, workspace), Faults(place, origin, workspace)
        series = [
            *(Series(f"proxy {number}", proxy.served.pid) for number, proxy in enumerate(place.proxies)),
            *(Series(f"control plane {n}", served.pid) for n, served in enumerate(place.control_planes)),
        ]
        began = time.monotonic()
        _look(place, series, since=began)
        for each in series:
            each.before = each.samples.pop()
        load.start()
        faults.start()
        while (gone := time.monotonic() - began) < seconds:
            time.sleep(min(seconds / SAMPLES, seconds - gone))
            _look(place, series, since=began)
            origin.forget()
        faults.stop()
        load.stop()
        told = bounds or (Bounds() if seconds >= 600 else WARMING_UP)
        _wait_for_quiet(place, series, told, since=began)
        return Verdict(series, load.outcomes, faults.done, _faults(place, origin, load, faults, series, told))


def _look(place: Place, series: Sequence[Series], *, since: float) -> None:
    """One more sample of each process that is still the one it was."""
    shown = [
        *((place.proxy_metrics, proxy, proxy.served, "coatcheck_proxy_tasks") for proxy in place.proxies),
        *(
            (place.control_plane_metrics, number, served, "coatcheck_control_plane_tasks")
            for number, served in enumerate(place.control_planes)
        ),
    ]
    for each, (ask, which, served, metric) in zip(series, shown, strict=True):
        if served.pid != each.pid:
            continue
        try:
            tasks = int(ask(which)[metric])  # type: ignore[operator]
            each.samples.append(sampled(each.pid, tasks=tasks, since=since))
        except (httpx.HTTPError, OSError, KeyError):
            continue  # it was killed, or is silent just now


def _wait_for_quiet(place: Place, series: Sequence[Series], bounds: Bounds, *, since: float) -> None:
    """Until no more is left over than may be, or the time is over."""
    deadline = time.monotonic() + QUIET_SECONDS
    while True:
        _look(place, series, since=since)
        for each in series:
            if each.samples:
                each.after = each.samples.pop()
        if time.monotonic() > deadline or not any("left over" in fault for s in series for fault in s.faults(bounds)):
            return
        time.sleep(1)


def _faults(
    place: Place, origin: Origin, load: Load, faults: Faults, series: Sequence[Series], bounds: Bounds
) -> list[str]:
    restarted = {each.name for each in series if each.pid not in {s.pid for s in _running(place)}}
    found = [fault for each in series if each.name not in restarted for fault in each.faults(bounds)]
    found += load.wrong[:20] + faults.failed[:20]
    if origin.strangers:
        found.append(f"{origin.strangers} requests reached the upstream without a key that was ever good")
    for name in GOOD:
        ended = Counter({outcome: n for (client, outcome), n in load.outcomes.items() if client == name})
        well = sum(ended[outcome] for outcome in ("200", "101", "hung up"))
        if not ended or well < ENOUGH * ended.total():
            found.append(f"{name}: {well} of {ended.total()} went well")
    for proxy in place.proxies:
        shown = place.proxy_metrics(proxy)
        broken = shown.get('coatcheck_proxy_refusals_total{code="internal_error"}', 0)
        if broken:
            found.append(f"{broken:.0f} times the proxy broke inside")
        for level in ("open_client_connections", "open_exchanges"):
            if shown[f"coatcheck_proxy_{level}"]:
                found.append(f"{level} is {shown[f'coatcheck_proxy_{level}']:.0f} without a client")
    found += [f"a traceback in a log: {log[-300:]}" for log in _tracebacks(place)]
    return found


def _running(place: Place) -> list[Served]:
    return [*(proxy.served for proxy in place.proxies), *place.control_planes]


def _tracebacks(place: Place) -> list[str]:
    logs = [*(proxy.served.log for proxy in place.proxies), *(served.log for served in place.control_planes)]
    return [log[log.index("Traceback") :][:2000] for log in logs if "Traceback" in log]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.run", description="A soak of real processes.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--embedded", action="store_true", help="one control plane on SQLite, no Redis")
    arguments = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # the origin's clients leave in the middle, which it is told
    with tempfile.TemporaryDirectory(prefix="coatcheck-soak-") as folder:
        verdict = soak(Path(folder), seconds=arguments.minutes * 60, embedded=arguments.embedded)
    print(verdict.shown(), flush=True)
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
