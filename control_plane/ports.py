"""What the use cases need from outside: a store, a clock, entropy, a way to wake listeners.

Rule: nothing is read or written without a scope. `TenantScope` sees and writes one tenant's rows and no other; a
`PlatformScope` crosses tenants and says what for, so that every such place can be found and counted.
Adapters: `adapters/sql` (store), `adapters/memory` (wake-up), `adapters/keyring` (key-encryption keys).
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from control_plane.contract.caller import ClientId, CredentialId, GrantId, PlaceholderId, SessionId, SubjectId, TenantId
from control_plane.contract.secret import Secret
from control_plane.contract.wire import AuditEvent
from control_plane.core.alarms import Alarm, AlarmHook, Decoy, Delivery, Sighting
from control_plane.core.chain import Anchor, Head
from control_plane.core.identity import KeySource, TrustedIssuer
from control_plane.core.jwk import VerificationKey
from control_plane.core.kinds import KindSettings
from control_plane.core.records import (
    Change,
    Client,
    Credential,
    CredentialVersion,
    Grant,
    Injector,
    KeyPurpose,
    KnownKek,
    Limit,
    MintedValue,
    NewUse,
    OwnKey,
    PublishedChange,
    Rewrap,
    Rotation,
    RotationSchedule,
    Session,
    Source,
    Tenant,
    TenantAllowRule,
    Token,
    TokenKind,
    Use,
)

Clock = Callable[[], float]
"""Unix seconds."""

Entropy = Callable[[int], bytes]
"""That many bytes from a cryptographic generator."""


@dataclass(frozen=True, slots=True)
class TenantScope:
    tenant: TenantId


class CrossTenantReason(StrEnum):
    """Why a look-up is not confined to one tenant."""

    START = "start"
    AUTHENTICATE = "authenticate"
    """Whoever calls is not known yet, and so neither is the tenant."""
    RESOLVE = "resolve"
    """A proxy serves all tenants; the use case compares the tenant itself."""
    EVENTS = "events"
    AUDIT = "audit"
    ADMINISTER = "administer"
    UPKEEP = "upkeep"


@dataclass(frozen=True, slots=True)
class PlatformScope:
    reason: CrossTenantReason


Scope = TenantScope | PlatformScope


class TakenError(Exception):
    """A row with that name or id is already there."""


class UnreadableRowError(Exception):
    """The row does not hold a record: somebody edited it. Names the kind of record, never a value."""


class Tenants(Protocol):
    async def add(self, tenant: Tenant) -> None: ...
    async def get(self, tenant: TenantId) -> Tenant | None: ...
    async def list(self) -> Sequence[Tenant]: ...
    async def remove(self, tenant: TenantId) -> bool: ...


class Clients(Protocol):
    async def add(self, client: Client) -> None: ...
    async def replace(self, client: Client) -> None: ...
    async def get(self, client: ClientId) -> Client | None: ...
    async def those(self, clients: Sequence[ClientId]) -> Sequence[Client]:
        """Those of them that are there."""
        ...

    async def locked(self, client: ClientId) -> Client | None:
        """To be changed by this transaction alone."""
        ...

    async def list(self) -> Sequence[Client]: ...
    async def of_workload_issuer(self, issuer: str) -> Sequence[Client]:
        """Those that prove themselves by tokens of this trusted issuer."""
        ...

    async def of_certificate(self, names: Sequence[str]) -> Sequence[Client]: ...
    async def with_self_signed(self) -> Sequence[Client]: ...
    async def remove(self, client: ClientId) -> bool: ...


class Credentials(Protocol):
    async def add(self, credential: Credential) -> None: ...
    async def replace(self, credential: Credential) -> None: ...
    async def get(self, credential: CredentialId) -> Credential | None: ...
    async def named(self, name: str) -> Credential | None: ...
    async def locked(self, credential: CredentialId) -> Credential | None:
        """That one, and nobody else changes it (or its versions, or its rotation) until this transaction ends."""
        ...

    async def list(self) -> Sequence[Credential]: ...
    async def remove(self, credential: CredentialId) -> None: ...


class Versions(Protocol):
    async def add(self, version: CredentialVersion) -> None: ...
    async def replace(self, version: CredentialVersion) -> None: ...
    async def get(self, credential: CredentialId, version: int) -> CredentialVersion | None: ...
    async def of(self, credential: CredentialId) -> Sequence[CredentialVersion]: ...
    async def reseal(self, version: CredentialVersion, *, instead_of: bytes) -> bool:
        """Another envelope for the same version, where it still has the one that was read."""
        ...


class Sources(Protocol):
    """The platform's: read from every scope, written from the platform's alone."""

    async def add(self, source: Source) -> None: ...
    async def replace(self, source: Source) -> None: ...
    async def get(self, name: str) -> Source | None: ...
    async def list(self) -> Sequence[Source]: ...
    async def remove(self, name: str) -> bool: ...
    async def users_of(self, name: str) -> Sequence[Credential]:
        """The credentials of this scope whose secret is read from there."""
        ...


@dataclass(frozen=True, slots=True)
class ReplyCount:
    """How many replies one version got, of one subject, in one span of time (`core.rotation.bucket_of`)."""

    credential_id: CredentialId
    tenant: TenantId
    version: int
    subject_sha256: str
    bucket: int
    replies: int
    failures: int


class Rotations(Protocol):
    async def put(self, rotation: Rotation) -> None:
        """In the place of the credential's last one."""
        ...

    async def of(self, credential: CredentialId) -> Rotation | None: ...
    async def due(self, now: float, *, limit: int) -> Sequence[Rotation]:
        """Those under way whose step, or probe, should have ended by then."""
        ...

    async def running(self, *, limit: int) -> Sequence[Rotation]: ...
    async def count(self, counts: Sequence[ReplyCount]) -> None:
        """Adds to what was counted."""
        ...

    async def replies(self, credential: CredentialId, *, from_bucket: int) -> Mapping[int, tuple[int, int, int]]:
        """By version: replies, failures, subjects that had a failure."""
        ...

    async def forget_replies(self, credential: CredentialId) -> None: ...
    async def put_schedule(self, schedule: RotationSchedule) -> None:
        """In the place of the credential's last one."""
        ...

    async def schedule_of(self, credential: CredentialId) -> RotationSchedule | None: ...
    async def remove_schedule(self, credential: CredentialId) -> bool: ...
    async def schedules_to_look_at(self, now: float, *, limit: int) -> Sequence[RotationSchedule]: ...


