"""Two control planes on one PostgreSQL, and a provider that knows when a refresh token comes twice: through HTTP."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import pytest
import trustme

from tests.control_plane.minting import CLIENT_SECRET, REFRESH, refresh_secret
from tests.control_plane.postgresql import database_with_two_logins
from tests.control_plane.serving import PROXY, ControlPlane, control_plane_in
from tests.control_plane.workspace import ENDPOINT, Json, Workspace, sha256
from tests.support.token_provider import TokenProvider
from tests.support.upstream import plain

AT_ONCE = 50
_numbers = count(1)


@dataclass(frozen=True)
class Replicas:
    planes: tuple[ControlPlane, ControlPlane]
    workspace: Workspace
    provider: TokenProvider
    issued: Json

    def ask(self, plane: ControlPlane) -> Json:
        ask = {
            "kind": "placeholder",
            "placeholder_sha256": sha256(self.issued["access_token"]),
            "caller": self.workspace.caller(self.issued),
            "endpoint": ENDPOINT,
        }
        response = plane.http.post("/internal/resolve", json={"ask": ask}, auth=PROXY)
        assert response.status_code == 200, response.text
        answer: Json = response.json()["answer"]
        return answer

    def ask_all_at_once(self) -> list[Json]:
        together = threading.Barrier(AT_ONCE)

        def one(number: int) -> Json:
            together.wait()
            return self.ask(self.planes[number % 2])

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, range(AT_ONCE)))

    def pass_time(self, seconds: float) -> None:
        for plane in self.planes:
            plane.clock.advance(seconds)

    def token_provider_says(self, status: str, times: int) -> None:
        self.provider.fails = [plain(b"", status=status)] * times


Running = tuple[tuple[ControlPlane, ControlPlane], TokenProvider]


@pytest.fixture(scope="module")
def running(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    ca, folder = trustme.CA(), tmp_path_factory.mktemp("replicas")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    logins = asyncio.run(database_with_two_logins(server))
    with TokenProvider(ca) as provider:
        shared = {
            "database_url": logins.app,
            "migration_database_url": logins.owner,
            "unbound_database_login": "",
            "issuer_url": "https://coatcheck.example",
            "outbound_allow": (f"localhost:{provider.server.port}",),
            "outbound_ca_files": (folder / "ca.pem",),
            "placeholder_ttl_seconds": 40_000,
        }
        with control_plane_in(folder, **shared) as one, control_plane_in(folder, **shared) as other:
            yield (one, other), provider


@pytest.fixture
def replicas(running: Running) -> Replicas:
    """With a tenant of this test's own, and a consent that nothing was minted with yet."""
    planes, provider = running
    for plane in planes:
        plane.clock.ahead = 0.0
    provider.fails, provider.forms, provider.reused = [], [], 0
    workspace = Workspace(planes[0], f"acme-{next(_numbers)}")
    workspace.add_credential(
        kind="oauth_refresh_token",
        settings={**REFRESH, "token_url": provider.token_url},
        secret=refresh_secret(provider.consent()),
    )
    workspace.grant()
    return Replicas(planes, workspace, provider, workspace.exchange())


def test_fifty_resolves_on_two_replicas_refresh_once_and_again_once_after_its_end(replicas: Replicas) -> None:
    first = replicas.ask_all_at_once()
    replicas.pass_time(3600)
    second = replicas.ask_all_at_once()

    assert len({answer["secret"] for answer in first}) == 1
    assert len({answer["secret"] for answer in second}) == 1
    assert first[0]["secret"] != second[0]["secret"]
    assert (replicas.provider.questions, replicas.provider.reused) == (2, 0)


def test_a_credential_is_shown_with_how_its_last_question_ended_and_never_with_what_was_minted(
    replicas: Replicas,
) -> None:
    value = replicas.ask(replicas.planes[0])["secret"]
    good = replicas.workspace.credential()
    replicas.provider.revoked = True
    replicas.pass_time(3600)
    refused = replicas.ask(replicas.planes[1])
    bad = replicas.workspace.credential()

    assert (good["minted"]["state"], bad["minted"]["state"]) == ("ready", "rejected")
    assert bad["minted"]["detail"] == refused["detail"]
    assert good["settings"]["token_url"] == replicas.provider.token_url
    for shown in (good, bad, replicas.workspace.audit()):
        for secret in (value, replicas.provider.first_refresh_token, CLIENT_SECRET):
            assert secret not in str(shown)


def test_an_outage_is_a_503_with_its_reason_and_over_within_five_seconds(replicas: Replicas) -> None:
    """C40: the value that counts is used to its end; then a reason; then, soon after the provider is back, a value."""
    first = replicas.ask(replicas.planes[0])["secret"]
    replicas.token_provider_says("503 Service Unavailable", times=10_000)
    during = []
    for seconds in (10, 110, 1080, 2380, 30, 60):
        replicas.pass_time(seconds)
        during.append([replicas.ask(plane).get("secret") for plane in replicas.planes])
    refused = replicas.ask(replicas.planes[0])
    replicas.provider.fails = []
    replicas.pass_time(5)
    after = replicas.ask(replicas.planes[1])

    assert during == [[first, first]] * 4 + [[None, None]] * 2
    assert refused["code"] == "credential_unavailable"
    assert "does not answer" in refused["detail"]
    assert after["secret"].startswith("at-")


def test_an_exchange_does_not_wait_for_a_provider(replicas: Replicas) -> None:
    """Nothing is minted for a placeholder that nobody has used yet."""
    assert replicas.provider.questions == 0

    replicas.workspace.exchange()

    assert replicas.provider.questions == 0
