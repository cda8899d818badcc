"""Nothing about the way goes upstream: not who asked, not from where, not through whom (ADR 0025)."""

from collections.abc import Callable, Iterator

import pytest

from tests.egress_proxy.world import World, get
from tests.support.control_plane_simulator import Ticket
from tests.support.upstream import Upstream, plain

FIELDS = "egress_proxy/core/fields.py"

ABOUT_THE_WAY = [
    "Forwarded",
    "X-Forwarded-For",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "X-Forwarded-Port",
    "X-Forwarded-Prefix",
    "X-Forwarded-User",
    "X-Forwarded-Client-Cert",
    "X-Forwarded-Anything-New",
    "X-Real-IP",
    "X-Client-IP",
    "X-Cluster-Client-IP",
    "True-Client-IP",
    "CF-Connecting-IP",
    "X-SSL-Client-Cert",
    "X-Client-Cert",
    "Client-Cert",
    "Via",
    "X-SH-Subject",
    "Coatcheck-Subject",
    "Coatcheck-Request-Id",
]
SPELLINGS: list[Callable[[str], str]] = [str, str.lower, str.upper, lambda name: name.replace("-", "_")]
WAYS = ["tunnel", "plain", "reverse", "reverse by path"]


@pytest.fixture
def plain_upstream() -> Iterator[Upstream]:
    with Upstream(None) as upstream:
        yield upstream


def sent_through(world: World, upstream: Upstream, ticket: Ticket, way: str, headers: dict[str, str]) -> None:
    """One request with these headers, swapped wherever the way allows a secret."""
    swapped = headers | {"Authorization": ticket.bearer}
    proof = {"Proxy-Authorization": f"Bearer {ticket.proxy_credential}"}
    match way:
        case "tunnel":
            with world.tunnel(ticket, upstream.authority) as line:
                response = line.ask(get("/x", host=upstream.authority, headers=swapped))
        case "plain":
            host = upstream.authority
            with world.forward() as line:
                response = line.ask(get(f"http://{host}/x", host=host, headers=headers | proof))
        case "reverse":
            with world.reverse() as line:
                response = line.ask(get(f"/{ticket.credential}/x", headers=swapped | proof))
        case _:
            with world.reverse() as line:
                response = line.ask(get(f"/~{ticket.proxy_credential}/{ticket.credential}/x", headers=swapped))
    assert response.status == 200, response.head


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.guards(FIELDS, 'ours = _is_for_us(name.replace(b"_", b"-"))', "ours = _is_for_us(name)")
@pytest.mark.guards(FIELDS, "or name in _FORWARDING\n", "\n")
@pytest.mark.guards(FIELDS, "(_OWN_PREFIX, *_FORWARDING_PREFIXES)", "_OWN_PREFIX")
def test_no_field_about_the_way_reaches_an_upstream_in_any_spelling(
    world: World, upstream: Upstream, plain_upstream: Upstream, way: str
) -> None:
    target = plain_upstream if way == "plain" else upstream
    target.on("/x", plain())
    ticket = world.ticket(target.url)
    host, _, port = target.authority.partition(":")
    world.control_plane.allow(ticket.caller.tenant, host, int(port), allow_private=True)

    for spelling in SPELLINGS:
        headers = {spelling(name): "198.51.100.7" for name in ABOUT_THE_WAY}
        sent_through(world, target, ticket, way, headers | {"X-Kept": "1"})

    assert len(target.requests) == len(SPELLINGS)
    for seen in target.requests:
        names = {name.lower() for name, _ in seen.headers}
        assert names <= {"host", "x-kept", "authorization", "accept-encoding"}, names
        assert "198.51.100.7" not in str(seen.headers)


def test_what_comes_back_keeps_the_upstreams_own_via(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    upstream.on("/x", plain(headers=[("Via", "1.1 varnish")]))

    with world.tunnel(ticket, upstream.authority) as line:
        response = line.ask(get("/x", host=upstream.authority, headers={"Authorization": ticket.bearer}))

    assert response.values("via") == ["1.1 varnish"]
