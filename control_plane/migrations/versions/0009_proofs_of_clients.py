"""How clients prove themselves beside a secret."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.add_column(sa.Column("proofs", sa.JSON(), nullable=False, server_default="{}"))
        batch_op.add_column(sa.Column("workload_issuer", sa.String(length=40), nullable=True))
        batch_op.add_column(sa.Column("certificate_name", sa.String(length=600), nullable=True))
        batch_op.create_index(batch_op.f("ix_clients_workload_issuer"), ["workload_issuer"])
        batch_op.create_unique_constraint(batch_op.f("uq_clients_certificate_name"), ["certificate_name"])
