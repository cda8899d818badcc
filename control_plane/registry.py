"""Tenants and clients: who there is.

Rule: a client's secret is made here, shown once and kept as SHA-256. A client written in the clients file is what the
file says at each start, and goes when the file no longer has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from control_plane.access import TENANT_NOT_FOUND, secret_sha256
from control_plane.contract.caller import ClientId, SubjectId, TenantId
from control_plane.contract.placeholder import BASE62
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.contract.wire import AuditEvent, client_of
from control_plane.core.client_proofs import NO_PROOFS, ClientProofs
from control_plane.core.identity import Use
from control_plane.core.jwk import ALGORITHMS
from control_plane.core.records import (
    NO_TENANT,
    SUBJECT_ASSERT,
    Change,
    ChangeKind,
    Client,
    ClientKind,
    ClientSource,
    Session,
    Tenant,
)
from control_plane.credentials import invalid_field, require_tenant
from control_plane.faults import reach
from control_plane.issuers import require_sound_keys, require_url
from control_plane.ports import (
    Clock,
    CrossTenantReason,
    Entropy,
    PlatformScope,
    Records,
    Store,
    TakenError,
    TenantScope,
)
from control_plane.revocation import end_sessions, revoke_tokens
from control_plane.trail import Actor, Trail

_CLIENT_SECRET_CHARACTERS: Final = 43  # 256 bits of base62
_CLIENT_SECRET_ENTROPY: Final = 40


@dataclass(frozen=True, slots=True)
class NewClient:
    id: ClientId
    kind: ClientKind
    tenant: TenantId | None
    scopes: tuple[str, ...]
    proofs: ClientProofs = NO_PROOFS
    subject: SubjectId | None = None
    """The one subject that it acts for. None: whoever's session it holds."""


@dataclass(frozen=True, slots=True)
class FileClient:
    """An entry of the clients file, its secret read."""

    client: NewClient
    secret: Secret | None
    """None: it proves itself otherwise."""


@dataclass(frozen=True, slots=True)
class ClientChange:
    """New proofs in place of all old ones (None: as they are), and a new secret or none at all."""

    proofs: ClientProofs | None
    secret: "SecretChange"


class SecretChange(StrEnum):
    KEEP = "keep"
    NEW = "new"
    """A new one; the old one is good no more."""
    NONE = "none"


