"""Names: asked of the machine's resolver or the servers an operator names, kept for as long as answers hold, judged
anew each time, and dialled as they were judged."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from control_plane.contract.refusal import RefusalCode, RefusedError
from egress_proxy.addresses import AHEAD, LONGEST_SECONDS, MAX_NAMES, SHORTEST_SECONDS, STALE_SECONDS, AddressBook
from egress_proxy.config import Settings
from egress_proxy.names import Meaning, NoSuchNameError, NotAnsweredError, SystemNames
from tests.egress_proxy.world import World, get, reverse_path
from tests.support.control_plane_simulator import ControlPlaneSimulator, Ticket
from tests.support.name_server import NameServer
from tests.support.raw_client import Response
from tests.support.upstream import Upstream, plain

ADDRESSES = "egress_proxy/addresses.py"
NAMES = "egress_proxy/names.py"
HOST = "api.names.test"


# --- through the proxy ------------------------------------------------------------------------------------------------


@pytest.fixture
def names() -> Iterator[NameServer]:
    with NameServer() as running:
        yield running


@pytest.fixture
def named(upstream_ca: trustme.CA) -> Iterator[Upstream]:
    with Upstream(upstream_ca, names=(HOST, "localhost")) as upstream:
        upstream.default = plain(b"here")
        yield upstream


@pytest.fixture
def world(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, names: NameServer
) -> Iterator[World]:
    with World.start(tmp_path, control_plane, upstream_ca, dns_servers=(names.address,)) as started:
        yield started


def ask(world: World, ticket: Ticket) -> Response:
    with world.reverse() as line:
        return line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))


def test_a_name_is_asked_of_the_servers_that_were_named_and_once_for_all(
    world: World, names: NameServer, named: Upstream
) -> None:
    names.answer(HOST, "127.0.0.1", ttl=60)
    tickets = [world.ticket(f"https://{HOST}:{named.port}") for _ in range(3)]

    replies = [ask(world, ticket) for ticket in tickets]

    assert [(reply.status, reply.body) for reply in replies] == [(200, b"here")] * 3
    assert names.asked(HOST) == 1


def test_a_name_that_means_nothing_is_unreachable_and_asked_for_again(world: World, names: NameServer) -> None:
    ticket = world.ticket(f"https://{HOST}")

    refused = [ask(world, ticket) for _ in range(2)]

    assert [(reply.status, reply.refusal) for reply in refused] == [(502, "upstream_unreachable")] * 2


def test_of_several_addresses_one_that_answers_is_enough(world: World, names: NameServer, named: Upstream) -> None:
    names.answer(HOST, "127.0.0.9", "127.0.0.1", "::1")
    ticket = world.ticket(f"https://{HOST}:{named.port}")

    assert ask(world, ticket).status == 200


@pytest.mark.guards(ADDRESSES, "if not allow_private and not judge(address):", "if False:")
def test_one_inner_address_in_an_answer_is_enough_to_refuse_it(
    world: World, names: NameServer, named: Upstream
) -> None:
    names.answer(HOST, "93.184.216.34", "127.0.0.1")
    ticket = world.ticket(f"https://{HOST}:{named.port}", allow_private=False)

    refused = ask(world, ticket)

    assert (refused.status, refused.refusal) == (403, "destination_private")
    assert named.accepted == 0


# --- this machine's own -----------------------------------------------------------------------------------------------


async def asked(servers: tuple[str, ...], host: str) -> Meaning:
    system = SystemNames(asyncio.get_running_loop(), servers=servers)
    try:
        return await system.meaning(host)
    finally:
        system.close()


@pytest.mark.guards(NAMES, "+ [alias.ttl for alias in result.cnames]", "")
async def test_an_answer_holds_as_long_as_the_shortest_of_its_parts(names: NameServer) -> None:
    names.answer("plain.test", "192.0.2.1", ttl=40)
    names.answer("alias.test", "192.0.2.2", "2001:db8::2", ttl=90, alias=("elsewhere.test", 30))

    plain_one, alias = [await asked((names.address,), host) for host in ("plain.test", "alias.test")]

    assert plain_one == Meaning(("192.0.2.1",), 40.0)
    assert (sorted(alias.addresses), alias.seconds) == (["192.0.2.2", "2001:db8::2"], 30.0)


@pytest.mark.guards(NAMES, "if error in _NOTHING:", "if False:")
async def test_that_a_name_means_nothing_is_told_apart_from_no_answer(names: NameServer) -> None:
    names.fail("broken.test")

    with pytest.raises(NoSuchNameError):
        await asked((names.address,), "nobody.test")
    with pytest.raises(NotAnsweredError):
        await asked((names.address,), "broken.test")


async def test_the_hosts_file_holds_before_any_server(names: NameServer) -> None:
    lines = [line.partition("#")[0].split() for line in Path("/etc/hosts").read_text().splitlines()]
    entries = {name: words[0] for words in reversed(lines) if len(words) > 1 for name in words[1:]}

    found = {host: (await asked((names.address,), host)).addresses for host in entries}

    assert entries
    assert all(entries[host] in found[host] for host in entries)
    assert all(names.asked(host) == 0 for host in entries)


def test_search_domains_hold_as_for_any_program(names: NameServer) -> None:
    """They come from `resolv.conf`, or from the environment (resolv.conf(5)): of the two a test has the second."""
    names.answer("api.search.test", "192.0.2.7")
    program = (
        "import asyncio; from egress_proxy.names import SystemNames\n"
        "async def main():\n"
        f"    names = SystemNames(asyncio.get_running_loop(), servers=({names.address!r},))\n"
        "    print(*(await names.meaning('api')).addresses)\n"
        "    names.close()\n"
        "asyncio.run(main())"
    )
    environment = {**os.environ, "LOCALDOMAIN": "search.test"}

    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)

    assert said.stdout.split() == ["192.0.2.7"]


@pytest.mark.parametrize("servers", ["ns.example", "10.0.0.10:0", "10.0.0.10:dns", "https://10.0.0.10"])
def test_a_name_server_is_an_address(servers: str) -> None:
    with pytest.raises(ValueError, match="a name server is an address"):
        Settings(
            control_plane_url="http://127.0.0.1:1",
            client_id="p",
            client_secret_file="s",
            ca_cert_file="c",
            ca_key_file="k",
            dns_servers=servers,
        )


# --- for how long -----------------------------------------------------------------------------------------------------


class Scripted:
    """Implements `Names`: says what it was last given."""

    def __init__(self) -> None:
        self.said: Meaning | Exception = Meaning(("192.0.2.1",), 60.0)
        self.asked = 0
        self.is_silent = False

    async def meaning(self, host: str) -> Meaning:
        self.asked += 1
        if self.is_silent:
            await asyncio.Event().wait()
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def book(scripted: Scripted, clock: Clock) -> AddressBook:
    return AddressBook(scripted, monotonic=clock)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_all_who_wait_for_a_name_ask_once(book: AddressBook, scripted: Scripted) -> None:
    answers = await asyncio.gather(*(book.look_up("a.test") for _ in range(5)))

    assert set(answers) == {("192.0.2.1",)}
    assert scripted.asked == 1


@pytest.mark.guards(ADDRESSES, "return known.addresses if now < known.ends_at else None", "return known.addresses")
async def test_an_answer_is_used_as_long_as_it_holds_and_no_longer(
    book: AddressBook, scripted: Scripted, clock: Clock
) -> None:
    await book.look_up("a.test")
    scripted.said = Meaning(("192.0.2.2",), 60.0)

    clock.now += 60 * AHEAD - 1
    before = book.cached("a.test")
    clock.now += 60
    after = book.cached("a.test")
    found = await book.look_up("a.test")

    assert (before, after, found) == (("192.0.2.1",), None, ("192.0.2.2",))


async def test_a_name_in_use_is_asked_for_anew_before_anybody_has_to_wait(
    book: AddressBook, scripted: Scripted, clock: Clock
) -> None:
    await book.look_up("a.test")
    scripted.said = Meaning(("192.0.2.2",), 60.0)

    clock.now += 60 * AHEAD
    meanwhile = book.cached("a.test")
    await settled()

    assert (meanwhile, book.cached("a.test"), scripted.asked) == (("192.0.2.1",), ("192.0.2.2",), 2)


@pytest.mark.parametrize(
    ("says", "seconds"), [(0.0, SHORTEST_SECONDS), (7.0, 7.0), (86_400.0, LONGEST_SECONDS)], ids=["0", "7", "a day"]
)
async def test_how_long_it_holds_has_bounds(
    book: AddressBook, scripted: Scripted, clock: Clock, says: float, seconds: float
) -> None:
    scripted.said = Meaning(("192.0.2.1",), says)
    await book.look_up("a.test")
    scripted.is_silent = True

    clock.now += seconds - 0.01
    just_before = book.cached("a.test")
    clock.now += 0.02

    assert (just_before, book.cached("a.test")) == (("192.0.2.1",), None)


@pytest.mark.guards(ADDRESSES, "            self._known.pop(host, None)\n            raise", "            raise")
async def test_a_name_that_is_gone_is_not_used_any_more(book: AddressBook, scripted: Scripted, clock: Clock) -> None:
    await book.look_up("a.test")
    scripted.said = NoSuchNameError()

    clock.now += 60 * AHEAD
    book.cached("a.test")
    await settled()

    assert book.cached("a.test") is None
    with pytest.raises(RefusedError) as refused:
        await book.look_up("a.test")
    assert refused.value.refusal.code is RefusalCode.UPSTREAM_UNREACHABLE


@pytest.mark.guards(ADDRESSES, "self._monotonic() < known.stale_until else None", "True else None")
async def test_while_nobody_answers_the_last_answer_serves_a_minute_longer(
    book: AddressBook, scripted: Scripted, clock: Clock
) -> None:
    await book.look_up("a.test")
    scripted.said = NotAnsweredError()

    served = []
    for _ in range(int((60 + STALE_SECONDS) / 10) - 1):
        clock.now += 10
        served.append(await book.look_up("a.test"))
    clock.now += 11

    assert set(served) == {("192.0.2.1",)}
    with pytest.raises(RefusedError) as refused:
        await book.look_up("a.test")
    assert refused.value.refusal.code is RefusalCode.UPSTREAM_UNREACHABLE


async def test_a_server_that_says_nothing_is_not_waited_for_where_an_older_answer_is_there(
    book: AddressBook, scripted: Scripted, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egress_proxy.addresses.PATIENCE_SECONDS", 0.01)
    await book.look_up("a.test")
    scripted.is_silent = True
    clock.now += 61

    assert await book.look_up("a.test") == ("192.0.2.1",)


async def test_an_address_is_looked_up_by_nobody(book: AddressBook, scripted: Scripted) -> None:
    assert book.cached("192.0.2.1") == ("192.0.2.1",)
    assert book.cached("2001:db8::1") == ("2001:db8::1",)
    assert scripted.asked == 0


async def test_as_many_names_as_are_kept_are_bounded(book: AddressBook, scripted: Scripted) -> None:
    for number in range(MAX_NAMES + 3):
        await book.look_up(f"n{number}.test")

    assert len(book._known) == MAX_NAMES
    assert book.cached("n0.test") is None
