"""Turns through real processes: a runtime, the control plane, the egress proxy, and a provider that checks its key."""

import re
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import Deployment, start_deployment, wait_for
from tests.support.provider import ANSWER, serve_provider
from tests.support.runtimes import AUDIENCE, Runtime, Workspace, start_runtime
from tests.support.upstream import Gate, Request, Upstream, Wire, message

SAID = "".join(ANSWER)
MARKERS = re.compile(rb"coat(chk|prx)1", re.IGNORECASE)


@pytest.fixture(scope="module")
def runtime(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    started = start_runtime(deployment, tmp_path_factory.mktemp("runtime"))
    yield started
    started.served.stop()


@pytest.fixture
def workspace(runtime: Runtime, upstream: Upstream, secret: str) -> Workspace:
    serve_provider(upstream, key=secret)
    return runtime.workspace(upstream, secret)


def test_a_turn_reaches_the_model_with_the_real_key_and_no_placeholder(
    runtime: Runtime, workspace: Workspace, upstream: Upstream
) -> None:
    session = workspace.session()

    first = runtime.turn(session, "hello")
    second = runtime.turn(session, "and now?")

    assert (first.status_code, first.json()) == (200, {"session_id": session["session_id"], "output": SAID})
    assert second.json()["output"] == SAID
    assert [request.values("x-api-key") for request in upstream.requests] == [[workspace.key]] * 2
    assert not MARKERS.search(upstream.received())
    assert b"proxy-authorization" not in upstream.received().lower()
    assert b"and now?" in upstream.requests[1].body
    assert SAID.encode() in upstream.requests[1].body


def test_each_tenant_calls_the_model_with_its_own_key_through_one_runtime(
    runtime: Runtime, workspace: Workspace, upstream: Upstream
) -> None:
    other = runtime.workspace(upstream, "sk-real-of-the-other-tenant")
    upstream_saw: list[str] = []

    for asking in (workspace, other, workspace):
        runtime.turn(asking.session())
        upstream_saw.append(upstream.requests[-1].header("x-api-key"))

    assert upstream_saw == [workspace.key, other.key, workspace.key]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-sh-subject": "alice"},
        {"authorization": "Bearer nobody", "x-sh-subject": "alice"},
        {"authorization": "Bearer a.b.c"},
    ],
)
def test_nobody_in_particular_gets_401_and_the_model_hears_nothing(
    runtime: Runtime, workspace: Workspace, upstream: Upstream, headers: dict[str, str]
) -> None:
    answer = runtime.turn(None, **headers)

    assert answer.status_code == 401
    assert upstream.accepted == 0


def test_a_token_for_another_runtime_is_not_good_here(
    runtime: Runtime, workspace: Workspace, upstream: Upstream, deployment: Deployment
) -> None:
    elsewhere = deployment.api.add_client(f"other-{secrets.token_hex(4)}", kind="runtime", tenant=None)
    session = deployment.api.open_session(runtime=elsewhere.id, tenant=workspace.tenant, subject="alice")

    answer = runtime.turn(session)

    assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")
    assert upstream.accepted == 0


def test_a_subject_without_a_grant_is_told_of_no_credential(
    runtime: Runtime, workspace: Workspace, upstream: Upstream
) -> None:
    answer = runtime.turn(workspace.session("mallory"))

    assert (answer.status_code, answer.json()["code"]) == (404, "credential_not_found")
    assert upstream.accepted == 0


def test_a_rotated_key_is_used_by_the_next_turn_of_a_session_under_way(
    runtime: Runtime, workspace: Workspace, upstream: Upstream
) -> None:
    session = workspace.session()
    runtime.turn(session)
    fresh = f"sk-real-{secrets.token_hex(20)}"
    serve_provider(upstream, key=fresh)

    workspace.deployment.api.rotate(workspace.tenant, AUDIENCE, secret=fresh, compromised=True)
    answer = _eventually(lambda: runtime.turn(session), lambda answer: answer.status_code == 200)

    assert answer.json()["output"] == SAID
    assert upstream.requests[-1].header("x-api-key") == fresh


@pytest.mark.parametrize("what", ["the session", "the grant"])
def test_what_is_taken_away_ends_the_turns_of_a_session_under_way(
    runtime: Runtime, workspace: Workspace, upstream: Upstream, what: str
) -> None:
    session = workspace.session()
    assert runtime.turn(session).status_code == 200
    api = workspace.deployment.api

    if what == "the session":
        api.ask("DELETE", f"/v1/sessions/{session['session_id']}")
    else:
        api.ask("DELETE", f"/v1/tenants/{workspace.tenant}/grants/{workspace.grant['id']}")
    answer = _eventually(lambda: runtime.turn(session), lambda answer: answer.status_code != 200)
    heard = len(upstream.requests)
    again = runtime.turn(session)

    assert answer.json()["code"] in ("session_not_found", "credential_not_found", "token_invalid")
    assert again.json()["code"] == answer.json()["code"]
    assert len(upstream.requests) == heard


