"""The way back: the secret that went out does not come back, however the reply is cut.

Rule: bytes are held back only while they could be the beginning of a secret; everything else passes at once, so that a
complete event of a stream is never delayed. A secret is overwritten with as many asterisks, which keeps every length.

What this is for: accidental reflection (echoes, error messages that quote a field). An upstream that has the key can
always encode it in a way nobody looks for.
"""

from typing import Final

_MASK: Final = b"*"


class Scrubber:
    """Scrubs one reply. `hits` counts what was overwritten."""

    __slots__ = ("_held", "_needles", "_shown", "hits")

    def __init__(self, needles: tuple[bytes, ...]) -> None:
        """The secrets, in the forms to look for."""
        self._needles = needles
        self._held = b""
        """Bytes as they came, which may begin a secret."""
        self._shown = b""
        """The same bytes as they will pass if they do not: a secret that ends among them is overwritten already."""
        self.hits = 0

    def whole(self, data: bytes) -> bytes:
        """A reply's rendered head, a whole body, or any other piece that is complete in itself."""
        for needle in self._needles:
            if needle in data:
                return self._overwritten(data, data, new_from=0)
        return data

    def feed(self, data: bytes) -> bytes:
        """What of the body may pass now."""
        window = self._held + data if self._held else data
        shown = self._overwritten(window, self._shown + data, new_from=len(self._held))
        hold = self._undecided(window)
        if not hold:
            self._held = self._shown = b""
            return shown
        self._held, self._shown = window[-hold:], shown[-hold:]
        return shown[:-hold]

    def last(self, data: bytes) -> bytes:
        """The body's last piece: with its end known, nothing more is undecided."""
        window, new_from = self._held + data, len(self._held)
        shown = self._overwritten(window, self._shown + data, new_from=new_from)
        self._held = self._shown = b""
        return shown

    def finish(self) -> bytes:
        """What was held back, at the reply's true end: the beginning of a secret, and no more than that."""
        shown, self._held, self._shown = self._shown, b"", b""
        return shown

    def _overwritten(self, window: bytes, shown: bytes, *, new_from: int) -> bytes:
        """`shown` without the secrets that stand in `window` and end after `new_from`.

        Secrets may overlap (one may begin with the end of another), so they are looked for in what came, not in what
        was overwritten before.
        """
        for needle in self._needles:
            at = window.find(needle, max(0, new_from - len(needle) + 1))
            while at >= 0:
                self.hits += 1
                shown = shown[:at] + _MASK * len(needle) + shown[at + len(needle) :]
                at = window.find(needle, at + 1)
        return shown

    def _undecided(self, window: bytes) -> int:
        """Length of the longest tail of `window` that begins a needle."""
        longest = 0
        for needle in self._needles:
            start = max(0, len(window) - len(needle) + 1)
            first = needle[:1]
            at = window.find(first, start)
            while at >= 0 and len(window) - at > longest:
                if needle.startswith(window[at:]):
                    longest = len(window) - at
                    break
                at = window.find(first, at + 1)
        return longest
