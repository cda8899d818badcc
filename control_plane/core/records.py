"""What the control plane keeps, as values. One class a table; the store reads and writes exactly these.

Rule: no record holds a plaintext secret or a placeholder, only envelopes and SHA-256 fingerprints, so that none can be
logged by accident. Times are unix seconds.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from control_plane.contract.caller import (
    Caller,
    ClientId,
    CredentialId,
    GrantId,
    PlaceholderId,
    SessionId,
    SubjectId,
    TenantId,
)
from control_plane.contract.destination import AllowRule, Destination, Endpoint
from control_plane.contract.grant import GrantScope
from control_plane.contract.placement import Placement
from control_plane.contract.wire import BoundLimit, Measure
from control_plane.core.client_proofs import NO_PROOFS, ClientProofs
from control_plane.core.delegation import Chain


@dataclass(frozen=True, slots=True)
class Tenant:
    id: TenantId
    created_at: float


class ClientKind(StrEnum):
    RUNTIME = "runtime"
    """May exchange."""
    EGRESS_PROXY = "egress_proxy"
    """May resolve. Serves all tenants and acts for none."""
    OPERATOR = "operator"
    """May name a subject of its own tenant, when it has the scope `subject:assert`."""


class ClientSource(StrEnum):
    API = "api"
    FILE = "file"
    """Written in the clients file: goes when it is no longer there."""


SUBJECT_ASSERT = "subject:assert"


@dataclass(frozen=True, slots=True)
class Client:
    id: ClientId
    tenant: TenantId | None
    """None: it serves every tenant."""
    kind: ClientKind
    scopes: tuple[str, ...]
    secret_sha256: str
    """The empty text: it has no secret."""
    source: ClientSource
    created_at: float
    proofs: ClientProofs = NO_PROOFS
    """How it proves itself beside a secret."""
    subject: SubjectId | None = None
    """The one subject that it acts for, in its one tenant. None: it acts for whoever's session it holds."""

    def serves(self, tenant: TenantId) -> bool:
        return self.tenant is None or self.tenant == tenant

    def acts_for(self, tenant: TenantId, subject: SubjectId) -> bool:
        return self.serves(tenant) and self.subject in (None, subject)

    @property
    def proven_by(self) -> tuple[str, ...]:
        return (*(("client_secret_basic",) if self.secret_sha256 else ()), *self.proofs.methods)


