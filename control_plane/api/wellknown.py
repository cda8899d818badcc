"""What anybody may read: our public keys (RFC 7517), what the token endpoint knows (RFC 8414), whether we are alive."""

from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter

from control_plane.contract.headers import GRANT_TYPE_CLIENT_CREDENTIALS, GRANT_TYPE_TOKEN_EXCHANGE
from control_plane.core.jwk import ALGORITHMS
from control_plane.core.records import SUBJECT_ASSERT
from control_plane.core.scopes import METHOD, READ
from control_plane.kek_ring import KekRing
from control_plane.own_keys import OwnKeyring
from control_plane.ports import CrossTenantReason, PlatformScope, Store

AUTH_METHODS: Final = ("client_secret_basic", "private_key_jwt")
WITH_CERTIFICATES: Final = ("tls_client_auth", "self_signed_tls_client_auth")
"""RFC 8705 §2.1.1 and §2.2.1."""
_ENDPOINTS: Final = ("token", "revocation", "introspection")
_METHODS: Final = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True)
class WellKnownApi:
    own_keys: OwnKeyring
    keks: KekRing
    store: Store
    issuer: str
    asks_for_certificates: bool = False

    def router(self) -> APIRouter:
        router = APIRouter(tags=["well-known"])
        router.add_api_route("/.well-known/jwks.json", self.jwks, methods=["GET"])
        router.add_api_route("/.well-known/oauth-authorization-server", self.metadata, methods=["GET"])
        router.add_api_route("/healthz", self.healthz, methods=["GET"])
        router.add_api_route("/readyz", self.readyz, methods=["GET"])
        return router

    async def jwks(self) -> dict[str, list[dict[str, Any]]]:
        """Every key that may have signed a live session token."""
        return {"keys": [key.public_jwk() for key in (await self.own_keys.rings()).signing]}

    async def metadata(self) -> dict[str, Any]:
        """RFC 8414."""
        methods = [*AUTH_METHODS, *(WITH_CERTIFICATES if self.asks_for_certificates else ())]
        return {
            "issuer": self.issuer,
            "token_endpoint": f"{self.issuer}/oauth/token",
            "revocation_endpoint": f"{self.issuer}/oauth/revoke",
            "introspection_endpoint": f"{self.issuer}/oauth/introspect",
            "jwks_uri": f"{self.issuer}/.well-known/jwks.json",
            "grant_types_supported": [GRANT_TYPE_TOKEN_EXCHANGE, GRANT_TYPE_CLIENT_CREDENTIALS],
            "response_types_supported": [],
            "scopes_supported": [SUBJECT_ASSERT, READ, *(METHOD + name for name in _METHODS)],
            # RFC 8414 §2: where an endpoint takes signed assertions, it says by which algorithms.
            **{f"{endpoint}_endpoint_auth_methods_supported": methods for endpoint in _ENDPOINTS},
            **{f"{endpoint}_endpoint_auth_signing_alg_values_supported": list(ALGORITHMS) for endpoint in _ENDPOINTS},
        }

    async def healthz(self) -> dict[str, str]:
        """Alive: the process answers."""
        return {"status": "alive"}

    async def readyz(self) -> dict[str, str]:
        """Ready: the database answers, our own keys open, the ring has every key in use. Else 503 with the reason."""
        async with self.store.read(PlatformScope(CrossTenantReason.START)) as records:
            await records.outbox.position()
        await self.own_keys.rings()
        await self.keks.require_whole()
        return {"status": "ready"}
