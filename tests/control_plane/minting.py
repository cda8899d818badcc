"""What tests of minted values share: a replica that reaches a provider, and a credential of one of its kinds.

Rule: nothing is asserted here.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.adapters.outbound import Exceptions, HttpOutbound
from control_plane.adapters.providers.table import providers
from control_plane.adapters.sql.engine import Database
from control_plane.contract.secret import Secret
from control_plane.contract.wire import Refused, ResolvedPlaceholder
from control_plane.core.records import Credential, MintedValue
from tests.control_plane.rotating import ACME, NAME, Replica
from tests.support.token_provider import TokenProvider

REFRESH: Mapping[str, Any] = {"client_id": "our-app", "client_authentication": "client_secret_post"}
CLIENT_SECRET = "client-secret-0123456789"


@dataclass
class Minting:
    """A replica with one credential, granted to alice."""

    replica: Replica
    provider: TokenProvider

    async def add(self, kind: str, secret: str, *, settings: Mapping[str, Any], **fields: Any) -> Credential:
        fields = {"kind": kind, "settings": dict(settings), "secret": Secret(secret)} | fields
        credential = await self.replica.add_credential(**fields)
        await self.replica.grant(credential, "alice")
        return credential

    async def add_refresh_token(self, **fields: Any) -> Credential:
        settings = {**REFRESH, "token_url": self.provider.token_url} | fields.pop("settings", {})
        return await self.add(
            "oauth_refresh_token", refresh_secret(self.provider.first_refresh_token), settings=settings, **fields
        )

    async def add_client_credentials(self, **fields: Any) -> Credential:
        settings = {"token_url": self.provider.token_url, "client_id": "our-app"} | fields.pop("settings", {})
        return await self.add("oauth_client_credentials", CLIENT_SECRET, settings=settings, **fields)

    async def resolve(self, replica: Replica | None = None) -> ResolvedPlaceholder | Refused:
        replica = replica or self.replica
        return await replica.resolve(replica.tokens["alice"], "alice")

    async def value(self, replica: Replica | None = None) -> str:
        """What a request would carry, or the refusal's code and detail."""
        answer = await self.resolve(replica)
        return answer.secret if isinstance(answer, ResolvedPlaceholder) else f"{answer.code.value}: {answer.detail}"

    async def minted(self) -> MintedValue:
        found = (await self.replica.credentials.get(ACME, NAME)).minted
        assert found is not None
        return found

    def pass_time(self, seconds: float) -> None:
        self.replica.clock.now += seconds


def minting(database: Database, provider: TokenProvider, ca_file: Path, *others: int) -> Minting:
    """`others`: further ports on loopback that may be asked."""
    allowed = frozenset(("localhost", port) for port in (provider.server.port, *others))
    outbound = HttpOutbound(ca_files=[ca_file], exceptions=Exceptions(allowed))
    return Minting(Replica(database, providers=providers(outbound, entropy=os.urandom)), provider)


def refresh_secret(refresh_token: str) -> str:
    return json.dumps({"refresh_token": refresh_token, "client_secret": CLIENT_SECRET})
