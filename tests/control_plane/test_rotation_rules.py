"""The rules of a rotation, without a database: states, steps, who is a canary, when it goes back."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from control_plane.contract.caller import CredentialId, SubjectId, TenantId
from control_plane.core.records import ProbeResult, Rotation, RotationPhase, VersionState
from control_plane.core.rotation import (
    LEGAL,
    OVER,
    IllegalTransitionError,
    Lineage,
    Replies,
    Verdict,
    first_step,
    is_canary,
    judge,
    judge_probe,
    probe_result,
    step_after,
    version_for,
)

P, S = RotationPhase, VersionState
FILE = "control_plane/core/rotation.py"


def rotation(**fields: Any) -> Rotation:
    base = Rotation(
        credential_id=CredentialId("cred_1"),
        tenant=TenantId("acme"),
        id="rot_1",
        phase=P.CANARY,
        old_version=1,
        new_version=2,
        probes=False,
        proceeds_unproven=False,
        canary_percent=10,
        canary_seconds=60.0,
        canary_key="00" * 32,
        overlap_seconds=60.0,
        started_at=0.0,
        since=0.0,
        ends_at=None,
        started_by="administrator",
    )
    return replace(base, **fields)


SUBJECTS = [SubjectId(f"subject-{number}") for number in range(2000)]


# --- who is a canary --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [0, 1, 10, 50, 99])
def test_the_share_of_canaries_is_what_was_asked_for(percent: int) -> None:
    asked = rotation(canary_percent=percent)

    share = sum(is_canary(subject, asked) for subject in SUBJECTS) / len(SUBJECTS)

    assert share == pytest.approx(percent / 100, abs=0.03)
    assert percent or share == 0


def test_another_rotation_chooses_other_subjects() -> None:
    first, second = rotation(canary_percent=50), rotation(canary_percent=50, canary_key="11" * 32)

    both = [is_canary(subject, first) == is_canary(subject, second) for subject in SUBJECTS]

    assert 0.4 < sum(both) / len(both) < 0.6


def test_more_canaries_are_the_same_and_others() -> None:
    few, many = rotation(canary_percent=10), rotation(canary_percent=60)

    assert all(is_canary(subject, many) for subject in SUBJECTS if is_canary(subject, few))


@pytest.mark.guards(FILE, "if rotation is None or rotation.phase is not P.CANARY:", "if rotation is None:")
@pytest.mark.parametrize("phase", [phase for phase in P if phase is not P.CANARY])
def test_outside_a_canary_everybody_uses_the_current_version(phase: RotationPhase) -> None:
    under_way = rotation(phase=phase, canary_percent=99)

    assert {version_for(subject, current=1, rotation=under_way) for subject in SUBJECTS} == {1}
    assert {version_for(subject, current=1, rotation=None) for subject in SUBJECTS} == {1}


# --- steps ------------------------------------------------------------------------------------------------------------

STEPS = {
    "everything asked for": ({"probes": True}, [P.PROBING, P.CANARY, P.OVERLAP, P.COMPLETED]),
    "no probe": ({}, [P.CANARY, P.OVERLAP, P.COMPLETED]),
    "no canary": ({"canary_percent": 0}, [P.OVERLAP, P.COMPLETED]),
    "no overlap": ({"overlap_seconds": 0.0}, [P.CANARY, P.COMPLETED]),
    "a probe alone": ({"probes": True, "canary_percent": 0, "overlap_seconds": 0.0}, [P.PROBING, P.COMPLETED]),
    "nothing": ({"canary_percent": 0, "overlap_seconds": 0.0}, [P.COMPLETED]),
    "nothing was in use": ({"old_version": None}, [P.COMPLETED]),
}


@pytest.mark.parametrize(("fields", "expected"), STEPS.values(), ids=STEPS)
def test_the_steps_of_a_rotation_where_all_goes_well(fields: dict[str, Any], expected: list[RotationPhase]) -> None:
    planned = rotation(**fields)

    steps = [first_step(planned)]
    while steps[-1] is not P.COMPLETED:
        steps.append(step_after(steps[-1], planned))

    assert steps == expected


# --- going back -------------------------------------------------------------------------------------------------------

GOOD = Replies(count=1000, failures=10, failing_subjects=8)

VERDICTS = {
    "nothing was seen": (GOOD, Replies(), Verdict.WAIT),
    "as good as the old one": (GOOD, Replies(1000, 10, 8), Verdict.WAIT),
    "worse, of two subjects": (GOOD, Replies(1000, 900, 2), Verdict.WAIT),
    "worse, of three subjects": (GOOD, Replies(1000, 11, 3), Verdict.ROLL_BACK),
    "bad, but the old one is no better": (Replies(10, 10, 5), Replies(10, 10, 5), Verdict.WAIT),
    "bad, and the old one is not used": (Replies(), Replies(10, 10, 3), Verdict.ROLL_BACK),
    "what workloads bring about by themselves, and the old one is not used": (
        Replies(),
        Replies(100, 15, 9),
        Verdict.WAIT,
    ),
}


@pytest.mark.guards(FILE, "new.failing_subjects >= MIN_FAILING_SUBJECTS", "new.failing_subjects >= 1")
@pytest.mark.parametrize(("old", "new", "expected"), VERDICTS.values(), ids=VERDICTS)
def test_a_rotation_goes_back_where_its_version_fails_more_and_for_three_subjects(
    old: Replies, new: Replies, expected: Verdict
) -> None:
    assert judge(old=old, new=new, ends_at=100.0, now=50.0).verdict is expected


def test_a_step_ends_at_its_time_and_a_bad_version_goes_back_even_then() -> None:
    assert judge(old=GOOD, new=GOOD, ends_at=100.0, now=100.0).verdict is Verdict.GO_ON
    assert judge(old=GOOD, new=Replies(9, 9, 3), ends_at=100.0, now=100.0).verdict is Verdict.ROLL_BACK


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        *((status, ProbeResult.ACCEPTED) for status in (200, 204, 302, 304)),
        (401, ProbeResult.REJECTED),
        *((status, ProbeResult.UNKNOWN) for status in (100, 400, 403, 404, 407, 429, 500, 503)),
    ],
)
def test_what_an_answer_to_a_probe_says(status: int, expected: ProbeResult) -> None:
    assert probe_result(status, rejected=frozenset({401})) is expected


@pytest.mark.guards(
    FILE, "case ProbeResult.UNKNOWN if rotation.proceeds_unproven:", "case ProbeResult.UNKNOWN if True:"
)
def test_a_version_that_could_not_be_tried_does_not_go_live_unless_that_was_said() -> None:
    assert judge_probe(rotation(), ProbeResult.UNKNOWN).verdict is Verdict.ROLL_BACK
    assert judge_probe(rotation(proceeds_unproven=True), ProbeResult.UNKNOWN).verdict is Verdict.GO_ON
    assert judge_probe(rotation(proceeds_unproven=True), ProbeResult.REJECTED).verdict is Verdict.ROLL_BACK
    assert judge_probe(rotation(), ProbeResult.ACCEPTED).verdict is Verdict.GO_ON


# --- states -----------------------------------------------------------------------------------------------------------


@given(st.sampled_from(S), st.sampled_from(S))
def test_what_is_over_stays_over(state: VersionState, to: VersionState) -> None:
    if state in OVER:
        assert to not in LEGAL[state]
    assert S.PENDING not in LEGAL[state]


class History(RuleBasedStateMachine):
    """Any history of one credential's versions, under the rules that the use cases go by."""

    def __init__(self) -> None:
        super().__init__()
        self.lineage = Lineage({1: S.ACTIVE})
        self.under_way: Rotation | None = None
        self.compromised: set[int] = set()
        self.is_without_successor = False

    @precondition(lambda self: self.under_way is None)
    @rule(probes=st.booleans(), percent=st.sampled_from([0, 10]), overlap=st.sampled_from([0.0, 60.0]))
    def start(self, probes: bool, percent: int, overlap: float) -> None:
        old, pending = self.lineage.active, self.lineage.with_pending()
        new = max(pending.states)
        planned = rotation(
            old_version=old, new_version=new, probes=probes, canary_percent=percent, overlap_seconds=overlap
        )
        self._enter(pending, planned, first_step(planned))

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def go_on(self) -> None:
        assert self.under_way is not None
        self._enter(self.lineage, self.under_way, step_after(self.under_way.phase, self.under_way))

    @precondition(lambda self: self.under_way is not None)
    @rule(phase=st.sampled_from([P.ROLLED_BACK, P.CANCELLED]))
    def go_back(self, phase: RotationPhase) -> None:
        assert self.under_way is not None
        self._enter(self.lineage, self.under_way, phase)

    @rule()
    def replace_compromised(self) -> None:
        self._note_compromised(set(self.lineage.states))
        self.lineage, self.under_way = self.lineage.replaced(by_state=S.REVOKED), None
        self.is_without_successor = False

    @rule()
    def revoke_compromised(self) -> None:
        waiting = self.under_way.new_version if self.under_way is not None else None
        if waiting is not None and self.lineage.states[waiting] is S.PENDING:
            self._note_compromised(set(self.lineage.states) - {waiting})
            self.lineage = self.lineage.taken_over_by(waiting)
            self.is_without_successor = False
        else:
            self._note_compromised(set(self.lineage.states))
            self.lineage = self.lineage.without_any()
            self.is_without_successor = True
        self.under_way = None

    @rule()
    def change_reach(self) -> None:
        self.lineage, self.under_way = self.lineage.replaced(by_state=S.RETIRED), None
        self.is_without_successor = False

    def _note_compromised(self, numbers: set[int]) -> None:
        self.compromised |= {number for number in numbers if self.lineage.states[number] not in OVER}

    def _enter(self, lineage: Lineage, planned: Rotation, phase: RotationPhase) -> None:
        try:
            self.lineage = lineage.entered(phase, old=planned.old_version, new=planned.new_version)
        except IllegalTransitionError:
            raise AssertionError("the use cases never ask for what is not legal") from None
        running = replace(planned, phase=phase)
        self.under_way = running if running.is_running else None
        is_not_live = phase in (P.PROBING, P.CANCELLED, P.ROLLED_BACK)
        self.is_without_successor = planned.old_version is None and is_not_live

    @invariant()
    def exactly_one_is_active_or_none_where_there_is_no_successor(self) -> None:
        active = [number for number, state in self.lineage.states.items() if state is S.ACTIVE]
        assert len(active) == (0 if self.is_without_successor else 1)

    @invariant()
    def nothing_compromised_ever_comes_back(self) -> None:
        assert all(self.lineage.states[number] is S.REVOKED for number in self.compromised)

    @invariant()
    def at_most_one_other_is_kept(self) -> None:
        kept = [number for number, state in self.lineage.states.items() if state not in OVER]
        assert len(kept) <= 2


TestHistory = History.TestCase
