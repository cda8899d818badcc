"""A Google service account's tokens (https://developers.google.com/identity/protocols/oauth2/service-account).

Rule: the assertion goes to the URL of the settings, whatever the key file says; an ID token ends when it says itself.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

import jwt

from control_plane.adapters.providers.token_endpoint import bearer, post_form, signed
from control_plane.contract.secret import Secret
from control_plane.core.kinds import GoogleServiceAccountSettings, KindSettings
from control_plane.ports import Outbound, ProviderAnswer, ProviderError, ProviderFailure

_ASSERTION_SECONDS: Final = 3600
"""As Google's own libraries have it; the assertion's end bounds the token's."""
_JWT_BEARER: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"


@dataclass(frozen=True, slots=True)
class GoogleServiceAccount:
    outbound: Outbound

    async def mint(self, settings: KindSettings, secret: Secret, *, now: float) -> ProviderAnswer:
        assert isinstance(settings, GoogleServiceAccountSettings)
        account = json.loads(secret.reveal())
        claims: dict[str, Any] = {
            "iss": account["client_email"],
            "aud": settings.token_url,
            "iat": int(now),
            "exp": int(now) + _ASSERTION_SECONDS,
        }
        if settings.subject is not None:
            claims["sub"] = settings.subject
        if settings.token == "id_token":
            claims["target_audience"] = settings.target_audience
        else:
            claims["scope"] = " ".join(settings.scopes or ())
        assertion = await signed(
            claims, key=account["private_key"], algorithm="RS256", key_id=account["private_key_id"]
        )
        found = await post_form(self.outbound, settings.token_url, {"grant_type": _JWT_BEARER, "assertion": assertion})
        return _id_token(found, now=now) if settings.token == "id_token" else bearer(found)


def _id_token(found: dict[str, Any], *, now: float) -> ProviderAnswer:
    token = found.get("id_token")
    if not isinstance(token, str):
        raise ProviderError(ProviderFailure.UNUSABLE)
    try:
        # Its end is all that is read of it: whether it is genuine is its receiver's to judge.
        end = jwt.decode(token, options={"verify_signature": False})["exp"]
        return ProviderAnswer(Secret(token), float(end) - now)
    except (jwt.PyJWTError, KeyError, TypeError, ValueError):
        raise ProviderError(ProviderFailure.UNUSABLE) from None
