"""A reply that the upstream did not finish is never delivered as a finished one."""

import pytest

from tests.support.upstream import Behaviour, Upstream, chunk, sends_then_closes, sends_then_resets
from tests.support.ways import Way

LENGTH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CUT = {
    "length, then RST": sends_then_resets(LENGTH_HEAD, b"x" * 400),
    "length, then FIN": sends_then_closes(LENGTH_HEAD + b"x" * 400),
    "chunked without a last chunk, then FIN": sends_then_closes(CHUNKED_HEAD + chunk(b"x" * 400)),
    "chunked without a last chunk, then RST": sends_then_resets(CHUNKED_HEAD + chunk(b"x" * 400)),
    "cut inside a chunk": sends_then_closes(CHUNKED_HEAD + chunk(b"x" * 400)[:-100]),
    "cut inside an event": sends_then_closes(SSE_HEAD + chunk(b"data: whole\n\n") + chunk(b"data: ha")),
    "without length, then RST": sends_then_resets(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"x" * 400),
}


@pytest.mark.parametrize("cut", CUT)
def test_a_cut_reply_reaches_the_client_as_a_cut_reply(through: Way, upstream: Upstream, cut: str) -> None:
    """Clients stored half a body, or none, as a good file."""
    upstream.on("/cut", CUT[cut])

    with through.open() as line:
        response = line.ask(through.request("GET", "/cut"), timeout_seconds=5)

        assert not response.complete or response.status == 502, response
        assert line.is_closed_by_peer(), "nothing more can be said on this connection"


BEFORE_THE_HEAD: dict[str, Behaviour] = {
    "RST": sends_then_resets(),
    "FIN": sends_then_closes(),
    "half a head": sends_then_closes(b"HTTP/1.1 200 OK\r\nContent-Le"),
}


@pytest.mark.parametrize("end", BEFORE_THE_HEAD)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_upstream_that_hangs_up_before_its_head_is_a_502_of_ours(
    through: Way, upstream: Upstream, end: str, method: str
) -> None:
    upstream.on("/cut", BEFORE_THE_HEAD[end])

    response = through.ask(method, "/cut", body=b"{}" if method == "POST" else b"", timeout_seconds=5)

    assert (response.status, response.complete) == (502, True)
    assert response.refusal in ("upstream_unreachable", "upstream_protocol_error")
    assert len(upstream.seen("/cut")) == 1 or method == "GET", "a POST is never sent twice"
