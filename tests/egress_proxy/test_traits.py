"""What a destination allows or demands beyond receiving a secret: ranges, unsearchable replies, no foreign keys, a CA
of its own; and secrets that stand in the path."""

import gzip

import pytest
import trustme

from control_plane.contract.placement import HeaderPlacement, PathPlacement, QueryPlacement
from tests.egress_proxy.world import World, get, reverse_path
from tests.support.control_plane_simulator import Ticket
from tests.support.raw_client import Response
from tests.support.upstream import Upstream, message, plain, sends

SUBSTITUTION = "egress_proxy/core/substitution.py"
DECISION = "egress_proxy/core/decision.py"


def ask(world: World, ticket: Ticket, headers: dict[str, str] | None = None, path: str = "/") -> Response:
    with world.reverse() as line:
        return line.ask(get(reverse_path(ticket, path), headers={"Authorization": ticket.bearer, **(headers or {})}))


# --- in the path ------------------------------------------------------------------------------------------------------


def test_a_secret_goes_into_its_segment_of_the_path(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url, placements=(PathPlacement("bot{secret}"),), secret="12345:AA/bb?cc#0123456789")

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(get(f"/bot{ticket.placeholder}/getMe?a=b", host=upstream.authority))

    assert response.status == 200
    assert upstream.requests[0].target == "/bot12345%3AAA%2Fbb%3Fcc%230123456789/getMe?a=b"


@pytest.mark.parametrize(
    "path", ["/{p}/x", "/bot{p}-x/y", "/x/bot{p}/bot{p}/", "/x?y=/bot{p}/", "/%62ot{p}/", "/BOT{p}/", "/bot{p};v=1/"]
)
@pytest.mark.guards(
    SUBSTITUTION, "return _segments(mark.text).count(_segment(placement, token.text)) == 1", "return True"
)
def test_a_placeholder_elsewhere_in_the_target_is_refused(world: World, upstream: Upstream, path: str) -> None:
    ticket = world.ticket(upstream.url, placements=(PathPlacement("bot{secret}"),))

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(get(path.format(p=ticket.placeholder), host=upstream.authority))

    assert (response.status, response.refusal) == (403, "placement_denied")
    assert not upstream.requests


def test_the_trail_has_the_path_without_the_placeholder(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url, placements=(PathPlacement("bot{secret}"),))

    with world.tunnel(ticket, upstream.authority) as line:
        line.ask(get(f"/bot{ticket.placeholder}/getMe", host=upstream.authority))

    tenant = ticket.caller.tenant
    event = world.control_plane.wait_for(
        lambda plane: next((e for e in plane.audited if e.tenant == tenant and e.action == "swap"), None)
    )
    assert event.path is not None
    assert "{placeholder}" in event.path
    assert ticket.placeholder not in event.path


# --- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.guards(SUBSTITUTION, "frozenset() if ranges or not swaps else _RANGES", "frozenset()")
def test_a_range_of_a_swapped_request_goes_on_only_where_it_may(
    world: World, upstream: Upstream, allowed: bool
) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url, traits={"ranges": allowed})

    ask(world, ticket, {"Range": "bytes=1-2", "If-Range": '"x"'})

    seen = upstream.requests[0]
    assert (seen.values("range"), seen.values("if-range")) == ((["bytes=1-2"], ['"x"']) if allowed else ([], []))


