"""Who is calling: an administrator by a token, a client by its secret, an assertion or a certificate.

Rule: every failure is the same refusal, whatever was wrong, and a request brings one proof: where it brings two, none
counts (RFC 6749 §2.3). A certificate is looked at only where nothing else was presented. Secrets of clients are 256-bit
and kept as SHA-256; they are compared in constant time, also where no such client exists. (HTTP Basic: RFC 6749 §2.3.1,
RFC 7617; assertions: RFC 7523; certificates: RFC 8705.)
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from typing import Final, assert_never
from urllib.parse import unquote_plus

from control_plane.client_assertions import JWT_SPIFFE, ClientAssertion, ClientAssertions
from control_plane.contract.caller import ClientId, TenantId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.core.certificates import PeerCertificate
from control_plane.core.identity import Use, VerifiedIdentity
from control_plane.core.names import is_client_id
from control_plane.core.policy import Action, HeldRole, Principal, Role, Verdict, decide
from control_plane.core.records import Client, ClientKind
from control_plane.core.tokens import InvalidTokenError
from control_plane.identification import Identification
from control_plane.ports import CrossTenantReason, PlatformScope, Store
from control_plane.together import Together
from control_plane.trail import ADMINISTRATOR

UNAUTHENTICATED: Final = Refusal(
    RefusalCode.TOKEN_INVALID,
    "this route needs a credential, and none was presented that it accepts",
    "an administrator presents 'Authorization: Bearer', a client 'Authorization: Basic', an assertion or a certificate",
)
FORBIDDEN: Final = Refusal(
    RefusalCode.FORBIDDEN,
    "this client may not do that",
    "each route is for one kind of caller: see the kind and scopes the client was registered with",
)

TENANT_NOT_FOUND: Final = Refusal(
    RefusalCode.NOT_FOUND, "there is no such tenant", "make it with PUT /v1/tenants/{tenant}"
)
NOT_YOUR_ROLE: Final = Refusal(
    RefusalCode.FORBIDDEN,
    "none of your roles may do that",
    "an auditor reads; what concerns the whole platform is for its administrator",
)
BOOTSTRAP_ADMINISTRATOR: Final = Principal(ADMINISTRATOR, frozenset({HeldRole(Role.PLATFORM_ADMIN)}))

_NO_SECRET: Final = "0" * 64


class Access:
    def __init__(
        self,
        store: Store,
        identification: Identification,
        assertions: ClientAssertions,
        *,
        admin_token: Secret | None,
        client_authorities: frozenset[str] = frozenset(),
    ) -> None:
        """`client_authorities`: fingerprints of the certificate authorities that vouch for clients' names."""
        self._store = store
        self._identification = identification
        self._assertions = assertions
        self._client_authorities = client_authorities
        self._admin_digest = secret_sha256(admin_token.reveal()) if admin_token else None
        self._registered = Together(self._look_up)

    async def principal(self, authorization: str | None) -> Principal:
        """The administrator that the header proves. Raises `RefusedError(token_invalid)`."""
        found = await self.find_principal(authorization)
        if found is None:
            raise RefusedError(UNAUTHENTICATED)
        return found

    async def find_principal(self, authorization: str | None) -> Principal | None:
        presented = bearer(authorization)
        if presented is None:
            return None
        if self._is_bootstrap_token(presented):
            return BOOTSTRAP_ADMINISTRATOR
        identity = await self.find_identity(presented, use=Use.ADMIN)
        if identity is None or not identity.admin_roles:
            return None
        return Principal(f"{identity.issuer}:{identity.subject}", identity.admin_roles)

    async def find_identity(self, unverified_token: str, *, use: Use) -> VerifiedIdentity | None:
        """Who a trusted issuer's token speaks for; None for a token that is not believed.

        Raises `RefusedError(credential_unavailable)` where the issuer's keys are away.
        """
        try:
            return await self._identification.verified(unverified_token, use=use)
        except InvalidTokenError:
            return None

    def _is_bootstrap_token(self, presented: str) -> bool:
        if self._admin_digest is None:
            return False
        return hmac.compare_digest(secret_sha256(presented), self._admin_digest)

    async def client(
        self,
        authorization: str | None,
        *,
        certificate: PeerCertificate | None = None,
        assertion: ClientAssertion | None = None,
        client_id: str | None = None,
    ) -> Client:
        """The client that the request proves. Raises `RefusedError`.

        `client_id` is whom it says it is, where it says so.
        """
        if authorization is not None:
            client = await self._by_secret(authorization)
            if assertion is not None or client_id not in (None, client.id):
                raise RefusedError(UNAUTHENTICATED)
            return client
        if assertion is not None:
            return await self._by_assertion(assertion)
        if certificate is not None:
            return await self._by_certificate(certificate, client_id)
        raise RefusedError(UNAUTHENTICATED)

    async def _by_assertion(self, assertion: ClientAssertion) -> Client:
        try:
            return await self._assertions.client(assertion)
        except InvalidTokenError:
            raise RefusedError(UNAUTHENTICATED) from None

    async def _by_certificate(self, certificate: PeerCertificate, client_id: str | None) -> Client:
        names = certificate.names(authorities=self._client_authorities)
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            found = await records.clients.of_certificate(names)
        known = [client for client in found if client_id in (None, client.id)]
        if len(known) != 1:
            raise RefusedError(UNAUTHENTICATED)
        return known[0]

    async def _by_secret(self, authorization: str) -> Client:
        client_id, presented = _basic(authorization)
        client = await self._registered(client_id)
        expected = client.secret_sha256 if client and client.secret_sha256 else _NO_SECRET
        # RFC 6749 §2.3.1 form-encodes the secret; most clients do not, and for the ones made here it is the same.
        candidates = (presented, unquote_plus(presented))
        proven = [hmac.compare_digest(secret_sha256(text), expected) for text in candidates]
        if client is None or not any(proven):
            raise RefusedError(UNAUTHENTICATED)
        return client

    async def _look_up(self, clients: Sequence[ClientId]) -> Sequence[Client | None]:
        async with self._store.read(PlatformScope(CrossTenantReason.AUTHENTICATE)) as records:
            found = {client.id: client for client in await records.clients.those(sorted(set(clients)))}
        return [found.get(client) for client in clients]

    async def caller(self, authorization: str | None, *, certificate: PeerCertificate | None) -> Client:
        """The client of a route outside of `/oauth`, where a workload's token comes as `Bearer`. Raises."""
        token = bearer(authorization)
        if token is None:
            return await self.client(authorization, certificate=certificate)
        return await self._by_assertion(ClientAssertion(JWT_SPIFFE, token, client_id=None))

    async def client_of_kind(
        self, authorization: str | None, kind: ClientKind, *, certificate: PeerCertificate | None = None
    ) -> Client:
        client = await self.caller(authorization, certificate=certificate)
        if client.kind is not kind:
            raise RefusedError(FORBIDDEN)
        return client


def require(principal: Principal, action: Action, tenant: TenantId | None = None) -> None:
    """The one gate of the administrators' API. Raises `RefusedError`: `forbidden`, or `not_found` for the tenant."""
    match decide(principal, action, tenant=tenant):
        case Verdict.ALLOWED:
            return
        case Verdict.UNKNOWN:
            raise RefusedError(TENANT_NOT_FOUND)
        case Verdict.FORBIDDEN:
            raise RefusedError(NOT_YOUR_ROLE)
        case verdict:
            assert_never(verdict)


def secret_sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def bearer(authorization: str | None) -> str | None:
    """The token of `Authorization: Bearer …`; None for anything else."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def is_basic(authorization: str | None) -> bool:
    return (authorization or "").partition(" ")[0].lower() == "basic"


def _basic(authorization: str | None) -> tuple[ClientId, str]:
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        raise RefusedError(UNAUTHENTICATED)
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).decode("utf-8").partition(":")
    except (binascii.Error, ValueError):
        raise RefusedError(UNAUTHENTICATED) from None
    if not colon or not is_client_id(user) or not password:
        raise RefusedError(UNAUTHENTICATED)
    return ClientId(user), password
