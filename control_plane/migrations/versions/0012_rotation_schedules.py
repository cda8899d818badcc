"""How old a secret may become, and what is done about it."""

import sqlalchemy as sa
from alembic import op

from control_plane.migrations.rls import protect

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rotation_schedules",
        sa.Column("credential_id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("every_seconds", sa.Float(), nullable=False),
        sa.Column("remind_seconds", sa.Float(), nullable=False),
        sa.Column("hook", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("probes", sa.Boolean(), nullable=False),
        sa.Column("proceeds_unproven", sa.Boolean(), nullable=False),
        sa.Column("canary_percent", sa.Integer(), nullable=False),
        sa.Column("canary_seconds", sa.Float(), nullable=False),
        sa.Column("overlap_seconds", sa.Float(), nullable=False),
        sa.Column("look_at", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("attempt", sa.String(length=64), nullable=True),
        sa.Column("unsettled_rotation", sa.String(length=64), nullable=True),
        sa.Column("hook_state", sa.JSON(), nullable=False),
        sa.Column("forgiven_rotation", sa.String(length=64), nullable=True),
        sa.Column("last_failure", sa.String(length=255), nullable=False),
        sa.ForeignKeyConstraint(
            ["credential_id"],
            ["credentials.id"],
            name=op.f("fk_rotation_schedules_credential_id_credentials"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("credential_id", name=op.f("pk_rotation_schedules")),
    )
    op.create_index(op.f("ix_rotation_schedules_tenant"), "rotation_schedules", ["tenant"], unique=False)
    op.create_index(op.f("ix_rotation_schedules_look_at"), "rotation_schedules", ["look_at"], unique=False)
    protect(op, "rotation_schedules")


def downgrade() -> None:
    op.drop_index(op.f("ix_rotation_schedules_look_at"), table_name="rotation_schedules")
    op.drop_index(op.f("ix_rotation_schedules_tenant"), table_name="rotation_schedules")
    op.drop_table("rotation_schedules")
