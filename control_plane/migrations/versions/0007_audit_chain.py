"""The audit trail's chain: signed heads, anchors, and the queue of events that are in no batch yet."""

import sqlalchemy as sa
from alembic import op

from control_plane.migrations.rls import APPEND, APPEND_AND_FORGET, crossing_tenants, protect

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_unchained",
        sa.Column(
            "sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False
        ),
        sa.Column("tenant", sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_audit_unchained")),
    )
    op.create_table(
        "audit_heads",
        sa.Column("trail", sa.String(length=64), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=True),
        sa.Column("first", sa.BigInteger(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.Column("leaves", sa.LargeBinary(), nullable=False),
        sa.Column("sequences", sa.JSON(), nullable=False),
        sa.Column("previous", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("signature", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("trail", "number", name=op.f("pk_audit_heads")),
    )
    op.create_index("ix_audit_heads_trail_last", "audit_heads", ["trail", "last"], unique=False)
    op.create_index(op.f("ix_audit_heads_at"), "audit_heads", ["at"], unique=False)
    op.create_table(
        "audit_anchors",
        sa.Column("trail", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("head", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("signature", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("trail", name=op.f("pk_audit_anchors")),
    )
    # The database queues every event by itself: none can be written and left out of its chain.
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION audit_event_is_unchained() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "INSERT INTO audit_unchained (sequence, tenant) VALUES (NEW.sequence, NEW.tenant); RETURN NULL; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_events_unchained AFTER INSERT ON audit_events "
            "FOR EACH ROW EXECUTE FUNCTION audit_event_is_unchained()"
        )
    else:
        op.execute(
            "CREATE TRIGGER audit_events_unchained AFTER INSERT ON audit_events BEGIN "
            "INSERT INTO audit_unchained (sequence, tenant) VALUES (NEW.sequence, NEW.tenant); END"
        )
    # A tenant's transaction queues by writing events; only the platform's link, and take away what is over.
    protect(op, "audit_unchained", tenant=APPEND, platform=APPEND_AND_FORGET)
    for table in ("audit_heads", "audit_anchors"):
        protect(op, table, tenant="SELECT", platform=APPEND_AND_FORGET)
    with crossing_tenants(op):
        op.execute("INSERT INTO audit_unchained (sequence, tenant) SELECT sequence, tenant FROM audit_events")
