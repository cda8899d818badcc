"""Patterns over names that others choose: subjects, repositories, SPIFFE ids.

    system:serviceaccount:{value}:*      spiffe://example.org/ns/{value}/**      repo:acme/{value}:**

`*` is any text without ':' and '/', `**` any text at all, and `{value}`, at most once, is what is taken out: text
without ':' and '/'. Everything else stands for itself. Rule: a pattern fits the whole text or it does not fit; there is
no part of a match, and no regular expression that somebody could make slow.
"""

import re
from dataclasses import dataclass, field
from typing import Final

MAX_PATTERN_CHARACTERS: Final = 255
MAX_WILDCARDS: Final = 4
"""Matching takes a time that grows with the length to the power of these, so they are few."""

_TOKEN: Final = re.compile(r"\{value\}|\*\*|\*|[^*{}]+|.", re.DOTALL)


class InvalidPatternError(ValueError):
    """The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Raises `InvalidPatternError`."""

    text: str
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", _compiled(self.text))

    @property
    def takes_a_value(self) -> bool:
        return "{value}" in self.text

    @property
    def is_open(self) -> bool:
        """Whether it says nothing: it would fit any text."""
        return not self.text.replace("{value}", "").strip("*")

    def fits(self, text: str) -> bool:
        return self._compiled.fullmatch(text) is not None

    def value(self, text: str) -> str | None:
        """What stands where `{value}` is (the whole text, where it is nowhere); None if the pattern does not fit."""
        found = self._compiled.fullmatch(text)
        if found is None:
            return None
        return found[1] if self.takes_a_value else text


def _compiled(text: str) -> re.Pattern[str]:
    if not 0 < len(text) <= MAX_PATTERN_CHARACTERS:
        raise InvalidPatternError(f"a pattern has 1 to {MAX_PATTERN_CHARACTERS} characters")
    tokens = _TOKEN.findall(text)
    if tokens.count("{value}") > 1:
        raise InvalidPatternError("{value} may be there once")
    if sum(token in ("*", "**", "{value}") for token in tokens) > MAX_WILDCARDS:
        raise InvalidPatternError(f"at most {MAX_WILDCARDS} of *, ** and {{value}}")
    return re.compile("".join(_part(token) for token in tokens), re.DOTALL)


def _part(token: str) -> str:
    match token:
        case "{value}":
            return "([^:/]+)"
        case "**":
            return ".*"
        case "*":
            return "[^:/]*"
        case "{" | "}":
            raise InvalidPatternError("braces are for {value} alone")
        case literal:
            return re.escape(literal)
