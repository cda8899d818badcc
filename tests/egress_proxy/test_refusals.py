"""What a refusal looks like on the wire, and that nothing leaves when there is one."""

import json
import socket

import pytest

from control_plane.contract.refusal import Refusal, RefusalCode
from egress_proxy.refusals import render_refusal
from tests.egress_proxy.world import World, get, proof, reverse_path
from tests.support.raw_client import TunnelRefusedError
from tests.support.upstream import Upstream


def test_a_refusal_is_problem_details_with_our_own_marker(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    forged = world.control_plane.forged()

    with world.reverse() as line:
        response = line.ask(get(reverse_path(ticket, "/x?secret=1"), headers={"Authorization": f"Bearer {forged}"}))

    problem = response.json()
    assert response.status == problem["status"] == 403
    assert response.header("content-type") == "application/problem+json"
    assert response.refusal == problem["code"] == "unknown_placeholder"
    assert problem["type"] == "urn:coatcheck:refusal:unknown_placeholder"
    assert response.header("coatcheck-request-id") == problem["request_id"]
    assert response.header("x-should-retry") == "false"
    assert forged.encode() not in line.received
    assert b"secret=1" not in line.received
    assert upstream.accepted == 0


def test_every_refusal_is_audited_under_its_request_id(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        response = line.ask(
            get(
                reverse_path(ticket, "/x?secret=1"),
                headers={"Authorization": f"Bearer {world.control_plane.unknown()}"},
            )
        )

    event = world.control_plane.audit_of(response.header("coatcheck-request-id"))
    assert (event.action, event.code, event.status) == ("refuse", RefusalCode.UNKNOWN_PLACEHOLDER, 403)
    assert (event.tenant, event.host, event.path) == (ticket.caller.tenant, "localhost", "/x")


def test_another_tenants_placeholder_is_unknown_to_the_caller_and_named_in_the_trail(
    world: World, upstream: Upstream
) -> None:
    mine, theirs = world.ticket(upstream.url), world.ticket(upstream.url)

    with world.reverse() as line:
        response = line.ask(get(reverse_path(mine), headers={"Authorization": theirs.bearer}))

    event = world.control_plane.audit_of(response.header("coatcheck-request-id"))
    assert (response.status, response.refusal) == (403, "unknown_placeholder")
    assert event.true_code is RefusalCode.CALLER_MISMATCH
    assert b"mismatch" not in line.received
    assert upstream.accepted == 0


def test_a_connection_is_kept_after_a_refused_request_without_a_body(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        refused = line.ask(
            get(reverse_path(ticket), headers={"Authorization": f"Bearer {world.control_plane.unknown()}"})
        )
        accepted = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))

    assert (refused.status, accepted.status) == (403, 200)


def test_a_refused_request_with_a_body_is_answered_and_then_closed(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    body = b"x" * 3_000_000

    with world.reverse() as line:
        line.send(
            get(
                reverse_path(ticket),
                method="POST",
                headers={"Authorization": f"Bearer {world.control_plane.unknown()}", "Content-Length": str(len(body))},
            )
        )
        line.send(body)
        response = line.read_response()

        assert (response.status, response.header("connection")) == (403, "close")
        assert response.complete
        assert line.is_closed_by_peer()
    assert upstream.accepted == 0


def test_a_407_names_both_schemes_and_keeps_the_connection(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    connect = f"CONNECT {upstream.authority} HTTP/1.1\r\nHost: {upstream.authority}\r\n".encode()

    with world.forward() as line:
        first = line.ask(connect + b"\r\n")
        second = line.ask(connect + proof(ticket) + b"\r\n")

    assert (first.status, first.reason) == (407, "proxy_authentication_required")
    assert first.values("proxy-authenticate") == ['Basic realm="coatcheck"', "Bearer"]
    assert second.status == 200


def test_reverse_mode_without_a_caller_is_a_401(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        response = line.ask(get(f"/{ticket.credential}/", headers={"Authorization": ticket.bearer}))

    assert (response.status, response.refusal) == (401, "token_required")
    assert response.values("www-authenticate") == ['Basic realm="coatcheck"', "Bearer"]
    assert upstream.accepted == 0


@pytest.mark.guards("control_plane/contract/admission.py", "if not bound and not rules:", "if False:")
def test_a_connect_to_a_host_without_credential_or_rule_is_refused_in_its_reason_phrase(
    world: World, upstream: Upstream, other_upstream: Upstream
) -> None:
    ticket = world.ticket(upstream.url)

    with pytest.raises(TunnelRefusedError) as refused:
        world.connected(ticket, other_upstream.authority)

    assert (refused.value.response.status, refused.value.response.reason) == (403, "destination_denied")
    assert other_upstream.accepted == 0


def test_a_refused_head_request_has_a_length_and_no_body(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        refused = line.ask(
            get(
                reverse_path(ticket),
                method="HEAD",
                headers={"Authorization": f"Bearer {world.control_plane.unknown()}"},
            )
        )
        accepted = line.ask(get(reverse_path(ticket), headers={"Authorization": ticket.bearer}))

    assert (refused.status, accepted.status) == (403, 200)
    assert int(refused.header("content-length")) > 100


@pytest.mark.parametrize("method", ["TRACE", "TRACK", "trace"])
def test_a_mirroring_method_is_refused_with_the_allowed_ones(world: World, upstream: Upstream, method: str) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        response = line.ask(get(reverse_path(ticket), method=method, headers={"Authorization": ticket.bearer}))

    assert (response.status, response.refusal) == (405, "method_not_allowed")
    assert "GET" in response.header("allow")
    assert upstream.accepted == 0


@pytest.mark.parametrize("code", list(RefusalCode))
@pytest.mark.parametrize("is_head", [False, True])
def test_every_code_renders_as_one_well_framed_reply(code: RefusalCode, is_head: bool) -> None:
    rendered = render_refusal(
        Refusal(code, "Detail – with a dash.", retry_after_seconds=3), request_id="r-1", close=True, is_head=is_head
    )

    head, _, body = rendered.partition(b"\r\n\r\n")
    length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
    assert len(body) == (0 if is_head else length)
    assert head.count(b"Content-Length") == 1
    assert head.split(b"\r\n")[0].endswith(b" " + code.value.encode()), "many clients show the reason phrase alone"
    assert is_head or json.loads(body)["message"] == f"{code.value}: Detail – with a dash."
    assert f"Coatcheck-Refusal: {code.value}".encode() in head
    assert b"Retry-After: 3" in head


# --- heads that are no heads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "protocol_denied"),
        (b"GET / HTTP/1.0\r\nHost: x\r\n\r\n", 505, "protocol_denied"),
        (b"GET /\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400, "ambiguous_framing"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\n", 400, "ambiguous_framing"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, "ambiguous_framing"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n", 400, "ambiguous_framing"),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400, "ambiguous_framing"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "ambiguous_framing"),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "ambiguous_framing",
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 400, "ambiguous_framing"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
        (b"GET /" + b"a" * 20_000, 414, "uri_too_long"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 70_000, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 250 + b"\r\n", 431, "headers_too_large"),
    ],
)
def test_what_is_not_one_unambiguous_head_is_refused_at_once_and_closed(
    world: World, sent: bytes, status: int, code: str
) -> None:
    with world.reverse() as line:
        line.send(sent)
        response = line.read_response(timeout_seconds=3)

        assert (response.status, response.refusal) == (status, code)
        assert response.header("connection") == "close"
        assert line.is_closed_by_peer()


@pytest.mark.guards("egress_proxy/exchange.py", "except ChunkError:\n", "except ZeroDivisionError:\n")
@pytest.mark.parametrize(
    "body",
    [
        b"5;ext=1\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"FFFFFFFFFFFFFFFFF\r\n",
        b"\r\nhello",
    ],
)
def test_a_chunked_body_with_any_doubt_is_refused_and_the_upstream_closed(
    world: World, upstream: Upstream, body: bytes
) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        line.send(
            get(
                reverse_path(ticket),
                method="POST",
                headers={"Authorization": ticket.bearer, "Transfer-Encoding": "chunked"},
            )
        )
        line.send(body)
        response = line.read_response(timeout_seconds=3)

        assert (response.status, response.refusal) == (400, "ambiguous_framing")
        assert line.is_closed_by_peer()
    assert upstream.requests == []


def test_a_line_end_before_a_request_is_forgiven(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)
    request = get(reverse_path(ticket), headers={"Authorization": ticket.bearer})

    with world.reverse() as line:
        first = line.ask(request)
        second = line.ask(b"\r\n" + request)

    assert (first.status, second.status) == (200, 200)


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_line_end_before_a_request_is_forgiven_however_it_is_cut(world: World, upstream: Upstream, cut: int) -> None:
    ticket = world.ticket(upstream.url)
    request = b"\r\n" + get(reverse_path(ticket), headers={"Authorization": ticket.bearer})

    with world.reverse() as line:
        line.ask(request[2:])
        line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.send(request[:cut])
        line.send(request[cut:])

        assert line.read_response().status == 200


def test_an_upgrade_is_not_passed_on(world: World, upstream: Upstream) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        headers = {"Authorization": ticket.bearer, "Connection": "Upgrade", "Upgrade": "h2c", "Content-Length": "3"}
        response = line.ask(get(reverse_path(ticket), method="POST", headers=headers) + b"abc")

    assert response.status == 200
    assert upstream.requests[0].values("upgrade") == []
    assert upstream.requests[0].body == b"abc"
