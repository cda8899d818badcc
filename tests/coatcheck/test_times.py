"""Times as people type them."""

import pytest

from coatcheck.terminal import WrongUsageError
from coatcheck.times import moment_of, seconds_of


@pytest.mark.parametrize("text, seconds", [("90", 90), ("90s", 90), ("15m", 900), ("8h", 28_800), ("7d", 604_800)])
def test_a_duration_has_an_optional_unit(text: str, seconds: int) -> None:
    assert seconds_of(text, option="--ttl") == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "5w", "1.5h", "soon"])
def test_anything_else_is_wrong_usage_that_names_the_option(text: str) -> None:
    with pytest.raises(WrongUsageError, match="--ttl"):
        seconds_of(text, option="--ttl")


def test_a_moment_is_a_duration_from_now_or_a_date() -> None:
    assert moment_of("1h", option="--until", now=1000.0) == 4600.0
    assert moment_of("2030-01-01T00:00:00+00:00", option="--until", now=1000.0) == 1_893_456_000.0


def test_a_moment_that_has_passed_is_refused() -> None:
    with pytest.raises(WrongUsageError, match="past"):
        moment_of("2001-01-01", option="--until", now=1_893_456_000.0)
