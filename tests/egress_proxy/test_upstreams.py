"""Where connections go: addresses that are judged, certificates that are verified, destinations that do not answer."""

import asyncio
import socket
import ssl
import threading
from pathlib import Path

import pytest
import trustme

from control_plane.contract.destination import Endpoint
from control_plane.contract.refusal import RefusedError
from egress_proxy.addresses import AddressBook, OwnListeners, check_addresses, is_local
from egress_proxy.metrics import Counters
from egress_proxy.names import SystemNames
from egress_proxy.outlet import Turn
from egress_proxy.upstream import UpstreamConnection, Upstreams
from tests.egress_proxy.world import World, get, reverse_path
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import Response
from tests.support.upstream import Upstream


def ask(world: World, ticket: Ticket) -> Response:
    with world.reverse() as line:
        return line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))


def refusal_of(addresses: tuple[str, ...], *, allow_private: bool = False, own: OwnListeners | None = None) -> str:
    try:
        check_addresses(addresses, port=443, allow_private=allow_private, own=own or OwnListeners())
    except RefusedError as refused:
        return refused.refusal.code.value
    return ""


@pytest.mark.guards("egress_proxy/addresses.py", "if not allow_private and not judge(address):", "if False:")
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_private_address_is_refused_unless_its_destination_allows_it(
    world: World, upstream: Upstream, host: str
) -> None:
    ticket = world.ticket(f"https://{host}:{upstream.port}", allow_private=False)

    response = ask(world, ticket)

    assert (response.status, response.refusal) == (403, "destination_private")
    assert upstream.accepted == 0


@pytest.mark.guards("egress_proxy/upstream.py", "if not (allow_private or judge(address)):", "if False:")
def test_a_pooled_connection_to_a_private_address_is_not_lent_to_a_destination_that_does_not_allow_it(
    world: World, upstream: Upstream
) -> None:
    tenant = world.tenant()
    allowed = world.ticket(upstream.url, tenant=tenant)
    denied = world.ticket(upstream.url, tenant=tenant, allow_private=False)

    first, second = ask(world, allowed), ask(world, denied)

    assert (first.status, second.status, second.refusal) == (200, 403, "destination_private")
    assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    "address",
    "10.0.0.1 127.0.0.1 169.254.169.254 100.100.100.200 0.0.0.0 ::1 fe80::1%2 fd00:ec2::254 ::ffff:10.0.0.1 "
    "64:ff9b::a00:1 2002:a00:1:: :: 224.0.0.1 192.168.1.1 172.16.0.1".split(),
)
def test_one_inner_address_among_public_ones_is_enough_to_refuse(address: str) -> None:
    assert refusal_of(("93.184.216.34", address)) == "destination_private"
    assert refusal_of(("93.184.216.34", address), allow_private=True) == ""


def test_public_addresses_may_be_dialled() -> None:
    assert refusal_of(("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946")) == ""


def test_a_name_without_addresses_is_unreachable() -> None:
    assert refusal_of(()) == "upstream_unreachable"


