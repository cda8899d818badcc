"""Odd proofs of the caller at the proxy (field case C47): 407, never a 5xx, and nothing repeated.

There are two bodies, whatever was wrong: one says that no proof came, the other that the proof is none.
"""

import base64
import json

import pytest

from tests.egress_proxy.world import World, get, proof
from tests.support.upstream import Upstream

ODD: dict[str, bytes] = {
    "empty": b"",
    "Bearer alone": b"Bearer",
    "Basic alone": b"Basic ",
    "an unknown scheme": b"Digest username=needle",
    "a Latin-1 byte": b"Bearer needle\xe9",
    "0xff": b"Basic \xff\xffneedle",
    "an emoji": "Bearer needle🎫".encode(),
    "an emoji in Basic": b"Basic " + base64.b64encode("needle🎫:🎫".encode()),
    "bad base64": b"Basic !!!!needle!!!!",
    "cut base64": b"Basic YTpi=needle",
    "base64 of no text": b"Basic " + base64.b64encode(b"\xff\xfe:\xff"),
    "no colon": b"Basic " + base64.b64encode(b"needle"),
    "64 KiB": b"Bearer " + b"needle" * 10_900,
    "a wrong token": b"Bearer coatprx1" + b"x" * 28,
    "a JWT of alg none": b"Bearer eyJhbGciOiJub25lIn0.e30.",
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_proof_is_a_407_like_any_other_and_the_next_good_one_passes(
    world: World, upstream: Upstream, odd: bytes
) -> None:
    ticket = world.ticket(upstream.url)
    connect = f"CONNECT {upstream.authority} HTTP/1.1\r\nHost: {upstream.authority}\r\n".encode()

    with world.forward() as line:
        bare = line.ask(connect + b"\r\n")
    with world.forward() as line:
        wrong = line.ask(connect + b"Proxy-Authorization: Bearer wrong\r\n\r\n")
    with world.forward() as line:
        refused = line.ask(connect + b"Proxy-Authorization: " + odd + b"\r\n\r\n")
    with world.forward() as line:
        good = line.ask(connect + proof(ticket) + b"\r\n")

    assert refused.status == 407, refused
    assert b"needle" not in refused.body
    assert _told(refused.body) in (_told(bare.body), _told(wrong.body))
    assert (good.status, upstream.requests) == (200, [])


def _told(body: bytes) -> dict[str, object]:
    return {name: value for name, value in json.loads(body).items() if name != "request_id"}


@pytest.mark.parametrize("odd", ["~needle", "~", "~coatprx1" + "x" * 28, "~%E9%FF", "~" + "needle" * 1_000])
def test_an_odd_proof_in_a_reverse_path_is_refused_and_not_repeated(world: World, upstream: Upstream, odd: str) -> None:
    ticket = world.ticket(upstream.url)

    with world.reverse() as line:
        refused = line.ask(get(f"/{odd}/{ticket.credential}/", headers={"Authorization": ticket.bearer}))

    assert 400 <= refused.status < 500
    assert b"needle" not in refused.body
    assert upstream.requests == []
