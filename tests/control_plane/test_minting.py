"""Values that a provider mints, on SQLite and PostgreSQL: asked for once, kept, replaced in time, and never past their
end, whatever the provider does."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from control_plane.adapters.sql.engine import Database, open_database
from control_plane.contract.kinds import CredentialKind
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from control_plane.contract.wire import Refused, ResolvedPlaceholder
from control_plane.core.kinds import KindSettings
from control_plane.core.records import MintingState
from control_plane.material import LEASE_SECONDS
from control_plane.ports import KekError, KekFailure, Provider, ProviderAnswer, Records, Scope, Store, TenantScope
from tests.control_plane.databases import migrated_file
from tests.control_plane.minting import REFRESH, Minting, minting, refresh_secret
from tests.control_plane.rotating import ACME, PLATFORM, Replica
from tests.control_plane.test_store import database  # noqa: F401 (a fixture)
from tests.support.token_provider import TokenProvider
from tests.support.upstream import Behaviour, hold, plain, sends, sends_then_closes, sends_then_resets

MATERIAL = "control_plane/material.py"
RULES = "control_plane/core/minting.py"


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(path)
    return path


@pytest.fixture
def provider(ca: trustme.CA) -> Iterator[TokenProvider]:
    with TokenProvider(ca) as running:
        yield running


@pytest.fixture
async def world(tmp_path: Path, provider: TokenProvider, ca_file: Path) -> AsyncIterator[Minting]:
    copy = tmp_path / "store.sqlite"
    shutil.copy(migrated_file(), copy)
    opened = open_database(f"sqlite+aiosqlite:///{copy}")
    yield minting(opened, provider, ca_file)
    await opened.close()


@pytest.fixture
def either(database: Database, provider: TokenProvider, ca_file: Path) -> Minting:  # noqa: F811
    """On SQLite, and on PostgreSQL."""
    return minting(database, provider, ca_file)


class Crashing:
    """A provider whose answer reaches a process that dies before it writes it down."""

    def __init__(self, inner: Provider) -> None:
        self.inner = inner
        self.answered = asyncio.Event()
        self.lives_after_all = asyncio.Event()

    async def mint(self, settings: KindSettings, secret: Secret, *, now: float) -> ProviderAnswer:
        answer = await self.inner.mint(settings, secret, now=now)
        self.answered.set()
        await self.lives_after_all.wait()
        return answer


def crashing(world: Minting, kind: CredentialKind) -> tuple[Replica, Crashing]:
    """Another replica, which does not live to write an answer down."""
    stuck = Crashing(world.replica.providers[kind])
    replica = replace(world.replica, providers={**world.replica.providers, kind: stuck})
    return replica, stuck


async def killed_after_the_answer(world: Minting, kind: CredentialKind) -> Crashing:
    replica, stuck = crashing(world, kind)
    asking = asyncio.ensure_future(world.resolve(replica))
    await stuck.answered.wait()
    for task in replica.material._fetching.values():
        task.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return stuck


# --- once ------------------------------------------------------------------------------------------------------------


async def test_the_first_resolve_mints_and_the_next_ones_find_it(world: Minting) -> None:
    await world.add_refresh_token()

    first, second = await world.resolve(), await world.resolve(world.replica.another())

    assert isinstance(first, ResolvedPlaceholder)
    assert isinstance(second, ResolvedPlaceholder)
    assert first.secret == second.secret
    assert first.secret.startswith("at-")
    assert first.binding.secret_expires_at == world.replica.clock() + 3600 - 10
    assert first.binding.credential_kind == "oauth_refresh_token"
    assert world.provider.questions == 1
    assert "credential.mint" in await world.replica.actions()


@pytest.mark.guards("control_plane/adapters/sql/minted.py", ", MINTED.c.leased_until <= now)", ", MINTED.c.fence >= 0)")
async def test_two_replicas_that_fifty_requests_ask_at_once_ask_their_provider_once(either: Minting) -> None:
    world = either
    await world.add_refresh_token()
    other = world.replica.another()

    answers = await asyncio.gather(*(world.value(replica) for replica in [world.replica, other] * 25))

    assert len(set(answers)) == 1
    assert answers[0].startswith("at-")
    assert (world.provider.questions, world.provider.reused) == (1, 0)


async def test_a_refresh_token_is_replaced_by_the_one_that_came_and_never_sent_again(either: Minting) -> None:
    world = either
    await world.add_refresh_token()
    other, seen = world.replica.another(), set()

    for _ in range(6):
        seen |= set(await asyncio.gather(*(world.value(replica) for replica in (world.replica, other) * 3)))
        world.pass_time(3600)

    assert len(seen) == 6
    assert (world.provider.questions, world.provider.reused) == (6, 0)
    assert len({form["refresh_token"] for form in world.provider.forms}) == 6


async def test_a_value_is_replaced_ahead_of_its_end_while_it_serves_on(world: Minting) -> None:
    await world.add_refresh_token()
    first = await world.value()

    world.pass_time(3600 - 10 - 299)
    meanwhile = await world.value()
    await world.replica.material.close()
    after = await world.value()

    assert meanwhile == first
    assert after != first
    assert world.provider.questions == 2


async def test_nothing_of_a_secret_stands_in_the_trail_or_in_the_clear(world: Minting) -> None:
    await world.add_refresh_token()

    value = await world.value()

    trail = await world.replica.trail()
    assert value not in trail
    assert world.provider.first_refresh_token not in trail
    assert value.encode() not in ((await world.minted()).envelope or b"")


async def test_a_minted_value_put_into_another_row_does_not_open(world: Minting) -> None:
    """What was minted for one credential, or for longer than the provider said, is of no use."""
    await world.add_refresh_token()
    value, row = await world.value(), await world.minted()
    async with world.replica.store.write(TenantScope(ACME)) as records:
        assert row.expires_at is not None
        await records.minted.put(replace(row, expires_at=row.expires_at + 86_400))
    world.pass_time(7200)

    assert value not in await world.value()


# --- lost ------------------------------------------------------------------------------------------------------------


@pytest.mark.guards(MATERIAL, "if row.asked_fence is not None and _is_used_once(credential, row):", "if False:")
async def test_a_refresh_token_whose_answer_died_with_its_process_is_not_sent_again(either: Minting) -> None:
    world = either
    await world.add_refresh_token()
    await killed_after_the_answer(world, CredentialKind.OAUTH_REFRESH_TOKEN)

    world.pass_time(LEASE_SECONDS + 1)
    answer = await world.resolve()

    assert isinstance(answer, Refused)
    assert answer.code is RefusalCode.CREDENTIAL_UNAVAILABLE
    assert "the answer was lost" in answer.detail
    assert "credential rotate" in answer.hint
    assert (await world.minted()).state is MintingState.CONSENT_LOST
    assert (world.provider.questions, world.provider.reused) == (1, 0)
    assert (await world.replica.actions()).count("credential.consent_lost") == 1


async def test_a_lost_consent_stays_lost_until_a_new_one_is_submitted(world: Minting) -> None:
    await world.add_refresh_token()
    await killed_after_the_answer(world, CredentialKind.OAUTH_REFRESH_TOKEN)
    world.pass_time(LEASE_SECONDS + 1)
    await world.resolve()

    world.pass_time(500_000)
    before = await world.value()
    await world.replica.rotate(refresh_secret(world.provider.consent()))
    after = await world.value()

    assert before.startswith("credential_unavailable")
    assert after.startswith("at-")
    assert world.provider.reused == 0


async def test_an_answer_that_was_merely_late_is_still_taken(either: Minting) -> None:
    world = either
    await world.add_refresh_token()
    replica, stuck = crashing(world, CredentialKind.OAUTH_REFRESH_TOKEN)
    asking = asyncio.ensure_future(world.value(replica))
    await stuck.answered.wait()
    world.pass_time(LEASE_SECONDS + 1)
    lost = await world.value()

    stuck.lives_after_all.set()
    late = await asking

    assert "the answer was lost" in lost
    assert late == await world.value()
    assert late.startswith("at-")
    assert world.provider.questions == 1


async def test_where_secrets_are_not_replaced_the_question_is_simply_asked_again(world: Minting) -> None:
    await world.add_client_credentials()
    await killed_after_the_answer(world, CredentialKind.OAUTH_CLIENT_CREDENTIALS)

    world.pass_time(LEASE_SECONDS + 1)

    assert (await world.value()).startswith("at-")
    assert world.provider.questions == 2


async def test_a_provider_that_has_not_replaced_its_tokens_before_is_asked_again(world: Minting) -> None:
    world.provider.rotates = False
    await world.add_refresh_token()
    await world.value()
    world.pass_time(3600)
    await killed_after_the_answer(world, CredentialKind.OAUTH_REFRESH_TOKEN)

    world.pass_time(LEASE_SECONDS + 1)

    assert (await world.value()).startswith("at-")


async def test_whoever_died_with_the_lease_is_waited_for_and_no_longer(world: Minting) -> None:
    await world.add_client_credentials()
    await killed_after_the_answer(world, CredentialKind.OAUTH_CLIENT_CREDENTIALS)

    world.pass_time(LEASE_SECONDS - 1)
    waiting = asyncio.ensure_future(world.value())
    await asyncio.sleep(0.2)
    still_waits = not waiting.done()
    world.pass_time(2)

    assert still_waits
    assert (await waiting).startswith("at-")


# --- held ------------------------------------------------------------------------------------------------------------


class AwayStore:
    """A database that does not take writes while `is_away`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.is_away = False
        self.refused = asyncio.Event()

    def read(self, scope: Scope) -> AbstractAsyncContextManager[Records]:
        return self.inner.read(scope)

    def write(self, scope: Scope) -> AbstractAsyncContextManager[Records]:
        if self.is_away:
            self.refused.set()
            raise RefusedError(Refusal(RefusalCode.STORE_UNAVAILABLE, "away"))
        return self.inner.write(scope)


