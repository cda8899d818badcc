"""What the store can do, in SQL (`ports.Records`).

Rule: every statement passes through the scope. `mine` adds the tenant to each condition, `require_mine` refuses a row
of another tenant before it is written; there is no statement on a tenant's table without one of the two.
"""

import functools
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    CursorResult,
    Select,
    Table,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
    true,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from control_plane.adapters.sql.connections import SCOPE_TENANT, OnTheLoop, OpenConnection, Rendered, Scoped, among
from control_plane.adapters.sql.rotations import ROTATIONS, is_running
from control_plane.adapters.sql.rows import field_names, to_columns, to_record, to_records
from control_plane.adapters.sql.tables import (
    AllowRuleRow,
    AuditRow,
    Base,
    ClientRow,
    CredentialRow,
    CredentialVersionRow,
    GrantRow,
    KeyRow,
    LimitRow,
    MetaRow,
    MintedRow,
    OutboxRow,
    SessionRow,
    TenantRow,
    TokenRow,
)
from control_plane.contract.caller import ClientId, CredentialId, GrantId, PlaceholderId, SessionId, SubjectId, TenantId
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import LEAK_BLOCKED, AuditEvent
from control_plane.core.audit import event_to_json
from control_plane.core.records import (
    Change,
    ChangeKind,
    Client,
    Credential,
    CredentialVersion,
    Grant,
    KeyPurpose,
    OwnKey,
    PublishedChange,
    Rotation,
    Session,
    Tenant,
    TenantAllowRule,
    Token,
    TokenKind,
)
from control_plane.ports import Clock, Position, Scope, TakenError, TenantScope, TokenFacts, UnreadableRowError

_OUTBOX_LOCK = 0x636F6174
"""PostgreSQL: held from a change's number until its commit, so that numbers become visible in their order."""


_POSTGRESQL_NOW = select(func.extract("epoch", func.clock_timestamp()).label("now"))
_SQLITE_NOW = select(((func.julianday("now") - 2440587.5) * 86400.0).label("now"))  # days, from noon in 4714 BC

FEW: Final = 20
"""So many sets of parameters keep nobody waiting."""


class ScopeError(Exception):
    """A row of another tenant was about to be written, or a reading transaction was about to write: a fault of ours."""


def table_of(row: type[Base]) -> Table:
    table = row.__table__
    assert isinstance(table, Table)
    return table


TENANTS, CLIENTS, CREDENTIALS = table_of(TenantRow), table_of(ClientRow), table_of(CredentialRow)
VERSIONS, GRANTS, RULES = table_of(CredentialVersionRow), table_of(GrantRow), table_of(AllowRuleRow)
SESSIONS, TOKENS, KEYS = table_of(SessionRow), table_of(TokenRow), table_of(KeyRow)
MINTED = table_of(MintedRow)
LIMITS = table_of(LimitRow)
OUTBOX, AUDIT, META = table_of(OutboxRow), table_of(AuditRow), table_of(MetaRow)


