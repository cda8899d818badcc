"""TLS sessions toward upstreams: gone on with, and seldom taken, because CPython loses memory for each (3.11)."""

import asyncio
import ssl
from collections.abc import Iterator

import pytest

from control_plane.contract.destination import Endpoint
from egress_proxy.addresses import AddressBook, OwnListeners
from egress_proxy.metrics import Counters
from egress_proxy.names import SystemNames
from egress_proxy.outlet import Turn
from egress_proxy.upstream import SESSION_SECONDS, Lane, UpstreamConnection, Upstreams
from tests.fuzz.path import Socket

UPSTREAM = "egress_proxy/upstream.py"
ENDPOINT = Endpoint("https", "api.test", 443)


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time a test sets."""

    now = 1_000.0

    def time(self) -> float:
        return self.now


class Secured(UpstreamConnection):
    """A connection that was verified, and counts how often its session is taken."""

    __slots__ = ("taken",)

    def __init__(self, loop: Clock, lane: Lane, context: ssl.SSLContext) -> None:
        super().__init__(loop=loop, turn=Turn(loop), lane=lane, address="192.0.2.1", on_closed=lambda _: None)
        self.connection_made(Socket())
        self.tls_context = context
        self.requests, self.taken = 1, 0

    @property
    def session(self) -> None:
        self.taken += 1


@pytest.fixture
def loop() -> Iterator[Clock]:
    loop = Clock()
    yield loop
    loop.close()


class Place:
    def __init__(self, loop: Clock) -> None:
        self.loop = loop
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.upstreams = Upstreams(
            loop=loop,
            turn=Turn(loop),
            book=AddressBook(SystemNames(loop), monotonic=loop.time),
            own=OwnListeners(),
            context=self.context,
            connect_timeout_seconds=1,
            idle_seconds=1,
            per_key=100,
            counters=Counters(),
        )

    def taken(self, *, tenant: str = "acme") -> int:
        """How often the session of one more connection was taken."""
        connection = Secured(self.loop, self.upstreams.lane(tenant, ENDPOINT), self.context)
        self.upstreams.give_back(connection)
        return connection.taken


@pytest.mark.guards(UPSTREAM, "if known is not None and now - known[0] < SESSION_SECONDS:", "if False:")
def test_a_session_is_taken_once_an_hour_and_not_from_every_connection(loop: Clock) -> None:
    place = Place(loop)

    first = [place.taken() for _ in range(5)]
    loop.now += SESSION_SECONDS - 1
    within = place.taken()
    loop.now += 1
    after = [place.taken() for _ in range(2)]

    assert (first, within, after) == ([1, 0, 0, 0, 0], 0, [1, 0])


def test_each_tenant_has_its_own(loop: Clock) -> None:
    place = Place(loop)

    assert [place.taken(tenant=tenant) for tenant in ("acme", "evil", "acme", "evil")] == [1, 1, 0, 0]


@pytest.mark.guards(UPSTREAM, "            del self._sessions[key]\n", "            pass\n")
def test_other_cas_make_it_forget_what_was_verified_by_the_old_ones(loop: Clock) -> None:
    place = Place(loop)
    place.taken()
    place.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    place.upstreams.trust(place.context)

    assert [place.taken(), place.taken()] == [1, 0]
