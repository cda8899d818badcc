"""The key that signs the audit trail's heads, and the public keys by which anybody checks them.

Rule: it signs nothing else, and no other key of ours is ever taken for it. It is sealed in the store like any secret; a
key that was used is kept for as long as the trail is, since heads are signed once.
"""

import base64
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from control_plane.contract.refusal import RefusedError
from control_plane.core.records import KeyPurpose, OwnKey
from control_plane.core.sealing import own_key_aad
from control_plane.custody import Custody, UnopenableError
from control_plane.own_keys import KEYS_DO_NOT_OPEN, SigningKey, key_in_use
from control_plane.ports import Clock, CrossTenantReason, Entropy, PlatformScope, Store, TakenError

LOOK_AGAIN_SECONDS: Final = 15.0
"""How long a replica goes on with the keys that it knows: by then it has what another one made."""
_SEED_BYTES: Final = 32
_SCOPE: Final = PlatformScope(CrossTenantReason.START)
_log = structlog.get_logger("control_plane.audit_keys")


@dataclass(frozen=True, slots=True, repr=False)
class AuditKeyRing:
    """The one in use first, never empty. The others verify what they signed, or are going to sign."""

    keys: tuple[SigningKey, ...]

    def sign(self, message: bytes) -> tuple[str, bytes]:
        in_use = self.keys[0]
        return in_use.id, in_use.private.sign(message)

    @property
    def public_keys(self) -> dict[str, Ed25519PublicKey]:
        return {key.id: key.private.public_key() for key in self.keys}

    def public_jwks(self) -> dict[str, list[dict[str, Any]]]:
        """RFC 7517, RFC 8037."""
        return {"keys": [_public_jwk(key) for key in self.keys]}


class AuditKeys:
    """Opens the ring and looks again now and then; makes the first key of a new database."""

    def __init__(self, store: Store, custody: Custody, *, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._custody = custody
        self._clock = clock
        self._entropy = entropy
        self._ring: AuditKeyRing | None = None
        self._looked_at = 0.0

    async def ring(self) -> AuditKeyRing:
        """Raises `RefusedError(credential_unavailable)` where the stored keys do not open."""
        now = self._clock()
        if self._ring is None or abs(now - self._looked_at) >= LOOK_AGAIN_SECONDS:
            self._ring, self._looked_at = await self._custody.with_keys(self._open_or_make), now
        return self._ring

    async def _open_or_make(self) -> AuditKeyRing:
        return self._opened(await self._stored() or await self._first())

    async def _stored(self) -> Sequence[OwnKey]:
        async with self._store.read(_SCOPE) as records:
            return await records.own_keys.list(KeyPurpose.AUDIT)

    async def _first(self) -> Sequence[OwnKey]:
        """Of replicas that start at once, one makes the first key and the others find it."""
        with contextlib.suppress(TakenError):
            async with self._store.write(_SCOPE) as records:
                await records.own_keys.add(self._new(f"first-{KeyPurpose.AUDIT.value}"))
        return await self._stored()

    def _opened(self, stored: Sequence[OwnKey]) -> AuditKeyRing:
        in_use = key_in_use(stored, self._clock())
        in_order = sorted(stored, key=lambda key: key.id != in_use.id)
        try:
            return AuditKeyRing(tuple(SigningKey.of(self._open(key)) for key in in_order))
        except UnopenableError:
            _log.error("own_keys_do_not_open", purpose=KeyPurpose.AUDIT.value)
            raise RefusedError(KEYS_DO_NOT_OPEN) from None

    def _open(self, key: OwnKey) -> bytes:
        return self._custody.open(key.envelope, aad=own_key_aad(key_id=key.id, purpose=KeyPurpose.AUDIT))

    def _new(self, key_id: str) -> OwnKey:
        aad = own_key_aad(key_id=key_id, purpose=KeyPurpose.AUDIT)
        sealed = self._custody.seal(self._entropy(_SEED_BYTES), aad=aad)
        return OwnKey(
            id=key_id,
            purpose=KeyPurpose.AUDIT,
            envelope=sealed.envelope,
            kek_id=sealed.kek_id,
            created_at=self._clock(),
        )


def _public_jwk(key: SigningKey) -> dict[str, Any]:
    """Without `use` and `alg`: it is no key for tokens."""
    raw = key.private.public_key().public_bytes_raw()
    x = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
    return {"kty": "OKP", "crv": "Ed25519", "x": x, "kid": key.id}
