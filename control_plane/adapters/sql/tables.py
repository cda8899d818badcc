"""The tables. Every row carries its tenant; whatever belongs to somebody carries its owner (`subject`).

Rule: no plaintext secret and no placeholder ever stands in a row, only ciphertext (`envelope`) and SHA-256
fingerprints. Times are unix seconds as floats, so that SQLite and PostgreSQL compare them alike. A changed table needs
a migration (`control_plane/migrations`).
"""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SEQUENCE = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite numbers rows by itself only where the column is spelt INTEGER."""


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {dict[str, Any]: JSON, list[str]: JSON, list[dict[str, Any]]: JSON}  # noqa: RUF012 (SQLAlchemy's own spelling)


class TenantRow(Base):
    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float] = mapped_column(Float)


class ClientRow(Base):
    """A registered workload. `tenant` is None where it serves all tenants (a proxy, a shared runtime)."""

    __tablename__ = "clients"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    scopes: Mapped[list[str]]
    secret_sha256: Mapped[str] = mapped_column(String(64))
    source: Mapped[str] = mapped_column(String(8))
    created_at: Mapped[float] = mapped_column(Float)
    proofs: Mapped[dict[str, Any]]
    """How it proves itself beside a secret (`ClientProofs`)."""
    workload_issuer: Mapped[str | None] = mapped_column(String(40), index=True)
    certificate_name: Mapped[str | None] = mapped_column(String(600), unique=True)
    """From `proofs`, to be looked up by: an issuer's name, and a certificate's digest or name."""
    subject: Mapped[str | None] = mapped_column(String(255))


class CredentialRow(Base):
    __tablename__ = "credentials"
    __table_args__ = (UniqueConstraint("tenant", "name"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(40))
    preset: Mapped[str | None] = mapped_column(String(40))
    kind: Mapped[str] = mapped_column(String(40))
    destinations: Mapped[list[dict[str, Any]]]
    placements: Mapped[list[dict[str, Any]]]
    variables: Mapped[list[str]]
    """Environment variables that a child gets the placeholder in."""
    credential_required: Mapped[bool] = mapped_column(Boolean)
    current_version: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)
    updated_at: Mapped[float] = mapped_column(Float)
    settings: Mapped[dict[str, Any]]
    secret_source: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    max_stale_seconds: Mapped[float] = mapped_column(Float)
    allow_direct: Mapped[bool] = mapped_column(Boolean)


class CredentialVersionRow(Base):
    """One value of a credential. Its envelope's AAD binds tenant, credential, version and where the secret may go."""

    __tablename__ = "credential_versions"
    __table_args__ = (
        # Whatever goes wrong above: one version is in use, never two.
        Index(
            "ix_credential_versions_active",
            "credential_id",
            unique=True,
            sqlite_where=text("state = 'active'"),
            postgresql_where=text("state = 'active'"),
        ),
    )
    credential_id: Mapped[str] = mapped_column(ForeignKey("credentials.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    kek_id: Mapped[str | None] = mapped_column(String(32), index=True)
    envelope: Mapped[bytes | None] = mapped_column(LargeBinary)
    """None once the version is over: what is no longer used is no longer kept."""
    created_at: Mapped[float] = mapped_column(Float)


class RotationRow(Base):
    """A credential's latest rotation: under way, or how it ended. What was before stands in the trail."""

    __tablename__ = "rotations"
    credential_id: Mapped[str] = mapped_column(ForeignKey("credentials.id", ondelete="CASCADE"), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    id: Mapped[str] = mapped_column(String(64))
    phase: Mapped[str] = mapped_column(String(16), index=True)
    old_version: Mapped[int | None] = mapped_column(Integer)
    new_version: Mapped[int] = mapped_column(Integer)
    probes: Mapped[bool] = mapped_column(Boolean)
    proceeds_unproven: Mapped[bool] = mapped_column(Boolean)
    canary_percent: Mapped[int] = mapped_column(Integer)
    canary_seconds: Mapped[float] = mapped_column(Float)
    canary_key: Mapped[str] = mapped_column(String(64))
    overlap_seconds: Mapped[float] = mapped_column(Float)
    started_at: Mapped[float] = mapped_column(Float)
    since: Mapped[float] = mapped_column(Float)
    ends_at: Mapped[float | None] = mapped_column(Float)
    started_by: Mapped[str] = mapped_column(String(255))
    probe_sha256: Mapped[str | None] = mapped_column(String(64))
    probe_due_at: Mapped[float | None] = mapped_column(Float)
    probe_result: Mapped[str | None] = mapped_column(String(16))
    probe_status: Mapped[int | None] = mapped_column(Integer)
    probe_detail: Mapped[str] = mapped_column(String(255))
    reason: Mapped[str] = mapped_column(String(255))


class RotationScheduleRow(Base):
    """How old a credential's secret may become, and what is done about it."""

    __tablename__ = "rotation_schedules"
    credential_id: Mapped[str] = mapped_column(ForeignKey("credentials.id", ondelete="CASCADE"), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    every_seconds: Mapped[float] = mapped_column(Float)
    remind_seconds: Mapped[float] = mapped_column(Float)
    hook: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    probes: Mapped[bool] = mapped_column(Boolean)
    proceeds_unproven: Mapped[bool] = mapped_column(Boolean)
    canary_percent: Mapped[int] = mapped_column(Integer)
    canary_seconds: Mapped[float] = mapped_column(Float)
    overlap_seconds: Mapped[float] = mapped_column(Float)
    look_at: Mapped[float] = mapped_column(Float, index=True)
    created_at: Mapped[float] = mapped_column(Float)
    attempt: Mapped[str | None] = mapped_column(String(64))
    unsettled_rotation: Mapped[str | None] = mapped_column(String(64))
    hook_state: Mapped[dict[str, Any]]
    forgiven_rotation: Mapped[str | None] = mapped_column(String(64))
    last_failure: Mapped[str] = mapped_column(String(255))


class RotationReplyRow(Base):
    """How often an upstream answered a version, of one subject, in one span of time. Only while it is rotated."""

    __tablename__ = "rotation_replies"
    credential_id: Mapped[str] = mapped_column(ForeignKey("credentials.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    subject_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    bucket: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    tenant: Mapped[str] = mapped_column(String(64))
    replies: Mapped[int] = mapped_column(Integer)
    failures: Mapped[int] = mapped_column(Integer)


class MintedRow(Base):
    """What a provider gave for a version, sealed, and the lease of whoever may ask it for more."""

    __tablename__ = "minted"
    credential_id: Mapped[str] = mapped_column(ForeignKey("credentials.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64))
    fence: Mapped[int] = mapped_column(BigInteger)
    leased_until: Mapped[float] = mapped_column(Float)
    asked_fence: Mapped[int | None] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(String(40))
    failures: Mapped[int] = mapped_column(Integer)
    retry_at: Mapped[float] = mapped_column(Float)
    replaces_secret: Mapped[bool | None] = mapped_column(Boolean)
    kek_id: Mapped[str | None] = mapped_column(String(32), index=True)
    envelope: Mapped[bytes | None] = mapped_column(LargeBinary)
    minted_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float | None] = mapped_column(Float)


class GrantRow(Base):
    """Who may use a credential. Exactly one of `subject` and `role` is set."""

    __tablename__ = "grants"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    credential_id: Mapped[str] = mapped_column(ForeignKey("credentials.id", ondelete="CASCADE"), index=True)
    subject: Mapped[str | None] = mapped_column(String(255))
    role: Mapped[str | None] = mapped_column(String(255))
    client: Mapped[str | None] = mapped_column(String(64))
    """None: through any client of the tenant."""
    methods: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    path_prefixes: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    until: Mapped[float | None] = mapped_column(Float)
    created_at: Mapped[float] = mapped_column(Float)


class AllowRuleRow(Base):
    """A host that a tenant's workloads may reach without a credential."""

    __tablename__ = "allow_rules"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    host: Mapped[str] = mapped_column(String(255))
    port: Mapped[int | None] = mapped_column(Integer)
    methods: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    allow_private: Mapped[bool] = mapped_column(Boolean)
    session: Mapped[str | None] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[float] = mapped_column(Float)
    tunnel: Mapped[bool] = mapped_column(Boolean)


class SessionRow(Base):
    __tablename__ = "sessions"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    subject: Mapped[str] = mapped_column(String(255))
    roles: Mapped[list[str]]
    runtime: Mapped[str] = mapped_column(String(64), index=True)
    """The client that may exchange for it."""
    joined_by: Mapped[str | None] = mapped_column(String(64))
    """The client that has exchanged one of its tokens, and so may use `subject_token=<sid>`."""
    created_at: Mapped[float] = mapped_column(Float)
    not_after: Mapped[float] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)
    """The tombstone: set once, never cleared."""
    act: Mapped[list[dict[str, Any]]]
    may_act: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    erased_at: Mapped[float | None] = mapped_column(Float)


class TokenRow(Base):
    """A placeholder (`kind` = placeholder) or a proxy credential (`kind` = proxy_credential), by fingerprint."""

    __tablename__ = "tokens"
    __table_args__ = (
        Index("ix_tokens_tenant_session", "tenant", "session"),
        # Few rows at a time, and every exchange asks whether there is one of its session.
        Index(
            "ix_tokens_suspended",
            "tenant",
            "session",
            sqlite_where=text("suspended_until IS NOT NULL"),
            postgresql_where=text("suspended_until IS NOT NULL"),
        ),
    )
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    kind: Mapped[str] = mapped_column(String(16))
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    subject: Mapped[str] = mapped_column(String(255))
    session: Mapped[str | None] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), index=True)
    client: Mapped[str] = mapped_column(String(64), index=True)
    credential_id: Mapped[str | None] = mapped_column(ForeignKey("credentials.id", ondelete="SET NULL"), index=True)
    ttl_seconds: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)
    expires_at: Mapped[float] = mapped_column(Float)
    revoked_at: Mapped[float | None] = mapped_column(Float)
    scope: Mapped[str] = mapped_column(String(1024))
    act: Mapped[list[dict[str, Any]]]
    suspended_until: Mapped[float | None] = mapped_column(Float)


class KeyRow(Base):
    """Our own keys: session-signing keys (`signing`) and placeholder tag keys (`tag`), sealed like any secret."""

    __tablename__ = "own_keys"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    purpose: Mapped[str] = mapped_column(String(16))
    envelope: Mapped[bytes] = mapped_column(LargeBinary)
    kek_id: Mapped[str] = mapped_column(String(32), index=True)
    created_at: Mapped[float] = mapped_column(Float)
    in_use_from: Mapped[float] = mapped_column(Float)


class InjectorRow(Base):
    """A proxy that registered. The platform's, no tenant's; only an administrator takes one out."""

    __tablename__ = "injectors"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    registered_at: Mapped[float] = mapped_column(Float)
    seen_at: Mapped[float] = mapped_column(Float)


class UseRow(Base):
    """When a subject last used a credential, through which client and at which host."""

    __tablename__ = "uses"
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    subject: Mapped[str] = mapped_column(String(255), primary_key=True)
    client: Mapped[str] = mapped_column(String(64), primary_key=True)
    credential_id: Mapped[str] = mapped_column(
        ForeignKey("credentials.id", ondelete="CASCADE"), primary_key=True, index=True
    )
    host: Mapped[str] = mapped_column(String(255), primary_key=True)
    last_used_at: Mapped[float] = mapped_column(Float)
    requests: Mapped[int] = mapped_column(BigInteger)


class IssuerRow(Base):
    """An issuer whose tokens are believed. No tenant's: the platform's administrator says whom to believe."""

    __tablename__ = "issuers"
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    issuer: Mapped[str] = mapped_column(String(512), unique=True)
    definition: Mapped[dict[str, Any]]
    """The whole `TrustedIssuer` as JSON."""


class UsedAssertionRow(Base):
    """A client's one-time assertion (RFC 7523), by fingerprint, until it would be over anyway."""

    __tablename__ = "used_assertions"
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    expires_at: Mapped[float] = mapped_column(Float, index=True)


class SourceRow(Base):
    """A place that secrets are read from: the platform's. `seal` binds every fact of the row."""

    __tablename__ = "sources"
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    kind: Mapped[str] = mapped_column(String(24))
    settings: Mapped[dict[str, Any]]
    path_template: Mapped[str] = mapped_column(String(512))
    ttl_seconds: Mapped[float] = mapped_column(Float)
    tenants: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    seal: Mapped[bytes] = mapped_column(LargeBinary)
    kek_id: Mapped[str] = mapped_column(String(32), index=True)
    created_at: Mapped[float] = mapped_column(Float)
    updated_at: Mapped[float] = mapped_column(Float)


class KekRow(Base):
    """A key-encryption key that some replica has had in its ring. Never the key."""

    __tablename__ = "keks"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    provider: Mapped[str] = mapped_column(String(24))
    first_seen_at: Mapped[float] = mapped_column(Float)
    retired_at: Mapped[float | None] = mapped_column(Float)
    place: Mapped[str] = mapped_column(String(512), server_default="")


class RewrapRow(Base):
    __tablename__ = "rewraps"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    target: Mapped[str] = mapped_column(String(32))
    started_at: Mapped[float] = mapped_column(Float)
    started_by: Mapped[str] = mapped_column(String(255))
    total: Mapped[int] = mapped_column(Integer)
    rewrapped: Mapped[int] = mapped_column(Integer)
    unopenable: Mapped[int] = mapped_column(Integer)
    runner: Mapped[str | None] = mapped_column(String(64))
    moved_at: Mapped[float] = mapped_column(Float)
    finished_at: Mapped[float | None] = mapped_column(Float)


class OutboxRow(Base):
    """One change, written in the transaction that made it. The sequence is what `as_of` refers to."""

    __tablename__ = "outbox"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012 (a sequence that never goes back, even after deletion)
    sequence: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(Float)
    tenant: Mapped[str] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(24))
    subject_id: Mapped[str] = mapped_column(String(64))
    """Id of what changed (`Event.id`)."""
    revoked: Mapped[bool] = mapped_column(Boolean)


class AuditRow(Base):
    __tablename__ = "audit_events"
    __table_args__ = (
        Index("ix_audit_events_tenant_sequence", "tenant", "sequence"),
        # Of the few events in which a secret came back, so that they are counted without reading the others.
        Index(
            "ix_audit_events_leaks",
            "tenant",
            "at",
            sqlite_where=text("action = 'leak_blocked'"),
            postgresql_where=text("action = 'leak_blocked'"),
        ),
        {"sqlite_autoincrement": True},
    )
    sequence: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=True)
    event_id: Mapped[str] = mapped_column(String(64), unique=True)
    at: Mapped[float] = mapped_column(Float)
    tenant: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str] = mapped_column(String(64), index=True)
    action: Mapped[str] = mapped_column(String(32))
    code: Mapped[str | None] = mapped_column(String(40))
    record: Mapped[dict[str, Any]]
    """The whole `AuditEvent` as JSON."""


