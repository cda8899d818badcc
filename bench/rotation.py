"""`python -m bench.rotation`: how long after a rotation the old key is last used, over three proxies.

Three proxy processes share one control plane; at each a client asks all the time, on a connection that it keeps. A
rotation's time runs from its answer to the moment at which the upstream last saw the old key (0: before the answer).
The median and the 99th percentile of all rotations; the goal is a second. Ends with one line of JSON.
"""

import argparse
import json
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tests.support.processes import Deployment, Proxy, Workspace, start_deployment
from tests.support.upstream import Request, Upstream, Wire, message
from tests.support.ways import Kind, Way

PROXIES: Final = 3
GOAL_SECONDS: Final = 1.0
QUIET_SECONDS: Final = 0.3
"""The old key counts as no longer used when it was not for so long, and every proxy has used the new one."""
PATIENCE_SECONDS: Final = 70.0
PAUSE_SECONDS: Final = 0.002


@dataclass
class Seen:
    """What the upstream saw: for each key, when it was last used and by how many proxies."""

    last: dict[str, float] = field(default_factory=dict)
    by: dict[str, set[str]] = field(default_factory=dict)

    async def note(self, request: Request, wire: Wire) -> None:
        key = request.header("authorization").removeprefix("Bearer ")
        self.last[key] = time.monotonic()
        self.by.setdefault(key, set()).add(request.target)
        await wire.write(message(b"{}"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rotation", description=__doc__)
    parser.add_argument("--rotations", type=int, default=100)
    options = parser.parse_args(arguments)
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="coatcheck-bench-") as folder:
        deployment = start_deployment(Path(folder), log_level="info")
        try:
            took = measured(deployment, options.rotations)
        finally:
            deployment.stop()
    result = summary(took)
    console.print(
        f"a rotation over {PROXIES} proxies, until the old key was last used: median {result['median_ms']:.1f} ms, "
        f"99th percentile {result['p99_ms']:.1f} ms, of {result['rotations']} "
        f"(goal: {GOAL_SECONDS * 1000:.0f} ms: {'met' if result['met'] else 'MISSED'})"
    )
    print(json.dumps({"rotation_to_last_old_use": result}))
    return 0


def measured(deployment: Deployment, rotations: int) -> list[float]:
    """Seconds, one for each rotation."""
    for _ in range(PROXIES - 1):
        deployment.start_proxy()
    seen, stop = Seen(), threading.Event()
    with Upstream(deployment.upstream_ca) as upstream:
        upstream.default = seen.note
        workspace, key = deployment.workspace(), _key()
        workspace.credential("api", url=upstream.url, secret=key)
        asking = [
            threading.Thread(target=_ask, args=(stop, workspace, proxy, number), daemon=True)
            for number, proxy in enumerate(deployment.proxies)
        ]
        for thread in asking:
            thread.start()
        took = []
        for _ in range(rotations):
            _until(partial(_is_used_by_all, seen, key))
            old, key = key, _key()
            deployment.api.rotate(workspace.tenant, "api", secret=key)
            answered = time.monotonic()
            _until(partial(_is_settled, seen, old=old, new=key))
            took.append(max(0.0, seen.last[old] - answered))
        stop.set()
        for thread in asking:
            thread.join(10)
    return took


def summary(took: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(took)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {
        "proxies": PROXIES,
        "rotations": len(ordered),
        "median_ms": statistics.median(ordered) * 1000,
        "p99_ms": p99 * 1000,
        "met": p99 <= GOAL_SECONDS,
    }


def _ask(stop: threading.Event, workspace: Workspace, proxy: Proxy, number: int) -> None:
    """One client at one proxy, which never rests for long."""
    deployment = workspace.deployment
    destination = deployment.api.ask("GET", f"/v1/tenants/{workspace.tenant}/credentials/api")["destinations"][0]["url"]
    way = Way(
        Kind.REVERSE,
        workspace.ticket("api"),
        destination.removeprefix("https://"),
        "api",
        proxy,
        deployment.client_context(),
    )
    with way.open() as line:
        while not stop.wait(PAUSE_SECONDS):
            line.ask(way.request("GET", f"/{number}"))


def _is_used_by_all(seen: Seen, key: str) -> bool:
    return len(seen.by.get(key, ())) == PROXIES


def _is_settled(seen: Seen, *, old: str, new: str) -> bool:
    return _is_used_by_all(seen, new) and time.monotonic() - seen.last[old] > QUIET_SECONDS


def _until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError("a proxy did not take the new key in time")
        time.sleep(0.005)


def _key() -> str:
    return f"sk-bench-{secrets.token_hex(16)}"


if __name__ == "__main__":
    raise SystemExit(main())
