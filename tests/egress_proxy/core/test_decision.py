"""The one function that decides, as tables: what goes, what is asked first, what is refused and with which code."""

import base64
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.destination import AllowRule, Endpoint, authority
from control_plane.contract.grant import GrantScope
from control_plane.contract.placeholder import TokenKind, has_marker
from control_plane.contract.placement import BasicPlacement, HeaderPlacement, QueryPlacement
from control_plane.contract.refusal import RefusalCode
from control_plane.contract.wire import AskCaller, AskPlaceholder, AskPolicy, Refused
from egress_proxy.core import decision as decision_module
from egress_proxy.core import http1
from egress_proxy.core.decision import Connection, Forward, Mode, Refuse, Resolve, Tunnel, decide, decide_connect
from egress_proxy.core.fields import _decodings, target_marks
from egress_proxy.core.http1 import parse_request_head
from egress_proxy.core.places import seen_in
from egress_proxy.core.view import Resolved
from tests.egress_proxy.core.world import (
    ALICE,
    BOB,
    MALLORY,
    NOW,
    SECRET,
    TAG_KEY,
    World,
    ask,
    code,
    head_of,
    minted,
    sent,
    tunnel_to,
)

DECISION = "egress_proxy/core/decision.py"
ADMISSION = "control_plane/contract/admission.py"
FIELDS = "egress_proxy/core/fields.py"
SUBSTITUTION = "egress_proxy/core/substitution.py"
URL = "https://api.test"


@pytest.fixture
def world() -> World:
    return World()


# --- what goes -------------------------------------------------------------------------------------------------------


def test_a_bearer_placeholder_is_swapped_for_the_secret(world: World) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    head = sent(ask(head_of("GET /v1/x HTTP/1.1", f"Authorization: Bearer {placeholder}"), connection, world))

    assert f"Authorization: Bearer {SECRET}".encode() in head
    assert not has_marker(head)


def test_the_scheme_before_a_token_may_be_in_any_case(world: World) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    head = sent(ask(head_of("GET / HTTP/1.1", f"authorization: bearer {placeholder}"), connection, world))

    assert f"authorization: Bearer {SECRET}".encode() in head


def test_a_named_header_with_a_format_is_swapped(world: World) -> None:
    placeholder = world.credential(ALICE, URL, placements=(HeaderPlacement("x-api-key", "token {secret}"),))
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    head = sent(ask(head_of("GET / HTTP/1.1", f"X-Api-Key: token {placeholder}"), connection, world))

    assert f"X-Api-Key: token {SECRET}".encode() in head


@pytest.mark.parametrize(
    "user_and_password",
    ["anybody:{placeholder}", "{placeholder}:", "{placeholder}:x-oauth-basic"],
    ids=["as the password", "as a lone user name", "as a user name beside x-oauth-basic"],
)
def test_basic_credentials_are_decoded_swapped_and_encoded_again(world: World, user_and_password: str) -> None:
    placeholder = world.credential(ALICE, URL, placements=(BasicPlacement("x-access-token"),))
    connection = tunnel_to(URL, world.proxy_credential(ALICE))
    encoded = base64.b64encode(user_and_password.format(placeholder=placeholder).encode()).decode()

    head = sent(ask(head_of("GET / HTTP/1.1", f"Authorization: basic {encoded}"), connection, world))

    expected = base64.b64encode(f"x-access-token:{SECRET}".encode())
    assert b"Authorization: Basic " + expected in head


def test_a_query_parameter_is_swapped_and_percent_encoded(world: World) -> None:
    secret = "a&b=c#d/%2e"
    placeholder = world.credential(ALICE, URL, placements=(QueryPlacement("key"),), secret=secret)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    head = sent(ask(head_of(f"GET /v1?x=1&key={placeholder}&y=%20z HTTP/1.1"), connection, world))

    assert head.startswith(f"GET /v1?x=1&key={quote(secret, safe='')}&y=%20z HTTP/1.1\r\n".encode())


