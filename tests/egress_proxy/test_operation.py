"""Running it: health, metrics, logs, the drain, a process of its own, several workers, TLS on the listeners."""

import asyncio
import json
import os
import resource
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme

from egress_proxy.ca import create_ca
from egress_proxy.config import Settings
from egress_proxy.preamble import preamble
from egress_proxy.probe import SyntheticView, converse
from egress_proxy.workers import summed
from tests.egress_proxy.world import World, get, proof, reverse_path
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import Line, NoReplyError, TunnelRefusedError, dial
from tests.support.upstream import Gate, Upstream, chunk, endless_sse, gated, message, plain


def begin(line: Line, ticket: Ticket, path: str = "/") -> None:
    line.send(get(reverse_path(ticket, path), headers={"Authorization": ticket.bearer}))


# --- health -----------------------------------------------------------------------------------------------------------


def test_a_running_proxy_is_alive_and_ready(world: World) -> None:
    assert world.admin("/healthz")[0] == 200
    assert world.admin("/readyz")[0] == 200
    assert world.admin("/nothing")[0] == 404


@pytest.mark.guards("egress_proxy/bootstrap.py", "if not await probe.works():", "if False:")
def test_a_proxy_that_cannot_swap_is_not_ready_and_says_so_to_clients(
    tmp_path: Path, world: World, upstream: Upstream
) -> None:
    create_ca(tmp_path, now=datetime(2010, 1, 1, tzinfo=UTC))  # has run out since
    ticket = world.ticket(upstream.url)
    settings = {"ca_cert_file": tmp_path / "ca.pem", "ca_key_file": tmp_path / "ca.key"}
    broken = World(tmp_path / "world", world.control_plane, world.upstream_ca)
    with broken.proxy_with(**settings) as broken.thread:
        until(lambda: broken.admin("/readyz") == (503, "the swap does not work\n"))

        with pytest.raises(TunnelRefusedError) as refused:
            broken.connected(ticket, upstream.authority)

    assert (refused.value.response.status, refused.value.response.refusal) == (503, "ca_unavailable")
    assert upstream.accepted == 0


def until(fact: Callable[[], bool], *, timeout_seconds: float = 10) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.guards("egress_proxy/probe.py", "return was_swapped and ", "return ")
async def test_a_probe_that_was_answered_without_a_swap_has_failed(world: World) -> None:
    loop = asyncio.get_running_loop()
    client, proxy_end = socket.socketpair()
    upstream, far_end = socket.socketpair()
    synthetic = SyntheticView()
    secret = synthetic.secret.reveal().encode()

    async def forgetful() -> None:
        """A proxy that passes the request on as it is, and scrubs the reply."""
        for sock in (proxy_end, far_end):
            sock.setblocking(False)
        await loop.sock_sendall(far_end, await loop.sock_recv(proxy_end, 65536))
        reply = await loop.sock_recv(far_end, 65536)
        await loop.sock_sendall(proxy_end, reply.replace(secret, b"*" * len(secret)))

    forwarding = asyncio.create_task(forgetful())
    works = await converse(loop, client, upstream, synthetic)
    await forwarding
    for sock in (client, proxy_end, upstream, far_end):
        sock.close()

    assert not works