def test_a_range_of_a_bare_request_goes_on(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        line.ask(get(reverse_path(ticket), headers={"Range": "bytes=1-2"}))

    assert upstream.requests[0].values("range") == ["bytes=1-2"]


# --- replies that cannot be searched --------------------------------------------------------------------------------


@pytest.mark.guards("egress_proxy/exchange.py", "if cannot_be_searched and not", "if False and not")
def test_a_coded_reply_passes_only_where_it_may(world: World, upstream: Upstream) -> None:
    coded = gzip.compress(b"hello")
    upstream.default = sends(message(coded, headers=[("Content-Encoding", "gzip")]))
    open_, closed = (world.ticket(upstream.url, traits={"unsearchable": flag}) for flag in (True, False))

    passed = ask(world, open_, {"Accept-Encoding": "gzip"})
    blocked = ask(world, closed, {"Accept-Encoding": "gzip"})

    assert (passed.status, passed.body) == (200, coded)
    assert (blocked.status, blocked.refusal) == (502, "response_leak_blocked")
    assert [seen.values("accept-encoding") for seen in upstream.requests] == [["gzip"], ["identity"]]


# --- foreign keys -----------------------------------------------------------------------------------------------------

FOREIGN = {
    "bearer": {"Authorization": "Bearer attackers-own"},
    "basic": {"Authorization": "Basic dTpw"},
    "custom": {"X-Api-Key": "attackers-own"},
    "underscored": {"X_Api_Key": "attackers-own"},
    "placement": {"X-Service-Key": "attackers-own"},
    "cookie": {"Cookie": "session=attackers-own"},
}


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.guards(DECISION, "if any(field.name.replace", "if False and any(field.name.replace")
def test_a_strict_destination_takes_no_key_but_ours(world: World, upstream: Upstream, foreign: str) -> None:
    upstream.default = plain(b"ok")
    placements = (HeaderPlacement("x-service-key"), QueryPlacement("key"))
    ticket = world.ticket(upstream.url, placements=placements, traits={"strict": True})

    with world.reverse() as line:
        bare = line.ask(get(reverse_path(ticket)))
        refused = line.ask(get(reverse_path(ticket), headers=FOREIGN[foreign]))
        beside = {"X-Service-Key": ticket.placeholder, **FOREIGN[foreign]}
        mixed = line.ask(get(reverse_path(ticket), headers=beside)) if foreign != "placement" else refused

    assert bare.status == 200
    assert (refused.status, refused.refusal) == (403, "foreign_credential")
    assert (mixed.status, mixed.refusal) == (403, "foreign_credential")
    assert len(upstream.requests) == 1


@pytest.mark.guards(DECISION, "    if not all(has_marker(value", "    if False and not all(has_marker(value")
def test_a_strict_destination_takes_no_foreign_query_parameter(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url, placements=(QueryPlacement("key"),), traits={"strict": True})

    with world.reverse() as line:
        refused = line.ask(get(reverse_path(ticket, "/?key=attackers-own")))
        swapped = line.ask(get(reverse_path(ticket, f"/?key={ticket.placeholder}")))

    assert (refused.status, refused.refusal) == (403, "foreign_credential")
    assert swapped.status == 200
    assert len(upstream.requests) == 1


@pytest.mark.guards("egress_proxy/core/plan.py", "and not self.forward.handling.strict", "and True")
def test_a_connection_that_was_honest_once_is_looked_at_again(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url, traits={"strict": True})

    with world.reverse() as line:
        honest = {"Authorization": ticket.bearer}
        statuses = [line.ask(get(reverse_path(ticket), headers=honest)).status for _ in range(3)]
        refused = line.ask(get(reverse_path(ticket), headers={**honest, "X-Api-Key": "attackers-own"}))

    assert statuses == [200] * 3
    assert (refused.status, refused.refusal) == (403, "foreign_credential")


def test_a_destination_that_is_not_strict_takes_a_foreign_key(world: World, upstream: Upstream) -> None:
    upstream.default = plain(b"ok")
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        response = line.ask(get(reverse_path(ticket), headers={"Authorization": "Bearer my-own"}))

    assert response.status == 200
    assert upstream.requests[0].header("authorization") == "Bearer my-own"


# --- a CA of its own ------------------------------------------------------------------------------------------------


def pem(ca: trustme.CA) -> str:
    return ca.cert_pem.bytes().decode()


def test_a_destinations_own_ca_is_trusted_for_it(world: World) -> None:
    ca = trustme.CA()
    with Upstream(ca) as private:
        private.default = plain(b"ok")
        ticket = world.ticket(private.url, traits={"ca_pem": pem(ca)})

        assert [ask(world, ticket).status for _ in range(2)] == [200, 200]


@pytest.mark.guards("egress_proxy/upstream.py", "        if lane.ca_pem is None:\n", "        if True:\n")
def test_a_destination_with_a_ca_of_its_own_trusts_no_other(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url, traits={"ca_pem": pem(trustme.CA())})

    response = ask(world, ticket)

    assert (response.status, response.refusal) == (502, "upstream_unverified")
    assert not upstream.requests


@pytest.mark.guards(
    "egress_proxy/upstream.py",
    "lane = self._lanes.get((tenant, endpoint, ca_pem))",
    "lane = next((known for key, known in self._lanes.items() if key[:2] == (tenant, endpoint)), None)",
)
def test_a_connection_verified_by_one_ca_serves_no_credential_that_trusts_another(
    world: World, upstream: Upstream
) -> None:
    upstream.default = plain(b"ok")
    usual = world.ticket(upstream.url)
    other = world.ticket(
        upstream.url,
        credential="other",
        of=(usual.caller, usual.proxy_credential),
        traits={"ca_pem": pem(trustme.CA())},
    )
    assert ask(world, usual).status == 200

    response = ask(world, other)

    assert (response.status, response.refusal) == (502, "upstream_unverified")


@pytest.mark.guards("egress_proxy/upstream.py", "known[0] is context else None", "False else None")
def test_a_next_connection_goes_on_with_the_tls_session_of_its_own_tenants_last(
    world: World, upstream_ca: trustme.CA
) -> None:
    with Upstream(upstream_ca, tickets=2) as upstream:
        upstream.default = plain(b"ok")
        ticket, stranger = world.ticket(upstream.url), world.ticket(upstream.url)
        with world.reverse() as line:
            request = get(reverse_path(ticket), headers={"Authorization": ticket.bearer})
            assert line.ask(request).status == 200
            upstream.drop_idle_connections()
            world.control_plane.wait_for(lambda _: upstream.connections[0].closed_at is not None)
            world.control_plane.wait_for(lambda _: world.metric("open_upstream_connections") == 0)
            assert line.ask(request).status == 200
        assert ask(world, stranger).status == 200

        assert [connection.resumed for connection in upstream.connections] == [False, True, False]