def test_several_placeholders_go_each_in_its_own_placement(world: World) -> None:
    first = world.credential(ALICE, URL, name="a")
    second = world.credential(ALICE, URL, name="b", placements=(HeaderPlacement("x-key"),), secret="second-secret")
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    head = sent(ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {first}", f"X-Key: {second}"), connection, world))

    assert SECRET.encode() in head
    assert b"second-secret" in head


def test_a_request_without_a_placeholder_goes_bare_to_a_bound_host(world: World) -> None:
    world.credential(ALICE, URL)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    decision = ask(head_of("GET /info/refs HTTP/1.1"), connection, world)

    assert isinstance(decision, Forward)
    assert decision.swaps == ()


def test_a_reverse_route_leads_to_its_credentials_first_destination(world: World) -> None:
    placeholder = world.credential(ALICE, "https://api.test:8443", name="svc")
    connection = Connection(Mode.REVERSE, world.proxy_credential(ALICE))

    decision = ask(
        head_of("GET /svc/@scope%2fname?q=1 HTTP/1.1", f"Authorization: Bearer {placeholder}", host="proxy"),
        connection,
        world,
    )

    assert isinstance(decision, Forward)
    assert sent(decision).startswith(b"GET /@scope%2fname?q=1 HTTP/1.1\r\nHost: api.test:8443\r\n")


def test_a_path_credential_names_the_caller_and_is_taken_off(world: World) -> None:
    placeholder = world.credential(ALICE, URL, name="svc")
    proof = world.proxy_credential(ALICE)
    connection = Connection(Mode.REVERSE, path_credential_allowed=True)

    head = sent(
        ask(
            head_of(
                f"GET /~{proof.text}/svc/v1 HTTP/1.1",
                f"Authorization: Bearer {placeholder}",
                f"Referer: http://proxy/~{proof.text}/svc/",
                host="proxy",
            ),
            connection,
            world,
        )
    )

    assert head.startswith(b"GET /v1 HTTP/1.1\r\n")
    assert not has_marker(head)
    assert b"Referer" not in head


def test_absolute_form_becomes_origin_form(world: World) -> None:
    world.allow(ALICE, AllowRule("plain.test"))
    connection = Connection(Mode.FORWARD, world.proxy_credential(ALICE))

    head = sent(ask(head_of("GET http://PLAIN.test/a?b=c HTTP/1.1", host="plain.test"), connection, world))

    assert head.startswith(b"GET /a?b=c HTTP/1.1\r\nHost: plain.test\r\n")


# --- who is asking ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, expected", [(Mode.FORWARD, "proxy_authentication_required"), (Mode.REVERSE, "token_required")]
)
@pytest.mark.guards(DECISION, "if any(together.issubset(kinds) for together in connection.accepts):", "if True:")
def test_no_proof_of_the_caller_is_refused(world: World, mode: Mode, expected: str) -> None:
    world.credential(ALICE, URL)
    connection = Connection(mode, None, Endpoint("https", "api.test", 443) if mode is Mode.FORWARD else None)

    decision = ask(head_of("GET /api/x HTTP/1.1"), connection, world)

    assert code(decision) == expected


@pytest.mark.parametrize("scheme", ["Bearer", "Basic as password", "Basic as user"])
def test_a_proxy_credential_is_taken_from_proxy_authorization(world: World, scheme: str) -> None:
    world.credential(ALICE, URL)
    proof = world.proxy_credential(ALICE).text
    pair = f"x:{proof}" if scheme == "Basic as password" else f"{proof}:"
    value = f"Bearer {proof}" if scheme == "Bearer" else "Basic " + base64.b64encode(pair.encode()).decode()
    raw = head_of("CONNECT api.test:443 HTTP/1.1", f"Proxy-Authorization: {value}", host="api.test:443")

    decision = decide_connect(parse_request_head(raw), Connection(Mode.FORWARD), world, NOW)

    assert isinstance(decision, Tunnel)
    assert decision.caller == ALICE


@pytest.mark.parametrize(
    "value",
    ["Bearer", "Bearer nonsense", "Basic !!!", "Digest x", "Bearer {placeholder}", "Bearer {proof}x", "basic {proof}"],
)
def test_a_bad_proxy_credential_is_refused_and_never_a_server_error(world: World, value: str) -> None:
    placeholder = world.credential(ALICE, URL)
    proof = world.proxy_credential(ALICE).text
    text = value.format(placeholder=placeholder, proof=proof)
    raw = head_of("CONNECT api.test:443 HTTP/1.1", f"Proxy-Authorization: {text}", host="api.test:443")

    decision = decide_connect(parse_request_head(raw), Connection(Mode.FORWARD), world, NOW)

    assert code(decision) == "proxy_authentication_required"


@pytest.mark.guards(DECISION, "if any(other != there[0] for other in there[1:]):", "if False:")
def test_two_proofs_that_disagree_are_refused(world: World) -> None:
    world.credential(ALICE, URL)
    other = world.proxy_credential(BOB)

    decision = ask(
        head_of("GET / HTTP/1.1", f"Proxy-Authorization: Bearer {other.text}"),
        tunnel_to(URL, world.proxy_credential(ALICE)),
        world,
    )

    assert code(decision) == "caller_mismatch"


@pytest.mark.guards(DECISION, "    if known.facts.expires_at <= now:\n", "    if False:\n")
def test_an_expired_proxy_credential_is_asked_again_once_and_then_refused(world: World) -> None:
    world.credential(ALICE, URL)
    stale = tunnel_to(URL, world.proxy_credential(ALICE, expires_at=NOW - 1, asked_at=NOW - 30))
    fresh = tunnel_to(URL, world.proxy_credential(ALICE, expires_at=NOW - 1, asked_at=NOW))

    assert isinstance(ask(head_of("GET / HTTP/1.1"), stale, world), Resolve)
    assert code(ask(head_of("GET / HTTP/1.1"), fresh, world)) == "proxy_authentication_required"


@pytest.mark.parametrize(
    "mode, true_code, expected",
    [
        (Mode.FORWARD, RefusalCode.TOKEN_EXPIRED, "proxy_authentication_required"),
        (Mode.REVERSE, RefusalCode.TOKEN_EXPIRED, "token_expired"),
        (Mode.REVERSE, RefusalCode.TOKEN_INVALID, "token_invalid"),
    ],
)
def test_a_store_that_knows_no_live_proxy_credential_is_told_as_the_mode_has_it(
    world: World, mode: Mode, true_code: RefusalCode, expected: str
) -> None:
    proof = world.proxy_credential(ALICE)
    world.callers[proof.fingerprint] = Refused(RefusalCode.PROXY_AUTHENTICATION_REQUIRED, "no", true_code=true_code)
    connection = Connection(mode, proof, Endpoint("https", "api.test", 443) if mode is Mode.FORWARD else None)

    decision = ask(head_of("GET /api/ HTTP/1.1"), connection, world)

    assert code(decision) == expected
    assert isinstance(decision, Refuse)
    assert decision.refusal.audited_code is true_code


