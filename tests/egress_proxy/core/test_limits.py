"""Limits in the decision: what is left lets a request go, what is used up refuses it, the unknown is asked for."""

from dataclasses import replace

import pytest

from control_plane.contract.placeholder import fingerprint
from control_plane.contract.wire import BoundLimit, Measure
from egress_proxy.core.decision import Forward, Refuse, Resolve
from egress_proxy.core.quota import Standing
from egress_proxy.core.view import AskQuota, Resolved
from tests.egress_proxy.core.world import ALICE, World, ask, code, head_of, tunnel_to

DECISION = "egress_proxy/core/decision.py"
RATE = BoundLimit("lim_r", Measure.REQUESTS, amount=10, window_seconds=60)
SPEND = BoundLimit("lim_t", Measure.TOKENS, amount=5_000, window_seconds=3_600)


def limited(world: World, *limits: BoundLimit) -> Forward | Resolve | Refuse:
    proof = world.proxy_credential(ALICE)
    placeholder = world.credential(ALICE, "https://api.test")
    key = fingerprint(placeholder)
    resolved = world.placeholders[key]
    assert isinstance(resolved, Resolved)
    world.placeholders[key] = replace(resolved, binding=replace(resolved.binding, limits=limits))
    return ask(
        head_of("GET / HTTP/1.1", f"Authorization: Bearer {placeholder}"), tunnel_to("https://api.test", proof), world
    )


def test_a_request_within_its_limits_goes_and_says_what_it_counts_against() -> None:
    world = World(quotas={"lim_r": Standing.LEFT, "lim_t": Standing.LEFT})

    decision = limited(world, RATE, SPEND)

    assert isinstance(decision, Forward)
    assert decision.limits == (RATE, SPEND)


def test_a_limit_of_which_nothing_is_known_is_asked_for() -> None:
    decision = limited(World(quotas={"lim_r": Standing.LEFT}), RATE, SPEND)

    assert decision == Resolve(AskQuota(SPEND))


@pytest.mark.guards(DECISION, "            _check_quota(limit, view)", "            pass")
@pytest.mark.parametrize(("limit", "refused"), [(RATE, "rate_limited"), (SPEND, "spend_limit_exceeded")])
def test_a_limit_that_is_used_up_refuses_until_its_window_ends(limit: BoundLimit, refused: str) -> None:
    decision = limited(World(quotas={limit.id: Standing.USED_UP}), limit)

    assert code(decision) == refused
    assert isinstance(decision, Refuse)
    assert decision.refusal.status == 429
    assert decision.refusal.retry_after_seconds == 13


def test_a_limit_that_cannot_be_asked_for_refuses_as_unavailable() -> None:
    decision = limited(World(quotas={"lim_r": Standing.UNAVAILABLE}), RATE)

    assert code(decision) == "credential_unavailable"
    assert isinstance(decision, Refuse)
    assert (decision.refusal.status, decision.refusal.retry_after_seconds) == (503, 1)
