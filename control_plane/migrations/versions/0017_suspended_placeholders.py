"""Placeholders that are suspended, and the events by which that is decided."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_LEAKS = sa.text("action = 'leak_blocked'")


def upgrade() -> None:
    # Not in a batch: on SQLite a column is added to the table as it is, with the triggers of the tables around it.
    op.add_column("tokens", sa.Column("suspended_until", sa.Float(), nullable=True))
    op.create_index(
        "ix_audit_events_leaks", "audit_events", ["tenant", "at"], sqlite_where=_LEAKS, postgresql_where=_LEAKS
    )
