"""Two clients that register for one certificate at once: the database lets one of them in, on SQLite and PostgreSQL."""

import asyncio
import os
from typing import Any

import pytest
from sqlalchemy import text

from control_plane.adapters.memory.wake import LocalWake
from control_plane.adapters.sql.engine import Database
from control_plane.adapters.sql.store import SqlStore
from control_plane.contract.caller import ClientId, TenantId
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.core.client_proofs import NO_PROOFS, CertificateProof, ClientProofs
from control_plane.core.records import Client, ClientKind, ClientSource
from control_plane.ports import CrossTenantReason, PlatformScope
from control_plane.registry import ClientChange, FileClient, NewClient, Registry, SecretChange
from control_plane.trail import Actor, Trail
from tests.control_plane.databases import BOTH

FILE = "control_plane/registry.py"
ACME = TenantId("acme")
ADMIN = Actor("administrator", "req_1", is_a_client=False)
PROOFS = ClientProofs(certificate=CertificateProof(san_dns="runtime.test"))


@pytest.fixture
async def registry(database: Database) -> Registry:
    made = Registry(
        SqlStore(database, LocalWake()), Trail(lambda: 1.0, os.urandom), clock=lambda: 1.0, entropy=os.urandom
    )
    await made.ensure_tenant(ACME, by=ADMIN)
    return made


def new(name: str, proofs: ClientProofs = PROOFS) -> NewClient:
    return NewClient(id=ClientId(name), kind=ClientKind.RUNTIME, tenant=ACME, scopes=(), proofs=proofs, subject=None)


async def at_once(*work: Any) -> list[RefusedError]:
    """What was refused, and that nothing else went wrong."""
    results = await asyncio.gather(*work, return_exceptions=True)
    failed = [each for each in results if isinstance(each, BaseException)]
    assert all(isinstance(each, RefusedError) for each in failed), failed
    return [each for each in failed if isinstance(each, RefusedError)]


async def known_by_it(registry: Registry) -> list[Client]:
    return [client for client in await registry.clients() if client.proofs.certificate is not None]


@BOTH
async def test_of_clients_that_register_one_certificate_at_once_one_is_there_and_the_others_hear_why(
    registry: Registry,
) -> None:
    refused = await at_once(
        *(registry.add_client(new(f"client-{number}"), with_secret=False, by=ADMIN) for number in range(6))
    )

    assert len(refused) == 5
    assert {(each.refusal.code, each.refusal.detail) for each in refused} == {
        (RefusalCode.INVALID_FIELD, "certificate: another client is known by it already")
    }
    assert len(await known_by_it(registry)) == 1


@BOTH
@pytest.mark.guards(FILE, "            raise await self._taken(client) from None", "            pass")
async def test_who_has_looked_and_found_nobody_hears_of_the_one_who_was_quicker(
    database: Database, registry: Registry
) -> None:
    if database.reader is not None:
        pytest.skip("SQLite has one writer at a time: nobody looks before another is done")
    store = SqlStore(database, LocalWake())

    async with store.write(PlatformScope(CrossTenantReason.ADMINISTER)) as records:
        await records.clients.add(registry._client(new("quicker"), None, ClientSource.API))
        waiting = asyncio.create_task(registry.add_client(new("slower"), with_secret=False, by=ADMIN))
        while not await waits_for_another(database):
            assert not waiting.done()
            await asyncio.sleep(0.01)

    with pytest.raises(RefusedError) as raised:
        await waiting
    assert raised.value.refusal.detail == "certificate: another client is known by it already"
    assert [client.id for client in await registry.clients()] == ["quicker"]


async def waits_for_another(database: Database) -> bool:
    async with database.engine.connect() as connection:
        return bool((await connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted"))).scalar())


@BOTH
async def test_of_clients_that_register_one_id_at_once_one_is_there(registry: Registry) -> None:
    proofs = [ClientProofs(certificate=CertificateProof(san_dns=f"{number}.test")) for number in range(4)]

    refused = await at_once(*(registry.add_client(new("client", each), with_secret=False, by=ADMIN) for each in proofs))

    assert [each.refusal.detail for each in refused] == ["id: there is a client of that id already"] * 3


@BOTH
async def test_of_clients_that_change_to_one_certificate_at_once_one_does(registry: Registry) -> None:
    for number in range(4):
        await registry.add_client(new(f"client-{number}", NO_PROOFS), with_secret=True, by=ADMIN)
    change = ClientChange(proofs=PROOFS, secret=SecretChange.KEEP)

    refused = await at_once(
        *(registry.change_client(ClientId(f"client-{number}"), change, by=ADMIN) for number in range(4))
    )

    assert [each.refusal.detail for each in refused] == ["certificate: another client is known by it already"] * 3
    assert len(await known_by_it(registry)) == 1


@BOTH
async def test_replicas_that_start_with_one_clients_file_at_once_agree(registry: Registry) -> None:
    entries = [FileClient(new("one"), None), FileClient(new("two", NO_PROOFS), registry._new_secret())]

    refused = await at_once(*(registry.reconcile(entries, by=ADMIN) for _ in range(4)))

    assert refused == []
    assert [client.id for client in await registry.clients()] == ["one", "two"]


async def test_a_clients_file_that_names_one_certificate_twice_is_refused_by_name(registry: Registry) -> None:
    entries = [FileClient(new("one"), None), FileClient(new("two"), None)]

    with pytest.raises(RefusedError, match="invalid_field") as raised:
        await registry.reconcile(entries, by=ADMIN)

    assert raised.value.refusal.detail == "certificate: another client is known by it already"
    assert await registry.clients() == []
