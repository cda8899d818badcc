"""Credentials whose secret mints short-lived tokens, from end to end: the agent's placeholder stays the same for ever,
and what the upstream sees is the token of the moment.

Real processes: a control plane that asks a token endpoint over TLS, and the proxy. The upstream knows which tokens that
endpoint gave and how long each is good, and judges every request by it.
"""

import json
import secrets
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import jwt
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.processes import Deployment, Workspace, free_port, start_deployment, wait_for
from tests.support.upstream import Request, Upstream, Wire, message
from tests.support.ways import Kind, Way, way

LIFE_SECONDS: Final = 6.0
CLIENT_SECRET: Final = f"client-secret-{secrets.token_hex(16)}"
APP_KEY: Final = rsa.generate_private_key(public_exponent=65537, key_size=2048)
APP_KEY_PEM: Final = APP_KEY.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
).decode()
INSTALLATION: Final = "/app/installations/77/access_tokens"
KINDS: Final = ("oauth_client_credentials", "github_app")


class TokenEndpoint:
    """Gives tokens that are good for some seconds, to whoever proves itself; it can go down and come back."""

    def __init__(self, ca: trustme.CA, port: int) -> None:
        self.ca = ca
        self.port = port
        self.life_seconds = LIFE_SECONDS
        self.ends: dict[str, float] = {}
        """Until when each token that was given is good (Unix seconds)."""
        self._lock = threading.Lock()
        self._server: Upstream | None = None
        self.comes_up()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def comes_up(self) -> None:
        self._server = Upstream(self.ca, port=self.port)
        self._server.on("/token", self._client_credentials)
        self._server.on(INSTALLATION, self._installation)
        self._server.__enter__()

    def goes_down(self) -> None:
        assert self._server is not None
        self._server.stop()

    async def _client_credentials(self, request: Request, wire: Wire) -> None:
        """RFC 6749 §4.4."""
        known = b"grant_type=client_credentials" in request.body and CLIENT_SECRET.encode() in request.body
        if not known:
            await wire.write(message(b'{"error":"invalid_client"}', status="401 Unauthorized"))
            return
        token, _ = self._give()
        await answer(wire, {"access_token": token, "token_type": "Bearer", "expires_in": self.life_seconds})

    async def _installation(self, request: Request, wire: Wire) -> None:
        """GitHub's: an app proves itself by a statement that it signed."""
        try:
            jwt.decode(
                request.header("authorization").removeprefix("Bearer "),
                APP_KEY.public_key(),
                algorithms=["RS256"],
                issuer="4711",
            )
        except jwt.InvalidTokenError:
            await wire.write(message(b"{}", status="401 Unauthorized"))
            return
        token, end = self._give()
        shown = datetime.fromtimestamp(int(end), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await answer(wire, {"token": token, "expires_at": shown}, status="201 Created")

    def _give(self) -> tuple[str, float]:
        token, end = f"minted-{secrets.token_hex(20)}", time.time() + self.life_seconds
        with self._lock:
            self.ends[token] = end
        return token, end

    async def judge(self, request: Request, wire: Wire) -> None:
        """The API's answer: 200 to a token that is good now, 401 to anything else."""
        is_good = self.ends.get(bearer(request), 0) > time.time()
        await wire.write(message(b"ok", status="200 OK" if is_good else "401 Unauthorized"))


async def answer(wire: Wire, document: dict[str, Any], *, status: str = "200 OK") -> None:
    body = json.dumps(document).encode()
    await wire.write(message(body, status=status, headers=[("Content-Type", "application/json")]))


def bearer(request: Request) -> str:
    return request.header("authorization").removeprefix("Bearer ")


@pytest.fixture(scope="module")
def token_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, token_port: int) -> Iterator[Deployment]:
    """One whose control plane may ask the token endpoint, although that is on loopback."""
    folder = tmp_path_factory.mktemp("minted")
    allowed = {
        "OUTBOUND_ALLOW": f"localhost:{token_port}",
        "OUTBOUND_CA_FILES": str(folder / "upstream-ca.pem"),
    }
    started = start_deployment(folder, control_plane_settings=allowed)
    yield started
    started.stop()


@pytest.fixture
def token_endpoint(deployment: Deployment, token_port: int) -> Iterator[TokenEndpoint]:
    endpoint = TokenEndpoint(deployment.upstream_ca, token_port)
    yield endpoint
    endpoint.goes_down()


