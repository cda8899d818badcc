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

    __slots__ = ("_held", "_needles", "hits")

    def __init__(self, needles: tuple[bytes, ...]) -> None:
        """The secrets in the forms to look for, the longest first: one that contains another must be seen whole."""
        self._needles = needles
        self._held = b""
        self.hits = 0

    def head(self, rendered: bytes) -> bytes:
        """A reply's rendered head, or any other piece that is complete in itself."""
        return self._overwrite(rendered)

    def feed(self, data: bytes) -> bytes:
        """What of the body may pass now."""
        window = self._overwrite(self._held + data if self._held else data)
        hold = self._undecided(window)
        if not hold:
            self._held = b""
            return window
        self._held = window[-hold:]
        return window[:-hold]

    def last(self, data: bytes) -> bytes:
        """The body's last piece: with its end known, nothing more is undecided."""
        held, self._held = self._held, b""
        return self._overwrite(held + data)

    def finish(self) -> bytes:
        """What was held back, at the reply's true end: the beginning of a secret, and no more than that."""
        held, self._held = self._held, b""
        return held

    def _overwrite(self, window: bytes) -> bytes:
        for needle in self._needles:
            if needle in window:
                self.hits += window.count(needle)
                window = window.replace(needle, _MASK * len(needle))
        return window

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