def test_the_runtime_shows_no_key_and_no_placeholder_and_never_holds_the_key(
    runtime: Runtime, workspace: Workspace
) -> None:
    session = workspace.session()
    runtime.turn(session)
    runtime.turn(session, **{"x-sh-subject": "somebody else"})

    shown = runtime.served.log.encode() + runtime.served.arguments() + runtime.served.shown_environment()

    for secret_text in (workspace.key, runtime.client.secret, session["session_token"]):
        assert secret_text.encode() not in shown
    assert not MARKERS.search(shown)
    assert _memory_holds(runtime.served.pid, runtime.client.secret.encode())  # what it does hold can be found
    assert not _memory_holds(runtime.served.pid, workspace.key.encode())


def test_a_runtime_that_is_told_to_stop_finishes_its_turn_and_takes_no_other(
    deployment: Deployment, upstream: Upstream, secret: str, tmp_path: Path
) -> None:
    runtime, gate = start_runtime(deployment, tmp_path), Gate()
    workspace = runtime.workspace(upstream, secret)
    upstream.on("/v1/messages", _held_by(gate, secret))

    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(runtime.turn, workspace.session())
        wait_for(lambda: upstream.requests)
        runtime.served.signal(signal.SIGTERM)
        wait_for(lambda: _refuses_connections(runtime))
        gate.open()
        answer = under_way.result(20)

    assert (answer.status_code, answer.json()["output"]) == (200, "held")
    assert runtime.served.wait() == 0


def _held_by(gate: Gate, key: str) -> Any:
    async def behave(request: Request, wire: Wire) -> None:
        assert request.header("x-api-key") == key
        await gate.opened()
        await wire.write(message(b'{"content": [{"type": "text", "text": "held"}]}'))

    return behave


def _refuses_connections(runtime: Runtime) -> bool:
    try:
        httpx.get(f"{runtime.url}/healthz", trust_env=False)
    except httpx.TransportError as error:
        return isinstance(error, httpx.ConnectError)
    return False


def _eventually(ask: Any, is_right: Any) -> httpx.Response:
    """The first right answer. The proxy hears of a change by an event, so a few turns may still go the old way."""
    for _ in range(100):
        answer: httpx.Response = ask()
        if is_right(answer):
            return answer
    raise AssertionError(f"still {answer.status_code} {answer.text}")


def _memory_holds(pid: int, needle: bytes) -> bool:
    """Whether a process has these bytes anywhere in its writable memory."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            span, permissions = line.split()[:2]
            if not permissions.startswith("rw"):
                continue
            begin, end = (int(edge, 16) for edge in span.split("-"))
            try:
                memory.seek(begin)
                if needle in memory.read(end - begin):
                    return True
            except (OSError, ValueError, OverflowError):
                continue  # [vvar] and alike cannot be read
    return False


@pytest.mark.long
def test_a_turn_outlives_many_lives_of_its_placeholder(tmp_path: Path, secret: str) -> None:
    """The model thinks for longer than a placeholder lives; what the turn began with is good to its end."""
    gate, short_lives = Gate(), {"PLACEHOLDER_TTL_SECONDS": "2"}
    deployment = start_deployment(tmp_path, control_plane_settings=short_lives)
    try:
        with Upstream(deployment.upstream_ca) as upstream, ThreadPoolExecutor(1) as pool:
            runtime = start_runtime(deployment, tmp_path)
            workspace = runtime.workspace(upstream, secret)
            upstream.on("/v1/messages", _held_by(gate, secret))
            under_way = pool.submit(runtime.turn, workspace.session())
            wait_for(lambda: len(_actions(workspace, "exchange.renew")) >= 4, timeout_seconds=30)
            gate.open()
            answer = under_way.result(20)
            exchanged = _actions(workspace, "exchange")
            runtime.served.stop()
    finally:
        deployment.stop()

    assert (answer.status_code, answer.json()["output"]) == (200, "held")
    assert len(exchanged) == 1


def _actions(workspace: Workspace, action: str) -> list[dict[str, Any]]:
    return [event for event in workspace.deployment.api.audit(workspace.tenant) if event["action"] == action]