class MintedValues(Protocol):
    """What was minted for a version of a credential, and who may ask its provider for more."""

    async def get(self, credential: CredentialId, version: int) -> MintedValue | None: ...
    async def lease(self, version: CredentialVersion, *, seconds: float) -> MintedValue | None:
        """Ours for so long, under a new fence. None: somebody else has it."""
        ...

    async def settle(self, minted: MintedValue, *, asked_fence: int) -> bool:
        """Writes the row where the question of that fence is still the one that waits for its answer, and ends its
        lease."""
        ...

    async def put(self, minted: MintedValue) -> bool:
        """Writes the row where its lease has not been taken over."""
        ...

    async def release(self, minted: MintedValue) -> None:
        """Ends the lease of that fence."""
        ...

    async def discard(self, credential: CredentialId, version: int) -> None:
        """The value alone: whatever is known of its provider stays."""
        ...

    async def forget(self, credential: CredentialId, version: int) -> None: ...
    async def purge(self, *, limit: int) -> int:
        """Forgets what was minted for versions that are over; how many."""
        ...


class Grants(Protocol):
    async def add(self, grant: Grant) -> None: ...
    async def get(self, grant: GrantId) -> Grant | None: ...
    async def list(self) -> Sequence[Grant]: ...
    async def remove(self, grant: GrantId) -> None: ...
    async def of_credentials(self, credentials: Sequence[CredentialId]) -> Sequence[Grant]: ...


class AllowRules(Protocol):
    async def add(self, rule: TenantAllowRule) -> None: ...
    async def get(self, rule: str) -> TenantAllowRule | None: ...
    async def list(self) -> Sequence[TenantAllowRule]: ...
    async def for_session(self, session: SessionId | None) -> Sequence[TenantAllowRule]:
        """The tenant's rules, and those of this session alone."""
        ...

    async def remove(self, rule: str) -> None: ...
    async def remove_of_sessions(self, sessions: Sequence[Session]) -> None: ...


