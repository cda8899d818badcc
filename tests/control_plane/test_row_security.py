"""PostgreSQL's own wall between tenants (ADR 0011): what a transaction reaches when a query forgot its tenant.

Rule: the statements here are raw, without any condition of ours; the logins are made by the SQL of docs/postgresql.md.
"""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.connections import OnPostgresql
from control_plane.adapters.sql.engine import Database, open_database
from control_plane.adapters.sql.migrate import NotMigratedError
from control_plane.adapters.sql.privileges import NOT_ROW_SECURED, UnboundLoginError
from control_plane.adapters.sql.repositories import Transaction
from control_plane.adapters.sql.store import SqlStore
from control_plane.adapters.sql.tables import Base
from control_plane.core.records import Tenant
from control_plane.database import migrate_once
from control_plane.ports import Scope, TenantScope
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.databases import migrated_by_owner
from tests.control_plane.postgresql import Logins, database_with_two_logins
from tests.control_plane.serving import settings_in
from tests.control_plane.test_store import ACME, EVIL, PLATFORM, client, fill
from tests.control_plane.workspace import SECRET, Workspace

PLATFORM_ONLY: Final = frozenset(
    {"own_keys", "meta", "issuers", "used_assertions", "injectors", "sources", "keks", "rewraps"}
)
"""Tables that hold nothing of any tenant. Every other table has a tenant's rows."""


@pytest.fixture
async def logins(server: str) -> Logins:
    return await database_with_two_logins(server)


@pytest.fixture
async def migrated(server: str) -> Logins:
    return await migrated_by_owner(server)


@pytest.fixture
async def database(migrated: Logins) -> AsyncIterator[Database]:
    """Reached by the login that serves, with rows of two tenants in it."""
    app = open_database(migrated.app)
    async with SqlStore(app, LocalWake()).write(PLATFORM) as records:
        for tenant in (ACME, EVIL):
            await records.tenants.add(Tenant(tenant, 1.5))
        await records.clients.add(client(None))
    for tenant in (ACME, EVIL):
        await fill(SqlStore(app, LocalWake()), tenant)
    yield app
    await app.close()


async def counted(database: Database, scope: Scope, statement: str) -> int:
    """The one number that a raw statement gives in a transaction of that scope."""
    async with SqlStore(database, LocalWake()).write(scope) as records:
        connection = raw(records.tenants._tx)
        return int((await connection.execute(text(statement))).scalar_one())


def raw(tx: Transaction) -> AsyncConnection:
    connection = tx._connection
    assert isinstance(connection, OnPostgresql)
    return connection.connection


def of_tenants() -> list[str]:
    return sorted(set(Base.metadata.tables) - PLATFORM_ONLY)


def test_every_table_is_a_tenants_or_the_platforms() -> None:
    with_tenant = {name for name, table in Base.metadata.tables.items() if "tenant" in table.c} | {"tenants"}

    assert set(Base.metadata.tables) == with_tenant | PLATFORM_ONLY
    assert not with_tenant & PLATFORM_ONLY
    assert NOT_ROW_SECURED <= PLATFORM_ONLY


@pytest.mark.guards(
    "control_plane/migrations/rls.py",
    '    op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")\n',
    "",
)
async def test_row_security_is_forced_on_every_table_of_a_tenant(migrated: Logins, database: Database) -> None:
    owner = open_database(migrated.owner)
    async with owner.engine.connect() as connection:
        forced = await connection.execute(
            text("SELECT relname FROM pg_class WHERE relrowsecurity AND relforcerowsecurity")
        )
        names = set(forced.scalars())
    await owner.close()

    assert set(of_tenants()) <= names


