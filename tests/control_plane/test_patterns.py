"""Patterns fit whole texts, as a regular expression would say; and no text makes them slow."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core.patterns import InvalidPatternError, Pattern

PATTERNS = "control_plane/core/patterns.py"


def by_expression(pattern: str) -> re.Pattern[str]:
    """The same, said once more: fine for texts of a few characters."""
    parts = {"{value}": "[^:/]+", "**": ".*", "*": "[^:/]*"}
    tokens = re.findall(r"\{value\}|\*\*|\*|[^*{}]+", pattern)
    return re.compile("".join(parts.get(token, re.escape(token)) for token in tokens), re.DOTALL)


@given(
    st.lists(st.sampled_from(["*", "**", "a", "b", ":", "/", "ab"]), min_size=1, max_size=7).filter(
        lambda tokens: sum(token.startswith("*") for token in tokens) <= 3
    ),
    st.integers(0, 7),
    st.text("ab:/", max_size=9),
)
@pytest.mark.guards(PATTERNS, "return text if len(text) in begins else None", "return text")
@pytest.mark.guards(PATTERNS, "if end > begin and end in ends", "if end > begin")
def test_a_pattern_fits_what_the_expression_fits(tokens: list[str], at: int, text: str) -> None:
    plain = "".join(tokens)
    if sum(token in ("*", "**") for token in re.findall(r"\*\*|\*|[^*]+", plain)) > 3:
        return
    with_value = "".join([*tokens[:at], "{value}", *tokens[at:]])

    value = Pattern(with_value).value(text)

    assert Pattern(plain).fits(text) == (by_expression(plain).fullmatch(text) is not None)
    assert (value is not None) == (by_expression(with_value).fullmatch(text) is not None)
    if value is not None:
        before, _, after = with_value.partition("{value}")
        assert value
        assert not set(value) & {":", "/"}
        assert by_expression(f"{before}{value}{after}").fullmatch(text) is not None


@pytest.mark.parametrize(
    "pattern, text, value",
    [
        ("system:serviceaccount:{value}:*", "system:serviceaccount:acme:runtime", "acme"),
        ("system:serviceaccount:{value}:*", "system:serviceaccount:acme:runtime:x", None),
        ("spiffe://example.org/ns/{value}/**", "spiffe://example.org/ns/acme/sa/runtime", "acme"),
        ("spiffe://example.org/ns/{value}/**", "spiffe://example.org.evil/ns/acme/sa/runtime", None),
        ("{value}-*", "a-b-c", "a-b"),
        ("**{value}", "a:bc", "c"),
        ("tenant", "tenant", "tenant"),
    ],
)
def test_what_is_taken_out(pattern: str, text: str, value: str | None) -> None:
    assert Pattern(pattern).value(text) == value


@pytest.mark.parametrize("pattern", ["**a**a**a**b", "*a*a*a*b", "{value}a*a*a*b", "**a*a**a{value}b"])
def test_no_text_makes_it_slow(pattern: str) -> None:
    """By a regular expression each of these takes hours."""
    assert not Pattern(pattern).fits("a" * 1_024)


@pytest.mark.parametrize("pattern", ["", "{value}{value}", "{other}", "}", "*-*-*-*-*", "a" * 256])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(InvalidPatternError):
        Pattern(pattern)