class Sessions(Protocol):
    async def add(self, session: Session) -> None: ...
    async def get(self, session: SessionId) -> Session | None: ...
    async def join(self, session: SessionId, *, by: ClientId) -> bool:
        """False where it was ended meanwhile, by whatever replica. From here on its end waits for this transaction."""
        ...

    async def erase(self, session: SessionId, at: float) -> None: ...
    async def live_of_runtime(self, runtime: ClientId, now: float) -> Sequence[Session]: ...
    async def end(self, sessions: Sequence[Session], at: float) -> None: ...
    async def to_erase(self, runtime: ClientId, *, after: SessionId | None, limit: int) -> Sequence[Session]:
        """Sessions of that runtime that were ended and of which it may still keep something, by id."""
        ...

    async def live_of_subject(self, subject: SubjectId, now: float) -> Sequence[Session]: ...
    async def purge(self, *, over_before: float, limit: int) -> int:
        """Forgets sessions that were over before that moment, with what still hangs on them; how many."""
        ...


class Tokens(Protocol):
    async def add(self, *tokens: Token) -> None: ...
    async def get(self, token: PlaceholderId) -> Token | None: ...
    async def by_fingerprint(self, sha256: str) -> Token | None: ...
    async def list(self, kind: TokenKind, *, before: Token | None = None, limit: int = 1000) -> Sequence[Token]:
        """Newest first; the next page is before the last one seen."""
        ...

    async def prolong(self, sha256: str, expires_at: float) -> bool:
        """False where it was revoked meanwhile: a revoked token is never given more time."""
        ...

    async def suspend(self, token: PlaceholderId, until: float, *, now: float) -> bool:
        """False where it is suspended or revoked already: of two that find it so at once, one did it."""
        ...

    async def revoke(self, tokens: Sequence[Token], at: float) -> None: ...
    async def revoke_of_credential(self, credential: CredentialId, at: float) -> None: ...
    async def revoke_of_sessions(self, sessions: Sequence[Session], at: float) -> None: ...
    async def revoke_of_client(self, client: ClientId, at: float) -> None: ...
    async def revoke_no_longer_granted(self, credential: CredentialId, at: float) -> None:
        """Those of the credential that no grant of it applies to (any more): `Grant.applies_to`, in the database."""
        ...

    async def usable_without_session(self, client: ClientId, now: float) -> Sequence[Token]:
        """Those of a client that hang on no session: neither revoked nor expired."""
        ...

    async def forget_of_session(self, session: Session) -> None:
        """Removes the rows: of a session that is over for good."""
        ...

    async def any_usable_of_before(self, created_before: float, now: float) -> bool:
        """Whether a token that was made before that moment could still be used or renewed."""
        ...

    async def purge(self, *, dead_before: float, limit: int) -> int:
        """Forgets tokens that could not be used or renewed any more at that moment; how many."""
        ...


class OwnKeys(Protocol):
    async def add(self, key: OwnKey) -> None: ...
    async def list(self, purpose: KeyPurpose) -> Sequence[OwnKey]:
        """Newest first."""
        ...

    async def remove(self, keys: Sequence[OwnKey]) -> None: ...


class Injectors(Protocol):
    async def list(self) -> Sequence[Injector]: ...
    async def seen(self, injector: ClientId, at: float) -> bool:
        """Notes that it is alive. True: it was not registered before."""
        ...

    async def remove(self, injector: ClientId) -> bool: ...


class Uses(Protocol):
    async def note(self, uses: Sequence[NewUse]) -> None:
        """Adds requests to what was used before. A credential that is gone has no uses."""
        ...

    async def list(self, subject: SubjectId | None) -> Sequence[Use]: ...


class Issuers(Protocol):
    """The platform's own: no tenant has any."""

    async def add(self, issuer: TrustedIssuer) -> None: ...
    async def replace(self, issuer: TrustedIssuer) -> None: ...
    async def named(self, name: str) -> TrustedIssuer | None: ...
    async def of(self, issuers: Sequence[str]) -> Sequence[TrustedIssuer]:
        """Those with one of these as `issuer`."""
        ...

    async def list(self) -> Sequence[TrustedIssuer]: ...
    async def remove(self, name: str) -> bool: ...


class UsedAssertions(Protocol):
    """Assertions that are good for once (RFC 7523 §3, `jti`)."""

    async def use(self, sha256: str, *, expires_at: float) -> bool:
        """False where it was used before."""
        ...

    async def purge(self, *, over_before: float, limit: int) -> int: ...