class Registry:
    def __init__(
        self,
        store: Store,
        trail: Trail,
        *,
        clock: Clock,
        entropy: Entropy,
        admit: Callable[[Sequence[str]], None] = lambda _certificates: None,
    ) -> None:
        """`admit` lets certificates of clients' own making through the handshake of this process."""
        self._admit = admit
        self._store = store
        self._trail = trail
        self._clock = clock
        self._entropy = entropy

    async def ensure_tenant(self, tenant: TenantId, *, by: Actor) -> Tenant:
        async with self._store.write(TenantScope(tenant)) as records:
            return await self._ensured(records, tenant, by)

    async def tenants(self) -> Sequence[Tenant]:
        async with self._store.read(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            return await records.tenants.list()

    async def remove_tenant(self, tenant: TenantId, *, by: Actor) -> None:
        """With everything it has, its envelopes too; the audit trail stays. Raises `RefusedError(not_found)`."""
        async with self._store.write(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            await records.tenants.remove(tenant)
            reach("tenant.removed")
            await records.outbox.append([Change(ChangeKind.TENANT, tenant, tenant, revoked=True)], self._clock())
            await self._trail.record(records, [self._trail.event("tenant.delete", by=by, tenant=tenant)])

    async def add_client(self, new: NewClient, *, with_secret: bool, by: Actor) -> tuple[Client, Secret | None]:
        """The client and its secret, which is not kept. Raises `RefusedError(invalid_field)`."""
        require_sound(new)
        secret = self._new_secret() if with_secret else None
        client = self._client(new, secret, ClientSource.API)
        require_provable(client)
        try:
            async with self._store.write(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
                if new.tenant is not None and await records.tenants.get(new.tenant) is None:
                    raise RefusedError(TENANT_NOT_FOUND)
                await _require_possible(records, client)
                await records.clients.add(client)
                await records.audit.append([self._client_event("client.add", client, by)])
        except TakenError:
            raise await self._taken(client) from None
        self._admitted(client)
        return client, secret

    async def change_client(
        self, client_id: ClientId, change: ClientChange, *, by: Actor
    ) -> tuple[Client, Secret | None]:
        """Other proofs of the same client, which keeps what it holds. Raises `RefusedError`."""
        secret = self._new_secret() if change.secret is SecretChange.NEW else None
        try:
            async with self._store.write(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
                present = await records.clients.locked(client_id)
                if present is None:
                    raise RefusedError(CLIENT_NOT_FOUND)
                if present.source is ClientSource.FILE:
                    raise invalid_field("client", "is written in the clients file; change it there")
                digest = present.secret_sha256 if change.secret is SecretChange.KEEP else _digest(secret)
                proofs = present.proofs if change.proofs is None else change.proofs
                client = replace(present, proofs=proofs, secret_sha256=digest)
                require_provable(client)
                await _require_possible(records, client)
                await records.clients.replace(client)
                await self._tell_proxies(records, client)
                await records.audit.append([self._client_event("client.change", client, by)])
        except TakenError:
            raise _known_by_it_already() from None
        self._admitted(client)
        return client, secret

    async def _taken(self, client: Client) -> RefusedError:
        """Of two that are registered at once, the database lets one in: why it was not this one."""
        async with self._store.read(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            is_there = await records.clients.get(client.id) is not None
        return invalid_field("id", "there is a client of that id already") if is_there else _known_by_it_already()

    def _admitted(self, client: Client) -> None:
        if client.proofs.self_signed is not None:
            self._admit([client.proofs.self_signed])

    async def clients(self) -> Sequence[Client]:
        async with self._store.read(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            return await records.clients.list()

    async def remove_client(self, client_id: ClientId, *, by: Actor) -> None:
        """With the tokens that it holds. Raises `RefusedError(not_found)`."""
        async with self._store.write(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
            client = await records.clients.get(client_id)
            if client is None:
                raise RefusedError(CLIENT_NOT_FOUND)
            await self._removed(records, client, by)

    async def reconcile(self, entries: Sequence[FileClient], *, by: Actor) -> None:
        """Makes the clients of the clients file what it says. Raises `RefusedError(invalid_field)`."""
        for entry in entries:
            require_sound(entry.client)
            require_provable(self._client(entry.client, entry.secret, ClientSource.FILE))
        try:
            await self._reconcile(entries, by)
        except TakenError:
            # Another replica starts with the same file, or two clients have one certificate.
            try:
                await self._reconcile(entries, by)
            except TakenError:
                raise _known_by_it_already() from None

    async def _reconcile(self, entries: Sequence[FileClient], by: Actor) -> None:
        async with self._store.write(PlatformScope(CrossTenantReason.START)) as records:
            for tenant in sorted({entry.client.tenant for entry in entries if entry.client.tenant is not None}):
                await self._ensured(records, tenant, by)
            present = {client.id: client for client in await records.clients.list()}
            for entry in entries:
                await self._reconciled(records, present.pop(entry.client.id, None), entry, by)
            for left in present.values():
                if left.source is ClientSource.FILE:
                    await self._removed(records, left, by)

    async def _reconciled(self, records: Records, present: Client | None, entry: FileClient, by: Actor) -> None:
        client = self._client(entry.client, entry.secret, ClientSource.FILE)
        if present is None:
            await records.clients.add(client)
            await records.audit.append([self._client_event("client.add", client, by)])
        elif _facts(present) != _facts(client):
            was, now_is = (present.tenant, present.kind, present.subject), (client.tenant, client.kind, client.subject)
            if was != now_is:
                # Somebody else under the old name: what the old one held is not the new one's.
                await self._dispossessed(records, client, by)
            await records.clients.replace(client)
            await self._tell_proxies(records, client)
            await records.audit.append([self._client_event("client.change", client, by)])

    async def _removed(self, records: Records, client: Client, by: Actor) -> None:
        await self._dispossessed(records, client, by)
        reach("client.dispossessed")
        await records.clients.remove(client.id)
        reach("client.removed")
        await self._trail.record(records, [self._client_event("client.delete", client, by)])

    async def _dispossessed(self, records: Records, client: Client, by: Actor) -> None:
        """Nothing that a client held is the next one's of its name: neither its tokens nor its sessions."""
        now = self._clock()
        sessions = await records.sessions.live_of_runtime(client.id, now)
        await end_sessions(records, sessions, at=now)
        await revoke_tokens(records, await records.tokens.usable_without_session(client.id, now), at=now)
        await records.tokens.revoke_of_client(client.id, now)
        await self._tell_proxies(records, client)
        await self._trail.record(records, [self._session_event(session, by) for session in sessions])

    async def _tell_proxies(self, records: Records, client: Client) -> None:
        """That they ask again who proves to be this client by a token or a certificate."""
        change = Change(ChangeKind.PROXY_CREDENTIAL, client.tenant or NO_TENANT, client_of(client.id), revoked=True)
        await records.outbox.append([change], self._clock())

    def _session_event(self, session: Session, by: Actor) -> AuditEvent:
        return self._trail.event(
            "session.end", by=by, tenant=session.tenant, subject=session.subject, session=session.id
        )

    async def _ensured(self, records: Records, tenant: TenantId, by: Actor) -> Tenant:
        present = await records.tenants.get(tenant)
        if present is not None:
            return present
        made = Tenant(tenant, self._clock())
        await records.tenants.add(made)
        await records.audit.append([self._trail.event("tenant.add", by=by, tenant=tenant)])
        return made

    def _client(self, new: NewClient, secret: Secret | None, source: ClientSource) -> Client:
        return Client(
            id=new.id,
            tenant=new.tenant,
            kind=new.kind,
            scopes=new.scopes,
            secret_sha256=_digest(secret),
            source=source,
            created_at=self._clock(),
            proofs=new.proofs,
            subject=new.subject,
        )

    def _client_event(self, action: str, client: Client, by: Actor) -> AuditEvent:
        detail = f"{client.kind.value} {client.id} proven by {', '.join(client.proven_by)}"
        return self._trail.event(action, by=by, tenant=client.tenant, detail=detail)

    def _new_secret(self) -> Secret:
        number, digits = int.from_bytes(self._entropy(_CLIENT_SECRET_ENTROPY)), []
        for _ in range(_CLIENT_SECRET_CHARACTERS):
            number, rest = divmod(number, 62)
            digits.append(BASE62[rest])
        return Secret("".join(digits))


def require_sound(new: NewClient) -> None:
    """Raises `RefusedError(invalid_field)` for a client that would be more than its kind may be."""
    if SUBJECT_ASSERT in new.scopes:
        # A runtime handles model output: what it says about a subject counts for nothing.
        if new.kind is not ClientKind.OPERATOR:
            raise invalid_field("scopes", f"only a client of kind 'operator' may have {SUBJECT_ASSERT}")
        if new.tenant is None:
            raise invalid_field("tenant", f"a client with {SUBJECT_ASSERT} belongs to one tenant")
    if new.subject is not None:
        if new.kind is ClientKind.EGRESS_PROXY:
            raise invalid_field("subject", "an egress proxy acts for nobody; leave it out")
        if new.tenant is None:
            raise invalid_field("tenant", "a client of one subject belongs to one tenant")
        if SUBJECT_ASSERT in new.scopes:
            raise invalid_field("subject", f"a client with {SUBJECT_ASSERT} names its subjects itself; leave it out")
    if new.kind is ClientKind.EGRESS_PROXY and new.tenant is not None:
        raise invalid_field("tenant", "an egress proxy serves all tenants; leave it out")


def require_provable(client: Client) -> None:
    """Raises `RefusedError(invalid_field)` for a client that could prove itself by nothing, or by unsound keys."""
    if not client.secret_sha256 and client.proofs.is_empty:
        raise invalid_field("secret", "the client could not prove itself: a secret, keys, a workload or a certificate")
    require_sound_keys(client.proofs.keys, ALGORITHMS)
    if client.proofs.jwks_url is not None:
        require_url("jwks_url", client.proofs.jwks_url)


async def _require_possible(records: Records, client: Client) -> None:
    """Raises `RefusedError(invalid_field)` where the proof is somebody else's, or nobody's."""
    name, workload = client.proofs.certificate_name, client.proofs.workload
    if name is not None and any(other.id != client.id for other in await records.clients.of_certificate([name])):
        raise _known_by_it_already()
    if workload is not None:
        issuer = await records.issuers.named(workload.issuer)
        if issuer is None or not issuer.uses & {Use.CLIENT, Use.PROXY}:
            raise invalid_field(
                "workload.issuer",
                "there is no such trusted issuer, or its tokens are neither for 'client' nor for 'proxy'",
            )


def _known_by_it_already() -> RefusedError:
    return invalid_field("certificate", "another client is known by it already")


def _digest(secret: Secret | None) -> str:
    return secret_sha256(secret.reveal()) if secret is not None else ""


def _facts(client: Client) -> tuple[object, ...]:
    return (
        *(client.tenant, client.kind, client.scopes, client.subject),
        *(client.secret_sha256, client.source, client.proofs),
    )


CLIENT_NOT_FOUND: Final = Refusal(RefusalCode.NOT_FOUND, "there is no such client", "list them with GET /v1/clients")
