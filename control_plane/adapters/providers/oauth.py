"""OAuth 2.0 at a token endpoint: refresh token (RFC 6749 §6), client credentials (§4.4), JWT bearer (RFC 7523 §2.1).

Rule: a refresh token that comes back takes the place of the one that was sent, with whatever else stood beside it.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote_plus

from control_plane.adapters.providers.token_endpoint import bearer, post_form, signed
from control_plane.contract.secret import Secret
from control_plane.core.kinds import ClientCredentialsSettings, JwtBearerSettings, KindSettings, RefreshTokenSettings
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.ports import Entropy, Outbound, ProviderAnswer

ASSERTION_SECONDS: Final = 120
"""RFC 7523 §3 asks for an end; a short one, since the assertion is used at once."""
_CLIENT_ASSERTION: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_JWT_BEARER: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"


@dataclass(frozen=True, slots=True)
class RefreshToken:
    outbound: Outbound
    entropy: Entropy

    async def mint(self, settings: KindSettings, secret: Secret, *, now: float) -> ProviderAnswer:
        assert isinstance(settings, RefreshTokenSettings)
        kept = json.loads(secret.reveal())
        proof, headers = await _client_proof(settings, kept, now=now, entropy=self.entropy)
        form = {
            "grant_type": "refresh_token",
            "refresh_token": kept["refresh_token"],
            "scope": settings.scope,
            **proof,
        }
        found = await post_form(self.outbound, settings.token_url, form, headers)
        return replace(bearer(found), secret=_replaced(kept, found.get("refresh_token")))


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    outbound: Outbound
    entropy: Entropy

    async def mint(self, settings: KindSettings, secret: Secret, *, now: float) -> ProviderAnswer:
        assert isinstance(settings, ClientCredentialsSettings)
        kept = json.loads(secret.reveal())
        proof, headers = await _client_proof(settings, kept, now=now, entropy=self.entropy)
        form = {
            "grant_type": "client_credentials",
            "scope": settings.scope,
            "audience": settings.audience,
            "resource": settings.resource,
            **proof,
        }
        return bearer(await post_form(self.outbound, settings.token_url, form, headers))


@dataclass(frozen=True, slots=True)
class JwtBearer:
    outbound: Outbound
    entropy: Entropy

    async def mint(self, settings: KindSettings, secret: Secret, *, now: float) -> ProviderAnswer:
        assert isinstance(settings, JwtBearerSettings)
        claims = {
            "iss": settings.issuer,
            "sub": settings.subject or settings.issuer,
            "aud": settings.audience or settings.token_url,
            **_moments(now, self.entropy),
        }
        key = json.loads(secret.reveal())["private_key"]
        assertion = await signed(claims, key=key, algorithm=settings.algorithm, key_id=settings.key_id)
        form = {"grant_type": _JWT_BEARER, "assertion": assertion, "scope": settings.scope}
        return bearer(await post_form(self.outbound, settings.token_url, form))


async def _client_proof(
    settings: RefreshTokenSettings | ClientCredentialsSettings,
    kept: Mapping[str, str],
    *,
    now: float,
    entropy: Entropy,
) -> tuple[dict[str, str], dict[str, str]]:
    """What goes into the form and into the head."""
    match settings.client_authentication:
        case "client_secret_basic":
            # RFC 6749 §2.3.1: form-encoded first, then joined and encoded.
            pair = f"{quote_plus(settings.client_id)}:{quote_plus(kept['client_secret'])}"
            return {}, {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
        case "client_secret_post":
            return {"client_id": settings.client_id, "client_secret": kept["client_secret"]}, {}
        case "private_key_jwt":
            claims = {
                "iss": settings.client_id,
                "sub": settings.client_id,
                "aud": settings.assertion_audience or settings.token_url,
                **_moments(now, entropy),
            }
            assertion = await signed(
                claims, key=kept["private_key"], algorithm=settings.algorithm, key_id=settings.key_id
            )
            return {
                "client_id": settings.client_id,
                "client_assertion_type": _CLIENT_ASSERTION,
                "client_assertion": assertion,
            }, {}
        case "none":
            return {"client_id": settings.client_id}, {}


def _moments(now: float, entropy: Entropy) -> dict[str, Any]:
    return {"iat": int(now), "exp": int(now) + ASSERTION_SECONDS, "jti": new_id("jti", entropy(ID_ENTROPY_BYTES))}


def _replaced(kept: Mapping[str, str], refresh_token: Any) -> Secret | None:
    """None where the one that was sent goes on."""
    if not isinstance(refresh_token, str) or not refresh_token or refresh_token == kept["refresh_token"]:
        return None
    return Secret(json.dumps({**kept, "refresh_token": refresh_token}, separators=(",", ":"), ensure_ascii=True))