class Limits(Protocol):
    """Limits, and what of each was given out in a window. Which window runs follows from `now`."""

    async def add(self, limit: Limit) -> None: ...
    async def get(self, limit_id: str) -> Limit | None: ...
    async def list(self) -> Sequence[Limit]: ...
    async def of_tenant(self, tenant: TenantId) -> Sequence[Limit]: ...
    async def remove(self, limit_id: str) -> None: ...
    async def take(self, limit: Limit, *, bucket: str, now: float, least: int, most: int) -> int:
        """Gives out up to `most`; how much. Less than `least` only where no more is left."""
        ...

    async def use(self, limit: Limit, *, bucket: str, now: float, amount: int) -> None:
        """Counts what was used beyond what was given."""
        ...

    async def give_back(self, limit: Limit, *, bucket: str, now: float, amount: int) -> None: ...
    async def granted(self, limit: Limit, *, bucket: str, now: float) -> int: ...
    async def granted_now(self, limits: Sequence[Limit], *, now: float) -> Mapping[str, int]: ...
    async def purge(self, *, over_before: float, limit: int) -> int: ...


@dataclass(frozen=True, slots=True)
class SealedRow:
    """One envelope, wherever it is kept, with what it is sealed to."""

    place: str
    """Its kind and the row's key; orders all of them."""
    kind: str
    key: tuple[str | int, ...]
    tenant: TenantId | None
    label: str
    """For people: what an operator would call it."""
    aad: bytes
    kek_id: str
    envelope: bytes


class SealedRows(Protocol):
    """Every envelope of the database. For the platform's scope alone."""

    async def count_by_kek(self) -> Mapping[str, int]: ...
    async def not_under(self, kek_id: str, *, after: str, limit: int) -> Sequence[SealedRow]:
        """In the order of `place`; rows that cannot be read are left out."""
        ...

    async def replace(self, row: SealedRow, *, envelope: bytes, kek_id: str) -> bool:
        """False where the row holds another envelope by now: whoever wrote that knew better."""
        ...

    async def forget(self, row: SealedRow) -> bool:
        """Takes the envelope out of a version that has it. False where there is none to take."""
        ...


class Keks(Protocol):
    """What replicas have told of their rings. For the platform's scope alone."""

    async def see(self, kek: KnownKek) -> bool:
        """False where it was known already."""
        ...

    async def place(self, kek_id: str, place: str) -> None:
        """Where it is now."""
        ...

    async def list(self) -> Sequence[KnownKek]: ...
    async def retire(self, kek_id: str, at: float) -> bool: ...
    async def start(self, rewrap: Rewrap) -> None: ...
    async def latest(self) -> Rewrap | None: ...
    async def claim(self, rewrap: str, *, runner: str, now: float, idle_since: float) -> bool:
        """Whether this replica may work on it now: nobody else does, or nobody has since that moment."""
        ...

    async def move(self, rewrap: str, *, runner: str, rewrapped: int, now: float) -> bool:
        """Counts what was just done. False where the work is somebody else's by now."""
        ...

    async def finish(self, rewrap: str, *, runner: str, unopenable: int, now: float) -> bool: ...


class Alarms(Protocol):
    """Alarms, where they are told, and what is on its way there."""

    async def add(self, alarm: Alarm) -> bool:
        """False: the same placeholder and caller have raised one in this window."""
        ...

    async def again(self, sighting: Sighting, count: int) -> None: ...
    async def mark_revoked(self, alarm: Alarm) -> None: ...
    async def get(self, alarm_id: str) -> Alarm | None: ...
    async def list(self, *, limit: int) -> Sequence[Alarm]: ...
    async def purge(self, *, before: float, limit: int) -> int: ...
    async def add_hook(self, hook: AlarmHook) -> None: ...
    async def hook(self, hook_id: str) -> AlarmHook | None: ...
    async def hooks(self, tenant: TenantId | None) -> Sequence[AlarmHook]: ...
    async def hooks_for(self, tenant: TenantId) -> Sequence[AlarmHook]:
        """The tenant's own, and the platform's."""
        ...

    async def remove_hook(self, hook_id: str) -> None: ...
    async def revokes(self, tenant: TenantId) -> bool: ...
    async def set_revokes(self, tenant: TenantId, value: bool) -> None: ...
    async def send(self, alarm: Alarm, hook: AlarmHook, *, at: float) -> None: ...
    async def due(self, *, now: float, limit: int) -> Sequence[Delivery]: ...
    async def claim(self, delivery: Delivery, *, until: float) -> bool:
        """Makes it the caller's until then. False: it is another's."""
        ...

    async def settle(self, delivery: Delivery, *, due_at: float, done_at: float | None, error: str | None) -> None: ...
    async def deliveries(self, alarm_ids: Sequence[str]) -> Sequence[Delivery]: ...


