"""Events arrive when they were written, pings too, and a stream that says nothing for long is not cut."""

import threading
import time

import pytest

from egress_proxy.config import Settings
from tests.support.processes import Deployment, Workspace
from tests.support.upstream import Gate, Request, Upstream, Wire, chunk, gated
from tests.support.ways import Kind, Way

DELAY_SECONDS = 0.25
THINKING_SECONDS = 360
EVENTS = [
    b"event: message_start\ndata: {}\n\n",
    b'data: {"delta": "Hel"}\n\n',
    b"event: ping\ndata: {}\n\n",
    b'data: {"delta": "lo"}\n\n',
    b": comment\n\n",
    b"event: ping\ndata: {}\n\n",
    b'id: 7\ndata: {"delta": " world"}\n\n',
    b"retry: 1000\n\n",
    b'data: {"delta": "."}\n\n',
    b"event: message_stop\ndata: {}\n\n",
]
HEADS = {
    "chunked": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    "without a length": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("framing", HEADS)
def test_each_small_event_arrives_at_once_and_as_it_was_written(through: Way, upstream: Upstream, framing: str) -> None:
    """Token streams came in one lump at the end; pings were swallowed, so that clients gave up."""
    gates = [Gate() for _ in EVENTS]

    async def streams(_: Request, wire: Wire) -> None:
        await wire.write(HEADS[framing])
        for gate, event in zip(gates, EVENTS, strict=True):
            await gate.opened()
            await wire.write(chunk(event) if framing == "chunked" else event)
        await wire.write(b"0\r\n\r\n" if framing == "chunked" else b"")
        await wire.close()

    upstream.on("/stream", streams)
    delays = []
    with through.open() as line:
        line.send(through.request("GET", "/stream"))
        line.read_until(b"\r\n\r\n")
        for gate, event in zip(gates, EVENTS, strict=True):
            written = time.monotonic()
            gate.open()
            # In a chunk of its own: nothing of it was held back, and nothing else waited for it.
            assert line.read_until(chunk(event)) == chunk(event)
            delays.append(time.monotonic() - written)
        assert line.read_until(b"\r\n\r\n") == b"0\r\n\r\n"

    assert max(delays) <= DELAY_SECONDS


def test_a_silent_stream_is_cut_by_none_of_the_defaults(deployment: Deployment, workspace: Workspace) -> None:
    """A model that thought for minutes lost its stream. Every limit but that of silence is far exceeded here; that one
    is longer than any model is known to think."""
    gate = Gate()
    proxy = deployment.start_proxy(
        HEADER_TIMEOUT_SECONDS="0.4",
        IDLE_TIMEOUT_SECONDS="0.4",
        UPSTREAM_IDLE_SECONDS="0.4",
        CONNECT_TIMEOUT_SECONDS="1",
    )
    try:
        with Upstream(deployment.upstream_ca) as upstream:
            head = HEADS["chunked"] + chunk(EVENTS[0])
            upstream.on("/stream", gated(head, gate, chunk(EVENTS[-1]) + b"0\r\n\r\n"))
            workspace.credential("api", url=upstream.url, secret="sk-" + "z" * 40)
            ticket, context = workspace.ticket("api"), deployment.client_context()
            way = Way(Kind.TUNNEL, ticket, upstream.authority, "api", proxy, context)
            with way.open() as line:
                line.send(way.request("GET", "/stream"))
                line.read_until(EVENTS[0])
                threading.Event().wait(2.5)
                gate.open()
                last = line.read_until(b"0\r\n\r\n")
    finally:
        deployment.proxies.remove(proxy)
        proxy.served.stop()

    assert EVENTS[-1] in last
    assert Settings.model_fields["silence_timeout_seconds"].default > THINKING_SECONDS
