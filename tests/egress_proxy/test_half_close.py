"""A client that closes its side counts as gone (ADR 0009): it cannot be told from one that hung up."""

import socket

import pytest

from tests.egress_proxy.world import World, get, reverse_path
from tests.support.upstream import Upstream, hold, plain


@pytest.mark.parametrize("mode", ["tunnel", "reverse"])
@pytest.mark.parametrize("moment", ["waiting for the reply", "in the reply"])
def test_a_client_that_half_closes_is_gone_and_its_call_ends(
    world: World, upstream: Upstream, mode: str, moment: str
) -> None:
    begun = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    upstream.default = hold(begun) if moment == "in the reply" else hold()
    ticket = world.ticket(upstream.url)
    headers = {"Authorization": ticket.bearer}

    with world.tunnel(ticket, upstream.authority) if mode == "tunnel" else world.reverse() as line:
        path, host = ("/", upstream.authority) if mode == "tunnel" else (reverse_path(ticket), "proxy")
        line.send(get(path, host=host, headers=headers))
        upstream.wait_for(lambda u: u.requests)
        if moment == "in the reply":
            line.read_until(b"hello")
        line.sock.shutdown(socket.SHUT_WR)

        assert line.is_closed_by_peer()
        upstream.wait_for(lambda u: u.connections[-1].closed_at is not None, timeout_seconds=2)
    assert bytes(line.received).count(b"HTTP/1.1 200 OK") == (1 if moment == "in the reply" else 0)


def test_a_client_that_half_closes_after_its_reply_is_closed(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        response = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        line.sock.shutdown(socket.SHUT_WR)

        assert (response.status, response.body) == (200, b"ok")
        assert line.is_closed_by_peer()
