"""Limits on the wire: what is used up is refused with a time to come back, and what a model's reply cost is counted."""

import asyncio
import secrets
import threading
from collections.abc import Sequence

import pytest

from control_plane.contract.wire import BoundLimit, Measure, QuotaAnswer, QuotaEntry, QuotaGrant
from egress_proxy.client import MAX_ROUNDS
from egress_proxy.core.quota import Quotas
from egress_proxy.quotas import QuotaLink
from tests.egress_proxy.world import World, get
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import Line
from tests.support.upstream import Behaviour, Gate, Request, Upstream, Wire, chunk, message, plain

CLIENT = "egress_proxy/client.py"
ANTHROPIC = b'{"content":[],"usage":{"input_tokens":1200,"output_tokens":300}}'
STREAM = (
    b'event: message_start\ndata: {"message":{"usage":{"input_tokens":1000,"output_tokens":1}}}\n\n',
    b'event: message_delta\ndata: {"usage":{"output_tokens":250}}\n\n',
)


def limit(measure: Measure = Measure.REQUESTS, *, amount: int = 100) -> BoundLimit:
    return BoundLimit(f"lim_{secrets.token_hex(4)}", measure, amount=amount, window_seconds=60)


def limited(world: World, upstream: Upstream, bound: BoundLimit, *, left: int, slice_: int = 1) -> Ticket:
    world.control_plane.quota[bound.id] = left
    world.control_plane.quota_slice = slice_
    upstream.on("/", plain())
    return world.ticket(upstream.url, limits=(bound,))


def asked(line: Line, ticket: Ticket, upstream: Upstream, path: str = "/", *, method: str = "GET") -> tuple[int, bytes]:
    headers = {"Authorization": ticket.bearer} | ({"Content-Length": "0"} if method == "POST" else {})
    response = line.ask(get(path, host=upstream.authority, headers=headers, method=method))
    return response.status, response.body


@pytest.mark.guards(CLIENT, "        if forward.limits:\n", "        if False:\n")
@pytest.mark.parametrize("slice_", [1, 2, 50])
def test_as_many_requests_go_as_the_limit_allows_and_the_next_is_refused(
    world: World, upstream: Upstream, slice_: int
) -> None:
    ticket = limited(world, upstream, limit(amount=100), left=4, slice_=slice_)

    with world.tunnel(ticket, upstream.authority) as line:
        went = [asked(line, ticket, upstream)[0] for _ in range(4)]
        refused = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert went == [200] * 4
    assert (refused.status, refused.header("coatcheck-refusal")) == (429, "rate_limited")
    assert 1 <= int(refused.header("retry-after")) <= 60
    assert len(upstream.requests) == 4


