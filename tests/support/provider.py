"""A fake model provider: the Anthropic Messages, and the OpenAI chat-completions and responses interfaces.

Rule: it answers only to its key, and 401 to anything else, as the real ones do; so a request that was not swapped
fails at the client too, and not only in the upstream's log. Streaming replies are server-sent events, one write each.
"""

import asyncio
import json
from typing import Any

from tests.support.upstream import Behaviour, Request, Upstream, Wire, chunk, message

ANSWER = ("Coats ", "are ", "checked.")
STREAM_GAP_SECONDS = 0.01


def serve_provider(upstream: Upstream, *, key: str, prefix: str = "") -> None:
    """Let this upstream be a provider whose only key is `key`, its paths under `prefix`."""
    for path, answer in (
        ("/v1/messages", _messages),
        ("/v1/chat/completions", _chat),
        ("/v1/responses", _responses),
    ):
        upstream.on(prefix + path, _keyed(key, answer))
    upstream.on(prefix + "/v1/models", _keyed(key, lambda _: {"data": [{"id": "coat-1"}], "object": "list"}))


def _keyed(key: str, answer: Any) -> Behaviour:
    async def behave(request: Request, wire: Wire) -> None:
        if key not in (request.header("x-api-key"), request.header("authorization").removeprefix("Bearer ")):
            error = {"type": "error", "error": {"type": "authentication_error", "message": "invalid x-api-key"}}
            await wire.write(_json(error, status="401 Unauthorized"))
            return
        asked = json.loads(request.body) if request.body else {}
        reply = answer(asked)
        await (_stream(wire, reply) if isinstance(reply, list) else wire.write(_json(reply)))

    return behave


def _json(body: Any, *, status: str = "200 OK") -> bytes:
    return message(json.dumps(body).encode(), status=status, headers=[("Content-Type", "application/json")])


async def _stream(wire: Wire, events: list[tuple[str, Any]]) -> None:
    await wire.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        await wire.write(chunk((f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()))
        await asyncio.sleep(STREAM_GAP_SECONDS)
    await wire.write(b"0\r\n\r\n")


# --- Anthropic: https://docs.anthropic.com/en/api/messages -----------------------------------------------------------


def _messages(asked: dict[str, Any]) -> Any:
    whole = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": asked["model"],
        "content": [{"type": "text", "text": "".join(ANSWER)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 3},
    }
    if not asked.get("stream"):
        return whole
    text = {"type": "text", "text": ""}
    deltas = [_event("content_block_delta", index=0, delta={"type": "text_delta", "text": part}) for part in ANSWER]
    return [
        _event("message_start", message=whole | {"content": [], "stop_reason": None}),
        _event("content_block_start", index=0, content_block=text),
        _event("ping"),
        *deltas,
        _event("content_block_stop", index=0),
        _event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage={"output_tokens": 3}),
        _event("message_stop"),
    ]


def _event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return kind, {"type": kind, **fields}


# --- OpenAI: https://platform.openai.com/docs/api-reference --------------------------------------------------------


def _chat(asked: dict[str, Any]) -> Any:
    frame = {"id": "chatcmpl-1", "created": 1, "model": asked["model"]}
    if not asked.get("stream"):
        answer = {"role": "assistant", "content": "".join(ANSWER)}
        choice = {"index": 0, "message": answer, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        return frame | {"object": "chat.completion", "choices": [choice], "usage": usage}
    frame["object"] = "chat.completion.chunk"
    parts = [
        ("", frame | {"choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]}) for part in ANSWER
    ]
    end = frame | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    return [*parts, ("", end), ("", "[DONE]")]


def _responses(asked: dict[str, Any]) -> Any:
    text = {"type": "output_text", "text": "".join(ANSWER), "annotations": []}
    item = {"id": "out_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    whole = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": asked["model"],
        "output": [item],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
    if not asked.get("stream"):
        return whole
    place = {"item_id": "out_1", "output_index": 0, "content_index": 0, "logprobs": []}
    deltas = [
        _event("response.output_text.delta", sequence_number=number, delta=part, **place)
        for number, part in enumerate(ANSWER, 1)
    ]
    return [
        _event("response.created", sequence_number=0, response=whole | {"output": [], "status": "in_progress"}),
        *deltas,
        _event("response.completed", sequence_number=len(ANSWER) + 1, response=whole),
    ]