# --- what is asked first ---------------------------------------------------------------------------------------------


def test_caller_then_policy_then_placeholder_are_asked_for(world: World) -> None:
    placeholder = world.credential(ALICE, URL)
    proof = world.proxy_credential(ALICE)
    connection = tunnel_to(URL, proof)
    raw = head_of("GET / HTTP/1.1", f"Authorization: Bearer {placeholder}")
    full = World(world.tag_keys, world.callers, world.policies, world.placeholders)
    cold = World()

    asked = []
    while isinstance(decision := ask(raw, connection, cold), Resolve):
        asked.append(type(decision.ask))
        match decision.ask:
            case AskCaller():
                cold.callers = full.callers
            case AskPolicy():
                cold.policies = full.policies
            case AskPlaceholder():
                cold.placeholders = full.placeholders

    assert isinstance(decision, Forward)
    assert asked == [AskCaller, AskPolicy, AskPlaceholder]


def test_an_expired_placeholder_is_asked_again_once_because_it_may_have_been_renewed(world: World) -> None:
    stale = world.credential(ALICE, URL, expires_at=NOW - 1, asked_at=NOW - 30)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    decision = ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {stale}"), connection, world)

    assert isinstance(decision, Resolve)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.guards(DECISION, "    if resolved.binding.expires_at > now:\n", "    if True:\n")
def test_an_expired_placeholder_is_refused(world: World) -> None:
    placeholder = world.credential(ALICE, URL, expires_at=NOW - 1, asked_at=NOW)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    decision = ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {placeholder}"), connection, world)

    assert code(decision) == "expired_placeholder"


@pytest.mark.guards(DECISION, "    if end is None or end > now:\n", "    if True:\n")
def test_a_secret_past_its_own_end_is_asked_for_again_and_never_used(world: World) -> None:
    connection = tunnel_to(URL, world.proxy_credential(ALICE))
    stale = world.credential(ALICE, URL, secret_expires_at=NOW, asked_at=NOW - 30)
    just_asked = world.credential(ALICE, URL, secret_expires_at=NOW, asked_at=NOW)
    good = world.credential(ALICE, URL, secret_expires_at=NOW + 0.1)

    again, refused, used = (
        ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {each}"), connection, world)
        for each in (stale, just_asked, good)
    )

    assert isinstance(again, Resolve)
    assert code(refused) == "credential_unavailable"
    assert isinstance(used, Forward)
    assert used.until == NOW + 0.1


@pytest.mark.guards(DECISION, "    if not is_placed(resolved.binding.credential_kind):\n", "    if False:\n")
@pytest.mark.parametrize("kind", ["hmac", "aws_assume_role", "client_certificate", "invented_later"])
def test_a_document_is_never_placed_as_if_it_were_a_key(world: World, kind: str) -> None:
    placeholder = world.credential(ALICE, URL, kind=kind)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    decision = ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {placeholder}"), connection, world)

    assert code(decision) == "credential_unavailable"


@pytest.mark.parametrize("kind", ["static", "oauth_refresh_token", "github_app"])
def test_a_minted_token_is_placed_like_any_key(world: World, kind: str) -> None:
    placeholder = world.credential(ALICE, URL, kind=kind)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    decision = ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {placeholder}"), connection, world)

    assert isinstance(decision, Forward)


@pytest.mark.guards(DECISION, "    if binding.caller != caller:\n", "    if False:\n")
def test_another_subjects_placeholder_is_refused(world: World) -> None:
    stolen = world.credential(ALICE, URL)
    world.credential(BOB, URL)
    connection = tunnel_to(URL, world.proxy_credential(BOB))

    decision = ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {stolen}"), connection, world)

    assert code(decision) == "caller_mismatch"


@pytest.mark.guards(DECISION, "    if binding.caller.tenant != caller.tenant:\n", "    if False:\n")
def test_another_tenants_placeholder_is_unknown_and_the_trail_has_the_reason(world: World) -> None:
    stolen = world.credential(ALICE, URL)
    world.credential(MALLORY, URL)
    connection = tunnel_to(URL, world.proxy_credential(MALLORY))

    decision = ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {stolen}"), connection, world)

    assert code(decision) == "unknown_placeholder"
    assert isinstance(decision, Refuse)
    assert decision.refusal.audited_code is RefusalCode.CALLER_MISMATCH


@pytest.mark.parametrize(
    "url, expected",
    [
        ("https://other.test", "destination_denied"),
        ("https://api.test:8443", "destination_denied"),
        ("https://api.test.other.test", "destination_denied"),
    ],
)
@pytest.mark.guards(
    ADMISSION, "    here = [d for d in destinations if d.endpoint == endpoint]\n", "    here = list(destinations)\n"
)
def test_a_placeholder_for_another_host_is_refused(world: World, url: str, expected: str) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = tunnel_to(url, world.proxy_credential(ALICE))
    assert connection.tunnel is not None
    world.allow(ALICE, AllowRule(connection.tunnel.host, connection.tunnel.port))
    host = authority(connection.tunnel.host, connection.tunnel.port, "https")

    decision = ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {placeholder}", host=host), connection, world)

    assert code(decision) == expected


@pytest.mark.parametrize("with_placeholder", [True, False])
def test_a_credential_does_not_travel_over_plain_http(world: World, with_placeholder: bool) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = Connection(Mode.FORWARD, world.proxy_credential(ALICE))
    lines = [f"Authorization: Bearer {placeholder}"] if with_placeholder else []

    decision = ask(head_of("GET http://api.test/ HTTP/1.1", *lines), connection, world)

    assert code(decision) == "plaintext_credential"


