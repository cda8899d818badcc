"""A new version is tried before anybody uses it: what a yes, a no and no answer lead to, and who else gets at it."""

import asyncio
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from control_plane.adapters.sql.engine import Database
from control_plane.contract.caller import Caller, SubjectId
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.contract.wire import (
    AskCaller,
    AskPlaceholder,
    AskPolicy,
    CallerFacts,
    Policy,
    Refused,
    ResolvedPlaceholder,
    ResolveRequest,
)
from control_plane.core.probe import InvalidProbeError, Probe
from control_plane.core.rotation import PROBE_CLIENT
from control_plane.ports import ProbeCall, ProbeReply
from control_plane.probing import LEASE_SECONDS
from tests.control_plane.databases import BOTH
from tests.control_plane.rotating import ACME, DESTINATION, NAME, NEW, OLD, OPERATOR, Replica
from tests.control_plane.test_rotation import in_use

PROBE = Probe("GET", "/v1/me")
TRY: dict[str, Any] = {"probes": True, "probe": PROBE}


@pytest.fixture
async def replica(database: Database) -> Replica:
    made = Replica(database)
    await made.grant(await made.add_credential(), "alice", "bob")
    return made


def fingerprint(text: str) -> str:
    return sha256(text.encode()).hexdigest()


async def answer(replica: Replica, ask: Any) -> Any:
    return (await replica.resolution(ResolveRequest(ask))).answer


async def what_the_proxy_learns(replica: Replica, call: ProbeCall) -> tuple[Any, Any, Any]:
    """Who calls, where it may go, and what its placeholder stands for."""
    placeholder = call.headers["authorization"].removeprefix("Bearer ")
    who = await answer(replica, AskCaller(fingerprint(call.proxy_credential)))
    assert isinstance(who, CallerFacts)
    policy = await answer(replica, AskPolicy(who.caller))
    resolved = await answer(replica, AskPlaceholder(fingerprint(placeholder), who.caller, DESTINATION.endpoint))
    return who.caller, policy, resolved


async def test_an_accepted_version_goes_live(replica: Replica) -> None:
    await replica.rotate(**TRY)

    rotation = await replica.rotation()
    assert (rotation.phase.value, rotation.probe_result, rotation.probe_status) == ("completed", "accepted", 200)
    assert set((await in_use(replica)).values()) == {NEW}
    call = replica.upstream.calls[0]
    assert (call.method, call.target) == ("GET", f"/{NAME}/v1/me")
    assert NEW not in str(dict(call.headers)), "the control plane sends a placeholder, as everybody does"


OTHERWISE: dict[str, tuple[ProbeReply | None, str]] = {
    "rejected": (ProbeReply(401, ""), "rejected"),
    "forbidden, which says nothing of the secret": (ProbeReply(403, ""), "unknown"),
    "the upstream is broken": (ProbeReply(500, ""), "unknown"),
    "the proxy refuses": (ProbeReply(401, "token_invalid"), "unknown"),
    "the proxy refuses with a code of success": (ProbeReply(200, "draining"), "unknown"),
    "nobody answers": (None, "unknown"),
}


@pytest.mark.guards("control_plane/probing.py", "if reply.refusal:", "if False:")
@pytest.mark.parametrize(("reply", "expected"), OTHERWISE.values(), ids=OTHERWISE)
async def test_a_version_that_was_not_accepted_is_thrown_away(
    replica: Replica, reply: ProbeReply | None, expected: str
) -> None:
    replica.upstream.answer = reply

    await replica.rotate(**TRY)

    rotation = await replica.rotation()
    assert (rotation.phase.value, rotation.probe_result) == ("cancelled", expected)
    assert rotation.reason
    assert set((await in_use(replica)).values()) == {OLD}
    assert await replica.envelopes() == [True, False]


async def test_an_operator_may_go_on_without_an_answer_but_not_against_one(replica: Replica) -> None:
    replica.upstream.answer = None
    await replica.rotate(proceeds_unproven=True, **TRY)
    unproven = (await replica.rotation()).phase.value

    replica.upstream.answer = ProbeReply(401, "")
    await replica.rotate("another-secret-0123456789", proceeds_unproven=True, **TRY)

    assert (unproven, (await replica.rotation()).phase.value) == ("completed", "cancelled")


@pytest.mark.guards("control_plane/resolution.py", "if token.client == PROBE_CLIENT:", "if False:")
async def test_while_it_is_tried_the_new_version_is_the_probes_alone(replica: Replica) -> None:
    seen: dict[str, Any] = {}

    async def meanwhile() -> None:
        seen["others"] = await in_use(replica)
        seen["probe"] = await what_the_proxy_learns(replica, replica.upstream.calls[0])

    replica.upstream.before = meanwhile

    await replica.rotate(**TRY, overlap_seconds=60.0)

    caller, policy, resolved = seen["probe"]
    assert set(seen["others"].values()) == {OLD}
    assert isinstance(resolved, ResolvedPlaceholder)
    assert (resolved.secret, resolved.binding.version) == (NEW, 2)
    assert isinstance(policy, Policy)
    [scope] = policy.routes[0].scopes
    assert (policy.allow, scope, resolved.binding.scopes) == ((), PROBE.scope, (PROBE.scope,))
    assert caller.client == PROBE_CLIENT
    assert (await replica.rotation()).phase.value == "overlap"


