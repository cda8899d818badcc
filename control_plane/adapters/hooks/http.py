"""The hook `http`: an endpoint of the operator's makes the new value.

    POST <url>   Authorization: Bearer <JWT>
    {"event": "create", "tenant", "credential", "attempt"}                     -> 200 {"secret": "…"}
    {"event": "settle", "tenant", "credential", "attempt", "new_is_in_use"}    -> 2xx

The JWT is of the type `coatcheck-hook+jwt`, signed with our key (`/.well-known/jwks.json`), for this URL alone (`aud`),
for a minute, and over this body (`body_sha256`). The same `attempt` is the same question: who is asked again answers
with the same value. (RFC 7519; RFC 8725)
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from control_plane.contract.secret import Secret, UnusableSecretError
from control_plane.ports import (
    Clock,
    Created,
    HookAsk,
    HookFailedError,
    Outbound,
    OutboundError,
    OutboundReply,
    OutboundRequest,
)

TYP: Final = "coatcheck-hook+jwt"
_LIFETIME_SECONDS: Final = 60

Sign = Callable[[Mapping[str, Any]], Awaitable[str]]
"""Claims into a JWT of the type `TYP`."""


class HttpHook:
    def __init__(self, outbound: Outbound, *, sign: Sign, issuer: str, clock: Clock) -> None:
        self._outbound = outbound
        self._sign = sign
        self._issuer = issuer
        self._clock = clock

    async def create(self, ask: HookAsk) -> Created:
        """Raises `HookFailedError`."""
        reply = await self._post(ask, {"event": "create"})
        try:
            secret = json.loads(reply.body)["secret"]
        except (ValueError, TypeError, KeyError, RecursionError):
            secret = None
        if not isinstance(secret, str):
            raise HookFailedError('the hook did not answer {"secret": "…"}')
        try:
            return Created(Secret.submitted(secret))
        except UnusableSecretError:
            raise HookFailedError("what the hook answered cannot be a secret") from None

    async def settle(self, ask: HookAsk, *, new_is_in_use: bool) -> None:
        """Raises `HookFailedError`."""
        await self._post(ask, {"event": "settle", "new_is_in_use": new_is_in_use})

    async def _post(self, ask: HookAsk, fields: Mapping[str, Any]) -> OutboundReply:
        url, now = str(ask.settings["url"]), int(self._clock())
        about = {"tenant": ask.tenant, "credential": ask.credential, "attempt": ask.attempt}
        body = json.dumps({**fields, **about}, sort_keys=True).encode()
        claims = {
            "iss": self._issuer,
            "aud": url,
            "iat": now,
            "exp": now + _LIFETIME_SECONDS,
            "jti": ask.attempt,
            "body_sha256": hashlib.sha256(body).hexdigest(),
        }
        headers = {"authorization": f"Bearer {await self._sign(claims)}", "content-type": "application/json"}
        try:
            reply = await self._outbound.send(OutboundRequest("POST", url, headers=headers, body=body))
        except OutboundError as error:
            raise HookFailedError(f"the hook could not be asked ({error.failure.value})") from None
        if not 200 <= reply.status < 300:
            raise HookFailedError(f"the hook answered {reply.status}")
        return reply
