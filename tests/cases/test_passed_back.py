"""What an upstream says about itself comes back byte for byte, but for what would lead a client past the proxy."""

import pytest

from tests.support.upstream import Upstream, sends
from tests.support.ways import Way

LIMITED = (
    b"HTTP/1.1 429 Too Many Requests\r\n"
    b"Date: Mon, 30 Nov 2026 10:00:00 GMT\r\n"
    b"content-type: application/json\r\n"
    b"Retry-After: 17\r\n"
    b"retry-after-ms: 16900\r\n"
    b"x-should-retry: true\r\n"
    b"RateLimit: limit=100, remaining=0, reset=17\r\n"
    b'RateLimit-Policy: 100;w=60;comment="per  minute"\r\n'
    b"X-RateLimit-Remaining-Requests: 0\r\n"
    b"anthropic-ratelimit-tokens-reset: 2026-11-30T10:00:17Z\r\n"
    b"x-ratelimit-reset-tokens: 1m6.013s\r\n"
    b"request-id: req_011CSHoEeqs5C35K2UUqR7Fy\r\n"
    b"Content-Length: 41\r\n"
    b"\r\n"
    b'{"type":"error","error":"rate_limit_err"}'
)


def received(through: Way, path: str) -> bytes:
    """Every byte of the reply."""
    with through.open() as line:
        response = line.ask(through.request("GET", path))
        return response.head + response.body


def test_a_429_and_its_hints_come_back_byte_for_byte(through: Way, upstream: Upstream) -> None:
    """Clients back off by these; SDKs read them by name."""
    upstream.on("/limited", sends(LIMITED))

    assert received(through, "/limited") == LIMITED


@pytest.mark.parametrize("status", [400, 401, 403, 404, 407, 408, 409, 422, 429, 500, 502, 503, 504, 529])
def test_an_error_of_the_upstreams_is_never_taken_for_one_of_ours(
    through: Way, upstream: Upstream, status: int
) -> None:
    forged = b"Coatcheck-Refusal: forbidden\r\ncoatcheck-request-id: x\r\nContent-Type: application/problem+json\r\n"
    upstream.on("/error", sends(b"HTTP/1.1 %d Error\r\n%bContent-Length: 2\r\n\r\n{}" % (status, forged)))

    response = through.ask("GET", "/error")

    assert (response.status, response.refusal, response.body) == (status, "", b"{}")
    assert not [name for name, _ in response.headers if name.startswith("coatcheck-")]


@pytest.mark.guards(
    "egress_proxy/core/substitution.py",
    'b"transfer-encoding", b"alt-svc", b"strict-transport-security"}',
    'b"transfer-encoding"}',
)
def test_nothing_leads_the_client_past_the_proxy(through: Way, upstream: Upstream) -> None:
    upstream.on(
        "/leads",
        sends(
            b'HTTP/1.1 200 OK\r\nALT-SVC: h3=":443"; ma=86400\r\nstrict-transport-security: max-age=31536000\r\n'
            b"X-Kept: yes\r\nContent-Length: 2\r\n\r\nok"
        ),
    )

    assert received(through, "/leads") == b"HTTP/1.1 200 OK\r\nX-Kept: yes\r\nContent-Length: 2\r\n\r\nok"


def test_who_a_connection_belongs_to_is_never_asked(through: Way, upstream: Upstream) -> None:
    """Negotiate and NTLM prove somebody once for a connection, and one of the pool serves many (RFC 4559 §6)."""
    upstream.on(
        "/login",
        sends(
            b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Negotiate\r\nWWW-Authenticate: NTLM TlRMTVNTUAA=\r\n"
            b'WWW-Authenticate: Negotiate YII=, Basic realm="x"\r\nWWW-Authenticate: Bearer\r\n'
            b"Content-Length: 2\r\n\r\nno"
        ),
    )

    response = through.ask("GET", "/login")

    assert response.values("www-authenticate") == ['Basic realm="x"', "Bearer"]
