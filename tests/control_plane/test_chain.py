"""The chain by itself: whatever is done to an export, reading it with the public key shows it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.chain import (
    Anchor,
    AuditKey,
    Finding,
    Head,
    Keys,
    UnreadableLineError,
    Verification,
    anchor_at,
    anchor_line,
    end_line,
    event_line,
    head_from_line,
    head_line,
    next_head,
    removable,
    signed_anchor,
    signed_head,
    trail_line,
    unchained_line,
)

FILE = "control_plane/core/chain.py"
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
KEYS: Keys = {"key-1": AuditKey(KEY.public_key())}
SIZES = (3, 1, 4)

Json = dict[str, Any]
Lines = list[Json]


def sign(message: bytes) -> tuple[str, bytes]:
    return "key-1", KEY.sign(message)


def sign_falsely(message: bytes) -> tuple[str, bytes]:
    return "key-1", OTHER_KEY.sign(message)


def event(position: int) -> Json:
    return {"event_id": f"ev_{position}", "at": position + 0.25, "action": "swap", "extra": {"n": str(position)}}


def heads_of(sizes: tuple[int, ...] = SIZES, tenant: str | None = "acme") -> list[Head]:
    heads: list[Head] = []
    for size in sizes:
        first = heads[-1].last + 1 if heads else 1
        events = [event(position) for position in range(first, first + size)]
        head = next_head(heads[-1] if heads else None, tenant=tenant, events=events, at=float(first))
        heads.append(signed_head(head, sign))
    return heads


def batch(head: Head) -> Lines:
    return [event_line(position, event(position)) for position in range(head.first, head.last + 1)] + [head_line(head)]


def export_of(heads: list[Head], *, tenant: str | None = "acme", before: Lines | None = None, after: int = 0) -> Lines:
    lines = [trail_line(tenant, after=after), *(before or [])]
    for head in heads:
        lines += batch(head)
    return [*lines, unchained_line(event(99)), end_line(heads[-1].last if heads else 0, unchained=1)]


def found_in(lines: Lines, **options: Any) -> Finding:
    verification = Verification(options.pop("keys", KEYS), **options)
    for line in json.loads(json.dumps(lines)):
        verification.read(line)
    (finding,) = verification.findings()
    return finding


def test_a_trail_as_it_was_written_is_whole() -> None:
    finding = found_in(export_of(heads_of()))

    assert finding.is_whole
    assert (finding.count, finding.first, finding.last, finding.number, finding.unchained) == (8, 1, 8, 3, 1)
    assert finding.head == heads_of()[-1].hash


def altered(lines: Lines) -> None:
    lines[2]["event"]["action"] = "forward"


def deleted(lines: Lines) -> None:
    lines[2]["event"] = None


def deleted_with_its_line(lines: Lines) -> None:
    del lines[2]


def reordered(lines: Lines) -> None:
    lines[1]["event"], lines[2]["event"] = lines[2]["event"], lines[1]["event"]


def reordered_with_their_batches(lines: Lines) -> None:
    lines[1:5], lines[5:7] = lines[5:7], lines[1:5]


def added(lines: Lines) -> None:
    lines.insert(4, event_line(4, event(4)))


def batch_taken_out(lines: Lines) -> None:
    del lines[5:7]


def beginning_taken_out(lines: Lines) -> None:
    del lines[1:5]


def end_of_the_export_taken_out(lines: Lines) -> None:
    del lines[-1]


def unchained_taken_out(lines: Lines) -> None:
    del lines[-2]


def signed_with_another_key(lines: Lines) -> None:
    lines[4] = head_line(signed_head(head_from_line(lines[4]), sign_falsely))


def column_edited(lines: Lines) -> None:
    lines[1]["differs"] = ["action"]


def head_of_another_tenant(lines: Lines) -> None:
    lines[4] = head_line(heads_of(tenant="evil")[0])


def unknown_line(lines: Lines) -> None:
    lines.insert(3, {"kind": "comment"})


def event_of_no_batch(lines: Lines) -> None:
    lines.insert(-2, event_line(9, event(9)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (altered, "event 2 was altered"),
        (deleted, "event 2 was deleted"),
        (deleted_with_its_line, "position 2 is not where it belongs"),
        (reordered, "event 1 is in another's place: events were reordered"),
        (reordered_with_their_batches, "batches 1 to 1 are missing"),
        (added, "events after 3 were added"),
        (batch_taken_out, "batches 2 to 2 are missing"),
        (beginning_taken_out, "batches 1 to 1 are missing"),
        (end_of_the_export_taken_out, "the export was cut off"),
        (unchained_taken_out, "events at the end, which are in no batch yet, are missing"),
        (signed_with_another_key, "batch 1 is not signed by a known key"),
        (column_edited, "its column action says something else"),
        (head_of_another_tenant, "batch 1 is of another chain"),
        (unknown_line, "a line is of no known kind"),
        (event_of_no_batch, "events after position 8 are in no batch"),
    ],
)
@pytest.mark.guards(FILE, "            if signed == here:", "            if True:")
def test_what_was_done_to_a_trail_is_found_and_named(change: Callable[[Lines], None], problem: str) -> None:
    lines = export_of(heads_of())

    change(lines)

    problems = found_in(lines).problems
    assert any(problem in each for each in problems), problems


@given(data=st.data())
@pytest.mark.guards(FILE, "key.public.verify(bytes.fromhex(signature), _SIGNED + statement)", "pass")
def test_no_single_change_goes_unseen(data: st.DataObject) -> None:
    lines = json.loads(json.dumps(export_of(heads_of())))
    at = data.draw(st.integers(1, len(lines) - 3))  # what is in no batch is proven by nothing yet
    name = data.draw(st.sampled_from(sorted(lines[at].keys() - {"hash", "last"})))  # these two are for people
    before = lines[at][name]

    lines[at][name] = _changed(before, data)

    assert not found_in(lines).is_whole


def _changed(value: Any, data: st.DataObject) -> Any:
    match value:
        case bool() | None:
            return 1
        case int() | float():
            return value + data.draw(st.sampled_from([1, -1, 0.5]))
        case str():
            return value[:-1] + ("0" if value[-1:] != "0" else "1")
        case list():
            return value[:-1] if data.draw(st.booleans()) else [*value, *value[:1]]
        case dict():
            name = data.draw(st.sampled_from(sorted(value)))
            return {**value, name: _changed(value[name], data)}
    raise AssertionError(value)


@pytest.mark.guards(FILE, "        for number in sorted(self._unmet):", "        for number in ():")
def test_a_tail_that_was_cut_off_is_found_by_a_head_from_earlier() -> None:
    heads = heads_of()

    finding = found_in(export_of(heads[:2]), known_heads=[heads[2]])

    assert finding.problems == [
        "the end was cut off: batch 3, of which there is a signed head from earlier, is no longer there"
    ]


@pytest.mark.guards(FILE, "if known.hash == found:", "if True:")
def test_a_chain_that_was_written_anew_is_found_by_a_head_from_earlier() -> None:
    earlier, anew = heads_of(), heads_of((3, 1, 2, 2))

    finding = found_in(export_of(anew), known_heads=[earlier[2]])

    assert finding.problems == [
        "batch 3 is not the one that was exported earlier: the chain was written anew",
    ]


def test_a_chain_that_is_gone_is_found_by_a_head_from_earlier() -> None:
    verification = Verification(KEYS, known_heads=[heads_of()[0]])

    (finding,) = verification.findings()

    assert not finding.is_whole


def test_a_head_from_earlier_that_nobody_signed_is_no_proof() -> None:
    heads = heads_of()

    finding = found_in(export_of(heads), known_heads=[signed_head(heads[1], sign_falsely)])

    assert finding.problems == ["the head 2 from earlier is not signed by a known key"]


def test_an_event_that_was_gone_before_it_was_chained_is_named() -> None:
    head = signed_head(next_head(None, tenant="acme", events=[event(1), None], at=1.0), sign)
    lines = [trail_line("acme", after=0), event_line(1, event(1)), event_line(2, None), head_line(head)]

    finding = found_in([*lines, end_line(2, unchained=0)])

    assert finding.problems == ["event 2 was deleted before it was chained"]


def test_what_proxies_lost_is_counted_and_makes_a_trail_not_whole() -> None:
    gap = {"event_id": "g", "action": "gap", "extra": {"dropped": "7"}}
    head = signed_head(next_head(None, tenant="acme", events=[gap], at=1.0), sign)
    lines = [trail_line("acme", after=0), event_line(1, gap), head_line(head), end_line(1, unchained=0)]

    finding = found_in(lines)

    assert (finding.lost, finding.problems, finding.is_whole) == (7, [], False)


# --- retention and resumption ----------------------------------------------------------------------------------------


def anchored(heads: list[Head], through: int) -> Anchor:
    return signed_anchor(anchor_at(heads[through - 1], at=50.0), sign)


def test_what_is_left_after_retention_verifies_from_its_anchor() -> None:
    heads = heads_of()

    finding = found_in(export_of(heads[2:], before=[anchor_line(anchored(heads, 2))]))

    assert finding.is_whole
    assert (finding.removed, finding.first, finding.count) == (4, 5, 4)


@pytest.mark.guards(
    FILE, "if not is_signed_anchor(anchor, self._keys) or anchor.tenant != self.finding.tenant:", "if False:"
)
def test_an_anchor_that_nobody_signed_stands_for_nothing() -> None:
    heads = heads_of()
    forged = signed_anchor(anchor_at(heads[1], at=50.0), sign_falsely)

    finding = found_in(export_of(heads[2:], before=[anchor_line(forged)]))

    assert "the anchor, which stands for removed events, is not signed by a known key" in finding.problems


def test_another_chains_anchor_stands_for_nothing() -> None:
    heads = heads_of()
    foreign = anchored(heads_of(tenant="evil"), 2)

    assert not found_in(export_of(heads[2:], before=[anchor_line(foreign)])).is_whole


def test_a_head_from_earlier_that_retention_removed_is_no_problem_and_the_anchors_own_is_compared() -> None:
    heads, other = heads_of(), heads_of((4,))
    lines = export_of(heads[2:], before=[anchor_line(anchored(heads, 2))])

    assert found_in(lines, known_heads=[heads[0], heads[1], heads[2]]).is_whole
    assert not found_in(lines, known_heads=[signed_head(_numbered(other[0], 2), sign)]).is_whole


def _numbered(head: Head, number: int) -> Head:
    return Head(head.tenant, number, head.first, head.leaves, head.previous, head.at)


@pytest.mark.guards(FILE, "        if head.number != number or not is_signed(", "        if False and not is_signed(")
def test_retention_removes_only_what_is_a_chains_own_beginning() -> None:
    heads = heads_of()
    made_old = [heads[0], Head(*_fields(heads[1], at=-1.0)), heads[2]]

    assert removable(heads, None, KEYS) == heads
    assert removable(heads[1:], anchored(heads, 1), KEYS) == heads[1:]
    assert removable(heads[1:], None, KEYS) == []
    assert removable(made_old, None, KEYS) == heads[:1]


def _fields(head: Head, *, at: float) -> tuple[Any, ...]:
    return head.tenant, head.number, head.first, head.leaves, head.previous, at, head.key_id, head.signature


# --- a key that is out of use, in somebody's hands --------------------------------------------------------------------

NEW_KEY = Ed25519PrivateKey.from_private_bytes(b"n" * 32)
BOTH_KEYS: Keys = {"key-1": AuditKey(KEY.public_key(), until=50.0), "key-2": AuditKey(NEW_KEY.public_key(), since=50.0)}


def sign_newly(message: bytes) -> tuple[str, bytes]:
    return "key-2", NEW_KEY.sign(message)


def handed_over(heads: list[Head]) -> Head:
    return signed_head(next_head(heads[-1], tenant="acme", events=[], at=50.0), sign_newly)


def test_what_the_old_key_signed_is_proven_by_what_the_new_one_signed_after_it() -> None:
    heads = heads_of()

    finding = found_in(export_of([*heads, handed_over(heads)]), keys=BOTH_KEYS)

    assert finding.is_whole
    assert (finding.count, finding.last, finding.number, finding.key_ids) == (8, 8, 4, {"key-1", "key-2"})


@pytest.mark.guards(FILE, "        if self._unproven is not None:", "        if False:")
@pytest.mark.parametrize("kept", [0, 2, 3])
def test_a_past_that_was_forged_with_the_old_key_is_not_believed_whatever_time_it_says(kept: int) -> None:
    """What the new key signed cannot be made to follow it, so it has to be left out."""
    heads = heads_of()[:kept]
    first = heads[-1].last + 1 if heads else 1
    forged = next_head(heads[-1] if heads else None, tenant="acme", events=[event(first)], at=float(first))
    forged_chain = [*heads, signed_head(forged, sign)]

    alone = found_in(export_of(forged_chain), keys=BOTH_KEYS)
    before_the_new = found_in(export_of([*forged_chain, handed_over(heads_of())]), keys=BOTH_KEYS)

    assert f"batches 1 to {kept + 1} prove nothing" in alone.problems[0]
    assert before_the_new.problems


@pytest.mark.guards(FILE, "if self._keys[head.key_id].since < self._newest_since:", "if False:")
def test_the_old_key_signs_nothing_after_the_new_one() -> None:
    heads = heads_of()
    heads.append(handed_over(heads))
    forged = signed_head(next_head(heads[-1], tenant="acme", events=[event(9)], at=51.0), sign)
    after_it = signed_head(next_head(forged, tenant="acme", events=[event(10)], at=52.0), sign_newly)

    finding = found_in(export_of([*heads, forged, after_it]), keys=BOTH_KEYS)

    assert finding.problems[0] == "batch 5 is signed by a key that was out of use: a newer one had signed before it"


@pytest.mark.guards(FILE, "        if self._keys[anchor.key_id].until is not None:", "        if False:")
def test_the_old_key_does_not_make_events_forgotten() -> None:
    heads = heads_of()
    heads.append(handed_over(heads))
    forged = anchored(heads, 2)
    truly = signed_anchor(forged, sign_newly)

    assert found_in(export_of(heads[2:], before=[anchor_line(truly)]), keys=BOTH_KEYS).is_whole
    problems = found_in(export_of(heads[2:], before=[anchor_line(forged)]), keys=BOTH_KEYS).problems
    assert problems[0] == "the anchor, which stands for removed events, is signed by a key that is out of use"


def test_an_export_from_before_the_change_is_proven_by_its_continuation_or_by_a_head_that_was_kept() -> None:
    heads = heads_of()
    before = export_of(heads)
    rest = export_of([handed_over(heads)], before=[head_line(heads[-1], kind="resume")], after=8)

    assert not found_in(before, keys=BOTH_KEYS).is_whole
    assert not found_in(before, keys=BOTH_KEYS, known_heads=[heads[1]]).is_whole
    assert found_in(before, keys=BOTH_KEYS, known_heads=[heads[-1]]).is_whole
    assert found_in([*before, *rest], keys=BOTH_KEYS).is_whole
    assert found_in(before).is_whole  # by the keys that were published then


def test_an_export_that_goes_on_from_a_head_of_the_old_key_needs_the_new_ones_too() -> None:
    heads = heads_of()
    resumed = [head_line(heads[1], kind="resume")]

    alone = found_in(export_of(heads[2:], before=resumed, after=4), keys=BOTH_KEYS)
    handed = found_in(export_of([heads[2], handed_over(heads)], before=resumed, after=4), keys=BOTH_KEYS)

    assert "batches 2 to 3 prove nothing" in alone.problems[0]
    assert handed.is_whole


def test_an_export_is_resumed_behind_a_position_and_both_parts_verify_together_and_alone() -> None:
    heads = heads_of()
    first = export_of(heads[:2])
    rest = export_of(heads[2:], before=[head_line(heads[1], kind="resume")], after=4)

    together, alone = found_in([*first, *rest]), found_in(rest)

    assert together.is_whole
    assert (together.count, together.earlier, together.unchained) == (8, 0, 1)
    assert alone.is_whole
    assert (alone.first, alone.count, alone.earlier) == (5, 4, 4)


def test_a_part_that_does_not_go_on_from_the_one_before_is_found() -> None:
    heads = heads_of()
    rest = export_of(heads[2:], before=[head_line(heads[1], kind="resume")], after=4)

    finding = found_in([*export_of(heads[:1]), *rest])

    assert "the export goes on from batch 2, and not from where the last one ended" in finding.problems


def test_an_export_from_the_beginning_cannot_begin_later() -> None:
    heads = heads_of()

    finding = found_in(export_of(heads[2:], before=[head_line(heads[1], kind="resume")]))

    assert "the export begins later than it says" in finding.problems


@pytest.mark.parametrize("line", [{}, {"kind": "event"}, {"kind": "trail"}, {"kind": "trail", "format": "other/1"}])
def test_what_is_no_export_is_an_error(line: Json) -> None:
    with pytest.raises(UnreadableLineError):
        Verification(KEYS).read(line)


def test_a_clock_that_goes_back_does_not_take_the_chain_with_it() -> None:
    first = signed_head(next_head(None, tenant="acme", events=[event(1)], at=100.0), sign)

    assert next_head(first, tenant="acme", events=[event(2)], at=90.0).at == 100.0