class Decoys(Protocol):
    async def add(self, decoy: Decoy) -> None: ...
    async def get(self, decoy_id: str) -> Decoy | None: ...
    async def by_fingerprint(self, sha256: str) -> Decoy | None: ...
    async def list(self) -> Sequence[Decoy]: ...
    async def used(self, decoy_id: str, at: float) -> None: ...
    async def remove(self, decoy_id: str) -> None: ...
    async def any_from_before(self, created_before: float) -> bool: ...


class Outbox(Protocol):
    async def append(self, changes: Sequence[Change], at: float) -> None: ...
    async def after(self, sequence: int, limit: int) -> Sequence[PublishedChange]: ...
    async def position(self) -> "Position": ...
    async def purge(self, *, before: float, keep: int, limit: int) -> int:
        """Forgets changes published before that moment, never the newest `keep`; how many.

        A reader further behind sees numbers missing, which is how it knows that it missed something.
        """
        ...


class Audit(Protocol):
    async def append(self, events: Sequence[AuditEvent]) -> None:
        """Events whose id is already there are left out."""
        ...

    async def append_new(self, events: Sequence[AuditEvent]) -> frozenset[str]:
        """As `append`; the ids of those that were not there before: what follows from an event follows from it once."""
        ...

    async def append_if_possible(self, events: Sequence[AuditEvent]) -> bool:
        """For what must be done even where the trail cannot take it: False then, and the transaction goes on."""
        ...

    async def after(
        self, sequence: int, *, limit: int, request_id: str | None
    ) -> Sequence[tuple[int, dict[str, object]]]: ...
    async def sequence_of(self, event_id: str) -> int | None: ...
    async def leaks(self, token: Token, *, since: float, limit: int) -> int:
        """In how many replies to its requests the secret came back since then; counted up to the limit."""
        ...


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event as it stands in the store."""

    record: dict[str, Any]
    differs: tuple[str, ...] = ()
    """Columns beside the record that say something else than it does: somebody edited one of them."""


@dataclass(frozen=True, slots=True)
class UnchainedEvent:
    """An event that waits to be linked. `stored` is None where it is gone already."""

    sequence: int
    tenant: str | None
    stored: StoredEvent | None


@dataclass(frozen=True, slots=True)
class UnchainedTail:
    events: int
    oldest_at: float | None


class AuditChain(Protocol):
    """The trail's chains, one a tenant and one (None) of the events of no tenant."""

    async def lease(self) -> bool:
        """Whether this transaction is the one that links: at most one at a time."""
        ...

    async def unchained(self, limit: int) -> Sequence[UnchainedEvent]: ...
    async def tail(self) -> UnchainedTail: ...
    async def add(self, head: Head, sequences: Sequence[int]) -> None:
        """Raises `TakenError` where another has linked meanwhile."""
        ...

    async def last(self, tenant: str | None) -> Head | Anchor | None: ...
    async def ends_not_signed_by(self, key_ids: Sequence[str], *, limit: int) -> Sequence[Head | Anchor]:
        """The newest heads of chains, whoever's, and the anchors, that other keys have signed."""
        ...

    async def anchor(self, tenant: str | None) -> Anchor | None: ...
    async def heads(self, tenant: str | None, *, after_number: int, limit: int) -> Sequence[Head]: ...
    async def head_through(self, tenant: str | None, position: int) -> Head | None:
        """The newest head whose events all stand at `position` or before it."""
        ...

    async def events_of(self, head: Head) -> Sequence[StoredEvent | None]:
        """In their order; None for one that is gone."""
        ...

    async def unchained_of(self, tenant: str | None, *, limit: int) -> Sequence[StoredEvent | None]: ...
    async def tenants(self) -> Sequence[str | None]:
        """Whoever has a chain."""
        ...

    async def oldest(self, *, before: float, limit: int) -> Sequence[Head]:
        """Heads from before that moment, those of a chain together and in their order."""
        ...

    async def forget(self, heads: Sequence[Head], anchor: Anchor) -> int:
        """Removes these, the first that their chain has, with their events; how many events."""
        ...


@dataclass(frozen=True, slots=True)
class Position:
    """Where the outbox stands in this transaction."""

    epoch: str
    sequence: int


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """A token with everything that decides over it, read at once: the path of every cold request."""

    token: Token
    session: Session | None
    credential: Credential | None
    version: CredentialVersion | None
    client_registered: bool
    has_limits: bool = False
    """Whether its tenant has limits at all: most have none, and are spared the look-up."""
    rotation: Rotation | None = None
    """The credential's, where one is under way."""