def test_a_host_nobody_allowed_is_refused_with_the_command_that_would_allow_it(world: World) -> None:
    connection = tunnel_to("https://unknown.test", world.proxy_credential(ALICE))

    decision = ask(head_of("GET / HTTP/1.1", host="unknown.test"), connection, world)

    assert code(decision) == "destination_denied"
    assert isinstance(decision, Refuse)
    assert "coatcheck allow add unknown.test" in decision.refusal.hint


@pytest.mark.parametrize("host", ["169.254.169.254", "127.0.0.1", "[::1]", "10.0.0.1"])
def test_nobody_is_advised_to_allow_an_internal_address(world: World, host: str) -> None:
    connection = tunnel_to(f"https://{host}", world.proxy_credential(ALICE))

    decision = ask(head_of("GET / HTTP/1.1", host=host), connection, world)

    assert code(decision) == "destination_denied"
    assert isinstance(decision, Refuse)
    assert "allow add" not in decision.refusal.hint


@pytest.mark.guards(ADMISSION, "    if not bound and not rules:\n", "    if False:\n")
def test_a_tunnel_to_a_host_nobody_allowed_is_refused(world: World) -> None:
    connection = Connection(Mode.FORWARD, world.proxy_credential(ALICE))
    raw = head_of("CONNECT unknown.test:443 HTTP/1.1", host="unknown.test:443")

    decision = decide_connect(parse_request_head(raw), connection, world, NOW)

    assert code(decision) == "destination_denied"


@pytest.mark.guards(ADMISSION, "    if any(route.credential_required for route in here):\n", "    if False:\n")
def test_a_bare_request_is_refused_where_the_operator_requires_the_credential(world: World) -> None:
    world.credential(ALICE, URL, required=True)
    world.allow(ALICE, AllowRule("api.test"))
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    assert code(ask(head_of("GET / HTTP/1.1"), connection, world)) == "credential_required"


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/p/1/../2", "/v1/p/1/%2e%2e/2", "/v1/p/1/%252e%252e/2", "/v1/p/1/..%2f2", "/v1/p/1/..\\2"),
        *("/v1/p/1/a;x", "/v1/p/1//2", "/v1/p/10", "/v1/p", "/v1/p/1", "/V1/p/1/x"),
    ],
)
@pytest.mark.parametrize("scoped_by", ["destination", "grant"])
@pytest.mark.guards("control_plane/contract/destination.py", "    if not is_plain_path(raw_path):\n", "    if False:\n")
def test_a_path_outside_the_scope_is_refused_however_it_is_spelled(world: World, path: str, scoped_by: str) -> None:
    if scoped_by == "destination":
        placeholder = world.credential(ALICE, URL + "/v1/p/1/")
    else:
        placeholder = world.credential(ALICE, URL, scopes=(GrantScope(path_prefixes=frozenset({"/v1/p/1/"})),))
    connection = tunnel_to(URL, world.proxy_credential(ALICE))
    lines = [f"Authorization: Bearer {placeholder}"]

    assert isinstance(ask(head_of("GET /v1/p/1/x HTTP/1.1", *lines), connection, world), Forward)
    assert code(ask(head_of(f"GET {path} HTTP/1.1", *lines), connection, world)) == "path_denied"


@pytest.mark.parametrize("path", ["/svc/../other/x", "/svc/%2e%2e/other", "/svc/..%2fother", "/svc/a/%252e%252e/b"])
@pytest.mark.guards(DECISION, '    if climbs("/" + rest.decode("latin-1")):\n', "    if False:\n")
def test_a_reverse_path_that_climbs_out_of_its_route_is_refused(world: World, path: str) -> None:
    placeholder = world.credential(ALICE, URL, name="svc")
    connection = Connection(Mode.REVERSE, world.proxy_credential(ALICE))

    decision = ask(head_of(f"GET {path} HTTP/1.1", f"Authorization: Bearer {placeholder}"), connection, world)

    assert code(decision) == "path_denied"


@pytest.mark.parametrize("narrowed_by", ["destination", "grant", "allow rule"])
def test_a_method_outside_the_scope_is_refused(world: World, narrowed_by: str) -> None:
    lines: list[str] = []
    only_get = frozenset({"GET"})
    match narrowed_by:
        case "destination":
            lines = [f"Authorization: Bearer {world.credential(ALICE, URL, methods=only_get)}"]
        case "grant":
            lines = [f"Authorization: Bearer {world.credential(ALICE, URL, scopes=(GrantScope(methods=only_get),))}"]
        case _:
            world.allow(ALICE, AllowRule("api.test", methods=only_get))
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    assert isinstance(ask(head_of("GET / HTTP/1.1", *lines), connection, world), Forward)
    assert code(ask(head_of("DELETE / HTTP/1.1", *lines), connection, world)) == "method_denied"


@pytest.mark.guards(
    "control_plane/contract/destination.py", '        return raw_path.startswith("/")\n', "        return True\n"
)
def test_no_credential_goes_to_a_whole_server(world: World) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    decision = ask(head_of("OPTIONS * HTTP/1.1", f"Authorization: Bearer {placeholder}"), connection, world)

    assert code(decision) == "path_denied"


