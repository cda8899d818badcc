"""What operators and platforms do to running processes: stop them, pause them, ask how they are."""

import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.support.api import Ticket
from tests.support.processes import Deployment, Proxy, Workspace, wait_for
from tests.support.raw_client import dial
from tests.support.upstream import Gate, Upstream, chunk, gated, plain
from tests.support.ways import Kind, Way, way

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def own_proxy(deployment: Deployment) -> Iterator[Proxy]:
    """A proxy that the test may stop."""
    proxy = deployment.start_proxy()
    yield proxy
    proxy.served.stop()
    deployment.proxies.remove(proxy)


def test_a_proxy_told_to_stop_lets_streams_finish_and_takes_nothing_new(
    deployment: Deployment, upstream: Upstream, ticket: Ticket, own_proxy: Proxy, kind: Kind
) -> None:
    gate = Gate()
    upstream.on(
        "/stream", gated(STREAM_HEAD + chunk(b"data: first\n\n"), gate, chunk(b"data: last\n\n") + b"0\r\n\r\n")
    )
    through = Way(kind, ticket, upstream.authority, "api", own_proxy, deployment.client_context())
    with through.open() as line:
        line.send(through.request("GET", "/stream"))
        line.read_until(b"data: first\n\n")

        own_proxy.served.signal(signal.SIGTERM)

        wait_for(lambda: not takes_connections(own_proxy))
        gate.open()
        assert b"data: last" in line.read_until(b"0\r\n\r\n")
    assert own_proxy.served.wait() == 0


def takes_connections(proxy: Proxy) -> bool:
    try:
        dial(proxy.forward_port).close()
    except ConnectionError:
        return False
    return True


def test_a_warm_proxy_serves_while_the_control_plane_does_not_answer(
    deployment: Deployment, workspace: Workspace, upstream: Upstream, ticket: Ticket, secret: str, kind: Kind
) -> None:
    upstream.default = plain(b"ok")
    through = way(workspace, upstream, ticket, kind)
    assert through.ask("GET", "/warm").status == 200

    deployment.control_plane.signal(signal.SIGSTOP)
    try:
        during = [through.ask("GET", "/during").status for _ in range(3)]
        ready = deployment.proxy.is_ready()
    finally:
        deployment.control_plane.signal(signal.SIGCONT)

    assert during == [200] * 3
    assert ready, "a blip of the control plane does not take every proxy out"
    assert {seen.header("authorization") for seen in upstream.seen("/during")} == {f"Bearer {secret}"}


def test_health_and_metrics_answer_on_the_admin_listener_alone(deployment: Deployment) -> None:
    proxy = deployment.proxy
    answers = {
        path: httpx.get(f"http://127.0.0.1:{proxy.admin_port}{path}", trust_env=False)
        for path in ("/healthz", "/readyz", "/metrics")
    }
    elsewhere = httpx.get(f"http://127.0.0.1:{proxy.reverse_port}/metrics", trust_env=False)

    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(answers, 200)
    assert "# TYPE" in answers["/metrics"].text
    assert elsewhere.status_code == 401


def test_the_control_plane_says_that_it_is_alive_and_ready(deployment: Deployment) -> None:
    statuses = [
        httpx.get(f"{deployment.api.url}/{path}", trust_env=False).status_code for path in ("healthz", "readyz")
    ]

    assert statuses == [200, 200]
