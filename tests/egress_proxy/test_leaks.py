"""Secrets that upstreams give back: overwritten or blocked, told to the trail, and stopped when it goes on."""

import base64
import gzip
import json
from collections.abc import Callable, Mapping
from urllib.parse import quote

import pytest

from control_plane.contract.wire import AuditEvent
from egress_proxy.cache import Cache
from egress_proxy.leaks import LEAKS, WINDOW_SECONDS, LeakWatch
from tests.egress_proxy.world import World, get, reverse_path
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import Response
from tests.support.upstream import Behaviour, Upstream, chunk, message, mirror_headers, plain, sends, sends_then_closes

SECRET = 'real-0123456789abcdef/+"%ghij'
SHORT = "hunter2hunter2"
WRITTEN = {
    "raw": SECRET.encode(),
    "percent": quote(SECRET, safe="").encode(),
    "JSON": json.dumps(SECRET).encode(),
    "base64": base64.b64encode(SECRET.encode()),
    "base64 of user and secret": base64.b64encode(f"anybody:{SECRET}".encode()),
}
FRAMINGS: Mapping[str, Callable[[bytes], bytes]] = {
    "with a length": lambda body: message(body),
    "in chunks": lambda body: (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(chunk(body[at : at + 7]) for at in range(0, len(body), 7))
        + b"0\r\n\r\n"
    ),
    "until the end": lambda body: b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body,
    "in a field": lambda body: message(b"ok", headers=[("X-Echo", body.decode())]),
    "in the reason": lambda body: b"HTTP/1.1 200 " + body + b"\r\nContent-Length: 0\r\n\r\n",
    "as an error": lambda body: b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
}


def replies(framing: str, body: bytes) -> Behaviour:
    reply = FRAMINGS[framing](body)
    return sends_then_closes(reply) if framing == "until the end" else sends(reply)


def ask(world: World, ticket: Ticket, path: str = "/") -> tuple[Response, bytes]:
    """The response, and every byte that came to the client."""
    with world.reverse() as line:
        response = line.ask(get(reverse_path(ticket, path), headers={"Authorization": ticket.bearer}))
        return response, bytes(line.received)


def leaks_of(world: World, ticket: Ticket) -> list[AuditEvent]:
    def found(events: list[AuditEvent]) -> list[AuditEvent]:
        return [e for e in events if e.tenant == ticket.caller.tenant and e.action == "leak_blocked"]

    world.control_plane.wait_for(lambda plane: found(plane.audited))
    return found(world.control_plane.audited)


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("framing", FRAMINGS)
def test_no_form_of_a_secret_comes_back_anywhere_in_a_reply(
    world: World, upstream: Upstream, written: str, framing: str
) -> None:
    ticket = world.ticket(upstream.url, secret=SECRET)
    upstream.default = replies(framing, b"before " + WRITTEN[written] + b" after")

    _, received = ask(world, ticket)

    assert b"before " in received
    assert b"****" in received
    assert WRITTEN[written] not in received
    assert WRITTEN[written][24:] not in received


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_short_secret_that_comes_back_blocks_the_reply(world: World, upstream: Upstream, framing: str) -> None:
    ticket = world.ticket(upstream.url, secret=SHORT)
    upstream.default = replies(framing, b"before " + SHORT.encode() + b" after")

    with world.reverse() as line:
        line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer, "Connection": "close"}))
        received = line.read_to_end()

    assert SHORT.encode() not in received
    assert b"after" not in received
    assert b"Coatcheck-Refusal: response_leak_blocked" in received
    [leak] = leaks_of(world, ticket)
    assert leak.placeholder_id == ticket.binding.placeholder_id


@pytest.mark.guards(
    "egress_proxy/client.py", "services.leaks.note(binding.placeholder_id, services.loop.time())", "pass"
)
def test_a_placeholder_whose_secret_keeps_coming_back_is_suspended(world: World, upstream: Upstream) -> None:
    upstream.default = mirror_headers()
    ticket, other = world.ticket(upstream.url), world.ticket(upstream.url)

    mirrored = [ask(world, ticket)[0].status for _ in range(LEAKS)]
    refused, _ = ask(world, ticket)
    upstream.default = plain(b"ok")
    innocent, _ = ask(world, other)

    assert mirrored == [200] * LEAKS
    assert (refused.status, refused.refusal) == (403, "revoked_placeholder")
    assert innocent.status == 200
    assert len(leaks_of(world, ticket)) == LEAKS
    assert len(upstream.requests) == LEAKS + 1


def test_a_kept_connection_is_no_way_around_a_suspension(world: World, upstream: Upstream) -> None:
    upstream.default = mirror_headers()
    ticket = world.ticket(upstream.url)
    request = get(reverse_path(ticket), headers={"Authorization": ticket.bearer})

    with world.reverse() as line:
        statuses = [line.ask(request).status for _ in range(LEAKS + 2)]

    assert statuses == [200] * LEAKS + [403, 403]


def test_a_coded_reply_to_a_swapped_request_does_not_pass(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url, secret=SECRET)
    coded = gzip.compress(SECRET.encode())
    upstream.default = sends(message(coded, headers=[("Content-Encoding", "gzip")]))

    response, received = ask(world, ticket)

    assert (response.status, response.refusal) == (502, "response_leak_blocked")
    assert coded not in received


# --- counting ---------------------------------------------------------------------------------------------------------


def test_leaks_far_apart_suspend_nothing() -> None:
    suspended: list[str] = []
    watch = LeakWatch(lambda placeholder, _: suspended.append(placeholder))

    for number in range(10):
        watch.note("ph_1", number * WINDOW_SECONDS / (LEAKS - 1) + number)

    assert suspended == []


@pytest.mark.guards("egress_proxy/leaks.py", "len(seen) < LEAKS or", "len(seen) <= LEAKS or")
def test_as_many_leaks_as_are_too_many_suspend_that_placeholder_alone() -> None:
    suspended: list[str] = []
    watch = LeakWatch(lambda placeholder, _: suspended.append(placeholder))

    for number in range(LEAKS):
        watch.note("ph_1", float(number))
        if number:
            watch.note("ph_2", float(number))

    assert suspended == ["ph_1"]


@pytest.mark.guards(
    "egress_proxy/cache.py", "return removals + self._rings + self._suspensions", "return removals + self._rings"
)
def test_a_suspension_is_seen_by_whoever_remembers_a_decision() -> None:
    now = [0.0]
    cache = Cache(limit=8, monotonic=lambda: now[0], clock=lambda: now[0])
    before = cache.revision

    cache.suspend("ph_1", 600.0)

    assert cache.revision != before
