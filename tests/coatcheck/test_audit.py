"""`audit verify` finds holes, and says what it cannot find."""

from typing import Any

from coatcheck.audit import examine, where


def event(sequence: int, **fields: Any) -> dict[str, Any]:
    return {"sequence": sequence, "event_id": f"e{sequence}", "action": "forward", **fields}


def test_a_trail_without_holes_is_whole() -> None:
    finding = examine(iter([event(1), event(2), event(3)]))

    assert finding.is_whole
    assert (finding.count, finding.first, finding.last) == (3, 1, 3)


def test_missing_events_are_named_by_their_sequence() -> None:
    finding = examine(iter([event(1), event(4)]))

    assert finding.missing == [[2, 3]]
    assert not finding.is_whole


def test_a_trail_whose_beginning_was_cut_off_is_not_whole() -> None:
    assert examine(iter([event(5), event(6)])).missing == [[1, 4]]


def test_an_event_that_stands_twice_is_named() -> None:
    finding = examine(iter([event(1), event(2, event_id="e1")]))

    assert finding.repeated == ["e1"]


def test_events_that_a_proxy_lost_are_counted() -> None:
    finding = examine(iter([event(1), event(2, action="gap", extra={"dropped": "7"})]))

    assert finding.lost == 7
    assert not finding.is_whole


def test_what_is_not_covered_is_said_even_when_all_is_well() -> None:
    sentences = list(examine(iter([event(1)])).sentences())

    assert any("not signed" in sentence for sentence in sentences)


def test_a_request_is_written_as_people_write_it() -> None:
    shown = where({"method": "GET", "scheme": "https", "host": "api.example.com", "port": 443, "path": "/v1"})

    assert shown == "GET https://api.example.com/v1"
