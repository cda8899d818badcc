"""An index for the tokens of a session alone: forgetting a session looks for them."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(op.f("ix_tokens_session"), "tokens", ["session"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_tokens_session"), table_name="tokens")
