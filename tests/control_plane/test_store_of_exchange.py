"""What the exchange keeps, on SQLite and PostgreSQL: actors, scopes, injectors, uses, keys in turn, ended sessions."""

from dataclasses import replace

import pytest

from control_plane.adapters.sql.repositories import ScopeError
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.caller import ClientId, PlaceholderId, SessionId, SubjectId, TenantId
from control_plane.core.delegation import Party
from control_plane.core.records import KeyPurpose, NewUse, OwnKey
from control_plane.ports import TenantScope
from tests.control_plane.test_store import (
    ACME,
    ALICE,
    EVIL,
    PLATFORM,
    credential,
    database,
    fill,
    session,
    store,
    token,
    wake,
)

__all__ = ["database", "store", "wake"]  # fixtures

CHAIN = (Party("bob", "https://issuer.example"), Party("ci", "https://ours.example", "ci"))


def use(tenant: TenantId = ACME, **fields: object) -> NewUse:
    made = NewUse(tenant, ALICE, ClientId("runtime"), "example", "api.example.com", 10.5, 2)
    return replace(made, **fields)  # type: ignore[arg-type]


async def test_actors_and_scope_are_read_back_as_they_were_written(store: SqlStore) -> None:
    await fill(store, ACME)
    opened = session(id=SessionId("ses_acted"), act=CHAIN[1:], may_act={"sub": "bob"})
    made = token(sha256="1" * 64, id=PlaceholderId("ph_acted"), session=opened.id, scope="read path:/v1", act=CHAIN)

    async with store.write(TenantScope(ACME)) as records:
        await records.sessions.add(opened)
        await records.tokens.add(made)

    async with store.read(TenantScope(ACME)) as records:
        assert await records.sessions.get(opened.id) == opened
        assert await records.tokens.by_fingerprint("1" * 64) == made
        facts = (await records.hot.token_facts(["1" * 64])).get("1" * 64)
    assert facts is not None
    assert (facts.token, facts.session) == (made, opened)


async def test_an_injector_is_registered_once_seen_often_and_removed_once(store: SqlStore) -> None:
    async with store.write(PLATFORM) as records:
        seen = [await records.injectors.seen(ClientId("proxy"), at) for at in (1.5, 2.5, 3.5)]
        (injector,) = await records.injectors.list()
        removed = [await records.injectors.remove(ClientId("proxy")) for _ in range(2)]

    assert seen == [True, False, False]
    assert (injector.id, injector.registered_at, injector.seen_at) == ("proxy", 1.5, 3.5)
    assert removed == [True, False]


async def test_injectors_are_no_tenants(store: SqlStore) -> None:
    async with store.write(TenantScope(ACME)) as records:
        for attempt in (
            records.injectors.list(),
            records.injectors.seen(ClientId("p"), 1.0),
            records.injectors.remove(ClientId("p")),
        ):
            with pytest.raises(ScopeError):
                await attempt


async def test_uses_add_up_keep_the_latest_moment_and_belong_to_their_tenant(store: SqlStore) -> None:
    for tenant in (ACME, EVIL):
        await fill(store, tenant)

    async with store.write(PLATFORM) as records:
        await records.uses.note([use(), use(at=30.5, requests=1), use(at=20.5), use(host="other.example")])
        await records.uses.note([use(EVIL, at=99.5), use(subject=SubjectId("bob"))])
        await records.uses.note([])

    async with store.read(TenantScope(ACME)) as records:
        everything = await records.uses.list(None)
        alices = await records.uses.list(ALICE)
    found = {(each.subject, each.host): (each.last_used_at, each.requests) for each in everything}
    assert found == {
        (ALICE, "api.example.com"): (30.5, 5),
        (ALICE, "other.example"): (10.5, 2),
        ("bob", "api.example.com"): (10.5, 2),
    }
    assert {each.subject for each in alices} == {ALICE}
    assert {each.tenant for each in everything} == {ACME}


