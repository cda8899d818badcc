"""What the decision sees of the cache.

Rule: a view answers at once or says None, which means "ask the control plane and decide again". Freshness (time bounds,
events, outages) is the cache's to judge before it answers; what an answer admits is the decision's.
"""

from dataclasses import dataclass
from typing import Protocol

from control_plane.contract.caller import Caller
from control_plane.contract.destination import Endpoint
from control_plane.contract.secret import Secret
from control_plane.contract.wire import Binding, BoundLimit, CallerFacts, Policy, Refused, WorkloadFacts
from egress_proxy.core.quota import Standing


@dataclass(frozen=True, slots=True)
class Resolved:
    """A placeholder's binding and secret, as the control plane gave them."""

    binding: Binding
    secret: Secret
    asked_at: float
    """Unix seconds; lets an expired entry be asked again once before it is refused."""


@dataclass(frozen=True, slots=True)
class KnownCaller:
    """A proxy credential's caller, as the control plane gave it."""

    facts: CallerFacts
    asked_at: float


@dataclass(frozen=True, slots=True)
class KnownWorkload:
    """The client that a token or a certificate proves, as the control plane gave it."""

    facts: WorkloadFacts
    asked_at: float


@dataclass(frozen=True, slots=True)
class AskQuota:
    """Is there anything left of this limit?"""

    limit: BoundLimit


class CacheView(Protocol):
    """Synchronous look-ups. Keys are SHA-256 fingerprints in hex, never the tokens themselves."""

    @property
    def tag_keys(self) -> tuple[bytes, ...]:
        """The ring, newest first."""
        ...

    @property
    def revision(self) -> int:
        """Changes whenever an answer that was given before may not be given again."""
        ...

    def caller(self, fingerprint: str) -> KnownCaller | Refused | None: ...

    def workload(self, fingerprint: str) -> KnownWorkload | Refused | None: ...

    def policy(self, caller: Caller) -> Policy | Refused | None: ...

    def placeholder(self, fingerprint: str, caller: Caller, endpoint: Endpoint) -> Resolved | Refused | None:
        """A live entry answers for every caller and endpoint (the decision checks both), a refusal only for its own."""
        ...

    def quota(self, limit: BoundLimit) -> Standing:
        """What there is left of a limit here."""
        ...

    def quota_resets_in_seconds(self, limit: BoundLimit) -> float: ...