class KeyElsewhere:
    """A key-encryption key that has to be asked, and may be away (`ports.KekProvider`)."""

    id, provider, place = "elsewhere", "a test", "nowhere"

    def __init__(self) -> None:
        self.is_away = False
        self.refused = asyncio.Event()
        self._key = AESGCM(b"e" * 32)

    async def wrap(self, data_key: bytes, *, context: bytes) -> bytes:
        self._require_there()
        return self._key.encrypt(b"n" * 12, data_key, context)

    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        self._require_there()
        return self._key.decrypt(b"n" * 12, wrapped, context)

    def _require_there(self) -> None:
        if self.is_away:
            self.refused.set()
            raise KekError(KekFailure.UNAVAILABLE, "away")


@pytest.mark.guards(MATERIAL, "                if loop.time() >= gives_up_at:\n", "                if True:\n")
async def test_an_answer_is_held_on_to_while_the_database_is_away(world: Minting) -> None:
    await world.add_refresh_token()
    replica, stuck = crashing(world, CredentialKind.OAUTH_REFRESH_TOKEN)
    store = AwayStore(replica.store)
    replica.material._store = store
    asking = asyncio.ensure_future(world.value(replica))
    await stuck.answered.wait()

    store.is_away = True
    stuck.lives_after_all.set()
    await store.refused.wait()
    store.is_away = False

    assert (await asking).startswith("at-")
    assert (world.provider.questions, world.provider.reused) == (1, 0)