class Transaction:
    """One open transaction and its scope: what every repository speaks through."""

    def __init__(self, connection: OpenConnection, scope: Scope, *, writes: bool, time: Clock | None = None) -> None:
        self._connection = connection
        self._scope = scope
        self._writes = writes
        self._time = time
        self._unpublished: list[dict[str, Any]] = []

    def mine(self, tenant: ColumnElement[Any]) -> ColumnElement[bool]:
        return tenant == self._scope.tenant if isinstance(self._scope, TenantScope) else true()

    def require_mine(self, tenant: TenantId | None) -> None:
        if isinstance(self._scope, TenantScope) and tenant != self._scope.tenant:
            raise ScopeError("a row of another tenant")

    def publish(self, rows: Sequence[dict[str, Any]]) -> None:
        """Into the outbox, when the transaction ends."""
        self._require_writing()
        self._unpublished += rows

    async def flush(self) -> bool:
        """Writes what is to be published; whether there was anything.

        Last of all: on PostgreSQL the lock that keeps numbers in their order is then held for the commit alone, and
        nobody waits for a row while holding it.
        """
        if not self._unpublished:
            return False
        if self.is_postgresql:
            await self.row(select(func.pg_advisory_xact_lock(_OUTBOX_LOCK)))
        await self.change(insert(OUTBOX), self._unpublished)
        return True

    async def now(self) -> float:
        """By the database's clock, at this very moment: a transaction may have waited since it began."""
        if self._time is not None:
            return self._time()
        row = await self.row(_POSTGRESQL_NOW if self.is_postgresql else _SQLITE_NOW)
        assert row is not None
        return float(row["now"])

    async def rows(self, statement: Select[Any] | Scoped, **parameters: Any) -> Sequence[Mapping[str, Any]]:
        if isinstance(statement, Scoped):
            return await self._connection.fetch(*self._rendered(statement, parameters))
        result = await self._connection.execute(statement, parameters)
        return [dict(row) for row in result.mappings()]

    async def row(self, statement: Select[Any] | Scoped, **parameters: Any) -> Mapping[str, Any] | None:
        """The only one that is looked for. None where there is none."""
        if isinstance(statement, Scoped):
            return next(iter(await self.rows(statement, **parameters)), None)
        row = (await self._connection.execute(statement, parameters)).mappings().first()
        return None if row is None else dict(row)

    def _rendered(self, statement: Scoped, parameters: Mapping[str, Any]) -> tuple[Rendered, Mapping[str, Any]]:
        dialect = self._connection.dialect
        if isinstance(self._scope, TenantScope):
            return statement.rendered(dialect, for_tenant=True), {**parameters, SCOPE_TENANT: self._scope.tenant}
        return statement.rendered(dialect, for_tenant=False), parameters

    async def change(self, statement: Any, parameters: Any = None, **values: Any) -> int:
        """How many rows it touched; a `Scoped` has `values`. Raises `TakenError` for a name or id that is taken."""
        self._require_writing()
        if isinstance(statement, Scoped):
            return await _touched(self._connection.run(*self._rendered(statement, values)))
        return await _touched(self._connection.execute(statement, parameters))

    async def written(self, statement: Any, parameters: Sequence[dict[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """What the statement's RETURNING says of every row that it wrote."""
        self._require_writing()
        result = await self._connection.execute(statement, list(parameters))
        return [dict(row) for row in result.mappings()]

    async def change_many(self, statement: Any, parameters: Sequence[dict[str, Any]] | None = None) -> int:
        """The same for a statement that may touch very many rows; with parameters, once for each set of them."""
        self._require_writing()
        if parameters is not None and not parameters:
            return 0
        if isinstance(self._connection, OnTheLoop):
            return await _touched(self._connection.execute_elsewhere(statement, parameters))
        return await self.change(statement, parameters)

    async def change_each(self, statement: Any, parameters: Sequence[dict[str, Any]]) -> None:
        """The statement once for each set of parameters. Without any it is not run at all."""
        self._require_writing()
        if len(parameters) > FEW:
            await self.change_many(statement, list(parameters))
        elif parameters:
            await self._connection.execute(statement, list(parameters))

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[None]:
        """What fails in here leaves the rest of the transaction as it is."""
        self._require_writing()
        async with self._connection.begin_nested():
            yield

    def insert_once(self, table: Table, *, by: str | Sequence[str]) -> Any:
        """An insert that leaves out rows whose `by` is already there."""
        return self.insert(table).on_conflict_do_nothing(index_elements=[by] if isinstance(by, str) else list(by))

    def insert(self, table: Table) -> Any:
        """An insert that can say what happens where the row is already there."""
        return postgresql_insert(table) if self.is_postgresql else sqlite_insert(table)

    def each_text_of(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """The texts of a JSON list, as a column of rows of their own."""
        each = func.json_array_elements_text if self.is_postgresql else func.json_each
        return each(column).table_valued("value", joins_implicitly=True).c.value

    @property
    def is_postgresql(self) -> bool:
        return self._connection.dialect.name == "postgresql"

    def _require_writing(self) -> None:
        if not self._writes:
            raise ScopeError("a reading transaction does not write")


async def _touched(execution: Awaitable[CursorResult[Any] | int]) -> int:
    try:
        result = await execution
    except IntegrityError as error:
        raise TakenError from error
    return result if isinstance(result, int) else int(result.rowcount)


class SqlTenants:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, tenant: Tenant) -> None:
        self._tx.require_mine(tenant.id)
        await self._tx.change(insert(TENANTS), to_columns(tenant))

    async def get(self, tenant: TenantId) -> Tenant | None:
        row = await self._tx.row(select(TENANTS).where(TENANTS.c.id == tenant, self._tx.mine(TENANTS.c.id)))
        return to_record(Tenant, row) if row else None

    async def list(self) -> Sequence[Tenant]:
        rows = await self._tx.rows(select(TENANTS).where(self._tx.mine(TENANTS.c.id)).order_by(TENANTS.c.id))
        return to_records(Tenant, rows)

    async def remove(self, tenant: TenantId) -> bool:
        where = (TENANTS.c.id == tenant, self._tx.mine(TENANTS.c.id))
        return await self._tx.change_many(delete(TENANTS).where(*where)) > 0


_CLIENTS: Final = Scoped(
    lambda mine: select(CLIENTS).where(
        among(CLIENTS.c.id, "of_clients"), or_(mine(CLIENTS.c.tenant), CLIENTS.c.tenant.is_(None))
    )
)


class SqlClients:
    """A client without a tenant is seen from every scope, and written from the platform's alone."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    def _seen(self) -> ColumnElement[bool]:
        return or_(self._tx.mine(CLIENTS.c.tenant), CLIENTS.c.tenant.is_(None))

    async def add(self, client: Client) -> None:
        self._tx.require_mine(client.tenant)
        await self._tx.change(insert(CLIENTS), _client_columns(client))

    async def replace(self, client: Client) -> None:
        self._tx.require_mine(client.tenant)
        where = (CLIENTS.c.id == client.id, self._tx.mine(CLIENTS.c.tenant))
        await self._tx.change(update(CLIENTS).where(*where).values(_client_columns(client)))

    async def get(self, client: ClientId) -> Client | None:
        row = await self._tx.row(_CLIENTS, of_clients=[client])
        return to_record(Client, row) if row else None

    async def those(self, clients: Sequence[ClientId]) -> Sequence[Client]:
        return to_records(Client, await self._tx.rows(_CLIENTS, of_clients=list(clients)))

    async def locked(self, client: ClientId) -> Client | None:
        # SQLite has one writer at a time, and no such clause.
        where = (CLIENTS.c.id == client, self._tx.mine(CLIENTS.c.tenant))
        if await self._tx.row(select(CLIENTS.c.id).where(*where).with_for_update()) is None:
            return None
        return await self.get(client)

    async def list(self) -> Sequence[Client]:
        return await self._many(true())

    async def of_workload_issuer(self, issuer: str) -> Sequence[Client]:
        return await self._many(CLIENTS.c.workload_issuer == issuer)

    async def of_certificate(self, names: Sequence[str]) -> Sequence[Client]:
        return await self._many(CLIENTS.c.certificate_name.in_(names))

    async def with_self_signed(self) -> Sequence[Client]:
        return await self._many(CLIENTS.c.certificate_name.like("x5t#S256:%"))

    async def _many(self, condition: ColumnElement[bool]) -> Sequence[Client]:
        statement = select(CLIENTS).where(condition, self._seen()).order_by(CLIENTS.c.id)
        return to_records(Client, await self._tx.rows(statement))

    async def remove(self, client: ClientId) -> bool:
        where = (CLIENTS.c.id == client, self._tx.mine(CLIENTS.c.tenant))
        return await self._tx.change(delete(CLIENTS).where(*where)) > 0


def _client_columns(client: Client) -> dict[str, Any]:
    workload = client.proofs.workload
    return to_columns(client) | {
        "workload_issuer": workload.issuer if workload else None,
        "certificate_name": client.proofs.certificate_name,
    }


class SqlCredentials:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, credential: Credential) -> None:
        self._tx.require_mine(credential.tenant)
        await self._tx.change(insert(CREDENTIALS), to_columns(credential))

    async def replace(self, credential: Credential) -> None:
        self._tx.require_mine(credential.tenant)
        where = (CREDENTIALS.c.id == credential.id, self._tx.mine(CREDENTIALS.c.tenant))
        await self._tx.change(update(CREDENTIALS).where(*where).values(to_columns(credential)))

    async def get(self, credential: CredentialId) -> Credential | None:
        return await self._one(CREDENTIALS.c.id == credential)

    async def named(self, name: str) -> Credential | None:
        return await self._one(CREDENTIALS.c.name == name)

    async def locked(self, credential: CredentialId) -> Credential | None:
        # SQLite has one writer at a time, and no such clause.
        where = (CREDENTIALS.c.id == credential, self._tx.mine(CREDENTIALS.c.tenant))
        if await self._tx.row(select(CREDENTIALS.c.id).where(*where).with_for_update()) is None:
            return None
        return await self.get(credential)

    async def _one(self, condition: ColumnElement[bool]) -> Credential | None:
        row = await self._tx.row(select(CREDENTIALS).where(condition, self._tx.mine(CREDENTIALS.c.tenant)))
        return to_record(Credential, row) if row else None

    async def list(self) -> Sequence[Credential]:
        mine = self._tx.mine(CREDENTIALS.c.tenant)
        rows = await self._tx.rows(select(CREDENTIALS).where(mine).order_by(CREDENTIALS.c.name))
        return to_records(Credential, rows)

    async def remove(self, credential: CredentialId) -> None:
        where = (CREDENTIALS.c.id == credential, self._tx.mine(CREDENTIALS.c.tenant))
        await self._tx.change_many(delete(CREDENTIALS).where(*where))


class SqlVersions:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    def _where(self, credential: CredentialId) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
        return VERSIONS.c.credential_id == credential, self._tx.mine(VERSIONS.c.tenant)

    async def add(self, version: CredentialVersion) -> None:
        self._tx.require_mine(version.tenant)
        await self._tx.change(insert(VERSIONS), to_columns(version))

    async def replace(self, version: CredentialVersion) -> None:
        self._tx.require_mine(version.tenant)
        where = (*self._where(version.credential_id), VERSIONS.c.version == version.version)
        await self._tx.change(update(VERSIONS).where(*where).values(to_columns(version)))

    async def get(self, credential: CredentialId, version: int) -> CredentialVersion | None:
        where = (*self._where(credential), VERSIONS.c.version == version)
        row = await self._tx.row(select(VERSIONS).where(*where))
        return to_record(CredentialVersion, row) if row else None

    async def of(self, credential: CredentialId) -> Sequence[CredentialVersion]:
        statement = select(VERSIONS).where(*self._where(credential)).order_by(VERSIONS.c.version)
        return to_records(CredentialVersion, await self._tx.rows(statement))

    async def reseal(self, version: CredentialVersion, *, instead_of: bytes) -> bool:
        self._tx.require_mine(version.tenant)
        where = (*self._where(version.credential_id), VERSIONS.c.version == version.version)
        values = {"envelope": version.envelope, "kek_id": version.kek_id}
        statement = update(VERSIONS).where(*where, VERSIONS.c.envelope == instead_of).values(values)
        return await self._tx.change(statement) > 0


_GRANTS_OF_CREDENTIALS: Final = Scoped(
    lambda mine: (
        select(GRANTS)
        .where(among(GRANTS.c.credential_id, "of_credentials"), mine(GRANTS.c.tenant))
        .order_by(GRANTS.c.created_at, GRANTS.c.id)
    )
)


class SqlGrants:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, grant: Grant) -> None:
        self._tx.require_mine(grant.tenant)
        await self._tx.change(insert(GRANTS), to_columns(grant))

    async def get(self, grant: GrantId) -> Grant | None:
        row = await self._tx.row(select(GRANTS).where(GRANTS.c.id == grant, self._tx.mine(GRANTS.c.tenant)))
        return to_record(Grant, row) if row else None

    async def list(self) -> Sequence[Grant]:
        return await self._many(true())

    async def of_credentials(self, credentials: Sequence[CredentialId]) -> Sequence[Grant]:
        rows = await self._tx.rows(_GRANTS_OF_CREDENTIALS, of_credentials=list(credentials))
        return to_records(Grant, rows)

    async def _many(self, condition: ColumnElement[bool]) -> Sequence[Grant]:
        statement = select(GRANTS).where(condition, self._tx.mine(GRANTS.c.tenant))
        return to_records(Grant, await self._tx.rows(statement.order_by(GRANTS.c.created_at, GRANTS.c.id)))

    async def remove(self, grant: GrantId) -> None:
        await self._tx.change(delete(GRANTS).where(GRANTS.c.id == grant, self._tx.mine(GRANTS.c.tenant)))


class SqlAllowRules:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, rule: TenantAllowRule) -> None:
        self._tx.require_mine(rule.tenant)
        await self._tx.change(insert(RULES), to_columns(rule))

    async def get(self, rule: str) -> TenantAllowRule | None:
        row = await self._tx.row(select(RULES).where(RULES.c.id == rule, self._tx.mine(RULES.c.tenant)))
        return to_record(TenantAllowRule, row) if row else None

    async def list(self) -> Sequence[TenantAllowRule]:
        return await self._many(true())

    async def for_session(self, session: SessionId | None) -> Sequence[TenantAllowRule]:
        return await self._many(or_(RULES.c.session.is_(None), RULES.c.session == session))

    async def _many(self, condition: ColumnElement[bool]) -> Sequence[TenantAllowRule]:
        statement = select(RULES).where(condition, self._tx.mine(RULES.c.tenant))
        rows = await self._tx.rows(statement.order_by(RULES.c.created_at, RULES.c.id))
        return to_records(TenantAllowRule, rows)

    async def remove(self, rule: str) -> None:
        await self._tx.change(delete(RULES).where(RULES.c.id == rule, self._tx.mine(RULES.c.tenant)))

    async def remove_of_sessions(self, sessions: Sequence[Session]) -> None:
        where = (RULES.c.session == bindparam("of_session"), self._tx.mine(RULES.c.tenant))
        await self._tx.change_each(delete(RULES).where(*where), [{"of_session": session.id} for session in sessions])


_SESSION: Final = Scoped(
    lambda mine: select(SESSIONS).where(SESSIONS.c.id == bindparam("of_session"), mine(SESSIONS.c.tenant))
)


class SqlSessions:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    def _where(self, session: SessionId) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
        return SESSIONS.c.id == session, self._tx.mine(SESSIONS.c.tenant)

    async def add(self, session: Session) -> None:
        self._tx.require_mine(session.tenant)
        await self._tx.change(insert(SESSIONS), to_columns(session))

    async def get(self, session: SessionId) -> Session | None:
        row = await self._tx.row(_SESSION, of_session=session)
        return to_record(Session, row) if row else None

    # Never the whole row: what another replica wrote since it was read, its end above all, would be undone.

    async def join(self, session: SessionId, *, by: ClientId) -> bool:
        where = (*self._where(session), SESSIONS.c.ended_at.is_(None))
        return await self._tx.change(update(SESSIONS).where(*where).values(joined_by=by)) == 1

    async def erase(self, session: SessionId, at: float) -> None:
        where = (*self._where(session), SESSIONS.c.erased_at.is_(None))
        await self._tx.change(update(SESSIONS).where(*where).values(erased_at=at))

    async def live_of_runtime(self, runtime: ClientId, now: float) -> Sequence[Session]:
        where = (SESSIONS.c.runtime == runtime, _is_live(now), self._tx.mine(SESSIONS.c.tenant))
        return to_records(Session, await self._tx.rows(select(SESSIONS).where(*where).order_by(SESSIONS.c.id)))

    async def end(self, sessions: Sequence[Session], at: float) -> None:
        where = (
            SESSIONS.c.id == bindparam("of_session"),
            SESSIONS.c.ended_at.is_(None),
            self._tx.mine(SESSIONS.c.tenant),
        )
        await self._tx.change_each(
            update(SESSIONS).where(*where).values(ended_at=at), [{"of_session": session.id} for session in sessions]
        )

    async def to_erase(self, runtime: ClientId, *, after: SessionId | None, limit: int) -> Sequence[Session]:
        where = [SESSIONS.c.runtime == runtime, SESSIONS.c.ended_at.is_not(None), SESSIONS.c.erased_at.is_(None)]
        if after is not None:
            where.append(SESSIONS.c.id > after)
        statement = select(SESSIONS).where(*where, self._tx.mine(SESSIONS.c.tenant)).order_by(SESSIONS.c.id)
        return to_records(Session, await self._tx.rows(statement.limit(limit)))

    async def live_of_subject(self, subject: SubjectId, now: float) -> Sequence[Session]:
        where = (SESSIONS.c.subject == subject, _is_live(now), self._tx.mine(SESSIONS.c.tenant))
        return to_records(Session, await self._tx.rows(select(SESSIONS).where(*where).order_by(SESSIONS.c.id)))

    async def purge(self, *, over_before: float, limit: int) -> int:
        over = or_(SESSIONS.c.ended_at < over_before, SESSIONS.c.not_after < over_before)
        some = select(SESSIONS.c.id).where(over, self._tx.mine(SESSIONS.c.tenant)).limit(limit)
        return await self._tx.change_many(delete(SESSIONS).where(SESSIONS.c.id.in_(some)))


def _is_live(now: float) -> ColumnElement[bool]:
    """`Session.is_live`, in SQL."""
    return and_(SESSIONS.c.ended_at.is_(None), SESSIONS.c.not_after > now)


@functools.cache
def _adding_tokens(count: int) -> Scoped:
    """One statement for all of them: each is a way to the database and back."""
    names = [column.name for column in TOKENS.c]
    return Scoped(lambda _mine: insert(TOKENS).from_select(names, union_all(*map(_token_to_add, range(count)))))


def _token_to_add(number: int) -> Select[Any]:
    def given(column: ColumnElement[Any]) -> ColumnElement[Any]:
        return bindparam(f"{column.key}_{number}", type_=column.type)

    # A suspension is its caller's, for that credential: whoever exchanges again is no further than before.
    other = TOKENS.alias()
    alike = (other.c.tenant, TOKENS.c.tenant), (other.c.session, TOKENS.c.session), (other.c.client, TOKENS.c.client)
    conditions = [theirs == given(mine) for theirs, mine in (*alike, (other.c.credential_id, TOKENS.c.credential_id))]
    still = other.c.suspended_until > given(TOKENS.c.created_at)
    suspended = select(func.max(other.c.suspended_until)).where(*conditions, still).scalar_subquery()
    inherited = func.coalesce(given(TOKENS.c.suspended_until), suspended)
    return select(*(inherited if column is TOKENS.c.suspended_until else given(column) for column in TOKENS.c))


_TOKEN: Final = Scoped(
    lambda mine: select(TOKENS).where(TOKENS.c.sha256 == bindparam("of_sha256"), mine(TOKENS.c.tenant))
)


class SqlTokens:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, *tokens: Token) -> None:
        for token in tokens:
            self._tx.require_mine(token.tenant)
        numbered = {
            f"{name}_{number}": value
            for number, token in enumerate(tokens)
            for name, value in to_columns(token).items()
        }
        await self._tx.change(_adding_tokens(len(tokens)), **numbered)

    async def get(self, token: PlaceholderId) -> Token | None:
        return await self._one(TOKENS.c.id == token)

    async def by_fingerprint(self, sha256: str) -> Token | None:
        row = await self._tx.row(_TOKEN, of_sha256=sha256)
        return to_record(Token, row) if row else None

    async def _one(self, condition: ColumnElement[bool]) -> Token | None:
        row = await self._tx.row(select(TOKENS).where(condition, self._tx.mine(TOKENS.c.tenant)))
        return to_record(Token, row) if row else None

    async def list(self, kind: TokenKind, *, before: Token | None = None, limit: int = 1000) -> Sequence[Token]:
        statement = select(TOKENS).where(TOKENS.c.kind == kind.value, self._tx.mine(TOKENS.c.tenant))
        if before is not None:
            place = tuple_(TOKENS.c.created_at, TOKENS.c.id)
            statement = statement.where(place < tuple_(before.created_at, before.id))
        newest_first = statement.order_by(TOKENS.c.created_at.desc(), TOKENS.c.id.desc()).limit(limit)
        return to_records(Token, await self._tx.rows(newest_first))

    async def usable_without_session(self, client: ClientId, now: float) -> Sequence[Token]:
        statement = select(TOKENS).where(
            TOKENS.c.client == client,
            TOKENS.c.session.is_(None),
            TOKENS.c.revoked_at.is_(None),
            TOKENS.c.expires_at > now,
            self._tx.mine(TOKENS.c.tenant),
        )
        return to_records(Token, await self._tx.rows(statement))

    async def prolong(self, sha256: str, expires_at: float) -> bool:
        where = (TOKENS.c.sha256 == sha256, TOKENS.c.revoked_at.is_(None), self._tx.mine(TOKENS.c.tenant))
        return await self._tx.change(update(TOKENS).where(*where).values(expires_at=expires_at)) == 1

    async def suspend(self, token: PlaceholderId, until: float, *, now: float) -> bool:
        is_not = or_(TOKENS.c.suspended_until.is_(None), TOKENS.c.suspended_until <= now)
        where = (TOKENS.c.id == token, TOKENS.c.revoked_at.is_(None), is_not, self._tx.mine(TOKENS.c.tenant))
        return await self._tx.change(update(TOKENS).where(*where).values(suspended_until=until)) == 1

    async def revoke(self, tokens: Sequence[Token], at: float) -> None:
        statement = self._revocation(TOKENS.c.sha256 == bindparam("of_sha256"), at)
        await self._tx.change_each(statement, [{"of_sha256": token.sha256} for token in tokens])

    async def revoke_of_credential(self, credential: CredentialId, at: float) -> None:
        await self._tx.change_many(self._revocation(TOKENS.c.credential_id == credential, at))

    async def revoke_no_longer_granted(self, credential: CredentialId, at: float) -> None:
        # One statement, however many there are: none of them becomes an object on the event loop.
        role = self._tx.each_text_of(SESSIONS.c.roles)
        of_session = select(SESSIONS.c.id).where(SESSIONS.c.id == TOKENS.c.session, role == GRANTS.c.role)
        of_a_role = exists(of_session.correlate(TOKENS, GRANTS))
        granted = exists(
            select(GRANTS.c.id).where(
                GRANTS.c.credential_id == TOKENS.c.credential_id,
                GRANTS.c.tenant == TOKENS.c.tenant,
                or_(GRANTS.c.client.is_(None), GRANTS.c.client == TOKENS.c.client),
                or_(GRANTS.c.subject == TOKENS.c.subject, and_(GRANTS.c.role.is_not(None), of_a_role)),
            )
        )
        await self._tx.change_many(self._revocation(and_(TOKENS.c.credential_id == credential, ~granted), at))

    async def revoke_of_sessions(self, sessions: Sequence[Session], at: float) -> None:
        # With the tenant, since the index begins with it.
        of_session = and_(TOKENS.c.tenant == bindparam("of_tenant"), TOKENS.c.session == bindparam("of_session"))
        await self._tx.change_many(
            self._revocation(of_session, at),
            [{"of_tenant": session.tenant, "of_session": session.id} for session in sessions],
        )

    async def revoke_of_client(self, client: ClientId, at: float) -> None:
        await self._tx.change_many(self._revocation(TOKENS.c.client == client, at))

    def _revocation(self, condition: ColumnElement[bool], at: float) -> Any:
        where = (condition, TOKENS.c.revoked_at.is_(None), self._tx.mine(TOKENS.c.tenant))
        return update(TOKENS).where(*where).values(revoked_at=at)

    async def forget_of_session(self, session: Session) -> None:
        of_session = (TOKENS.c.tenant == session.tenant, TOKENS.c.session == session.id)
        await self._tx.change(delete(TOKENS).where(*of_session, self._tx.mine(TOKENS.c.tenant)))

    async def any_usable_of_before(self, created_before: float, now: float) -> bool:
        session_lives = exists(select(SESSIONS.c.id).where(SESSIONS.c.id == TOKENS.c.session, _is_live(now)))
        usable = and_(TOKENS.c.revoked_at.is_(None), or_(TOKENS.c.expires_at > now, session_lives))
        where = (TOKENS.c.created_at < created_before, usable, self._tx.mine(TOKENS.c.tenant))
        return await self._tx.row(select(TOKENS.c.id).where(*where).limit(1)) is not None

    async def purge(self, *, dead_before: float, limit: int) -> int:
        # A live session's token can be renewed however long ago it expired, and says that it was revoked for as long.
        session_lives = exists(select(SESSIONS.c.id).where(SESSIONS.c.id == TOKENS.c.session, _is_live(dead_before)))
        dead = and_(TOKENS.c.expires_at < dead_before, ~session_lives)
        some = select(TOKENS.c.sha256).where(dead, self._tx.mine(TOKENS.c.tenant)).limit(limit)
        return await self._tx.change_many(delete(TOKENS).where(TOKENS.c.sha256.in_(some)))


class SqlOwnKeys:
    """The control plane's own keys: no tenant's, so only the platform's scope reaches them."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def add(self, key: OwnKey) -> None:
        self._tx.require_mine(None)
        await self._tx.change(insert(KEYS), to_columns(key))

    async def list(self, purpose: KeyPurpose) -> Sequence[OwnKey]:
        self._tx.require_mine(None)
        statement = select(KEYS).where(KEYS.c.purpose == purpose.value).order_by(KEYS.c.created_at.desc(), KEYS.c.id)
        return to_records(OwnKey, await self._tx.rows(statement))

    async def remove(self, keys: Sequence[OwnKey]) -> None:
        self._tx.require_mine(None)
        if keys:
            await self._tx.change(delete(KEYS).where(KEYS.c.id.in_([key.id for key in keys])))


_POSITION: Final = Scoped(
    lambda _mine: select(
        META.c.value, select(func.coalesce(func.max(OUTBOX.c.sequence), 0)).scalar_subquery().label("sequence")
    ).where(META.c.name == "epoch")
)


class SqlOutbox:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def append(self, changes: Sequence[Change], at: float) -> None:
        for change in changes:
            self._tx.require_mine(change.tenant)
        self._tx.publish(
            [
                {
                    "at": at,
                    "tenant": change.tenant,
                    "kind": change.kind.value,
                    "subject_id": change.id,
                    "revoked": change.revoked,
                }
                for change in changes
            ]
        )

    async def after(self, sequence: int, limit: int) -> Sequence[PublishedChange]:
        statement = select(OUTBOX).where(OUTBOX.c.sequence > sequence, self._tx.mine(OUTBOX.c.tenant))
        return [
            PublishedChange(
                sequence=row["sequence"],
                change=Change(
                    kind=ChangeKind(row["kind"]), tenant=row["tenant"], id=row["subject_id"], revoked=row["revoked"]
                ),
            )
            for row in await self._tx.rows(statement.order_by(OUTBOX.c.sequence).limit(limit))
        ]

    async def position(self) -> Position:
        self._tx.require_mine(None)  # a tenant sees its own numbers alone, which are no position
        row = await self._tx.row(_POSITION)
        assert row is not None, "the migrations write the epoch"
        return Position(epoch=row["value"], sequence=row["sequence"])

    async def purge(self, *, before: float, keep: int, limit: int) -> int:
        self._tx.require_mine(None)
        newest = select(func.coalesce(func.max(OUTBOX.c.sequence), 0)).scalar_subquery()
        old = (OUTBOX.c.at < before, OUTBOX.c.sequence <= newest - keep)
        # The oldest first: what is left is without a hole.
        some = select(OUTBOX.c.sequence).where(*old).order_by(OUTBOX.c.sequence).limit(limit)
        return await self._tx.change_many(delete(OUTBOX).where(OUTBOX.c.sequence.in_(some)))


AUDIT_UNAVAILABLE = Refusal(
    RefusalCode.AUDIT_UNAVAILABLE,
    "the audit trail takes no event, and nothing is issued that it does not have",
    "an operator looks at the database: the log names the error",
    retry_after_seconds=5,
)


_ONE_EVENT: Final[dict[str, Any]] = {
    name: bindparam(name) for name in ("event_id", "at", "tenant", "request_id", "action", "code", "record")
}
_APPEND_ON_POSTGRESQL: Final = postgresql_insert(AUDIT).on_conflict_do_nothing(index_elements=["event_id"])
_APPEND_ON_SQLITE: Final = sqlite_insert(AUDIT).on_conflict_do_nothing(index_elements=["event_id"])
_APPEND_ONE_ON_POSTGRESQL: Final = Scoped(lambda _mine: _APPEND_ON_POSTGRESQL.values(_ONE_EVENT))
_APPEND_ONE_ON_SQLITE: Final = Scoped(lambda _mine: _APPEND_ON_SQLITE.values(_ONE_EVENT))


class SqlAudit:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def append(self, events: Sequence[AuditEvent]) -> None:
        if events:
            async with self._taken(events):
                rows = _audit_rows(events)
                if len(rows) == 1:
                    one = _APPEND_ONE_ON_POSTGRESQL if self._tx.is_postgresql else _APPEND_ONE_ON_SQLITE
                    await self._tx.change(one, **rows[0])
                else:
                    await self._tx.change(_APPEND_ON_POSTGRESQL if self._tx.is_postgresql else _APPEND_ON_SQLITE, rows)

    async def append_new(self, events: Sequence[AuditEvent]) -> frozenset[str]:
        if not events:
            return frozenset()
        # Of two transactions with the same event the second waits here for the first: whoever is told that an event is
        # new is the only one.
        statement = self._tx.insert_once(AUDIT, by="event_id").returning(AUDIT.c.event_id)
        async with self._taken(events):
            return frozenset(row["event_id"] for row in await self._tx.written(statement, _audit_rows(events)))

    @asynccontextmanager
    async def _taken(self, events: Sequence[AuditEvent]) -> AsyncIterator[None]:
        """Raises `RefusedError(audit_unavailable)` where the trail does not take them."""
        for event in events:
            self._tx.require_mine(TenantId(event.tenant) if event.tenant is not None else None)
        try:
            yield
        except (SQLAlchemyError, TakenError) as error:
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                raise  # the database is away, the trail with it
            raise RefusedError(AUDIT_UNAVAILABLE) from error

    async def append_if_possible(self, events: Sequence[AuditEvent]) -> bool:
        try:
            async with self._tx.apart():
                await self.append(events)
        except RefusedError:
            return False
        return True

    async def after(
        self, sequence: int, *, limit: int, request_id: str | None
    ) -> Sequence[tuple[int, dict[str, object]]]:
        statement = select(AUDIT.c.sequence, AUDIT.c.record).where(
            AUDIT.c.sequence > sequence, self._tx.mine(AUDIT.c.tenant)
        )
        if request_id is not None:
            statement = statement.where(AUDIT.c.request_id == request_id)
        rows = await self._tx.rows(statement.order_by(AUDIT.c.sequence).limit(limit))
        return [(row["sequence"], row["record"]) for row in rows]

    async def sequence_of(self, event_id: str) -> int | None:
        row = await self._tx.row(
            select(AUDIT.c.sequence).where(AUDIT.c.event_id == event_id, self._tx.mine(AUDIT.c.tenant))
        )
        return row["sequence"] if row else None

    async def leaks(self, token: Token, *, since: float, limit: int) -> int:
        some = select(AUDIT.c.sequence).where(
            AUDIT.c.tenant == token.tenant,
            AUDIT.c.action == literal_column(f"'{LEAK_BLOCKED}'"),  # spelt out, as in the index of these
            AUDIT.c.at > since,
            AUDIT.c.record["placeholder_id"].as_string() == token.id,
            self._tx.mine(AUDIT.c.tenant),
        )
        row = await self._tx.row(select(func.count().label("leaks")).select_from(some.limit(limit).subquery()))
        assert row is not None
        return int(row["leaks"])


def _audit_rows(events: Sequence[AuditEvent]) -> list[dict[str, Any]]:
    return [
        {
            "event_id": event.event_id,
            "at": event.at,
            "tenant": event.tenant,
            "request_id": event.request_id,
            "action": event.action,
            "code": event.code.value if event.code else None,
            "record": event_to_json(event),
        }
        for event in events
    ]


def _prefixed(table: Table, cls: type, prefix: str) -> list[ColumnElement[Any]]:
    return [table.c[name].label(prefix + name) for name in field_names(cls)]


_TOKEN_FACTS = (
    select(
        *_prefixed(TOKENS, Token, "t_"),
        *_prefixed(SESSIONS, Session, "s_"),
        *_prefixed(CREDENTIALS, Credential, "c_"),
        *_prefixed(VERSIONS, CredentialVersion, "v_"),
        *_prefixed(ROTATIONS, Rotation, "r_"),
        exists(select(CLIENTS.c.id).where(CLIENTS.c.id == TOKENS.c.client)).label("client_registered"),
        exists(select(LIMITS.c.id).where(LIMITS.c.tenant == TOKENS.c.tenant)).label("has_limits"),
    )
    .select_from(TOKENS)
    # What a row of another tenant says about a token does not count, whoever wrote the reference.
    .outerjoin(SESSIONS, (SESSIONS.c.id == TOKENS.c.session) & (SESSIONS.c.tenant == TOKENS.c.tenant))
    .outerjoin(CREDENTIALS, (CREDENTIALS.c.id == TOKENS.c.credential_id) & (CREDENTIALS.c.tenant == TOKENS.c.tenant))
    .outerjoin(
        VERSIONS,
        (VERSIONS.c.credential_id == CREDENTIALS.c.id) & (VERSIONS.c.version == CREDENTIALS.c.current_version),
    )
    .outerjoin(ROTATIONS, (ROTATIONS.c.credential_id == CREDENTIALS.c.id) & is_running())
)

_FACTS_OF_TOKENS: Final = Scoped(
    lambda mine: _TOKEN_FACTS.where(among(TOKENS.c.sha256, "of_sha256s"), mine(TOKENS.c.tenant))
)

_GRANTED: Final = Scoped(
    lambda mine: (
        select(*_prefixed(GRANTS, Grant, "g_"), *_prefixed(CREDENTIALS, Credential, "c_"))
        .join_from(
            GRANTS,
            CREDENTIALS,
            (CREDENTIALS.c.id == GRANTS.c.credential_id) & (CREDENTIALS.c.tenant == GRANTS.c.tenant),
        )
        .where(
            GRANTS.c.tenant == bindparam("of_tenant"),
            mine(GRANTS.c.tenant),
            or_(GRANTS.c.subject == bindparam("subject"), among(GRANTS.c.role, "roles")),
            or_(GRANTS.c.client.is_(None), GRANTS.c.client == bindparam("client")),
        )
        .order_by(CREDENTIALS.c.name, GRANTS.c.created_at, GRANTS.c.id)
    )
)


class SqlHotReads:
    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    async def token_facts(self, sha256s: Sequence[str]) -> Mapping[str, TokenFacts | None]:
        rows = await self._tx.rows(_FACTS_OF_TOKENS, of_sha256s=list(sha256s))
        return {row["t_sha256"]: _facts(row) for row in rows}

    async def granted(
        self, *, subject: SubjectId, roles: tuple[str, ...], client: ClientId, tenant: TenantId
    ) -> Sequence[tuple[Credential, tuple[Grant, ...]]]:
        # The same statement runs whatever is granted: how long it takes tells nothing.
        rows = await self._tx.rows(_GRANTED, of_tenant=tenant, subject=subject, roles=list(roles), client=client)
        grants = [
            grant
            for grant in to_records(Grant, rows, prefix="g_")
            if grant.applies_to(subject=subject, roles=roles, client=client)
        ]
        wanted = {grant.credential_id for grant in grants}
        found = {row["c_id"]: row for row in rows if row["c_id"] in wanted}
        return [
            (credential, tuple(grant for grant in grants if grant.credential_id == credential.id))
            for credential in to_records(Credential, found.values(), prefix="c_")
        ]


def _facts(row: Mapping[str, Any]) -> TokenFacts | None:
    try:
        return TokenFacts(
            token=to_record(Token, row, prefix="t_"),
            session=to_record(Session, row, prefix="s_") if row["s_id"] is not None else None,
            credential=to_record(Credential, row, prefix="c_") if row["c_id"] is not None else None,
            version=to_record(CredentialVersion, row, prefix="v_") if row["v_version"] is not None else None,
            client_registered=bool(row["client_registered"]),
            has_limits=bool(row["has_limits"]),
            rotation=to_record(Rotation, row, prefix="r_") if row["r_id"] is not None else None,
        )
    except UnreadableRowError:
        return None
