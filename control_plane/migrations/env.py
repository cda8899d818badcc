"""Run by Alembic: applies migrations on the connection it is given, or on `-x url=…` when used by hand."""

from alembic import context
from sqlalchemy import Connection, create_engine

from control_plane.adapters.sql.tables import Base


def _migrate(connection: Connection) -> None:
    # SQLite alters a table by copying it (batch mode).
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    _migrate(given)
else:
    with create_engine(context.get_x_argument(as_dictionary=True)["url"]).connect() as by_hand:
        _migrate(by_hand)
        by_hand.commit()
