"""Credentials of more kinds: their settings, where their secret is read from, and what may be done with it."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("credentials", schema=None) as batch_op:
        batch_op.alter_column("kind", existing_type=sa.String(length=16), type_=sa.String(length=40))
        batch_op.add_column(sa.Column("settings", sa.JSON(), nullable=False, server_default="{}"))
        batch_op.add_column(sa.Column("secret_source", sa.JSON(none_as_null=True), nullable=True))
        batch_op.add_column(sa.Column("max_stale_seconds", sa.Float(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("allow_direct", sa.Boolean(), nullable=False, server_default=sa.false()))
