"""A rotation as its parts see it: use cases on a real database, a clock that the test moves, what proxies report.

Rule: nothing is asserted here.
"""

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from control_plane.adapters.jwks import FetchedKeys
from control_plane.adapters.memory.turns import LocalTurns
from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.outbound import HttpOutbound
from control_plane.adapters.sql.engine import Database
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.caller import Caller, ClientId, GrantId, PlaceholderId, SubjectId, TenantId
from control_plane.contract.destination import parse_destination
from control_plane.contract.kinds import CredentialKind
from control_plane.contract.secret import Secret
from control_plane.contract.wire import AskPlaceholder, AuditEvent, Refused, ResolvedPlaceholder, ResolveRequest
from control_plane.core.records import (
    Client,
    ClientKind,
    ClientSource,
    Credential,
    Grant,
    Rotation,
    Tenant,
    Token,
    TokenKind,
)
from control_plane.core.sealing import Kek
from control_plane.credentials import CredentialChange, CredentialKeeper, Described, NewCredential
from control_plane.custody import Custody
from control_plane.identification import Identification
from control_plane.issuance import Issuance
from control_plane.material import Material
from control_plane.own_keys import OwnKeyring
from control_plane.ports import (
    CrossTenantReason,
    PlatformScope,
    ProbeCall,
    ProbeReply,
    ProbeUnansweredError,
    Provider,
    TenantScope,
)
from control_plane.probing import Prober
from control_plane.resolution import Resolution
from control_plane.rotation import NewRotation, RotationKeeper
from control_plane.sources import SecretSources
from control_plane.trail import Actor, Trail
from control_plane.versions import Versions
from control_plane.workloads import Workloads

PLATFORM = PlatformScope(CrossTenantReason.ADMINISTER)
ACME, RUNTIME = TenantId("acme"), ClientId("acme-runtime")
OPERATOR = Actor("administrator", "req_test", is_a_client=False)
DESTINATION = parse_destination("https://api.example.com")
OLD, NEW, NEWER = "old-secret-0123456789", "new-secret-0123456789", "newer-secret-012345678"
NAME = "example"