@dataclass(frozen=True, slots=True)
class Credential:
    id: CredentialId
    tenant: TenantId
    name: str
    preset: str | None
    kind: str
    destinations: tuple[Destination, ...]
    placements: tuple[Placement, ...]
    variables: tuple[str, ...]
    credential_required: bool
    current_version: int
    created_at: float
    updated_at: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What its kind needs to know beside the secret (a token URL, scopes, …): nothing secret, and part of what its
    envelopes are sealed to."""
    secret_source: Mapping[str, str] | None = None
    """Where its secret is read from: `{"source": …, "name": …}`. None: the secret is kept here."""
    max_stale_seconds: float = 0.0
    """How long a value may still be used after where it comes from stopped answering."""
    allow_direct: bool = False
    """Whether an exchange may hand out the secret itself, the other conditions holding too."""

    def reaches(self, endpoint: Endpoint) -> bool:
        return any(destination.endpoint == endpoint for destination in self.destinations)

    def is_at(self, host: str) -> bool:
        """Whether it has a destination at this (canonical) host, by whatever scheme and port."""
        return any(destination.endpoint.host == host for destination in self.destinations)


class SourceKind(StrEnum):
    """Where secrets may be read from."""

    FILE = "file"
    VAULT = "vault"
    AWS_SECRETS_MANAGER = "aws_secrets_manager"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True, slots=True)
class Source:
    """A place that secrets are read from. It belongs to the platform; tenants name things inside it."""

    name: str
    kind: SourceKind
    settings: Mapping[str, Any]
    """Address and authentication, as its kind has them (`core.sources`). Nothing secret: secrets are named files."""
    path_template: str
    ttl_seconds: float
    """How long a value counts as fresh after it was read."""
    tenants: tuple[str, ...] | None
    """Whose administrators may name it. None: as its kind has it (`core.sources.may_name`)."""
    seal: bytes
    """An envelope around nothing, bound to all of the above: a row edited in the database does not open."""
    kek_id: str
    created_at: float
    updated_at: float


class VersionState(StrEnum):
    """`active` is the one in use, and there is never more than one. Which may follow which: `core.rotation.LEGAL`."""

    PENDING = "pending"
    """Submitted, not in general use: it is being tried."""
    ACTIVE = "active"
    RETIRING = "retiring"
    """No longer used, still kept: a rotation may go back to it."""
    RETIRED = "retired"
    """Over: its envelope is gone."""
    REVOKED = "revoked"
    """Over because it was compromised; its envelope is gone."""


@dataclass(frozen=True, slots=True)
class CredentialVersion:
    credential_id: CredentialId
    version: int
    tenant: TenantId
    state: VersionState
    kek_id: str | None
    envelope: bytes | None
    created_at: float


class MintingState(StrEnum):
    """How the last question to a provider ended."""

    NEW = "new"
    READY = "ready"
    FAILING = "failing"
    """It does not answer, or nothing usable. Asked again soon."""
    REJECTED = "rejected"
    """It says no. Asked again, ever more rarely."""
    CONSENT_LOST = "consent_lost"
    """The secret may have been used up by a question whose answer nobody heard. Not asked again."""


@dataclass(frozen=True, slots=True)
class MintedValue:
    """What was minted for one version of a credential, and the right to mint more."""

    credential_id: CredentialId
    version: int
    tenant: TenantId
    fence: int
    """Counts the leases. Who has a lower one has lost its lease."""
    leased_until: float
    asked_fence: int | None
    """Of a question that was sent and whose answer is not written. None: no answer is awaited."""
    state: MintingState
    reason: str
    """Why not, as a code (`core.minting.REASONS`)."""
    failures: int
    """In a row."""
    retry_at: float
    replaces_secret: bool | None
    """Whether the provider's last answer came with a new secret. None: it has not answered yet."""
    kek_id: str | None
    envelope: bytes | None
    minted_at: float
    expires_at: float | None
    """As the provider said."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Who may use a credential. Exactly one of `subject` and `role` is set."""

    id: GrantId
    tenant: TenantId
    credential_id: CredentialId
    subject: SubjectId | None
    role: str | None
    client: ClientId | None
    methods: frozenset[str] | None
    path_prefixes: frozenset[str] | None
    until: float | None
    created_at: float

    def applies_to(self, *, subject: SubjectId, roles: tuple[str, ...], client: ClientId) -> bool:
        if self.client is not None and self.client != client:
            return False
        if self.subject is not None:
            return self.subject == subject
        return self.role is not None and self.role in roles

    @property
    def scope(self) -> GrantScope:
        return GrantScope(methods=self.methods, path_prefixes=self.path_prefixes, until=self.until)


@dataclass(frozen=True, slots=True)
class TenantAllowRule:
    id: str
    tenant: TenantId
    host: str
    port: int | None
    methods: frozenset[str] | None
    allow_private: bool
    session: SessionId | None
    """Set: the rule lives and dies with this session."""
    created_at: float
    tunnel: bool = False

    @property
    def rule(self) -> AllowRule:
        return AllowRule(self.host, self.port, self.methods, self.allow_private, self.id, self.tunnel)


@dataclass(frozen=True, slots=True)
class Session:
    id: SessionId
    tenant: TenantId
    subject: SubjectId
    roles: tuple[str, ...]
    runtime: ClientId
    joined_by: ClientId | None
    created_at: float
    not_after: float
    ended_at: float | None
    act: Chain = ()
    """Who opened it on the subject's behalf, and so acts in it."""
    may_act: Mapping[str, Any] | None = None
    """Who may act for the subject besides (RFC 8693 §4.4). None: nobody."""
    erased_at: float | None = None
    """When its runtime said that it has forgotten all that it kept of it."""

    def is_live(self, now: float) -> bool:
        return self.ended_at is None and now < self.not_after


