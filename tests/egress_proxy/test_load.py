"""Too much at once is refused before work is done, each tenant for itself; and what takes too long in all ends."""

import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trustme

from tests.egress_proxy.world import World, get, proof, reverse_path
from tests.support.control_plane_simulator import ControlPlaneSimulator, Ticket
from tests.support.raw_client import Line, Response
from tests.support.upstream import Gate, Request, Upstream, Wire, endless_sse, message, plain

CLIENT = "egress_proxy/client.py"


def begin(line: Line, ticket: Ticket) -> None:
    line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))


@pytest.mark.guards(
    CLIENT,
    "        if prepared.load.is_full:\n            services.upstreams",
    "        if False:\n            services.upstreams",
)
def test_a_tenant_has_so_many_requests_under_way_and_no_more(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    gate = Gate()

    async def behave(_: Request, wire: Wire) -> None:
        await gate.opened()
        await wire.write(message(b"ok"))

    upstream.default = behave
    with World.start(tmp_path, control_plane, upstream_ca, tenant_requests=2) as world:
        busy, other = world.ticket(upstream.url), world.ticket(upstream.url)
        with world.reverse() as one, world.reverse() as two, world.reverse() as three, world.reverse() as four:
            for line in (one, two):
                begin(line, busy)
            world.control_plane.wait_for(lambda _: len(upstream.requests) == 2)
            begin(three, busy)
            refused = three.read_response()
            begin(four, other)
            world.control_plane.wait_for(lambda _: len(upstream.requests) == 3)
            gate.open()
            served = [line.read_response().status for line in (one, two, four)]
            begin(three, busy)
            again = three.read_response()

    assert (refused.status, refused.refusal, refused.header("retry-after")) == (429, "overloaded", "1")
    assert served == [200, 200, 200]
    assert again.status == 200


@pytest.mark.guards(CLIENT, "load.count -= 1", "pass")
def test_what_ended_is_not_counted_however_it_ended(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    with World.start(tmp_path, control_plane, upstream_ca, tenant_requests=1) as world:
        ticket = world.ticket(upstream.url)
        for _ in range(3):  # answered
            upstream.default = plain(b"ok")
            with world.reverse() as line:
                for _ in range(3):
                    begin(line, ticket)
                    assert line.read_response().status == 200
            upstream.default = endless_sse()  # left
            with world.reverse() as line:
                begin(line, ticket)
                line.read_until(b"\r\n\r\n")
            world.control_plane.wait_for(lambda _: world.metric("open_exchanges") == 0)


@pytest.mark.guards(CLIENT, "if len(self.services.clients) > self.services.client_limit:", "if False:")
def test_more_clients_than_are_taken_are_closed_and_the_others_served(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    upstream.default = plain(b"ok")
    with World.start(tmp_path, control_plane, upstream_ca, client_connections=2, tenant_connections=2) as world:
        ticket = world.ticket(upstream.url)
        with world.reverse() as one, world.reverse() as two:
            for line in (one, two):
                begin(line, ticket)
                assert line.read_response().status == 200

            with world.reverse() as three:
                closed = three.is_closed_by_peer()

            begin(one, ticket)
            still = one.read_response()
        refused = world.metric("client_connections_refused_total")

    assert closed
    assert still.status == 200
    assert refused == 1


def test_a_worker_takes_no_more_clients_than_its_descriptors_are_enough_for() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1128));"
        "from egress_proxy.load import client_limit;"
        "print(client_limit(None), client_limit(100), client_limit(9999));"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )

    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert told.stdout.split() == ["500", "100", "500", "1128"]


def test_an_exchange_that_never_ends_is_ended(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    upstream.default = endless_sse()
    with World.start(tmp_path, control_plane, upstream_ca, total_timeout_seconds=1.0) as world:
        ticket = world.ticket(upstream.url)
        with world.reverse() as line:
            begin(line, ticket)
            line.read_until(b"\r\n\r\n")

            assert line.is_closed_by_peer(timeout_seconds=10)


def is_served(line: Line, ticket: Ticket) -> bool:
    begin(line, ticket)
    return line.read_response().status == 200


@pytest.mark.guards("egress_proxy/services.py", "first = next(iter(self.unproven))", "first = list(self.unproven)[-1]")
def test_whoever_proves_nothing_makes_room_for_those_who_come_after(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    """A door that is shut by standing in it: strangers hold every connection, and say nothing or half a head."""
    upstream.default = plain(b"ok")
    with World.start(tmp_path, control_plane, upstream_ca, client_connections=4) as world, ExitStack() as stack:
        ticket = world.ticket(upstream.url)
        old = stack.enter_context(world.reverse())
        assert is_served(old, ticket)
        strangers = [stack.enter_context(world.reverse()) for _ in range(6)]
        for stranger in strangers:
            with suppress(ConnectionError):
                stranger.send(b"GET / HT")

        new = stack.enter_context(world.reverse())

        assert is_served(new, ticket)
        assert is_served(old, ticket)
        assert all(stranger.is_closed_by_peer() for stranger in strangers[:4])


@pytest.mark.guards(CLIENT, "if load.connections >= load.connection_limit:", "if False:")
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_tenant_has_so_many_connections_and_leaves_the_others_theirs(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream, mode: str
) -> None:
    upstream.default = plain(b"ok")
    with World.start(tmp_path, control_plane, upstream_ca, tenant_connections=2) as world, ExitStack() as stack:
        greedy, other = world.ticket(upstream.url), world.ticket(upstream.url)

        def connection(ticket: Ticket) -> Response:
            """Its first answer; the connection stays open as long as the test."""
            if mode == "forward":
                line = stack.enter_context(world.forward())
                return line.ask(connect(ticket, upstream.authority))
            line = stack.enter_context(world.reverse())
            begin(line, ticket)
            return line.read_response()

        taken = [connection(greedy).status for _ in range(2)]
        refused = connection(greedy)
        others = connection(other).status

        assert taken == [200, 200]
        assert (refused.status, refused.refusal, refused.header("connection")) == (429, "overloaded", "close")
        assert others == 200


@pytest.mark.guards(CLIENT, "connections -= 1\n            self._tenancy = None", "connections -= 0\n")
def test_a_connection_that_ended_is_no_longer_its_tenants(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    upstream.default = plain(b"ok")
    with World.start(tmp_path, control_plane, upstream_ca, tenant_connections=1) as world:
        ticket = world.ticket(upstream.url)
        for _ in range(3):
            with world.reverse() as line:
                assert is_served(line, ticket)
            world.control_plane.wait_for(lambda _: world.metric("open_client_connections") == 0)


def test_a_connection_that_comes_for_another_tenant_is_counted_there(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    upstream.default = plain(b"ok")
    with World.start(tmp_path, control_plane, upstream_ca, tenant_connections=1) as world:
        one, other = world.ticket(upstream.url), world.ticket(upstream.url)
        with world.reverse() as first, world.reverse() as second:
            assert is_served(first, one)
            assert is_served(first, other)  # and with that it is no longer the first tenant's
            assert is_served(second, one)
            begin(second, other)
            refused = second.read_response()

    assert (refused.status, refused.refusal) == (429, "overloaded")


def connect(ticket: Ticket, authority: str) -> bytes:
    return f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n".encode() + proof(ticket) + b"\r\n"
