"""A pooled connection that the upstream closed costs nobody a request, and no request is carried out twice for it."""

import pytest

from tests.support.upstream import Request, Upstream, Wire, message, plain, sends_then_resets
from tests.support.ways import Way

BODY = b'{"charge": 100}'


def test_posts_outlive_idle_connections_that_the_upstream_closes(through: Way, upstream: Upstream) -> None:
    """Every first POST after a pause failed."""
    upstream.on("/charge", plain(b"charged"))

    replies = []
    with through.open() as line:
        for _ in range(3):
            replies.append(line.ask(through.request("POST", "/charge", body=BODY)))
            upstream.drop_idle_connections()

    assert [(reply.status, reply.body) for reply in replies] == [(200, b"charged")] * 3
    assert len(upstream.seen("/charge")) == 3


async def reads_all_and_resets(_: Request, wire: Wire) -> None:
    await wire.reset()


@pytest.mark.guards(
    "egress_proxy/exchange.py", "return is_stale and head.method in _REPEATABLE and head.framing", "return is_stale #"
)
@pytest.mark.parametrize("is_warm", [False, True], ids=["on a new connection", "on a pooled connection"])
def test_a_post_that_was_read_and_not_answered_is_not_sent_again(
    through: Way, upstream: Upstream, is_warm: bool
) -> None:
    """The retry for dead connections repeated a charge that the server had made."""
    upstream.on("/warm", plain())
    upstream.on("/charge", reads_all_and_resets)

    with through.open() as line:
        if is_warm:
            assert line.ask(through.request("GET", "/warm")).status == 200
        response = line.ask(through.request("POST", "/charge", body=BODY))

    assert (response.status, response.refusal) == (502, "upstream_protocol_error")
    assert len(upstream.seen("/charge")) == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_half_a_reply_is_neither_repeated_nor_completed(through: Way, upstream: Upstream, method: str) -> None:
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 400
    upstream.on("/warm", plain())
    upstream.on("/charge", sends_then_resets(half))

    with through.open() as line:
        assert line.ask(through.request("GET", "/warm")).status == 200
        response = line.ask(through.request(method, "/charge", body=BODY if method == "POST" else b""))

    assert response.status == 200
    assert not response.complete
    assert len(upstream.seen("/charge")) == 1


def test_a_get_that_met_the_upstreams_goodbye_is_sent_once_more_and_answered(through: Way, upstream: Upstream) -> None:
    """The server closed just as the request was on its way: nothing of it was answered, and it is safe to repeat."""

    async def first_hangs_up(_: Request, wire: Wire) -> None:
        if len(upstream.seen("/thing")) > 1:
            await wire.write(message(b"here"))
        else:
            await wire.reset()

    upstream.on("/warm", plain())
    upstream.on("/thing", first_hangs_up)

    with through.open() as line:
        assert line.ask(through.request("GET", "/warm")).status == 200
        response = line.ask(through.request("GET", "/thing"))

    assert (response.status, response.body) == (200, b"here")
    assert len(upstream.seen("/thing")) == 2
