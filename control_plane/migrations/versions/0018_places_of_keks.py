"""Where a key-encryption key was last seen: which file is missing, where one is."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("keks", schema=None) as batch_op:
        batch_op.add_column(sa.Column("place", sa.String(length=512), nullable=False, server_default=""))