@pytest.fixture(params=KINDS)
def agent(
    request: pytest.FixtureRequest, workspace: Workspace, upstream: Upstream, token_endpoint: TokenEndpoint
) -> Way:
    """An agent with its placeholder, of a credential of each kind."""
    upstream.default = token_endpoint.judge
    match request.param:
        case "oauth_client_credentials":
            settings = {
                "token_url": f"{token_endpoint.url}/token",
                "client_id": "our-app",
                "client_authentication": "client_secret_post",
            }
            secret = CLIENT_SECRET
        case _:
            settings = {"app_id": "4711", "installation_id": "77", "api_url": token_endpoint.url}
            secret = APP_KEY_PEM
    workspace.credential("api", url=upstream.url, secret=secret, kind=request.param, settings=settings)
    return way(workspace, upstream, workspace.ticket("api"), Kind.TUNNEL)


@pytest.mark.guards("control_plane/material.py", "if not KINDS[kind].mints:", "if True:")
def test_the_upstream_sees_the_minted_token_and_neither_placeholder_nor_what_mints_it(
    deployment: Deployment, upstream: Upstream, token_endpoint: TokenEndpoint, agent: Way
) -> None:
    token_endpoint.life_seconds = 600

    statuses = [agent.ask("GET", f"/{number}").status for number in range(3)]

    assert statuses == [200] * 3
    assert {bearer(seen) for seen in upstream.requests} == set(token_endpoint.ends)
    assert len(token_endpoint.ends) == 1, "one token serves them all"
    (token,) = token_endpoint.ends
    assert not any(
        text.encode() in upstream.received() for text in (agent.ticket.placeholder, CLIENT_SECRET, "PRIVATE KEY")
    )
    assert not any(
        text in deployment.logs() for text in (token, CLIENT_SECRET, "PRIVATE KEY", agent.ticket.placeholder)
    )


@pytest.mark.long
def test_a_token_is_replaced_before_its_end_and_the_agent_does_not_notice(
    upstream: Upstream, token_endpoint: TokenEndpoint, agent: Way
) -> None:
    statuses: set[int] = set()

    def has_seen_three_tokens() -> bool:
        statuses.add(agent.ask("GET", "/x").status)
        return len({bearer(seen) for seen in upstream.requests}) >= 3

    wait_for(has_seen_three_tokens, timeout_seconds=8 * LIFE_SECONDS)

    assert statuses == {200}
    assert {bearer(seen) for seen in upstream.requests} <= set(token_endpoint.ends)


@pytest.mark.long
@pytest.mark.guards("egress_proxy/core/decision.py", "if end is None or end > now:", "if True:")
def test_a_token_that_is_over_while_its_endpoint_is_down_is_refused_and_nothing_goes_upstream(
    deployment: Deployment, upstream: Upstream, token_endpoint: TokenEndpoint, agent: Way
) -> None:
    assert agent.ask("GET", "/while-it-is-up").status == 200
    token_endpoint.goes_down()
    (end,) = token_endpoint.ends.values()

    refused = wait_for(lambda: refusal_of(agent), timeout_seconds=4 * LIFE_SECONDS)
    refused_at = time.time()
    seen = len(upstream.requests)
    wait_for(lambda: time.time() > end + 1, timeout_seconds=4 * LIFE_SECONDS)
    later = [agent.ask("GET", "/while-it-is-down") for _ in range(3)]
    is_ready = deployment.proxy.is_ready()

    assert refused == (503, "credential_unavailable")
    assert refused_at > end - LIFE_SECONDS / 2, "it was used for most of its life"
    assert [(each.status, each.refusal) for each in later] == [(503, "credential_unavailable")] * 3
    assert len(upstream.requests) == seen, "nothing went upstream"
    assert is_ready, "one provider's outage does not take the proxy out"

    token_endpoint.comes_up()

    wait_for(lambda: agent.ask("GET", "/again").status == 200, timeout_seconds=20)
    assert {bearer(request) for request in upstream.requests} == set(token_endpoint.ends)


def refusal_of(agent: Way) -> tuple[int, str] | None:
    """The first answer that is not the upstream's 200."""
    answered = agent.ask("GET", "/until-it-is-over")
    return None if answered.status == 200 else (answered.status, answered.refusal)
