"""Issuers, used assertions and proofs of clients in the store's two databases: `ports` on SQLite and on PostgreSQL."""

import asyncio
from dataclasses import replace

import pytest

from control_plane.adapters.sql.repositories import ScopeError
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.caller import ClientId
from control_plane.core.claims import AdminEntry, AdminRule, ClaimsTable, RolesRule, SubjectRule, TenantRule
from control_plane.core.client_proofs import CertificateProof, ClientProofs, WorkloadProof
from control_plane.core.identity import IdentifiedBy, TrustedIssuer, Use
from control_plane.core.policy import Role
from control_plane.core.tokens import Others
from control_plane.ports import TakenError, TenantScope, UnreadableRowError
from tests.control_plane.issuing import SigningKey
from tests.control_plane.test_store import ACME, PLATFORM, client, database, store, wake

__all__ = ["database", "store", "wake"]  # fixtures of the store's suite, for both databases

ISSUER = TrustedIssuer(
    name="corp",
    preset="oidc",
    issuer="https://corp.test",
    identified_by=IdentifiedBy.ISS,
    uses=frozenset({Use.SESSION, Use.ADMIN}),
    audiences=("https://coatcheck.test", "other"),
    other_audiences=Others.IGNORE,
    algorithms=("ES256",),
    token_types=("", "jwt"),
    discovery=False,
    jwks_url=None,
    keys=(SigningKey("a").jwk,),
    claims=ClaimsTable(
        subject=SubjectRule("email", pattern="{value}@corp.test", prefix="corp:"),
        tenant=TenantRule(claim="/org/id", map={"1": "acme"}),
        roles=RolesRule("groups", {"eng": ["engineers"]}),
        admin=AdminRule("groups", {"a": AdminEntry(Role.TENANT_ADMIN, "acme"), "b": AdminEntry(Role.PLATFORM_ADMIN)}),
        require={"email_verified": [True], "level": [2], "azp": ["web", "cli-*"]},
        ignore=["name"],
    ),
    unknown_claims=Others.REFUSE,
    max_lifetime_seconds=3_600,
    keys_max_age_seconds=300,
    keys_max_stale_seconds=600,
    created_at=1.5,
    updated_at=2.5,
)


async def test_an_issuer_is_read_back_as_it_was_written(store: SqlStore) -> None:
    async with store.write(PLATFORM) as records:
        await records.issuers.add(ISSUER)
        changed = replace(ISSUER, uses=frozenset({Use.CLIENT}), updated_at=3.5)
        await records.issuers.replace(changed)

    async with store.read(PLATFORM) as records:
        assert await records.issuers.named("corp") == changed
        assert await records.issuers.of(["https://other.test", "https://corp.test"]) == [changed]
        assert await records.issuers.of(["https://corp.test.evil.test"]) == []
        assert await records.issuers.list() == [changed]
    async with store.write(PLATFORM) as records:
        assert await records.issuers.remove("corp")
        assert not await records.issuers.remove("corp")


async def test_one_issuer_has_one_record(store: SqlStore) -> None:
    async with store.write(PLATFORM) as records:
        await records.issuers.add(ISSUER)

    with pytest.raises(TakenError):
        async with store.write(PLATFORM) as records:
            await records.issuers.add(replace(ISSUER, name="another"))


async def test_an_edited_record_is_believed_in_nothing(store: SqlStore) -> None:
    async with store.write(PLATFORM) as records:
        await records.issuers.add(ISSUER)
        # As somebody would who can write the table, and wants another issuer's tokens to be this one's.
        tx = records.issuers._tx
        from sqlalchemy import text

        await tx.change(text("UPDATE issuers SET issuer = 'https://evil.test'"))

    async with store.read(PLATFORM) as records:
        with pytest.raises(UnreadableRowError):
            await records.issuers.of(["https://evil.test"])


async def test_no_tenants_transaction_reaches_issuers_or_assertions(store: SqlStore) -> None:
    async with store.read(TenantScope(ACME)) as records:
        with pytest.raises(ScopeError):
            await records.issuers.list()
        with pytest.raises(ScopeError):
            await records.issuers.named("corp")
    with pytest.raises(ScopeError):
        async with store.write(TenantScope(ACME)) as records:
            await records.used_assertions.use("0" * 64, expires_at=2.0)


async def test_an_assertion_is_used_once_also_by_two_at_once(store: SqlStore) -> None:
    async def use() -> bool:
        async with store.write(PLATFORM) as records:
            return await records.used_assertions.use("a" * 64, expires_at=10.0)

    at_once = await asyncio.gather(*(use() for _ in range(6)))

    assert sorted(at_once) == [False] * 5 + [True]
    async with store.write(PLATFORM) as records:
        assert await records.used_assertions.purge(over_before=9.0, limit=10) == 0
        assert await records.used_assertions.purge(over_before=11.0, limit=10) == 1


async def test_a_clients_proofs_are_read_back_and_looked_up_by(store: SqlStore) -> None:
    by_workload = client(id=ClientId("w"), proofs=ClientProofs(workload=WorkloadProof("k8s", "a:*")))
    by_name = client(id=ClientId("c"), proofs=ClientProofs(certificate=CertificateProof(san_dns="proxy.test")))
    by_keys = client(id=ClientId("k"), secret_sha256="", proofs=ClientProofs(keys=(SigningKey("a").jwk,)))
    async with store.write(PLATFORM) as records:
        for each in (by_workload, by_name, by_keys):
            await records.clients.add(each)

    async with store.read(PLATFORM) as records:
        assert await records.clients.get(ClientId("k")) == by_keys
        assert await records.clients.of_workload_issuer("k8s") == [by_workload]
        assert await records.clients.of_certificate(["x5t#S256:0", "dns:proxy.test"]) == [by_name]
        assert await records.clients.of_certificate([]) == []
        assert await records.clients.with_self_signed() == []
    with pytest.raises(TakenError):
        async with store.write(PLATFORM) as records:
            await records.clients.add(replace(by_name, id=ClientId("thief")))
