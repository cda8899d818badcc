"""Rotations under way, and the replies that are counted while they last."""

import sqlalchemy as sa
from alembic import op

from control_plane.migrations.rls import protect

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_credential_versions_active",
        "credential_versions",
        ["credential_id"],
        unique=True,
        sqlite_where=sa.text("state = 'active'"),
        postgresql_where=sa.text("state = 'active'"),
    )
    op.create_table(
        "rotations",
        sa.Column("credential_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("old_version", sa.Integer(), nullable=True),
        sa.Column("new_version", sa.Integer(), nullable=False),
        sa.Column("probes", sa.Boolean(), nullable=False),
        sa.Column("proceeds_unproven", sa.Boolean(), nullable=False),
        sa.Column("canary_percent", sa.Integer(), nullable=False),
        sa.Column("canary_seconds", sa.Float(), nullable=False),
        sa.Column("canary_key", sa.String(length=64), nullable=False),
        sa.Column("overlap_seconds", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("ends_at", sa.Float(), nullable=True),
        sa.Column("started_by", sa.String(length=255), nullable=False),
        sa.Column("probe_sha256", sa.String(length=64), nullable=True),
        sa.Column("probe_due_at", sa.Float(), nullable=True),
        sa.Column("probe_result", sa.String(length=16), nullable=True),
        sa.Column("probe_status", sa.Integer(), nullable=True),
        sa.Column("probe_detail", sa.String(length=255), nullable=False),
        sa.Column("reason", sa.String(length=255), nullable=False),
        sa.ForeignKeyConstraint(
            ["credential_id"],
            ["credentials.id"],
            name=op.f("fk_rotations_credential_id_credentials"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("credential_id", name=op.f("pk_rotations")),
    )
    op.create_index(op.f("ix_rotations_tenant"), "rotations", ["tenant"], unique=False)
    op.create_index(op.f("ix_rotations_phase"), "rotations", ["phase"], unique=False)
    op.create_table(
        "rotation_replies",
        sa.Column("credential_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("subject_sha256", sa.String(length=64), nullable=False),
        sa.Column("bucket", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("replies", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["credential_id"],
            ["credentials.id"],
            name=op.f("fk_rotation_replies_credential_id_credentials"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(
            "credential_id", "version", "subject_sha256", "bucket", name=op.f("pk_rotation_replies")
        ),
    )
    protect(op, "rotations")
    protect(op, "rotation_replies")


def downgrade() -> None:
    op.drop_index("ix_credential_versions_active", table_name="credential_versions")
    op.drop_table("rotation_replies")
    op.drop_index(op.f("ix_rotations_phase"), table_name="rotations")
    op.drop_index(op.f("ix_rotations_tenant"), table_name="rotations")
    op.drop_table("rotations")
