"""The keys of issuers, from a real server over TLS: how often they are fetched, and how long they are believed."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from control_plane.adapters.jwks import DISCOVERY_SECONDS, FETCHES_A_WINDOW, WINDOW_SECONDS, FetchedKeys
from control_plane.adapters.outbound import Exceptions, HttpOutbound
from control_plane.core.identity import KeySource
from control_plane.ports import KeysUnavailableError
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.issuing import Provider, SigningKey, bearer
from tests.control_plane.workspace import Workspace
from tests.support.upstream import Upstream, plain

JWKS = "control_plane/adapters/jwks.py"


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(path)
    return path


class Publisher:
    """Somebody who publishes keys at `/keys`, and says so in a discovery document."""

    def __init__(self, server: Upstream) -> None:
        self.server = server
        self.old, self.new = SigningKey("old"), SigningKey("new")
        self.publish(self.old)
        self.discover()

    @property
    def issuer(self) -> str:
        return self.server.url

    def publish(self, *keys: SigningKey) -> None:
        self.server.on("/keys", plain(json.dumps({"keys": [key.jwk for key in keys]}).encode()))

    def answer(self, body: bytes, *, status: int = 200) -> None:
        self.server.on("/keys", plain(body, status=f"{status} Whatever"))

    def discover(self, issuer: str | None = None, keys: str | None = None) -> None:
        document = {"issuer": issuer or self.issuer, "jwks_uri": keys or f"{self.server.url}/keys"}
        self.server.on("/.well-known/openid-configuration", plain(json.dumps(document).encode()))

    def fetches(self, target: str = "/keys") -> int:
        return sum(request.target == target for request in self.server.requests)


@pytest.fixture
def publisher(ca: trustme.CA) -> Iterator[Publisher]:
    with Upstream(ca) as server:
        yield Publisher(server)


class Keys:
    """The cache under test, with a clock of its own."""

    def __init__(self, publisher: Publisher, ca_file: Path) -> None:
        self.now = 1_000_000.0
        endpoints = frozenset({("localhost", publisher.server.port), ("127.0.0.1", publisher.server.port)})
        outbound = HttpOutbound(ca_files=[ca_file], exceptions=Exceptions(endpoints))
        self.cache = FetchedKeys(outbound, clock=lambda: self.now)
        self.source = KeySource(jwks_url=f"{publisher.server.url}/keys", max_age_seconds=300, max_stale_seconds=3_600)

    async def ids(self, key_id: str | None = "old") -> set[str | None]:
        return {key.id for key in await self.cache.of(self.source, key_id=key_id)}


@pytest.fixture
def keys(publisher: Publisher, ca_file: Path) -> Keys:
    return Keys(publisher, ca_file)


async def test_a_kept_set_answers_until_it_is_too_old(publisher: Publisher, keys: Keys) -> None:
    for seconds in (0, 100, 199):
        keys.now = 1_000_000.0 + seconds
        assert await keys.ids() == {"old"}
    assert publisher.fetches() == 1

    keys.now += 200

    assert await keys.ids() == {"old"}
    assert publisher.fetches() == 2


@pytest.mark.guards(JWKS, "and kept.may_fetch(self._clock())", "")
async def test_a_flood_of_unknown_key_ids_is_two_fetches_a_window(publisher: Publisher, keys: Keys) -> None:
    for number in range(200):
        assert "old" in await keys.ids(f"made-up-{number}")
    in_the_first = publisher.fetches()
    keys.now += WINDOW_SECONDS
    for number in range(200):
        await keys.ids(f"made-up-{number}")

    assert in_the_first == FETCHES_A_WINDOW == 2
    assert publisher.fetches() == 4


@pytest.mark.guards(JWKS, "async with kept.lock:", "if True:")
async def test_many_who_wait_are_one_fetch(publisher: Publisher, keys: Keys) -> None:
    await asyncio.gather(*(keys.ids() for _ in range(50)))

    assert publisher.fetches() == 1


async def test_a_new_key_is_found_at_once(publisher: Publisher, keys: Keys) -> None:
    await keys.ids()
    publisher.publish(publisher.old, publisher.new)

    assert await keys.ids("new") == {"old", "new"}
    assert publisher.fetches() == 2


@pytest.mark.guards(JWKS, "return kept.age(self._clock()) < source.max_age_seconds and", "return")
async def test_a_key_that_was_taken_out_verifies_nothing_after_the_bound(publisher: Publisher, keys: Keys) -> None:
    await keys.ids()
    publisher.publish(publisher.new)

    keys.now += 299
    before = await keys.ids()
    keys.now += 1
    after = await keys.ids()

    assert (before, after) == ({"old"}, {"new"})


async def test_an_empty_set_takes_all_keys_out(publisher: Publisher, keys: Keys) -> None:
    await keys.ids()
    publisher.publish()
    keys.now += 300

    assert await keys.ids() == set()


@pytest.mark.guards(JWKS, "if kept.age(self._clock()) < max(", "if -1 < max(")
@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 200), (b"no json", 200), (b"[]", 200), (b'{"keys": {}}', 200), (b'{"keys": []}', 500), (b"", 404)],
    ids=["an empty 200", "no JSON", "a list", "no list of keys", "500", "404"],
)
async def test_an_outage_keeps_the_last_good_keys_up_to_the_limit_and_recovers(
    publisher: Publisher, keys: Keys, body: bytes, status: int
) -> None:
    await keys.ids()
    publisher.answer(body, status=status)

    keys.now += 3_599
    assert await keys.ids() == {"old"}
    keys.now += 1
    with pytest.raises(KeysUnavailableError):
        await keys.ids()
    publisher.publish(publisher.new)
    keys.now += WINDOW_SECONDS

    assert await keys.ids("new") == {"new"}


async def test_during_an_outage_too_there_are_two_fetches_a_window(publisher: Publisher, keys: Keys) -> None:
    await keys.ids()
    publisher.answer(b"", status=500)
    keys.now += 400

    for _ in range(50):
        await keys.ids()

    assert publisher.fetches() == 1 + FETCHES_A_WINDOW


async def test_keys_that_are_no_public_keys_for_signing_are_passed_over(publisher: Publisher, keys: Keys) -> None:
    bad = [
        {"kty": "oct", "kid": "shared", "k": "c2VjcmV0"},
        {**publisher.new.jwk, "kid": "encrypts", "use": "enc"},
        {**publisher.new.jwk, "kid": "of-another-kind", "alg": "RS256"},
        {"kty": "EC", "kid": "broken"},
        "not even an object",
        {**publisher.new.jwk, "kid": 7},
    ]
    publisher.answer(json.dumps({"keys": [*bad, publisher.old.jwk]}).encode())

    assert await keys.ids() == {"old"}


async def test_discovery_says_where_the_keys_are_and_is_kept_for_a_while(publisher: Publisher, keys: Keys) -> None:
    keys.source = KeySource(discovery=publisher.issuer, max_age_seconds=300, max_stale_seconds=3_600)

    for _ in range(4):
        assert await keys.ids() == {"old"}
        keys.now += 300
    document = "/.well-known/openid-configuration"
    kept = publisher.fetches(document)
    keys.now += DISCOVERY_SECONDS
    await keys.ids()

    assert (kept, publisher.fetches(document), publisher.fetches()) == (1, 2, 5)


@pytest.mark.guards(JWKS, 'if document.get("issuer") != issuer:', "if False:")
@pytest.mark.parametrize(
    ("issuer", "keys_at"),
    [
        ("https://evil.test", None),
        (None, "http://localhost/keys"),
        (None, "https://10.0.0.1/keys"),
        (None, "file:///x"),
    ],
)
async def test_a_discovery_document_that_leads_astray_gives_no_keys(
    publisher: Publisher, keys: Keys, issuer: str | None, keys_at: str | None
) -> None:
    publisher.discover(issuer, keys_at)
    keys.source = KeySource(discovery=publisher.issuer)

    with pytest.raises(KeysUnavailableError):
        await keys.ids()


# --- the whole way ---------------------------------------------------------------------------------------------------


def test_a_session_by_discovered_keys_rotated_and_in_an_outage(
    publisher: Publisher, ca_file: Path, own_control_plane: OwnControlPlane
) -> None:
    plane = own_control_plane(
        outbound_ca_files=(ca_file,), outbound_allow=(f"localhost:{publisher.server.port}",), log_level="error"
    )
    workspace, provider = Workspace(plane, "acme"), Provider("discovered", publisher.old)
    provider.issuer = publisher.issuer
    provider.register(plane, tenant="acme", keys=[], discovery=True)

    def opens(key: SigningKey) -> int:
        provider.key, provider.ahead = key, plane.clock.ahead
        body = {"runtime": workspace.runtime}
        return plane.http.post("/v1/sessions", json=body, headers=bearer(provider.token())).status_code

    # (1) A key that is published signs, another does not; the flood costs at most two fetches.
    assert opens(publisher.old) == 201
    assert [opens(SigningKey(f"made-up-{number}")) for number in range(20)] == [401] * 20
    assert publisher.fetches() <= FETCHES_A_WINDOW
    # (2) A rotated key is known within the window.
    publisher.publish(publisher.new)
    plane.clock.advance(WINDOW_SECONDS + 1)
    assert (opens(publisher.new), opens(publisher.old)) == (201, 401)
    # (3) In an outage the last good keys serve up to the limit; then nobody can say, and the answer says so.
    publisher.answer(b"", status=503)
    plane.clock.advance(3_000)
    within_the_limit = opens(publisher.new)
    plane.clock.advance(700)
    assert (within_the_limit, opens(publisher.new)) == (201, 503)
