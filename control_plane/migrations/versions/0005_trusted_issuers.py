"""Issuers whose tokens are believed, and assertions that were used."""

import sqlalchemy as sa
from alembic import op

from control_plane.migrations.rls import keep_for_platform

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "issuers",
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("issuer", sa.String(length=512), nullable=False),
        sa.Column("definition", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_issuers")),
        sa.UniqueConstraint("issuer", name=op.f("uq_issuers_issuer")),
    )
    op.create_table(
        "used_assertions",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_used_assertions")),
    )
    op.create_index(op.f("ix_used_assertions_expires_at"), "used_assertions", ["expires_at"])
    for table in ("issuers", "used_assertions"):
        keep_for_platform(op, table)
