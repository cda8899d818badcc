"""Who a token of a trusted issuer speaks for: the one way from a string to a `VerifiedIdentity`.

Rule: nothing is fetched for a token that cannot be good anyway, and never from where a token says. Whoever presented a
token that is not believed hears one answer, whatever was wrong; the reason stands in the log alone, without the token.
"""

from collections.abc import Sequence
from typing import Final

import structlog

from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.identity import TrustedIssuer, Use, VerifiedIdentity, precheck, verify
from control_plane.core.tokens import PROXY_AUDIENCE, InvalidTokenError, UnverifiedToken, read
from control_plane.ports import Clock, CrossTenantReason, KeysUnavailableError, PlatformScope, PublicKeys, Store

_log = structlog.get_logger("control_plane.identification")


class Identification:
    def __init__(self, store: Store, keys: PublicKeys, *, clock: Clock, own_issuer: str) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self._own_issuer = own_issuer

    async def verified(self, unverified_token: str, *, use: Use) -> VerifiedIdentity:
        """Raises `InvalidTokenError`, or `RefusedError(credential_unavailable)` where its issuer's keys are away."""
        try:
            token = read(unverified_token)
            issuer = await self._issuer_of(token)
            return await self.verified_of(token, issuer, use=use)
        except InvalidTokenError as error:
            _log.info("token_not_believed", use=use.value, reason=error.reason)
            raise

    async def verified_of(self, token: UnverifiedToken, issuer: TrustedIssuer, *, use: Use) -> VerifiedIdentity:
        """The same, by an issuer that is known already."""
        audiences, now = self.audiences(issuer, use), self._clock()
        precheck(token, issuer, use=use, audiences=audiences, now=now)
        try:
            keys = await self._keys.of(issuer.key_source, key_id=token.key_id)
        except KeysUnavailableError:
            raise RefusedError(KEYS_UNAVAILABLE) from None
        return verify(token, issuer, keys, use=use, audiences=audiences, now=now)

    def audiences(self, issuer: TrustedIssuer, use: Use) -> Sequence[str]:
        match use:
            case Use.CLIENT:
                # A workload proves itself to this control plane with a token that was made for it and for nobody else,
                return (self._own_issuer,)
            case Use.PROXY:
                # and to a proxy with one that was made for proxies: neither is good in the other's place.
                return (PROXY_AUDIENCE,)
            case Use.SESSION | Use.ADMIN:
                return issuer.audiences

    async def _issuer_of(self, token: UnverifiedToken) -> TrustedIssuer:
        names = [name for name in (token.issuer, token.trust_domain) if name is not None]
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            found = {issuer.issuer: issuer for issuer in await records.issuers.of(names)} if names else {}
        for name in names:  # by `iss` first
            if name in found:
                return found[name]
        raise InvalidTokenError("iss: no issuer that is trusted here")


KEYS_UNAVAILABLE: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "the keys of the token's issuer cannot be fetched, so nobody can say whether it is good",
    "try again in a moment; coatcheck issuer show says where they are fetched from",
    retry_after_seconds=5,
)
