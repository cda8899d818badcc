"""Secrets at rest: envelopes of AES-256-GCM.

    envelope = format byte | nonce | data key, wrapped by a key-encryption key | nonce | ciphertext

Each envelope has a data key of its own, wrapped by the newest key of the ring; both layers are bound to the same AAD
(`core.sealing`), so that neither a ciphertext nor a wrapped key works in another row.

Rule: opening tries the whole ring, and every failure is the same error. It never yields ciphertext.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from control_plane.contract.secret import Secret
from control_plane.core.records import Credential, CredentialVersion
from control_plane.core.rotation import OVER
from control_plane.core.sealing import Kek, credential_aad
from control_plane.ports import Entropy

_FORMAT: Final = b"\x01"
_NONCE: Final = 12
_DATA_KEY: Final = 32
_TAG: Final = 16
_WRAPPED: Final = _NONCE + _DATA_KEY + _TAG
_WRAP: Final = b"wrap\0"
_DATA: Final = b"data\0"


class UnopenableError(Exception):
    """Not sealed by this ring for this row. Says no more than that, on purpose."""

    def __init__(self) -> None:
        super().__init__("the envelope does not open")


@dataclass(frozen=True, slots=True)
class Sealed:
    kek_id: str
    envelope: bytes


class Custody:
    """Seals with the newest key of the ring, opens with any."""

    def __init__(self, ring: Sequence[Kek], *, entropy: Entropy) -> None:
        self._ring = tuple(ring)
        self._entropy = entropy

    @property
    def kek_ids(self) -> tuple[str, ...]:
        """Newest first."""
        return tuple(kek.id for kek in self._ring)

    def seal(self, plaintext: bytes, *, aad: bytes) -> Sealed:
        kek, data_key = self._ring[0], self._entropy(_DATA_KEY)
        wrap_nonce, data_nonce = self._entropy(_NONCE), self._entropy(_NONCE)
        wrapped = AESGCM(kek.key).encrypt(wrap_nonce, data_key, _WRAP + aad)
        ciphertext = AESGCM(data_key).encrypt(data_nonce, plaintext, _DATA + aad)
        return Sealed(kek.id, _FORMAT + wrap_nonce + wrapped + data_nonce + ciphertext)

    def open(self, envelope: bytes | None, *, aad: bytes) -> bytes:
        """The plaintext. Raises `UnopenableError`."""
        if envelope is None or envelope[:1] != _FORMAT:
            raise UnopenableError
        wrapped, sealed = envelope[1 : 1 + _WRAPPED], envelope[1 + _WRAPPED :]
        data_key = self._unwrap(wrapped, aad)
        try:
            return AESGCM(data_key).decrypt(sealed[:_NONCE], sealed[_NONCE:], _DATA + aad)
        except (InvalidTag, ValueError):
            raise UnopenableError from None

    def _unwrap(self, wrapped: bytes, aad: bytes) -> bytes:
        for kek in self._ring:
            try:
                return AESGCM(kek.key).decrypt(wrapped[:_NONCE], wrapped[_NONCE:], _WRAP + aad)
            except (InvalidTag, ValueError):
                continue
        raise UnopenableError


def seal_secret(custody: Custody, secret: Secret, credential: Credential, *, version: int) -> Sealed:
    """A credential's secret, bound to where that credential may send it."""
    return custody.seal(secret.reveal().encode(), aad=credential_aad(credential, version=version))


def open_secret(custody: Custody, version: CredentialVersion | None, credential: Credential) -> Secret:
    """One version of the credential. Raises `UnopenableError` where a row is not the one that was sealed."""
    # An envelope that was put back into a version that is over stays closed.
    if version is None or version.state in OVER:
        raise UnopenableError
    return Secret(custody.open(version.envelope, aad=credential_aad(credential, version=version.version)).decode())
