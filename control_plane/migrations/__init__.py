"""Alembic migrations, applied when the control plane starts.

`env.py` is what Alembic runs; `versions/` holds one file a change. A new one, from the difference between the tables
and a database that is up to date:

    alembic -c control_plane/migrations/alembic.ini -x url=sqlite:///FILE revision --autogenerate -m "what changed"
"""
