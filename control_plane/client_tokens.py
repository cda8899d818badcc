"""Client tokens: `grant_type=client_credentials` for clients that may name subjects (RFC 6749 §4.4).

Rule: the token says which client asks, is good at one runtime, and gives its holder nothing but that this runtime may
open sessions in the client's own tenant, with the client written into them as the actor.
"""

from typing import Final

from control_plane.contract.caller import ClientId, TenantId
from control_plane.contract.headers import CLIENT_TOKEN_TYP, TOKEN_TYPE_ACCESS_TOKEN, TOKEN_TYPE_JWT
from control_plane.contract.refusal import Refusal, RefusalCode
from control_plane.core.client_token import LIFETIME_SECONDS, ClientClaims, to_payload
from control_plane.core.names import ID_ENTROPY_BYTES, is_client_id, new_id
from control_plane.core.oauth import OAuthErrorCode, OAuthRefusedError, TokenRequest, invalid_request
from control_plane.core.records import SUBJECT_ASSERT, Client, ClientKind
from control_plane.own_keys import OwnKeyring
from control_plane.ports import Clock, Entropy, Records, Store, TenantScope
from control_plane.sessions import asserts_subjects_in
from control_plane.trail import Actor, Trail

_OF_AN_EXCHANGE: Final = (
    *("subject_token", "subject_token_type", "actor_token", "actor_token_type", "requested_subject"),
    "proxy_credential",
)


class ClientTokens:
    def __init__(
        self, store: Store, own_keys: OwnKeyring, trail: Trail, *, clock: Clock, entropy: Entropy, issuer: str
    ) -> None:
        self._store = store
        self._own_keys = own_keys
        self._trail = trail
        self._clock = clock
        self._entropy = entropy
        self._issuer = issuer

    async def __call__(self, request: TokenRequest, *, client: Client, by: Actor) -> str:
        """The token, good for `LIFETIME_SECONDS`. Raises `RefusedError`."""
        # (1) Only a client that may name subjects, and so never a runtime, and never outside its tenant.
        tenant = _asserting_tenant(client)
        # (2) Exactly what was asked for, or an error.
        _require_own_parameters(request)
        runtime = _named_runtime(request)
        async with self._store.write(TenantScope(tenant)) as records:
            # (3) For a runtime that serves the tenant.
            await self._require_runtime(records, runtime, tenant)
            now = self._clock()
            claims = ClientClaims(
                issuer=self._issuer,
                audience=runtime,
                client=client.id,
                tenant=tenant,
                issued_at=now,
                expires_at=now + LIFETIME_SECONDS,
                token_id=new_id("jti", self._entropy(ID_ENTROPY_BYTES)),
            )
            await self._trail.record(
                records,
                [self._trail.event("client_token.issue", by=by, tenant=tenant, detail=f"for runtime {runtime}")],
            )
        return await self._own_keys.sign(to_payload(claims), typ=CLIENT_TOKEN_TYP)

    async def _require_runtime(self, records: Records, runtime: ClientId, tenant: TenantId) -> None:
        found = await records.clients.get(runtime)
        if found is None or found.kind is not ClientKind.RUNTIME or not found.serves(tenant):
            raise OAuthRefusedError(OAuthErrorCode.INVALID_TARGET, NO_SUCH_RUNTIME)


def _asserting_tenant(client: Client) -> TenantId:
    if client.tenant is None or not asserts_subjects_in(client, client.tenant):
        raise OAuthRefusedError(OAuthErrorCode.UNAUTHORIZED_CLIENT, MAY_NOT_ASSERT)
    return client.tenant


def _require_own_parameters(request: TokenRequest) -> None:
    for name in _OF_AN_EXCHANGE:
        if getattr(request, name) is not None:
            raise invalid_request(f"'{name}' is a parameter of a token exchange, not of client_credentials")
    if request.requested_token_type not in (None, TOKEN_TYPE_ACCESS_TOKEN, TOKEN_TYPE_JWT):
        raise invalid_request("requested_token_type is none that client_credentials issues", hint="leave it out")
    if request.scope not in (None, SUBJECT_ASSERT):
        raise OAuthRefusedError(
            OAuthErrorCode.INVALID_SCOPE,
            Refusal(RefusalCode.MALFORMED_REQUEST, f"the only scope of a client token is {SUBJECT_ASSERT}"),
        )


def _named_runtime(request: TokenRequest) -> ClientId:
    if request.resource is not None:
        raise OAuthRefusedError(OAuthErrorCode.INVALID_TARGET, NO_SUCH_RUNTIME)
    if request.audience is None:
        raise invalid_request("audience is missing", hint="it is the id of the runtime that the token is for")
    if not is_client_id(request.audience):
        raise OAuthRefusedError(OAuthErrorCode.INVALID_TARGET, NO_SUCH_RUNTIME)
    return ClientId(request.audience)


MAY_NOT_ASSERT: Final = Refusal(
    RefusalCode.FORBIDDEN,
    f"client_credentials is for clients with the scope '{SUBJECT_ASSERT}', each in its own tenant",
    "an administrator registers one with POST /v1/clients",
)
NO_SUCH_RUNTIME: Final = Refusal(
    RefusalCode.NOT_FOUND,
    "the audience is no runtime that serves this client's tenant",
    "audience is the id of a client of kind 'runtime'",
)