def test_the_operators_listener_takes_nothing_but_get_and_head(world: World) -> None:
    with dial(world.admin_port) as line:
        assert line.ask(b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n").status == 405
    with dial(world.admin_port) as line:
        assert line.ask(b"nonsense\r\n\r\n").status == 400


def test_metrics_name_no_tenant_host_or_token(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    with world.reverse() as line:
        line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        line.ask(get(reverse_path(ticket), headers={"Authorization": f"Bearer {world.control_plane.unknown()}"}))

    metrics = world.admin("/metrics")[1]

    assert "coatcheck_proxy_swaps_total" in metrics
    assert 'refusals_total{code="unknown_placeholder"}' in metrics
    for name in (ticket.caller.tenant, "localhost", "coatchk1", "coatprx1", ticket.secret, "alice"):
        assert name not in metrics


def test_samples_of_several_workers_are_summed() -> None:
    text = '# HELP a_total Help\n# TYPE a_total counter\na_total{code="x"} 2.0\na_total{code="y"} 1.0\n'

    total = summed([text, text])

    assert 'a_total{code="x"} 4.0' in total
    assert 'a_total{code="y"} 2.0' in total
    assert total.count("# TYPE") == 1


# --- the drain --------------------------------------------------------------------------------------------------------


@pytest.fixture
def draining(tmp_path: Path, world: World) -> Iterator[World]:
    """A proxy that the test drains."""
    with World.start(tmp_path, world.control_plane, world.upstream_ca, drain_grace_seconds=3) as own:
        yield own


def drain(world: World) -> threading.Thread:
    assert world.thread is not None
    return world.thread.drain()


def test_a_drain_is_not_ready_at_once_and_lets_streams_finish(draining: World, upstream: Upstream) -> None:
    ticket = draining.ticket(upstream.url)
    gate = Gate()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    upstream.default = gated(head + chunk(b"begun\n"), gate, chunk(b"done\n") + b"0\r\n\r\n")

    with draining.reverse() as line, draining.reverse() as idle:
        begin(line, ticket)
        line.read_until(b"begun\n")
        ending = drain(draining)
        assert idle.is_closed_by_peer()

        assert draining.admin("/readyz")[0] == 503
        with pytest.raises((ConnectionRefusedError, NoReplyError, ConnectionResetError)):
            draining.reverse().ask(get(reverse_path(ticket)))
        gate.open()
        assert line.read_until(b"0\r\n\r\n").endswith(b"done\n\r\n0\r\n\r\n")
        assert line.is_closed_by_peer()
    ending.join(2)
    assert not ending.is_alive()


@pytest.mark.guards(
    "egress_proxy/exchange.py",
    "self.closes_client = self.closes_client or self.wants_body or self._client.is_draining",
    "self.closes_client = self.closes_client or self.wants_body",
)
def test_a_reply_that_begins_during_a_drain_says_that_it_closes(draining: World, upstream: Upstream) -> None:
    ticket = draining.ticket(upstream.url)
    gate = Gate()
    upstream.default = gated(b"", gate, message(b"late"))

    with draining.reverse() as line, draining.reverse() as idle:
        begin(line, ticket)
        upstream.wait_for(lambda u: u.requests)
        drain(draining)
        assert idle.is_closed_by_peer()
        gate.open()
        response = line.read_response()

        assert (response.body, response.header("connection")) == (b"late", "close")
        assert line.is_closed_by_peer()


def test_a_stream_without_end_is_cut_when_the_grace_is_over(tmp_path: Path, world: World, upstream: Upstream) -> None:
    upstream.default = endless_sse()
    with World.start(tmp_path, world.control_plane, world.upstream_ca, drain_grace_seconds=0.3) as own:
        ticket = own.ticket(upstream.url)
        with own.reverse() as line:
            begin(line, ticket)
            line.read_until(b"data: 1")
            ending = drain(own)
            rest = line.read_to_end()
            ending.join(3)

            assert not ending.is_alive()
            assert b"\r\n0\r\n\r\n" not in rest
    assert upstream.wait_for(lambda u: not u.open_connections())


# --- a process of its own ---------------------------------------------------------------------------------------------


class Process:
    """`bootstrap.serve` as a process, at debug level, its log kept."""

    def __init__(self, world: World, folder: Path, **settings: str) -> None:
        own = {
            "CONTROL_PLANE_URL": world.control_plane.url,
            "CLIENT_ID": world.control_plane.client_id,
            "CLIENT_SECRET_FILE": str(world.folder / "secret"),
            "FORWARD_LISTEN": "127.0.0.1:0",
            "REVERSE_LISTEN": "127.0.0.1:0",
            "ADMIN_LISTEN": "127.0.0.1:0",
            "CA_CERT_FILE": str(world.folder / "ca.pem"),
            "CA_KEY_FILE": str(world.folder / "ca.key"),
            "UPSTREAM_CA_FILES": str(world.folder / "upstream-ca.pem"),
            "REVERSE_PATH_CREDENTIAL": "true",
            "LOG_LEVEL": "debug",
            "DRAIN_GRACE_SECONDS": "3",
        } | settings
        environment = {f"COATCHECK_PROXY_{name}": value for name, value in own.items()} | {"PATH": os.environ["PATH"]}
        program = (
            "import uvloop; from egress_proxy.bootstrap import serve; "
            "from egress_proxy.config import settings_from_environment; uvloop.run(serve(settings_from_environment()))"
        )
        self.log_file = folder / "proxy.log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=log, stdout=log)
        self.listening = self._listening()

    def _listening(self) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            for row in self.log.splitlines():
                if '"listening"' in row:
                    found: dict[str, Any] = json.loads(row)
                    return found
            time.sleep(0.05)
        raise TimeoutError(self.log)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def admin(self, path: str) -> tuple[int, str]:
        with dial(self.listening["admin_port"]) as line:
            response = line.ask(f"GET {path} HTTP/1.1\r\nHost: admin\r\n\r\n".encode())
            return response.status, response.body.decode()

    def until_ready(self) -> None:
        deadline = time.monotonic() + 20
        while self.admin("/readyz")[0] != 200:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


@pytest.mark.guards("egress_proxy/hardening.py", "    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n", "    pass\n")
def test_a_process_swaps_drains_on_sigterm_and_ends_with_0(tmp_path: Path, world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    with Process(world, tmp_path) as process:
        process.until_ready()
        with dial(process.listening["reverse_port"]) as line:
            response = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        core_limit = resource.prlimit(process.process.pid, resource.RLIMIT_CORE)

        assert response.status == 200
        assert core_limit == (0, 0)
        assert process.stop() == 0


@pytest.mark.guards(
    "egress_proxy/core/decision.py",
    "    if marks:\n        # An altered one",
    "    if False:\n        # An altered one",
)
def test_no_secret_and_no_token_is_in_a_log_at_debug_level(tmp_path: Path, world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    unknown, forged = world.control_plane.unknown(), world.control_plane.forged()
    requests = [
        get(reverse_path(ticket, "/v1"), headers={"Authorization": ticket.bearer}),
        get(reverse_path(ticket, f"/{unknown}?k={unknown}"), headers={"Authorization": f"Bearer {unknown}"}),
        get(reverse_path(ticket, f"/{forged}"), headers={"Authorization": f"Bearer {forged}"}),
        get(f"/~{ticket.proxy_credential}x/api/", headers={"Authorization": ticket.bearer}),
        get(f"/{ticket.credential}/", headers={"Authorization": ticket.bearer, "Cookie": ticket.placeholder}),
        b"GET /" + ticket.placeholder.encode() + b" HTTP/1.1\nHost: x\n\n",
    ]
    with Process(world, tmp_path) as process:
        process.until_ready()
        for request in requests:
            with dial(process.listening["reverse_port"]) as line:
                line.ask(request)
        metrics = process.admin("/metrics")[1]
        command_line = Path(f"/proc/{process.process.pid}/cmdline").read_text()
        process.stop()
        log = process.log

    assert '"refused"' in log
    audit = repr(world.control_plane.audited)
    for token in (ticket.secret, ticket.placeholder, ticket.proxy_credential, unknown, forged):
        for place in (log, metrics, command_line, audit):
            assert token not in place
    assert world.control_plane.client_secret not in log


def test_several_workers_share_the_ports_and_one_operators_listener(
    tmp_path: Path, world: World, upstream: Upstream
) -> None:
    upstream.default = plain(b"ok")
    with Process(world, tmp_path, WORKERS="2") as process:
        process.until_ready()
        tickets = [world.ticket(upstream.url) for _ in range(12)]
        for ticket in tickets:
            with dial(process.listening["reverse_port"]) as line:
                assert line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer})).status == 200
        metrics = process.admin("/metrics")[1]

        assert "coatcheck_proxy_swaps_total 12.0" in metrics
        assert "coatcheck_proxy_ready 2.0" in metrics
        assert process.stop() == 0


@pytest.mark.long
def test_a_worker_that_died_is_started_again(tmp_path: Path, world: World, upstream: Upstream) -> None:
    with Process(world, tmp_path, WORKERS="2") as process:
        process.until_ready()
        children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()
        workers = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(workers[0], signal.SIGKILL)

        deadline = time.monotonic() + 20
        while "worker_died" not in process.log and time.monotonic() < deadline:
            time.sleep(0.05)
        process.until_ready()
        assert process.stop() == 0


# --- listeners that other machines reach ------------------------------------------------------------------------------


@pytest.fixture
def encrypted(tmp_path: Path, world: World) -> Iterator[tuple[World, ssl.SSLContext]]:
    """A proxy whose own listeners speak TLS, and a context that trusts them."""
    ca = trustme.CA()
    certificate = ca.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "listener.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.configure_trust(context)
    files = {"listener_tls_cert_file": tmp_path / "listener.pem", "listener_tls_key_file": tmp_path / "listener.pem"}
    with World.start(tmp_path, world.control_plane, world.upstream_ca, **files) as own:
        yield own, context


def test_a_listener_with_tls_swaps_in_reverse_mode(encrypted: tuple[World, ssl.SSLContext], upstream: Upstream) -> None:
    world, context = encrypted
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        line.start_tls(context, "127.0.0.1")
        response = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))

    assert response.status == 200
    assert ticket.secret.encode() in upstream.received()


