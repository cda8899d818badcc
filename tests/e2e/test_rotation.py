"""Rotations as an operator sees them: real processes, a provider that knows which key is good, several proxies."""

import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.api import Ticket
from tests.support.processes import Deployment, Proxy, Workspace, wait_for
from tests.support.upstream import Behaviour, Request, Upstream, Wire, message
from tests.support.ways import Kind, Way

CACHE_BOUND_SECONDS = 60.0
TAKES_EFFECT_WITHIN_SECONDS = 5.0
"""A second is what `make bench` measures; here the machine may be busy with other tests."""
PROBE = {"method": "GET", "path": "/v1/me"}


def knows(*keys: str) -> Behaviour:
    """A provider's answer: 200 to one of its keys, 401 to anything else."""

    async def behave(request: Request, wire: Wire) -> None:
        is_known = request.header("authorization").removeprefix("Bearer ") in keys
        await wire.write(message(b"{}", status="200 OK" if is_known else "401 Unauthorized"))

    return behave


@pytest.fixture
def old_key(workspace: Workspace, upstream: Upstream) -> str:
    """Of the credential `api`, granted to four subjects."""
    key = f"sk-old-{secrets.token_hex(16)}"
    workspace.credential("api", url=upstream.url, secret=key)
    for subject in ("bob", "carol", "dave"):
        workspace.api.add_grant(workspace.tenant, "api", subject=subject)
    return key


@pytest.fixture
def new_key() -> str:
    return f"sk-new-{secrets.token_hex(16)}"


def rotate(workspace: Workspace, secret: str, **options: Any) -> Any:
    path = f"/v1/tenants/{workspace.tenant}/credentials/api/rotate"
    return workspace.api.ask("POST", path, {"secret": secret} | options)


def state(workspace: Workspace) -> Any:
    return workspace.api.ask("GET", f"/v1/tenants/{workspace.tenant}/credentials/api/rotation")


def through(workspace: Workspace, upstream: Upstream, ticket: Ticket, proxy: Proxy | None = None) -> Way:
    deployment = workspace.deployment
    return Way(Kind.REVERSE, ticket, upstream.authority, "api", proxy or deployment.proxy, deployment.client_context())


def test_a_new_key_is_tried_through_the_proxy_before_it_goes_live(
    workspace: Workspace, upstream: Upstream, old_key: str, new_key: str
) -> None:
    upstream.default = knows(old_key, new_key)
    wrong = rotate(workspace, "sk-wrong-0123456789", probe=PROBE)
    tried = upstream.requests[-1]
    still = through(workspace, upstream, workspace.ticket("api")).ask("GET", "/x").status

    right = rotate(workspace, new_key, probe=True)

    assert (wrong["rotation"]["phase"], wrong["rotation"]["probe"], still) == ("cancelled", "rejected", 200)
    assert (tried.target, tried.header("authorization")) == ("/v1/me", "Bearer sk-wrong-0123456789")
    assert (right["rotation"]["phase"], right["rotation"]["probe"]) == ("completed", "accepted")
    assert [version["state"] for version in right["versions"]] == ["retired", "retired", "active"]


def test_where_no_proxy_answers_nothing_is_known_and_nothing_goes_live(
    workspace: Workspace, upstream: Upstream, old_key: str, new_key: str
) -> None:
    upstream.stop_listening()

    tried = rotate(workspace, new_key, probe=PROBE)

    assert (tried["rotation"]["phase"], tried["rotation"]["probe"]) == ("cancelled", "unknown")
    assert tried["rotation"]["probe_detail"] == "the egress proxy refused it: upstream_unreachable"


def test_a_key_that_the_provider_rejects_for_three_subjects_goes_back_by_itself(
    workspace: Workspace, upstream: Upstream, old_key: str, new_key: str
) -> None:
    upstream.default = knows(old_key)
    ways = [
        through(workspace, upstream, workspace.ticket("api", subject=subject)) for subject in ("alice", "bob", "carol")
    ]
    before = [way.ask("GET", "/x").status for way in ways]
    rotate(workspace, new_key, overlap_seconds=600)
    wait_for(lambda: all(way.ask("GET", "/x").status == 401 for way in ways))

    rolled_back = wait_for(lambda: state(workspace)["rotation"]["phase"] == "rolled_back")
    wait_for(lambda: all(way.ask("GET", "/x").status == 200 for way in ways))

    assert (before, rolled_back) == ([200] * 3, True)
    shown = state(workspace)["rotation"]
    assert "3 subjects" in shown["reason"]
    actions = [event["action"] for event in workspace.api.audit(workspace.tenant)]
    assert "rotation.roll_back" in actions


def test_a_canary_is_the_same_subjects_at_every_proxy(
    workspace: Workspace, upstream: Upstream, old_key: str, new_key: str, more_proxies: list[Proxy]
) -> None:
    rotate(workspace, new_key, canary_percent=50, canary_seconds=600)
    tickets = {subject: workspace.ticket("api", subject=subject) for subject in ("alice", "bob", "carol", "dave")}

    seen = {
        subject: {
            through(workspace, upstream, ticket, proxy).ask("GET", f"/{subject}").status
            and upstream.requests[-1].header("authorization")
            for proxy in (workspace.deployment.proxy, *more_proxies)
        }
        for subject, ticket in tickets.items()
    }

    assert [len(keys) for keys in seen.values()] == [1] * 4
    assert {key for keys in seen.values() for key in keys} <= {f"Bearer {old_key}", f"Bearer {new_key}"}


@pytest.fixture(scope="module")
def more_proxies(deployment: Deployment) -> Iterator[list[Proxy]]:
    started = [deployment.start_proxy() for _ in range(2)]
    yield started
    for proxy in started:
        proxy.served.stop()
        deployment.proxies.remove(proxy)


def test_no_proxy_uses_the_old_key_for_long_and_all_placeholders_live_on(
    workspace: Workspace, upstream: Upstream, old_key: str, new_key: str, more_proxies: list[Proxy]
) -> None:
    """Three proxies, each with a client that never stops asking."""
    last_old_use: list[float] = []

    async def note(request: Request, wire: Wire) -> None:
        if request.header("authorization") == f"Bearer {old_key}":
            last_old_use.append(time.monotonic())
        await wire.write(message(b"{}"))

    upstream.default = note
    proxies = [workspace.deployment.proxy, *more_proxies]
    ways = [through(workspace, upstream, workspace.ticket("api"), proxy) for proxy in proxies]
    statuses: set[int] = set()
    stop = threading.Event()
    asking = [threading.Thread(target=ask_until, args=(stop, way, statuses), daemon=True) for way in ways]
    for thread in asking:
        thread.start()
    wait_for(lambda: len(last_old_use) > 20)

    rotate(workspace, new_key)
    rotated_at = time.monotonic()
    wait_for(lambda: time.monotonic() - max(last_old_use) > 1.0, timeout_seconds=CACHE_BOUND_SECONDS)
    stop.set()
    for thread in asking:
        thread.join(10)

    assert max(last_old_use) - rotated_at < TAKES_EFFECT_WITHIN_SECONDS
    assert statuses == {200}


def ask_until(stop: threading.Event, way: Way, statuses: set[int]) -> None:
    with way.open() as line:
        while not stop.wait(0.01):
            statuses.add(line.ask(way.request("GET", "/x")).status)