async def test_an_answer_is_held_on_to_while_the_key_that_seals_it_is_away(world: Minting) -> None:
    await world.add_refresh_token()
    replica, stuck = crashing(world, CredentialKind.OAUTH_REFRESH_TOKEN)
    key = KeyElsewhere()
    replica.custody.arrange([key, replica.kek])
    asking = asyncio.ensure_future(world.value(replica))
    await stuck.answered.wait()

    key.is_away = True
    stuck.lives_after_all.set()
    await key.refused.wait()
    key.is_away = False
    world.pass_time(3)
    value = await asking

    assert value.startswith("at-")
    assert (await world.minted()).kek_id == "elsewhere"
    assert (world.provider.questions, world.provider.reused) == (1, 0)


@pytest.mark.guards(MATERIAL, "            if is_replaced(credential.kind):\n", "            if False:\n")
async def test_nobody_is_asked_while_the_key_that_would_seal_the_answer_is_away(world: Minting) -> None:
    await world.add_refresh_token()
    key = KeyElsewhere()
    key.is_away = True
    world.replica.custody.arrange([key, world.replica.kek])

    value = await world.value()

    assert value.startswith("credential_unavailable: the key-encryption key")
    assert world.provider.questions == 0


async def test_a_refresh_token_is_not_read_from_a_source(world: Minting) -> None:
    """What its provider puts in its place is kept here; the source would go on saying the old one."""
    with pytest.raises(RefusedError) as raised:
        await world.replica.add_credential(
            kind="oauth_refresh_token",
            settings={**REFRESH, "token_url": world.provider.token_url},
            secret=None,
            secret_source={"source": "vault", "name": "one"},
        )

    assert raised.value.refusal.code is RefusalCode.INVALID_FIELD
    assert raised.value.refusal.detail.startswith("secret_source: ")


