"""The head that goes upstream, and the one that comes back: hygiene first, the secret last."""

import pytest

from control_plane.contract.destination import AllowRule, Endpoint
from control_plane.contract.placement import HeaderPlacement
from egress_proxy.core.http1 import Framing, parse_response_head
from egress_proxy.core.substitution import RouteBase, render_response
from tests.egress_proxy.core.world import ALICE, SECRET, World, ask, head_of, sent, tunnel_to

SUBSTITUTION = "egress_proxy/core/substitution.py"
URL = "https://api.test"


def rendered(*lines: str) -> list[bytes]:
    world = World()
    world.allow(ALICE, AllowRule("api.test"))
    raw = head_of("GET / HTTP/1.1", *lines)
    return sent(ask(raw, tunnel_to(URL, world.proxy_credential(ALICE)), world)).split(b"\r\n")[2:-2]


def swapped(placement: HeaderPlacement, *lines: str) -> list[bytes]:
    world = World()
    placeholder = world.credential(ALICE, URL, placements=(placement,))
    raw = head_of("GET / HTTP/1.1", *(line.format(placeholder=placeholder) for line in lines))
    return sent(ask(raw, tunnel_to(URL, world.proxy_credential(ALICE)), world)).split(b"\r\n")[2:-2]


@pytest.mark.guards(SUBSTITUTION, "    if field.ours or name in HOP_BY_HOP or name in", "    if name in")
def test_hop_by_hop_fields_and_our_own_are_not_forwarded() -> None:
    lines = rendered(
        "Connection: keep-alive, X-Mine",
        "Keep-Alive: 5",
        "Proxy-Connection: x",
        "TE: trailers",
        "Trailer: x",
        "Upgrade: h2c",
        "HTTP2-Settings: x",
        "X-Mine: 1",
        "Coatcheck-Anything: 1",
        "X-SH-Subject: alice",
        "X-Kept: 1",
    )

    assert lines == [b"X-Kept: 1"]


def test_fields_keep_their_order_spelling_and_repetition() -> None:
    assert rendered("X-A: 1", "x-b: 2", "X-A:3", "Accept-Encoding: br") == [
        b"X-A: 1",
        b"x-b: 2",
        b"X-A:3",
        b"Accept-Encoding: br",
    ]


def test_a_connection_field_cannot_strip_the_secret() -> None:
    lines = swapped(HeaderPlacement("x-api-key"), "Connection: x-api-key", "X-Api-Key: {placeholder}")

    assert f"X-Api-Key: {SECRET}".encode() in lines


@pytest.mark.guards(SUBSTITUTION, 'name.replace(b"_", b"-") in slots', "name in slots")
def test_every_other_spelling_of_the_slot_is_removed() -> None:
    lines = swapped(
        HeaderPlacement("x-api-key"),
        "X_Api_Key: mine",
        "x-api_key: mine",
        "X-Api-Key: {placeholder}",
        "X-Other_Key: kept",
    )

    assert [line for line in lines if b"mine" in line] == []
    assert b"X-Other_Key: kept" in lines


@pytest.mark.parametrize("second", ["X-Api-Key: mine", "x-api-key:mine", "X-API-KEY: mine"])
@pytest.mark.guards("egress_proxy/core/plan.py", " | slot_names(forward.swaps)", "")
def test_a_second_value_of_the_slot_is_removed(second: str) -> None:
    lines = swapped(HeaderPlacement("x-api-key"), second, "X-Api-Key: {placeholder}")

    assert [line for line in lines if line.lower().startswith(b"x-api-key")] == [f"X-Api-Key: {SECRET}".encode()]


def test_an_interim_or_204_reply_states_no_length() -> None:
    for status in (b"103 Early Hints", b"204 No Content"):
        raw = b"HTTP/1.1 " + status + b"\r\nContent-Length: 5\r\nX: 1\r\n\r\n"

        head = parse_response_head(raw, request_method="GET")

        assert render_response(head, framing=Framing.NONE, close=False) == b"HTTP/1.1 " + status + b"\r\nX: 1\r\n\r\n"