def test_many_connections_at_once_share_what_there_is(world: World, upstream: Upstream) -> None:
    ticket = limited(world, upstream, limit(), left=5, slice_=3)
    statuses: list[int] = []

    def ask_twice() -> None:
        with world.tunnel(ticket, upstream.authority) as line:
            statuses.extend(asked(line, ticket, upstream)[0] for _ in range(2))

    threads = [threading.Thread(target=ask_twice) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert sorted(statuses) == [200] * 5 + [429] * 7
    assert len(upstream.requests) == 5


def test_what_was_given_may_be_used_in_an_outage_and_then_it_is_unavailable(world: World, upstream: Upstream) -> None:
    ticket = limited(world, upstream, limit(), left=100, slice_=2)
    ask = get("/", host=upstream.authority, headers={"Authorization": ticket.bearer})

    async def goes_away(_: Request, wire: Wire) -> None:
        world.control_plane.answers_quota = False
        await wire.write(message(b"ok"))

    upstream.on("/", goes_away)
    with world.tunnel(ticket, upstream.authority) as line:
        try:
            line.send(ask * 3)  # at once: what lies idle for two seconds is given back
            first, second, third = (line.read_response() for _ in range(3))
        finally:
            world.control_plane.answers_quota = True

    assert (first.status, second.status) == (200, 200)
    assert (third.status, third.header("coatcheck-refusal"), third.header("retry-after")) == (
        503,
        "credential_unavailable",
        "1",
    )


def test_an_idle_slice_is_given_back(world: World, upstream: Upstream) -> None:
    bound = limit()
    ticket = limited(world, upstream, bound, left=50, slice_=10)

    with world.tunnel(ticket, upstream.authority) as line:
        asked(line, ticket, upstream)

    world.control_plane.wait_for(lambda plane: plane.quota[bound.id] == 49)


def test_a_limit_that_is_gone_holds_up_nobody(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url, limits=(limit(),))
    upstream.on("/", plain())

    with world.tunnel(ticket, upstream.authority) as line:
        assert [asked(line, ticket, upstream)[0] for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("form", ["json", "stream"])
@pytest.mark.guards(
    "egress_proxy/core/usage.py",
    "        self.usage.feed(data)\n        return super().feed(data)",
    "        return super().feed(data)",
)
def test_what_a_reply_cost_counts_against_a_limit_of_tokens(world: World, upstream: Upstream, form: str) -> None:
    bound = limit(Measure.TOKENS, amount=100_000)
    ticket = limited(world, upstream, bound, left=100_000)
    upstream.on("/v1/messages", plain(ANTHROPIC) if form == "json" else streamed(*STREAM))

    with world.tunnel(ticket, upstream.authority) as line:
        status, body = asked(line, ticket, upstream, "/v1/messages", method="POST")

    cost = 1_500 if form == "json" else 1_250
    assert status == 200
    assert body == (ANTHROPIC if form == "json" else b"".join(STREAM))
    world.control_plane.wait_for(lambda plane: plane.quota[bound.id] == 100_000 - cost)


def test_a_limit_of_tokens_that_is_used_up_refuses_the_next_request(world: World, upstream: Upstream) -> None:
    bound = limit(Measure.TOKENS, amount=1_000)
    ticket = limited(world, upstream, bound, left=1_000)
    upstream.on("/v1/messages", plain(ANTHROPIC))

    with world.tunnel(ticket, upstream.authority) as line:
        first = asked(line, ticket, upstream, "/v1/messages", method="POST")[0]
        world.control_plane.wait_for(lambda plane: plane.quota[bound.id] <= -500)
        second = line.ask(get("/", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert first == 200
    assert (second.status, second.header("coatcheck-refusal")) == (429, "spend_limit_exceeded")


def test_a_stream_that_the_client_leaves_is_counted_too(world: World, upstream: Upstream) -> None:
    bound, gate = limit(Measure.TOKENS, amount=100_000), Gate()
    ticket = limited(world, upstream, bound, left=100_000)
    upstream.on("/v1/messages", streamed(STREAM[0], gate=gate))

    with world.tunnel(ticket, upstream.authority) as line:
        headers = {"Authorization": ticket.bearer, "Content-Length": "0"}
        line.send(get("/v1/messages", host=upstream.authority, headers=headers, method="POST"))
        line.read_until(b"message_start")

    world.control_plane.wait_for(lambda plane: plane.quota[bound.id] == 100_000 - 1_001)
    gate.open()


def test_a_credential_without_limits_asks_nothing_of_quotas(world: World, upstream: Upstream) -> None:
    before = len(world.control_plane.quota_entries)
    ticket = world.ticket(upstream.url)

    with world.tunnel(ticket, upstream.authority) as line:
        assert asked(line, ticket, upstream)[0] == 200

    assert not [entry for entry in world.control_plane.quota_entries[before:] if entry.wanted]


def streamed(*events: bytes, gate: Gate | None = None) -> Behaviour:
    async def behave(_: Request, wire: Wire) -> None:
        await wire.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in events:
            await wire.write(chunk(event))
        if gate is not None:
            await gate.opened()
        await wire.write(chunk(b""))

    return behave


@pytest.mark.guards("egress_proxy/quotas.py", "            del self._asking[key]", "            pass")
async def test_who_finds_a_slice_used_up_by_others_asks_for_another() -> None:
    asked: list[Sequence[QuotaEntry]] = []
    limit = BoundLimit(id="lim", measure=Measure.REQUESTS, amount=9, window_seconds=60)

    async def tell(entries: Sequence[QuotaEntry]) -> QuotaAnswer:
        asked.append(entries)
        return QuotaAnswer((QuotaGrant("lim", "", granted=1, window=1, ends_in_seconds=60.0),))

    loop, quotas = asyncio.get_running_loop(), Quotas()
    link = QuotaLink(quotas, tell, monotonic=loop.time)

    async def takes_one_in_the_end() -> bool:
        for _ in range(MAX_ROUNDS):
            if quotas.take([limit], loop.time()) is not None:
                return True
            await link.ask(limit)
        return False

    assert await asyncio.gather(*(takes_one_in_the_end() for _ in range(4))) == [True] * 4
    assert len(asked) == 4