class TokenKind(StrEnum):
    PLACEHOLDER = "placeholder"
    PROXY_CREDENTIAL = "proxy_credential"
    DIRECT = "direct"
    """A key that was handed out itself. Its fingerprint is of the token it was given for, so that it is given once."""


@dataclass(frozen=True, slots=True)
class Token:
    """A placeholder or a proxy credential, known by its fingerprint alone."""

    sha256: str
    id: PlaceholderId
    kind: TokenKind
    tenant: TenantId
    subject: SubjectId
    session: SessionId | None
    client: ClientId
    credential_id: CredentialId | None
    """None for a proxy credential, and for a placeholder whose credential was deleted."""
    ttl_seconds: int
    created_at: float
    expires_at: float
    revoked_at: float | None
    scope: str = ""
    """What it is narrowed to beyond its grants (`core.scopes`). Empty: nothing more."""
    act: Chain = ()
    """Who acts with it for the subject."""
    suspended_until: float | None = None
    """Until then it is answered with a "no", because its secret kept coming back in replies."""

    @property
    def caller(self) -> Caller:
        return Caller(client=self.client, tenant=self.tenant, subject=self.subject, session=self.session)


class KeyPurpose(StrEnum):
    SIGNING = "signing"
    """Ed25519, signs session tokens."""
    TAG = "tag"
    """HMAC key of placeholder tags."""
    AUDIT = "audit"
    """Ed25519, signs the heads of the audit trail's chains and nothing else."""
    WEBHOOK = "webhook"
    """What the secrets of alarm hooks are derived from."""


@dataclass(frozen=True, slots=True)
class OwnKey:
    id: str
    purpose: KeyPurpose
    envelope: bytes
    kek_id: str
    created_at: float
    in_use_from: float = 0.0
    """When it begins to sign or mint. It is known before that, and kept for as long as anything that it made lives."""


@dataclass(frozen=True, slots=True)
class Injector:
    """A proxy that swaps placeholders: while one is registered, no key is ever handed out."""

    id: ClientId
    registered_at: float
    seen_at: float


@dataclass(frozen=True, slots=True)
class Use:
    """That a subject's placeholder of a credential was swapped, and when last."""

    tenant: TenantId
    subject: SubjectId
    client: ClientId
    credential_id: CredentialId
    host: str
    last_used_at: float
    requests: int


@dataclass(frozen=True, slots=True)
class NewUse:
    """Requests that a proxy reports: by names, as its audit events have them."""

    tenant: TenantId
    subject: SubjectId
    client: ClientId
    credential: str
    host: str
    at: float
    requests: int


@dataclass(frozen=True, slots=True)
class KnownKek:
    """A key-encryption key that some replica has had in its ring."""

    id: str
    provider: str
    first_seen_at: float
    retired_at: float | None
    """Set: it seals nothing any more, and may be taken away."""
    place: str = ""
    """Where a replica had it last, for people: a file's path, a key's name elsewhere."""


@dataclass(frozen=True, slots=True)
class Rewrap:
    """One run over everything that is sealed: data keys come under `target`. At most one is unfinished."""

    id: str
    target: str
    started_at: float
    started_by: str
    total: int
    """Envelopes under other keys when it began."""
    rewrapped: int
    unopenable: int
    """Of the last pass: envelopes that do not open, and so stay as they are."""
    runner: str | None
    """The replica that works on it, as long as `moved_at` is young."""
    moved_at: float
    finished_at: float | None


class ChangeKind(StrEnum):
    """What an outbox row is about (`contract.wire.Event.kind`)."""

    PLACEHOLDER = "placeholder"
    SESSION = "session"
    GRANT = "grant"
    CREDENTIAL = "credential"
    POLICY = "policy"
    TENANT = "tenant"
    PROXY_CREDENTIAL = "proxy_credential"
    TAG_KEYS = "tag_keys"


@dataclass(frozen=True, slots=True)
class Change:
    """One change, to be told to every proxy. `id` is of what changed; for a proxy credential its SHA-256."""

    kind: ChangeKind
    tenant: TenantId
    id: str
    revoked: bool = False


NO_TENANT: Final = TenantId("")
"""Of a change that is no tenant's."""


@dataclass(frozen=True, slots=True)
class PublishedChange:
    sequence: int
    change: Change