def test_a_tunnel_inside_a_listener_with_tls_is_intercepted(
    encrypted: tuple[World, ssl.SSLContext], upstream: Upstream
) -> None:
    world, context = encrypted
    ticket = world.ticket(upstream.url)
    big = secrets.token_bytes(300_000)
    upstream.default = plain(big)

    with world.forward() as line:
        line.start_tls(context, "127.0.0.1")
        connect = get(upstream.authority, host=upstream.authority, method="CONNECT")
        assert line.ask(connect[:-2] + proof(ticket) + b"\r\n").status == 200
        inner = _tls_in_tls(line, world.client_context(), "localhost")
        inner.send(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))
        reply = inner.receive_until(big)

    assert reply.startswith(b"HTTP/1.1 200 ")


def test_a_session_listeners_opener_speaks_inside_the_listeners_tls(
    encrypted: tuple[World, ssl.SSLContext], upstream: Upstream
) -> None:
    world, context = encrypted
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        line.start_tls(context, "127.0.0.1")
        line.send(preamble(ticket.proxy_credential))
        response = line.ask(get(f"/{ticket.credential}/", headers={"Authorization": ticket.bearer}))

    assert response.status == 200


def test_a_client_of_a_listener_with_tls_that_speaks_nothing_but_h2_agrees_on_nothing_and_is_refused(
    encrypted: tuple[World, ssl.SSLContext], upstream: Upstream
) -> None:
    world, context = encrypted
    context.set_alpn_protocols(["h2"])

    with world.reverse() as line:
        line.start_tls(context, "127.0.0.1")
        assert isinstance(line.sock, ssl.SSLSocket)
        agreed = line.sock.selected_alpn_protocol()
        response = line.ask(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

        assert agreed is None
        assert (response.status, response.refusal) == (505, "protocol_denied")
        assert line.is_closed_by_peer()


def test_a_client_without_tls_gets_nothing_from_a_listener_with_tls(
    encrypted: tuple[World, ssl.SSLContext], upstream: Upstream
) -> None:
    world, _ = encrypted
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        assert line.is_closed_by_peer()
    assert upstream.accepted == 0


class _Inner:
    """TLS by hand over a line that is itself TLS: `ssl` cannot wrap an SSLSocket."""

    def __init__(self, line: Line, context: ssl.SSLContext, server_name: str) -> None:
        self._line = line
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)

    def shake(self) -> None:
        shaken = False
        while not shaken:
            try:
                self._object.do_handshake()
                shaken = True
            except ssl.SSLWantReadError:
                self._line.send(self._outgoing.read())
                self._incoming.write(self._line.sock.recv(65536))
        self._line.send(self._outgoing.read())

    def send(self, data: bytes) -> None:
        self._object.write(data)
        self._line.send(self._outgoing.read())

    def receive_until(self, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            try:
                data += self._object.read(65536)
            except ssl.SSLWantReadError:
                self._incoming.write(self._line.sock.recv(65536))
        return data


def _tls_in_tls(line: Line, context: ssl.SSLContext, server_name: str) -> _Inner:
    inner = _Inner(line, context, server_name)
    inner.shake()
    return inner


def test_settings_refuse_a_certificate_without_its_key(world: World) -> None:
    with pytest.raises(ValueError, match="LISTENER_TLS_KEY_FILE"):
        Settings(
            control_plane_url="http://x",
            client_id="x",
            client_secret_file=world.folder / "secret",
            ca_cert_file=world.folder / "ca.pem",
            ca_key_file=world.folder / "ca.key",
            listener_tls_cert_file=world.folder / "ca.pem",
        )


def test_a_slow_handshake_does_not_hold_a_connection_for_ever(tmp_path: Path, world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    with (
        World.start(tmp_path, world.control_plane, world.upstream_ca, header_timeout_seconds=0.2) as impatient,
        impatient.connected(ticket, upstream.authority) as line,
    ):
        line.send(b"\x16\x03\x01")

        assert line.is_closed_by_peer(timeout_seconds=3)


def test_a_port_of_a_running_proxy_is_not_taken_twice(world: World) -> None:
    with pytest.raises(OSError, match="in use"), socket.socket() as second:
        second.bind(("127.0.0.1", world.forward_port))
