"""The way back: the secret that went out does not come back, however the reply is cut.

Rule: a secret, or a form of it, is overwritten with as many asterisks, which keeps every length; a short secret blocks
the reply instead. Bytes are held back only while a secret may have begun among them. What that shows a guesser is the
same for every guess (`core.needles`): of a guarded secret nothing is held before enough of it was matched, and then
only what matches; for a short one the same number of bytes is held always, match or not, until more bytes, the end of
a line or the reply's end. A complete event of a stream ends its line, and so is never delayed.

What passed is remembered for as long as a secret may have begun in it: of one that was cut early the beginning is out,
fewer characters than would help to guess the rest, and the rest is overwritten.

What this is for: accidental reflection (echoes, error messages that quote a field). An upstream that has the key can
always encode it in a way nobody looks for.
"""

from typing import Final

from egress_proxy.core.needles import Needles

_MASK: Final = b"*"
_MAX_LOOKS: Final = 64
"""Of one form at one tail: a secret that repeats itself could begin at each of its bytes."""


class LeakError(Exception):
    """A short secret came back: nothing more of the reply may pass."""


class Scrubber:
    """Scrubs one reply. `hits` counts what was overwritten, or blocked."""

    __slots__ = ("_looked_for", "_needles", "_shown", "_tail", "_texts", "hits")

    def __init__(self, needles: Needles) -> None:
        self._needles = needles
        self._texts = needles.texts
        self._looked_for = needles.looked_for
        self._tail = b""
        """The last bytes of the body as they came, as many as a secret may have begun among."""
        self._shown = b""
        """Those of them that are held back, as they will pass if no secret begins among them."""
        self.hits = 0

    def whole(self, data: bytes) -> bytes:
        """A reply's rendered head, a whole body, or any other piece that is complete in itself. Raises `LeakError`."""
        if self._is_in(data):
            return self._overwritten(data, data, new_from=0)
        return data

    def feed(self, data: bytes) -> bytes:
        """What of the body may pass now. Raises `LeakError`."""
        tail, memory = self._tail, max(1, self._needles.longest - 1)
        if self._shown or self._is_in(data) or self._is_in(tail[-memory:] + data[:memory]):
            shown = self._overwritten(tail + data, self._shown + data, new_from=len(tail))
        else:
            shown = data
        self._tail = tail = data[-memory:] if len(data) >= memory else (tail + data)[-memory:]
        hold = min(len(shown), self._undecided(tail) if self._needles.are_guarded else self._unended(tail))
        if not hold:
            self._shown = b""
            return shown
        self._shown = shown[-hold:]
        return shown[:-hold]

    def last(self, data: bytes) -> bytes:
        """The body's last piece: with its end known, nothing more is undecided. Raises `LeakError`."""
        shown = self._overwritten(self._tail + data, self._shown + data, new_from=len(self._tail))
        self._tail = self._shown = b""
        return shown

    def finish(self) -> bytes:
        """What was held back, at the reply's true end: the beginning of a secret at most, and no more than that."""
        shown, self._tail, self._shown = self._shown, b"", b""
        return shown

    def _is_in(self, data: bytes) -> bool:
        for end, text in self._looked_for:  # noqa: SIM110 (a generator costs more than the search)
            if end in data and text in data:
                return True
        return False

    def _overwritten(self, window: bytes, shown: bytes, *, new_from: int) -> bytes:
        """`shown`, the end of `window` that has not passed yet, without the secrets that end after `new_from`.

        Secrets may overlap (one may begin with the end of another), so they are looked for in what came, not in what
        was overwritten before.
        """
        passed = len(window) - len(shown)
        for text in self._texts:
            at = window.find(text, max(0, new_from - len(text) + 1))
            while at >= 0:
                self.hits += 1
                if not self._needles.are_guarded:
                    raise LeakError
                begin, end = max(at, passed) - passed, at + len(text) - passed
                shown = shown[:begin] + _MASK * (end - begin) + shown[end:]
                at = window.find(text, at + 1)
        return shown

    def _undecided(self, tail: bytes) -> int:
        """Length of the longest end of `tail` that begins a form, with enough of it to be held back."""
        longest = 0
        for form in self._needles.forms:
            text, start = form.text, form.start
            at = tail.find(start, max(0, len(tail) - len(text) + 1))
            looks = 0
            while at >= 0 and len(tail) - at > longest:
                looks += 1
                if looks > _MAX_LOOKS or text.startswith(tail[at:]):
                    longest = len(tail) - at
                    break
                at = tail.find(start, at + 1)
        return longest

    def _unended(self, tail: bytes) -> int:
        """How much is held for a short secret: as much as could begin one, since the last line ended."""
        return len(tail) - tail.rfind(b"\n") - 1
