"""Placeholders and proxy credentials: issued, renewed in place, and the answer that carries them; and, rarely, a key.

Rule: a placeholder is only ever made for a `Mandate`, that is for somebody whose right to act was just checked, and
for a credential that is granted to that somebody. The string leaves in the answer; what stays is its fingerprint.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from control_plane.contract.caller import Caller, PlaceholderId
from control_plane.contract.credential import DirectCredential, PlaceholderCredential
from control_plane.contract.placeholder import ENTROPY_BYTES, Shape, fingerprint, mint
from control_plane.contract.placeholder import TokenKind as Marker
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.core.delegation import Chain
from control_plane.core.names import ID_ENTROPY_BYTES, new_id
from control_plane.core.oauth import OAuthErrorCode, OAuthRefusedError
from control_plane.core.presets import PRESETS
from control_plane.core.records import Credential, Grant, Token, TokenKind
from control_plane.core.targeting import NOT_FOUND, Target, choose
from control_plane.faults import reach
from control_plane.own_keys import OwnKeyring
from control_plane.ports import Clock, Entropy, Records, TakenError

PROXY_CREDENTIAL_SHAPE: Final = Shape(prefix="")
_ID_PREFIXES: Final = {TokenKind.PLACEHOLDER: "ph", TokenKind.PROXY_CREDENTIAL: "pc", TokenKind.DIRECT: "dc"}


@dataclass(frozen=True, slots=True)
class Mandate:
    """Somebody's right to act, just checked: who through which client, in which roles, and until when."""

    caller: Caller
    roles: tuple[str, ...]
    not_after: float | None
    """The session's end, which nothing issued outlives. None: there is no session."""
    act: Chain = ()
    """Who acts for the subject; the one who acts now first."""


@dataclass(frozen=True, slots=True)
class Granted:
    """A credential, and the grants that let somebody use it now."""

    credential: Credential
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Issued:
    """What an exchange hands out. The only value that holds a placeholder; never logged."""

    placeholder: PlaceholderCredential
    proxy_credential: str
    token: Token
    credential: Credential
    base_url: str
    expires_in: int


@dataclass(frozen=True, slots=True, repr=False)
class IssuedProxyCredential:
    """A proxy credential by itself: for reaching what needs no credential. Never logged."""

    text: str
    token: Token
    expires_in: int


@dataclass(frozen=True, slots=True, repr=False)
class IssuedDirect:
    """The key itself. Never logged."""

    key: DirectCredential
    token: Token
    """What stands for it in the store: whose it is, and for which subject token it was given."""
    credential: Credential
    expires_in: int

    @property
    def base_url(self) -> str:
        return self.credential.destinations[0].url