@pytest.mark.guards(
    "control_plane/migrations/rls.py",
    """f"{{column}} = NULLIF(current_setting('{TENANT_SETTING}', true), '')\"""",
    '"true"',
)
async def test_a_query_that_forgot_its_tenant_sees_one_tenants_rows(database: Database) -> None:
    for table in of_tenants():
        column = "id" if table == "tenants" else "tenant"

        mine = await counted(database, TenantScope(ACME), f"SELECT count(*) FROM {table} WHERE {column} = 'acme'")
        theirs = await counted(database, TenantScope(ACME), f"SELECT count(*) FROM {table} WHERE {column} = 'evil'")
        everyones = await counted(database, PLATFORM, f"SELECT count(DISTINCT {column}) FROM {table}")

        assert (table, theirs) == (table, 0)
        assert mine >= 1 or table not in FILLED
        assert everyones == 2 or table not in FILLED


async def test_a_statement_that_was_prepared_for_one_tenant_shows_the_next_ones_its_own_rows(
    database: Database,
) -> None:
    store, statement = SqlStore(database, LocalWake()), text("SELECT tenant FROM sessions ORDER BY tenant")
    kept = text("SELECT count(*) FROM pg_prepared_statements WHERE statement = :text")
    seen, prepared = [], []

    for scope in (PLATFORM, TenantScope(ACME), TenantScope(EVIL), TenantScope(ACME), PLATFORM) * 3:
        async with store.read(scope) as records:
            connection = raw(records.tenants._tx)
            seen.append(list((await connection.execute(statement)).scalars()))
            prepared.append((await connection.execute(kept, {"text": statement.text})).scalar_one())

    assert seen == [["acme", "evil"], ["acme"], ["evil"], ["acme"], ["acme", "evil"]] * 3
    assert prepared == [1] * 15


FILLED: Final = frozenset(
    "tenants clients credentials credential_versions grants allow_rules sessions tokens outbox audit_events".split()
)


async def test_a_change_that_forgot_its_tenant_touches_one_tenants_rows(database: Database) -> None:
    for table in ("tokens", "sessions", "allow_rules", "grants", "credential_versions", "credentials", "clients"):
        await counted(
            database, TenantScope(EVIL), f"WITH gone AS (DELETE FROM {table} RETURNING 1) SELECT count(*) FROM gone"
        )

        left = await counted(database, PLATFORM, f"SELECT count(*) FROM {table} WHERE tenant = 'acme'")
        stolen = "WITH changed AS (UPDATE {} SET tenant = 'evil' RETURNING 1) SELECT count(*) FROM changed"
        taken = await counted(database, TenantScope(EVIL), stolen.format(table))

        assert (table, left, taken) == (table, 1, 0)


async def test_a_row_of_another_tenant_is_refused_by_the_database(database: Database) -> None:
    with pytest.raises(DBAPIError, match="row-level security"):
        await counted(
            database,
            TenantScope(EVIL),
            "INSERT INTO outbox (at, tenant, kind, subject_id, revoked) VALUES (1, 'acme', 'policy', 'x', true)",
        )
    with pytest.raises(DBAPIError, match="row-level security"):
        await counted(database, TenantScope(ACME), "UPDATE grants SET tenant = 'evil'")


async def test_a_client_of_all_tenants_is_changed_by_none(database: Database) -> None:
    seen = await counted(database, TenantScope(EVIL), "SELECT count(*) FROM clients WHERE tenant IS NULL")
    gone = "WITH gone AS (DELETE FROM clients WHERE tenant IS NULL RETURNING 1) SELECT count(*) FROM gone"
    removed = await counted(database, TenantScope(EVIL), gone)

    assert (seen, removed) == (1, 0)


