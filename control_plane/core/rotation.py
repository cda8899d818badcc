"""Rotation as a protocol: which states a version has, which steps a rotation takes, and when it goes back.

    version     pending -> active -> retiring -> retired      and revoked, from each state that is not over
    rotation    probing -> canary -> overlap -> completed     each step may be left out
                probing, canary -> cancelled                  the new version is thrown away
                canary, overlap -> rolled_back                the old version is the one in use again

Rule: legality is the tables below. Whatever happens in whatever order, at most one version is active, a version that
is over has no envelope, and none that was revoked ever comes back. Pure: time and counts are arguments.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from control_plane.contract.caller import ClientId, SubjectId
from control_plane.core.records import CredentialVersion, ProbeResult, Rotation, RotationPhase, VersionState

S = VersionState
P = RotationPhase

LEGAL: Final[Mapping[VersionState, frozenset[VersionState]]] = MappingProxyType(
    {
        S.PENDING: frozenset({S.ACTIVE, S.RETIRED, S.REVOKED}),
        S.ACTIVE: frozenset({S.RETIRING, S.RETIRED, S.REVOKED}),
        S.RETIRING: frozenset({S.ACTIVE, S.RETIRED, S.REVOKED}),
        S.RETIRED: frozenset(),
        S.REVOKED: frozenset(),
    }
)
"""Where a version may go from where it is. `retiring -> active` is a roll-back; what is over stays over."""

OVER: Final = frozenset(state for state, next_states in LEGAL.items() if not next_states)
"""Their envelopes are destroyed."""

STATES_IN: Final[Mapping[RotationPhase, tuple[VersionState, VersionState]]] = MappingProxyType(
    {
        P.PROBING: (S.ACTIVE, S.PENDING),
        P.CANARY: (S.ACTIVE, S.PENDING),
        P.OVERLAP: (S.RETIRING, S.ACTIVE),
        P.COMPLETED: (S.RETIRED, S.ACTIVE),
        P.ROLLED_BACK: (S.ACTIVE, S.RETIRED),
        P.CANCELLED: (S.ACTIVE, S.RETIRED),
    }
)
"""What the old and the new version are in each step. (Where a rotation was overtaken, what overtook it says.)"""

MIN_FAILING_SUBJECTS: Final = 3
"""One subject's requests, or two's, never turn a rotation back: whoever makes them could mean to."""
ASSUMED_FAILURE_RATE: Final = 0.2
"""Taken for the old version's where nothing was seen of it in the window: some requests are refused with any key."""
WINDOW_SECONDS: Final = 300.0
BUCKET_SECONDS: Final = 30.0

AUTHENTICATION_ERROR: Final = 401
NEVER_AN_AUTHENTICATION_ERROR: Final = 403
"""A workload brings a 403 about by asking for what its key may not have."""

PROBE_CLIENT: Final = ClientId("coatcheck:probe")
"""Who the probe's request comes from. No client can have this id: ':' is not in the grammar."""


class IllegalTransitionError(Exception):
    """A fault of ours: a version was to go where it cannot go from where it is."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The states of a credential's versions, by number."""

    states: Mapping[int, VersionState]

    @classmethod
    def of(cls, versions: Iterable[CredentialVersion]) -> "Lineage":
        return cls({version.version: version.state for version in versions})

    @property
    def active(self) -> int | None:
        return next((number for number, state in self.states.items() if state is S.ACTIVE), None)

    @property
    def next_number(self) -> int:
        return max(self.states, default=0) + 1

    def with_pending(self) -> "Lineage":
        """And a new one, which nobody uses yet."""
        return Lineage({**self.states, self.next_number: S.PENDING})

    def replaced(self, *, by_state: VersionState) -> "Lineage":
        """A new version at once, and everything before it is over. Also where nothing was in use."""
        return Lineage({**self._ended(by_state), self.next_number: S.ACTIVE})

    def without_any(self) -> "Lineage":
        """Every version is compromised, and there is no successor."""
        return Lineage(self._ended(S.REVOKED))

    def taken_over_by(self, successor: int) -> "Lineage":
        """What was in use is compromised; a version that waits takes its place at once."""
        states = {
            number: state if number == successor or state in OVER else S.REVOKED
            for number, state in self.states.items()
        }
        return Lineage(states)._moved(successor, S.ACTIVE)

    def entered(self, phase: RotationPhase, *, old: int | None, new: int) -> "Lineage":
        """As it is in a rotation's step. Raises `IllegalTransitionError`."""
        old_state, new_state = STATES_IN[phase]
        lineage = self._moved(new, new_state)
        return lineage if old is None else lineage._moved(old, old_state)

    def _ended(self, by_state: VersionState) -> dict[int, VersionState]:
        return {number: state if state in OVER else by_state for number, state in self.states.items()}

    def _moved(self, number: int, to: VersionState) -> "Lineage":
        state = self.states[number]
        if to is not state and to not in LEGAL[state]:
            raise IllegalTransitionError(f"{state} -> {to}")
        return Lineage({**self.states, number: to})


