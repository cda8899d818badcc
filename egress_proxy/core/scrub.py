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

from egress_proxy.core.needles import PROBE_BYTES, Needle, Needles
from egress_proxy.core.search import LONG_BYTES, stands_in

_MASK: Final = b"*"


class LeakError(Exception):
    """A short secret came back: nothing more of the reply may pass."""


class Scrubber:
    """Scrubs one reply. `hits` counts what was overwritten, or blocked."""

    __slots__ = ("_borders", "_looked_for", "_matched", "_needles", "_shown", "_tail", "_texts", "hits")

    def __init__(self, needles: Needles) -> None:
        self._needles = needles
        self._texts = needles.texts
        self._looked_for = needles.looked_for
        self._tail = b""
        """The last bytes of the body as they came, as many as a secret may have begun among."""
        self._shown = b""
        """Those of them that are held back, as they will pass if no secret begins among them."""
        self._matched: dict[int, int] = {}
        """Of which form (its place among them) the body's end is the beginning, and of how many bytes."""
        self._borders: dict[int, list[int]] = {}
        self.hits = 0

    def whole(self, data: bytes) -> bytes:
        """A reply's rendered head, a whole body, or any other piece that is complete in itself. Raises `LeakError`."""
        if self._is_in(data):
            return self._overwritten(data, data, new_from=0)
        return data

    def feed(self, data: bytes) -> bytes:
        """What of the body may pass now. Raises `LeakError`."""
        tail, memory = self._tail, max(1, self._needles.longest - 1)
        if self._has_ended(tail, data):
            shown = self._overwritten(tail + data, self._shown + data, new_from=len(tail))
        else:
            shown = self._shown + data if self._shown else data
        self._tail = tail = data[-memory:] if len(data) >= memory else (tail + data)[-memory:]
        hold = self._undecided(tail, len(data)) if self._needles.are_guarded else self._unended(tail)
        hold = min(len(shown), hold)
        if not hold:
            self._shown = b""
            return shown
        self._shown = shown[-hold:]
        return shown[:-hold]

    def last(self, data: bytes) -> bytes:
        """The body's last piece: with its end known, nothing more is undecided. Raises `LeakError`."""
        shown = self._overwritten(self._tail + data, self._shown + data, new_from=len(self._tail))
        self._tail = self._shown = b""
        self._matched.clear()
        return shown

    def finish(self) -> bytes:
        """What was held back, at the reply's true end: the beginning of a secret at most, and no more than that."""
        shown, self._tail, self._shown = self._shown, b"", b""
        self._matched.clear()
        return shown

    def _is_in(self, data: bytes) -> bool:
        if len(data) >= LONG_BYTES:
            return any(stands_in(text, data) for text in self._texts)
        for end, text in self._looked_for:  # noqa: SIM110 (a generator costs more than the search)
            if end in data and text in data:
                return True
        return False

    def _has_ended(self, tail: bytes, data: bytes) -> bool:
        """Whether a form ends in `data`, wherever it began."""
        if len(data) >= LONG_BYTES:
            seam = tail + data[: self._needles.longest]
            return any(stands_in(text, data) or text in seam for text in self._texts)
        border = tail[1 - PROBE_BYTES :] + data[:PROBE_BYTES]
        for end, text in self._looked_for:
            if (end in data or end in border) and (text in data or text in tail + data[: len(text)]):
                return True
        return False

    def _overwritten(self, window: bytes, shown: bytes, *, new_from: int) -> bytes:
        """`shown`, the end of `window` that has not passed yet, without the secrets that end after `new_from`.

        Secrets may overlap (one may begin with the end of another), so they are looked for in what came, not in what
        was overwritten before.
        """
        passed, out = len(window) - len(shown), bytearray(shown)
        for place, text in enumerate(self._texts):
            at = window.find(text, max(0, new_from - len(text) + 1))
            while at >= 0:
                self.hits += 1
                if not self._needles.are_guarded:
                    raise LeakError
                begin, end = max(at, passed) - passed, at + len(text) - passed
                out[begin:end] = _MASK * (end - begin)
                at = self._next(window, place, text, at)
        return bytes(out)

    def _next(self, window: bytes, place: int, text: bytes, at: int) -> int:
        """Where `text` stands next in `window`, after it stood `at`.

        One that repeats itself may stand at each of its own bytes again, and comparing all of it there would take the
        square of its length. Where it may is settled by the text alone: a period of its length further on.
        """
        end = at + len(text)
        period = len(text) - self._borders_of(place, text)[-1]
        if window[end : end + period] == text[-period:]:
            return at + period
        return window.find(text, at + max(period, len(text) - period) + 1)

    def _undecided(self, tail: bytes, new: int) -> int:
        """Length of the longest end of `tail` that begins a form, with enough of it to be held back. `new`: how many of
        the bytes came with the last piece.

        What was matched before is not compared again, so that a body takes as long as it is, also where a secret
        repeats itself (Knuth, Morris and Pratt).
        """
        longest, matched, old = 0, self._matched, len(tail) - new
        for place, form in enumerate(self._needles.forms):
            known = matched.pop(place, 0) if matched else 0
            at = old
            if not known or old < 0:
                known, at = 0, max(0, old - form.decisive + 1)
                if tail.find(form.start, at) < 0:
                    continue  # of most there is nothing
            known = self._beginning(tail, at, known, place, form)
            if known:
                matched[place] = known
                longest = max(longest, known)
        return longest

    def _beginning(self, tail: bytes, at: int, known: int, place: int, form: Needle) -> int:
        """The same for one form, of which `known` bytes stand before `at`, or none."""
        text, start = form.text, form.start
        while True:
            if known < len(start):
                begin = tail.find(start, max(0, at - known))
                if begin < 0:
                    return 0
                at, known = begin + len(start), len(start)
            more = _alike(tail, at, text, known)
            at, known = at + more, known + more
            if at == len(tail) and known < len(text):
                return known
            known = self._borders_of(place, text)[known - 1]

    def _borders_of(self, place: int, text: bytes) -> list[int]:
        """For each beginning of `text`, how long the longest shorter one is that it ends with."""
        borders = self._borders.get(place)
        if borders is None:
            borders, length = [0], 0
            for byte in text[1:]:
                while length and byte != text[length]:
                    length = borders[length - 1]
                length += byte == text[length]
                borders.append(length)
            self._borders[place] = borders
        return borders

    def _unended(self, tail: bytes) -> int:
        """How much is held for a short secret: as much as could begin one, since the last line ended."""
        return len(tail) - tail.rfind(b"\n") - 1


def _alike(one: bytes, at: int, other: bytes, other_at: int) -> int:
    """How many bytes are the same from there on."""
    length = min(len(one) - at, len(other) - other_at)
    same, step = 0, 16
    while same < length:
        step = min(step, length - same)
        if one[at + same : at + same + step] == other[other_at + same : other_at + same + step]:
            same += step
            step *= 2
        elif step == 1:
            break
        else:
            step //= 2
    return same