async def test_a_probes_placeholder_is_worth_nothing_once_it_is_over(replica: Replica) -> None:
    await replica.rotate(**TRY)
    call = replica.upstream.calls[0]

    caller, policy, resolved = await what_the_proxy_learns(replica, call)

    assert isinstance(policy, Refused)
    assert isinstance(resolved, Refused)
    assert resolved.code is RefusalCode.REVOKED_PLACEHOLDER
    assert caller.tenant == ACME


@pytest.mark.guards("control_plane/resolution.py", "rotation.probe_sha256 == facts.token.sha256", "True")
async def test_a_placeholder_of_an_earlier_probe_does_not_stand_for_a_later_version(replica: Replica) -> None:
    await replica.rotate(**TRY)
    earlier = replica.upstream.calls[0]
    seen: list[Any] = []

    async def meanwhile() -> None:
        placeholder = fingerprint(earlier.headers["authorization"].removeprefix("Bearer "))
        who = await answer(replica, AskCaller(fingerprint(earlier.proxy_credential)))
        seen.append(await answer(replica, AskPlaceholder(placeholder, who.caller, DESTINATION.endpoint)))

    replica.upstream.before = meanwhile

    await replica.rotate("another-secret-0123456789", **TRY)

    assert [each.code for each in seen] == [RefusalCode.REVOKED_PLACEHOLDER]


async def test_nobody_else_is_taken_for_a_probe(replica: Replica) -> None:
    credential = await replica.credential()
    invented = Caller(PROBE_CLIENT, ACME, SubjectId(f"{credential.id}.try"), None)

    policy = await answer(replica, AskPolicy(invented))

    assert isinstance(policy, Refused)


@BOTH
async def test_a_replica_that_died_while_it_tried_is_stood_in_for(replica: Replica) -> None:
    async def dies() -> None:
        raise SystemExit

    replica.upstream.before = dies
    with pytest.raises(SystemExit):
        await replica.rotate(**TRY)
    replica.upstream.before, other = None, replica.another()

    await other.rotations.tick()
    too_early = (await replica.rotation()).phase.value
    replica.clock.now += LEASE_SECONDS
    await asyncio.gather(other.rotations.tick(), replica.another().rotations.tick())

    assert too_early == "probing"
    assert (await replica.rotation()).phase.value == "completed"
    assert len(replica.upstream.calls) == 2, "one of them tried again"


async def test_an_answer_that_comes_after_the_rotation_was_cancelled_changes_nothing(replica: Replica) -> None:
    async def cancels() -> None:
        await replica.rotations.cancel(ACME, NAME, by=OPERATOR)

    replica.upstream.before = cancels

    await replica.rotate(**TRY)

    assert (await replica.rotation()).phase.value == "cancelled"
    assert set((await in_use(replica)).values()) == {OLD}


async def test_a_probe_that_is_declared_with_a_rotation_stays_and_the_old_version_still_opens(replica: Replica) -> None:
    replica.upstream.answer = ProbeReply(401, "")
    await replica.rotate(**TRY)

    replica.upstream.answer = ProbeReply(200, "")
    await replica.rotate(probes=True)

    assert (await replica.credential()).settings["probe"] == {"method": "GET", "path": "/v1/me"}
    assert [call.target for call in replica.upstream.calls] == [f"/{NAME}/v1/me"] * 2
    assert set((await in_use(replica)).values()) == {NEW}


@pytest.mark.parametrize("probe", [None, Probe("GET", "/elsewhere")])
async def test_a_probe_is_declared_and_within_the_first_destination(replica: Replica, probe: Probe | None) -> None:
    narrowed = replace(DESTINATION, path_prefix="/v1")
    await replica.change(destinations=(narrowed,))

    with pytest.raises(RefusedError) as raised:
        await replica.rotate(probes=True, probe=probe)

    assert raised.value.refusal.code is RefusalCode.INVALID_FIELD
    assert "probe" in raised.value.refusal.detail
    assert replica.upstream.calls == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("DELETE", "/v1/me"), ("GET", "v1/me"), ("GET", "/v1/../me"), ("GET", "/v1?me"), ("GET", "/v1/" + "a" * 2000)],
)
def test_what_is_no_probe(method: str, path: str) -> None:
    with pytest.raises(InvalidProbeError):
        Probe(method, path)
