"""Public keys as they are published (RFC 7517, 7518, 8037), and which algorithms each may verify.

Rule: a key verifies only with algorithms of its own kind, and no symmetric key is ever one: whoever can verify with a
shared secret can also sign (RFC 8725 §2.1, §3.1). What a set holds beside usable keys is passed over.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
"""Every algorithm that an issuer may be allowed. All of them are asymmetric."""

MAX_KEYS: Final = 64
_MIN_RSA_BITS: Final = 2048
_RSA: Final = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_EC: Final[Mapping[str, str]] = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
_USES: Final = (None, "sig", "jwt-svid")
"""`jwt-svid`: how a SPIFFE bundle marks the keys of its tokens (SPIFFE Trust Domain and Bundle §4.2.2)."""

_READERS: Final[Mapping[str, Callable[[dict[str, Any]], object]]] = {
    "RSA": RSAAlgorithm.from_jwk,
    "EC": ECAlgorithm.from_jwk,
    "OKP": OKPAlgorithm.from_jwk,
}

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


class UnusableKeyError(ValueError):
    """The message says why, and never quotes the key."""


@dataclass(frozen=True, slots=True)
class VerificationKey:
    id: str | None
    public: PublicKey
    algorithms: frozenset[str]


def read_jwk(jwk: Mapping[str, Any]) -> VerificationKey:
    """Raises `UnusableKeyError`."""
    if any(name in jwk for name in ("d", "k", "p", "q")):
        raise UnusableKeyError("it holds a private or a symmetric key; give the public key alone")
    if jwk.get("use") not in _USES:
        raise UnusableKeyError("its 'use' is not signing")
    operations = jwk.get("key_ops")
    if operations is not None and (not isinstance(operations, list) or "verify" not in operations):
        raise UnusableKeyError("its 'key_ops' do not say 'verify'")
    public, algorithms = _public(jwk)
    if (algorithm := jwk.get("alg")) is not None:
        algorithms &= {algorithm} if isinstance(algorithm, str) else set()
    if not algorithms:
        raise UnusableKeyError("its 'alg' is none that its kind of key is for")
    key_id = jwk.get("kid")
    if key_id is not None and not isinstance(key_id, str):
        raise UnusableKeyError("its 'kid' is not text")
    return VerificationKey(key_id, public, algorithms)


def read_jwks(document: bytes) -> tuple[VerificationKey, ...]:
    """The usable keys of a set. Raises `UnusableKeyError` where it is no set at all."""
    try:
        found = json.loads(document)
    except (ValueError, RecursionError):
        raise UnusableKeyError("it is not JSON") from None
    keys = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(keys, list):
        raise UnusableKeyError("it is no key set: there is no list 'keys'")
    return usable(key for key in keys[:MAX_KEYS] if isinstance(key, dict))


def usable(jwks: Iterable[Mapping[str, Any]]) -> tuple[VerificationKey, ...]:
    keys = []
    for jwk in jwks:
        try:
            keys.append(read_jwk(jwk))
        except UnusableKeyError:
            continue
    return tuple(keys)


def named(keys: Sequence[VerificationKey], key_id: str | None) -> tuple[VerificationKey, ...]:
    """The keys of that id; without an id, the only key there is."""
    if key_id is not None:
        return tuple(key for key in keys if key.id == key_id)
    return tuple(keys) if len(keys) == 1 else ()


def _public(jwk: Mapping[str, Any]) -> tuple[PublicKey, frozenset[str]]:
    try:
        public = _READERS[str(jwk.get("kty"))](dict(jwk))
    except (jwt.PyJWTError, UnsupportedAlgorithm, ValueError, TypeError, KeyError, AttributeError):
        raise UnusableKeyError("it cannot be read, or its kind ('kty') is none of RSA, EC and OKP") from None
    match public:
        case RSAPublicKey() if public.key_size < _MIN_RSA_BITS:
            raise UnusableKeyError(f"an RSA key has at least {_MIN_RSA_BITS} bits")
        case RSAPublicKey():
            return public, _RSA
        case EllipticCurvePublicKey() if (algorithm := _EC.get(public.curve.name)) is not None:
            return public, frozenset({algorithm})
        case Ed25519PublicKey():
            return public, frozenset({"EdDSA"})
        case _:
            raise UnusableKeyError("its curve is none that is used here")
