"""The call to the model: the bytes that reach the proxy, and what becomes of each of its answers."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from control_plane.contract.credential import PlaceholderCredential
from control_plane.contract.placement import BasicPlacement, HeaderPlacement, Placement, QueryPlacement
from control_plane.contract.refusal import RefusalCode, RefusedError, status_of
from runtime.adapters.models import MAX_REPLY_BYTES, PLACEHOLDER_IS_OVER, MessagesModel
from runtime.core.turn import Conversation, Placeholder
from runtime.ports import PlaceholderRefusedError
from tests.support.upstream import Upstream, message

C = RefusalCode
VALUE = "sk-ant-api03-coatchk1" + "A" * 28
PROOF = "coat_coatprx1" + "B" * 28
ASKED = Conversation().asking("hello").answered("hi").asking("and now?")
REPLY: dict[str, Any] = {
    "content": [
        {"type": "text", "text": "now "},
        {"type": "thinking", "thinking": "…"},
        {"type": "text", "text": "this"},
    ]
}


@pytest.fixture
def proxy() -> Any:
    """Stands where the proxy's reverse listener would."""
    with Upstream(None) as running:
        yield running


@pytest.fixture
async def model() -> AsyncIterator[MessagesModel]:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
        yield MessagesModel(http, model="coat-1", max_tokens=100)


X_API_KEY = HeaderPlacement("x-api-key")


def placeholder(proxy: Upstream | None, placement: Placement = X_API_KEY) -> Placeholder:
    base_url = f"http://127.0.0.1:{proxy.port if proxy else 9}/anthropic"
    return Placeholder(PlaceholderCredential(VALUE), placement, PROOF, base_url, 0.0)


def answering(proxy: Upstream, reply: bytes) -> None:
    async def behave(_request: Any, wire: Any) -> None:
        await wire.write(reply)

    proxy.default = behave


def answering_json(proxy: Upstream, body: Any, **options: Any) -> None:
    answering(proxy, message(json.dumps(body).encode(), **options))


async def test_the_proxy_receives_the_conversation_the_placeholder_and_our_proof(
    proxy: Upstream, model: MessagesModel
) -> None:
    answering_json(proxy, REPLY)

    answer = await model.answer(ASKED, placeholder(proxy))

    (request,) = proxy.requests
    assert answer == "now this"
    assert (request.method, request.target) == ("POST", "/anthropic/v1/messages")
    assert request.values("x-api-key") == [VALUE]
    assert request.values("proxy-authorization") == [f"Bearer {PROOF}"]
    assert request.values("authorization") == []
    assert json.loads(request.body) == {
        "model": "coat-1",
        "max_tokens": 100,
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hi"},
            {"role": "user", "content": "and now?"},
        ],
    }


@pytest.mark.parametrize(
    ("placement", "line"),
    [
        (HeaderPlacement("authorization", "Bearer {secret}"), f"authorization: Bearer {VALUE}"),
        (HeaderPlacement("authorization", "Token t={secret};v=1"), f"authorization: Token t={VALUE};v=1"),
        (BasicPlacement("user"), "authorization: Basic " + b64encode(f"user:{VALUE}".encode()).decode()),
        (QueryPlacement("key"), f"POST /anthropic/v1/messages?key={VALUE} HTTP/1.1"),
    ],
)
async def test_the_placeholder_stands_in_its_placement_and_nowhere_else(
    proxy: Upstream, model: MessagesModel, placement: Placement, line: str
) -> None:
    answering_json(proxy, REPLY)

    await model.answer(ASKED, placeholder(proxy, placement))

    received = bytes(proxy.requests[0].head).decode()
    assert line.lower() in received.lower()
    assert received.count(VALUE) == (0 if isinstance(placement, BasicPlacement) else 1)


@pytest.mark.parametrize("code", sorted(PLACEHOLDER_IS_OVER))
async def test_a_placeholder_that_is_over_says_so(proxy: Upstream, model: MessagesModel, code: RefusalCode) -> None:
    answering(proxy, message(b"{}", status=f"{status_of(code)} No", headers=[("Coatcheck-Refusal", code.value)]))

    with pytest.raises(PlaceholderRefusedError):
        await model.answer(ASKED, placeholder(proxy))


