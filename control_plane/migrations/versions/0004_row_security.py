"""Row security, forced, on every table there is (PostgreSQL)."""

from alembic import op

from control_plane.migrations.rls import (
    APPEND,
    APPEND_AND_FORGET,
    ensure_roles,
    keep_for_platform,
    protect,
)

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    ensure_roles(op)
    protect(op, "tenants", column="id")
    # A client that serves all tenants has none.
    protect(op, "clients", shared=True)
    for table in ("credentials", "credential_versions", "grants", "allow_rules", "sessions", "tokens"):
        protect(op, table)
    # What was said stays said: nobody changes a row, and only the platform's upkeep forgets.
    for table in ("outbox", "audit_events"):
        protect(op, table, tenant=APPEND, platform=APPEND_AND_FORGET)
    keep_for_platform(op, "own_keys")
    # Written by migrations alone. Its owner is not to be bound here: it writes the epoch.
    if op.get_bind().dialect.name == "postgresql":
        op.execute("GRANT SELECT ON meta, alembic_version TO coatcheck_platform")
