"""A destination of several addresses is reached by the one that answers (RFC 8305)."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from egress_proxy.upstream import STAGGER_SECONDS
from tests.egress_proxy.world import World, get, reverse_path
from tests.support.control_plane_simulator import ControlPlaneSimulator
from tests.support.name_server import NameServer
from tests.support.upstream import Upstream, plain

HOST = "api.names.test"


@pytest.fixture
def names() -> Iterator[NameServer]:
    with NameServer() as running:
        yield running


def silent(stack: ExitStack, address: str, port: int) -> None:
    """A listener whose queue is full: whoever connects hears nothing."""
    listener = stack.enter_context(socket.socket())
    listener.bind((address, port))
    listener.listen(0)
    for _ in range(8):
        client = stack.enter_context(socket.socket())
        client.setblocking(False)
        client.connect_ex((address, port))


@pytest.mark.guards("egress_proxy/upstream.py", "timeout=STAGGER_SECONDS if waiting else None", "timeout=None")
def test_an_address_that_says_nothing_delays_the_next_by_a_moment_only(
    tmp_path: Path,
    control_plane: ControlPlaneSimulator,
    upstream_ca: trustme.CA,
    names: NameServer,
) -> None:
    with (
        World.start(tmp_path, control_plane, upstream_ca, dns_servers=(names.address,)) as world,
        Upstream(upstream_ca, names=(HOST,)) as upstream,
        ExitStack() as stack,
    ):
        upstream.default = plain(b"here")
        for last in (7, 8):
            silent(stack, f"127.0.0.{last}", upstream.port)
        names.answer(HOST, "127.0.0.7", "127.0.0.8", "127.0.0.1")
        ticket = world.ticket(f"https://{HOST}:{upstream.port}")

        began = time.monotonic()
        with world.reverse() as line:
            response = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        took = time.monotonic() - began

    assert (response.status, response.body) == (200, b"here")
    assert took < 2 * STAGGER_SECONDS + 1


def test_an_address_that_refuses_delays_nothing(
    tmp_path: Path,
    control_plane: ControlPlaneSimulator,
    upstream_ca: trustme.CA,
    names: NameServer,
) -> None:
    with (
        World.start(tmp_path, control_plane, upstream_ca, dns_servers=(names.address,)) as world,
        Upstream(upstream_ca, names=(HOST,)) as upstream,
    ):
        upstream.default = plain(b"here")
        names.answer(HOST, *[f"127.0.0.{last}" for last in range(10, 20)], "127.0.0.1")
        ticket = world.ticket(f"https://{HOST}:{upstream.port}")

        began = time.monotonic()
        with world.reverse() as line:
            response = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))

        assert response.status == 200
        assert time.monotonic() - began < STAGGER_SECONDS * 4
