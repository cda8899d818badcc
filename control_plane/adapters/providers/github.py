"""A GitHub App's installation access tokens (https://docs.github.com/en/rest/apps/apps).

Rule: a token is asked for with exactly the repositories and permissions of the settings.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from control_plane.adapters.providers.token_endpoint import SECONDS, members, retry_after, send, signed
from control_plane.contract.secret import Secret
from control_plane.core.kinds import GithubAppSettings, KindSettings
from control_plane.ports import Outbound, OutboundReply, OutboundRequest, ProviderAnswer, ProviderError, ProviderFailure

_BEFORE_SECONDS: Final = 60
_AFTER_SECONDS: Final = 540
"""GitHub allows ten minutes, and advises a minute for clocks that differ."""
_CREATED: Final = 201
_HEADERS: Final = {
    "Accept": "application/vnd.github+json",
    "Content-Type": "application/json",
    "X-GitHub-Api-Version": "2022-11-28",
}
F = ProviderFailure


@dataclass(frozen=True, slots=True)
class GithubApp:
    outbound: Outbound

    async def mint(self, settings: KindSettings, secret: Secret, *, now: float) -> ProviderAnswer:
        assert isinstance(settings, GithubAppSettings)
        claims = {"iss": settings.app_id, "iat": int(now) - _BEFORE_SECONDS, "exp": int(now) + _AFTER_SECONDS}
        app_token = await signed(claims, key=json.loads(secret.reveal())["private_key"], algorithm="RS256")
        wanted: dict[str, Any] = {}
        if settings.repositories is not None:
            wanted["repositories"] = settings.repositories
        if settings.permissions is not None:
            wanted["permissions"] = settings.permissions
        reply = await send(
            self.outbound,
            OutboundRequest(
                "POST",
                f"{settings.api_url.rstrip('/')}/app/installations/{settings.installation_id}/access_tokens",
                {**_HEADERS, "Authorization": f"Bearer {app_token}"},
                json.dumps(wanted).encode(),
                seconds=SECONDS,
            ),
        )
        if reply.status != _CREATED:
            raise _refused(reply)
        return _token(members(reply), now=now)


def _token(found: dict[str, Any] | None, *, now: float) -> ProviderAnswer:
    token, end = (found or {}).get("token"), (found or {}).get("expires_at")
    if not isinstance(token, str) or not token or not isinstance(end, str):
        raise ProviderError(F.UNUSABLE)
    try:
        moment = datetime.fromisoformat(end)
    except ValueError:
        raise ProviderError(F.UNUSABLE) from None
    if moment.tzinfo is None:
        raise ProviderError(F.UNUSABLE)
    return ProviderAnswer(Secret(token), moment.timestamp() - now)


def _refused(reply: OutboundReply) -> ProviderError:
    match reply.status:
        case 401:
            return ProviderError(F.CLIENT_REFUSED)
        case 403 | 429 if reply.headers.get("x-ratelimit-remaining") == "0" or retry_after(reply) is not None:
            return ProviderError(F.UNAVAILABLE, retry_after_seconds=retry_after(reply))
        case 403 | 404 | 422:  # no such installation, or not with these repositories and permissions
            return ProviderError(F.REQUEST_REFUSED)
        case status if status == 429 or status >= 500:
            return ProviderError(F.UNAVAILABLE)
        case _:
            return ProviderError(F.UNUSABLE)
