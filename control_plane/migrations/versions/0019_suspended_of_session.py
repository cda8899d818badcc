"""Which placeholders of a session are suspended is asked by every exchange in it."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    is_suspended = sa.text("suspended_until IS NOT NULL")
    op.create_index(
        "ix_tokens_suspended", "tokens", ["tenant", "session"], sqlite_where=is_suspended, postgresql_where=is_suspended
    )
