"""The one outbound client against real servers: what it reaches, what it refuses to reach, and what it takes back."""

import asyncio
import gzip
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme

from control_plane.adapters.outbound import MAX_AT_ONCE, MAX_BODY_BYTES, Exceptions, HttpOutbound, UnusableCaFileError
from control_plane.contract.caller import TenantId
from control_plane.core.urls import InvalidUrlError, parse_outbound_url
from control_plane.ports import OutboundError, OutboundFailure, OutboundReply, OutboundRequest, on_behalf_of
from tests.support.upstream import Upstream, chunk, hold, message, plain, sends, sends_then_closes, sends_then_resets

OUTBOUND = "control_plane/adapters/outbound.py"
F = OutboundFailure


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(path)
    return path


@pytest.fixture
def server(ca: trustme.CA) -> Iterator[Upstream]:
    with Upstream(ca) as running:
        yield running


def outbound(ca_file: Path, *allowed: Upstream | tuple[str, int], **options: Any) -> HttpOutbound:
    endpoints = frozenset(
        entry
        for upstream in allowed
        for entry in (
            [upstream] if isinstance(upstream, tuple) else [("localhost", upstream.port), ("127.0.0.1", upstream.port)]
        )
    )
    return HttpOutbound(ca_files=[ca_file], exceptions=Exceptions(endpoints), **options)


def answering(*addresses: str) -> Any:
    async def resolve(_host: str, _port: int) -> Sequence[str]:
        return addresses

    return resolve


async def failure(client: HttpOutbound, request: OutboundRequest | str) -> OutboundFailure:
    with pytest.raises(OutboundError) as caught:
        await client.send(OutboundRequest("GET", request) if isinstance(request, str) else request)
    return caught.value.failure


# --- whose turn it is -------------------------------------------------------------------------------------------------


async def sent_for(client: HttpOutbound, tenant: str | None, url: str) -> OutboundReply:
    with on_behalf_of(TenantId(tenant) if tenant is not None else None):
        return await client.send(OutboundRequest("GET", url))


@pytest.mark.guards(OUTBOUND, "async with share, self._tenants_turns:", "async with self._tenants_turns:")
async def test_a_tenant_whose_servers_are_slow_holds_up_no_other(server: Upstream, ca_file: Path) -> None:
    server.on("/slow", hold())
    client = outbound(ca_file, server)
    slow = [asyncio.create_task(sent_for(client, "evil", f"{server.url}/slow")) for _ in range(2 * MAX_AT_ONCE)]
    await asyncio.to_thread(server.seen, "/slow")

    async with asyncio.timeout(4):
        reply = await sent_for(client, "acme", f"{server.url}/token")

    assert reply.status == 200
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()


@pytest.mark.guards(OUTBOUND, "async with self._platforms_turns:", "async with self._tenants_turns:")
async def test_tenants_with_slow_servers_hold_up_nothing_of_the_platforms_own(server: Upstream, ca_file: Path) -> None:
    server.on("/slow", hold())
    client = outbound(ca_file, server)
    slow = [
        asyncio.create_task(sent_for(client, f"evil-{number % 8}", f"{server.url}/slow"))
        for number in range(2 * MAX_AT_ONCE)
    ]
    await asyncio.to_thread(server.seen, "/slow")

    async with asyncio.timeout(4):
        reply = await sent_for(client, None, f"{server.url}/keys")

    assert reply.status == 200
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()


# --- what it reaches -------------------------------------------------------------------------------------------------


async def test_a_request_arrives_under_the_name_it_was_sent_to(server: Upstream, ca_file: Path) -> None:
    server.on("/token", plain(b'{"a": 1}', headers=[("Content-Type", "application/json"), ("X-One", "1")]))

    reply = await outbound(ca_file, server).send(
        OutboundRequest("POST", f"{server.url}/token?x=%20y", {"Accept": "application/json"}, b"grant_type=x")
    )

    assert reply == OutboundReply(200, reply.headers, b'{"a": 1}')
    assert reply.headers["x-one"] == "1"
    (request,) = server.requests
    assert (request.method, request.target, request.body) == ("POST", "/token?x=%20y", b"grant_type=x")
    assert request.values("host") == [server.authority]
    assert request.values("accept-encoding") == ["identity"]
    assert request.connection.server_name == "localhost"