class RotationPhase(StrEnum):
    """Where a rotation is (`core.rotation`)."""

    PROBING = "probing"
    """The new value is tried against its upstream; nobody else uses it."""
    CANARY = "canary"
    """Some subjects use the new version, the others the old one."""
    OVERLAP = "overlap"
    """Everybody uses the new version; the old one is kept, to go back to."""
    COMPLETED = "completed"
    ROLLED_BACK = "rolled_back"
    CANCELLED = "cancelled"
    OVERTAKEN = "overtaken"
    """Something else put its versions out of use: a compromised secret, a change of where the secret may go."""


RUNNING_PHASES = frozenset({RotationPhase.PROBING, RotationPhase.CANARY, RotationPhase.OVERLAP})


class ProbeResult(StrEnum):
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The latest rotation of a credential: under way, or how it ended."""

    credential_id: CredentialId
    tenant: TenantId
    id: str
    phase: RotationPhase
    old_version: int | None
    """None: nothing was in use."""
    new_version: int
    probes: bool
    proceeds_unproven: bool
    """The operator goes on also where a probe gives no answer."""
    canary_percent: int
    canary_seconds: float
    canary_key: str
    """32 bytes in hex: subjects are chosen by a hash under it."""
    overlap_seconds: float
    started_at: float
    since: float
    """When its step began."""
    ends_at: float | None
    """When its step ends by itself."""
    started_by: str
    probe_sha256: str | None = None
    """Fingerprint of the placeholder that stands for the pending version."""
    probe_due_at: float | None = None
    """Whoever looks after this moment tries (again): whoever was at it is gone."""
    probe_result: ProbeResult | None = None
    probe_status: int | None = None
    probe_detail: str = ""
    reason: str = ""
    """Why it ended as it did."""

    @property
    def is_running(self) -> bool:
        return self.phase in RUNNING_PHASES


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of what may be used in each window of time. Windows follow each other without a gap, from 1970 on."""

    id: str
    tenant: TenantId
    credential_id: CredentialId | None
    """None: all credentials of the tenant together."""
    subject: SubjectId | None
    """None: every subject."""
    each_subject: bool
    """Every subject has the whole amount for itself. Otherwise all that it applies to share it."""
    measure: Measure
    amount: int
    window_seconds: int
    created_at: float

    def applies_to(self, *, subject: SubjectId, credential: CredentialId) -> bool:
        return self.credential_id in (None, credential) and self.subject in (None, subject)

    def bound(self, subject: SubjectId) -> BoundLimit:
        """As a proxy gets to know it. A subject's bucket does not show who the subject is."""
        bucket = hashlib.sha256(subject.encode("utf-8", "surrogatepass")).hexdigest()[:32] if self.each_subject else ""
        return BoundLimit(self.id, self.measure, self.amount, self.window_seconds, bucket)

    def window(self, now: float) -> tuple[int, float]:
        """The number of the window that runs now, and in how many seconds it ends."""
        number = int(now // self.window_seconds)
        return number, (number + 1) * self.window_seconds - now


@dataclass(frozen=True, slots=True)
class RotationSchedule:
    """How old a credential's secret may become, and what is done about it."""

    credential_id: CredentialId
    tenant: TenantId
    every_seconds: float
    remind_seconds: float
    """So long before it is due it is said that it will be."""
    hook: Mapping[str, Any] | None
    """Who makes a new value (`{"kind": …}`). None: people do, and are reminded."""
    probes: bool
    proceeds_unproven: bool
    canary_percent: int
    canary_seconds: float
    overlap_seconds: float
    look_at: float
    """When somebody has to look again."""
    created_at: float
    attempt: str | None = None
    """Names what was asked of the hook and not yet answered: asked again, it is the same question."""
    unsettled_rotation: str | None = None
    """A rotation of the hook's that is not put away yet."""
    hook_state: Mapping[str, str] = field(default_factory=dict)
    """What the hook has to know to put it away; nothing secret."""
    forgiven_rotation: str | None = None
    """One that failed, after which an operator said to go on."""
    last_failure: str = ""
    """Why the hook gave nothing when it was last asked."""
