"""The call to the model: the Messages interface (https://docs.anthropic.com/en/api/messages), through the egress proxy.

Rule: the request carries a placeholder where the key would stand, and the proxy credential beside it; no key ever comes
here. What the proxy refuses and what the provider refuses are told apart by `Coatcheck-Refusal`, which no upstream can
set. Neither's text is passed on.
"""

import base64
import json
import re
from typing import Any, Final, assert_never

import httpx

from control_plane.contract.headers import REFUSAL_HEADER, REQUEST_ID_HEADER
from control_plane.contract.placement import BasicPlacement, HeaderPlacement, PathPlacement, QueryPlacement
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from runtime.core.turn import Conversation, Placeholder
from runtime.ports import PlaceholderRefusedError

ANTHROPIC_VERSION: Final = "2023-06-01"
MAX_REPLY_BYTES: Final = 8 * 1024 * 1024

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

PLACEHOLDER_IS_OVER: Final = frozenset(
    {RefusalCode.UNKNOWN_PLACEHOLDER, RefusalCode.EXPIRED_PLACEHOLDER, RefusalCode.REVOKED_PLACEHOLDER}
    | {RefusalCode.PROXY_AUTHENTICATION_REQUIRED, RefusalCode.TOKEN_REQUIRED, RefusalCode.TOKEN_INVALID}
    | {RefusalCode.TOKEN_EXPIRED}
)
"""Refusals that a fresh exchange may cure: of the placeholder, or of the proxy credential that came with it."""


class MessagesModel:
    """See `runtime.ports.Model`."""

    def __init__(self, http: httpx.AsyncClient, *, model: str, max_tokens: int) -> None:
        self._http = http
        self._model = model
        self._max_tokens = max_tokens

    async def answer(self, conversation: Conversation, placeholder: Placeholder) -> str:
        request = self._request(conversation, placeholder)
        try:
            response = await self._http.send(request, stream=True)
            try:
                raw = await _limited_body(response)
            finally:
                await response.aclose()
        except httpx.TimeoutException:
            raise _refused(RefusalCode.UPSTREAM_TIMEOUT, "the model did not answer in time") from None
        except httpx.ConnectError:
            raise _refused(RefusalCode.UPSTREAM_UNREACHABLE, "the egress proxy cannot be reached") from None
        except httpx.RequestError:
            raise _refused(RefusalCode.UPSTREAM_PROTOCOL_ERROR, "the model's answer broke off") from None
        if response.status_code != httpx.codes.OK:
            raise _reason(response)
        return _text(raw)

    def _request(self, conversation: Conversation, placeholder: Placeholder) -> httpx.Request:
        headers, parameters = _placed(placeholder)
        return self._http.build_request(
            "POST",
            f"{placeholder.base_url}/v1/messages",
            params=parameters,
            headers={
                **headers,
                "proxy-authorization": f"Bearer {placeholder.proxy_credential}",
                "anthropic-version": ANTHROPIC_VERSION,
            },
            json={
                "model": self._model,
                "max_tokens": self._max_tokens,
                "messages": [{"role": message.role, "content": message.text} for message in conversation.messages],
            },
        )


def _placed(placeholder: Placeholder) -> tuple[dict[str, str], dict[str, str]]:
    """Headers and query parameters with the placeholder in its placement."""
    value = placeholder.credential.value
    match placeholder.placement:
        case HeaderPlacement() as header:
            return {header.name: f"{header.prefix}{value}{header.suffix}"}, {}
        case BasicPlacement(username=username):
            return {"authorization": "Basic " + base64.b64encode(f"{username}:{value}".encode()).decode()}, {}
        case QueryPlacement(parameter=parameter):
            return {}, {parameter: value}
        case PathPlacement():
            raise _refused(RefusalCode.PLACEMENT_DENIED, "no model takes its key in the path")
        case other:
            assert_never(other)


async def _limited_body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            raise _refused(RefusalCode.UPSTREAM_PROTOCOL_ERROR, "the model's answer is too long")
    return bytes(body)


def _reason(response: httpx.Response) -> Exception:
    """Why there is no answer: the proxy's refusal, or the provider's."""
    if (named := response.headers.get(REFUSAL_HEADER)) is not None:
        try:
            code = RefusalCode(named)
        except ValueError:
            return _refused(RefusalCode.UPSTREAM_PROTOCOL_ERROR, "the egress proxy refused in a way we do not know")
        if code in PLACEHOLDER_IS_OVER:
            return PlaceholderRefusedError(code.value)
        return _refused(code, "the egress proxy did not let the request to the model through" + _trace(response))
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return _refused(RefusalCode.RATE_LIMITED, "the model's provider limits this account's requests")
    return _refused(
        RefusalCode.UPSTREAM_PROTOCOL_ERROR, f"the model's provider answered with status {response.status_code}"
    )


def _trace(response: httpx.Response) -> str:
    """The proxy's own id of the request, under which its audit trail has the reason."""
    named = response.headers.get(REQUEST_ID_HEADER, "")
    return f" (its request id: {named})" if _REQUEST_ID.fullmatch(named) else ""


def _text(raw: bytes) -> str:
    """The words of a message. Raises `RefusedError`."""
    try:
        reply: Any = json.loads(raw)
        blocks = [block["text"] for block in reply["content"] if block["type"] == "text"]
        return "".join(blocks)
    except (ValueError, LookupError, TypeError):
        raise _refused(RefusalCode.UPSTREAM_PROTOCOL_ERROR, "the model's answer is not a message") from None


def _refused(code: RefusalCode, detail: str) -> RefusedError:
    return RefusedError(Refusal(code, detail=detail, hint="`coatcheck why` and the proxy's request id tell more"))
