"""What the control plane says reaches requests, and its absence too: questions, events, outages."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from control_plane.contract.placeholder import fingerprint
from control_plane.contract.wire import Ask
from tests.egress_proxy.world import World, get, reverse_path
from tests.support.control_plane_simulator import ControlPlaneSimulator, Ticket
from tests.support.raw_client import Line, Response
from tests.support.upstream import Gate, Upstream, chunk, endless_sse, gated, plain

MODES = ("forward", "reverse")


@pytest.fixture
def own_plane() -> Iterator[ControlPlaneSimulator]:
    """A control plane that this test may stop."""
    with ControlPlaneSimulator() as simulator:
        yield simulator


@pytest.fixture
def own_world(tmp_path: Path, own_plane: ControlPlaneSimulator, upstream_ca: trustme.CA) -> Iterator[World]:
    with World.start(tmp_path, own_plane, upstream_ca) as world:
        yield world


def ask(world: World, ticket: Ticket, *, placeholder: str = "") -> Response:
    with world.reverse() as line:
        return line.ask(
            get(reverse_path(ticket), headers={"Authorization": f"Bearer {placeholder or ticket.placeholder}"})
        )


# --- questions --------------------------------------------------------------------------------------------------------


def test_a_placeholder_is_asked_for_once(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url)

    for _ in range(5):
        assert ask(world, ticket).status == 200

    assert world.control_plane.asked_for(ticket.placeholder) == 1
    assert world.control_plane.asked_for(ticket.proxy_credential) == 1


def test_requests_that_come_together_ask_once(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url)
    world.control_plane.hold_answers.clear()
    lines = [world.reverse() for _ in range(8)]
    try:
        for line in lines:
            line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        world.control_plane.wait_for(lambda plane: plane.asked_for(ticket.proxy_credential))
        world.control_plane.hold_answers.set()
        statuses = [line.read_response().status for line in lines]
    finally:
        world.control_plane.hold_answers.set()
        for line in lines:
            line.close()

    assert statuses == [200] * 8
    assert world.control_plane.asked_for(ticket.placeholder) == 1


def test_a_placeholder_with_a_forged_tag_is_refused_without_a_question(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    ask(world, ticket)
    forged = world.control_plane.forged()

    response = ask(world, ticket, placeholder=forged)

    assert (response.status, response.refusal) == (403, "unknown_placeholder")
    assert world.control_plane.asked_for(forged) == 0


def test_an_expired_entry_is_asked_again_before_it_is_refused(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url, lives_seconds=1.5)
    assert ask(world, ticket).status == 200

    world.control_plane.change(ticket, expires_at=time.time() + 900)  # renewed in place; the event is late
    time.sleep(1.7)  # past the expiry that the cache knows

    assert ask(world, ticket).status == 200
    assert world.control_plane.asked_for(ticket.placeholder) == 2


def test_an_expired_placeholder_is_refused(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url, lives_seconds=-1)

    response = ask(world, ticket)

    assert (response.status, response.refusal) == (403, "expired_placeholder")
    assert upstream.accepted == 0


def test_an_expired_proxy_credential_is_refused(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url, of=world.control_plane.caller(tenant=world.tenant(), lives_seconds=-1))

    response = ask(world, ticket)

    assert (response.status, response.refusal) == (401, "token_expired")
    assert upstream.accepted == 0


# --- events -----------------------------------------------------------------------------------------------------------


def test_a_revoked_placeholder_is_refused_at_once(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    assert ask(world, ticket).status == 200

    world.control_plane.revoke(ticket)
    refused = _until_refused(world, ticket)

    assert (refused.status, refused.refusal) == (403, "revoked_placeholder")


def _until_refused(world: World, ticket: Ticket, *, timeout_seconds: float = 5) -> Response:
    deadline = time.monotonic() + timeout_seconds
    while (response := ask(world, ticket)).status == 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    return response


def test_a_rotated_secret_is_used_after_its_event(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url)
    assert ask(world, ticket).status == 200

    world.control_plane.change(ticket, secret="rotated-0123456789", version=2)
    world.control_plane.publish("credential", tenant=ticket.caller.tenant, id=ticket.binding.credential_id)
    world.control_plane.wait_for(lambda _: ask(world, ticket) and b"Bearer rotated-0123456789" in upstream.received())

    assert upstream.requests[-1].header("authorization") == "Bearer rotated-0123456789"


@pytest.mark.guards("egress_proxy/resolver.py", "            self._on_revoked(event)\n", "            pass\n")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((kind, mode) for kind in ("placeholder", "session", "grant", "credential", "tenant") for mode in MODES),
        # In reverse mode it is the request's own, and lives an hour at most.
        ("proxy_credential", "forward"),
    ],
)
def test_an_open_stream_is_cut_when_its_authority_is_revoked(
    world: World, upstream: Upstream, kind: str, mode: str
) -> None:
    ticket, other = world.ticket(upstream.url), world.ticket(upstream.url)
    upstream.default = endless_sse(gap_seconds=0.02)
    ids = {
        "placeholder": ticket.binding.placeholder_id,
        "session": ticket.caller.session or "",
        "grant": ticket.binding.grant_ids[0],
        "credential": ticket.binding.credential_id,
        "tenant": ticket.caller.tenant,
        "proxy_credential": fingerprint(ticket.proxy_credential),
    }
    with _stream(world, ticket, upstream, mode) as line, _stream(world, other, upstream, mode) as bystander:
        began = time.monotonic()
        world.control_plane.publish(kind, tenant=ticket.caller.tenant, id=ids[kind], revoked=True)
        response_end = _until_cut(line)

        assert time.monotonic() - began < 5
        assert b"\r\n0\r\n\r\n" not in response_end
        assert bystander.read_until(b"data: 9")


def _until_cut(line: Line, *, timeout_seconds: float = 8) -> bytes:
    """What still comes of an endless stream; it is not waited for without end."""
    deadline = time.monotonic() + timeout_seconds
    while line._more():
        assert time.monotonic() < deadline, "the stream goes on"
    return bytes(line.received)


def _stream(world: World, ticket: Ticket, upstream: Upstream, mode: str) -> Line:
    headers = {"Authorization": ticket.bearer}
    if mode == "forward":
        line = world.tunnel(ticket, upstream.authority)
        line.send(get("/", host=upstream.authority, headers=headers))
    else:
        line = world.reverse()
        line.send(get(reverse_path(ticket), headers=headers))
    line.read_until(b"data: 1")
    return line


@pytest.mark.guards("egress_proxy/resolver.py", "            self._on_missed()\n", "            pass\n")
@pytest.mark.parametrize("lost_by", ["a gap", "another epoch"])
def test_an_open_stream_is_cut_when_the_event_that_revoked_it_was_missed(
    own_world: World, upstream: Upstream, lost_by: str
) -> None:
    ticket, other = own_world.ticket(upstream.url), own_world.ticket(upstream.url)
    upstream.default = endless_sse(gap_seconds=0.02)

    with (
        _stream(own_world, ticket, upstream, "reverse") as line,
        _stream(own_world, other, upstream, "forward") as bystander,
    ):
        began = time.monotonic()
        own_world.control_plane.revoke(ticket, silently=True)
        if lost_by == "a gap":
            own_world.control_plane.publish("placeholder", tenant="nobody", id="p", skip=1)
        else:
            own_world.control_plane.restore()
        rest = _until_cut(line)

        assert time.monotonic() - began < 5
        assert b"\r\n0\r\n\r\n" not in rest
        bystander.read_until(b"data: 99\n")


def test_a_rotation_lets_open_streams_finish(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    gate = Gate()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    upstream.default = gated(head + chunk(b"begun"), gate, chunk(b"again") + b"0\r\n\r\n")

    with world.reverse() as line:
        line.send(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))
        line.read_until(b"begun")
        event = world.control_plane.publish("credential", tenant=ticket.caller.tenant, id=ticket.binding.credential_id)
        world.control_plane.change(ticket, secret="rotated")
        _until_heard(world, event.sequence)
        gate.open()

        assert line.read_until(b"0\r\n\r\n").endswith(b"again\r\n0\r\n\r\n")


def _until_heard(world: World, _: int) -> None:
    """Events are heard in order: once a later one has its effect, this one had."""
    probe = world.ticket("https://localhost:1")
    world.control_plane.revoke(probe)
    with world.reverse() as line:
        line.ask(get(reverse_path(probe), headers={"Authorization": probe.bearer}))


@pytest.mark.guards("egress_proxy/cache.py", "if as_of >= self.sequence:", "if True:")
def test_an_answer_overtaken_by_a_revocation_is_asked_again(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    with world.reverse() as line:
        # The caller and its policy are known; only the placeholder is still to be asked for.
        line.ask(get(reverse_path(ticket)))

    def revoke_now(_: Ask) -> None:
        world.control_plane.before_answer = None
        world.control_plane.revoke(ticket)

    world.control_plane.before_answer = revoke_now
    response = ask(world, ticket)

    assert world.control_plane.asked_for(ticket.placeholder) == 2
    assert (response.status, response.refusal) == (403, "revoked_placeholder")
    assert ticket.secret.encode() not in upstream.received()


def test_a_gap_in_the_events_makes_the_cache_ask_anew(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    assert ask(world, ticket).status == 200

    before = world.metric("cache_drops_total")
    world.control_plane.publish("placeholder", tenant="nobody", id="p", skip=5)
    world.control_plane.wait_for(lambda _: world.metric("cache_drops_total") > before)

    assert ask(world, ticket).status == 200
    assert world.control_plane.asked_for(ticket.placeholder) == 2


def test_a_restored_control_plane_makes_the_cache_ask_anew(own_world: World, upstream: Upstream) -> None:
    ticket = own_world.ticket(upstream.url)
    assert ask(own_world, ticket).status == 200

    own_world.control_plane.restore()
    own_world.control_plane.wait_for(lambda _: own_world.metric("cache_drops_total") > 0)

    assert ask(own_world, ticket).status == 200
    assert own_world.control_plane.asked_for(ticket.placeholder) == 2


def test_new_tag_keys_are_taken_up(own_world: World, upstream: Upstream) -> None:
    plane = own_world.control_plane
    plane.tag_key = bytes(range(32))
    plane.publish("tag_keys")
    ticket = own_world.ticket(upstream.url)

    plane.wait_for(lambda _: ask(own_world, ticket).status == 200)

    assert ticket.secret.encode() in upstream.received()


# --- outages ----------------------------------------------------------------------------------------------------------


def test_an_outage_leaves_warm_requests_alone_and_refuses_cold_ones(own_world: World, upstream: Upstream) -> None:
    warm, cold = own_world.ticket(upstream.url), own_world.ticket(upstream.url)
    assert ask(own_world, warm).status == 200

    own_world.control_plane.stop()
    still_warm, refused = ask(own_world, warm), ask(own_world, cold)

    assert still_warm.status == 200
    assert (refused.status, refused.refusal) == (503, "credential_unavailable")
    assert refused.header("retry-after")
    assert refused.header("x-should-retry") == ""
    assert cold.secret.encode() not in upstream.received()
    assert own_world.admin("/readyz")[0] == 200


@pytest.mark.long
def test_an_outage_ends_warm_requests_within_their_bound(own_world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    warm = own_world.ticket(upstream.url)
    assert ask(own_world, warm).status == 200

    own_world.control_plane.stop()
    began = time.monotonic()
    refused = _until_refused(own_world, warm, timeout_seconds=20)

    assert (refused.status, refused.refusal) == (503, "credential_unavailable")
    assert 9 < time.monotonic() - began < 14


def test_a_control_plane_that_comes_back_is_asked_again(own_world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = own_world.ticket(upstream.url)
    own_world.control_plane.stop()
    assert ask(own_world, ticket).status == 503

    own_world.control_plane.start()
    own_world.control_plane.wait_for(lambda _: ask(own_world, ticket).status == 200)

    assert ticket.secret.encode() in upstream.received()


@pytest.mark.guards("egress_proxy/resolver.py", "        self._cache.could_not_ask(ask)\n", "        pass\n")
def test_an_error_of_the_store_is_unavailable_and_never_unknown(own_world: World, upstream: Upstream) -> None:
    ticket = own_world.ticket(upstream.url)
    own_world.control_plane.answers = False

    response = ask(own_world, ticket)

    assert (response.status, response.refusal) == (503, "credential_unavailable")
    assert upstream.accepted == 0


def test_a_wrong_client_secret_swaps_nothing(tmp_path: Path, upstream_ca: trustme.CA, upstream: Upstream) -> None:
    with ControlPlaneSimulator() as plane:
        world = World(tmp_path, plane, upstream_ca)
        (tmp_path / "secret").write_text("wrong")
        with world.proxy_with() as world.thread:
            response = ask(world, world.ticket(upstream.url))

            assert (response.status, response.refusal) == (503, "credential_unavailable")
            assert world.admin("/readyz")[0] == 503
            assert world.admin("/healthz")[0] == 200
    assert upstream.accepted == 0


def test_a_proxy_that_never_reached_its_control_plane_is_not_ready(
    tmp_path: Path, own_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    own_plane.stop()
    world = World(tmp_path, own_plane, upstream_ca)
    with world.proxy_with() as world.thread:
        response = ask(world, world.ticket(upstream.url))

        assert world.admin("/readyz")[0] == 503
        assert (response.status, response.refusal) == (503, "credential_unavailable")
        own_plane.start()
        world.wait_until_ready()
        assert ask(world, world.ticket(upstream.url)).status == 200


def test_a_control_plane_ca_file_is_trusted_for_the_control_plane_alone(
    tmp_path: Path, world: World, upstream: Upstream
) -> None:
    own_ca = trustme.CA()
    own_ca.cert_pem.write_to_path(str(tmp_path / "cp-ca.pem"))
    with (
        World.start(
            tmp_path, world.control_plane, world.upstream_ca, control_plane_ca_file=tmp_path / "cp-ca.pem"
        ) as other,
        Upstream(own_ca) as impostor,
    ):
        response = ask(other, other.ticket(impostor.url))

        assert (response.status, response.refusal) == (502, "upstream_unverified")


def test_the_bindings_of_a_grant_are_checked_on_every_hit(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    assert ask(world, ticket).status == 200

    narrowed = tuple(replace(scope, methods=frozenset({"POST"})) for scope in ticket.binding.scopes)
    world.control_plane.change(ticket, scopes=narrowed)
    world.control_plane.publish("grant", tenant=ticket.caller.tenant, id=ticket.binding.grant_ids[0])
    refused = _until_refused(world, ticket)

    assert (refused.status, refused.refusal) == (403, "method_denied")


@pytest.mark.guards(
    "egress_proxy/core/decision.py", "_check_caller(binding, caller)\n            _check_expiry", "_check_expiry"
)
@pytest.mark.parametrize(
    ("of", "told"), [("the same tenant", "caller_mismatch"), ("another tenant", "unknown_placeholder")]
)
def test_an_entry_that_the_first_caller_warmed_serves_no_second_one(
    world: World, upstream: Upstream, of: str, told: str
) -> None:
    tenant = world.tenant()
    first = world.ticket(upstream.url, tenant=tenant, subject="alice")
    second = world.ticket(upstream.url, tenant=tenant if of == "the same tenant" else world.tenant(), subject="bob")
    with world.reverse() as line:
        own = [line.ask(get(reverse_path(each), headers={"Authorization": each.bearer})) for each in (first, second)]
        asked_before = world.control_plane.asked_for(first.placeholder)
        used = line.ask(get(reverse_path(second), headers={"Authorization": first.bearer}))
        again = line.ask(get(reverse_path(first), headers={"Authorization": first.bearer}))

    assert [reply.status for reply in own] == [200, 200]
    assert (used.status, used.refusal) == (403, told)
    assert again.status == 200
    assert [request.header("authorization") for request in upstream.requests] == [
        f"Bearer {each.secret}" for each in (first, second, first)
    ]
    assert asked_before == world.control_plane.asked_for(first.placeholder) == 1
