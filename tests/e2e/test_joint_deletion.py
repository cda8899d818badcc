"""A session's end reaches both sides, whichever of the two hears of it first and wherever the runtime dies on the way.

Real processes: the control plane, its proxy, and a runtime that reaches the control plane through a relay.
The relay kills the runtime at a chosen step: before the control plane has heard of it, or after it answered and before
the runtime hears that.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import Deployment, wait_for
from tests.support.provider import serve_provider
from tests.support.runtimes import Runtime, Workspace, start_runtime
from tests.support.upstream import Request, Upstream, Wire, message

GRACE_SECONDS = "1"
ENDING, CONFIRMING = r"DELETE /v1/sessions/\w+$", r"POST /v1/sessions/\w+/erased$"


@dataclass(slots=True)
class Step:
    """Between which two things the runtime dies."""

    request: str
    is_heard: bool
    """Whether the control plane has answered by then."""


class Relay:
    """Hands everything on to the control plane; at the armed step it kills the runtime instead of going on."""

    def __init__(self, control_plane_url: str) -> None:
        self._control_plane_url = control_plane_url
        self.server = Upstream(None)
        self.server.default = self._relay
        self.runtime: Runtime | None = None
        self.armed: Step | None = None

    async def _relay(self, request: Request, wire: Wire) -> None:
        step = self.armed
        is_meant = step is not None and re.match(step.request, f"{request.method} {request.path}")
        if step is not None and is_meant and not step.is_heard:
            await self._kill(wire)
            return
        named = {name.lower(): value for name, value in request.headers}
        kept: dict[str, str] = {name: named[name] for name in ("authorization", "content-type") if name in named}
        async with httpx.AsyncClient(trust_env=False) as http:
            url = self._control_plane_url + request.target
            answer = await http.request(request.method, url, headers=kept, content=request.body)
        if is_meant:
            await self._kill(wire)
            return
        status = f"{answer.status_code} {answer.reason_phrase}"
        content = [("Content-Type", answer.headers.get("content-type", "text/plain"))]
        await wire.write(message(answer.content, status=status, headers=content, framed=answer.status_code != 204))

    async def _kill(self, wire: Wire) -> None:
        assert self.runtime is not None
        self.armed = None
        self.runtime.served.kill()
        await wire.close()


@pytest.fixture(scope="module")
def relay(deployment: Deployment) -> Iterator[Relay]:
    relay = Relay(deployment.api.url)
    with relay.server:
        yield relay


@pytest.fixture(scope="module")
def runtime(deployment: Deployment, relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    relay.runtime = start_runtime(
        deployment,
        tmp_path_factory.mktemp("runtime"),
        CONTROL_PLANE_URL=relay.server.url,
        ISSUER_URL=deployment.api.url,
        ERASE_GRACE_SECONDS=GRACE_SECONDS,
    )
    yield relay.runtime
    relay.runtime.served.stop()


@pytest.fixture
def workspace(runtime: Runtime, upstream: Upstream, secret: str) -> Workspace:
    serve_provider(upstream, key=secret)
    return runtime.workspace(upstream, secret)


def is_erased(workspace: Workspace, session: dict[str, Any]) -> bool:
    shown = workspace.deployment.api.ask("GET", f"/v1/sessions/{session['session_id']}")
    return shown["erased_at"] is not None


def is_over_everywhere(runtime: Runtime, workspace: Workspace, session: dict[str, Any], upstream: Upstream) -> None:
    """Both sides erased it, once; and a token of it that is still good begins nothing."""
    wait_for(lambda: is_erased(workspace, session), timeout_seconds=20)
    heard = len(upstream.requests)

    turn = runtime.turn(session, "still there?")

    assert (turn.status_code, turn.json()["code"]) == (404, "session_not_found")
    assert len(upstream.requests) == heard, "the model heard nothing"
    actions = [
        event["action"]
        for event in workspace.deployment.api.audit(workspace.tenant)
        if event.get("session") == session["session_id"]
    ]
    assert [action for action in actions if action in ("session.end", "session.erase")] == [
        "session.end",
        "session.erase",
    ]


def test_what_an_administrator_ends_is_forgotten_by_the_runtime(
    runtime: Runtime, workspace: Workspace, upstream: Upstream
) -> None:
    session, other = workspace.session(), workspace.session()
    before = [runtime.turn(each).status_code for each in (session, other)]

    workspace.deployment.api.ask("DELETE", f"/v1/sessions/{session['session_id']}")

    is_over_everywhere(runtime, workspace, session, upstream)
    assert before == [200, 200]
    assert runtime.turn(other, "and you?").status_code == 200
    assert not is_erased(workspace, other)


def test_what_its_owner_ends_at_the_runtime_ends_at_the_control_plane(
    runtime: Runtime, workspace: Workspace, upstream: Upstream
) -> None:
    session, other = workspace.session(), workspace.session()
    runtime.turn(session)

    another = runtime.end(other | {"session_token": session["session_token"]})
    ended = [runtime.end(session).status_code for _ in range(2)]

    assert (another.status_code, another.json()["code"]) == (404, "session_not_found")
    assert ended == [204, 204]
    is_over_everywhere(runtime, workspace, session, upstream)
    assert runtime.turn(other).status_code == 200, "another session goes on"


@pytest.mark.long
@pytest.mark.parametrize("is_heard", [False, True], ids=["before-it-is-heard", "after-it-was-answered"])
@pytest.mark.parametrize("request_line", [ENDING, CONFIRMING], ids=["ending", "confirming"])
def test_a_runtime_that_is_killed_at_any_step_finishes_when_it_is_back(
    relay: Relay,
    runtime: Runtime,
    workspace: Workspace,
    upstream: Upstream,
    request_line: str,
    is_heard: bool,
) -> None:
    session = workspace.session()
    runtime.turn(session)
    relay.armed = Step(request_line, is_heard)

    if request_line == ENDING:
        with pytest.raises(httpx.HTTPError):
            runtime.end(session)
    else:
        assert runtime.end(session).status_code == 204
    assert runtime.served.wait(20) != 0
    runtime.start_again()

    if request_line == ENDING and not is_heard:  # nobody knows of it: whoever asked asks again
        assert runtime.end(session).status_code == 204
    is_over_everywhere(runtime, workspace, session, upstream)


def test_while_the_control_plane_is_away_the_owner_hears_so_and_nothing_is_forgotten(
    deployment: Deployment, upstream: Upstream, secret: str, tmp_path: Path
) -> None:
    serve_provider(upstream, key=secret)
    relay = Relay(deployment.api.url)
    with relay.server:
        runtime = start_runtime(deployment, tmp_path, CONTROL_PLANE_URL=relay.server.url, ISSUER_URL=deployment.api.url)
        session = runtime.workspace(upstream, secret).session()
        runtime.turn(session)
    answer = runtime.end(session)
    turn = runtime.turn(session, "and on?")
    runtime.served.stop()

    assert (answer.status_code, answer.json()["code"]) == (503, "credential_unavailable")
    assert turn.status_code == 200, "it goes on as before"
