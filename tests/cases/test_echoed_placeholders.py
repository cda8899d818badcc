"""A placeholder may stand in more places than its own. Only its own is swapped; an echo never brings the key back."""

import json
from urllib.parse import urlencode

import pytest

from tests.support.upstream import Upstream, echo, mirror_headers
from tests.support.ways import Way

FORM = ("Content-Type", "application/x-www-form-urlencoded")
JSON = ("Content-Type", "application/json")


@pytest.mark.guards(
    "egress_proxy/core/scrub.py",
    "out[begin:end] = _MASK * (end - begin)",
    "pass",
)
def test_an_error_that_quotes_the_request_does_not_bring_the_key_back(
    through: Way, upstream: Upstream, secret: str
) -> None:
    """The real key was put wherever the placeholder stood; an error quoting the bad field handed it to the guest."""
    upstream.on("/v1/complete", echo(status="400 Bad Request", content_type="application/json"))
    body = json.dumps({"model": through.ticket.placeholder, "n": 1}).encode()

    with through.open() as line:
        response = line.ask(through.request("POST", "/v1/complete", [JSON], body=body))
        received = bytes(line.received)

    (seen,) = upstream.requests
    assert response.status == 400
    assert f"Authorization: Bearer {secret}".encode() in seen.head
    assert seen.body == body, "the body's copy leaves as it is: it is worthless elsewhere"
    assert secret.encode() not in received
    assert b"quoted" not in received
    assert through.ticket.placeholder.encode() in response.body


def test_a_placeholder_in_a_form_field_leaves_as_it_is(through: Way, upstream: Upstream, secret: str) -> None:
    body = urlencode({"token": through.ticket.placeholder, "x": "1"}).encode()

    response = through.ask("POST", "/form", [FORM], body=body)

    (seen,) = upstream.requests
    assert response.status == 200
    assert seen.body == body
    assert secret.encode() not in seen.raw_body
    assert secret.encode() not in response.body


@pytest.mark.guards(
    "egress_proxy/core/decision.py", "if len(swaps) > 1 and not _are_apart(swaps, bindings):", "if False:"
)
@pytest.mark.parametrize(
    "place", ["query", "path", "other header", "other header, in Basic", "a second time in its own place"]
)
def test_a_copy_of_the_placeholder_outside_its_place_is_refused(
    through: Way, upstream: Upstream, secret: str, place: str
) -> None:
    placeholder = through.ticket.placeholder
    path, headers, seen = {
        "query": (f"/v1?debug={placeholder}", [], b"the query parameter debug"),
        "path": (f"/v1/{placeholder}/x", [], b"path segment "),
        "other header": ("/v1", [("X-Debug", placeholder)], b"the header x-debug"),
        "other header, in Basic": ("/v1", [("X-Debug", f"Bearer {placeholder}")], b"the header x-debug"),
        "a second time in its own place": (
            "/v1",
            [("Authorization", f"Bearer {placeholder}")],
            b"the header authorization",
        ),
    }[place]

    response = through.ask("GET", path, headers)

    assert (response.status, response.refusal) == (403, "placement_denied")
    assert upstream.requests == []
    assert upstream.accepted == 0, "no upstream connection is made for what is refused"
    assert placeholder.encode() not in response.head + response.body
    assert seen in response.body


@pytest.mark.guards("egress_proxy/core/scrub.py", "return self._overwritten(data, data, new_from=0)", "return data")
def test_a_reply_that_mirrors_the_headers_does_not_bring_the_key_back(
    through: Way, upstream: Upstream, secret: str
) -> None:
    upstream.on("/mirror", mirror_headers())

    response = through.ask("GET", "/mirror")

    assert response.status == 200
    assert secret.encode() in upstream.received()
    assert "*" in response.header("x-mirror-authorization")
    assert secret.encode() not in response.head + response.body
