"""Row security, for migrations: who may see and change which rows of a table (ADR 0011). Nothing happens on SQLite.

    protect(op, "grants")                     its column `tenant` says whose a row is
    keep_for_platform(op, "own_keys")         no tenant's: only the platform's transactions reach it
    with crossing_tenants(op): op.execute(…)  a migration that changes rows, not only tables

Rule: every table is put under one of the first two in the migration that makes it. Row security is forced, so that it
binds the owner of the tables too; and nobody is granted TRUNCATE, which row security does not cover.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import text

from control_plane.adapters.sql.roles import PLATFORM_ROLE, TENANT_ROLE, TENANT_SETTING

EVERYTHING: Final = "SELECT, INSERT, UPDATE, DELETE"
APPEND: Final = "SELECT, INSERT"
APPEND_AND_FORGET: Final = "SELECT, INSERT, DELETE"

# After its first use on a connection an unset setting reads as '', not as NULL: both mean that there is no tenant.
_OF_THIS_TENANT: Final = f"{{column}} = NULLIF(current_setting('{TENANT_SETTING}', true), '')"


class MissingRolesError(RuntimeError):
    """The roles are not there, and whoever migrates may not make them."""


def ensure_roles(op: Any) -> None:
    """Makes the two roles where whoever migrates may; a role that is there already is left as it is.

    Raises `MissingRolesError`.
    """
    if not _is_postgresql(op):
        return
    connection = op.get_bind()
    for role in (TENANT_ROLE, PLATFORM_ROLE):
        if connection.scalar(text("SELECT to_regrole(:role) IS NOT NULL"), {"role": role}):
            continue
        if not connection.scalar(
            text("SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = session_user"),
        ):
            raise MissingRolesError(
                f"the roles {TENANT_ROLE} and {PLATFORM_ROLE} do not exist; docs/postgresql.md says how to make them"
            )
        # Roles are the whole server's: another database's migration may be making them at this moment.
        op.execute(
            f"DO $$ BEGIN CREATE ROLE {role} NOLOGIN; GRANT {role} TO session_user; "
            "EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
        )
    op.execute(
        "DO $$ BEGIN EXECUTE format("
        f"'GRANT USAGE ON SCHEMA %I TO {TENANT_ROLE}, {PLATFORM_ROLE}', current_schema()); END $$"
    )


def protect(
    op: Any,
    table: str,
    *,
    column: str = "tenant",
    tenant: str = EVERYTHING,
    platform: str = EVERYTHING,
    shared: bool = False,
) -> None:
    """A tenant's transactions reach their own rows, by the privileges `tenant`; the platform's all, by `platform`.

    `shared`: rows without a tenant are seen by every tenant, and changed by none.
    """
    if not _is_postgresql(op):
        return
    mine = _OF_THIS_TENANT.format(column=column)
    _force(op, table)
    _grant(op, table, tenant, TENANT_ROLE)
    _grant(op, table, platform, PLATFORM_ROLE)
    op.execute(
        f"CREATE POLICY {table}_of_its_tenant ON {table} FOR ALL TO {TENANT_ROLE} USING ({mine}) WITH CHECK ({mine})"
    )
    if shared:
        op.execute(
            f"CREATE POLICY {table}_of_every_tenant ON {table} FOR SELECT TO {TENANT_ROLE} USING ({column} IS NULL)"
        )
    _open_to_platform(op, table)


def keep_for_platform(op: Any, table: str, *, platform: str = EVERYTHING) -> None:
    """Only the platform's transactions reach the table."""
    if not _is_postgresql(op):
        return
    _force(op, table)
    _grant(op, table, platform, PLATFORM_ROLE)
    _open_to_platform(op, table)


@contextmanager
def crossing_tenants(op: Any) -> Iterator[None]:
    """Inside, rows of all tenants are seen and changed: the owner itself is bound by the policies and sees none."""
    if not _is_postgresql(op):
        yield
        return
    op.execute(f"SET LOCAL ROLE {PLATFORM_ROLE}")
    yield
    op.execute("SET LOCAL ROLE NONE")


def _force(op: Any, table: str) -> None:
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")


def _grant(op: Any, table: str, privileges: str, role: str) -> None:
    op.execute(f"GRANT {privileges} ON {table} TO {role}")
    if "INSERT" in privileges:
        for sequence in _sequences(op, table):
            op.execute(f"GRANT USAGE ON SEQUENCE {sequence} TO {role}")


def _open_to_platform(op: Any, table: str) -> None:
    op.execute(
        f"CREATE POLICY {table}_of_the_platform ON {table} FOR ALL TO {PLATFORM_ROLE} USING (true) WITH CHECK (true)"
    )


def _sequences(op: Any, table: str) -> list[str]:
    """Those that number its rows."""
    found = op.get_bind().scalars(
        text(
            "SELECT CAST(CAST(objid AS regclass) AS text) FROM pg_depend JOIN pg_class ON pg_class.oid = objid "
            "WHERE relkind = 'S' AND refobjid = CAST(:table AS regclass) AND deptype IN ('a', 'i')"
        ),
        {"table": table},
    )
    return list(found)


def _is_postgresql(op: Any) -> bool:
    return bool(op.get_bind().dialect.name == "postgresql")