@pytest.mark.guards("egress_proxy/addresses.py", "if own.includes(address, port):", "if False:")
@pytest.mark.parametrize("listener", ["forward", "reverse", "admin"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::ffff:127.0.0.1]", "0.0.0.0"])
def test_the_proxys_own_listeners_are_never_a_destination(world: World, listener: str, host: str) -> None:
    port = {"forward": world.forward_port, "reverse": world.reverse_port, "admin": world.admin_port}[listener]
    ticket = world.ticket(f"http://{host}:{port}")

    response = ask(world, ticket)

    assert (response.status, response.refusal) == (508, "loop_detected")


def test_a_listener_on_every_address_is_found_under_each_of_them() -> None:
    own = OwnListeners()
    own.add("0.0.0.0", 443)

    assert refusal_of(("127.0.0.1",), allow_private=True, own=own) == "loop_detected"
    assert refusal_of(("127.0.0.9",), allow_private=True, own=own) == "loop_detected"
    assert refusal_of(("93.184.216.34",), allow_private=True, own=own) == ""


def test_local_addresses_are_those_that_can_be_bound() -> None:
    assert is_local("127.0.0.1")
    assert not is_local("93.184.216.34")


# --- the pool ---------------------------------------------------------------------------------------------------------


@pytest.mark.guards("egress_proxy/upstream.py", "if self._closed or self._is_paused or", "if self._closed or")
@pytest.mark.parametrize(
    ("left", "is_lent_again"), [("idle", True), ("paused", False), ("writing", False), ("closed", False)]
)
async def test_a_connection_that_is_not_simply_idle_is_not_lent_again(left: str, is_lent_again: bool) -> None:
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    turn = Turn(loop)
    pool = Upstreams(
        loop=loop,
        turn=turn,
        book=AddressBook(SystemNames(loop), monotonic=loop.time),
        own=OwnListeners(),
        context=ssl.create_default_context(),
        connect_timeout_seconds=1,
        idle_seconds=10,
        per_key=4,
        counters=Counters(),
    )
    endpoint = Endpoint("http", "192.0.2.1", 80)
    lane = pool.lane("acme", endpoint)
    connection = UpstreamConnection(loop=loop, turn=turn, lane=lane, address="192.0.2.1", on_closed=lambda _: None)
    await loop.create_connection(lambda: connection, sock=near)
    match left:
        case "paused":
            connection.pause_reading()
        case "writing":
            connection.pause_writing()
        case "closed":
            connection.close()

    pool.give_back(connection)
    lent = pool.take(lane, allow_private=True)

    connection.close()
    far.close()
    assert (lent is connection) is is_lent_again


# --- certificates -----------------------------------------------------------------------------------------------------


@pytest.mark.guards(
    "egress_proxy/upstream.py",
    "    context = ssl.create_default_context()\n",
    "    context = ssl._create_unverified_context()\n",
)
def test_a_certificate_of_an_unknown_ca_is_refused(world: World) -> None:
    with Upstream(trustme.CA()) as stranger:
        response = ask(world, world.ticket(stranger.url))

        assert (response.status, response.refusal) == (502, "upstream_unverified")
        assert stranger.received() == b""


def test_a_certificate_for_another_name_is_refused(world: World, upstream_ca: trustme.CA) -> None:
    with Upstream(upstream_ca, names=("elsewhere.test",)) as impostor:
        response = ask(world, world.ticket(impostor.url))

        assert (response.status, response.refusal) == (502, "upstream_unverified")
        assert impostor.received() == b""


def test_an_expired_certificate_is_refused(world: World, upstream_ca: trustme.CA) -> None:
    from datetime import UTC, datetime, timedelta

    with Upstream(upstream_ca) as expired:
        old = upstream_ca.issue_cert("localhost", not_after=datetime.now(UTC) - timedelta(days=1))
        assert expired._context is not None
        old.configure_cert(expired._context)
        response = ask(world, world.ticket(expired.url))

        assert (response.status, response.refusal) == (502, "upstream_unverified")


def test_an_upstream_that_does_not_speak_tls_is_unreachable(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=lambda: listener.accept()[0].sendall(b"SSH-2.0-OpenSSH\r\n"), daemon=True)
        answering.start()
        response = ask(world, world.ticket(f"https://127.0.0.1:{listener.getsockname()[1]}"))

    assert (response.status, response.refusal) == (502, "upstream_unreachable")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # old versions are what this is about
def test_old_tls_is_refused(world: World, upstream_ca: trustme.CA) -> None:
    with Upstream(upstream_ca) as old:
        assert old._context is not None
        old._context.minimum_version = ssl.TLSVersion.TLSv1
        old._context.maximum_version = ssl.TLSVersion.TLSv1_1
        old._context.set_ciphers("DEFAULT:@SECLEVEL=0")
        response = ask(world, world.ticket(old.url))

        assert (response.status, response.refusal) == (502, "upstream_unreachable")


# --- destinations that do not answer ----------------------------------------------------------------------------------


def test_a_port_where_nobody_listens_is_unreachable(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    response = ask(world, world.ticket(f"https://127.0.0.1:{port}"))

    assert (response.status, response.refusal) == (502, "upstream_unreachable")
    assert response.header("x-should-retry") == ""


def test_a_name_that_does_not_exist_is_unreachable(world: World) -> None:
    response = ask(world, world.ticket("https://no-such-host.invalid"))

    assert (response.status, response.refusal) == (502, "upstream_unreachable")


def test_a_destination_that_never_answers_is_timed_out(tmp_path: Path, world: World, upstream_ca: trustme.CA) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,  # accepts, and never says a word of TLS
        World.start(tmp_path, world.control_plane, upstream_ca, connect_timeout_seconds=0.3) as impatient,
    ):
        response = ask(impatient, impatient.ticket(f"https://127.0.0.1:{deaf.getsockname()[1]}"))

    assert (response.status, response.refusal) == (504, "upstream_timeout")


def test_an_upstream_that_falls_silent_is_timed_out(tmp_path: Path, world: World, upstream: Upstream) -> None:
    from tests.support.upstream import hold

    upstream.default = hold()
    with World.start(tmp_path, world.control_plane, world.upstream_ca, silence_timeout_seconds=0.3) as impatient:
        response = ask(impatient, impatient.ticket(upstream.url))

    assert (response.status, response.refusal) == (504, "upstream_timeout")


def test_an_idle_upstream_connection_is_closed_after_a_while(tmp_path: Path, world: World, upstream: Upstream) -> None:
    with World.start(tmp_path, world.control_plane, world.upstream_ca, upstream_idle_seconds=0.2) as impatient:
        ask(impatient, impatient.ticket(upstream.url))

        assert upstream.wait_for(lambda u: not u.open_connections() and u.connections, timeout_seconds=3)


@pytest.mark.parametrize(
    ("sent", "status"), [(b"", 0), (b"GET / HT", 408), (b"GET / HTTP/1.1\r\nHost: x\r\n", 408)], ids=str
)
def test_a_client_that_never_finishes_its_head_is_let_go(
    tmp_path: Path, world: World, sent: bytes, status: int
) -> None:
    limits = {"header_timeout_seconds": 0.2, "idle_timeout_seconds": 0.2}
    with (
        World.start(tmp_path, world.control_plane, world.upstream_ca, **limits) as impatient,
        impatient.reverse() as line,
    ):
        line.send(sent)
        if status:
            assert line.read_response(timeout_seconds=3).refusal == "request_timeout"
        assert line.is_closed_by_peer(timeout_seconds=3)
