"""Sources that secrets are read from; key-encryption keys that replicas have had, and re-wraps."""

import sqlalchemy as sa
from alembic import op

from control_plane.migrations.rls import keep_for_platform

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sources",
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=24), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("path_template", sa.String(length=512), nullable=False),
        sa.Column("ttl_seconds", sa.Float(), nullable=False),
        sa.Column("tenants", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("seal", sa.LargeBinary(), nullable=False),
        sa.Column("kek_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_sources")),
    )
    op.create_index(op.f("ix_sources_kek_id"), "sources", ["kek_id"])
    op.create_table(
        "keks",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("provider", sa.String(length=24), nullable=False),
        sa.Column("first_seen_at", sa.Float(), nullable=False),
        sa.Column("retired_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keks")),
    )
    op.create_table(
        "rewraps",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=32), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("started_by", sa.String(length=255), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("rewrapped", sa.Integer(), nullable=False),
        sa.Column("unopenable", sa.Integer(), nullable=False),
        sa.Column("runner", sa.String(length=64), nullable=True),
        sa.Column("moved_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rewraps")),
    )
    for table in ("sources", "keks", "rewraps"):
        keep_for_platform(op, table)