class HotReads(Protocol):
    """Reads that join tables because a request waits for them."""

    async def token_facts(self, sha256s: Sequence[str]) -> Mapping[str, TokenFacts | None]:
        """Of those that there are, by their fingerprint; None for one whose row cannot be read."""
        ...

    async def granted(
        self, *, subject: SubjectId, roles: tuple[str, ...], client: ClientId, tenant: TenantId
    ) -> Sequence[tuple[Credential, tuple[Grant, ...]]]:
        """Every credential of the tenant that the caller has a grant for, whatever its `until`, with those grants."""
        ...


AGES: Final = tuple(days * 86_400.0 for days in (1, 7, 30, 90, 180, 365))
"""Seconds: the ages that `Figures` counts by."""


@dataclass(frozen=True, slots=True)
class Figures:
    """How things stand, for whoever watches over them."""

    outbox_sequence: int
    unchained_events: int
    unchained_since: float | None
    tenants: int
    credentials: int
    credentials_due: int
    credentials_reminded: int
    """Past the age of which their schedule reminds; those that are due are among them."""
    ages: Sequence[int]
    """For each of `AGES`, how many credentials are in use with a version that is that old or younger."""
    in_use: int
    """Credentials with a version in use."""
    ages_seconds: float
    """Of all those versions together."""
    oldest_seconds: float
    envelopes: Mapping[str, int]
    """By the id of the key-encryption key that they are under."""
    deliveries_open: int


class Records(Protocol):
    """One transaction: everything read or written here is seen together, or not at all."""

    async def now(self) -> float:
        """By the one clock that all replicas share, the database's. What they take from each other when its time has
        come (leases, claims, steps of a rotation) and what they forget for all is judged by it and by no other."""
        ...

    @property
    def tenants(self) -> Tenants: ...
    @property
    def clients(self) -> Clients: ...
    @property
    def credentials(self) -> Credentials: ...
    @property
    def versions(self) -> Versions: ...
    @property
    def rotations(self) -> Rotations: ...
    @property
    def minted(self) -> MintedValues: ...
    @property
    def sources(self) -> Sources: ...
    @property
    def grants(self) -> Grants: ...
    @property
    def rules(self) -> AllowRules: ...
    @property
    def sessions(self) -> Sessions: ...
    @property
    def tokens(self) -> Tokens: ...
    @property
    def own_keys(self) -> OwnKeys: ...
    @property
    def issuers(self) -> Issuers: ...
    @property
    def used_assertions(self) -> UsedAssertions: ...
    @property
    def injectors(self) -> Injectors: ...
    @property
    def uses(self) -> Uses: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def sealed(self) -> SealedRows: ...
    @property
    def keks(self) -> Keks: ...
    @property
    def alarms(self) -> Alarms: ...
    @property
    def decoys(self) -> Decoys: ...
    @property
    def outbox(self) -> Outbox: ...
    @property
    def audit(self) -> Audit: ...
    @property
    def chain(self) -> AuditChain: ...
    @property
    def hot(self) -> HotReads: ...
    async def figures(self, *, now: float) -> Figures: ...


class Store(Protocol):
    """Raises `RefusedError(store_unavailable)` where the database does not answer."""

    def read(self, scope: Scope) -> AbstractAsyncContextManager[Records]: ...
    def write(self, scope: Scope) -> AbstractAsyncContextManager[Records]: ...


class OutboundFailure(StrEnum):
    """Why a fetch gave nothing."""

    INVALID_URL = "invalid_url"
    """Not https, or with userinfo, a fragment, a port or a host that no URL of ours has."""
    INVALID_REQUEST = "invalid_request"
    """A method, header field or client certificate that cannot be sent."""
    DENIED_ADDRESS = "denied_address"
    """Private, loopback, link-local, metadata or our own, and the platform's administrator made no exception."""
    UNREACHABLE = "unreachable"
    UNVERIFIED = "unverified"
    TIMEOUT = "timeout"
    REDIRECT = "redirect"
    TOO_LARGE = "too_large"
    UNREADABLE = "unreadable"
    """No HTTP, cut short, or compressed though we asked for it plain."""


class OutboundError(Exception):
    """Says why, and never a URL's query, a header or a body."""

    def __init__(self, failure: OutboundFailure, *, sent: bool = False) -> None:
        """`sent`: the server may have read the request, so that what became of it is not known."""
        super().__init__(failure.value)
        self.failure = failure
        self.sent = sent


