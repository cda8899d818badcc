"""Placeholders are renewed in place, in time, and also after a laptop's sleep."""

import asyncio
from typing import cast

import pytest

from coatcheck.client import ControlPlane, Exchanged, RefusedCommandError
from coatcheck.lease import WAY_OUT, Lease
from coatcheck.terminal import CommandError


def exchanged(name: str, *, expires_in: int = 900) -> Exchanged:
    return Exchanged(
        {
            "upstream_credential": {"mode": "placeholder", "value": f"coatchk1-{name}"},
            "proxy_credential": f"coatprx1-{name}",
            "expires_in": expires_in,
        }
    )


class RenewingControlPlane:
    """Renews, unless told otherwise; remembers for what it was asked."""

    def __init__(self) -> None:
        self.renewed: list[str] = []
        self.error: CommandError | None = None

    def renew(self, held: Exchanged) -> Exchanged:
        if self.error is not None:
            raise self.error
        self.renewed.append(held.placeholder)
        return held


class World:
    def __init__(self, **held: Exchanged) -> None:
        self.now = 1000.0
        self.said: list[str] = []
        self.control_plane = RenewingControlPlane()
        self.lease = Lease(cast(ControlPlane, self.control_plane), held, clock=lambda: self.now, say=self.said.append)


async def test_a_renewal_is_due_after_two_thirds_of_the_shortest_life() -> None:
    world = World(short=exchanged("short", expires_in=300), long=exchanged("long", expires_in=900))

    world.now += 199
    await world.lease.renew_if_due()
    too_early = list(world.control_plane.renewed)
    world.now += 1
    await world.lease.renew_if_due()

    assert too_early == []
    assert world.control_plane.renewed == ["coatchk1-short", "coatchk1-long"]


async def test_after_a_sleep_a_connection_waits_for_the_renewal() -> None:
    world = World(only=exchanged("only"))

    world.now += 8 * 3600
    credential = await world.lease.live_proxy_credential()

    assert credential == "coatprx1-only"
    assert world.control_plane.renewed == ["coatchk1-only"]


async def test_connections_at_once_renew_once() -> None:
    world = World(only=exchanged("only"))
    world.now += 8 * 3600

    await asyncio.gather(*(world.lease.live_proxy_credential() for _ in range(10)))

    assert world.control_plane.renewed == ["coatchk1-only"]


async def test_while_the_control_plane_is_away_it_is_asked_again_and_nothing_is_given_up() -> None:
    world = World(only=exchanged("only"))
    world.control_plane.error = CommandError("away")
    world.now += 700
    await world.lease.renew_if_due()

    world.control_plane.error = None
    world.now += 1
    await world.lease.renew_if_due()

    assert world.control_plane.renewed == ["coatchk1-only"]
    assert world.said == []


async def test_a_placeholder_that_may_no_longer_be_renewed_is_told_once() -> None:
    world = World(gone=exchanged("gone"))
    world.control_plane.error = RefusedCommandError("withdrawn", "", code="credential_not_found", status=400)

    for _ in range(3):
        world.now += 700
        await world.lease.renew_if_due()

    assert world.said == ["the placeholder of gone can no longer be renewed: withdrawn"]


async def test_a_run_without_credentials_renews_its_way_out() -> None:
    world = World(**{WAY_OUT: Exchanged({"proxy_credential": "coatprx1-alone", "expires_in": 900})})
    world.control_plane.error = RefusedCommandError("over", "", code="session_over", status=400)

    world.now += 700
    credential = await world.lease.live_proxy_credential()

    assert credential == "coatprx1-alone"
    assert world.said == ["the way out can no longer be renewed: over"]


async def test_keeping_renews_by_itself_until_it_is_cancelled() -> None:
    world = World(only=exchanged("only"))
    world.now += 700

    keeping = asyncio.create_task(world.lease.keep())
    async with asyncio.timeout(5):
        while not world.control_plane.renewed:
            await asyncio.sleep(0.01)
    keeping.cancel()

    with pytest.raises(asyncio.CancelledError):
        await keeping
