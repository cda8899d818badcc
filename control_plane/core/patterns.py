"""Patterns over names that others choose: subjects, repositories, SPIFFE ids.

    system:serviceaccount:{value}:*      spiffe://example.org/ns/{value}/**      repo:acme/{value}:**

`*` is any text without ':' and '/', `**` any text at all, and `{value}`, at most once, is what is taken out: some text
without ':' and '/'. Everything else stands for itself. Rule: a pattern fits the whole text or it does not fit, there is
no part of a match; where it fits in several ways, what stands before the value is as long as it can be, and then the
value is. Matching follows all ways at once, one token after the other, so that no text makes it slow.
"""

import re
from dataclasses import dataclass, field
from typing import Final

MAX_PATTERN_CHARACTERS: Final = 255
MAX_WILDCARDS: Final = 4
"""More than that nobody can read."""
VALUE: Final = "{value}"

_TOKEN: Final = re.compile(r"\{value\}|\*\*|\*|[^*{}]+|.", re.DOTALL)
_SEPARATORS: Final = ":/"


class InvalidPatternError(ValueError):
    """The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Raises `InvalidPatternError`."""

    text: str
    _before: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The tokens before the value; all of them, where there is none."""
    _after: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tokens = _tokens(self.text)
        at = tokens.index(VALUE) if VALUE in tokens else len(tokens)
        object.__setattr__(self, "_before", tokens[:at])
        object.__setattr__(self, "_after", tokens[at + 1 :])

    @property
    def takes_a_value(self) -> bool:
        return VALUE in self.text

    @property
    def is_open(self) -> bool:
        """Whether it says nothing: it would fit any text."""
        return not self.text.replace(VALUE, "").strip("*")

    def fits(self, text: str) -> bool:
        return self.value(text) is not None

    def value(self, text: str) -> str | None:
        """What stands where `{value}` is (the whole text, where it is nowhere); None if the pattern does not fit."""
        begins = _reached(self._before, text)
        if not self.takes_a_value:
            return text if len(text) in begins else None
        mirrored = _reached(tuple(token[::-1] for token in reversed(self._after)), text[::-1])
        ends = {len(text) - at for at in mirrored}
        for begin in sorted(begins, reverse=True):
            longest = max((end for end in _run(text, begin) if end > begin and end in ends), default=None)
            if longest is not None:
                return text[begin:longest]
        return None


def _tokens(text: str) -> tuple[str, ...]:
    if not 0 < len(text) <= MAX_PATTERN_CHARACTERS:
        raise InvalidPatternError(f"a pattern has 1 to {MAX_PATTERN_CHARACTERS} characters")
    tokens = tuple(_TOKEN.findall(text))
    if tokens.count(VALUE) > 1:
        raise InvalidPatternError("{value} may be there once")
    if sum(token in ("*", "**", VALUE) for token in tokens) > MAX_WILDCARDS:
        raise InvalidPatternError(f"at most {MAX_WILDCARDS} of *, ** and {{value}}")
    if "{" in tokens or "}" in tokens:
        raise InvalidPatternError("braces are for {value} alone")
    return tokens


def _reached(tokens: tuple[str, ...], text: str) -> set[int]:
    """Where in the text the tokens can end, all of them, from its beginning."""
    places = {0}
    for token in tokens:
        match token:
            case "**":
                places = set(range(min(places), len(text) + 1)) if places else places
            case "*":
                places = _runs(text, places)
            case literal:
                places = {at + len(literal) for at in places if text.startswith(literal, at)}
    return places


def _runs(text: str, begins: set[int]) -> set[int]:
    reached: set[int] = set()
    for begin in sorted(begins):
        if begin not in reached:  # else its run is the rest of one that is there already
            reached.update(_run(text, begin))
    return reached


def _run(text: str, begin: int) -> range:
    """Every place from here to the next separator, both included."""
    ends = [end for end in (text.find(each, begin) for each in _SEPARATORS) if end >= 0]
    return range(begin, min(ends, default=len(text)) + 1)