# --- no --------------------------------------------------------------------------------------------------------------


async def test_invalid_grant_is_a_clear_reason_and_not_asked_again_at_once(world: Minting) -> None:
    await world.add_refresh_token()
    await world.value()
    world.provider.revoked = True
    world.pass_time(3600)

    answers = [await world.resolve() for _ in range(5)]

    for answer in answers:
        assert isinstance(answer, Refused)
        assert answer.code is RefusalCode.CREDENTIAL_UNAVAILABLE
        assert "invalid_grant" in answer.detail
        assert world.provider.first_refresh_token not in answer.detail
    assert world.provider.questions == 2
    assert (await world.replica.actions()).count("credential.mint_rejected") == 1


async def test_a_no_is_asked_about_again_ever_more_rarely(world: Minting) -> None:
    await world.add_refresh_token()
    world.provider.revoked = True
    await world.resolve()

    asked = []
    for seconds in range(0, 900, 10):
        world.pass_time(10)
        before = world.provider.questions
        await world.resolve()
        if world.provider.questions > before:
            asked.append(seconds + 10)
    world.provider.revoked = False
    world.pass_time(300)

    assert asked == [30, 90, 210, 450, 750]
    assert (await world.value()).startswith("at-")


@pytest.mark.guards(RULES, "if minted.state in (MintingState.REJECTED, MintingState.CONSENT_LOST) or", "if")
async def test_a_no_ends_the_use_of_what_was_minted_before(world: Minting) -> None:
    await world.add_refresh_token()
    first = await world.value()
    world.provider.revoked = True

    world.pass_time(3600 - 10 - 299)
    meanwhile = await world.value()
    await world.replica.material.close()

    assert meanwhile == first
    assert "invalid_grant" in await world.value()


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        ("401 Unauthorized", {"error": "invalid_client"}, "invalid_client"),
        ("401 Unauthorized", {}, "invalid_client"),
        ("400 Bad Request", {"error": "invalid_scope"}, "refuses what this credential's settings ask for"),
        ("400 Bad Request", {"error": "invalid_grant", "error_description": "SECRET"}, "invalid_grant"),
        ("200 OK", {"error": "bad_refresh_token"}, "invalid_grant"),
    ],
)
async def test_what_a_provider_refuses_is_told_in_our_words(
    world: Minting, status: str, body: dict[str, str], told: str
) -> None:
    await world.add_client_credentials()
    world.provider.fails = [plain(json.dumps(body).encode(), status=status)]

    value = await world.value()

    assert told in value
    assert "SECRET" not in value


# --- silence ---------------------------------------------------------------------------------------------------------