def test_a_grant_that_has_ended_admits_nothing(world: World) -> None:
    placeholder = world.credential(ALICE, URL, scopes=(GrantScope(until=NOW - 1),))
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    decision = ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {placeholder}"), connection, world)

    assert code(decision) == "destination_denied"


def test_a_refusal_of_the_store_is_passed_on_with_whose_placeholder_it_was(world: World) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))
    (key, resolved) = next(iter(world.placeholders.items()))
    assert isinstance(resolved, Resolved)
    world.placeholders[key] = Refused(RefusalCode.REVOKED_PLACEHOLDER, "revoked", "", None, resolved.binding)

    decision = ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {placeholder}"), connection, world)

    assert code(decision) == "revoked_placeholder"
    assert isinstance(decision, Refuse)
    assert decision.binding == resolved.binding


PLACES: dict[str, Callable[[str], tuple[str, list[str]]]] = {
    "in another header": lambda p: ("GET / HTTP/1.1", [f"X-Debug: {p}"]),
    "in User-Agent": lambda p: ("GET / HTTP/1.1", [f"User-Agent: {p}"]),
    "in Cookie": lambda p: ("GET / HTTP/1.1", [f"Cookie: a={p}"]),
    "in the path": lambda p: (f"GET /{p} HTTP/1.1", []),
    "in the query": lambda p: (f"GET /?key={p} HTTP/1.1", []),
    "in a header's name": lambda p: ("GET / HTTP/1.1", [f"{p}: x"]),
    "with another scheme": lambda p: ("GET / HTTP/1.1", [f"Authorization: Token {p}"]),
    "with something after it": lambda p: ("GET / HTTP/1.1", [f"Authorization: Bearer {p},x"]),
    "with something before it": lambda p: ("GET / HTTP/1.1", [f"Authorization: Bearer x{p}"]),
    "twice": lambda p: ("GET / HTTP/1.1", [f"Authorization: Bearer {p}", f"X-Debug: {p}"]),
    "twice in its slot": lambda p: ("GET / HTTP/1.1", [f"Authorization: Bearer {p}", f"Authorization: Bearer {p}"]),
    "as Basic": lambda p: ("GET / HTTP/1.1", ["Authorization: Basic " + _b64(f"x:{p}")]),
    "percent-encoded": lambda p: (f"GET /?key={_percent(p)} HTTP/1.1", []),
    "percent-encoded in its slot": lambda p: ("GET / HTTP/1.1", [f"Authorization: Bearer {_percent(p)}"]),
    "percent-encoded twice": lambda p: (f"GET /?key={_percent(_percent(p))} HTTP/1.1", []),
    "base64 in a header": lambda p: ("GET / HTTP/1.1", [f"X-Debug: {_b64(p)}"]),
    "base64 in the path": lambda p: (f"GET /{_b64(p).rstrip('=')} HTTP/1.1", []),
    "base64 of percent": lambda p: ("GET / HTTP/1.1", [f"X-Debug: {_b64(_percent(p))}"]),
    "percent of base64": lambda p: ("GET / HTTP/1.1", [f"X-Debug: {_percent(_b64(p))}"]),
    "url-safe base64, unpadded": lambda p: ("GET / HTTP/1.1", [f"X-Debug: {_b64('??>>' + p, url_safe=True)}"]),
}


SEEN = {
    "in another header": "the header x-debug",
    "in User-Agent": "the header user-agent",
    "in Cookie": "the header cookie",
    "in the path": "path segment 1",
    "in the query": "the query parameter key",
    "in a header's name": "the name of a header",
    "with another scheme": "the header authorization",
    "with something after it": "the header authorization",
    "with something before it": "the header authorization",
    "twice": "the header x-debug",
    "twice in its slot": "the header authorization",
    "as Basic": "the Basic credentials in the header authorization",
    "percent-encoded": "the query parameter key, encoded",
    "percent-encoded in its slot": "the header authorization, encoded",
    "percent-encoded twice": "the query parameter key, encoded",
    "base64 in a header": "the header x-debug, encoded",
    "base64 in the path": "path segment 1, encoded",
    "base64 of percent": "the header x-debug, encoded",
    "percent of base64": "the header x-debug, encoded",
    "url-safe base64, unpadded": "the header x-debug, encoded",
}


def _b64(text: str, *, url_safe: bool = False) -> str:
    encoded = base64.urlsafe_b64encode(text.encode()) if url_safe else base64.b64encode(text.encode())
    return encoded.decode().rstrip("=") if url_safe else encoded.decode()