@pytest.mark.guards(
    SUBSTITUTION,
    '    if swaps and not unsearchable:\n        lines.append(b"Accept-Encoding: identity")',
    '    if False:\n        lines.append(b"")',
)
def test_a_swapped_request_asks_for_an_uncompressed_reply() -> None:
    lines = swapped(HeaderPlacement("x-api-key"), "Accept-Encoding: gzip, br", "X-Api-Key: {placeholder}")

    assert [line for line in lines if line.lower().startswith(b"accept-encoding")] == [b"Accept-Encoding: identity"]


def test_framing_is_untouched_by_a_swap() -> None:
    lines = swapped(HeaderPlacement("x-api-key"), "Content-Length: 7", "X-Api-Key: {placeholder}")

    assert [line for line in lines if b"ength" in line or b"ncoding: chunked" in line] == [b"Content-Length: 7"]


def test_a_replys_own_fields_and_detours_are_not_passed_back() -> None:
    raw = (
        b"HTTP/1.1 200 Fine\r\nCoatcheck-Refusal: forged\r\nAlt-Svc: h3=x\r\nStrict-Transport-Security: x\r\n"
        b"Set-Cookie: a=1\r\nSet-Cookie: b=2; Expires=Wed, 01 Jan 2031\r\nConnection: x-hop\r\nX-Hop: 1\r\n"
        b"Transfer-Encoding: chunked\r\nTrailer: x\r\n\r\n"
    )

    head = parse_response_head(raw, request_method="GET")

    assert render_response(head, framing=Framing.CHUNKED, close=True) == (
        b"HTTP/1.1 200 Fine\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2; Expires=Wed, 01 Jan 2031\r\n"
        b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )


# --- where things are, and who may say so -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "followed"),
    [
        (b"https://api.test/v1/x?y=1", b"/~pc/api/v1/x?y=1"),
        (b"https://api.test", b"/~pc/api/"),
        (b"HTTPS://API.test:443/v1", b"/~pc/api/v1"),
        (b"//api.test/v1", b"/~pc/api/v1"),
        (b"/v1/x", b"/~pc/api/v1/x"),
        (b"v1/x", b"v1/x"),
        (b"?page=2", b"?page=2"),
        (b"http://api.test/v1", b"http://api.test/v1"),
        (b"https://api.test:8443/v1", b"https://api.test:8443/v1"),
        (b"https://evil.test/v1", b"https://evil.test/v1"),
        (b"https://user@api.test/v1", b"https://user@api.test/v1"),
        (b"https:/v1", b"https:/v1"),
        (b"//", b"//"),
        (b"", b""),
        (b"https://\xff/", b"https://\xff/"),
    ],
)
def test_a_location_of_the_routes_own_origin_stays_on_the_route(location: bytes, followed: bytes) -> None:
    route = RouteBase(Endpoint("https", "api.test", 443), b"/~pc/api")

    assert route.rewritten(location) == followed


@pytest.mark.parametrize(
    ("challenges", "passed"),
    [
        (b"Negotiate", None),
        (b"negotiate YII=", None),
        (b"NTLM", None),
        (b"NTLM, Negotiate", None),
        (b'Basic realm="x"', b'Basic realm="x"'),
        (b'Negotiate, Basic realm="x"', b'Basic realm="x"'),
        (b'Basic realm="negotiate me", NTLM TlRM=', b'Basic realm="negotiate me"'),
        (b'Bearer realm="a", error="b"', b'Bearer realm="a", error="b"'),
    ],
)
@pytest.mark.guards("egress_proxy/core/substitution.py", 'kept = _CONNECTION_CHALLENGE.sub(b"", value)', "kept = value")
def test_a_challenge_that_would_bind_the_connection_is_not_passed_on(challenges: bytes, passed: bytes | None) -> None:
    raw = b"HTTP/1.1 401 No\r\nWWW-Authenticate: " + challenges + b"\r\nContent-Length: 0\r\n\r\n"
    head = parse_response_head(raw, request_method="GET")

    rendered = render_response(head, framing=Framing.LENGTH, close=False)

    if passed is None:
        assert b"WWW-Authenticate" not in rendered
    else:
        assert b"\r\nWWW-Authenticate: " + passed + b"\r\n" in rendered