class TryingUpstream:
    """A proxy with an upstream behind it, as a probe meets them (`ports.ProbeCaller`)."""

    def __init__(self) -> None:
        self.answer: ProbeReply | None = ProbeReply(200, "")
        """None: nobody answers."""
        self.calls: list[ProbeCall] = []
        self.before: Callable[[], Awaitable[None]] | None = None
        """What happens while the probe is on its way."""

    async def call(self, call: ProbeCall) -> ProbeReply:
        self.calls.append(call)
        if self.before is not None:
            await self.before()
        if self.answer is None:
            raise ProbeUnansweredError("the egress proxy cannot be reached")
        return self.answer


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Replica:
    """One control plane's use cases. Several may share a database and a clock."""

    database: Database
    clock: Clock = field(default_factory=Clock)
    kek: Kek = field(default_factory=lambda: Kek.of(b"k" * 32))

    upstream: TryingUpstream = field(default_factory=TryingUpstream)
    tokens: dict[str, str] = field(default_factory=dict)
    """Fingerprints of placeholders, by subject."""
    providers: Mapping[CredentialKind, Provider] = field(default_factory=dict)
    database_clock: Clock | None = None
    """None: the replica's own is right."""

    def __post_init__(self) -> None:
        self.store = SqlStore(self.database, LocalWake(), time=self.database_clock or self.clock)
        self.custody = Custody([self.kek], entropy=os.urandom)
        trail, versions = Trail(self.clock, os.urandom), Versions(self.custody, self.clock)
        sources = SecretSources(self.store, self.custody, {}, trail, clock=self.clock)
        self.credentials = CredentialKeeper(self.store, versions, sources, trail, clock=self.clock, entropy=os.urandom)
        own_keys = OwnKeyring(self.store, self.custody, clock=self.clock, entropy=os.urandom)
        issuance = Issuance(own_keys, clock=self.clock, entropy=os.urandom, proxy_base_url="http://proxy.test")
        prober = Prober(issuance, self.upstream, entropy=os.urandom)
        self.rotations = RotationKeeper(self.store, versions, prober, trail, clock=self.clock, entropy=os.urandom)
        self.material = Material(
            self.store, self.custody, sources, trail, self.providers, LocalTurns(), clock=self.clock
        )
        keys = FetchedKeys(HttpOutbound(), clock=self.clock)
        identification = Identification(self.store, keys, clock=self.clock, own_issuer="https://coatcheck.test")
        workloads = Workloads(identification, clock=self.clock)
        self.resolution = Resolution(self.store, self.material, workloads, clock=self.clock, on_sighting=lambda _: None)

    def another(self) -> "Replica":
        return Replica(self.database, self.clock, self.kek, self.upstream, self.tokens, self.providers)

    # --- set up

    async def add_credential(self, **fields: Any) -> Credential:
        async with self.store.write(PLATFORM) as records:
            await records.tenants.add(Tenant(ACME, 1.0))
            await records.clients.add(
                Client(RUNTIME, ACME, ClientKind.RUNTIME, (), "0" * 64, ClientSource.API, self.clock())
            )
        new = NewCredential(
            name=NAME,
            preset=None,
            destinations=(DESTINATION,),
            placements=None,
            variables=None,
            credential_required=False,
            secret=Secret(OLD),
        )
        made = await self.credentials.add(ACME, replace(new, **fields), by=OPERATOR)
        return made.credential

    async def grant(self, credential: Credential, *subjects: str) -> None:
        """A grant and a placeholder for each."""
        async with self.store.write(TenantScope(ACME)) as records:
            for subject in subjects:
                await records.grants.add(_grant(credential, subject))
                token = _placeholder(credential, subject, now=self.clock())
                await records.tokens.add(token)
                self.tokens[subject] = token.sha256

    # --- what operators do

    async def rotate(self, secret: str | None = NEW, **fields: Any) -> Described:
        new = NewRotation(secret=Secret(secret) if secret is not None else None, **fields)
        return await self.rotations.start(ACME, NAME, new, by=OPERATOR)

    async def change(self, **fields: Any) -> Described:
        return await self.credentials.change(ACME, NAME, CredentialChange(**fields), by=OPERATOR)

    # --- what proxies do

    async def resolve(self, sha256: str, subject: str) -> ResolvedPlaceholder | Refused:
        caller = Caller(client=RUNTIME, tenant=ACME, subject=SubjectId(subject), session=None)
        answer = await self.resolution(ResolveRequest(AskPlaceholder(sha256, caller, DESTINATION.endpoint)))
        assert isinstance(answer.answer, ResolvedPlaceholder | Refused)
        return answer.answer

    async def report(self, subject: str, *, version: int, **replies: int) -> None:
        """`s401=3`: three replies of 401."""
        credential = await self.credential()
        event = AuditEvent(
            event_id=f"rep_{os.urandom(8).hex()}",
            at=self.clock(),
            request_id="rep",
            action="replies",
            tenant=ACME,
            subject=subject,
            credential=NAME,
            version=version,
            extra={"credential_id": credential.id} | {name[1:]: str(count) for name, count in replies.items()},
        )
        async with self.store.write(PLATFORM) as records:
            counted = await self.rotations.heard(records, [event])
        await self.rotations.reconsider(counted)

    # --- what there is

    async def credential(self) -> Credential:
        return (await self.credentials.get(ACME, NAME)).credential

    async def rotation(self) -> Rotation:
        found = (await self.credentials.get(ACME, NAME)).rotation
        assert found is not None
        return found

    async def states(self) -> list[str]:
        return [version.state.value for version in (await self.credentials.get(ACME, NAME)).versions]

    async def envelopes(self) -> list[bool]:
        """For each version whether its envelope is there."""
        return [version.envelope is not None for version in (await self.credentials.get(ACME, NAME)).versions]

    async def actions(self) -> list[str]:
        async with self.store.read(PLATFORM) as records:
            return [str(event["action"]) for _, event in await records.audit.after(0, limit=1000, request_id=None)]

    async def trail(self) -> str:
        async with self.store.read(PLATFORM) as records:
            return json.dumps(list(await records.audit.after(0, limit=1000, request_id=None)))

    async def published(self) -> list[tuple[str, bool]]:
        async with self.store.read(PLATFORM) as records:
            return [(each.change.kind.value, each.change.revoked) for each in await records.outbox.after(0, 1000)]


def _grant(credential: Credential, subject: str) -> Grant:
    return Grant(
        id=GrantId(f"grant_{subject}"),
        tenant=ACME,
        credential_id=credential.id,
        subject=SubjectId(subject),
        role=None,
        client=None,
        methods=None,
        path_prefixes=None,
        until=None,
        created_at=1.0,
    )


def _placeholder(credential: Credential, subject: str, *, now: float) -> Token:
    return Token(
        sha256=os.urandom(32).hex(),
        id=PlaceholderId(f"ph_{subject}"),
        kind=TokenKind.PLACEHOLDER,
        tenant=ACME,
        subject=SubjectId(subject),
        session=None,
        client=RUNTIME,
        credential_id=credential.id,
        ttl_seconds=900,
        created_at=now,
        expires_at=now + 1e6,
        revoked_at=None,
    )