def _percent(text: str) -> str:
    return "".join(f"%{ord(char):02x}" for char in text)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.guards(
    DECISION,
    "    if placement is None:\n        refuse_placement(seen_in(found, target))",
    "    if placement is None:\n        placement = BEARER",
)
def test_a_placeholder_outside_its_placement_is_refused(world: World, place: str) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))
    line, lines = PLACES[place](placeholder)

    decision = ask(head_of(line, *lines), connection, world)

    assert code(decision) == "placement_denied"
    assert isinstance(decision, Refuse)
    assert f" in {SEEN[place]}" in decision.refusal.detail
    assert (", encoded" in decision.refusal.detail) == (", encoded" in SEEN[place])
    assert_names_no_token(decision, placeholder)


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        ("/a/{p}?x=1", "path segment 2"),
        ("/a/b/x{p}", "path segment 3"),
        ("/a?b={p}", "the query parameter b"),
        ("/a?x=1&b%5B%5D={p}#f", "the query parameter b[]"),
        ("/a?x=1&{p}", "query parameter 2"),
        ("/a?{p}=x", "query parameter 1"),
        ("/a?not%20a%20name={p}", "query parameter 1"),
        ("/a?" + "n" * 65 + "={p}", "query parameter 1"),
        ("/a#{p}", "the request target"),
        ("http://api.test/a/{p}", "path segment 2"),
        ("/a?b=%25{p}", "the query parameter b"),
        ("/a/%7B{e}", "path segment 2, encoded"),
        ("/a?b={e}", "the query parameter b, encoded"),
        ("/a?{e}=1", "query parameter 1, encoded"),
    ],
)
def test_where_a_placeholder_was_seen_in_a_target_is_said_without_it(world: World, target: str, seen: str) -> None:
    placeholder = world.credential(ALICE, URL)
    text = target.format(p=placeholder, e=_percent(placeholder))

    places = {seen_in((mark, None), text.encode()) for mark in target_marks(text.encode())}

    assert seen in places
    assert not any(placeholder in place or has_marker(place.encode()) for place in places)


def assert_names_no_token(decision: Refuse, placeholder: str) -> None:
    said = decision.refusal.detail + decision.refusal.hint
    assert not has_marker(said.encode())
    assert placeholder not in said
    assert not any(encoded in said for encoded in (_percent(placeholder)[:30], _b64(placeholder)[:20]))


ALTERATIONS: dict[str, Callable[[str], str]] = {
    "upper case": str.upper,
    "lower case": str.lower,
    "cut": lambda p: p[:-1],
    "cut to the marker": lambda p: p[: p.index("coatchk1") + 8],
    "longer": lambda p: p + "a",
    "one character changed": lambda p: p[:-10] + ("a" if p[-10] != "a" else "b") + p[-9:],
    "the marker's case changed": lambda p: p.replace("coatchk1", "CoatChk1"),
    "of another prefix": lambda p: "sk-" + p.removeprefix("coat_"),
}


@pytest.mark.parametrize("alteration", ALTERATIONS)
@pytest.mark.parametrize("place", ["Authorization: Bearer {}", "X-Other: {}"])
@pytest.mark.guards(
    "control_plane/contract/placeholder.py", "        if hmac.compare_digest(_tag(stem, key), tag):", "        if True:"
)
def test_an_altered_placeholder_is_unknown_without_a_look_up(world: World, alteration: str, place: str) -> None:
    altered = ALTERATIONS[alteration](world.credential(ALICE, URL))
    connection = tunnel_to(URL, world.proxy_credential(ALICE))
    world.placeholders.clear()

    decision = ask(head_of("GET / HTTP/1.1", place.format(altered)), connection, world)

    assert code(decision) == "unknown_placeholder"


@pytest.mark.guards(
    DECISION, "    if token.kind is not TokenKind.PLACEHOLDER or mark.slot is Slot.HIDDEN:", "    if False:"
)
def test_a_proxy_credential_outside_its_own_slot_is_refused(world: World) -> None:
    world.credential(ALICE, URL)
    proof = world.proxy_credential(ALICE)
    world.placeholders[proof.fingerprint] = next(iter(world.placeholders.values()))

    decision = ask(head_of("GET / HTTP/1.1", f"Authorization: Bearer {proof.text}"), tunnel_to(URL, proof), world)

    assert code(decision) == "placement_denied"


def test_a_query_parameter_given_twice_is_refused(world: World) -> None:
    placeholder = world.credential(ALICE, URL, placements=(QueryPlacement("key"),))
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    assert code(ask(head_of(f"GET /?key={placeholder}&key=x HTTP/1.1"), connection, world)) == "placement_denied"
    assert code(ask(head_of(f"GET /?key={placeholder}&k%65y=x HTTP/1.1"), connection, world)) == "placement_denied"


@pytest.mark.parametrize(
    "line, host, expected",
    [
        ("GET / HTTP/1.1", "evil.test", "misdirected_request"),
        ("GET / HTTP/1.1", "api.test:8443", "misdirected_request"),
        ("GET https://api.test/ HTTP/1.1", "api.test", "malformed_request"),
        ("GET http://evil.test/ HTTP/1.1", "api.test", "malformed_request"),
    ],
)
@pytest.mark.guards(DECISION, "    if named != (expected.host, expected.port):\n", "    if False:\n")
def test_inside_a_tunnel_the_host_must_be_the_tunnels(world: World, line: str, host: str, expected: str) -> None:
    world.credential(ALICE, URL)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    assert code(ask(head_of(line, host=host), connection, world)) == expected


def test_a_host_with_a_final_dot_or_in_upper_case_is_the_same_host(world: World) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    for host in ("API.test", "api.test.", "api.test:443"):
        raw = head_of("GET / HTTP/1.1", f"Authorization: Bearer {placeholder}", host=host)
        assert b"\r\nHost: api.test\r\n" in sent(ask(raw, connection, world))


def test_absolute_form_whose_host_field_disagrees_is_misdirected(world: World) -> None:
    world.allow(ALICE, AllowRule("evil.test"), AllowRule("api.test"))
    connection = Connection(Mode.FORWARD, world.proxy_credential(ALICE))

    assert code(ask(head_of("GET http://evil.test/ HTTP/1.1"), connection, world)) == "misdirected_request"


