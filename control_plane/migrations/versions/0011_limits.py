"""Limits, and what was given out of each in a window of time."""

import sqlalchemy as sa
from alembic import op

from control_plane.migrations.rls import protect

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "limits",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("credential_id", sa.String(length=64), nullable=True),
        sa.Column("subject", sa.String(length=255), nullable=True),
        sa.Column("each_subject", sa.Boolean(), nullable=False),
        sa.Column("measure", sa.String(length=16), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("window_seconds", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["credential_id"], ["credentials.id"], name=op.f("fk_limits_credential_id_credentials"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_limits_tenant_tenants"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_limits")),
    )
    op.create_index(op.f("ix_limits_tenant"), "limits", ["tenant"], unique=False)
    op.create_index(op.f("ix_limits_credential_id"), "limits", ["credential_id"], unique=False)
    op.create_table(
        "limit_usage",
        sa.Column("limit_id", sa.String(length=64), nullable=False),
        sa.Column("bucket", sa.String(length=32), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("granted", sa.BigInteger(), nullable=False),
        sa.Column("over_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["limit_id"], ["limits.id"], name=op.f("fk_limit_usage_limit_id_limits"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("limit_id", "bucket", "number", name=op.f("pk_limit_usage")),
    )
    op.create_index(op.f("ix_limit_usage_over_at"), "limit_usage", ["over_at"], unique=False)
    protect(op, "limits")
    protect(op, "limit_usage")