@dataclass(frozen=True, slots=True, repr=False)
class OutboundRequest:
    """One request of ours to somebody else's server. Not shown: its header fields and body may hold secrets."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    client_certificate_pem: bytes | None = None
    """Certificate and key, where the server asks for one."""
    seconds: float = 5.0


@dataclass(frozen=True, slots=True, repr=False)
class OutboundReply:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


_on_behalf_of: ContextVar[TenantId | None] = ContextVar("on_behalf_of", default=None)


@contextmanager
def on_behalf_of(tenant: TenantId | None) -> Iterator[None]:
    """What is sent inside is that tenant's doing: it takes its turn among the tenants, and a share of them at most."""
    token = _on_behalf_of.set(tenant)
    try:
        yield
    finally:
        _on_behalf_of.reset(token)


def whose_doing() -> TenantId | None:
    """Of a request that is about to be sent. None: the platform's own."""
    return _on_behalf_of.get()


class Outbound(Protocol):
    """The only door to the network. https, the checked address is the one dialled, no redirects, at most 256 KiB."""

    async def send(self, request: OutboundRequest) -> OutboundReply:
        """Any status is a reply. Raises `OutboundError`."""
        ...


class KeysUnavailableError(Exception):
    """No keys, old or new: whether a token is good cannot be said. Says why, and never what was fetched."""


class PublicKeys(Protocol):
    """The public keys of others, as long as they are good."""

    async def of(self, source: KeySource, *, key_id: str | None) -> Sequence[VerificationKey]:
        """All keys of the source, looked up again, within bounds, where none of them has this id.

        Raises `KeysUnavailableError`.
        """


class ProviderFailure(StrEnum):
    """Why a provider gave nothing."""

    UNAVAILABLE = "unavailable"
    """No answer, or one that says it cannot at the moment."""
    UNUSABLE = "unusable"
    """An answer that is none: empty, another form, nothing in it that could be used."""
    CONSENT_ENDED = "consent_ended"
    """`invalid_grant`: what we hold does not count any more."""
    CLIENT_REFUSED = "client_refused"
    """What we prove ourselves with does not count."""
    REQUEST_REFUSED = "request_refused"
    """It does not give what the settings ask for."""


class ProviderError(Exception):
    """`code` is the provider's own, if it is one of a known list; nothing else that it said is in here."""

    def __init__(
        self,
        failure: ProviderFailure,
        *,
        code: str = "",
        unheard: bool = False,
        retry_after_seconds: float | None = None,
    ) -> None:
        """`unheard`: it may have answered, and we have not heard it."""
        super().__init__(f"{failure.value} {code}".strip())
        self.failure = failure
        self.code = code
        self.unheard = unheard
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class ProviderAnswer:
    value: Secret
    """As it is resolved: a token, or a document."""
    expires_in_seconds: float | None
    """None: the provider does not say."""
    secret: Secret | None = None
    """Takes the place of the secret that was used, which does not count any more."""


class Provider(Protocol):
    """Mints values of one kind of credential."""

    async def mint(self, settings: KindSettings, secret: Secret, *, now: float) -> ProviderAnswer:
        """`settings` are of its kind, `secret` is in its kind's form. Raises `ProviderError`."""
        ...


class ProbeUnansweredError(Exception):
    """No answer came by way of the proxy. Says why, without a URL."""


@dataclass(frozen=True, slots=True, repr=False)
class ProbeCall:
    """One request to our own proxy's reverse listener. Not shown: it holds a placeholder and a proxy credential."""

    method: str
    target: str
    """`/<credential name>/…`"""
    headers: Mapping[str, str]
    proxy_credential: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ProbeReply:
    status: int
    refusal: str
    """The proxy's own code, where it was the proxy that answered; empty where it was the upstream."""


class ProbeCaller(Protocol):
    """Speaks to the egress proxy that the settings name, and to nobody else: the one place that is ours and private."""

    async def call(self, call: ProbeCall) -> ProbeReply:
        """Raises `ProbeUnansweredError`."""


class SourceFailure(StrEnum):
    """Why a source gave no value. Only `unavailable` may be bridged with a value read before."""

    NOT_FOUND = "not_found"
    """The source answered: there is nothing at that place."""
    DENIED = "denied"
    """The source answered: not for us."""
    UNAVAILABLE = "unavailable"
    """No answer, or none that the source itself would give."""
    UNUSABLE = "unusable"
    """What is there cannot be a secret, or is not the form that was agreed."""
    MISCONFIGURED = "misconfigured"
    """We cannot even ask: a file or a setting of ours is missing."""


