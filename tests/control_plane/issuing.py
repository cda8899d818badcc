"""An identity provider of a test's own: keys, tokens, and the record by which a control plane believes it."""

import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key as generate_rsa_key
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tests.control_plane.serving import ADMIN_TOKEN, ControlPlane
from tests.control_plane.workspace import Json

AUDIENCE = "https://coatcheck.test"


class SigningKey:
    """A key pair with a name."""

    def __init__(self, key_id: str, algorithm: str = "ES256") -> None:
        self.id, self.algorithm = key_id, algorithm
        self.private: Any
        match algorithm[:2]:
            case "ES":
                self.private = generate_private_key(SECP256R1())
            case "Ed":
                self.private = Ed25519PrivateKey.generate()
            case _:
                self.private = generate_rsa_key(65_537, 2048)

    @property
    def jwk(self) -> Json:
        makers: dict[str, Any] = {"ES": ECAlgorithm, "Ed": OKPAlgorithm}
        public: Json = makers.get(self.algorithm[:2], RSAAlgorithm).to_jwk(self.private.public_key(), as_dict=True)
        return {**public, "kid": self.id, "use": "sig", "alg": self.algorithm}

    def sign(self, payload: Any, **header: Any) -> str:
        kept = {name: value for name, value in ({"kid": self.id} | header).items() if value is not None}
        return jwt.encode(payload, self.private, algorithm=self.algorithm, headers=kept)


class Provider:
    """Issues tokens as `https://<name>.idp.test`, with pinned keys."""

    def __init__(self, name: str, key: SigningKey | None = None) -> None:
        self.name = name
        self.issuer = f"https://{name}.idp.test"
        self.key = key or SigningKey(f"{name}-1")
        self.ahead = 0.0
        """How far its clock is from the real one."""

    def record(self, *, tenant: str, **fields: Any) -> Json:
        """As it is registered: sessions in one tenant, unless told otherwise."""
        record: Json = {
            "name": self.name,
            "issuer": self.issuer,
            "uses": ["session"],
            "audiences": [AUDIENCE],
            "algorithms": ["ES256"],
            "keys": [self.key.jwk],
            "claims": {"subject": {"claim": "sub"}, "tenant": {"fixed": tenant}},
        }
        return record | fields

    def register(self, control_plane: ControlPlane, *, tenant: str, **fields: Any) -> Json:
        return control_plane.made("POST", "/v1/issuers", self.record(tenant=tenant, **fields))

    def claims(self, subject: str = "alice", **claims: Any) -> Json:
        now = int(time.time() + self.ahead)
        payload: Json = {"iss": self.issuer, "sub": subject, "aud": AUDIENCE, "iat": now, "exp": now + 300}
        return {name: value for name, value in (payload | claims).items() if value is not None}

    def token(self, subject: str = "alice", **claims: Any) -> str:
        return self.key.sign(self.claims(subject, **claims))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


ADMINISTRATOR = bearer(ADMIN_TOKEN)
