"""A key is longer or shorter than its placeholder. The head changes by that much; the body's framing by nothing."""

import json
import secrets

import pytest

from tests.support.processes import Workspace
from tests.support.upstream import Request, Upstream, chunk, plain
from tests.support.ways import Kind, way

FRAMING = ("content-length", "transfer-encoding")
NOT_UTF8 = b'{"model": "\xff\xfe\x80", "n": 1}'


def framing_of(seen: Request) -> list[tuple[str, str]]:
    return [(name, value) for name, value in seen.headers if name in FRAMING]


@pytest.mark.parametrize("length", [8, 400], ids=["a shorter key", "a longer key"])
def test_a_swap_leaves_the_framing_and_the_next_request_alone(
    workspace: Workspace, upstream: Upstream, kind: Kind, length: int
) -> None:
    """A swap once left the old length, and once sent two; strict servers answered 400."""
    upstream.default = plain(b"ok")
    secret = secrets.token_hex(length // 2)
    workspace.credential("api", url=upstream.url, secret=secret)
    through = way(workspace, upstream, workspace.ticket("api"), kind)
    body = json.dumps({"text": "coat " * 50}).encode()

    with through.open() as line:
        first = line.ask(through.request("POST", "/fixed", body=body))
        line.send(through.head("POST", "/chunked", [("Transfer-Encoding", "chunked")]))
        for piece in (body[:7], body[7:40], body[40:]):
            line.send(chunk(piece))
        line.send(b"0\r\n\r\n")
        second = line.read_response(method="POST")
        third = line.ask(through.request("POST", "/bytes", body=NOT_UTF8))
        fourth = line.ask(through.request("GET", "/bare"))

    fixed, chunked, raw, bare = upstream.requests
    assert [first.status, second.status, third.status, fourth.status] == [200] * 4
    assert framing_of(fixed) == [("content-length", str(len(body)))]
    assert framing_of(chunked) == [("transfer-encoding", "chunked")]
    assert framing_of(raw) == [("content-length", str(len(NOT_UTF8)))]
    assert framing_of(bare) == []
    assert json.loads(fixed.body) == json.loads(chunked.body)
    assert raw.body == NOT_UTF8
    assert all(seen.values("authorization") == [f"Bearer {secret}"] for seen in upstream.requests)
