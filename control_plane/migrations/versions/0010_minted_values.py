"""What providers mint for credentials, and whose turn it is to ask them."""

import sqlalchemy as sa
from alembic import op

from control_plane.migrations.rls import protect

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "minted",
        sa.Column("credential_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("leased_until", sa.Float(), nullable=False),
        sa.Column("asked_fence", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("retry_at", sa.Float(), nullable=False),
        sa.Column("replaces_secret", sa.Boolean(), nullable=True),
        sa.Column("kek_id", sa.String(length=32), nullable=True),
        sa.Column("envelope", sa.LargeBinary(), nullable=True),
        sa.Column("minted_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["credential_id"],
            ["credentials.id"],
            name=op.f("fk_minted_credential_id_credentials"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("credential_id", "version", name=op.f("pk_minted")),
    )
    with op.batch_alter_table("minted", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_minted_kek_id"), ["kek_id"], unique=False)
    protect(op, "minted")
