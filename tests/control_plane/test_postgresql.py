"""The whole flow on PostgreSQL: the same control plane, another database URL."""

from sqlalchemy import text

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.engine import open_database
from control_plane.adapters.sql.migrate import migrate
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.ports import CrossTenantReason, PlatformScope
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.postgresql import database_with_two_logins
from tests.control_plane.serving import PROXY
from tests.control_plane.workspace import SECRET, Workspace


def test_a_credential_is_granted_exchanged_resolved_rotated_and_revoked(
    own_control_plane: OwnControlPlane, server: str
) -> None:
    workspace = Workspace(own_control_plane(database_url=f"{server}postgres"), "acme")
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


def test_odd_texts_are_refused_or_stored_and_never_break_it(own_control_plane: OwnControlPlane, server: str) -> None:
    plane = own_control_plane(database_url=f"{server}postgres")
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