class SourceError(Exception):
    """`detail` is ours: it names no value, and nothing that the source said."""

    def __init__(self, failure: SourceFailure, detail: str) -> None:
        super().__init__(f"{failure.value}: {detail}")
        self.failure = failure
        self.detail = detail


class SourceReader(Protocol):
    """Reads from one kind of source. Never on the event loop's own time, and within five seconds or so."""

    async def read(self, source: Source, *, path: str, field: str | None) -> Secret:
        """The raw text there, unchecked. Raises `SourceError`."""
        ...


class KekFailure(StrEnum):
    """Why a key-encryption key did not do as it was asked."""

    UNOPENABLE = "unopenable"
    """It says that this was not wrapped by it, or not for this place."""
    DENIED = "denied"
    """It says no to us, or it is gone or disabled."""
    UNAVAILABLE = "unavailable"
    """Nobody answers."""


class KekError(Exception):
    """`detail` is ours: it names no value, and nothing that the other side said."""

    def __init__(self, failure: KekFailure, detail: str) -> None:
        super().__init__(f"{failure.value}: {detail}")
        self.failure = failure
        self.detail = detail


class KekProvider(Protocol):
    """A key-encryption key that never leaves where it is kept: it wraps and unwraps data keys for us.

    `context` is authenticated with the data key: what was wrapped for one place does not unwrap for another.
    """

    @property
    def id(self) -> str:
        """Ours: 1 to 32 characters, the same on every replica and after every restart."""
        ...

    @property
    def provider(self) -> str:
        """For people: `AWS KMS`, `Vault transit`."""
        ...

    @property
    def place(self) -> str:
        """For people: which key of it."""
        ...

    async def wrap(self, data_key: bytes, *, context: bytes) -> bytes:
        """Raises `KekError`."""
        ...

    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        """Raises `KekError`."""
        ...


class HookFailedError(Exception):
    """A hook gave no new value, or did not put the old one away. Says why, without anything secret."""


@dataclass(frozen=True, slots=True, repr=False)
class HookAsk:
    """What a hook is asked about. Not shown: `current` is a secret."""

    settings: Mapping[str, Any]
    tenant: TenantId
    credential: str
    attempt: str
    """The same for the same question, however often it has to be asked."""
    current: Secret | None
    """The value in use. None: it does not open, or there is none."""
    state: Mapping[str, str]
    """What `create` gave back, for `settle`."""


@dataclass(frozen=True, slots=True, repr=False)
class Created:
    """A new value. Not shown."""

    secret: Secret
    state: Mapping[str, str] = field(default_factory=dict)


class RotationHook(Protocol):
    """Makes new values of a secret where it comes from, and puts old ones away there."""

    async def create(self, ask: HookAsk) -> Created:
        """A new value, beside the one in use. Raises `HookFailedError`."""
        ...

    async def settle(self, ask: HookAsk, *, new_is_in_use: bool) -> None:
        """The rotation is over, and what is not in use may go. Asked until it succeeds. Raises `HookFailedError`."""
        ...


class Wake(Protocol):
    """Tells waiting event streams that the outbox grew. A hint: who misses it looks again after a heartbeat."""

    def announce(self) -> None: ...
    def listen(self) -> Callable[[float], Awaitable[None]]:
        """From now on: awaiting the result (with a timeout in seconds) returns once anything was announced."""
        ...

    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...


class Turns(Protocol):
    """Single flight: of those who want to do the same thing at once, on whatever replica, one does it first.

    A hint like `Wake`: two may be inside at the same time, where what keeps the turns is away or lies. What must not
    happen twice is kept by the database (a fence, a unique row); this only spares the second one the work.
    """

    def turn(self, key: str, *, tenant: TenantId | None, seconds: float) -> AbstractAsyncContextManager[None]:
        """Waits for whoever is inside, for at most that long, and goes in. Look again, then, whether it is done."""
        ...


@dataclass(frozen=True, slots=True)
class Taken:
    """What a count says to one who wants some of it."""

    allowed: bool
    retry_after_seconds: float
    """0 where it is allowed."""


class Rates(Protocol):
    """How often something happens, over all replicas; of each by itself where what they share is away."""

    async def take(
        self, key: str, *, tenant: TenantId, limit: float, window_seconds: float, amount: float = 1.0
    ) -> Taken:
        """Takes `amount` of the `limit` that each window has, spread evenly, a whole window's worth at once at most.

        What is refused is not counted. More than the limit at once is never allowed.
        """
        ...