@pytest.mark.parametrize("code", [code for code in RefusalCode if code not in PLACEHOLDER_IS_OVER])
async def test_any_other_refusal_of_the_proxy_is_told_as_it_is(
    proxy: Upstream, model: MessagesModel, code: RefusalCode
) -> None:
    headers = [("Coatcheck-Refusal", code.value), ("Coatcheck-Request-Id", "req_42")]
    answering(proxy, message(b'{"detail": "Q7z"}', status=f"{status_of(code)} No", headers=headers))

    with pytest.raises(RefusedError) as refused:
        await model.answer(ASKED, placeholder(proxy))

    assert refused.value.refusal.code is code
    assert "req_42" in refused.value.refusal.detail
    assert "Q7z" not in f"{refused.value.refusal}"


PROVIDER_ANSWERS: dict[str, tuple[bytes, RefusalCode]] = {
    "its own 401": (message(b"Q7z", status="401 No"), C.UPSTREAM_PROTOCOL_ERROR),
    "its own 403": (message(b"Q7z", status="403 No"), C.UPSTREAM_PROTOCOL_ERROR),
    "its own 429": (message(b"Q7z", status="429 No"), C.RATE_LIMITED),
    "its own 500": (message(b"Q7z", status="500 No"), C.UPSTREAM_PROTOCOL_ERROR),
    "a redirect": (message(status="302 Found", headers=[("Location", "http://evil.test/")]), C.UPSTREAM_PROTOCOL_ERROR),
    "no content": (message(status="204 No Content", framed=False), C.UPSTREAM_PROTOCOL_ERROR),
    "a refusal of no list": (
        message(b"", status="403 No", headers=[("Coatcheck-Refusal", "Q7z")]),
        C.UPSTREAM_PROTOCOL_ERROR,
    ),
    "not JSON": (message(b"<html>Q7z"), C.UPSTREAM_PROTOCOL_ERROR),
    "not UTF-8": (message(b"\xff\xfe"), C.UPSTREAM_PROTOCOL_ERROR),
    "no message": (message(b'{"type": "Q7z"}'), C.UPSTREAM_PROTOCOL_ERROR),
    "a list": (message(b"[]"), C.UPSTREAM_PROTOCOL_ERROR),
    "odd content": (message(b'{"content": [1]}'), C.UPSTREAM_PROTOCOL_ERROR),
    "text that is none": (message(b'{"content": [{"type": "text", "text": 1}]}'), C.UPSTREAM_PROTOCOL_ERROR),
    "half an answer": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{",
        C.UPSTREAM_PROTOCOL_ERROR,
    ),
    "broken gzip": (message(b"Q7z", headers=[("Content-Encoding", "gzip")]), C.UPSTREAM_PROTOCOL_ERROR),
    "too much": (message(b'"' + b"x" * MAX_REPLY_BYTES + b'"'), C.UPSTREAM_PROTOCOL_ERROR),
}


@pytest.mark.parametrize("what", PROVIDER_ANSWERS)
async def test_a_bad_answer_of_the_provider_is_a_refusal_that_does_not_quote_it(
    proxy: Upstream, model: MessagesModel, what: str
) -> None:
    reply, code = PROVIDER_ANSWERS[what]

    async def behave(_request: Any, wire: Any) -> None:
        await wire.write(reply)
        if what == "half an answer":
            await wire.close()

    proxy.default = behave

    with pytest.raises(RefusedError) as refused:
        await model.answer(ASKED, placeholder(proxy))

    assert refused.value.refusal.code is code
    assert "Q7z" not in f"{refused.value!r} {refused.value.refusal}"


async def test_a_proxy_that_is_away_is_unreachable(model: MessagesModel) -> None:
    with pytest.raises(RefusedError) as refused:
        await model.answer(ASKED, placeholder(None))

    assert refused.value.refusal.code is C.UPSTREAM_UNREACHABLE


async def test_a_model_that_stays_silent_is_timed_out(proxy: Upstream) -> None:
    async def behave(_request: Any, wire: Any) -> None:
        await wire.peer_gone.wait()

    proxy.default = behave
    async with httpx.AsyncClient(trust_env=False, timeout=0.2) as http:
        with pytest.raises(RefusedError) as refused:
            await MessagesModel(http, model="m", max_tokens=1).answer(ASKED, placeholder(proxy))

    assert refused.value.refusal.code is C.UPSTREAM_TIMEOUT


async def test_a_conversation_beyond_the_limit_loses_its_oldest_turns_and_stays_in_pairs() -> None:
    long = Conversation().asking("a" * 900_000).answered("b" * 900_000).asking("c" * 100).answered("d")

    asked = long.asking("e" * 200_000)

    assert [message.text[0] for message in asked.messages] == ["c", "d", "e"]
    assert replace(asked).messages[0].role == "user"