async def test_an_error_status_is_a_reply(server: Upstream, ca_file: Path) -> None:
    server.default = plain(b"no", status="418 Teapot")

    reply = await outbound(ca_file, server).send(OutboundRequest("GET", server.url))

    assert (reply.status, reply.body) == (418, b"no")


async def test_the_next_address_is_dialled_where_one_does_not_answer(server: Upstream, ca_file: Path) -> None:
    client = outbound(ca_file, server, resolve=answering("127.0.0.9", "127.0.0.1"))

    reply = await client.send(OutboundRequest("GET", server.url))

    assert reply.status == 200


async def test_a_client_certificate_is_shown_to_the_server_that_asks_for_it(ca: trustme.CA, ca_file: Path) -> None:
    certificate = ca.issue_cert("machine.test")
    pem = certificate.private_key_and_cert_chain_pem.bytes()
    with Upstream(ca) as server:
        context = server._context
        assert context is not None
        context.verify_mode = ssl.CERT_REQUIRED
        ca.configure_trust(context)
        client = outbound(ca_file, server)

        reply = await client.send(OutboundRequest("GET", server.url, client_certificate_pem=pem))
        without = await failure(client, server.url)

    assert reply.status == 200
    assert without in (F.UNVERIFIED, F.UNREADABLE)


async def test_a_client_certificate_that_is_none_is_not_sent_anywhere(server: Upstream, ca_file: Path) -> None:
    request = OutboundRequest("GET", server.url, client_certificate_pem=b"no certificate")

    assert await failure(outbound(ca_file, server), request) is F.INVALID_REQUEST
    assert server.accepted == 0


async def test_the_environments_proxies_are_not_used(
    server: Upstream, ca_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    reply = await outbound(ca_file, server).send(OutboundRequest("GET", server.url))

    assert reply.status == 200


# --- what it does not reach ------------------------------------------------------------------------------------------

INTERNAL = [
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200"),
    *("0.0.0.0", "168.63.129.16", "::1", "::", "fe80::1", "fe80::1%2", "fd00:ec2::254", "fd00::1", "::ffff:127.0.0.1"),
    *("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "2002:7f00:1::", "::127.0.0.1"),
]


@pytest.mark.guards(OUTBOUND, "not is_public(address)", "False")
@pytest.mark.parametrize("address", INTERNAL)
async def test_a_name_that_leads_to_an_internal_address_is_not_dialled(
    address: str, server: Upstream, ca_file: Path
) -> None:
    client = outbound(ca_file, resolve=answering(address))

    assert await failure(client, f"https://sso.example.com:{server.port}/") is F.DENIED_ADDRESS
    assert server.accepted == 0


@pytest.mark.guards(OUTBOUND, "        for address in found:\n", "        for address in found[:1]:\n")
async def test_one_internal_address_among_public_ones_is_enough(server: Upstream, ca_file: Path) -> None:
    client = outbound(ca_file, resolve=answering("93.184.215.14", "127.0.0.1"))

    assert await failure(client, f"https://sso.example.com:{server.port}/") is F.DENIED_ADDRESS


@pytest.mark.guards(OUTBOUND, 'f"https://{literal}:{url.endpoint.port}{url.target}"', "url.text")
async def test_the_address_that_was_judged_is_the_one_that_is_dialled(server: Upstream, ca_file: Path) -> None:
    """What a name means may change between two look-ups: the system would say 127.0.0.1, where the server is."""
    client = outbound(ca_file, server, resolve=answering("127.0.0.9"))

    assert await failure(client, server.url) is F.UNREACHABLE
    assert server.accepted == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1"])
async def test_an_internal_address_itself_is_not_dialled(host: str, server: Upstream, ca_file: Path) -> None:
    assert await failure(outbound(ca_file), f"https://{host}:{server.port}/") is F.DENIED_ADDRESS
    assert server.accepted == 0


async def test_an_exception_is_for_its_port_alone(server: Upstream, ca_file: Path) -> None:
    client = outbound(ca_file, ("localhost", server.port + 1), ("localhost", 443))

    assert await failure(client, server.url) is F.DENIED_ADDRESS
    assert server.accepted == 0


@pytest.mark.guards(OUTBOUND, "if _is_own(address, port, self._own):", "if False:")
@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0", "::"])
async def test_the_control_plane_itself_is_not_reached_even_by_an_exception(
    listening: str, server: Upstream, ca_file: Path
) -> None:
    client = outbound(ca_file, server, own=[(listening, server.port)])

    assert await failure(client, f"https://127.0.0.1:{server.port}/") is F.DENIED_ADDRESS
    assert server.accepted == 0


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://localhost/",
            "HTTP://localhost/",
            "ftp://localhost/",
            "file:///etc/passwd",
            "localhost",
            "//localhost",
        ),
        *("https://", "https:///path", "https://user@localhost/", "https://user:password@localhost/", "https://a b/"),
        *("https://localhost/#fragment", "https://localhost:0/", "https://localhost:99999/", "https://localhost:x/"),
        *(
            "https://2130706433/",
            "https://0177.0.0.1/",
            "https://0x7f.1/",
            "https://127.1/",
            "https://[fe80::1%25eth0]/",
        ),
        *(
            "https://localhost\\@evil.test/",
            "https://localhost/\r\nX: y",
            "https://localhost/ü",
            "https://local_host ./",
        ),
        *(
            "https://localhost/" + "x" * 3000,
            "https://localhost\x00.evil.test/",
            "https://[::1/",
            "javascript:alert(1)",
        ),
    ],
)
async def test_what_is_no_url_of_ours_is_not_fetched(url: str, ca_file: Path) -> None:
    assert await failure(outbound(ca_file), url) is F.INVALID_URL


