"""The first tables: tenants, clients, credentials, grants, sessions, tokens, keys, outbox, audit."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_events",
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("event_id", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=True),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=32), nullable=False),
        sa.Column("code", sa.String(length=40), nullable=True),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_audit_events")),
        sa.UniqueConstraint("event_id", name=op.f("uq_audit_events_event_id")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("audit_events", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_audit_events_request_id"), ["request_id"], unique=False)
        batch_op.create_index("ix_audit_events_tenant_sequence", ["tenant", "sequence"], unique=False)

    op.create_table(
        "meta",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.String(length=255), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_meta")),
    )
    op.create_table(
        "outbox",
        sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=24), nullable=False),
        sa.Column("subject_id", sa.String(length=64), nullable=False),
        sa.Column("revoked", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_outbox")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "own_keys",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("kek_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_own_keys")),
    )
    with op.batch_alter_table("own_keys", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_own_keys_kek_id"), ["kek_id"], unique=False)

    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
    )
    op.create_table(
        "clients",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("source", sa.String(length=8), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_clients_tenant_tenants"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_clients")),
    )
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_clients_tenant"), ["tenant"], unique=False)

    op.create_table(
        "credentials",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("preset", sa.String(length=40), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("destinations", sa.JSON(), nullable=False),
        sa.Column("placements", sa.JSON(), nullable=False),
        sa.Column("variables", sa.JSON(), nullable=False),
        sa.Column("credential_required", sa.Boolean(), nullable=False),
        sa.Column("current_version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_credentials_tenant_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credentials")),
        sa.UniqueConstraint("tenant", "name", name=op.f("uq_credentials_tenant_name")),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("roles", sa.JSON(), nullable=False),
        sa.Column("runtime", sa.String(length=64), nullable=False),
        sa.Column("joined_by", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("not_after", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_sessions_tenant_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_sessions_tenant"), ["tenant"], unique=False)

    op.create_table(
        "allow_rules",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("port", sa.Integer(), nullable=True),
        sa.Column("methods", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("allow_private", sa.Boolean(), nullable=False),
        sa.Column("session", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session"], ["sessions.id"], name=op.f("fk_allow_rules_session_sessions"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_allow_rules_tenant_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_allow_rules")),
    )
    with op.batch_alter_table("allow_rules", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_allow_rules_session"), ["session"], unique=False)
        batch_op.create_index(batch_op.f("ix_allow_rules_tenant"), ["tenant"], unique=False)

    op.create_table(
        "credential_versions",
        sa.Column("credential_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("kek_id", sa.String(length=32), nullable=True),
        sa.Column("envelope", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["credential_id"],
            ["credentials.id"],
            name=op.f("fk_credential_versions_credential_id_credentials"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("credential_id", "version", name=op.f("pk_credential_versions")),
    )
    with op.batch_alter_table("credential_versions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_credential_versions_kek_id"), ["kek_id"], unique=False)

    op.create_table(
        "grants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("credential_id", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=True),
        sa.Column("role", sa.String(length=255), nullable=True),
        sa.Column("client", sa.String(length=64), nullable=True),
        sa.Column("methods", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("path_prefixes", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("until", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["credential_id"], ["credentials.id"], name=op.f("fk_grants_credential_id_credentials"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_grants")),
    )
    with op.batch_alter_table("grants", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_grants_credential_id"), ["credential_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_grants_tenant"), ["tenant"], unique=False)

    op.create_table(
        "tokens",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("session", sa.String(length=64), nullable=True),
        sa.Column("client", sa.String(length=64), nullable=False),
        sa.Column("credential_id", sa.String(length=64), nullable=True),
        sa.Column("ttl_seconds", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["credential_id"], ["credentials.id"], name=op.f("fk_tokens_credential_id_credentials"), ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(
            ["session"], ["sessions.id"], name=op.f("fk_tokens_session_sessions"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_tokens_tenant_tenants"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_tokens")),
        sa.UniqueConstraint("id", name=op.f("uq_tokens_id")),
    )
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_tokens_client"), ["client"], unique=False)
        batch_op.create_index(batch_op.f("ix_tokens_credential_id"), ["credential_id"], unique=False)
        batch_op.create_index("ix_tokens_tenant_session", ["tenant", "session"], unique=False)


def downgrade() -> None:
    for table in (
        "tokens",
        "grants",
        "credential_versions",
        "allow_rules",
        "sessions",
        "credentials",
        "clients",
        "tenants",
        "own_keys",
        "outbox",
        "meta",
        "audit_events",
    ):
        op.drop_table(table)
