"""The control plane, as a runtime sees it: the keys that session tokens are verified with, and the exchange.

Rule: its answers are read into types that cannot be wrong, or refused. An upstream credential of a mode we did not ask
for is an error, never used "as it is"; an answer about somebody else is an error too. (RFC 7517, RFC 8693.)
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx
import jwt

from control_plane.contract.caller import ClientId
from control_plane.contract.credential import (
    DirectCredential,
    PlaceholderCredential,
    UnknownCredentialModeError,
    from_wire,
)
from control_plane.contract.headers import (
    GRANT_TYPE_TOKEN_EXCHANGE,
    TOKEN_TYPE_JWT,
    TOKEN_TYPE_PLACEHOLDER,
)
from control_plane.contract.placement import placement_from_json
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from runtime.adapters.client_proof import ClientProof
from runtime.core.session_token import ALGORITHM, MAX_TOKEN_BYTES, check_claims, check_header, token_invalid
from runtime.core.subject import SessionClaims
from runtime.core.turn import Holder, Placeholder
from runtime.ports import PlaceholderRefusedError

Clock = Callable[[], float]
"""Unix seconds."""

KEYS_FRESH_SECONDS: Final = 300.0
KEYS_STALE_SECONDS: Final = 3_600.0
"""How long known keys serve on while the control plane does not answer: a key taken back is out after this at most."""
REFETCH_SECONDS: Final = 5.0
"""Tokens with made-up key ids cause no more than one question in this time."""

PASSED_ON: Final = frozenset(
    {
        *(RefusalCode.TOKEN_INVALID, RefusalCode.TOKEN_EXPIRED, RefusalCode.SESSION_NOT_FOUND),
        *(RefusalCode.CREDENTIAL_NOT_FOUND, RefusalCode.CREDENTIAL_AMBIGUOUS, RefusalCode.ENDPOINT_UNRESOLVED),
        *(RefusalCode.DIRECT_NOT_ALLOWED, RefusalCode.CREDENTIAL_UNAVAILABLE, RefusalCode.STORE_UNAVAILABLE),
        *(RefusalCode.RATE_LIMITED, RefusalCode.OVERLOADED, RefusalCode.DRAINING),
    }
)
"""Codes of an exchange that mean the same to whoever asked for the turn. Every other is our own trouble."""


_OVER: Final = frozenset(
    {RefusalCode.REVOKED_PLACEHOLDER, RefusalCode.UNKNOWN_PLACEHOLDER, RefusalCode.EXPIRED_PLACEHOLDER}
)
"""What a renewal hears of a placeholder that will never be good again."""


class SessionTokens:
    """Verifies session tokens with the control plane's published keys."""

    def __init__(
        self, http: httpx.AsyncClient, *, control_plane_url: str, issuer: str, client_id: ClientId, clock: Clock
    ) -> None:
        self._http = http
        self._url = f"{control_plane_url}/.well-known/jwks.json"
        self._issuer = issuer
        self._client_id = client_id
        self._clock = clock
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._fetched_at = float("-inf")
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    @property
    def knows_keys(self) -> bool:
        """Whether a token could be verified now."""
        return bool(self._keys) and self._clock() - self._fetched_at < KEYS_STALE_SECONDS

    async def verify(self, unverified_token: str) -> SessionClaims:
        """See `runtime.ports.Identity`."""
        if len(unverified_token) > MAX_TOKEN_BYTES or not unverified_token.isascii():
            raise token_invalid()
        try:
            key_id = check_header(jwt.get_unverified_header(unverified_token))
            key = await self._key(key_id)
            signed = jwt.PyJWS().decode(unverified_token, key, algorithms=[ALGORITHM])
            payload = json.loads(signed)
        except (jwt.PyJWTError, ValueError):
            raise token_invalid() from None
        if not isinstance(payload, dict):
            raise token_invalid()
        return check_claims(payload, issuer=self._issuer, audience=self._client_id, now=self._clock())

    async def refresh(self) -> None:
        """Ask for the keys where they are not fresh. What is known stays when there is no answer."""
        if self._clock() - self._fetched_at >= KEYS_FRESH_SECONDS:
            await self._fetch()

    async def _key(self, key_id: str) -> jwt.PyJWK:
        await self.refresh()
        if key_id not in self._keys:  # the ring may have turned since
            await self._fetch()
        if not self.knows_keys:
            raise unavailable("the control plane does not answer, so no session token can be verified")
        try:
            return self._keys[key_id]
        except KeyError:
            raise token_invalid() from None

    async def _fetch(self) -> None:
        async with self._asking:
            if self._clock() - self._asked_at < REFETCH_SECONDS:
                return
            try:
                response = await self._http.get(self._url)
                response.raise_for_status()
                keys = _signing_keys(response.json())
            except (httpx.HTTPError, ValueError):
                keys = {}
            finally:
                self._asked_at = self._clock()  # after the answer: whoever waited for it does not ask again
            if keys:
                self._keys, self._fetched_at = keys, self._clock()