# --- which version a request uses ------------------------------------------------------------------------------------


def version_for(subject: SubjectId, *, current: int, rotation: Rotation | None) -> int:
    """The number of the version that this subject's requests use."""
    if rotation is None or rotation.phase is not P.CANARY:
        return current
    return rotation.new_version if is_canary(subject, rotation) else current


def is_canary(subject: SubjectId, rotation: Rotation) -> bool:
    """The same answer on every replica, for as long as the rotation lasts; another choice of subjects in the next."""
    digest = hmac.digest(bytes.fromhex(rotation.canary_key), subject.encode("utf-8", "surrogatepass"), hashlib.sha256)
    return int.from_bytes(digest[:8]) * 100 < rotation.canary_percent << 64


# --- from step to step -----------------------------------------------------------------------------------------------


def step_after(phase: RotationPhase, rotation: Rotation) -> RotationPhase:
    """What follows a step that went well."""
    if phase is P.PROBING and rotation.canary_percent and rotation.old_version is not None:
        return P.CANARY
    if phase in (P.PROBING, P.CANARY) and rotation.overlap_seconds and rotation.old_version is not None:
        return P.OVERLAP
    return P.COMPLETED


def first_step(rotation: Rotation) -> RotationPhase:
    return P.PROBING if rotation.probes else step_after(P.PROBING, rotation)


def seconds_of(phase: RotationPhase, rotation: Rotation) -> float | None:
    """How long a step lasts. None: until something happens."""
    match phase:
        case P.CANARY:
            return rotation.canary_seconds
        case P.OVERLAP:
            return rotation.overlap_seconds
        case _:
            return None


class Verdict(StrEnum):
    WAIT = "wait"
    GO_ON = "go_on"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Replies:
    """How upstreams answered one version in the window."""

    count: int = 0
    failures: int = 0
    """With the provider's authentication error."""
    failing_subjects: int = 0

    @property
    def failure_rate(self) -> float | None:
        return self.failures / self.count if self.count else None


def judge(*, old: Replies, new: Replies, ends_at: float | None, now: float) -> Judgement:
    """What to do with a rotation whose new version is in use, by the replies of one window."""
    expected = ASSUMED_FAILURE_RATE if old.failure_rate is None else old.failure_rate
    if new.failing_subjects >= MIN_FAILING_SUBJECTS and (new.failure_rate or 0.0) > expected:
        return Judgement(
            Verdict.ROLL_BACK,
            f"{new.failures} of {new.count} replies to the new version were authentication errors, "
            f"of {new.failing_subjects} subjects ({old.failures} of {old.count} to the old one)",
        )
    if ends_at is not None and now >= ends_at:
        return Judgement(Verdict.GO_ON)
    return Judgement(Verdict.WAIT)


def judge_probe(rotation: Rotation, result: ProbeResult) -> Judgement:
    """What to do with a version that was tried. Unknown is no yes, unless the operator said so beforehand."""
    match result:
        case ProbeResult.ACCEPTED:
            return Judgement(Verdict.GO_ON)
        case ProbeResult.REJECTED:
            return Judgement(Verdict.ROLL_BACK, "the upstream rejected the new secret")
        case ProbeResult.UNKNOWN if rotation.proceeds_unproven:
            return Judgement(Verdict.GO_ON)
        case ProbeResult.UNKNOWN:
            return Judgement(Verdict.ROLL_BACK, "whether the upstream accepts the new secret could not be found out")


def probe_result(status: int, *, rejected: frozenset[int]) -> ProbeResult:
    """What an upstream's answer to a probe says about the secret."""
    if 200 <= status < 400:
        return ProbeResult.ACCEPTED
    return ProbeResult.REJECTED if status in rejected else ProbeResult.UNKNOWN


def bucket_of(at: float) -> int:
    """Replies are counted in spans of `BUCKET_SECONDS`."""
    return int(at // BUCKET_SECONDS)


def first_bucket_of_window(now: float) -> int:
    return bucket_of(now - WINDOW_SECONDS)
