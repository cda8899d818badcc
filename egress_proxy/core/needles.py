"""What a reply is searched for: a secret, and the forms it takes when somebody writes it down.

Raw; percent-encoded (RFC 3986 §2.1, and as a form would); escaped for JSON (RFC 8259 §7); in base64 and base64url, at
each of the three places where it can begin in a group (RFC 4648 §4), so that `user:secret` is found, too.

Rule: derived forms of fewer than `MIN_DERIVED_BYTES` are left out, as they would be found where nothing is. How much of
a form must be there before bytes are held back is settled here, because holding back is something that can be seen:
with it a secret could be guessed one character at a time. So a *guarded* secret, with `GUARDED_CHARACTERS` or more that
no one knows, holds nothing back before `DECISIVE_CHARACTERS` of them were matched; any other one always holds back the
same, whatever was matched.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, quote_plus

GUARDED_CHARACTERS: Final = 20
DECISIVE_CHARACTERS: Final = 12
MIN_DERIVED_BYTES: Final = 8
PROBE_BYTES: Final = 20


@dataclass(frozen=True, slots=True, repr=False)
class Needle:
    """One form of a secret."""

    text: bytes
    decisive: int
    """How many of its first bytes make up the prefix that everybody knows, and `DECISIVE_CHARACTERS` more."""

    @property
    def start(self) -> bytes:
        return self.text[: self.decisive]


@dataclass(frozen=True, slots=True, repr=False)
class Needles:
    """The forms of one request's secrets, the longest first. Empty: there is nothing to search for."""

    forms: tuple[Needle, ...]
    texts: tuple[bytes, ...]
    looked_for: tuple[tuple[bytes, bytes], ...]
    """Of each form its end, and the whole: where the end is not, the whole is not. CPython's search leaps over a text
    by the length of what it looks for only while that has few different characters (`make bench`)."""
    longest: int
    """Bytes."""
    are_guarded: bool
    """False: a secret among them is short, so that every hit blocks the reply."""

    @classmethod
    def of(cls, *secrets: "tuple[str, int]") -> "Needles":
        """Of secrets, each with the number of its first characters that everybody knows."""
        found: dict[bytes, Needle] = {}
        for secret, known in secrets:
            for form in _forms(secret, known):
                found.setdefault(form.text, form)
        forms = tuple(sorted(found.values(), key=lambda form: len(form.text), reverse=True))
        return cls(
            forms=forms,
            texts=tuple(form.text for form in forms),
            looked_for=tuple((form.text[-PROBE_BYTES:], form.text) for form in forms),
            longest=len(forms[0].text) if forms else 0,
            are_guarded=all(len(secret) - known >= GUARDED_CHARACTERS for secret, known in secrets),
        )

    def __bool__(self) -> bool:
        return bool(self.forms)


NOTHING: Final = Needles.of()


def _forms(secret: str, known: int) -> Iterator[Needle]:
    raw, prefix = secret.encode(), secret[:known].encode()
    yield Needle(raw, len(prefix) + DECISIVE_CHARACTERS)
    for derived, derived_prefix in _derived(secret, secret[:known]):
        if len(derived) >= MIN_DERIVED_BYTES:
            yield Needle(derived, len(derived_prefix) + DECISIVE_CHARACTERS)


def _derived(secret: str, known: str) -> Iterator[tuple[bytes, bytes]]:
    """Each form, and that of the known prefix."""
    for percent in (quote(secret, safe=""), quote_plus(secret, safe="")):
        known_percent = quote(known, safe="").encode()
        yield percent.encode(), known_percent
        yield _lower_hex(percent).encode(), known_percent
    escaped, known_escaped = json.dumps(secret)[1:-1], json.dumps(known)[1:-1]
    unescaped_unicode = json.dumps(secret, ensure_ascii=False)[1:-1]
    for text in (escaped, unescaped_unicode):
        yield text.encode(), known_escaped.encode()
        yield text.replace("/", "\\/").encode(), known_escaped.encode()
    for offset in range(3):
        inner, known_inner = _base64_inner(secret.encode(), offset), _base64_inner(known.encode(), offset)
        yield inner, known_inner
        yield inner.translate(_URL_SAFE), known_inner


_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")


def _base64_inner(data: bytes, offset: int) -> bytes:
    """The characters that depend on `data` alone, when it begins `offset` bytes after a group does."""
    encoded = base64.b64encode(bytes(offset) + data)
    return encoded[(offset * 8 + 5) // 6 : (offset + len(data)) * 8 // 6]


def _lower_hex(percent: str) -> str:
    """`%2F` as `%2f`: both are written (RFC 3986 §2.1)."""
    head, *rest = percent.split("%")
    return head + "".join("%" + part[:2].lower() + part[2:] for part in rest)
