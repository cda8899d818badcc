"""A client's proof by a signed statement instead of a secret: `client_assertion` (RFC 7521 §4.2, RFC 7523 §3).

Two kinds, told apart by who says it. A client that registered keys says it of itself (`private_key_jwt`): such an
assertion is good once, which the database remembers until it would be over anyway. A workload's platform says it
(Kubernetes, SPIFFE, any trusted issuer whose use is `client`): such a token is good until it is over, for the one
client that registered this issuer and a pattern which its subject fits. Rule: either is for this control plane alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import structlog

from control_plane.contract.caller import ClientId
from control_plane.contract.refusal import RefusedError
from control_plane.core.identity import KeySource, Use, VerifiedIdentity
from control_plane.core.jwk import ALGORITHMS, VerificationKey
from control_plane.core.names import is_client_id
from control_plane.core.patterns import Pattern
from control_plane.core.records import Client
from control_plane.core.tokens import (
    InvalidTokenError,
    Others,
    UnverifiedToken,
    check_audience,
    check_header,
    check_signature,
    check_times,
    moment,
    read,
)
from control_plane.identification import KEYS_UNAVAILABLE, Identification
from control_plane.ports import Clock, CrossTenantReason, KeysUnavailableError, PlatformScope, PublicKeys, Store

JWT_BEARER: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
JWT_SPIFFE: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-spiffe"
"""draft-ietf-oauth-spiffe-client-auth: a JWT-SVID. Here any workload's token, and never a client's own statement."""

MAX_ASSERTION_SECONDS: Final = 600
"""How far from now an assertion's `exp` may be: for so long its `jti` is remembered."""
_TOKEN_TYPES: Final = ("", "jwt", "client-authentication+jwt")
_MAX_TOKEN_ID: Final = 255
_SCOPE: Final = PlatformScope(CrossTenantReason.AUTHENTICATE)

_log = structlog.get_logger("control_plane.client_assertions")


@dataclass(frozen=True, slots=True, repr=False)
class ClientAssertion:
    """As it came. Nothing of it is true yet."""

    type: str
    text: str
    client_id: str | None
    """`client_id` of the same request, where there was one."""


class ClientAssertions:
    def __init__(
        self, store: Store, keys: PublicKeys, identification: Identification, *, clock: Clock, own_issuer: str
    ) -> None:
        self._store = store
        self._keys = keys
        self._identification = identification
        self._clock = clock
        # RFC 7523bis: the issuer's URL; the token endpoint's, which RFC 7523 §3 suggested, is accepted too.
        self._audiences = (own_issuer, f"{own_issuer}/oauth/token")

    async def client(self, assertion: ClientAssertion) -> Client:
        """Raises `InvalidTokenError`, or `RefusedError(credential_unavailable)` where keys are away."""
        try:
            client = await self._said_by_itself_or_its_platform(assertion)
            _require_meant(client, assertion)
        except InvalidTokenError as error:
            _log.info("client_assertion_not_believed", reason=error.reason)
            raise
        return client

    async def _said_by_itself_or_its_platform(self, assertion: ClientAssertion) -> Client:
        token = read(assertion.text)
        if assertion.type == JWT_BEARER and token.issuer is not None and is_client_id(token.issuer):
            return await self._by_own_keys(token, ClientId(token.issuer))
        if assertion.type in (JWT_BEARER, JWT_SPIFFE):
            return await self._by_workload(assertion)
        raise InvalidTokenError("client_assertion_type: none that is accepted here")

    async def _by_own_keys(self, token: UnverifiedToken, client_id: ClientId) -> Client:
        now = self._clock()
        # (1) The client says it of itself (RFC 7523 §3: iss and sub are its id), to us, just now, once.
        if token.payload.get("sub") != client_id:
            raise InvalidTokenError("sub: not the client itself")
        check_header(token.header, algorithms=ALGORITHMS, token_types=_TOKEN_TYPES)
        check_audience(token.payload, self._audiences, others=Others.REFUSE)
        check_times(token.payload, now=now, max_lifetime_seconds=MAX_ASSERTION_SECONDS)
        token_id = token.payload.get("jti")
        if not isinstance(token_id, str) or not 0 < len(token_id) <= _MAX_TOKEN_ID:
            raise InvalidTokenError("jti: missing, and the assertion is good once")
        # (2) By a key that it registered.
        async with self._store.read(_SCOPE) as records:
            client = await records.clients.get(client_id)
        if client is None or not client.proofs.has_keys:
            raise InvalidTokenError("iss: no client that registered keys")
        check_signature(token, await self._keys_of(client, token))
        # (3) Not before now: the first of several that are presented at once wins.
        fingerprint = sha256(f"{client_id}\0{token_id}".encode("utf-8", "surrogatepass")).hexdigest()
        async with self._store.write(_SCOPE) as records:
            fresh = await records.used_assertions.use(fingerprint, expires_at=moment(token.payload, "exp") or now)
        if not fresh:
            raise InvalidTokenError("jti: used before")
        return client

    async def _keys_of(self, client: Client, token: UnverifiedToken) -> Sequence[VerificationKey]:
        source = KeySource(jwks_url=client.proofs.jwks_url, pinned=client.proofs.keys)
        try:
            return await self._keys.of(source, key_id=token.key_id)
        except KeysUnavailableError:
            raise RefusedError(KEYS_UNAVAILABLE) from None

    async def _by_workload(self, assertion: ClientAssertion) -> Client:
        identity = await self._identification.verified(assertion.text, use=Use.CLIENT)
        async with self._store.read(_SCOPE) as records:
            clients = await records.clients.of_workload_issuer(identity.issuer)
        known = [client for client in clients if is_workload_of(identity, client)]
        if assertion.client_id is not None:
            known = [client for client in known if client.id == assertion.client_id]
        if len(known) != 1:
            raise InvalidTokenError("client: none, or more than one, is this workload")
        return known[0]


def _require_meant(client: Client, assertion: ClientAssertion) -> None:
    if assertion.client_id not in (None, client.id):
        raise InvalidTokenError("client_id: another client's")


def is_workload_of(identity: VerifiedIdentity, client: Client) -> bool:
    """Whether whom a trusted issuer vouches for is this client."""
    workload = client.proofs.workload
    if workload is None or workload.issuer != identity.issuer or not Pattern(workload.subject).fits(identity.subject):
        return False
    # Where the issuer's table says whose workload it is, it is no other tenant's client.
    return identity.tenant is None or client.serves(identity.tenant)
