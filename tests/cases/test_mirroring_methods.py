"""Methods that make a server echo the request back would carry the key into the sandbox."""

import pytest

from tests.support.upstream import Upstream, echo
from tests.support.ways import Way


@pytest.mark.guards(
    "egress_proxy/core/http1.py", '_MIRRORING_METHODS = (b"TRACE", b"TRACK")', '_MIRRORING_METHODS = (b"NEVER",)'
)
@pytest.mark.parametrize("method", ["TRACE", "trace", "TrAcE", "TRACK", "track"])
def test_a_trace_is_refused_before_anything_is_sent(through: Way, upstream: Upstream, secret: str, method: str) -> None:
    upstream.default = echo(content_type="message/http")

    response = through.ask(method, "/", [("Max-Forwards", "0")])

    assert (response.status, response.refusal) == (405, "method_not_allowed")
    assert response.header("allow")
    assert upstream.requests == []
    assert secret.encode() not in response.head + response.body


@pytest.mark.parametrize("target", ["*", "/"])
def test_options_never_shows_the_key(through: Way, upstream: Upstream, secret: str, target: str) -> None:
    upstream.default = echo(content_type="message/http")

    response = through.ask("OPTIONS", target, [("Max-Forwards", "0")])

    assert response.status in (200, 400, 403, 405)
    assert secret.encode() not in response.head + response.body
