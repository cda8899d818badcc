"""Tunnels that a rule lets through unopened: the host's own TLS, end to end, to that host and no other."""

import ssl

import pytest
import trustme

from tests.egress_proxy.world import World, get
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import connected
from tests.support.upstream import Upstream, plain

CLIENT = "egress_proxy/client.py"
OPENING = "egress_proxy/opening.py"
ADMISSION = "control_plane/contract/admission.py"


@pytest.fixture
def caller(world: World) -> Ticket:
    """Somebody with a credential for another place."""
    return world.ticket("https://elsewhere.test")


def allow(world: World, ticket: Ticket, upstream: Upstream, **rule: object) -> None:
    world.control_plane.allow(ticket.caller.tenant, "localhost", upstream.port, **{"allow_private": True, **rule})


def trusting(ca: trustme.CA) -> ssl.SSLContext:
    """A client that knows the upstream's CA and not the proxy's: it notices who opens its TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.configure_trust(context)
    return context


def test_the_hosts_own_certificate_reaches_the_client(
    world: World, upstream: Upstream, upstream_ca: trustme.CA, caller: Ticket
) -> None:
    upstream.default = plain(b"x" * 500_000)
    allow(world, caller, upstream, tunnel=True)

    with world.tunnel(caller, upstream.authority, context=trusting(upstream_ca)) as line:
        responses = [line.ask(get("/", host=upstream.authority)) for _ in range(2)]

    assert [len(response.body) for response in responses] == [500_000] * 2
    event = world.control_plane.wait_for(
        lambda plane: next((e for e in plane.audited if e.tenant == caller.caller.tenant), None)
    )
    assert (event.action, event.method, event.host, event.port) == ("forward", "CONNECT", "localhost", upstream.port)


def test_a_rule_without_tunnel_is_intercepted(world: World, upstream: Upstream, caller: Ticket) -> None:
    upstream.default = plain(b"ok")
    allow(world, caller, upstream)

    with world.tunnel(caller, upstream.authority) as line:  # trusts the proxy's CA
        assert line.ask(get("/", host=upstream.authority)).status == 200


@pytest.mark.guards(ADMISSION, "return None if bound else next(", "return next(")
def test_a_place_with_a_credential_is_never_left_unopened(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url)
    allow(world, ticket, upstream, tunnel=True)

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert response.status == 200
    assert upstream.requests[0].header("authorization") == f"Bearer {ticket.secret}"


@pytest.mark.guards(OPENING, "        if not self._is_for_it(hello):\n", "        if False:\n")
def test_another_name_inside_is_refused_before_anything_is_dialled(
    world: World, upstream: Upstream, upstream_ca: trustme.CA, caller: Ticket
) -> None:
    allow(world, caller, upstream, tunnel=True)
    line = connected(world.forward_port, upstream.authority, proxy_credential=caller.proxy_credential)

    with line, pytest.raises(ssl.SSLError):
        trusting(upstream_ca).wrap_socket(line.sock, server_hostname="other.test")

    assert upstream.accepted == 0


def test_what_is_not_tls_is_refused_before_anything_is_dialled(
    world: World, upstream: Upstream, caller: Ticket
) -> None:
    allow(world, caller, upstream, tunnel=True)

    with connected(world.forward_port, upstream.authority, proxy_credential=caller.proxy_credential) as line:
        line.send(b"SSH-2.0-OpenSSH_9.2\r\n")
        answer = line.read_to_end()

    assert b"malformed_request" in answer
    assert upstream.accepted == 0


def test_an_internal_address_needs_its_own_word(world: World, upstream: Upstream, caller: Ticket) -> None:
    allow(world, caller, upstream, tunnel=True, allow_private=False)

    with connected(world.forward_port, upstream.authority, proxy_credential=caller.proxy_credential) as line:
        line.send(client_hello("localhost"))
        answer = line.read_to_end()

    assert b"destination_private" in answer
    assert upstream.accepted == 0


def client_hello(name: str) -> bytes:
    outgoing = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.guards(CLIENT, "if self._unopened is not None and isinstance(decision, Tunnel)", "if False")
def test_an_open_tunnel_ends_when_its_rule_is_narrowed_or_taken_back(
    world: World, upstream: Upstream, upstream_ca: trustme.CA
) -> None:
    for narrowed in (False, True):
        ticket = world.ticket("https://elsewhere.test")
        allow(world, ticket, upstream, tunnel=True)
        with world.tunnel(ticket, upstream.authority, context=trusting(upstream_ca)) as line:
            line.ask(get("/", host=upstream.authority))

            world.control_plane.disallow(ticket.caller.tenant)
            if narrowed:
                allow(world, ticket, upstream)

            assert line.is_closed_by_peer()


def test_a_tunnel_ends_when_either_side_does(
    world: World, upstream: Upstream, upstream_ca: trustme.CA, caller: Ticket
) -> None:
    allow(world, caller, upstream, tunnel=True)
    with world.tunnel(caller, upstream.authority, context=trusting(upstream_ca)) as line:
        line.ask(get("/", host=upstream.authority))
    world.control_plane.wait_for(lambda _: upstream.connections[0].closed_at is not None)

    with world.tunnel(caller, upstream.authority, context=trusting(upstream_ca)) as line:
        line.ask(get("/", host=upstream.authority))
        upstream.drop_idle_connections()

        assert line.is_closed_by_peer()
    world.control_plane.wait_for(lambda _: world.metric("open_exchanges") == 0)