@pytest.mark.parametrize(
    ("given", "spelling"),
    [
        ("https://SSO.Example.com./a?b=c", "https://sso.example.com/a?b=c"),
        ("https://bücher.example:443", "https://xn--bcher-kva.example/"),
        ("https://example.com?x=1", "https://example.com/?x=1"),
        ("HTTPS://[2001:DB8::1]:8443/", "https://[2001:db8::1]:8443/"),
    ],
)
def test_a_url_has_one_spelling(given: str, spelling: str) -> None:
    assert parse_outbound_url(given).text == spelling


def test_an_error_about_a_url_does_not_quote_it() -> None:
    with pytest.raises(InvalidUrlError) as caught:
        parse_outbound_url("https://user:hunter2@localhost/")

    assert "hunter2" not in str(caught.value)


async def test_a_server_that_nobody_vouches_for_is_not_sent_anything(server: Upstream) -> None:
    client = HttpOutbound(exceptions=Exceptions(frozenset({("localhost", server.port)})))

    assert await failure(client, OutboundRequest("POST", server.url, body=b"secret")) is F.UNVERIFIED
    assert server.received() == b""


@pytest.mark.guards(OUTBOUND, '"sni_hostname": url.endpoint.host', '"sni_hostname": "localhost"')
async def test_a_certificate_for_another_name_is_refused(server: Upstream, ca_file: Path) -> None:
    client = outbound(ca_file, ("sso.example.com", server.port), resolve=answering("127.0.0.1"))

    assert await failure(client, f"https://sso.example.com:{server.port}/") is F.UNVERIFIED
    assert server.received() == b""


