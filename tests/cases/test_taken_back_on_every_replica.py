"""What is taken back at one replica stops working at all of them, while the load goes on, and never works again.

Two replicas, a proxy before each, fifty requests a second with one placeholder over both. Documented bound: with push,
at once; in any case within five seconds.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from tests.support.processes import Workspace
from tests.support.raw_client import Line
from tests.support.replicas import Replicas, replicas
from tests.support.upstream import Gate, Upstream, chunk, gated, plain
from tests.support.ways import Kind, Way

pytestmark = pytest.mark.long

BOUND_SECONDS = 5.0
REQUESTS_A_SECOND = 50
BEFORE_SECONDS = 1.0
AFTER_SECONDS = 6.0
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with replicas(tmp_path_factory.mktemp("replicas")) as running:
        yield running


@dataclass
class Load:
    """One client after another through every proxy, at a steady pace."""

    ways: list[Way]
    seen: list[tuple[float, int, int]] = field(default_factory=list)
    """When it was answered, by which proxy, with which status."""
    _over: threading.Event = field(default_factory=threading.Event)

    def _run(self, number: int, pause: float) -> None:
        turn = time.monotonic()
        while not self._over.is_set():
            status = self.ways[number].ask("GET", "/load").status
            self.seen.append((time.monotonic(), number, status))
            turn += pause
            self._over.wait(max(0.0, turn - time.monotonic()))

    def start(self) -> list[threading.Thread]:
        clients = 4 * len(self.ways)
        threads = [
            threading.Thread(target=self._run, args=(index % len(self.ways), clients / REQUESTS_A_SECOND), daemon=True)
            for index in range(clients)
        ]
        for thread in threads:
            thread.start()
        return threads

    def stop(self, threads: list[threading.Thread]) -> None:
        self._over.set()
        for thread in threads:
            thread.join(20)


TakeBack = Callable[[Replicas, Workspace, Way], object]

TAKEN_BACK: dict[str, TakeBack] = {
    "the placeholder revoked": lambda r, w, way: r.apis[0].ask(
        "DELETE", f"/v1/tenants/{w.tenant}/placeholders/{way.ticket.id}"
    ),
    "the credential deleted": lambda r, w, way: r.apis[0].ask("DELETE", f"/v1/tenants/{w.tenant}/credentials/api"),
    "the credential narrowed": lambda r, w, way: r.apis[0].ask(
        "PATCH",
        f"/v1/tenants/{w.tenant}/credentials/api",
        {"destinations": [{"url": f"https://{way.authority}/elsewhere", "allow_private": True}]},
    ),
    "the grant removed": lambda r, w, way: [
        r.apis[0].ask("DELETE", f"/v1/tenants/{w.tenant}/grants/{grant['id']}")
        for grant in r.apis[0].ask("GET", f"/v1/tenants/{w.tenant}/grants")["items"]
    ],
    "the session ended": lambda r, w, way: r.apis[0].ask("DELETE", f"/v1/sessions/{way.ticket.answer['session_id']}"),
    "the tenant deleted": lambda r, w, way: r.apis[0].ask("DELETE", f"/v1/tenants/{w.tenant}?confirm={w.tenant}"),
}


@pytest.mark.parametrize("what", TAKEN_BACK)
def test_no_success_after_the_bound_on_any_replica(stand: Replicas, what: str) -> None:
    workspace = stand.deployment.workspace()
    gate = Gate()
    with Upstream(stand.deployment.upstream_ca) as upstream, ExitStack() as open_streams:
        upstream.on("/load", plain(b"fine"))
        upstream.on("/stream", gated(STREAM_HEAD + chunk(b"data: first\n\n"), gate, chunk(b"data: last\n\n")))
        workspace.credential("api", url=upstream.url, secret=f"sk-{secrets.token_hex(20)}")
        ticket, context = workspace.ticket("api"), stand.deployment.client_context()
        ways = [Way(Kind.REVERSE, ticket, upstream.authority, "api", proxy, context) for proxy in stand.proxies]
        streams = [opened(way, open_streams) for way in ways]
        load = Load(ways)

        threads = load.start()
        time.sleep(BEFORE_SECONDS)
        TAKEN_BACK[what](stand, workspace, ways[0])
        taken_back = time.monotonic()
        cut = [seconds_until_the_end(stream, taken_back) for stream in streams]
        time.sleep(max(0.0, taken_back + AFTER_SECONDS - time.monotonic()))
        load.stop(threads)
        gate.open()

    before = {(number, status) for at, number, status in load.seen if at < taken_back}
    late = [(at - taken_back, number) for at, number, status in load.seen if status == 200 and at > taken_back]
    assert before == {(number, 200) for number in range(len(ways))}, "each proxy let everything through before"
    assert max((after for after, _ in late), default=0.0) <= BOUND_SECONDS, late[-3:]
    refused = {status for at, _, status in load.seen if at > taken_back + BOUND_SECONDS}
    assert refused <= {401, 403, 404, 407}, refused
    assert max(cut) <= BOUND_SECONDS, cut


def opened(way: Way, stack: ExitStack) -> Line:
    line = stack.enter_context(way.open())
    line.send(way.request("GET", "/stream"))
    line.read_until(b"data: first")
    return line


def seconds_until_the_end(stream: Line, since: float) -> float:
    """When the proxy closed an open stream."""
    with contextlib.suppress(ConnectionError):
        stream.read_to_end()
    return time.monotonic() - since