@pytest.mark.parametrize("line", ["GET / HTTP/1.1", "GET https://api.test/ HTTP/1.1", "GET ftp://api.test/ HTTP/1.1"])
def test_a_forward_listener_takes_only_connect_and_absolute_http(world: World, line: str) -> None:
    connection = Connection(Mode.FORWARD, world.proxy_credential(ALICE))

    assert code(ask(head_of(line), connection, world)) == "malformed_request"


@pytest.mark.parametrize(
    "target, host",
    [("api.test:443", "evil.test:443"), ("api.test:443", "api.test:8443"), ("api.test:443", "evil.test")],
)
def test_a_connect_whose_host_field_disagrees_is_misdirected(world: World, target: str, host: str) -> None:
    world.credential(ALICE, URL)
    connection = Connection(Mode.FORWARD, world.proxy_credential(ALICE))
    raw = head_of(f"CONNECT {target} HTTP/1.1", host=host)

    assert code(decide_connect(parse_request_head(raw), connection, world, NOW)) == "misdirected_request"


@pytest.mark.parametrize("target", ["api.test", "api.test:0", "api.test:x", "http://api.test", "/", "u@api.test:443"])
def test_a_connect_to_what_is_no_authority_is_malformed(world: World, target: str) -> None:
    connection = Connection(Mode.FORWARD, world.proxy_credential(ALICE))
    raw = head_of(f"CONNECT {target} HTTP/1.1", host=None)

    assert code(decide_connect(parse_request_head(raw), connection, world, NOW)) == "malformed_request"


def test_a_marker_in_a_connect_is_refused_and_not_echoed(world: World) -> None:
    connection = Connection(Mode.FORWARD, world.proxy_credential(ALICE))
    placeholder = minted(TokenKind.PLACEHOLDER, 77)
    raw = head_of(f"CONNECT {placeholder}.evil.test:443 HTTP/1.1", host=None)

    decision = decide_connect(parse_request_head(raw), connection, world, NOW)

    assert code(decision) == "placement_denied"
    assert placeholder not in repr(decision)


def test_a_route_of_another_caller_does_not_exist(world: World) -> None:
    world.credential(BOB, URL, name="svc")
    connection = Connection(Mode.REVERSE, world.proxy_credential(ALICE))

    assert code(ask(head_of("GET /svc/ HTTP/1.1"), connection, world)) == "credential_not_found"


def test_a_path_credential_is_refused_where_the_listener_takes_none(world: World) -> None:
    world.credential(ALICE, URL, name="svc")
    proof = world.proxy_credential(ALICE)

    decision = ask(head_of(f"GET /~{proof.text}/svc/ HTTP/1.1"), Connection(Mode.REVERSE), world)

    assert code(decision) == "token_required"


@pytest.mark.parametrize(
    "encode, shown", [(str, "/p/{placeholder}"), (_percent, "/{placeholder}"), (_b64, "/{placeholder}")]
)
def test_refusals_never_quote_the_request(world: World, encode: Callable[[str], str], shown: str) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))
    raw = head_of(f"GET /p/{encode(placeholder)}?q={placeholder} HTTP/1.1")

    decision = ask(raw, connection, world)

    assert isinstance(decision, Refuse)
    assert not any(has_marker(view) for view in (repr(decision).encode(), *_decodings(repr(decision).encode())))
    assert decision.path == shown


@pytest.mark.guards(DECISION, "    if has_marker(text):  # before the host is shown anywhere\n", "    if False:\n")
@pytest.mark.parametrize("place", ["target", "host"])
def test_a_placeholder_in_a_host_is_shown_nowhere(world: World, place: str) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = Connection(Mode.FORWARD, world.proxy_credential(ALICE))
    name = f"{placeholder}.evil.test"
    target, host = (name, name) if place == "target" else ("api.test", name)

    decision = ask(head_of(f"GET http://{target}/ HTTP/1.1", host=host), connection, world)

    assert isinstance(decision, Refuse)
    assert not has_marker(repr(decision).encode())


@pytest.mark.parametrize("inside", ["%46", "/", "-", ";", "%2f"])
@pytest.mark.guards(DECISION, '+ 1] + "{placeholder}"', '+ 1] + "{placeholder}" + text[marks[0].sighting.end :]')
def test_no_part_of_an_altered_placeholder_in_a_path_is_recorded(world: World, inside: str) -> None:
    placeholder = world.credential(ALICE, URL)
    altered = placeholder[:16] + inside + placeholder[16:]

    decision = ask(head_of(f"GET /a/{altered}/b HTTP/1.1"), tunnel_to(URL, world.proxy_credential(ALICE)), world)

    assert isinstance(decision, Refuse)
    assert decision.path in ("/a/{placeholder}", "/{placeholder}")


@pytest.mark.guards(
    ADMISSION,
    "allow_private=all(handling.allow_private for handling in each)",
    "allow_private=any(handling.allow_private for handling in each)",
)
def test_a_private_address_takes_the_word_of_every_credential_in_the_request(world: World) -> None:
    key = HeaderPlacement("x-api-key")
    one = world.credential(ALICE, URL, name="one", placements=(key,))
    two = world.credential(ALICE, URL, name="two")
    for fingerprint, resolved in world.placeholders.items():
        assert isinstance(resolved, Resolved)
        if resolved.binding.credential_name == "two":
            private = tuple(replace(d, allow_private=True) for d in resolved.binding.destinations)
            world.placeholders[fingerprint] = replace(resolved, binding=replace(resolved.binding, destinations=private))
    raw = head_of("GET / HTTP/1.1", f"X-Api-Key: {one}", f"Authorization: Bearer {two}")

    decision = ask(raw, tunnel_to(URL, world.proxy_credential(ALICE)), world)

    assert isinstance(decision, Forward)
    assert not decision.allow_private


