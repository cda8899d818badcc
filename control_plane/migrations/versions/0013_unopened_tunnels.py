"""Allowed hosts whose tunnels are not opened."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("allow_rules", schema=None) as batch_op:
        batch_op.add_column(sa.Column("tunnel", sa.Boolean(), nullable=False, server_default=sa.false()))
