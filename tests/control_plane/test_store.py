"""The store's one suite, on SQLite and on PostgreSQL: what is written is read back, in its scope and nowhere else."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql import repositories
from control_plane.adapters.sql.connections import Scoped
from control_plane.adapters.sql.engine import (
    COMMITS_IN_THE_LOG,
    WRITER_WAITS_SECONDS,
    Database,
    UnsupportedDatabaseError,
    begin_writing,
    open_database,
)
from control_plane.adapters.sql.migrate import migrate
from control_plane.adapters.sql.repositories import ScopeError
from control_plane.adapters.sql.store import SqlStore
from control_plane.adapters.sql.tables import Base
from control_plane.contract.caller import ClientId, CredentialId, GrantId, PlaceholderId, SessionId, SubjectId, TenantId
from control_plane.contract.destination import parse_destination
from control_plane.contract.placement import BEARER, BasicPlacement, QueryPlacement
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.contract.wire import AuditEvent
from control_plane.core.records import (
    Change,
    ChangeKind,
    Client,
    ClientKind,
    ClientSource,
    Credential,
    CredentialVersion,
    Grant,
    KeyPurpose,
    OwnKey,
    Session,
    Tenant,
    TenantAllowRule,
    Token,
    TokenKind,
    VersionState,
)
from control_plane.ports import CrossTenantReason, PlatformScope, TakenError, TenantScope
from tests.control_plane.databases import migrated_database, migrated_file, new_database

PLATFORM = PlatformScope(CrossTenantReason.ADMINISTER)
ACME, EVIL = TenantId("acme"), TenantId("evil")
ALICE = SubjectId("alice")


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    opened = open_database(await migrated_database(request.param, request, tmp_path))
    yield opened
    await opened.close()


@pytest.fixture
async def wake() -> LocalWake:
    return LocalWake()


@pytest.fixture
async def store(database: Database, wake: LocalWake) -> SqlStore:
    """With the tenants `acme` and `evil`."""
    store = SqlStore(database, wake)
    async with store.write(PLATFORM) as records:
        for tenant in (ACME, EVIL):
            await records.tenants.add(Tenant(tenant, 1.5))
    return store


def client(tenant: TenantId | None = ACME, **fields: Any) -> Client:
    made = Client(
        id=ClientId(f"{tenant}-runtime"),
        tenant=tenant,
        kind=ClientKind.RUNTIME,
        scopes=(),
        secret_sha256="0" * 64,
        source=ClientSource.API,
        created_at=1.5,
    )
    return replace(made, **fields)


def credential(tenant: TenantId = ACME, **fields: Any) -> Credential:
    made = Credential(
        id=CredentialId(f"cred_{tenant}"),
        tenant=tenant,
        name="example",
        preset=None,
        kind="static",
        destinations=(
            parse_destination("https://api.example.com/v1", methods=frozenset({"GET", "POST"})),
            parse_destination("http://[::1]:8080", allow_private=True),
        ),
        placements=(BEARER, BasicPlacement(username="u"), QueryPlacement(parameter="key")),
        variables=("A", "B"),
        credential_required=True,
        current_version=1,
        created_at=1.5,
        updated_at=2.5,
    )
    return replace(made, **fields)


def version(tenant: TenantId = ACME, **fields: Any) -> CredentialVersion:
    made = CredentialVersion(
        credential_id=CredentialId(f"cred_{tenant}"),
        version=1,
        tenant=tenant,
        state=VersionState.ACTIVE,
        kek_id="kek1",
        envelope=b"\x00\xffsealed",
        created_at=1.5,
    )
    return replace(made, **fields)


def grant(tenant: TenantId = ACME, **fields: Any) -> Grant:
    made = Grant(
        id=GrantId(f"gr_{tenant}"),
        tenant=tenant,
        credential_id=CredentialId(f"cred_{tenant}"),
        subject=ALICE,
        role=None,
        client=None,
        methods=frozenset({"GET"}),
        path_prefixes=frozenset({"/v1"}),
        until=9.5,
        created_at=1.5,
    )
    return replace(made, **fields)


def rule(tenant: TenantId = ACME, **fields: Any) -> TenantAllowRule:
    made = TenantAllowRule(
        id=f"ar_{tenant}",
        tenant=tenant,
        host="mirror.test",
        port=443,
        methods=None,
        allow_private=False,
        session=None,
        created_at=1.5,
    )
    return replace(made, **fields)


def session(tenant: TenantId = ACME, **fields: Any) -> Session:
    made = Session(
        id=SessionId(f"ses_{tenant}"),
        tenant=tenant,
        subject=ALICE,
        roles=("engineers",),
        runtime=ClientId(f"{tenant}-runtime"),
        joined_by=None,
        created_at=1.5,
        not_after=100.5,
        ended_at=None,
    )
    return replace(made, **fields)


def token(tenant: TenantId = ACME, **fields: Any) -> Token:
    made = Token(
        sha256=f"{tenant}".ljust(64, "0"),
        id=PlaceholderId(f"ph_{tenant}"),
        kind=TokenKind.PLACEHOLDER,
        tenant=tenant,
        subject=ALICE,
        session=SessionId(f"ses_{tenant}"),
        client=ClientId(f"{tenant}-runtime"),
        credential_id=CredentialId(f"cred_{tenant}"),
        ttl_seconds=900,
        created_at=1.5,
        expires_at=901.5,
        revoked_at=None,
    )
    return replace(made, **fields)


def event(number: int, tenant: TenantId | None = ACME, **fields: Any) -> AuditEvent:
    made = AuditEvent(event_id=f"ev_{number}", at=1.5, request_id=f"req_{number}", action="swap", tenant=tenant)
    return replace(made, **fields)


async def fill(store: SqlStore, tenant: TenantId) -> None:
    """One of everything."""
    async with store.write(TenantScope(tenant)) as records:
        await records.clients.add(client(tenant))
        await records.credentials.add(credential(tenant))
        await records.versions.add(version(tenant))
        await records.grants.add(grant(tenant))
        await records.sessions.add(session(tenant))
        await records.rules.add(rule(tenant))
        await records.tokens.add(token(tenant))
        await records.outbox.append([Change(ChangeKind.CREDENTIAL, tenant, f"cred_{tenant}")], 1.5)
        await records.audit.append([event(1 if tenant == ACME else 2, tenant)])


# --- read back -------------------------------------------------------------------------------------------------------


async def test_what_is_written_is_read_back_unchanged(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.read(TenantScope(ACME)) as records:
        assert await records.tenants.get(ACME) == Tenant(ACME, 1.5)
        assert await records.clients.get(client().id) == client()
        assert await records.credentials.get(credential().id) == credential()
        assert await records.credentials.named("example") == credential()
        assert await records.versions.get(credential().id, 1) == version()
        assert await records.grants.get(grant().id) == grant()
        assert await records.rules.get(rule().id) == rule()
        assert await records.sessions.get(session().id) == session()
        assert await records.tokens.get(token().id) == token()
        assert await records.tokens.by_fingerprint(token().sha256) == token()
        (change,) = await records.outbox.after(0, 10)
        assert change.change == Change(ChangeKind.CREDENTIAL, ACME, "cred_acme")
        ((_, stored),) = await records.audit.after(0, limit=10, request_id=None)
        assert stored["event_id"] == "ev_1"


async def test_what_is_replaced_is_read_back_changed(store: SqlStore) -> None:
    await fill(store, ACME)
    changed = (
        credential(destinations=credential().destinations[:1], placements=(BEARER,), current_version=2),
        version(state=VersionState.RETIRED, envelope=None, kek_id=None),
        session(joined_by=ClientId("acme-runtime"), erased_at=5.5),
    )

    async with store.write(TenantScope(ACME)) as records:
        await records.credentials.replace(changed[0])
        await records.versions.replace(changed[1])
        assert await records.sessions.join(session().id, by=ClientId("acme-runtime"))
        await records.sessions.erase(session().id, 5.5)
        assert await records.tokens.prolong(token().sha256, 999.5)

    async with store.read(TenantScope(ACME)) as records:
        assert await records.credentials.get(credential().id) == changed[0]
        assert await records.versions.of(credential().id) == [changed[1]]
        assert await records.sessions.get(session().id) == changed[2]
        assert await records.tokens.get(token().id) == token(expires_at=999.5)


async def test_all_that_decides_over_a_token_is_read_at_once(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.read(PLATFORM) as records:
        facts = (await records.hot.token_facts([token().sha256])).get(token().sha256)
        nothing = (await records.hot.token_facts(["0" * 64])).get("0" * 64)

    assert nothing is None
    assert facts is not None
    assert (facts.token, facts.session, facts.credential, facts.version) == (
        token(),
        session(),
        credential(),
        version(),
    )
    assert facts.client_registered


async def test_a_callers_grants_are_found_by_subject_role_and_client(store: SqlStore) -> None:
    await fill(store, ACME)
    differently: list[dict[str, Any]] = [
        {"subject": None, "role": "engineers"},
        {"subject": None, "role": "admins"},
        {"subject": SubjectId("bob")},
        {"client": ClientId("another")},
        {"client": ClientId("acme-runtime")},
    ]
    async with store.write(TenantScope(ACME)) as records:
        for number, fields in enumerate(differently):
            await records.grants.add(grant(id=GrantId(f"gr_{number}"), **fields))

    async with store.read(PLATFORM) as records:
        found = await records.hot.granted(
            subject=ALICE, roles=("engineers",), client=ClientId("acme-runtime"), tenant=ACME
        )
        nothing = await records.hot.granted(subject=SubjectId("eve"), roles=(), client=ClientId("x"), tenant=ACME)

    ((granted_credential, grants),) = found
    assert granted_credential == credential()
    assert {grant.id for grant in grants} == {"gr_acme", "gr_0", "gr_4"}
    assert list(nothing) == []


# --- scopes ----------------------------------------------------------------------------------------------------------


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py",
    "return tenant == self._scope.tenant if isinstance(self._scope, TenantScope) else true()",
    "return true()",
)
@pytest.mark.guards(
    "control_plane/adapters/sql/connections.py",
    "_tenant_only if for_tenant else _all_tenants",
    "_all_tenants",
)
async def test_a_tenants_scope_sees_nothing_of_another(store: SqlStore) -> None:
    await fill(store, ACME)
    await fill(store, EVIL)

    async with store.read(TenantScope(EVIL)) as records:
        assert await records.tenants.get(ACME) is None
        assert [tenant.id for tenant in await records.tenants.list()] == [EVIL]
        assert await records.clients.get(client().id) is None
        assert await records.credentials.get(credential().id) is None
        assert await records.credentials.named("example") == credential(EVIL)
        assert await records.versions.get(credential().id, 1) is None
        assert await records.versions.of(credential().id) == []
        assert await records.grants.get(grant().id) is None
        assert await records.grants.of_credentials([credential().id]) == []
        assert await records.rules.get(rule().id) is None
        assert await records.sessions.get(session().id) is None
        assert await records.tokens.get(token().id) is None
        assert await records.tokens.by_fingerprint(token().sha256) is None
        assert await records.tokens.usable_without_session(client().id, 0.0) == []
        assert await records.sessions.live_of_runtime(client().id, 0.0) == []
        assert (await records.hot.token_facts([token().sha256])).get(token().sha256) is None
        assert await records.hot.granted(subject=ALICE, roles=(), client=client().id, tenant=ACME) == []
        assert {change.change.tenant for change in await records.outbox.after(0, 10)} == {EVIL}
        assert len(await records.audit.after(0, limit=10, request_id=None)) == 1
        for listed in (
            await records.clients.list(),
            await records.credentials.list(),
            await records.grants.list(),
            await records.rules.list(),
            await records.tokens.list(TokenKind.PLACEHOLDER),
        ):
            assert {item.tenant for item in listed} == {EVIL}


async def test_a_tenants_scope_changes_nothing_of_another(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.write(TenantScope(EVIL)) as records:
        await records.tokens.revoke([token()], 5.5)
        await records.tokens.revoke_of_credential(credential().id, 5.5)
        await records.tokens.revoke_of_sessions([session()], 5.5)
        await records.tokens.revoke_of_client(client().id, 5.5)
        await records.sessions.end([session()], 5.5)
        assert not await records.sessions.join(session().id, by=ClientId("evil-runtime"))
        await records.sessions.erase(session().id, 5.5)
        assert await records.clients.locked(client().id) is None
        assert await records.tokens.purge(dead_before=9e9, limit=10) == 0
        assert await records.sessions.purge(over_before=9e9, limit=10) == 0
        assert not await records.tokens.prolong(token().sha256, 9e9)
        await records.grants.remove(grant().id)
        await records.rules.remove(rule().id)
        await records.rules.remove_of_sessions([session()])
        await records.credentials.remove(credential().id)
        assert not await records.clients.remove(client().id)
        assert not await records.tenants.remove(ACME)

    async with store.read(TenantScope(ACME)) as records:
        assert await records.tokens.get(token().id) == token()
        assert await records.grants.get(grant().id) == grant()
        assert await records.rules.get(rule().id) == rule()
        assert await records.credentials.get(credential().id) == credential()
        assert await records.clients.get(client().id) == client()
        assert await records.sessions.get(session().id) == session()


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py",
    "if isinstance(self._scope, TenantScope) and tenant != self._scope.tenant:",
    "if False:",
)
async def test_a_row_of_another_tenant_is_not_written(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.write(TenantScope(EVIL)) as records:
        for write in (
            records.tenants.add(Tenant(TenantId("new"), 1)),
            records.clients.add(client(id=ClientId("new"))),
            records.clients.add(client(None)),
            records.clients.replace(client()),
            records.credentials.add(credential(id=CredentialId("new"), name="new")),
            records.credentials.replace(credential()),
            records.versions.add(version(version=2)),
            records.versions.replace(version()),
            records.grants.add(grant(id=GrantId("new"))),
            records.rules.add(rule(id="new")),
            records.sessions.add(session(id=SessionId("new"))),
            records.tokens.add(token(id=PlaceholderId("new"), sha256="1" * 64)),
            records.outbox.append([Change(ChangeKind.POLICY, ACME, "acme")], 1),
            records.outbox.position(),
            records.outbox.purge(before=9e9, keep=0, limit=10),
            records.audit.append([event(9)]),
            records.own_keys.list(KeyPurpose.TAG),
            records.own_keys.add(OwnKey("k", KeyPurpose.TAG, b"", "kek", 1)),
        ):
            with pytest.raises(ScopeError):
                await write


async def test_a_client_of_all_tenants_is_seen_by_each(store: SqlStore) -> None:
    async with store.write(PLATFORM) as records:
        await records.clients.add(client(None))

    async with store.read(TenantScope(EVIL)) as records:
        assert await records.clients.get(client(None).id) == client(None)
    async with store.write(TenantScope(EVIL)) as records:
        assert not await records.clients.remove(client(None).id)


# --- transactions ----------------------------------------------------------------------------------------------------


async def test_what_raises_changes_nothing(store: SqlStore, wake: LocalWake) -> None:
    async def write_and_fail() -> None:
        async with store.write(TenantScope(ACME)) as records:
            await records.credentials.add(credential())
            await records.outbox.append([Change(ChangeKind.POLICY, ACME, "acme")], 1)
            raise RuntimeError

    wait = wake.listen()

    with pytest.raises(RuntimeError):
        await write_and_fail()

    async with store.read(PLATFORM) as records:
        assert await records.credentials.list() == []
        assert (await records.outbox.position()).sequence == 0
    await wait(0)


async def test_a_reading_transaction_does_not_write(store: SqlStore) -> None:
    with pytest.raises(ScopeError):
        async with store.read(TenantScope(ACME)) as records:
            await records.credentials.add(credential())


async def test_a_read_is_of_one_moment(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.read(PLATFORM) as before:
        old = await before.outbox.position()
        async with store.write(TenantScope(ACME)) as records:
            await records.grants.remove(grant().id)
            await records.outbox.append([Change(ChangeKind.GRANT, ACME, grant().id, revoked=True)], 1)

        assert await before.grants.get(grant().id) == grant()
        assert await before.outbox.position() == old

    async with store.read(PLATFORM) as after:
        assert await after.grants.get(grant().id) is None
        assert (await after.outbox.position()).sequence == old.sequence + 1


async def test_a_name_is_taken_once_in_a_tenant(store: SqlStore) -> None:
    await fill(store, ACME)

    with pytest.raises(TakenError):
        async with store.write(TenantScope(ACME)) as records:
            await records.credentials.add(credential(id=CredentialId("cred_2")))
    async with store.write(TenantScope(EVIL)) as records:
        await records.credentials.add(credential(EVIL))


async def test_what_hangs_on_a_credential_goes_with_it(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.write(TenantScope(ACME)) as records:
        await records.credentials.remove(credential().id)

    async with store.read(TenantScope(ACME)) as records:
        assert await records.versions.of(credential().id) == []
        assert await records.grants.list() == []
        assert await records.tokens.get(token().id) == token(credential_id=None)


async def test_what_hangs_on_a_tenant_goes_with_it_except_the_trail(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.write(TenantScope(ACME)) as records:
        assert await records.tenants.remove(ACME)

    async with store.read(TenantScope(ACME)) as records:
        for left in (
            await records.clients.list(),
            await records.credentials.list(),
            await records.grants.list(),
            await records.rules.list(),
            await records.tokens.list(TokenKind.PLACEHOLDER),
        ):
            assert left == []
        assert len(await records.audit.after(0, limit=10, request_id=None)) == 1


async def test_a_token_is_revoked_once(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.write(TenantScope(ACME)) as records:
        await records.tokens.revoke([token()], 5.5)
        await records.tokens.revoke([token()], 6.5)
        assert not await records.tokens.prolong(token().sha256, 9e9)

    async with store.read(TenantScope(ACME)) as records:
        assert await records.tokens.get(token().id) == token(revoked_at=5.5)


@pytest.mark.guards(
    "control_plane/adapters/sql/repositories.py",
    "or_(GRANTS.c.client.is_(None), GRANTS.c.client == TOKENS.c.client),\n                or_(GRANTS.c.subject",
    "true(),\n                or_(GRANTS.c.subject",
)
async def test_the_database_agrees_with_the_rule_on_who_is_still_granted(store: SqlStore) -> None:
    """Every combination of subject, roles and client, against every kind of grant that may be left."""
    await fill(store, ACME)
    sessions = {roles: session(id=SessionId(f"ses_{len(roles)}"), roles=roles) for roles in ((), ("a",), ("a", "b"))}
    tokens = [
        (
            token(
                id=PlaceholderId(f"ph_{number}"),
                sha256=f"{number:064}",
                subject=SubjectId(subject),
                client=ClientId(client_id),
                session=sessions[roles].id if roles is not None else None,
            ),
            roles or (),
        )
        for number, (subject, client_id, roles) in enumerate(
            product(("alice", "bob"), ("one", "two"), (None, (), ("a",), ("a", "b")))
        )
    ]
    left = [
        grant(
            subject=SubjectId(subject) if subject else None,
            role=role,
            client=ClientId(client_id) if client_id else None,
        )
        for (subject, role), client_id in product((("alice", None), (None, "a"), (None, "b")), (None, "one"))
    ]
    async with store.write(TenantScope(ACME)) as records:
        for one in sessions.values():
            await records.sessions.add(one)

    for grants in ([], *([one] for one in left), left[1::3]):
        async with store.write(TenantScope(ACME)) as records:
            for placeholder, _ in tokens:
                await records.tokens.add(placeholder)
            await records.grants.remove(grant().id)
            for number, remaining in enumerate(grants):
                await records.grants.add(replace(remaining, id=GrantId(f"left_{number}")))

            await records.tokens.revoke_no_longer_granted(credential().id, 7.5)

            for placeholder, roles in tokens:
                expected = any(
                    remaining.applies_to(subject=placeholder.subject, roles=roles, client=placeholder.client)
                    for remaining in grants
                )
                found = await records.tokens.get(placeholder.id)
                assert found is not None
                assert (found.revoked_at is None) == expected, (placeholder, roles, grants)
            assert await records.tokens.purge(dead_before=9e9, limit=1000) >= len(tokens)
            for number in range(len(grants)):
                await records.grants.remove(GrantId(f"left_{number}"))


async def test_an_audit_event_is_stored_once(store: SqlStore) -> None:
    async with store.write(PLATFORM) as records:
        await records.audit.append([event(1), event(2, None)])
        await records.audit.append([event(2, None, action="other"), event(3)])

    async with store.read(PLATFORM) as records:
        found = await records.audit.after(0, limit=10, request_id=None)
        one = await records.audit.after(0, limit=10, request_id="req_2")

    assert [stored["event_id"] for _, stored in found] == ["ev_1", "ev_2", "ev_3"]
    assert [stored["action"] for _, stored in one] == ["swap"]


async def test_the_envelopes_under_each_key_are_counted(store: SqlStore) -> None:
    await fill(store, ACME)
    async with store.write(PLATFORM) as records:
        await records.versions.add(version(version=2, kek_id=None, envelope=None, state=VersionState.RETIRED))
        await records.own_keys.add(OwnKey("k1", KeyPurpose.TAG, b"x", "kek1", 1.5))
        await records.own_keys.add(OwnKey("k2", KeyPurpose.SIGNING, b"x", "kek2", 1.5))

        assert await records.sealed.count_by_kek() == {"kek1": 2, "kek2": 1}


async def test_own_keys_come_newest_first(store: SqlStore) -> None:
    async with store.write(PLATFORM) as records:
        for number in (1, 3, 2):
            await records.own_keys.add(OwnKey(f"k{number}", KeyPurpose.TAG, b"x", "kek", float(number)))

        assert [key.id for key in await records.own_keys.list(KeyPurpose.TAG)] == ["k3", "k2", "k1"]


# --- the outbox ------------------------------------------------------------------------------------------------------


async def test_a_commit_that_published_wakes_who_listens(store: SqlStore, wake: LocalWake) -> None:
    wait = wake.listen()

    async with store.write(TenantScope(ACME)) as records:
        await records.outbox.append([Change(ChangeKind.POLICY, ACME, "acme")], 1)

    await asyncio.wait_for(wait(10), 1)


async def test_numbers_become_visible_in_their_order(store: SqlStore) -> None:
    """While writers commit in any order, a reader that saw a number never later finds a smaller one it missed."""
    seen: list[int] = []
    done = asyncio.Event()

    async def write(number: int) -> None:
        async with store.write(TenantScope(ACME)) as records:
            await records.outbox.append([Change(ChangeKind.POLICY, ACME, f"{number}")], 1)
            await asyncio.sleep(0.002 * (number % 3))

    async def follow() -> None:
        while not done.is_set():
            async with store.read(PLATFORM) as records:
                seen.extend(change.sequence for change in await records.outbox.after(seen[-1] if seen else 0, 100))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        async with asyncio.TaskGroup() as writers:
            for number in range(30):
                writers.create_task(write(number))
        await asyncio.sleep(0.05)
        done.set()

    async with store.read(PLATFORM) as records:
        everything = [change.sequence for change in await records.outbox.after(0, 100)]
    assert seen == everything
    assert len(everything) == 30


async def test_a_number_is_never_used_again(database: Database, store: SqlStore) -> None:
    async with store.write(TenantScope(ACME)) as records:
        await records.outbox.append([Change(ChangeKind.POLICY, ACME, "acme")] * 3, 1)
    async with database.engine.begin() as connection:
        await connection.execute(text("DELETE FROM outbox WHERE sequence > 1"))

    async with store.write(TenantScope(ACME)) as records:
        await records.outbox.append([Change(ChangeKind.POLICY, ACME, "acme")], 1)

    async with store.read(PLATFORM) as records:
        assert [change.sequence for change in await records.outbox.after(1, 10)] == [4]


# --- the database itself ---------------------------------------------------------------------------------------------


async def test_migrating_again_changes_nothing(database: Database, store: SqlStore) -> None:
    await fill(store, ACME)
    async with store.read(PLATFORM) as records:
        before = await records.outbox.position()

    await migrate(database.engine)

    async with store.read(PLATFORM) as records:
        assert await records.outbox.position() == before
        assert await records.credentials.get(credential().id) == credential()


async def test_the_migrations_lead_to_the_tables_of_this_version(database: Database) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from control_plane.adapters.sql.tables import Base

    async with database.engine.connect() as connection:
        differences = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync, opts={"compare_type": True}), Base.metadata)
        )

    assert differences == []


async def test_two_processes_that_start_together_migrate_once(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    for kind in ("sqlite", "postgresql"):
        url = await new_database(kind, request, tmp_path)
        databases = [open_database(url) for _ in range(3)]

        await asyncio.gather(*(migrate(database.engine) for database in databases))

        epochs = set()
        for database in databases:
            async with SqlStore(database, LocalWake()).read(PLATFORM) as records:
                epochs.add((await records.outbox.position()).epoch)
            await database.close()
        assert len(epochs) == 1


async def test_a_database_that_does_not_answer_is_unavailable(server: str) -> None:
    unreachable = "postgresql+asyncpg://postgres:x@127.0.0.1:1/x"
    unresolvable = "postgresql+asyncpg://postgres:x@nowhere.invalid/x"
    wrong_password = server.replace("postgres:", "postgres:wrong") + "postgres"

    for url in (unreachable, unresolvable, wrong_password):
        database = open_database(url)
        with pytest.raises(RefusedError) as refused:
            async with SqlStore(database, LocalWake()).read(PLATFORM) as records:
                await records.tenants.list()
        await database.close()
        assert refused.value.refusal.code is RefusalCode.STORE_UNAVAILABLE


@pytest.mark.parametrize("url", ["sqlite+aiosqlite://", "sqlite+aiosqlite:///:memory:", "mysql://x/y", "sqlite:///x"])
def test_a_database_that_we_do_not_run_on_is_refused(url: str) -> None:
    with pytest.raises(UnsupportedDatabaseError):
        open_database(url)


def test_a_new_sqlite_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    open_database(f"sqlite+aiosqlite:///{tmp_path / 'new' / 'x.sqlite'}")

    assert (tmp_path / "new" / "x.sqlite").stat().st_mode & 0o077 == 0


@pytest.mark.long
@pytest.mark.guards(
    "control_plane/adapters/sql/engine.py",
    "deadline = time.monotonic() + WRITER_WAITS_SECONDS",
    "deadline = time.monotonic() + WRITER_WAITS_SECONDS + 3",
)
async def test_writers_that_queue_for_a_locked_file_wait_once_not_one_after_another(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    database = open_database(f"sqlite+aiosqlite:///{file}")
    await migrate(database.engine)
    store = SqlStore(database, LocalWake())
    took: list[float] = []

    async def write() -> None:
        began = time.monotonic()
        with pytest.raises(RefusedError) as refused:
            async with store.write(PLATFORM):
                pass
        assert refused.value.refusal.code is RefusalCode.STORE_UNAVAILABLE
        took.append(time.monotonic() - began)

    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await asyncio.gather(*(write() for _ in range(3)))
        other.execute("ROLLBACK")

    async with store.write(PLATFORM) as records:
        await records.tenants.add(Tenant(ACME, 1.5))
    await database.close()
    assert max(took) < WRITER_WAITS_SECONDS + 2


@pytest.mark.guards("control_plane/adapters/sql/engine.py", "if not _is_busy(error) or", "if")
async def test_what_waiting_does_not_mend_is_not_waited_for() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("BEGIN")

        with pytest.raises(OperationalError, match="within a transaction"):
            await begin_writing(connection, time.monotonic() + WRITER_WAITS_SECONDS)


@pytest.mark.guards("control_plane/adapters/sql/store.py", "self._log.committed()", "pass")
async def test_the_write_ahead_log_is_brought_home_while_it_serves(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    database = open_database(f"sqlite+aiosqlite:///{file}")
    await migrate(database.engine)
    store = SqlStore(database, LocalWake())
    before = file.stat().st_size

    for number in range(COMMITS_IN_THE_LOG + 1):
        async with store.write(PLATFORM) as records:
            await records.audit.append([event(number, None, detail="x" * 200)])
    assert database.log is not None
    await database.log.close()

    assert file.stat().st_size > before
    await database.close()


@pytest.mark.guards("control_plane/adapters/sql/connections.py", "while not running.done():", "while False:")
async def test_a_statement_that_takes_long_holds_up_nobody_and_is_waited_for_by_who_is_cancelled(
    tmp_path: Path,
) -> None:
    database = open_database(f"sqlite+aiosqlite:///{tmp_path / 'store.sqlite'}")
    await migrate(database.engine)
    store = SqlStore(database, LocalWake())
    slow = text(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000000) "
        "DELETE FROM tenants WHERE created_at > (SELECT max(i) FROM n)"
    )
    ticks = 0

    async def write() -> None:
        async with store.write(PLATFORM) as records:
            await records.tenants.add(Tenant(ACME, 1.5))
            await records.tenants._tx.change_many(slow)

    writing = asyncio.create_task(write())
    while not writing.done() and ticks < 20:
        await asyncio.sleep(0.001)
        ticks += 1
    for _ in range(3):
        writing.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await writing

    assert ticks == 20
    async with store.read(PLATFORM) as records:
        assert await records.tenants.list() == []
    async with store.write(PLATFORM) as records:
        await records.tenants.add(Tenant(ACME, 1.5))
    await database.close()


async def test_leaks_of_one_placeholder_since_then_are_counted_to_a_limit(store: SqlStore) -> None:
    await fill(store, ACME)
    leaks = [
        event(number, ACME, action="leak_blocked", placeholder_id=of, at=at)
        for number, of, at in ((11, token().id, 1.0), (12, token().id, 5.0), (13, "ph_x", 6.0), (14, token().id, 7.0))
    ]
    async with store.write(PLATFORM) as records:
        await records.audit.append([*leaks, event(15, ACME, action="swap", placeholder_id=token().id, at=8.0)])

    async with store.read(PLATFORM) as records:
        counts = [
            await records.audit.leaks(token(), since=since, limit=limit)
            for since, limit in ((0.0, 9), (2.0, 9), (7.0, 9), (0.0, 2))
        ]

    assert counts == [3, 2, 0, 2]


async def test_a_suspended_token_is_itself_in_all_else(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.write(PLATFORM) as records:
        assert await records.tokens.suspend(token().id, 77.5, now=1.5)

    async with store.read(PLATFORM) as records:
        facts = (await records.hot.token_facts([token().sha256])).get(token().sha256)
    assert facts is not None
    assert facts.token == token(suspended_until=77.5)


@pytest.mark.guards("control_plane/adapters/sql/repositories.py", "TOKENS.c.revoked_at.is_(None), is_not,", "")
async def test_a_token_is_suspended_once_until_it_is_over_and_never_when_it_is_revoked(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.write(PLATFORM) as records:
        suspended = [await records.tokens.suspend(token().id, now + 10, now=now) for now in (1.5, 11.0, 11.5)]
        await records.tokens.revoke([token()], 20.0)
        suspended.append(await records.tokens.suspend(token().id, 40.0, now=30.0))

    assert suspended == [True, False, True, False]


SCOPED = [
    *(pytest.param(each, id=name) for name, each in vars(repositories).items() if isinstance(each, Scoped)),
    pytest.param(repositories._adding_tokens(2), id="adding tokens"),
]


@pytest.mark.parametrize("for_tenant", [False, True], ids=["platform", "tenant"])
@pytest.mark.parametrize("statement", SCOPED)
@pytest.mark.guards("control_plane/adapters/sql/connections.py", "    _is_implicitly_boolean = True\n", "")
def test_what_is_asked_often_looks_through_no_table(statement: Scoped, for_tenant: bool) -> None:
    """Its cost does not grow with what is in the database."""
    engine = create_engine(f"sqlite:///{migrated_file()}")
    rendered = statement.rendered(engine.dialect, for_tenant=for_tenant)

    with engine.connect() as connection:
        marks = rendered.text.count("?")
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {rendered.text}", ("",) * marks)
        steps = [row[3] for row in plan]
    engine.dispose()

    scanned = [step.split()[1] for step in steps if step.startswith("SCAN ")]
    assert set(scanned) & set(Base.metadata.tables) == set()
