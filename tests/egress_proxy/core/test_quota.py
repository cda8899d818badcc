"""Slices of limits: nothing goes that no slice covers, and what is used is counted once, in its own window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.wire import BoundLimit, Measure, QuotaEntry, QuotaGrant
from egress_proxy.core.quota import ASK_AGAIN_SECONDS, FIRST_GUESS, IDLE_SECONDS, Quotas, Standing

FILE = "egress_proxy/core/quota.py"
REQUESTS = BoundLimit("lim_r", Measure.REQUESTS, amount=10, window_seconds=60)
TOKENS = BoundLimit("lim_t", Measure.TOKENS, amount=100_000, window_seconds=60)


def given_slice(
    quotas: Quotas, limit: BoundLimit, granted: int, *, now: float = 0.0, window: int = 1, ends_in: float = 60.0
) -> QuotaEntry:
    """The entry that was told when the slice was asked for."""
    entry = quotas.question(limit)
    quotas.answered(entry, QuotaGrant(limit.id, limit.bucket, granted, window, ends_in), now)
    return entry


def went(quotas: Quotas, limit: BoundLimit, now: float = 0.0) -> bool:
    return quotas.take([limit], now) is not None


def test_a_limit_that_is_not_known_yet_is_asked_for() -> None:
    quotas = Quotas()

    assert quotas.standing(REQUESTS, 0.0) is Standing.UNKNOWN
    assert not went(quotas, REQUESTS)


@pytest.mark.guards(FILE, "if now < found.ends_at and (found.balance > 0 or found.is_free):", "if now < found.ends_at:")
def test_as_many_go_as_were_given_and_no_more() -> None:
    quotas = Quotas()
    given_slice(quotas, REQUESTS, 3)

    gone = [went(quotas, REQUESTS) for _ in range(5)]

    assert gone == [True, True, True, False, False]
    assert quotas.standing(REQUESTS, 0.0) is Standing.UNKNOWN  # there may be more


def test_what_is_used_up_is_not_asked_again_for_a_second() -> None:
    quotas = Quotas()

    given_slice(quotas, REQUESTS, 0)

    assert quotas.standing(REQUESTS, 0.5) is Standing.USED_UP
    assert quotas.standing(REQUESTS, ASK_AGAIN_SECONDS) is Standing.UNKNOWN


@pytest.mark.guards(FILE, "        if now < found.ends_at and (found.balance", "        if (found.balance")
def test_a_slice_is_of_its_window_alone() -> None:
    quotas = Quotas()
    given_slice(quotas, REQUESTS, 3, ends_in=10.0)

    assert went(quotas, REQUESTS, now=9.9)
    assert not went(quotas, REQUESTS, now=10.0)
    assert quotas.standing(REQUESTS, 10.0) is Standing.UNKNOWN
    given_slice(quotas, REQUESTS, 1, now=10.0, window=2)
    assert [went(quotas, REQUESTS, now=10.0) for _ in range(2)] == [True, False]


@pytest.mark.guards(
    FILE, "is not Standing.LEFT for limit in limits):", "is not Standing.LEFT for limit in limits[:1]):"
)
def test_a_request_takes_from_all_its_limits_or_from_none() -> None:
    quotas, other = Quotas(), BoundLimit("lim_o", Measure.REQUESTS, amount=10, window_seconds=60)
    given_slice(quotas, REQUESTS, 2)

    assert quotas.take([REQUESTS, other], 0.0) is None
    assert [went(quotas, REQUESTS) for _ in range(3)] == [True, True, False]


def test_each_bucket_of_a_limit_has_its_own() -> None:
    quotas = Quotas()
    alice = BoundLimit("lim_r", Measure.REQUESTS, amount=10, window_seconds=60, bucket="a")
    given_slice(quotas, alice, 1)

    assert went(quotas, alice)
    assert quotas.standing(REQUESTS, 0.0) is Standing.UNKNOWN


def test_an_outage_is_told_from_a_limit_that_is_used_up_and_what_is_left_may_be_used() -> None:
    quotas = Quotas()
    given_slice(quotas, REQUESTS, 1)

    quotas.failed(quotas.question(REQUESTS), 0.0)

    assert went(quotas, REQUESTS)
    assert quotas.standing(REQUESTS, 0.5) is Standing.UNAVAILABLE
    assert quotas.standing(REQUESTS, ASK_AGAIN_SECONDS) is Standing.UNKNOWN


def test_a_limit_that_is_gone_holds_up_nobody() -> None:
    quotas = Quotas()
    entry = quotas.question(REQUESTS)

    quotas.answered(entry, QuotaGrant(REQUESTS.id, "", 0, 0, 1.0, exists=False), 0.0)

    assert all(went(quotas, REQUESTS, now=0.5) for _ in range(100))
    assert quotas.standing(REQUESTS, 1.0) is Standing.UNKNOWN


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_what_a_request_needed_is_taken_from_the_slice_when_it_is_over() -> None:
    quotas = Quotas()
    given_slice(quotas, TOKENS, 5_000)

    taken = quotas.take([TOKENS], 0.0)
    assert taken is not None
    quotas.settle(taken, 1_500, 1.0)

    (back,) = list(quotas.reports(100.0 - 60.0 + 1, idle_seconds=0.0))
    assert (back.returned, back.used) == (3_500, 0)


@pytest.mark.guards(FILE, "                found.beyond -= found.balance", "                found.beyond = 0")
def test_what_was_needed_beyond_the_slice_is_told_until_it_was_heard() -> None:
    quotas = Quotas()
    given_slice(quotas, TOKENS, 500)
    taken = quotas.take([TOKENS], 0.0)
    assert taken is not None
    quotas.settle(taken, 2_000, 1.0)

    (first,) = list(quotas.reports(1.0))
    quotas.failed(first, 1.0)
    (again,) = list(quotas.reports(2.0))
    quotas.answered(again, QuotaGrant(TOKENS.id, "", 0, 1, 50.0), 2.0)

    assert first == again == QuotaEntry(TOKENS.id, "", used=1_500, window=1)
    assert list(quotas.reports(3.0)) == []
    assert quotas.question(TOKENS).used == 0


def test_requests_at_the_same_time_set_aside_what_one_usually_needs() -> None:
    quotas = Quotas()
    given_slice(quotas, TOKENS, 2 * FIRST_GUESS + 1)

    gone = [went(quotas, TOKENS) for _ in range(4)]

    assert gone == [True, True, True, False]  # the third began with one token left


@pytest.mark.guards(FILE, "if window != found.window or now >= found.ends_at:", "if False:")
def test_what_ends_in_another_window_counts_there() -> None:
    quotas = Quotas()
    given_slice(quotas, TOKENS, 5_000, ends_in=10.0)
    taken = quotas.take([TOKENS], 0.0)
    assert taken is not None
    given_slice(quotas, TOKENS, 5_000, now=10.0, window=2)

    quotas.settle(taken, 3_000, 12.0)

    assert quotas.question(TOKENS).used == 3_000


def test_a_request_that_did_not_go_takes_nothing() -> None:
    quotas = Quotas()
    given_slice(quotas, REQUESTS, 1)
    taken = quotas.take([REQUESTS], 0.0)
    assert taken is not None

    quotas.put_back(taken)

    assert went(quotas, REQUESTS)


# --- giving back -----------------------------------------------------------------------------------------------------


def test_an_idle_slice_is_given_back_and_not_used_any_more() -> None:
    quotas = Quotas()
    given_slice(quotas, REQUESTS, 5)
    went(quotas, REQUESTS, now=1.0)

    busy = list(quotas.reports(1.0 + IDLE_SECONDS / 2))
    idle = list(quotas.reports(1.0 + IDLE_SECONDS))

    assert busy == []
    assert idle == [QuotaEntry(REQUESTS.id, "", returned=4, window=1)]
    assert not went(quotas, REQUESTS, now=4.0)
    assert list(quotas.reports(10.0)) == []


def test_what_was_to_be_given_back_in_an_outage_stays_counted() -> None:
    quotas = Quotas()
    given_slice(quotas, REQUESTS, 5)
    (entry,) = list(quotas.reports(10.0))

    quotas.failed(entry, 10.0)

    assert list(quotas.reports(20.0)) == []
    assert not went(quotas, REQUESTS, now=20.0)


def test_slices_of_windows_that_are_over_are_forgotten() -> None:
    quotas = Quotas()
    given_slice(quotas, REQUESTS, 5, ends_in=10.0)

    assert list(quotas.reports(10.0)) == []
    assert quotas == Quotas()


@given(st.lists(st.tuples(st.integers(0, 3_000), st.floats(0.01, 3.0)), min_size=1, max_size=40))
def test_what_is_told_used_and_given_back_is_what_was_given_and_needed(steps: list[tuple[int, float]]) -> None:
    """Within one window: granted + beyond = needed + returned, whatever the history."""
    quotas, granted, needed, told, returned, now = Quotas(), 0, 0, 0, 0, 0.0
    for tokens, seconds in steps:
        now += seconds
        if quotas.standing(TOKENS, now) is not Standing.LEFT:
            entry = quotas.question(TOKENS)
            told += entry.used
            granted += 700
            quotas.answered(entry, QuotaGrant(TOKENS.id, "", 700, 1, 10_000 - now), now)
        taken = quotas.take([TOKENS], now)
        if taken is not None:
            needed += tokens
            quotas.settle(taken, tokens, now)
        for entry in list(quotas.reports(now)):
            told, returned = told + entry.used, returned + entry.returned
            quotas.answered(entry, QuotaGrant(TOKENS.id, "", 0, 1, 10_000 - now), now)

    for entry in list(quotas.reports(now, idle_seconds=0.0)):
        told, returned = told + entry.used, returned + entry.returned

    assert granted + told == needed + returned