async def test_a_use_of_what_there_is_not_is_no_use_and_no_error(store: SqlStore) -> None:
    await fill(store, ACME)

    async with store.write(PLATFORM) as records:
        await records.uses.note([use(credential="gone"), use(TenantId("nobody")), use()])

    async with store.write(TenantScope(ACME)) as records:
        assert len(await records.uses.list(None)) == 1
        await records.credentials.remove(credential().id)
        assert await records.uses.list(None) == []


async def test_a_tenant_notes_no_use_of_anothers(store: SqlStore) -> None:
    async with store.write(TenantScope(EVIL)) as records:
        with pytest.raises(ScopeError):
            await records.uses.note([use(ACME)])


async def test_own_keys_have_a_beginning_and_are_taken_out(store: SqlStore) -> None:
    keys = [OwnKey(f"k{number}", KeyPurpose.TAG, b"x", "kek", float(number), 100.0 * number) for number in range(3)]

    async with store.write(PLATFORM) as records:
        for key in keys:
            await records.own_keys.add(key)
        await records.own_keys.remove(keys[:2])
        await records.own_keys.remove([])

        assert await records.own_keys.list(KeyPurpose.TAG) == keys[2:]


async def test_whether_something_from_before_could_still_be_used(store: SqlStore) -> None:
    await fill(store, ACME)  # a token of 1.5, good until 901.5, in a session until 100.5

    async with store.write(PLATFORM) as records:
        before = [await records.tokens.any_usable_of_before(moment, 50.0) for moment in (1.5, 2.0)]
        expired = await records.tokens.any_usable_of_before(2.0, 1_000.0)
        await records.tokens.revoke([token()], 60.0)
        revoked = await records.tokens.any_usable_of_before(2.0, 61.0)

    assert before == [False, True]
    assert (expired, revoked) == (False, False)


async def test_a_token_that_expired_could_be_renewed_while_its_session_lives(store: SqlStore) -> None:
    await fill(store, ACME)
    async with store.write(TenantScope(ACME)) as records:
        await records.tokens.prolong(token().sha256, 3.0)

    async with store.read(PLATFORM) as records:
        assert await records.tokens.any_usable_of_before(2.0, 50.0)
        assert not await records.tokens.any_usable_of_before(2.0, 101.0)


async def test_ended_sessions_are_a_runtimes_own_in_pages_until_they_are_erased(store: SqlStore) -> None:
    runtime = ClientId("acme-runtime")
    for tenant in (ACME, EVIL):
        await fill(store, tenant)
    async with store.write(TenantScope(ACME)) as records:
        for name in ("a", "b", "c"):
            await records.sessions.add(session(id=SessionId(f"ses_{name}"), ended_at=5.5))
        await records.sessions.add(session(id=SessionId("ses_d"), ended_at=5.5, erased_at=6.5))

    async with store.read(PLATFORM) as records:
        first = await records.sessions.to_erase(runtime, after=None, limit=2)
        rest = await records.sessions.to_erase(runtime, after=first[-1].id, limit=2)
        others = await records.sessions.to_erase(ClientId("evil-runtime"), after=None, limit=9)

    assert [each.id for each in first] == ["ses_a", "ses_b"]
    assert [each.id for each in rest] == ["ses_c"]
    assert others == []


async def test_a_sessions_tokens_are_forgotten_and_nobody_elses(store: SqlStore) -> None:
    for tenant in (ACME, EVIL):
        await fill(store, tenant)

    async with store.write(TenantScope(ACME)) as records:
        await records.tokens.forget_of_session(session(EVIL))
        await records.tokens.forget_of_session(session(ACME))

    async with store.read(PLATFORM) as records:
        assert await records.tokens.by_fingerprint(token(ACME).sha256) is None
        assert await records.tokens.by_fingerprint(token(EVIL).sha256) == token(EVIL)


async def test_a_subjects_live_sessions_are_found_in_its_tenant(store: SqlStore) -> None:
    for tenant in (ACME, EVIL):
        await fill(store, tenant)

    async with store.read(TenantScope(ACME)) as records:
        assert await records.sessions.live_of_subject(ALICE, 50.0) == [session(ACME)]
        assert await records.sessions.live_of_subject(ALICE, 101.0) == []
        assert await records.sessions.live_of_subject(SubjectId("bob"), 50.0) == []