def test_a_head_with_more_markers_than_any_request_needs_is_refused(world: World) -> None:
    placeholder = world.credential(ALICE, URL)
    lines = [f"X-{number}: {placeholder}" for number in range(100)]

    decision = ask(head_of("GET / HTTP/1.1", *lines), tunnel_to(URL, world.proxy_credential(ALICE)), world)

    assert code(decision) == "placement_denied"


def test_long_values_are_not_remembered(world: World) -> None:
    caches = (decision_module._remembered_parse, decision_module._remembered_token, http1._remembered_tokens)
    for cache in caches:
        cache.cache_clear()
    connection = tunnel_to(URL, world.proxy_credential(ALICE))

    for number in range(3):
        garbage = f"{number}" + "x" * 30_000
        ask(head_of("GET / HTTP/1.1", f"Proxy-Authorization: Bearer {garbage}"), tunnel_to(URL, None), world)
        ask(head_of("GET / HTTP/1.1", f"X-Y: coatchk1{garbage}"), connection, world)
        parse_request_head(head_of("GET / HTTP/1.1", f"Connection: {garbage}"))

    # What was looked for is at most as long as a placeholder.
    assert [cache.cache_info().currsize for cache in caches] == [0, 3, 0]


# --- properties ------------------------------------------------------------------------------------------------------

HOSTS = st.sampled_from(["api.test", "other.test", "api.test.evil.test", "127.0.0.1", "xapi.test"])


@given(
    st.sampled_from(["https", "http"]),
    HOSTS,
    st.sampled_from([443, 80, 8443]),
    st.sampled_from(["/v1/x", "/v2", "/v10"]),
)
@pytest.mark.guards(
    ADMISSION,
    "    here = [d for d in destinations if d.endpoint == endpoint]\n",
    "    here = list(destinations)\n",
)
def test_a_placeholder_never_resolves_off_its_scheme_host_port_and_path(
    scheme: str, host: str, port: int, path: str
) -> None:
    world = World()
    placeholder = world.credential(ALICE, URL + "/v1")
    world.allow(ALICE, AllowRule(host, port))
    endpoint = Endpoint(scheme, host, port)
    place = authority(host, port, scheme)
    if scheme == "https":
        connection, target = Connection(Mode.FORWARD, world.proxy_credential(ALICE), endpoint), path
    else:
        connection, target = Connection(Mode.FORWARD, world.proxy_credential(ALICE)), f"http://{place}{path}"

    decision = ask(
        head_of(f"GET {target} HTTP/1.1", f"Authorization: Bearer {placeholder}", host=place), connection, world
    )

    on_target = (scheme, host, port, path) == ("https", "api.test", 443, "/v1/x")
    assert isinstance(decision, Forward) == on_target


ENCODINGS: list[Callable[[str], str]] = [
    lambda p: p,
    str.upper,
    str.swapcase,
    _percent,
    lambda p: quote(p, safe="").replace("c", "%63"),
    lambda p: _percent(_percent(p)),
    _b64,
    lambda p: _b64("a" + p),
    lambda p: _b64("ab" + p, url_safe=True),
    lambda p: _b64(_percent(p)),
    lambda p: _percent(_b64(p)),
    lambda p: p[5:],
    lambda p: p[:-3],
]
SPOTS = [
    "X-A: {}",
    "Authorization: Bearer {}",
    "Authorization: Basic {}",
    "Cookie: s={}",
    "Referer: https://x/{}",
    "{}: v",
]


@given(st.sampled_from(range(len(ENCODINGS))), st.sampled_from([*SPOTS, "path", "query"]), st.booleans())
@pytest.mark.guards(
    FIELDS,
    '    special = bool(marks) or ours or name in _JUDGED_IN_REQUESTS or b"_" in name\n',
    "    special = ours or name in _JUDGED_IN_REQUESTS\n",
)
def test_nothing_with_a_marker_leaves_in_a_head(encoding: int, spot: str, beside_a_good_one: bool) -> None:
    world = World()
    good = world.credential(ALICE, URL, placements=(HeaderPlacement("x-good"),), name="good")
    text = ENCODINGS[encoding](world.credential(ALICE, URL))
    if spot == "{}: v" and "=" in text:
        return
    lines = [f"X-Good: {good}"] if beside_a_good_one else []
    line = {"path": f"GET /{text} HTTP/1.1", "query": f"GET /?q={text} HTTP/1.1"}.get(spot, "GET / HTTP/1.1")
    if "{}" in spot:
        lines.append(spot.format(text))

    decision = ask(head_of(line, *lines), tunnel_to(URL, world.proxy_credential(ALICE)), world)

    if isinstance(decision, Forward):
        head = sent(decision)
        assert not any(has_marker(view) for view in (head, *_decodings(head)))


def test_equal_inputs_give_equal_decisions(world: World) -> None:
    placeholder = world.credential(ALICE, URL)
    connection = tunnel_to(URL, world.proxy_credential(ALICE))
    head = parse_request_head(head_of("GET / HTTP/1.1", f"Authorization: Bearer {placeholder}"))

    assert decide(head, connection, world, NOW) == decide(head, connection, world, NOW)
    assert TAG_KEY not in repr(decide(head, connection, world, NOW)).encode()
    assert SECRET not in repr(decide(head, connection, world, NOW))
