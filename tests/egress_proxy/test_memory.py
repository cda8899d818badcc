"""What a connection held is free as soon as it is over, and not only when somebody looks for cycles."""

import gc
import ssl
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from egress_proxy.client import ClientConnection
from egress_proxy.core.plan import Plan
from egress_proxy.exchange import Exchange
from egress_proxy.tls import TlsLayer
from egress_proxy.upstream import UpstreamConnection
from tests.egress_proxy.world import World, get
from tests.support.control_plane_simulator import Ticket
from tests.support.processes import wait_for
from tests.support.upstream import Upstream, hold, plain, sends_then_resets

CLIENT = "egress_proxy/client.py"
UPSTREAM = "egress_proxy/upstream.py"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx"
OURS = (ClientConnection, UpstreamConnection, TlsLayer, Exchange)


@pytest.fixture
def no_cycles_looked_for() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, OURS))


def in_tunnel(world: World, ticket: Ticket, upstream: Upstream, path: str) -> None:
    with world.tunnel(ticket, upstream.authority) as line:
        line.send(get(path, host=upstream.authority, headers={"Authorization": f"Bearer {ticket.placeholder}"}))
        line.read_until(b"\r\n\r\n")
        line.reset()


def by_base_url(world: World, ticket: Ticket, path: str, *, times: int = 0) -> None:
    proof = {
        "Authorization": f"Bearer {ticket.placeholder}",
        "Proxy-Authorization": f"Bearer {ticket.proxy_credential}",
    }
    with world.reverse() as line:
        for _ in range(times):
            line.ask(get(f"/{ticket.credential}{path}", headers=proof))
        line.send(get(f"/{ticket.credential}{path}", headers=proof))
        line.read_until(b"\r\n\r\n")


def refused(world: World) -> None:
    with world.reverse() as line:
        assert line.ask(b"GET / HTTP/1.1\nHost: x\n\n").status == 400


def distrusting(world: World, ticket: Ticket, upstream: Upstream) -> None:
    with pytest.raises(ssl.SSLError):
        world.tunnel(ticket, upstream.authority, context=ssl.create_default_context())


CONNECTIONS: dict[str, Callable[[World, Ticket, Upstream], None]] = {
    "in a tunnel": lambda world, ticket, upstream: in_tunnel(world, ticket, upstream, "/ok"),
    "in a tunnel, left in the reply": lambda world, ticket, upstream: in_tunnel(world, ticket, upstream, "/hold"),
    "in a tunnel, reset by the upstream": lambda world, ticket, upstream: in_tunnel(world, ticket, upstream, "/reset"),
    "to a base URL": lambda world, ticket, _: by_base_url(world, ticket, "/ok"),
    "to a base URL, the same again": lambda world, ticket, _: by_base_url(world, ticket, "/ok", times=3),
    "to a base URL, left in the reply": lambda world, ticket, _: by_base_url(world, ticket, "/hold"),
    "refused": lambda world, _ticket, _upstream: refused(world),
    "with another CA": distrusting,
}


@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.guards(CLIENT, "        self._stage = _nothing_more\n", "        pass\n")
@pytest.mark.guards(CLIENT, "            if layer is not None:\n", "            if False:\n")
@pytest.mark.guards(CLIENT, "        self._spare = self._prepared = None\n", "        pass\n")
@pytest.mark.guards(UPSTREAM, "            self._tls.release()\n", "            pass\n")
def test_a_connection_that_is_over_leaves_nothing(
    world: World, upstream: Upstream, no_cycles_looked_for: None, connection: str
) -> None:
    upstream.on("/ok", plain())
    upstream.on("/hold", hold(HEAD))
    upstream.on("/reset", sends_then_resets(HEAD))
    ticket, once = world.ticket(upstream.url), CONNECTIONS[connection]
    once(world, ticket, upstream)
    wait_for(lambda: world.metric("open_client_connections") == 0)
    before = alive()

    for _ in range(5):
        once(world, ticket, upstream)
    wait_for(lambda: world.metric("open_client_connections") == 0)

    # One connection upstream may be idle, or a second one for a moment.
    wait_for(lambda: (alive() - before).total() <= 2)


@pytest.mark.guards(CLIENT, "            self._forget_last_request()\n", "            pass\n")
def test_an_idle_connection_keeps_nothing_of_its_last_request_and_serves_the_next_one(
    world: World, upstream: Upstream
) -> None:
    """Its plan holds the head that went upstream, and so a key."""
    upstream.on("/idle", plain(b"here"))
    ticket = world.ticket(upstream.url)
    request = get(
        f"/{ticket.credential}/idle",
        headers={"Authorization": ticket.bearer, "Proxy-Authorization": f"Bearer {ticket.proxy_credential}"},
    )

    with world.reverse() as line:
        assert line.ask(request).body == b"here"
        wait_for(lambda: not [each for each in gc.get_objects() if isinstance(each, Plan | Exchange)])
        again = line.ask(request)

    assert again.body == b"here"
    assert [seen.header("authorization") for seen in upstream.requests] == [f"Bearer {ticket.secret}"] * 2