class LimitRow(Base):
    """How much of what may be used in a window of time."""

    __tablename__ = "limits"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    credential_id: Mapped[str | None] = mapped_column(ForeignKey("credentials.id", ondelete="CASCADE"), index=True)
    subject: Mapped[str | None] = mapped_column(String(255))
    each_subject: Mapped[bool] = mapped_column(Boolean)
    measure: Mapped[str] = mapped_column(String(16))
    amount: Mapped[int] = mapped_column(BigInteger)
    window_seconds: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)


class LimitUsageRow(Base):
    """What of a limit was given out in one window, to whatever proxies."""

    __tablename__ = "limit_usage"
    limit_id: Mapped[str] = mapped_column(ForeignKey("limits.id", ondelete="CASCADE"), primary_key=True)
    bucket: Mapped[str] = mapped_column(String(32), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    tenant: Mapped[str] = mapped_column(String(64))
    granted: Mapped[int] = mapped_column(BigInteger)
    over_at: Mapped[float] = mapped_column(Float, index=True)
    """When the window of that number ends."""


class AlarmRow(Base):
    """One placeholder in the hands of one caller, in one window (`core.alarms.Alarm`)."""

    __tablename__ = "alarms"
    __table_args__ = (
        UniqueConstraint("placeholder_id", "caller_key", "window_number"),
        Index("ix_alarms_tenant_first_at", "tenant", "first_at"),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(24))
    placeholder_id: Mapped[str] = mapped_column(String(64))
    credential: Mapped[str | None] = mapped_column(String(255))
    caller_key: Mapped[str] = mapped_column(String(64))
    window_number: Mapped[int] = mapped_column(BigInteger)
    caller_tenant: Mapped[str] = mapped_column(String(64))
    client: Mapped[str] = mapped_column(String(255))
    subject: Mapped[str] = mapped_column(String(255))
    session: Mapped[str | None] = mapped_column(String(64))
    host: Mapped[str | None] = mapped_column(String(255))
    first_at: Mapped[float] = mapped_column(Float)
    last_at: Mapped[float] = mapped_column(Float, index=True)
    count: Mapped[int] = mapped_column(BigInteger)
    revoked: Mapped[bool] = mapped_column(Boolean)


class AlarmHookRow(Base):
    """Where alarms are told. `tenant` is None where it is told those of every tenant."""

    __tablename__ = "alarm_hooks"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    url: Mapped[str] = mapped_column(String(2048))
    key_id: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[float] = mapped_column(Float)


class AlarmDeliveryRow(Base):
    """One alarm on its way to one hook."""

    __tablename__ = "alarm_deliveries"
    alarm_id: Mapped[str] = mapped_column(ForeignKey("alarms.id", ondelete="CASCADE"), primary_key=True)
    hook_id: Mapped[str] = mapped_column(ForeignKey("alarm_hooks.id", ondelete="CASCADE"), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64))
    attempts: Mapped[int] = mapped_column(Integer)
    due_at: Mapped[float] = mapped_column(Float, index=True)
    done_at: Mapped[float | None] = mapped_column(Float)
    error: Mapped[str | None] = mapped_column(String(64))