def _signing_keys(key_set: Any) -> dict[str, jwt.PyJWK]:
    """Ed25519 keys of a JWK set by their id. Others are left out (RFC 7517 §5)."""
    listed = key_set.get("keys") if isinstance(key_set, dict) else None
    keys = {}
    for jwk in listed if isinstance(listed, list) else ():
        if not isinstance(jwk, dict) or jwk.get("kty") != "OKP" or jwk.get("crv") != "Ed25519":
            continue
        if not isinstance(jwk.get("kid"), str) or jwk.get("use", "sig") != "sig" or "d" in jwk:
            continue
        try:
            keys[jwk["kid"]] = jwt.PyJWK(jwk, algorithm=ALGORITHM)
        except jwt.PyJWTError:
            continue
    return keys


class Exchange:
    """`POST /oauth/token`: a session token in, a placeholder for a credential out; or a placeholder, for longer."""

    def __init__(self, http: httpx.AsyncClient, *, control_plane_url: str, proof: ClientProof, clock: Clock) -> None:
        self._http = http
        self._url = f"{control_plane_url}/oauth/token"
        self._proof = proof
        self._clock = clock

    async def exchange(self, session_token: str, holder: Holder) -> Placeholder:
        """See `runtime.ports.ExchangesPlaceholders`."""
        response = await self._post(
            {"subject_token": session_token, "subject_token_type": TOKEN_TYPE_JWT, "audience": holder.audience}
        )
        return self._read(response, holder)

    async def renew(self, placeholder: Placeholder, holder: Holder) -> Placeholder:
        """See `runtime.ports.ExchangesPlaceholders`."""
        response = await self._post(
            {
                "subject_token": placeholder.credential.value,
                "subject_token_type": TOKEN_TYPE_PLACEHOLDER,
                "audience": holder.audience,
                "proxy_credential": placeholder.proxy_credential,
            }
        )
        if _json_object(response).get("code") in _OVER:
            raise PlaceholderRefusedError
        renewed = self._read(response, holder)
        if (renewed.credential, renewed.proxy_credential) != (placeholder.credential, placeholder.proxy_credential):
            raise _wrong_answer("is another placeholder than the one that was to be renewed")
        return renewed

    async def _post(self, asked: Mapping[str, str]) -> httpx.Response:
        form = {
            "grant_type": GRANT_TYPE_TOKEN_EXCHANGE,
            "requested_token_type": TOKEN_TYPE_PLACEHOLDER,
            **asked,
            **self._proof.form(),
        }
        try:
            return await self._http.post(self._url, data=form, headers=self._proof.oauth_headers())
        except httpx.HTTPError:
            raise unavailable("the control plane does not answer") from None

    def _read(self, response: httpx.Response, holder: Holder) -> Placeholder:
        answer = _json_object(response)
        if response.status_code != httpx.codes.OK:
            raise _refused_exchange(response, answer)
        return _placeholder(answer, holder=holder, now=self._clock())


