"""What replicas share without relying on it: one suite in memory and on Valkey (`ports.Wake`, `Turns`, `Rates`)."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count

import pytest

from control_plane.adapters.memory.rates import LocalRates
from control_plane.adapters.memory.turns import LocalTurns
from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.redis.connection import SharedRedis
from control_plane.adapters.redis.rates import SharedRates
from control_plane.adapters.redis.turns import SharedTurns
from control_plane.adapters.redis.wake import PAUSE_SECONDS, SharedWake
from control_plane.contract.caller import TenantId
from control_plane.contract.secret import Secret
from control_plane.ports import Rates, Turns, Wake
from tests.control_plane.valkey import PASSWORD, Valkey, valkey

ACME, EVIL = TenantId("acme"), TenantId("evil")

_namespaces = count(1)


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[Valkey]:
    with valkey() as server:
        yield server


@dataclass
class Replicas:
    """Makes the ports of one replica after another; in memory there is one replica, over and over."""

    make: Callable[[], tuple[Wake, Turns, Rates]]
    redis: list[SharedRedis] = field(default_factory=list)

    def one(self) -> tuple[Wake, Turns, Rates]:
        return self.make()


def connected(server: Valkey, namespace: str) -> SharedRedis:
    return SharedRedis(server.url, password=Secret(PASSWORD), namespace=namespace)


@pytest.fixture(params=["memory", "valkey"])
async def replicas(request: pytest.FixtureRequest) -> AsyncIterator[Replicas]:
    if request.param == "memory":
        one = (LocalWake(), LocalTurns(), LocalRates())
        yield Replicas(lambda: one)
        return
    server = request.getfixturevalue("shared_valkey")
    namespace = f"conformance-{next(_namespaces)}"
    async with AsyncExitStack() as stack:
        wakes = []

        def make() -> tuple[Wake, Turns, Rates]:
            redis = connected(server, namespace)
            stack.push_async_callback(redis.close)
            wake = SharedWake(redis, LocalWake())
            wakes.append(wake)
            return wake, SharedTurns(redis, entropy=os.urandom), SharedRates(redis, LocalRates())

        made = [make(), make()]
        for wake in wakes:
            await stack.enter_async_context(wake.running())
            await asyncio.wait_for(wake.listen()(10), 10)  # it has subscribed
        following = iter(made * 10)
        yield Replicas(lambda: next(following))


# --- wake ------------------------------------------------------------------------------------------------------------


async def test_what_one_replica_announces_wakes_the_other(replicas: Replicas) -> None:
    (tells, _, _), (hears, _, _) = replicas.one(), replicas.one()
    wait = hears.listen()
    began = time.monotonic()

    tells.announce()
    await wait(10)

    assert time.monotonic() - began < 1


async def test_a_hundred_announcements_wake_and_the_last_one_too(replicas: Replicas) -> None:
    (tells, _, _), (hears, _, _) = replicas.one(), replicas.one()
    for _ in range(100):
        tells.announce()
    await hears.listen()(0.3)
    await asyncio.sleep(0)
    wait = hears.listen()
    began = time.monotonic()

    tells.announce()
    await wait(10)

    assert time.monotonic() - began < 1


async def test_a_closed_one_waits_for_nobody(replicas: Replicas) -> None:
    wake, _, _ = replicas.one()

    wake.close()
    await asyncio.wait_for(wake.listen()(60), 1)

    assert wake.closed


# --- turns -----------------------------------------------------------------------------------------------------------


async def test_one_after_another(replicas: Replicas) -> None:
    (_, one, _), (_, other, _) = replicas.one(), replicas.one()
    inside: list[int] = []
    most = 0

    async def take(turns: Turns) -> None:
        nonlocal most
        async with turns.turn("mint", tenant=ACME, seconds=10):
            inside.append(1)
            most = max(most, len(inside))
            await asyncio.sleep(0.02)
            inside.pop()

    await asyncio.gather(*(take(turns) for turns in (one, other) * 4))

    assert most == 1


async def test_turns_of_other_tenants_and_things_are_others(replicas: Replicas) -> None:
    (_, one, _), (_, other, _) = replicas.one(), replicas.one()

    async with (
        one.turn("mint", tenant=ACME, seconds=10),
        other.turn("mint", tenant=EVIL, seconds=10),
        other.turn("mint", tenant=None, seconds=10),
        other.turn("renew", tenant=ACME, seconds=10),
    ):
        pass


async def test_nobody_waits_longer_than_asked_for(replicas: Replicas) -> None:
    (_, one, _), (_, other, _) = replicas.one(), replicas.one()
    began = time.monotonic()

    async with one.turn("mint", tenant=ACME, seconds=30), other.turn("mint", tenant=ACME, seconds=0.2):
        waited = time.monotonic() - began

    assert 0.15 < waited < 2


async def test_a_turn_ends_with_an_error_too(replicas: Replicas) -> None:
    (_, one, _), (_, other, _) = replicas.one(), replicas.one()

    with pytest.raises(RuntimeError):
        async with one.turn("mint", tenant=ACME, seconds=30):
            raise RuntimeError
    began = time.monotonic()
    async with other.turn("mint", tenant=ACME, seconds=30):
        waited = time.monotonic() - began

    assert waited < 2


# --- rates -----------------------------------------------------------------------------------------------------------


async def test_a_windows_worth_is_allowed_at_once_and_no_more(replicas: Replicas) -> None:
    (_, _, one), (_, _, other) = replicas.one(), replicas.one()

    taken = [await rates.take("requests", tenant=ACME, limit=10, window_seconds=3600) for rates in (one, other) * 10]

    assert [take.allowed for take in taken] == [True] * 10 + [False] * 10
    assert all(0 < take.retry_after_seconds <= 360 for take in taken[10:])
    assert all(take.retry_after_seconds == 0 for take in taken[:10])


async def test_what_was_taken_comes_back_with_time(replicas: Replicas) -> None:
    _, _, rates = replicas.one()
    for _ in range(5):
        await rates.take("requests", tenant=ACME, limit=5, window_seconds=0.5)

    refused = await rates.take("requests", tenant=ACME, limit=5, window_seconds=0.5)
    await asyncio.sleep(refused.retry_after_seconds + 0.01)
    again = await rates.take("requests", tenant=ACME, limit=5, window_seconds=0.5)

    assert (refused.allowed, again.allowed) == (False, True)


async def test_each_tenant_and_each_thing_is_counted_by_itself(replicas: Replicas) -> None:
    _, _, rates = replicas.one()
    await rates.take("requests", tenant=ACME, limit=1, window_seconds=3600)

    assert not (await rates.take("requests", tenant=ACME, limit=1, window_seconds=3600)).allowed
    assert (await rates.take("requests", tenant=EVIL, limit=1, window_seconds=3600)).allowed
    assert (await rates.take("tokens", tenant=ACME, limit=1, window_seconds=3600)).allowed


async def test_an_amount_is_taken_whole_or_not_at_all(replicas: Replicas) -> None:
    _, _, rates = replicas.one()

    async def take(amount: float) -> bool:
        return (await rates.take("tokens", tenant=ACME, limit=100, window_seconds=3600, amount=amount)).allowed

    assert [await take(60), await take(60), await take(39), await take(101)] == [True, False, True, False]


async def test_many_at_once_take_no_more_than_there_is(replicas: Replicas) -> None:
    ports = [replicas.one()[2], replicas.one()[2]]

    taken = await asyncio.gather(
        *(rates.take("requests", tenant=ACME, limit=20, window_seconds=3600) for rates in ports * 30)
    )

    assert sum(take.allowed for take in taken) == 20


def test_what_is_kept_of_counts_is_bounded() -> None:
    now = [0.0]
    rates = LocalRates(lambda: now[0], most_kept=3)

    for number in range(10):
        asyncio.run(rates.take(f"{number}", tenant=ACME, limit=1, window_seconds=60))
    kept = len(rates._used_up_to)
    now[0] = 61
    asyncio.run(rates.take("x", tenant=ACME, limit=1, window_seconds=60))

    assert (kept, len(rates._used_up_to)) == (3, 1)


# --- Valkey by itself ------------------------------------------------------------------------------------------------


class Counted(LocalWake):
    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def announce(self) -> None:
        self.times += 1
        super().announce()


async def test_a_flood_of_messages_wakes_a_bounded_number_of_times(shared_valkey: Valkey) -> None:
    hears, floods = connected(shared_valkey, "flood"), connected(shared_valkey, "flood")
    counted = Counted()

    async with SharedWake(hears, counted).running():
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            await floods.ask(lambda client: client.publish(floods.key("outbox"), b"look"))
        took = time.monotonic() - began

    assert 2 <= counted.times <= took / PAUSE_SECONDS + 2
    await hears.close()
    await floods.close()


async def test_no_answer_is_waited_for_once_and_then_not_asked_for_a_while() -> None:
    """A server that takes connections and says nothing: nobody waits for it a second time."""
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
    redis = SharedRedis(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", namespace="silent")
    rates = SharedRates(redis, LocalRates())
    began = time.monotonic()

    taken = [await rates.take("requests", tenant=ACME, limit=100, window_seconds=60) for _ in range(50)]

    assert time.monotonic() - began < 1.9
    assert all(take.allowed for take in taken)
    await redis.close()
    server.close()


async def test_a_key_that_holds_something_else_is_no_answer(shared_valkey: Valkey) -> None:
    redis = connected(shared_valkey, "lies")
    rates, turns = SharedRates(redis, LocalRates()), SharedTurns(redis, entropy=os.urandom)
    for lie in (b"1e308", b"nan", b"-1e308", b"what", b"\xff"):
        await redis.ask(lambda client, lie=lie: client.set(redis.key("rate", tenant=ACME, name="requests"), lie))  # type: ignore[misc]
        taken = await rates.take("requests", tenant=ACME, limit=100, window_seconds=60)
        assert taken.allowed or taken.retry_after_seconds <= 61
    await redis.ask(lambda client: client.delete(redis.key("rate", tenant=ACME, name="requests")))
    await redis.ask(lambda client: client.rpush(redis.key("rate", tenant=ACME, name="requests"), b"a list"))

    assert (await rates.take("requests", tenant=ACME, limit=100, window_seconds=60)).allowed
    await redis.ask(lambda client: client.set(redis.key("turn", tenant=ACME, name="mint"), b"for ever"))
    began = time.monotonic()
    async with turns.turn("mint", tenant=ACME, seconds=0.2):
        assert time.monotonic() - began < 2
    await redis.close()


async def test_with_valkey_emptied_a_replica_still_keeps_its_own_limit(shared_valkey: Valkey) -> None:
    redis = connected(shared_valkey, "emptied")
    rates = SharedRates(redis, LocalRates())
    allowed = 0

    for _ in range(30):
        allowed += (await rates.take("requests", tenant=ACME, limit=10, window_seconds=3600)).allowed
        await redis.ask(lambda client: client.delete(redis.key("rate", tenant=ACME, name="requests")))

    assert allowed == 10
    await redis.close()
