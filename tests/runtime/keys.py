"""The control plane's side of a session token: signing keys, their JWK set, tokens of any shape."""

import hashlib
import json
from base64 import urlsafe_b64encode
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

ISSUER = "http://control-plane.test"
CLIENT = "runtime-1"
NOW = 1_800_000_000.0


class SigningKey:
    """One Ed25519 key and its id."""

    def __init__(self) -> None:
        self.private = Ed25519PrivateKey.generate()
        public = self.private.public_key()
        self.raw = public.public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.id = hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()[:16]

    @property
    def jwk(self) -> dict[str, Any]:
        return {"kty": "OKP", "crv": "Ed25519", "x": encoded(self.raw), "kid": self.id, "use": "sig", "alg": "EdDSA"}


def claims(**changed: Any) -> dict[str, Any]:
    """The claims of a good token. `...` as a value leaves one out."""
    good: dict[str, Any] = {
        "iss": ISSUER,
        "aud": CLIENT,
        "sub": "alice",
        "tenant": "acme",
        "sid": "ses_1",
        "roles": ["member"],
        "scope": "turn:write",
        "iat": NOW,
        "exp": NOW + 300,
        "session_exp": NOW + 43_200,
        "jti": "jti_1",
    }
    return {name: value for name, value in (good | changed).items() if value is not ...}


def token(key: SigningKey, payload: dict[str, Any] | None = None, **header: Any) -> str:
    """Signed by `key`, whatever the header says."""
    fields = {"typ": "coatcheck-session+jwt", "alg": "EdDSA", "kid": key.id} | header
    shown = {name: value for name, value in fields.items() if value is not ...}
    return signed(shown, claims() if payload is None else payload, key)


def signed(header: dict[str, Any], payload: Any, key: SigningKey) -> str:
    text = f"{encoded(json.dumps(header).encode())}.{encoded(json.dumps(payload).encode())}"
    return f"{text}.{encoded(key.private.sign(text.encode()))}"


def hmac_with_the_public_key(key: SigningKey) -> str:
    """The classic: HS256, keyed with what everybody knows."""
    header = {"typ": "coatcheck-session+jwt", "kid": key.id}
    text = jwt.encode(claims(), "placeholder-key-of-thirty-two-bytes", algorithm="HS256", headers=header)
    head, body, _ = text.split(".")
    mac = jwt.get_algorithm_by_name("HS256").sign(f"{head}.{body}".encode(), key.raw)
    return f"{head}.{body}.{encoded(mac)}"


def encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