class Issuance:
    def __init__(
        self,
        own_keys: OwnKeyring,
        *,
        clock: Clock,
        entropy: Entropy,
        proxy_base_url: str,
    ) -> None:
        self._own_keys = own_keys
        self._clock = clock
        self._entropy = entropy
        self._proxy_base_url = proxy_base_url.rstrip("/")

    async def prepare(self) -> None:
        """Opens the keys that minting needs, for whoever mints inside a transaction: opening them is another one.

        Raises `RefusedError(credential_unavailable)`.
        """
        await self._own_keys.rings()

    async def granted(self, records: Records, mandate: Mandate, target: Target) -> Granted:
        """The credential that is meant, among those granted now. Raises `RefusedError`."""
        found = await self._all_granted(records, mandate)
        meant = choose([granted.credential for granted in found], target)
        return next(granted for granted in found if granted.credential is meant)

    async def still_granted(self, records: Records, mandate: Mandate, token: Token) -> Credential:
        """The credential of a placeholder that is to be renewed. Raises `RefusedError(credential_not_found)`."""
        for granted in await self._all_granted(records, mandate):
            if granted.credential.id == token.credential_id:
                return granted.credential
        raise RefusedError(NOT_FOUND)

    async def _all_granted(self, records: Records, mandate: Mandate) -> list[Granted]:
        pairs = await records.hot.granted(
            subject=mandate.caller.subject,
            roles=mandate.roles,
            client=mandate.caller.client,
            tenant=mandate.caller.tenant,
        )
        now = self._clock()
        return [Granted(credential, live(grants, now)) for credential, grants in pairs if live(grants, now)]

    async def new(
        self, records: Records, mandate: Mandate, credential: Credential, *, ttl_seconds: int, scope: str = ""
    ) -> Issued:
        """A fresh placeholder and a fresh proxy credential, both recorded by fingerprint."""
        base_url = self._base_url(credential)
        text, token = await self._minted(
            mandate, TokenKind.PLACEHOLDER, credential=credential, ttl_seconds=ttl_seconds, scope=scope
        )
        proxy_credential, proxy_token = await self._minted(
            mandate, TokenKind.PROXY_CREDENTIAL, credential=None, ttl_seconds=ttl_seconds
        )
        await self._record(records, token, proxy_token)
        return Issued(
            placeholder=PlaceholderCredential(text),
            proxy_credential=proxy_credential,
            token=token,
            credential=credential,
            base_url=base_url,
            expires_in=max(0, int(token.expires_at - token.created_at)),
        )

    async def renewed(
        self,
        records: Records,
        mandate: Mandate,
        credential: Credential,
        token: Token,
        *,
        text: str,
        proxy: tuple[str, Token] | None,
    ) -> Issued:
        """The same strings, good for longer. Without a proxy credential to renew, a fresh one.

        Raises `RefusedError(revoked_placeholder)`.
        """
        base_url = self._base_url(credential)
        now = self._clock()
        expires_at = _expiry(mandate, token.ttl_seconds, now)
        await self._prolong(records, token, expires_at)
        if proxy is not None:
            proxy_credential, proxy_token = proxy
            await self._prolong(records, proxy_token, expires_at)
        else:
            proxy_credential, proxy_token = await self._minted(
                mandate, TokenKind.PROXY_CREDENTIAL, credential=None, ttl_seconds=token.ttl_seconds
            )
            await self._record(records, proxy_token)
        return Issued(
            placeholder=PlaceholderCredential(text),
            proxy_credential=proxy_credential,
            token=token,
            credential=credential,
            base_url=base_url,
            expires_in=max(0, int(expires_at - now)),
        )

    async def new_proxy_credential(
        self, records: Records, mandate: Mandate, *, ttl_seconds: int
    ) -> IssuedProxyCredential:
        """A fresh proxy credential, recorded by fingerprint."""
        text, token = await self._minted(mandate, TokenKind.PROXY_CREDENTIAL, credential=None, ttl_seconds=ttl_seconds)
        await self._record(records, token)
        return IssuedProxyCredential(text, token, max(0, int(token.expires_at - token.created_at)))

    async def renewed_proxy_credential(
        self, records: Records, mandate: Mandate, token: Token, *, text: str
    ) -> IssuedProxyCredential:
        """The same string, good for longer. Raises `RefusedError(revoked_placeholder)`."""
        now = self._clock()
        expires_at = _expiry(mandate, token.ttl_seconds, now)
        await self._prolong(records, token, expires_at)
        return IssuedProxyCredential(text, token, max(0, int(expires_at - now)))

    async def _prolong(self, records: Records, token: Token, expires_at: float) -> None:
        if not await records.tokens.prolong(token.sha256, expires_at):
            raise RefusedError(REVOKED)
        reach("issuance.prolonged")

    async def _record(self, records: Records, *tokens: Token) -> None:
        await records.tokens.add(*tokens)
        reach("issuance.recorded")

    async def _minted(
        self,
        mandate: Mandate,
        kind: TokenKind,
        *,
        credential: Credential | None,
        ttl_seconds: int,
        scope: str = "",
    ) -> tuple[str, Token]:
        shape, marker = (PROXY_CREDENTIAL_SHAPE, Marker.PROXY_CREDENTIAL)
        if credential is not None:
            shape, marker = shape_of(credential), Marker.PLACEHOLDER
        tag_key = (await self._own_keys.rings()).tags[0]
        text = mint(shape, marker, tag_key=tag_key, entropy=self._entropy(ENTROPY_BYTES))
        return text, self._token(mandate, kind, fingerprint(text), credential, ttl_seconds, scope)

    def _token(
        self,
        mandate: Mandate,
        kind: TokenKind,
        sha256: str,
        credential: Credential | None,
        ttl_seconds: int,
        scope: str,
    ) -> Token:
        now, caller = self._clock(), mandate.caller
        return Token(
            sha256=sha256,
            id=PlaceholderId(new_id(_ID_PREFIXES[kind], self._entropy(ID_ENTROPY_BYTES))),
            kind=kind,
            tenant=caller.tenant,
            subject=caller.subject,
            session=caller.session,
            client=caller.client,
            credential_id=credential.id if credential else None,
            ttl_seconds=ttl_seconds,
            created_at=now,
            expires_at=_expiry(mandate, ttl_seconds, now),
            revoked_at=None,
            scope=scope,
            act=mandate.act,
        )

    async def handed_out(
        self,
        records: Records,
        mandate: Mandate,
        credential: Credential,
        secret: Secret,
        *,
        for_token: str,
        ttl_seconds: int,
    ) -> IssuedDirect:
        """The key itself, once for each subject token. Raises `OAuthRefusedError(invalid_request)` the second time."""
        once = hashlib.sha256(f"direct\0{for_token}\0{credential.id}".encode()).hexdigest()
        token = self._token(mandate, TokenKind.DIRECT, once, credential, ttl_seconds, "")
        try:
            await records.tokens.add(token)
        except TakenError:
            raise OAuthRefusedError(OAuthErrorCode.INVALID_REQUEST, HANDED_OUT_ALREADY) from None
        return IssuedDirect(
            DirectCredential(secret), token, credential, max(0, int(token.expires_at - token.created_at))
        )

    def _base_url(self, credential: Credential) -> str:
        if not self._proxy_base_url:
            raise RefusedError(ENDPOINT_UNRESOLVED)
        return f"{self._proxy_base_url}/{credential.name}"


def _expiry(mandate: Mandate, ttl_seconds: int, now: float) -> float:
    return now + ttl_seconds if mandate.not_after is None else min(now + ttl_seconds, mandate.not_after)


def live(grants: Sequence[Grant], now: float) -> tuple[Grant, ...]:
    return tuple(grant for grant in grants if grant.scope.is_live(now))


def shape_of(credential: Credential) -> Shape:
    preset = PRESETS.get(credential.preset) if credential.preset else None
    return preset.shape if preset else Shape()


REVOKED: Final = Refusal(
    RefusalCode.REVOKED_PLACEHOLDER,
    "the placeholder or proxy credential was revoked",
    "exchange again for a new one",
)
ENDPOINT_UNRESOLVED: Final = Refusal(
    RefusalCode.ENDPOINT_UNRESOLVED,
    "the control plane does not know the address of the egress proxy",
    "set COATCHECK_CONTROL_PLANE_PROXY_BASE_URL to the URL of the proxy's reverse listener",
)
HANDED_OUT_ALREADY: Final = Refusal(
    RefusalCode.TOKEN_INVALID,
    "a key is handed out once for each subject token, and for this one it was",
    "get a fresh session token with POST /v1/sessions/{id}/token",
)
