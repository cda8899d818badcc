"""Alarms, where they are told, and decoys."""

import sqlalchemy as sa
from alembic import op

from control_plane.migrations.rls import protect

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "alarms",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=24), nullable=False),
        sa.Column("placeholder_id", sa.String(length=64), nullable=False),
        sa.Column("credential", sa.String(length=255), nullable=True),
        sa.Column("caller_key", sa.String(length=64), nullable=False),
        sa.Column("window_number", sa.BigInteger(), nullable=False),
        sa.Column("caller_tenant", sa.String(length=64), nullable=False),
        sa.Column("client", sa.String(length=255), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("session", sa.String(length=64), nullable=True),
        sa.Column("host", sa.String(length=255), nullable=True),
        sa.Column("first_at", sa.Float(), nullable=False),
        sa.Column("last_at", sa.Float(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("revoked", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_alarms_tenant_tenants"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alarms")),
        sa.UniqueConstraint(
            "placeholder_id",
            "caller_key",
            "window_number",
            name=op.f("uq_alarms_placeholder_id_caller_key_window_number"),
        ),
    )
    op.create_index("ix_alarms_tenant_first_at", "alarms", ["tenant", "first_at"], unique=False)
    op.create_index(op.f("ix_alarms_last_at"), "alarms", ["last_at"], unique=False)
    op.create_table(
        "alarm_hooks",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=True),
        sa.Column("url", sa.String(length=2048), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_alarm_hooks_tenant_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alarm_hooks")),
    )
    op.create_index(op.f("ix_alarm_hooks_tenant"), "alarm_hooks", ["tenant"], unique=False)
    op.create_table(
        "alarm_deliveries",
        sa.Column("alarm_id", sa.String(length=64), nullable=False),
        sa.Column("hook_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.Float(), nullable=False),
        sa.Column("done_at", sa.Float(), nullable=True),
        sa.Column("error", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(
            ["alarm_id"], ["alarms.id"], name=op.f("fk_alarm_deliveries_alarm_id_alarms"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["hook_id"], ["alarm_hooks.id"], name=op.f("fk_alarm_deliveries_hook_id_alarm_hooks"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("alarm_id", "hook_id", name=op.f("pk_alarm_deliveries")),
    )
    op.create_index(op.f("ix_alarm_deliveries_due_at"), "alarm_deliveries", ["due_at"], unique=False)
    op.create_table(
        "alarm_settings",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("revoke_on_mismatch", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_alarm_settings_tenant_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_alarm_settings")),
    )
    op.create_table(
        "decoys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("preset", sa.String(length=40), nullable=True),
        sa.Column("note", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_decoys_tenant_tenants"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decoys")),
        sa.UniqueConstraint("sha256", name=op.f("uq_decoys_sha256")),
    )
    op.create_index(op.f("ix_decoys_tenant"), "decoys", ["tenant"], unique=False)
    for table in ("alarms", "alarm_hooks", "alarm_deliveries", "alarm_settings", "decoys"):
        protect(op, table)
