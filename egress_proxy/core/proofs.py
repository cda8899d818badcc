"""By what a caller may be proven at a listener, and the proofs that workloads bring.

    proxy_credential    of an exchange: client, tenant, subject and session
    mtls                a client certificate: which client it is
    workload_token      a signed token in Proxy-Authorization (ServiceAccount, JWT-SVID): which client it is

Rule: a listener accepts what its operator named, alone or together (`mtls+proxy_credential`), and nothing else. Nothing
here believes a proof: its text goes to the control plane, and what is kept of it, compared and shown is its SHA-256.
"""

import base64
import re
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Final

from control_plane.contract.secret import Secret
from control_plane.contract.wire import AskWorkload

MAX_WORKLOAD_TOKEN_BYTES: Final = 16_384
SHORTEST_TOKEN: Final = 160
"""A signature has 86 characters or more; header, issuer, audience, subject and expiry do not fit into the rest."""
_SIGNED_TOKEN: Final = re.compile(rb"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
"""RFC 7515 §7.1, with a signature."""


class ProofKind(StrEnum):
    PROXY_CREDENTIAL = "proxy_credential"
    MTLS = "mtls"
    WORKLOAD_TOKEN = "workload_token"


class Accepted(frozenset[frozenset[ProofKind]]):
    """Each a set of proofs that together are enough."""

    def __str__(self) -> str:
        return ",".join(sorted("+".join(sorted(together)) for together in self))


BY_PROXY_CREDENTIAL: Final = Accepted({frozenset({ProofKind.PROXY_CREDENTIAL})})


def parse_accepted(text: str) -> Accepted:
    """`mtls+proxy_credential, workload_token`. Raises `ValueError`."""
    accepted = Accepted(_together(part) for part in text.split(",") if part.strip())
    if not accepted:
        raise ValueError(f"name at least one of {', '.join(ProofKind)}; several together with '+'")
    return accepted


def _together(part: str) -> frozenset[ProofKind]:
    try:
        return frozenset(ProofKind(kind.strip()) for kind in part.split("+"))
    except ValueError:
        raise ValueError(f"a proof is one of {', '.join(ProofKind)}; several together with '+'") from None


def asks_for_certificates(accepted: Accepted) -> bool:
    """Whether a client certificate can prove anything there."""
    return any(ProofKind.MTLS in together for together in accepted)


def demands_certificates(accepted: Accepted) -> bool:
    """Whether nobody is heard without one."""
    return all(ProofKind.MTLS in together for together in accepted)


def in_words(accepted: Accepted) -> str:
    """For whoever brought too little."""
    return " or ".join(sorted(" with ".join(sorted(_WORDS[kind] for kind in together)) for together in accepted))


_WORDS: Final = {
    ProofKind.PROXY_CREDENTIAL: "a proxy credential",
    ProofKind.MTLS: "a client certificate",
    ProofKind.WORKLOAD_TOKEN: "a workload token",
}


@dataclass(frozen=True, slots=True)
class Presented:
    """A workload's own proof, believed by nobody yet."""

    kind: ProofKind
    fingerprint: str
    """SHA-256 in hex: of the token's text, or of the certificate's DER."""
    text: Secret = field(compare=False, repr=False)

    @property
    def ask(self) -> AskWorkload:
        """The question about it."""
        if self.kind is ProofKind.MTLS:
            return AskWorkload(self.fingerprint, certificate=self.text.reveal())
        return AskWorkload(self.fingerprint, token=self.text.reveal())


def presented_token(text: bytes) -> Presented | None:
    """None for what is no signed token, or is too short to be one or too long to be looked at."""
    if not SHORTEST_TOKEN <= len(text) <= MAX_WORKLOAD_TOKEN_BYTES or _SIGNED_TOKEN.fullmatch(text) is None:
        return None
    return Presented(ProofKind.WORKLOAD_TOKEN, sha256(text).hexdigest(), Secret(text.decode("ascii")))


def presented_certificate(der: bytes) -> Presented:
    """Of a handshake in which its chain was verified."""
    return Presented(ProofKind.MTLS, sha256(der).hexdigest(), Secret(base64.b64encode(der).decode("ascii")))