OUTAGES: dict[str, Behaviour] = {
    "500": plain(b"oops", status="500 Internal Server Error"),
    "503": plain(b"", status="503 Service Unavailable", headers=[("Retry-After", "1")]),
    "429": plain(b"", status="429 Too Many Requests"),
    "an empty 200": plain(b""),
    "wrong JSON": plain(b'{"access_token": '),
    "no object": plain(b'["at-1"]'),
    "no token": plain(b'{"expires_in": 3600}'),
    "a token that is no text": plain(b'{"access_token": {"a": 1}, "token_type": "Bearer"}'),
    "another type": plain(b'{"access_token": "at-1", "token_type": "mac"}'),
    "an end that is none": plain(b'{"access_token": "at-1", "token_type": "Bearer", "expires_in": "soon"}'),
    "over already": plain(b'{"access_token": "at-1", "token_type": "Bearer", "expires_in": 0}'),
    "a token with a line break": plain(b'{"access_token": "at-1\\r\\nX: y", "token_type": "Bearer"}'),
    "a token that is no ASCII": plain('{"access_token": "at-ü", "token_type": "Bearer"}'.encode()),
    "nested without end": plain(b"[" * 100_000),
    "a huge body": plain(b" " * 400_000),
    "a page": plain(b"<html>maintenance</html>", status="404 Not Found"),
    "a redirect": plain(b"", status="302 Found", headers=[("Location", "https://localhost/elsewhere")]),
    "closed": sends_then_closes(),
    "reset": sends_then_resets(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
    "no HTTP": sends(b"220 mail.example.test ESMTP\r\n\r\n"),
}


@pytest.mark.parametrize("outage", OUTAGES)
async def test_a_provider_that_gives_nothing_usable_is_unavailable_and_asked_again_within_seconds(
    world: Minting, outage: str
) -> None:
    await world.add_refresh_token()
    world.provider.fails = [OUTAGES[outage]] * 3

    first = await world.resolve()
    seen = []
    for _ in range(3):
        world.pass_time(4)
        seen.append(await world.value())

    assert isinstance(first, Refused)
    assert first.code is RefusalCode.CREDENTIAL_UNAVAILABLE
    assert "provider" in first.detail
    assert [value.startswith("at-") for value in seen] == [False, False, True]
    assert world.provider.reused == 0


async def test_a_provider_that_does_not_answer_in_time_is_unavailable(
    world: Minting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.adapters.providers.token_endpoint.SECONDS", 0.3)
    await world.add_client_credentials()
    world.provider.fails = [hold()]

    first = await world.value()
    world.pass_time(5)

    assert first.startswith("credential_unavailable: the provider of this credential's tokens does not answer")
    assert (await world.value()).startswith("at-")


async def test_an_outage_does_not_touch_a_value_that_still_counts(world: Minting) -> None:
    await world.add_refresh_token()
    first = await world.value()
    world.provider.fails = [OUTAGES["500"]] * 100

    seen = []
    for _ in range(4):
        world.pass_time(895)
        seen.append(await world.value())
        await world.replica.material.close()

    assert seen == [first] * 4


@pytest.mark.guards(RULES, "if now < end_of_use(minted):", "if True:")
async def test_a_value_past_its_end_is_never_used(world: Minting) -> None:
    await world.add_refresh_token(max_stale_seconds=86_400.0)
    first = await world.value()
    world.provider.fails = [OUTAGES["500"]] * 100

    world.pass_time(3600 - 10)
    await world.resolve()
    after = await world.value()

    assert after != first
    assert after.startswith("credential_unavailable")


@pytest.mark.guards(RULES, "now < end_of_use(minted) + max_stale_seconds", "True")
async def test_where_the_provider_names_no_end_an_outage_is_bridged_for_as_long_as_the_credential_says(
    world: Minting,
) -> None:
    world.provider.expires_in = None
    await world.add_refresh_token(max_stale_seconds=600.0)
    first = await world.value()
    world.provider.fails = [OUTAGES["500"]] * 1000

    seen = []
    for _ in range(4):
        world.pass_time(299)
        await world.resolve()
        seen.append(await world.value())

    assert [value == first for value in seen] == [True, True, True, False]
    assert seen[-1].startswith("credential_unavailable")


async def test_without_an_allowance_nothing_is_bridged(world: Minting) -> None:
    world.provider.expires_in = None
    await world.add_refresh_token()
    first = await world.value()
    world.provider.fails = [OUTAGES["500"]] * 1000

    world.pass_time(301)
    await world.resolve()

    assert await world.value() != first


async def test_a_new_refresh_token_is_kept_even_where_the_access_token_beside_it_is_of_no_use(world: Minting) -> None:
    await world.add_refresh_token()
    world.provider.extra = {"access_token": "at-\u00fc"}
    first = await world.value()

    world.provider.extra = {}
    world.pass_time(5)

    assert first.startswith("credential_unavailable")
    assert (await world.value()).startswith("at-")
    assert world.provider.reused == 0


async def test_an_address_that_nobody_allowed_is_named_as_the_reason(world: Minting) -> None:
    await world.add_client_credentials(settings={"token_url": "https://127.0.0.1:1/token"})

    value = await world.value()

    assert "not one that may be fetched from" in value


# --- changes ---------------------------------------------------------------------------------------------------------


async def test_narrower_scopes_keep_the_refresh_token_that_counts(either: Minting) -> None:
    world = either
    await world.add_refresh_token(settings={"scope": "read write"})
    await world.value()
    credential = await world.replica.credential()
    await world.replica.change(settings={**credential.settings, "scope": "read"})
    await world.replica.grant(replace(credential, id=credential.id), "bob")

    answer = await world.replica.resolve(world.replica.tokens["bob"], "bob")

    assert isinstance(answer, ResolvedPlaceholder)
    assert world.provider.forms[-1]["scope"] == "read"
    assert (world.provider.questions, world.provider.reused) == (2, 0)


@pytest.mark.guards(
    "control_plane/core/reach.py", "if before != after and not narrows(name, after, old=before):", "if 0:"
)
@pytest.mark.parametrize(
    "change",
    [
        {"token_url": "https://evil.example/token"},
        {"client_id": "another-app"},
        {"scope": "read write admin"},
        {"scope": None},
        {"client_authentication": "client_secret_basic"},
        {"refresh_token_use": "many"},
    ],
)
async def test_settings_by_which_the_secret_could_go_elsewhere_need_it_again(
    world: Minting, change: dict[str, Any]
) -> None:
    await world.add_refresh_token(settings={"scope": "read write"})
    credential = await world.replica.credential()
    settings = {name: value for name, value in {**credential.settings, **change}.items() if value is not None}

    with pytest.raises(RefusedError) as raised:
        await world.replica.change(settings=settings)

    assert raised.value.refusal.code is RefusalCode.SECRET_REQUIRED
    assert f"settings.{next(iter(change))}" in raised.value.refusal.detail


@pytest.mark.guards("control_plane/credentials.py", "raise RefusedError(BEING_REPLACED)", "return")
async def test_a_secret_is_not_copied_while_it_is_being_replaced(either: Minting) -> None:
    world = either
    await world.add_refresh_token(settings={"scope": "read write"})
    credential = await world.replica.credential()
    replica, stuck = crashing(world, CredentialKind.OAUTH_REFRESH_TOKEN)
    asking = asyncio.ensure_future(world.value(replica))
    await stuck.answered.wait()

    with pytest.raises(RefusedError) as raised:
        await world.replica.change(settings={**credential.settings, "scope": "read"})
    stuck.lives_after_all.set()
    await asking

    assert raised.value.refusal.code is RefusalCode.CREDENTIAL_UNAVAILABLE
    assert raised.value.refusal.retry_after_seconds is not None


@pytest.mark.guards("control_plane/credentials.py", "if row.asked_fence is not None or row.state", "if row.state")
async def test_a_secret_that_may_be_used_up_is_not_copied(world: Minting) -> None:
    await world.add_refresh_token(settings={"scope": "read write"})
    credential = await world.replica.credential()
    await killed_after_the_answer(world, CredentialKind.OAUTH_REFRESH_TOKEN)
    world.pass_time(LEASE_SECONDS + 1)

    with pytest.raises(RefusedError) as raised:
        await world.replica.change(settings={**credential.settings, "scope": "read"})

    assert raised.value.refusal.code is RefusalCode.SECRET_REQUIRED


async def test_settings_that_were_edited_in_the_database_open_nothing(world: Minting) -> None:
    await world.add_refresh_token()
    credential = await world.replica.credential()
    async with world.replica.store.write(TenantScope(ACME)) as records:
        edited = {**credential.settings, "token_url": "https://evil.example/token"}
        await records.credentials.replace(replace(credential, settings=edited))

    assert (await world.value()).startswith("credential_unavailable: the credential's secret does not open")
    assert world.provider.questions == 0


async def test_a_new_secret_ends_what_was_minted_with_the_old_one(world: Minting) -> None:
    await world.add_refresh_token()
    first = await world.value()

    await world.replica.rotate(refresh_secret(world.provider.consent()))

    assert await world.value() != first
    async with world.replica.store.read(PLATFORM) as records:
        credential = await world.replica.credential()
        assert await records.minted.get(credential.id, 1) is None


async def test_an_answer_for_a_secret_that_was_replaced_meanwhile_is_thrown_away(either: Minting) -> None:
    world = either
    await world.add_refresh_token()
    replica, stuck = crashing(world, CredentialKind.OAUTH_REFRESH_TOKEN)
    asking = asyncio.ensure_future(world.resolve(replica))
    await stuck.answered.wait()
    await world.replica.rotate(refresh_secret(world.provider.consent()))

    stuck.lives_after_all.set()
    await asking

    assert (await world.value()).startswith("at-")
    assert world.provider.reused == 0


async def test_what_was_minted_for_versions_that_are_over_is_forgotten(either: Minting) -> None:
    world = either
    await world.add_refresh_token()
    await world.value()
    row = await world.minted()
    async with world.replica.store.write(PLATFORM) as records:
        version = await records.versions.get(row.credential_id, row.version)
        assert version is not None
        await records.versions.replace(replace(version, state=type(version.state).RETIRED))

        assert await records.minted.purge(limit=10) == 1
        assert await records.minted.get(row.credential_id, row.version) is None
