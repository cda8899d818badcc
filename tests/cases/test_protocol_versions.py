"""The protocol that was agreed on is the one that is spoken; what the proxy lacks ends at once: an alert, or a code."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from tests.support.api import Ticket
from tests.support.processes import Deployment, Workspace
from tests.support.raw_client import Line
from tests.support.upstream import Request, Upstream, Wire, plain
from tests.support.ways import Kind, Way, way

AT_ONCE_SECONDS = 1.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113 §3.4
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
NO_PROTOCOL_IN_COMMON = b"\x15\x03\x03\x00\x02\x02\x78"
OFFERS = {"h2 and http/1.1": ["h2", "http/1.1"], "http/1.1": ["http/1.1"], "nothing": []}


def offering(deployment: Deployment, protocols: Sequence[str]) -> ssl.SSLContext:
    context = deployment.client_context()
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


@pytest.mark.parametrize("offer", OFFERS)
def test_http_1_1_is_agreed_on_and_spoken(
    deployment: Deployment, workspace: Workspace, ticket: Ticket, upstream: Upstream, offer: str
) -> None:
    """A host with a secret was silently spoken to in another protocol than its client had agreed on."""
    upstream.on("/", plain(b"spoken"))
    through = way(workspace, upstream, ticket, Kind.TUNNEL)

    with workspace.connected(ticket, upstream.authority) as line:
        line.start_tls(offering(deployment, OFFERS[offer]), "localhost")
        assert isinstance(line.sock, ssl.SSLSocket)
        agreed = line.sock.selected_alpn_protocol()
        response = line.ask(through.request("GET", "/"))

    assert agreed == ("http/1.1" if OFFERS[offer] else None)
    assert response.body == b"spoken"


def test_a_client_that_speaks_nothing_but_h2_gets_an_alert_at_once(
    deployment: Deployment, workspace: Workspace, ticket: Ticket, upstream: Upstream
) -> None:
    began = time.monotonic()
    with (
        workspace.connected(ticket, upstream.authority) as line,
        pytest.raises(ssl.SSLError) as alert,
    ):
        line.start_tls(offering(deployment, ["h2"]), "localhost")

    assert "no application protocol" in str(alert.value)
    assert time.monotonic() - began < AT_ONCE_SECONDS
    assert upstream.accepted == 0


def test_h2_by_prior_knowledge_inside_a_tunnel_is_refused_with_a_code_and_closed(
    deployment: Deployment, workspace: Workspace, ticket: Ticket, upstream: Upstream
) -> None:
    with workspace.tunnel(ticket, upstream.authority) as line:
        assert_refused_at_once(line)

    assert upstream.requests == []


@pytest.mark.parametrize("listener", ["forward", "reverse"])
def test_h2_by_prior_knowledge_at_a_listener_is_refused_with_a_code_and_closed(
    deployment: Deployment, listener: str
) -> None:
    proxy = deployment.proxy
    port = proxy.forward_port if listener == "forward" else proxy.reverse_port

    with socket.create_connection(("127.0.0.1", port)) as sock:
        assert_refused_at_once(Line(sock))


def assert_refused_at_once(line: Line) -> None:
    began = time.monotonic()
    line.send(PREFACE + SETTINGS)
    response = line.read_response()
    assert (response.status, response.refusal) == (505, "protocol_denied")
    assert line.is_closed_by_peer()
    assert time.monotonic() - began < AT_ONCE_SECONDS


@contextmanager
def alerting() -> Iterator[tuple[str, list[bytes]]]:
    """As h2-only servers do: no protocol in common, so an alert in the place of a ServerHello (RFC 7301 §3.2)."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        seen.append(peer.recv(65536))
                        peer.sendall(NO_PROTOCOL_IN_COMMON)

        threading.Thread(target=serve, daemon=True).start()
        yield f"localhost:{listener.getsockname()[1]}", seen
        listener.shutdown(socket.SHUT_RDWR)


def test_an_upstream_that_speaks_nothing_but_h2_is_a_502_at_once_and_sees_no_secret(
    workspace: Workspace, secret: str, kind: Kind
) -> None:
    with alerting() as (authority, seen):
        workspace.credential("api", url=f"https://{authority}", secret=secret)
        through = way(workspace, authority, workspace.ticket("api"), kind)

        asks = [timed(through) for _ in range(2)]

    assert [status for status, _ in asks] == [502, 502]
    assert max(seconds for _, seconds in asks) < AT_ONCE_SECONDS
    assert all(b"\x08http/1.1" in hello and b"\x02h2" not in hello for hello in seen), "offered is what is spoken"


class _SpeaksFirst(Upstream):
    """Its first bytes are an h2 SETTINGS frame, whatever was agreed on."""

    async def _answer_next(self, wire: Wire) -> bool:
        await wire.write(SETTINGS)
        return await super()._answer_next(wire)


def test_h2_frames_before_any_request_end_the_connection(
    deployment: Deployment, workspace: Workspace, secret: str, kind: Kind
) -> None:
    with _SpeaksFirst(deployment.upstream_ca) as upstream:
        workspace.credential("api", url=upstream.url, secret=secret)
        through = way(workspace, upstream, workspace.ticket("api"), kind)

        status, seconds = timed(through)

    assert status == 502
    assert seconds < AT_ONCE_SECONDS


def timed(through: Way) -> tuple[int, float]:
    with through.open() as line:
        began = time.monotonic()
        return line.ask(through.request("GET", "/")).status, time.monotonic() - began


def test_h2_frames_of_an_upstream_that_agreed_on_nothing_are_a_502(
    workspace: Workspace, ticket: Ticket, upstream: Upstream, kind: Kind
) -> None:
    async def settings(_: Request, wire: Wire) -> None:
        await wire.write(SETTINGS)

    upstream.on("/", settings)
    through = way(workspace, upstream, ticket, kind)

    status, seconds = timed(through)

    assert status == 502
    assert seconds < AT_ONCE_SECONDS