class AlarmSettingsRow(Base):
    """What a tenant wants done because of an alarm."""

    __tablename__ = "alarm_settings"
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    revoke_on_mismatch: Mapped[bool] = mapped_column(Boolean)


class DecoyRow(Base):
    """A placeholder that only ever alarms, by its fingerprint."""

    __tablename__ = "decoys"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    preset: Mapped[str | None] = mapped_column(String(40))
    note: Mapped[str] = mapped_column(String(255))
    created_at: Mapped[float] = mapped_column(Float)
    used_at: Mapped[float | None] = mapped_column(Float)


class AuditUnchainedRow(Base):
    """An event that is in no batch of its chain yet. Filled by a trigger with every row of `audit_events`."""

    __tablename__ = "audit_unchained"
    sequence: Mapped[int] = mapped_column(SEQUENCE, primary_key=True, autoincrement=False)
    tenant: Mapped[str | None] = mapped_column(String(64))


class AuditHeadRow(Base):
    """The signed end of one batch of events (`core.chain.Head`). `trail` is the tenant, or empty for events of none."""

    __tablename__ = "audit_heads"
    __table_args__ = (Index("ix_audit_heads_trail_last", "trail", "last"),)
    trail: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    tenant: Mapped[str | None] = mapped_column(String(64))
    first: Mapped[int] = mapped_column(BigInteger)
    last: Mapped[int] = mapped_column(BigInteger)
    leaves: Mapped[bytes] = mapped_column(LargeBinary)
    """32 bytes an event."""
    sequences: Mapped[list[int]] = mapped_column(JSON)
    """Which rows of `audit_events` they are, in their order."""
    previous: Mapped[str] = mapped_column(String(64))
    at: Mapped[float] = mapped_column(Float, index=True)
    key_id: Mapped[str] = mapped_column(String(32))
    signature: Mapped[str] = mapped_column(String(128))


class AuditAnchorRow(Base):
    """Stands for the beginning of a chain that retention removed (`core.chain.Anchor`)."""

    __tablename__ = "audit_anchors"
    trail: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str | None] = mapped_column(String(64))
    number: Mapped[int] = mapped_column(BigInteger)
    position: Mapped[int] = mapped_column(BigInteger)
    head: Mapped[str] = mapped_column(String(64))
    at: Mapped[float] = mapped_column(Float)
    key_id: Mapped[str] = mapped_column(String(32))
    signature: Mapped[str] = mapped_column(String(128))


class MetaRow(Base):
    """Facts about this database: `epoch` (changes when sequences stop being comparable)."""

    __tablename__ = "meta"
    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    value: Mapped[str] = mapped_column(String(255))
