"""Placeholders as an operator sees them: listed, issued by hand, revoked.

Rule: an operator issues only what a grant allows, and sees everything about a placeholder except the placeholder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from control_plane.contract.caller import Caller, ClientId, CredentialId, PlaceholderId, SubjectId, TenantId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import AuditEvent
from control_plane.core.records import Client, ClientKind, Token, TokenKind
from control_plane.core.targeting import Target
from control_plane.credentials import invalid_field, require_tenant
from control_plane.issuance import Issuance, Issued, Mandate
from control_plane.ports import Clock, Records, Store, TenantScope
from control_plane.revocation import revoke_tokens
from control_plane.sessions import Opening, Sessions
from control_plane.trail import Actor, Trail


@dataclass(frozen=True, slots=True)
class NewPlaceholder:
    subject: SubjectId
    audience: str
    ttl_seconds: int
    client: ClientId | None
    with_session: bool


@dataclass(frozen=True, slots=True)
class NamedToken:
    token: Token
    credential_name: str | None


class PlaceholderKeeper:
    def __init__(self, store: Store, issuance: Issuance, sessions: Sessions, trail: Trail, *, clock: Clock) -> None:
        self._store = store
        self._issuance = issuance
        self._sessions = sessions
        self._trail = trail
        self._clock = clock

    async def list(
        self, tenant: TenantId, kind: TokenKind, *, before: PlaceholderId | None, limit: int
    ) -> Sequence[NamedToken]:
        """Newest first. Raises `RefusedError` (`not_found`, `invalid_field`)."""
        async with self._store.read(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            names: dict[CredentialId | None, str] = {
                credential.id: credential.name for credential in await records.credentials.list()
            }
            last_seen = await records.tokens.get(before) if before is not None else None
            if before is not None and last_seen is None:
                raise invalid_field("before", "there is no such placeholder, or no longer; begin anew")
            tokens = await records.tokens.list(kind, before=last_seen, limit=limit)
            return [NamedToken(token, names.get(token.credential_id)) for token in tokens]

    async def issue(self, tenant: TenantId, new: NewPlaceholder, *, by: Actor) -> Issued:
        """Raises `RefusedError` (`not_found`, `invalid_field`, `credential_not_found`, `credential_ambiguous`)."""
        async with self._store.write(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            client = await self._client(records, tenant, new)
            mandate = await self._mandate(records, tenant, new, client, by)
            credential = (await self._issuance.granted(records, mandate, Target(new.audience, None))).credential
            issued = await self._issuance.new(records, mandate, credential, ttl_seconds=new.ttl_seconds)
            await self._trail.record(records, [self._event("placeholder.issue", issued.token, by, credential.name)])
            return issued

    async def revoke(self, tenant: TenantId, token_id: PlaceholderId, *, by: Actor) -> None:
        """Again changes nothing. Raises `RefusedError(not_found)`."""
        async with self._store.write(TenantScope(tenant)) as records:
            token = await records.tokens.get(token_id)
            if token is None:
                raise RefusedError(PLACEHOLDER_NOT_FOUND)
            if token.revoked_at is None:
                await revoke_tokens(records, [token], at=self._clock())
                await self._trail.record(records, [self._event(f"{token.kind.value}.revoke", token, by, None)])

    async def _client(self, records: Records, tenant: TenantId, new: NewPlaceholder) -> ClientId:
        if new.client is not None:
            client = await records.clients.get(new.client)
            if client is None or not client.serves(tenant) or not _calls_proxies(client, new):
                raise invalid_field(
                    "client", "not a client of kind 'runtime', or of one subject, that serves this tenant"
                )
            if not client.acts_for(tenant, new.subject):
                raise invalid_field("subject", "the client acts for another subject, and for that one alone")
            return client.id
        runtimes = [client for client in await records.clients.list() if client.kind is ClientKind.RUNTIME]
        own = [client for client in runtimes if client.tenant == tenant]
        for only in (own, runtimes):
            if len(only) == 1:
                return only[0].id
        raise invalid_field("client", "name the client: there is not exactly one of kind 'runtime'")

    async def _mandate(
        self, records: Records, tenant: TenantId, new: NewPlaceholder, client: ClientId, by: Actor
    ) -> Mandate:
        if not new.with_session:
            caller = Caller(client=client, tenant=tenant, subject=new.subject, session=None)
            return Mandate(caller, roles=(), not_after=None)
        opening = Opening(tenant=tenant, subject=new.subject, roles=(), runtime=client)
        session = await self._sessions.open_in(records, opening, by=by)
        caller = Caller(client=client, tenant=tenant, subject=new.subject, session=session.id)
        return Mandate(caller, roles=(), not_after=session.not_after)

    def _event(self, action: str, token: Token, by: Actor, credential: str | None) -> AuditEvent:
        return self._trail.event(
            action,
            by=by,
            tenant=token.tenant,
            subject=token.subject,
            session=token.session,
            credential=credential,
            placeholder_id=token.id,
        )


def _calls_proxies(client: Client, new: NewPlaceholder) -> bool:
    """Sessions are a runtime's; without one, a client of one subject will do."""
    return client.kind is ClientKind.RUNTIME or (client.subject is not None and not new.with_session)


PLACEHOLDER_NOT_FOUND: Final = Refusal(
    RefusalCode.NOT_FOUND, "there is no such placeholder", "list them with: coatcheck placeholder list"
)