async def test_no_tenant_is_no_rows(database: Database) -> None:
    """Also after the connection was used: the setting then reads as an empty text."""
    await counted(database, TenantScope(ACME), "SELECT count(*) FROM grants")

    for table in of_tenants():
        async with database.engine.connect() as connection, connection.begin():
            await connection.execute(text("SELECT set_config('role', 'coatcheck_tenant', true)"))
            rows = (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one()
            shared = int(table == "clients")

        assert (table, rows) == (table, shared)


async def test_a_transaction_that_entered_no_role_may_do_nothing(database: Database) -> None:
    for table in Base.metadata.tables:
        async with database.engine.connect() as connection, connection.begin():
            with pytest.raises(DBAPIError, match="permission denied"):
                await connection.execute(text(f"SELECT 1 FROM {table}"))


async def test_the_tables_owner_sees_no_rows_either(migrated: Logins, database: Database) -> None:
    owner = open_database(migrated.owner)

    for table in of_tenants():
        async with owner.engine.connect() as connection:
            assert (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one() == 0

    await owner.close()


@pytest.mark.parametrize(
    "statement",
    [
        "TRUNCATE tokens",
        "CREATE TABLE mine (x int)",
        "ALTER TABLE tokens NO FORCE ROW LEVEL SECURITY",
        "UPDATE audit_events SET code = NULL",
        "DELETE FROM own_keys",
        "SELECT count(*) FROM own_keys",
        "SELECT count(*) FROM meta",
    ],
)
async def test_a_tenants_transaction_may_not(database: Database, statement: str) -> None:
    with pytest.raises(DBAPIError, match=r"permission denied|must be owner"):
        await counted(database, TenantScope(ACME), statement)


@pytest.mark.parametrize("statement", ["TRUNCATE tokens", "UPDATE audit_events SET code = NULL", "DELETE FROM meta"])
async def test_the_platforms_transaction_may_not(database: Database, statement: str) -> None:
    with pytest.raises(DBAPIError, match="permission denied"):
        await counted(database, PLATFORM, statement)


@pytest.mark.guards(
    "control_plane/adapters/sql/store.py",
    "set_config('role', '{role}', true), set_config('{TENANT_SETTING}', {text}, true)",
    "set_config('role', '{role}', false), set_config('{TENANT_SETTING}', {text}, false)",
)
async def test_a_connection_goes_back_as_nobodys(database: Database) -> None:
    """Whoever gets it next, from our pool or from a pooler, begins without role and tenant."""
    for scope in (TenantScope(ACME), PLATFORM):
        await counted(database, scope, "SELECT count(*) FROM grants")

        async with database.engine.connect() as connection, connection.begin():
            left = await connection.execute(
                text("SELECT current_user = session_user, current_setting('coatcheck.tenant', true)")
            )
            is_login, tenant = left.one()
        assert (is_login, tenant or "") == (True, "")


# --- the login -------------------------------------------------------------------------------------------------------


def test_the_whole_flow_runs_on_the_two_logins(own_control_plane: OwnControlPlane, logins: Logins) -> None:
    plane = own_control_plane(database_url=logins.app, migration_database_url=logins.owner, unbound_database_login="")
    workspace = Workspace(plane, "acme")
    workspace.add_credential()
    grant = workspace.grant()
    session = workspace.open_session()

    issued = workspace.exchange(session)
    resolved = workspace.resolve(issued)
    workspace.rotate("a-new-key")
    rotated = workspace.resolve(issued)
    workspace.remove_grant(grant)

    assert (resolved["secret"], rotated["secret"]) == (SECRET, "a-new-key")
    assert workspace.resolve(issued)["code"] == "revoked_placeholder"
    assert plane.http.get("/readyz").status_code == 200


@pytest.mark.guards("control_plane/database.py", "await require_bound(database.engine, tables=False)", "pass")
def test_one_login_for_everything_does_not_start(own_control_plane: OwnControlPlane, logins: Logins) -> None:
    with pytest.raises(UnboundLoginError, match=r"superuser.*docs/postgresql.md"):
        own_control_plane(database_url=logins.superuser, unbound_database_login="")


@pytest.mark.guards("control_plane/database.py", "await require_bound(database.engine, tables=True)", "pass")
def test_the_tables_owner_does_not_serve(own_control_plane: OwnControlPlane, logins: Logins) -> None:
    with pytest.raises(UnboundLoginError, match="owns the tables"):
        own_control_plane(database_url=logins.owner, migration_database_url=logins.owner, unbound_database_login="")


@pytest.mark.parametrize(
    "made, why",
    [
        ("ALTER ROLE {login} BYPASSRLS", "BYPASSRLS"),
        ("ALTER ROLE {login} CREATEROLE", "CREATEROLE"),
        ("GRANT coatcheck_owner TO {login}", "owns the tables"),
        ("GRANT coatcheck_platform TO {login} WITH INHERIT TRUE", "inherits"),
        ("REVOKE coatcheck_platform FROM {login}", "not a member"),
        ("GRANT TRUNCATE ON tokens TO {login}", "TRUNCATE"),
        ("GRANT TRUNCATE ON tokens TO coatcheck_tenant", "TRUNCATE"),
        ("GRANT CREATE ON SCHEMA public TO coatcheck_platform", "create tables"),
        ("ALTER TABLE tokens NO FORCE ROW LEVEL SECURITY", "not forced on tokens"),
        ("ALTER TABLE grants DISABLE ROW LEVEL SECURITY", "not forced on grants"),
    ],
)
async def test_a_login_that_could_reach_past_its_tenant_does_not_serve(
    own_control_plane: OwnControlPlane, migrated: Logins, made: str, why: str
) -> None:
    superuser = open_database(migrated.superuser)
    login = "coatcheck_suspect"
    async with superuser.engine.begin() as connection:
        await connection.execute(text(f"CREATE ROLE {login} LOGIN NOINHERIT PASSWORD 'suspect'"))
        await connection.execute(text(f"GRANT coatcheck_tenant, coatcheck_platform TO {login}"))
        await connection.execute(text(f"GRANT CONNECT ON DATABASE {superuser.engine.url.database} TO {login}"))
        await connection.execute(text(made.format(login=login)))
    url = migrated.app.replace("coatcheck_app:change-me-app", f"{login}:suspect")

    try:
        with pytest.raises(UnboundLoginError, match=why):
            own_control_plane(database_url=url, unbound_database_login="")
    finally:
        async with superuser.engine.begin() as connection:
            await connection.execute(text(f"DROP OWNED BY {login}"))
            await connection.execute(text(f"DROP ROLE {login}"))
        await superuser.close()


@pytest.mark.guards("control_plane/database.py", "await require_migrated(database.engine)", "pass")
def test_tables_that_nobody_migrated_are_named_with_the_command_that_does(
    own_control_plane: OwnControlPlane, logins: Logins
) -> None:
    with pytest.raises(NotMigratedError, match="coatcheck serve migrate"):
        own_control_plane(database_url=logins.app, unbound_database_login="")


async def test_the_owner_migrates_once_and_the_other_login_serves(
    own_control_plane: OwnControlPlane, logins: Logins, tmp_path: Path
) -> None:
    await migrate_once(settings_in(tmp_path, database_url=logins.owner))

    plane = own_control_plane(database_url=logins.app, unbound_database_login="")

    assert plane.http.get("/readyz").status_code == 200


# --- the sources -----------------------------------------------------------------------------------------------------

SOURCES: Final = Path(__file__).parents[2] / "control_plane"


def test_nothing_is_set_for_longer_than_a_transaction() -> None:
    """Behind a transaction pooler a session's setting is the next client's (measured: three of three saw it)."""
    lasting = re.compile(
        r"set_config\([^)]*,\s*false\s*\)|[\"']\s*SET\s+(?!LOCAL\b)(SESSION\b|ROLE\b|coatcheck\b|search_path\b)",
        re.IGNORECASE,
    )

    found = [str(file) for file in SOURCES.rglob("*.py") if lasting.search(file.read_text("utf-8"))]

    assert lasting.search('text("SET ROLE x")')
    assert lasting.search("select set_config('a', $1, false)")
    assert found == []


def test_no_statement_is_made_of_somebody_elses_text() -> None:
    """Beside the migrations, whose texts are our own: SQL in an f-string could hold a value."""
    built = re.compile(r"text\(\s*f[\"']|exec_driver_sql\(\s*f[\"']|\.execute\(\s*f[\"']")

    found = {file.name for file in (SOURCES / "adapters").rglob("*.py") if built.search(file.read_text("utf-8"))}

    assert found <= {"engine.py"}  # SQLite's busy_timeout: a number