def _placeholder(answer: Mapping[str, Any], *, holder: Holder, now: float) -> Placeholder:
    """A successful answer, every field of it checked. Raises `RefusedError`."""
    about = (answer.get("tenant"), answer.get("subject"), answer.get("session_id"))
    if about != (holder.owner.tenant, holder.owner.subject, holder.session):
        raise _wrong_answer("is about somebody else")
    credential = _placeholder_credential(answer)
    proxy_credential, base_url, expires_in = (
        answer.get(name) for name in ("proxy_credential", "base_url", "expires_in")
    )
    if not isinstance(proxy_credential, str) or not proxy_credential:
        raise _wrong_answer("has no proxy credential")
    if not isinstance(base_url, str) or not base_url.startswith(("https://", "http://")):
        raise _wrong_answer("has no base_url")
    if isinstance(expires_in, bool) or not isinstance(expires_in, int | float) or expires_in <= 0:
        raise _wrong_answer("has no expiry")
    try:
        placement = placement_from_json(answer["placement"])
    except (KeyError, AttributeError, ValueError):
        raise _wrong_answer("has no placement that we know") from None
    return Placeholder(credential, placement, proxy_credential, base_url.rstrip("/"), now + expires_in)


def _placeholder_credential(answer: Mapping[str, Any]) -> PlaceholderCredential:
    wire = answer.get("upstream_credential")
    try:
        credential = from_wire(wire if isinstance(wire, dict) else {})
    except UnknownCredentialModeError:
        raise _wrong_answer("has a credential of a mode that we do not know") from None
    match credential:
        case PlaceholderCredential():
            return credential
        case DirectCredential():
            # Asked for a placeholder and handed a key: it is dropped here, unopened.
            raise _refused(RefusalCode.DIRECT_NOT_ALLOWED, "this runtime works with placeholders only", "")


def _refused_exchange(response: httpx.Response, answer: Mapping[str, Any]) -> RefusedError:
    """What an error of the token endpoint (RFC 6749 §5.2, with our `code`) means for the turn."""
    try:
        code = RefusalCode(str(answer.get("code")))
    except ValueError:
        code = RefusalCode.CREDENTIAL_UNAVAILABLE
    if code not in PASSED_ON or response.status_code == httpx.codes.UNAUTHORIZED:  # 401: it is us who are not known
        return unavailable("the control plane does not serve this runtime")
    retry_after = response.headers.get("retry-after", "")
    return RefusedError(
        Refusal(
            code,
            detail="the control plane gave no placeholder for the model's credential",
            hint=_hint(code),
            retry_after_seconds=int(retry_after) if retry_after.isascii() and retry_after.isdigit() else None,
        )
    )


def _hint(code: RefusalCode) -> str:
    match code:
        case RefusalCode.TOKEN_INVALID | RefusalCode.TOKEN_EXPIRED | RefusalCode.SESSION_NOT_FOUND:
            return "ask the control plane for a fresh token, or open a session there"
        case RefusalCode.CREDENTIAL_NOT_FOUND | RefusalCode.CREDENTIAL_AMBIGUOUS:
            return "see that one credential of this name exists and is granted to this subject"
        case _:
            return "try again shortly; the control plane's log and audit trail tell more"


def _json_object(response: httpx.Response) -> Mapping[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _wrong_answer(what: str) -> RefusedError:
    return _refused(RefusalCode.INTERNAL_ERROR, f"the control plane's answer {what}", "see that its version fits ours")


def unavailable(detail: str) -> RefusedError:
    """The control plane is away, or does not serve us: try again."""
    return RefusedError(
        Refusal(RefusalCode.CREDENTIAL_UNAVAILABLE, detail=detail, hint="try again shortly", retry_after_seconds=2)
    )


def _refused(code: RefusalCode, detail: str, hint: str) -> RefusedError:
    return RefusedError(Refusal(code, detail=detail, hint=hint))
