"""How long it takes to decide as the cache fills up: the real cache and the real decision, in this process.

Answers live for a minute at most, and a proxy that resolves a hundred thousand placeholders within one is not measured
on the same machine; what could grow with their number is the look-up, and the misses of the processor's caches.
"""

import gc
import random
import time
from typing import Final

from control_plane.contract.caller import Caller, ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.placeholder import GenuineToken, fingerprint
from control_plane.contract.wire import (
    AskCaller,
    AskPlaceholder,
    AskPolicy,
    Event,
    Policy,
    ResolveAnswer,
    ResolvedPlaceholder,
)
from egress_proxy.cache import Cache
from egress_proxy.core.decision import Forward, decide
from egress_proxy.core.http1 import parse_request_head
from egress_proxy.core.view import KnownCaller, Resolved
from tests.egress_proxy.core.world import NOW, SECRET, TAG_KEY, World, head_of, tunnel_to

DECISIONS: Final = 5_000
EPOCH: Final = "bench"


def microseconds_of_a_decision(count: int) -> float:
    """Mean, each for another caller with a placeholder of its own, in no order."""
    world = World()
    cache = Cache(limit=4 * count, monotonic=lambda: 0.0, clock=lambda: NOW)
    cache.set_tag_keys((TAG_KEY,), epoch=EPOCH, as_of=0)
    cache.hear(Event(0, EPOCH, "heartbeat"))
    cases = [_cached(world, cache, number) for number in range(count)]
    sample = random.Random(0).choices(cases, k=DECISIONS)
    gc.collect()
    gc.freeze()  # as the proxy does with what lives long
    connections = [(raw, tunnel_to("https://api.test", credential)) for raw, credential in sample]
    begun = time.perf_counter()
    for raw, connection in connections:
        decision = decide(parse_request_head(raw), connection, cache, NOW)
        assert isinstance(decision, Forward)
        assert decision.swaps
    return (time.perf_counter() - begun) / DECISIONS * 1e6


def _cached(world: World, cache: Cache, number: int) -> tuple[bytes, GenuineToken]:
    """A caller with a credential and a placeholder, all in the cache; a request of it, and its proxy credential."""
    caller = Caller(ClientId("runtime"), TenantId(f"t{number % 100}"), SubjectId(f"s{number}"), SessionId(f"n{number}"))
    credential = world.proxy_credential(caller)
    placeholder = world.credential(caller, "https://api.test")
    mark = fingerprint(placeholder)
    known, resolved, policy = (
        world.callers.pop(credential.fingerprint),
        world.placeholders.pop(mark),
        world.policies.pop(caller),
    )
    assert isinstance(known, KnownCaller)
    assert isinstance(resolved, Resolved)
    assert isinstance(policy, Policy)
    answers = (
        (AskCaller(credential.fingerprint), known.facts),
        (AskPolicy(caller), policy),
        (
            AskPlaceholder(mark, caller, resolved.binding.destinations[0].endpoint),
            ResolvedPlaceholder(resolved.binding, SECRET),
        ),
    )
    for ask, answer in answers:
        assert cache.take(ask, ResolveAnswer(answer, EPOCH, 0))
    return head_of("GET /v1/messages HTTP/1.1", f"Authorization: Bearer {placeholder}"), credential
