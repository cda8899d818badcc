"""The whole flow on PostgreSQL: the same control plane, another database URL."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from sqlalchemy import text
from sqlalchemy.pool import AsyncAdaptedQueuePool

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.connections import driver_of
from control_plane.adapters.sql.engine import open_database
from control_plane.adapters.sql.migrate import migrate
from control_plane.adapters.sql.roles import TENANT_ROLE, TENANT_SETTING
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.caller import TenantId
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.core.records import Tenant
from control_plane.ports import CrossTenantReason, PlatformScope, TakenError, TenantScope
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.databases import migrated_by_owner
from tests.control_plane.postgresql import database_with_two_logins
from tests.control_plane.serving import PROXY
from tests.control_plane.test_workloads import who
from tests.control_plane.workspace import SECRET, Workspace


def test_a_credential_is_granted_exchanged_resolved_rotated_and_revoked(
    own_control_plane: OwnControlPlane, empty_postgresql: str
) -> None:
    workspace = Workspace(own_control_plane(database_url=empty_postgresql), "acme")
    workspace.add_credential()
    grant = workspace.grant(subject="alice", methods=["GET"])
    session = workspace.open_session("alice", roles=["engineers"])

    issued = workspace.exchange(session)
    resolved = workspace.resolve(issued)
    renewed = workspace.renew(issued, proxy_credential=issued["proxy_credential"])
    workspace.rotate("a-new-key")
    rotated = workspace.resolve(issued)
    workspace.remove_grant(grant)
    revoked = workspace.resolve(issued)

    assert (resolved["secret"], rotated["secret"]) == (SECRET, "a-new-key")
    assert renewed["access_token"] == issued["access_token"]
    assert revoked["code"] == "revoked_placeholder"
    assert workspace.policy(workspace.caller(issued))["routes"] == []
    assert workspace.control_plane.http.get("/readyz").status_code == 200
    assert [event["action"] for event in workspace.audit()][-3:] == [
        "exchange.renew",
        "credential.rotate",
        "grant.remove",
    ]


def test_odd_texts_are_refused_or_stored_and_never_break_it(
    own_control_plane: OwnControlPlane, empty_postgresql: str
) -> None:
    plane = own_control_plane(database_url=empty_postgresql)
    workspace = Workspace(plane, "odd")
    workspace.add_credential()

    answers = [
        plane.admin("POST", workspace.path("grants"), {"credential": "example", "subject": "a\0b"}),
        plane.admin("GET", workspace.path("credentials/%00")),
        plane.admin("GET", workspace.path("audit?request_id=%00")),
        workspace.token(subject_token="\0", subject_token_type="urn:coatcheck:token-type:session", audience="\0"),
        plane.http.post(
            "/internal/resolve", json={"ask": {"kind": "caller", "proxy_credential_sha256": "\0"}}, auth=PROXY
        ),
        plane.http.post(
            "/internal/audit",
            json={"events": [{"event_id": "\0", "at": 0, "request_id": "\0", "action": "\0", "path": "/\0"}]},
            auth=PROXY,
        ),
        plane.admin("POST", workspace.path("grants"), {"credential": "example", "subject": "アリス' OR 1=1 --"}),
    ]

    assert [answer.status_code for answer in answers] == [422, 422, 422, 400, 200, 204, 201]


@pytest.mark.guards(
    "control_plane/core/certificates.py", 'name for name in found if "\\0" not in name', "name for name in found"
)
def test_names_in_a_certificate_that_no_database_takes_are_nobodys(
    own_control_plane: OwnControlPlane, empty_postgresql: str
) -> None:
    workspace = Workspace(own_control_plane(database_url=empty_postgresql), "odd")
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    odd: list[x509.GeneralName] = [x509.DNSName("a\0b"), x509.UniformResourceIdentifier("spiffe://a/\0")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=9_999))
        .add_extension(x509.SubjectAlternativeName(odd), critical=False)
        .sign(key, hashes.SHA256())
    )

    assert who(workspace, der=certificate.public_bytes(serialization.Encoding.DER))["true_code"] == "token_invalid"


async def test_a_replica_serves_on_while_another_one_changes_a_table(server: str) -> None:
    logins = await database_with_two_logins(server)
    owner, app = open_database(logins.owner), open_database(logins.app)
    await migrate(owner.engine)
    store = SqlStore(app, LocalWake())
    scope = PlatformScope(CrossTenantReason.ADMINISTER)

    async def look() -> RefusalCode | None:
        try:
            async with store.read(scope) as records:
                await records.tenants.list()
        except RefusedError as refused:
            return refused.refusal.code
        return None

    before = await look()
    async with owner.engine.begin() as connection:
        await connection.execute(text("ALTER TABLE tenants ALTER COLUMN created_at TYPE real"))
    during, after = await look(), await look()

    assert (before, after) == (None, None)
    assert during in (None, RefusalCode.STORE_UNAVAILABLE)
    await owner.close()
    await app.close()


@pytest.mark.guards(
    "control_plane/adapters/sql/store.py", "            await self._idle.give(connection)\n", "            pass\n"
)
async def test_whoever_is_cancelled_at_any_point_of_a_transaction_leaves_no_connection_behind(server: str) -> None:
    """Neither one that nobody gets any more, nor one with a transaction open on it."""
    app = open_database((await migrated_by_owner(server)).app)
    store, scope = SqlStore(app, LocalWake()), PlatformScope(CrossTenantReason.ADMINISTER)

    async def work() -> None:
        async with store.write(scope) as records:
            await records.tenants.list()
            await records.tenants.add(Tenant(TenantId(f"tenant-{uuid4().hex}"), 1.5))

    async def cancelled_after(turns: int) -> None:
        task = asyncio.create_task(work())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    await work()
    for turns in range(60):
        await asyncio.gather(cancelled_after(turns), cancelled_after(turns + 7))
    await asyncio.gather(*(work() for _ in range(20)))

    pool = app.engine.pool
    assert isinstance(pool, AsyncAdaptedQueuePool)
    idle = [connection for connection, _ in app.idle._connections]
    assert pool.checkedout() == len(idle) > 0
    for connection in idle:
        assert not driver_of(connection.sync_connection).is_in_transaction()
    await app.close()


@pytest.mark.guards("control_plane/adapters/sql/store.py", "        if not is_over:  #", "        if False:  #")
async def test_whoever_is_cancelled_while_a_failed_transaction_is_undone_leaves_it_to_nobody(server: str) -> None:
    app = open_database((await migrated_by_owner(server)).app)
    store, scope = SqlStore(app, LocalWake()), PlatformScope(CrossTenantReason.ADMINISTER)
    lost = Tenant(TenantId("lost"), 1.5)

    async def fails() -> None:
        async with store.write(scope) as records:
            await records.tenants.add(lost)
            task = asyncio.current_task()
            assert task is not None
            task.get_loop().call_soon(task.cancel)  # comes while ROLLBACK is under way
            raise ZeroDivisionError

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(fails())

    assert app.idle._connections == []
    async with store.read(scope) as records:
        assert await records.tenants.get(lost.id) is None
    await app.close()


@pytest.mark.guards(
    "control_plane/adapters/sql/engine.py", "if driver_of(connection.sync_connection).is_closed():", "if False:"
)
async def test_connections_that_ended_while_they_waited_cost_nobody_an_answer(server: str) -> None:
    logins = await migrated_by_owner(server)
    owner, app = open_database(logins.owner), open_database(logins.app)
    store, scope = SqlStore(app, LocalWake()), PlatformScope(CrossTenantReason.ADMINISTER)
    together = asyncio.Barrier(3)

    async def look() -> None:
        async with store.read(scope) as records:
            await records.tenants.list()
            await together.wait()

    await asyncio.gather(*(look() for _ in range(3)))
    drivers = [driver_of(connection.sync_connection) for connection, _ in app.idle._connections]
    for driver in drivers:
        driver.terminate()  # as if the server had gone

    await asyncio.gather(*(look() for _ in range(3)))

    assert len(drivers) == 3
    await owner.close()
    await app.close()


@pytest.mark.guards(
    "control_plane/adapters/sql/engine.py", "await asyncio.shield(self._connections.pop(0)[0].close())", "pass"
)
async def test_connections_that_nobody_took_for_a_while_go_back_to_the_pool(server: str) -> None:
    app = open_database((await migrated_by_owner(server)).app)
    store, scope = SqlStore(app, LocalWake()), PlatformScope(CrossTenantReason.ADMINISTER)
    many = 15  # more than the pool keeps
    together = asyncio.Barrier(many)

    async def look(*, at_once: bool) -> None:
        async with store.read(scope) as records:
            await records.tenants.list()
            if at_once:
                await together.wait()

    await asyncio.gather(*(look(at_once=True) for _ in range(many)))
    busy = len(app.idle._connections)
    app.idle._connections[:-1] = [(connection, -3600.0) for connection, _ in app.idle._connections[:-1]]
    for _ in range(many):
        await look(at_once=False)

    pool = app.engine.pool
    assert isinstance(pool, AsyncAdaptedQueuePool)
    assert (busy, pool.checkedout()) == (many, 1)
    assert pool.checkedin() <= pool.size() < many
    await app.close()


@pytest.mark.guards("control_plane/adapters/sql/store.py", '!= "COMMIT":', '== "never":')
async def test_a_transaction_in_which_a_statement_failed_is_never_taken_for_committed(server: str) -> None:
    app = open_database((await migrated_by_owner(server)).app)
    store, scope = SqlStore(app, LocalWake()), PlatformScope(CrossTenantReason.ADMINISTER)
    twice = Tenant(TenantId("twice"), 1.5)

    async def careless() -> None:
        async with store.write(scope) as records:
            await records.tenants.add(twice)
            with suppress(TakenError):
                await records.tenants.add(twice)

    with pytest.raises(RefusedError) as raised:
        await careless()

    assert raised.value.refusal.code is RefusalCode.STORE_UNAVAILABLE
    async with store.read(scope) as records:
        assert await records.tenants.get(twice.id) is None
    await app.close()


@pytest.mark.parametrize("name", ["a'; SELECT set_config('role', 'none', true); --", "a\\'b", "アリス", '"', ""])
async def test_a_scope_is_what_its_tenants_name_spells_and_nothing_else(server: str, name: str) -> None:
    app = open_database((await migrated_by_owner(server)).app)

    async with SqlStore(app, LocalWake()).read(TenantScope(TenantId(name))) as records:
        connection = records.tenants._tx._connection
        found = await connection.execute(text(f"SELECT current_setting('{TENANT_SETTING}'), current_user"))
        rows = [tuple(row) for row in found]

    assert rows == [(name, TENANT_ROLE)]
    await app.close()