async def test_a_closed_port_is_unreachable(ca_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    client = outbound(ca_file, ("127.0.0.1", port))

    assert await failure(client, f"https://127.0.0.1:{port}/") is F.UNREACHABLE


async def test_a_name_that_means_nothing_is_unreachable(ca_file: Path) -> None:
    async def resolve(_host: str, _port: int) -> Sequence[str]:
        raise socket.gaierror

    assert await failure(outbound(ca_file, resolve=resolve), "https://nobody.example/") is F.UNREACHABLE
    assert await failure(outbound(ca_file, resolve=answering()), "https://nobody.example/") is F.UNREACHABLE


# --- what it takes back ----------------------------------------------------------------------------------------------


@pytest.mark.guards(OUTBOUND, "if response.status_code in _REDIRECTS:", "if False:")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(status: int, server: Upstream, ca_file: Path) -> None:
    server.on("/from", plain(b"", status=f"{status} Moved", headers=[("Location", f"{server.url}/to")]))

    assert await failure(outbound(ca_file, server), f"{server.url}/from") is F.REDIRECT
    assert server.seen("/to") == []


@pytest.mark.guards(OUTBOUND, "if len(body) > MAX_BODY_BYTES:", "if False:")
@pytest.mark.parametrize("framing", ["length", "chunks", "end"])
async def test_a_body_that_is_too_large_is_cut_off(framing: str, server: Upstream, ca_file: Path) -> None:
    large = b"x" * (MAX_BODY_BYTES + 1)
    head = b"HTTP/1.1 200 OK\r\n"
    server.default = {
        "length": sends(message(large)),
        "chunks": sends(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(large) + b"0\r\n\r\n"),
        "end": sends_then_closes(head + b"Connection: close\r\n\r\n" + large),
    }[framing]

    assert await failure(outbound(ca_file, server), server.url) is F.TOO_LARGE


async def test_a_body_of_the_largest_size_is_taken(server: Upstream, ca_file: Path) -> None:
    server.default = plain(b"x" * MAX_BODY_BYTES)

    reply = await outbound(ca_file, server).send(OutboundRequest("GET", server.url))

    assert len(reply.body) == MAX_BODY_BYTES


@pytest.mark.guards(OUTBOUND, '.strip().lower() != "identity"', '.strip().lower() == "none"')
async def test_a_compressed_body_is_not_unpacked(server: Upstream, ca_file: Path) -> None:
    bomb = gzip.compress(b"0" * 50_000_000)
    server.default = plain(bomb, headers=[("Content-Encoding", "gzip")])

    assert await failure(outbound(ca_file, server), server.url) is F.UNREADABLE


@pytest.mark.parametrize(
    "behaviour",
    [
        sends_then_closes(),
        sends_then_closes(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"),
        sends_then_closes(b"220 mail.example.test ESMTP\r\n"),
        sends_then_closes(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n"),
        sends_then_resets(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"),
    ],
    ids=["nothing", "cut short", "no http", "a huge head", "reset"],
)
async def test_an_answer_that_is_no_answer_is_unreadable(behaviour: Any, server: Upstream, ca_file: Path) -> None:
    server.default = behaviour

    assert await failure(outbound(ca_file, server), server.url) is F.UNREADABLE


@pytest.mark.parametrize(
    "pieces", [(), (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",)], ids=["before the head", "within the body"]
)
async def test_a_server_that_stops_answering_is_given_up(
    pieces: tuple[bytes, ...], server: Upstream, ca_file: Path
) -> None:
    server.default = hold(*pieces)

    assert await failure(outbound(ca_file, server), OutboundRequest("GET", server.url, seconds=0.2)) is F.TIMEOUT


async def test_a_header_that_would_be_two_is_not_sent(server: Upstream, ca_file: Path) -> None:
    request = OutboundRequest("GET", server.url, {"Authorization": "Bearer a\r\nX-Injected: b"})

    assert await failure(outbound(ca_file, server), request) is F.INVALID_REQUEST
    assert b"X-Injected" not in server.received()


async def test_an_error_says_why_and_quotes_nothing(server: Upstream, ca_file: Path) -> None:
    server.default = plain(b"secret-of-the-body" * 100_000)

    with pytest.raises(OutboundError) as caught:
        await outbound(ca_file, server).send(
            OutboundRequest("GET", f"{server.url}/?key=secret-of-the-query", {"A": "secret-of-the-header"})
        )

    assert str(caught.value) == "too_large"
    assert "secret" not in repr(OutboundRequest("GET", "https://a.test/?secret", {"A": "secret"}, b"secret"))


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing of the kind")

    with pytest.raises(UnusableCaFileError, match=r"ca\.pem"):
        HttpOutbound(ca_files=[tmp_path / "ca.pem"])
