"""The control plane's own keys: it signs session tokens with one, and tags placeholders with the other.

Rule: they are sealed in the store like any secret. Where they do not open (a wrong key-encryption key), nothing is
minted and nothing verifies: everything that needs them is refused, and the process is not ready.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

import jwt
import structlog
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane.contract.caller import ClientId
from control_plane.contract.headers import SESSION_TOKEN_TYP
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.records import KeyPurpose, OwnKey
from control_plane.core.sealing import own_key_aad
from control_plane.core.session_token import (
    ALGORITHM,
    MAX_TOKEN_BYTES,
    InvalidSessionTokenError,
    SessionClaims,
    check_claims,
    check_header,
    to_payload,
)
from control_plane.custody import Custody, UnopenableError
from control_plane.ports import Clock, CrossTenantReason, Entropy, PlatformScope, Records, Store

_log = structlog.get_logger("control_plane.own_keys")

_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True, repr=False)
class SigningKey:
    """One Ed25519 key (RFC 8037)."""

    id: str
    private: Ed25519PrivateKey

    @classmethod
    def of(cls, seed: bytes) -> "SigningKey":
        private = Ed25519PrivateKey.from_private_bytes(seed)
        spki = private.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return cls(id=hashlib.sha256(spki).hexdigest()[:16], private=private)

    def public_jwk(self) -> dict[str, Any]:
        jwk: dict[str, Any] = jwt.algorithms.OKPAlgorithm.to_jwk(self.private.public_key(), as_dict=True)
        return {**jwk, "kid": self.id, "use": "sig", "alg": ALGORITHM}


@dataclass(frozen=True, slots=True, repr=False)
class KeyRings:
    """Both rings, newest first, never empty."""

    signing: tuple[SigningKey, ...]
    tags: tuple[bytes, ...]


class OwnKeyring:
    """Opens the rings once and keeps them; makes the first keys of a new database."""

    def __init__(self, store: Store, custody: Custody, *, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._custody = custody
        self._clock = clock
        self._entropy = entropy
        self._rings: KeyRings | None = None

    async def rings(self) -> KeyRings:
        """Raises `RefusedError(credential_unavailable)` where the stored keys do not open."""
        if self._rings is None:
            self._rings = await self._open_or_make()
        return self._rings

    async def sign(self, claims: SessionClaims) -> str:
        key = (await self.rings()).signing[0]
        headers = {"typ": SESSION_TOKEN_TYP, "kid": key.id}
        return jwt.encode(to_payload(claims), key.private, algorithm=ALGORITHM, headers=headers)

    async def verify(self, unverified_token: str, *, issuer: str, audience: ClientId | None) -> SessionClaims:
        """A session token's claims. Raises `InvalidSessionTokenError`."""
        if len(unverified_token) > MAX_TOKEN_BYTES or not unverified_token.isascii():
            raise InvalidSessionTokenError("form")
        try:
            key_id = check_header(jwt.get_unverified_header(unverified_token))
        except jwt.PyJWTError:
            raise InvalidSessionTokenError("form") from None
        key = next((key for key in (await self.rings()).signing if key.id == key_id), None)
        if key is None:
            raise InvalidSessionTokenError("kid")
        try:
            # The signature here; the claims, each of them, in `check_claims`, by our own clock.
            signed = jwt.PyJWS().decode_complete(unverified_token, key.private.public_key(), algorithms=[ALGORITHM])
            payload = _json_object(signed["payload"])
        except (jwt.PyJWTError, ValueError):
            raise InvalidSessionTokenError("signature") from None
        return check_claims(payload, issuer=issuer, audience=audience, now=self._clock())

    async def _open_or_make(self) -> KeyRings:
        async with self._store.write(PlatformScope(CrossTenantReason.START)) as records:
            seeds = await self._opened(records, KeyPurpose.SIGNING)
            tags = await self._opened(records, KeyPurpose.TAG)
        return KeyRings(signing=tuple(SigningKey.of(seed) for seed in seeds), tags=tuple(tags))

    async def _opened(self, records: Records, purpose: KeyPurpose) -> list[bytes]:
        stored = await records.own_keys.list(purpose)
        if not stored:
            stored = [self._new(purpose)]
            await records.own_keys.add(stored[0])
        try:
            return [self._custody.open(key.envelope, aad=own_key_aad(key_id=key.id, purpose=purpose)) for key in stored]
        except UnopenableError:
            _log.error("own_keys_do_not_open", purpose=purpose.value, kek_ids=list(self._custody.kek_ids))
            raise RefusedError(KEYS_DO_NOT_OPEN) from None

    def _new(self, purpose: KeyPurpose) -> OwnKey:
        key, key_id = self._entropy(_KEY_BYTES), self._entropy(8).hex()
        sealed = self._custody.seal(key, aad=own_key_aad(key_id=key_id, purpose=purpose))
        return OwnKey(
            id=key_id, purpose=purpose, envelope=sealed.envelope, kek_id=sealed.kek_id, created_at=self._clock()
        )


KEYS_DO_NOT_OPEN: Final = Refusal(
    RefusalCode.CREDENTIAL_UNAVAILABLE,
    "no key-encryption key of the ring opens what is stored",
    "check that COATCHECK_CONTROL_PLANE_KEK_FILES names the key that this database was written with",
)


def _json_object(raw: bytes) -> dict[str, Any]:
    value = json.loads(raw)
    if not isinstance(value, dict):
        raise ValueError("a payload is an object")  # noqa: TRY004 (one error for every bad payload)
    return value
