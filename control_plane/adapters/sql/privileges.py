"""Whether the login that we were given is bound by row security (ADR 0011). PostgreSQL alone.

Rule: a login that could see past a tenant's transaction does not serve. A superuser, a role with BYPASSRLS and the
tables' owner are not bound, or could unbind themselves; and row security does not cover TRUNCATE.
"""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from control_plane.adapters.sql.roles import PLATFORM_ROLE, TENANT_ROLE
from control_plane.adapters.sql.tables import Base


class UnboundLoginError(RuntimeError):
    """The database's login is more than it may be, or less than it needs to be; the message says what to do."""


_ABOUT_LOGIN: Final = text(
    """
    SELECT rolname, rolsuper, rolbypassrls, rolcreaterole,
           coalesce(pg_has_role(oid, to_regrole(:tenant), 'MEMBER'), false)
       AND coalesce(pg_has_role(oid, to_regrole(:platform), 'MEMBER'), false) AS is_member,
           coalesce(pg_has_role(oid, to_regrole(:tenant), 'USAGE'), false)
        OR coalesce(pg_has_role(oid, to_regrole(:platform), 'USAGE'), false) AS inherits,
           EXISTS (SELECT FROM pg_roles AS of WHERE of.oid <> pg_roles.oid AND (of.rolsuper OR of.rolbypassrls)
                      AND pg_has_role(pg_roles.oid, of.oid, 'MEMBER')) AS could_become_more
      FROM pg_roles WHERE rolname = session_user
    """
)

_AS_PLATFORM: Final = text("SELECT set_config('role', :platform, true)")

_ABOUT_TABLES: Final = text(
    """
    SELECT relname, relrowsecurity AND relforcerowsecurity AS is_forced,
           pg_has_role(session_user, relowner, 'MEMBER') AS is_owned,
           has_table_privilege(session_user, oid, 'TRUNCATE') OR has_table_privilege(:tenant, oid, 'TRUNCATE')
        OR has_table_privilege(:platform, oid, 'TRUNCATE') AS may_truncate
      FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')
    """
)

_ABOUT_SCHEMA: Final = text(
    """
    SELECT has_schema_privilege(session_user, current_schema(), 'CREATE')
        OR has_schema_privilege(:tenant, current_schema(), 'CREATE')
        OR has_schema_privilege(:platform, current_schema(), 'CREATE')
        OR has_database_privilege(session_user, current_database(), 'CREATE')
    """
)

NOT_ROW_SECURED: Final = frozenset({"meta"})
"""Facts about the database itself, which migrations alone write."""


async def require_bound(engine: AsyncEngine, *, tables: bool) -> None:
    """The login alone, or what it may do with the tables too. Raises `UnboundLoginError` with all that is wrong."""
    async with engine.connect() as connection, connection.begin():
        roles = {"tenant": TENANT_ROLE, "platform": PLATFORM_ROLE}
        login = (await connection.execute(_ABOUT_LOGIN, roles)).mappings().one()
        faults = [
            fault
            for is_so, fault in (
                (login["rolsuper"], "it is a superuser"),
                (login["rolbypassrls"], "it has BYPASSRLS"),
                (login["rolcreaterole"], "it has CREATEROLE"),
                (login["could_become_more"], "it is a member of a role that row security does not bind"),
                (not login["is_member"], f"it is not a member of {TENANT_ROLE} and {PLATFORM_ROLE}"),
                (login["inherits"], f"it inherits {TENANT_ROLE} or {PLATFORM_ROLE} (make it NOINHERIT)"),
            )
            if is_so
        ]
        if tables and not faults:
            faults = await _faults_of_tables(connection, roles)
    if faults:
        raise UnboundLoginError(
            f"the database's login {login['rolname']!r} would not be held to one tenant's rows: {'; '.join(faults)}. "
            "docs/postgresql.md says how to make a login for the control plane beside the one that owns the tables"
        )


async def _faults_of_tables(connection: AsyncConnection, roles: dict[str, str]) -> list[str]:
    await connection.execute(_AS_PLATFORM, {"platform": PLATFORM_ROLE})
    tables = (await connection.execute(_ABOUT_TABLES, roles)).mappings().all()
    faults = []
    if any(table["is_owned"] for table in tables):
        faults.append("it owns the tables, or is a member of the role that does")
    if any(table["may_truncate"] for table in tables):
        faults.append("TRUNCATE is granted to it")
    if (await connection.execute(_ABOUT_SCHEMA, roles)).scalar_one():
        faults.append("it may create tables here")
    forced = {table["relname"] for table in tables if table["is_forced"]}
    unforced = set(Base.metadata.tables) - forced - NOT_ROW_SECURED
    return faults + [f"row security is not forced on {name}" for name in sorted(unforced)]
