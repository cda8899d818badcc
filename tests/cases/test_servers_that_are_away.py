"""The control plane, or its database, is away for a while: warm proxies serve on up to a limit, then say 503 and why.

Documented limit: a proxy that hears nothing for ten seconds uses what it knows for five seconds more at most, where the
credential allows no longer. Never an error that blames the caller, never a request with its placeholder unswapped; and
at work again within five seconds of the return.
"""

import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from tests.support.processes import Proxy, wait_for
from tests.support.replicas import Replicas, replicas
from tests.support.upstream import Upstream, plain
from tests.support.ways import Kind, Way

pytestmark = pytest.mark.long

SILENCE_SECONDS = 10.0
SILENT_AGE_SECONDS = 5.0
LIMIT_SECONDS = SILENCE_SECONDS + SILENT_AGE_SECONDS + 3.0
"""And one heartbeat, which was due when it went."""
AWAY_SECONDS = 22.0
BACK_SECONDS = 5.0
PAUSE_SECONDS = 0.1


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas(tmp_path_factory.mktemp("away"), number=1) as running:
        yield running


@dataclass
class Watch:
    """One client that asks ten times a second, and notes what it gets."""

    way: Way
    seen: list[tuple[float, int, str]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(PAUSE_SECONDS):
            reply = self.way.ask("GET", "/watched", timeout_seconds=20)
            self.seen.append((time.monotonic(), reply.status, reply.refusal))

    def last(self) -> int:
        return self.seen[-1][1] if self.seen else 0


Goes = Callable[[Replicas], Callable[[], object]]
"""Takes something away; what it gives back brings it back."""


def control_plane_killed(stand: Replicas) -> Callable[[], object]:
    stand.deployment.control_plane.kill()
    return lambda: stand.start_again(0)


def control_plane_frozen(stand: Replicas) -> Callable[[], object]:
    """It takes connections, and answers nothing."""
    stand.deployment.control_plane.signal(signal.SIGSTOP)
    return lambda: stand.deployment.control_plane.signal(signal.SIGCONT)


def database_killed(stand: Replicas) -> Callable[[], object]:
    stand.database.kill()
    return stand.database.start


@pytest.mark.parametrize("goes", [control_plane_killed, control_plane_frozen, database_killed])
def test_a_warm_proxy_serves_on_up_to_the_limit_and_then_says_why_not(stand: Replicas, goes: Goes) -> None:
    secret = f"sk-{secrets.token_hex(20)}"
    with Upstream(stand.deployment.upstream_ca) as upstream:
        upstream.on("/watched", plain(b"fine"))
        watch = Watch(warm(stand, upstream, secret))
        with watch:
            wait_for(lambda: watch.last() == 200)
            comes_back = goes(stand)
            gone = time.monotonic()
            cold = cold_proxy(stand)
            wait_for(lambda: time.monotonic() - gone > AWAY_SECONDS, timeout_seconds=AWAY_SECONDS + 5)
            cold_ready = is_ready(cold)
            comes_back()
            back = time.monotonic()
            wait_for(lambda: watch.last() == 200, timeout_seconds=30)
            works_again = time.monotonic() - back
            wait_for(lambda: is_ready(cold), timeout_seconds=30)
            cold_works_again = time.monotonic() - back
            ended = time.monotonic()
        cold.served.stop()
        carried = {request.header("authorization") for request in upstream.seen("/watched")}

    away = [(at - gone, status, refusal) for at, status, refusal in watch.seen if gone < at < back]
    assert {status for at, status, _ in away if at < SILENT_AGE_SECONDS - 1} == {200}
    assert {status for _, status, _ in away} == {200, 503}
    assert max(at for at, status, _ in away if status == 200) <= LIMIT_SECONDS
    assert {refusal for _, status, refusal in away if status == 503} <= {"store_unavailable", "credential_unavailable"}
    assert {status for at, status, _ in watch.seen if back < at < ended} <= {200, 503}
    assert carried == {f"Bearer {secret}"}
    assert not cold_ready
    assert works_again <= BACK_SECONDS
    assert cold_works_again <= BACK_SECONDS + 3


def warm(stand: Replicas, upstream: Upstream, secret: str) -> Way:
    workspace = stand.deployment.workspace()
    workspace.credential("api", url=upstream.url, secret=secret)
    ticket, context = workspace.ticket("api"), stand.deployment.client_context()
    return Way(Kind.REVERSE, ticket, upstream.authority, "api", stand.deployment.proxy, context)


def cold_proxy(stand: Replicas) -> Proxy:
    """One that starts while it cannot ask."""
    deployment = stand.deployment
    waits, deployment.proxies = deployment.proxies, []
    try:
        return deployment.start_cold_proxy()
    finally:
        deployment.proxies = waits


def is_ready(proxy: Proxy) -> bool:
    try:
        return proxy.is_ready()
    except httpx.HTTPError:
        return False
