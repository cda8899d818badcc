"""Workloads that call an egress proxy: which registered client is it, by a signed token or by a certificate?

Rule: a token is verified here, by the trusted issuer's own keys, for the audience of proxies alone; of a certificate
the proxy has verified the chain, and here its names are looked up. Exactly one client may answer to a proof, and it is
one that calls proxies, not a proxy. What is answered holds for the client; whom it acts for is written on the client.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import structlog

from control_plane.client_assertions import is_workload_of
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.contract.wire import AskWorkload, Refused, WorkloadFacts
from control_plane.core.certificates import InvalidCertificateError, end_of, names_in
from control_plane.core.identity import Use, VerifiedIdentity
from control_plane.core.records import Client, ClientKind
from control_plane.core.tokens import ExpiredTokenError, InvalidTokenError
from control_plane.identification import Identification
from control_plane.ports import Clock, Records

_log = structlog.get_logger("control_plane.workloads")


@dataclass(frozen=True, slots=True)
class Vouched:
    """What a token proves, and since when that has been known."""

    identity: VerifiedIdentity
    verified_at: float


class Workloads:
    def __init__(self, identification: Identification, *, clock: Clock) -> None:
        self._identification = identification
        self._clock = clock

    async def vouched(self, ask: AskWorkload) -> Vouched | Refused | None:
        """What the token of the question proves; None where it holds a certificate. Asks the issuer's key source."""
        if bool(ask.token) == bool(ask.certificate) or _digest(ask) != ask.proof_sha256:
            return _refused(RefusalCode.MALFORMED_REQUEST)
        if not ask.token:
            return None
        verified_at = self._clock()
        try:
            return Vouched(await self._identification.verified(ask.token, use=Use.PROXY), verified_at)
        except ExpiredTokenError:
            return _refused(RefusalCode.TOKEN_EXPIRED)
        except InvalidTokenError:
            return _refused(RefusalCode.TOKEN_INVALID)
        except RefusedError as refused:
            return Refused(refused.refusal.code, refused.refusal.detail, refused.refusal.hint)

    async def client(self, records: Records, ask: AskWorkload, vouched: Vouched | None) -> WorkloadFacts | Refused:
        """The client, as it is registered now."""
        if vouched is not None:
            return await self._of_token(records, vouched)
        der = base64.b64decode(ask.certificate)
        try:
            expires_at = end_of(der)
        except InvalidCertificateError:
            return _refused(RefusalCode.TOKEN_INVALID)
        if self._clock() >= expires_at:
            return _refused(RefusalCode.TOKEN_EXPIRED)
        return _only(await records.clients.of_certificate(names_in(der)), expires_at, issuer="")

    async def _of_token(self, records: Records, vouched: Vouched) -> WorkloadFacts | Refused:
        identity = vouched.identity
        issuer = await records.issuers.named(identity.issuer)
        if issuer is None or Use.PROXY not in issuer.uses:
            return _refused(RefusalCode.TOKEN_INVALID)
        if issuer.updated_at >= vouched.verified_at:
            return _OVERTAKEN  # it was verified by the record that was replaced meanwhile
        known = [
            each for each in await records.clients.of_workload_issuer(issuer.name) if is_workload_of(identity, each)
        ]
        return _only(known, identity.expires_at, issuer=issuer.name)


def _digest(ask: AskWorkload) -> str:
    try:
        return sha256(ask.token.encode() if ask.token else base64.b64decode(ask.certificate, validate=True)).hexdigest()
    except (binascii.Error, ValueError):
        return ""


def _only(known: Sequence[Client], expires_at: float, *, issuer: str) -> WorkloadFacts | Refused:
    callers = [client for client in known if client.kind is not ClientKind.EGRESS_PROXY]
    if len(callers) != 1:
        _log.info("workload_unknown", clients=len(callers), issuer=issuer)
        return _refused(RefusalCode.TOKEN_INVALID)
    client = callers[0]
    return WorkloadFacts(client.id, expires_at, tenant=client.tenant, subject=client.subject, issuer=issuer)


def _refused(true_code: RefusalCode) -> Refused:
    return Refused(
        RefusalCode.PROXY_AUTHENTICATION_REQUIRED,
        "the workload's token or certificate is not valid here, or belongs to no registered client",
        "a token for the audience coatcheck-proxy, of an issuer whose use is 'proxy'; see docs/identity.md",
        true_code=true_code,
    )


_OVERTAKEN: Final = Refused(
    RefusalCode.CREDENTIAL_UNAVAILABLE, "the token's issuer was changed just now", "try again in a moment"
)
