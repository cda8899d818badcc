"""Replies without a body keep their length and end at once; repeated fields stay repeated; trailers are dropped."""

import pytest

from tests.support.upstream import Upstream, chunk, plain, sends
from tests.support.ways import Way

AT_ONCE_SECONDS = 1.0
COOKIES = ["a=1; Path=/", "b=2; Expires=Wed, 21 Oct 2026 07:28:00 GMT", "c=3; HttpOnly"]
CHALLENGES = ['Basic realm="x"', 'Bearer realm="y", error="z"']


@pytest.mark.parametrize(
    "method, reply, kept",
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n", ("content-length", "12345")),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\nETag: x\r\n\r\n", ("etag", "x")),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 77\r\nETag: x\r\n\r\n", ("etag", "x")),
        ("GET", b"HTTP/1.1 204 No Content\r\nX-Kept: yes\r\n\r\n", ("x-kept", "yes")),
        ("DELETE", b"HTTP/1.1 204 No Content\r\nX-Kept: yes\r\n\r\n", ("x-kept", "yes")),
    ],
    ids=["HEAD with a length", "304 chunked", "304 with a length", "204", "204 to DELETE"],
)
def test_a_reply_without_a_body_ends_at_once_and_the_connection_goes_on(
    through: Way, upstream: Upstream, method: str, reply: bytes, kept: tuple[str, str]
) -> None:
    """Lengths became 0, or the proxy waited for a body that never comes."""
    upstream.on("/bodyless", sends(reply))
    upstream.on("/next", plain(b"next"))

    with through.open() as line:
        bodyless = line.ask(through.request(method, "/bodyless"), timeout_seconds=AT_ONCE_SECONDS)
        following = line.ask(through.request("GET", "/next"), timeout_seconds=AT_ONCE_SECONDS)

    assert bodyless.status == int(reply.split()[1])
    assert kept in bodyless.headers
    assert (following.status, following.body) == (200, b"next")


def test_repeated_fields_keep_their_number_order_and_values(through: Way, upstream: Upstream) -> None:
    lines = [f"Set-Cookie: {value}" for value in COOKIES] + [f"WWW-Authenticate: {value}" for value in CHALLENGES]
    upstream.on(
        "/many", sends(("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + "\r\n".join(lines) + "\r\n\r\nok").encode())
    )

    response = through.ask("GET", "/many")

    assert response.values("set-cookie") == COOKIES
    assert response.values("www-authenticate") == CHALLENGES


def test_trailers_are_dropped_and_the_key_with_them(through: Way, upstream: Upstream, secret: str) -> None:
    upstream.on(
        "/trailers",
        sends(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Echo\r\n\r\n" + chunk(b"body"),
            f"0\r\nX-Echo: {secret}\r\nX-Sum: 1\r\n\r\n".encode(),
        ),
    )
    upstream.on("/next", plain(b"next"))

    with through.open() as line:
        response = line.ask(through.request("GET", "/trailers"))
        following = line.ask(through.request("GET", "/next"))
        received = bytes(line.received)

    assert (response.body, response.complete, response.trailers) == (b"body", True, ())
    assert following.body == b"next"
    assert secret.encode() not in received
