"""The key that signs the audit trail's heads, and the public keys by which anybody checks them.

Rule: it signs nothing else, and no other key of ours is ever taken for it. It is sealed in the store like any secret; a
key that was used is kept for as long as the trail is, since heads are signed once. With each key it is published from
when until when it was in use; what is signed by one that is out of use counts only with what a newer one signed after
it (`core.chain`, ADR 0027).
"""

import base64
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from control_plane.contract.refusal import RefusedError
from control_plane.core.chain import AuditKey, Keys, Sign
from control_plane.core.records import KeyPurpose, OwnKey
from control_plane.core.sealing import own_key_aad
from control_plane.custody import Custody, UnopenableError
from control_plane.own_keys import KEYS_DO_NOT_OPEN, SigningKey, key_in_use
from control_plane.ports import Clock, CrossTenantReason, Entropy, PlatformScope, Store, TakenError

LOOK_AGAIN_SECONDS: Final = 15.0
"""How long a replica goes on with the keys that it knows: by then it has what another one made."""
HANDED_OVER_SECONDS: Final = 60.0
"""By then every chain ends in a head of the new key (`chaining`), and the old one is published as out of use."""
_SEED_BYTES: Final = 32
_SCOPE: Final = PlatformScope(CrossTenantReason.START)
_log = structlog.get_logger("control_plane.audit_keys")


@dataclass(frozen=True, slots=True, repr=False)
class AuditKeyRing:
    """The one in use first, never empty. The others verify what they signed, or are going to sign."""

    keys: tuple[SigningKey, ...]
    since: tuple[float, ...]
    """When each came into use, or will."""
    stored: frozenset[str]
    """The rows that it was opened from."""
    at: float

    @property
    def in_use(self) -> SigningKey:
        return self.keys[0]

    def sign(self, message: bytes) -> tuple[str, bytes]:
        return self.in_use.id, self.in_use.private.sign(message)

    def sign_after(self, key_id: str | None) -> Sign:
        """For what follows something that `key_id` signed: by no older key, whatever our clock says."""
        if key_id not in self.newer:
            return self.sign
        newer = next(key for key in self.keys if key.id == key_id)
        return lambda message: (newer.id, newer.private.sign(message))

    @property
    def newer(self) -> Sequence[str]:
        """Ids of those that are not in use yet; a replica whose clock is ahead may sign with one."""
        return [key.id for key, since in zip(self.keys, self.since, strict=True) if since > self.since[0]]

    @property
    def public_keys(self) -> Keys:
        return {
            key.id: AuditKey(key.private.public_key(), since, self._until(since))
            for key, since in zip(self.keys, self.since, strict=True)
        }

    def public_jwks(self) -> dict[str, list[dict[str, Any]]]:
        """RFC 7517, RFC 8037, and our own members `in_use_from` and, of one that is out of use, `in_use_until`."""
        return {"keys": [_public_jwk(key_id, key) for key_id, key in self.public_keys.items()]}

    def _until(self, since: float) -> float | None:
        """When the next one took over, once that is done everywhere."""
        later = [other for other in self.since if since < other <= self.at - HANDED_OVER_SECONDS]
        return min(later, default=None)


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

    def forget(self) -> None:
        """What was opened: the next one who asks looks again."""
        self._ring = None

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
        now = self._clock()
        in_use = key_in_use(stored, now)
        in_order = sorted(stored, key=lambda key: key.id != in_use.id)
        try:
            return AuditKeyRing(
                keys=tuple(SigningKey.of(self._open(key)) for key in in_order),
                since=tuple(key.in_use_from for key in in_order),
                stored=frozenset(key.id for key in in_order),
                at=now,
            )
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


def _public_jwk(key_id: str, key: AuditKey) -> dict[str, Any]:
    """Without `use` and `alg`: it is no key for tokens."""
    x = base64.urlsafe_b64encode(key.public.public_bytes_raw()).rstrip(b"=").decode()
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": x, "kid": key_id, "in_use_from": key.since}
    return jwk if key.until is None else {**jwk, "in_use_until": key.until}
