"""Who acts for whom, narrowed tokens, registered injectors, own keys in turn, and when a credential was last used."""

import sqlalchemy as sa
from alembic import op

from control_plane.migrations.rls import keep_for_platform, protect

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("act", sa.JSON(), nullable=False, server_default="[]"))
        batch_op.add_column(sa.Column("may_act", sa.JSON(none_as_null=True), nullable=True))
        batch_op.add_column(sa.Column("erased_at", sa.Float(), nullable=True))
        batch_op.create_index(batch_op.f("ix_sessions_runtime"), ["runtime"], unique=False)
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.add_column(sa.Column("scope", sa.String(length=1024), nullable=False, server_default=""))
        batch_op.add_column(sa.Column("act", sa.JSON(), nullable=False, server_default="[]"))
    with op.batch_alter_table("own_keys", schema=None) as batch_op:
        batch_op.add_column(sa.Column("in_use_from", sa.Float(), nullable=False, server_default="0"))
    op.create_table(
        "injectors",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("registered_at", sa.Float(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_injectors")),
    )
    op.create_table(
        "uses",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("client", sa.String(length=64), nullable=False),
        sa.Column("credential_id", sa.String(length=64), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("last_used_at", sa.Float(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["credential_id"], ["credentials.id"], name=op.f("fk_uses_credential_id_credentials"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_uses_tenant_tenants"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("tenant", "subject", "client", "credential_id", "host", name=op.f("pk_uses")),
    )
    op.create_index(op.f("ix_uses_credential_id"), "uses", ["credential_id"], unique=False)
    protect(op, "uses")
    keep_for_platform(op, "injectors")


def downgrade() -> None:
    op.drop_table("uses")
    op.drop_table("injectors")
    with op.batch_alter_table("own_keys", schema=None) as batch_op:
        batch_op.drop_column("in_use_from")
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.drop_column("act")
        batch_op.drop_column("scope")
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_sessions_runtime"))
        batch_op.drop_column("erased_at")
        batch_op.drop_column("may_act")
        batch_op.drop_column("act")
