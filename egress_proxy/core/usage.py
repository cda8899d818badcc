"""How many tokens a model's reply says it used, read as the reply passes: nothing of it is kept.

Providers say it in a `usage` object: Anthropic and OpenAI in the body of a reply, and in events of a stream, several
times and cumulatively. Every such object is read, wherever it stands, and of each number the largest counts: whatever
else a reply says about usage (a model can be made to write anything) can only make it more.

    Anthropic    input_tokens, cache_creation_input_tokens, cache_read_input_tokens, output_tokens
    OpenAI       prompt_tokens, completion_tokens, or input_tokens, output_tokens

Rule: a reply that was paid for and does not say (a stream that was left early, or was not asked to say) counts by what
passed: an event is a token, otherwise four bytes are.
"""

import json
from typing import Any, Final

from egress_proxy.core.needles import Needles
from egress_proxy.core.scrub import Scrubber

MAX_OBJECT_BYTES: Final = 4_096
_KEY: Final = b'"usage"'
_EVENT: Final = b"data:"
_BYTES_A_TOKEN: Final = 4
_INPUT: Final = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_OPENAI_INPUT: Final = "prompt_tokens"
_OUTPUT: Final = ("output_tokens", "completion_tokens")


class UsageReader:
    """Reads one reply's body, however it is cut."""

    __slots__ = (
        "_depth",
        "_events",
        "_found",
        "_is_in_string",
        "_is_open",
        "_object",
        "_tail",
        "_was_escape",
        "passed",
    )

    def __init__(self) -> None:
        self.passed = 0
        """Bytes of the body."""
        self._tail = b""
        self._object = bytearray()
        self._is_open = False
        """Behind a key, waiting for its object or inside it."""
        self._depth = 0
        self._is_in_string = False
        self._was_escape = False
        self._found: dict[str, int] = {}
        self._events = 0

    def feed(self, data: bytes) -> None:
        self.passed += len(data)
        self._events += data.count(_EVENT)
        window = data if self._is_open else self._tail + data
        at = 0
        while at < len(window):
            if self._is_open:
                at = self._take(window, at)
                continue
            key = window.find(_KEY, at)
            if key < 0:
                break
            self._begin()
            at = key + len(_KEY)
        self._tail = b"" if self._is_open else window[max(at, len(window) - len(_KEY) + 1) :]

    def tokens(self, *, request_bytes: int, is_whole: bool) -> int:
        """What was used. `request_bytes` is the length of the request's body, for a reply that does not say;
        `is_whole`: it came to its end, so that the last number it says is the final one."""
        output = self._output()
        if not output or not is_whole:
            output = max(output, self._events or self.passed // _BYTES_A_TOKEN)
        return (self._input() or request_bytes // _BYTES_A_TOKEN) + output

    @property
    def says(self) -> bool:
        """Whether the reply said what it used."""
        return bool(self._found)

    def _input(self) -> int:
        anthropic = sum(self._found.get(name, 0) for name in _INPUT)
        return max(anthropic, self._found.get(_OPENAI_INPUT, 0))

    def _output(self) -> int:
        return max(self._found.get(name, 0) for name in _OUTPUT)

    def _begin(self) -> None:
        self._is_open, self._depth = True, 0
        self._is_in_string = self._was_escape = False
        self._object.clear()

    def _take(self, window: bytes, at: int) -> int:
        """One byte after the other, until the object is complete; where to go on."""
        for index in range(at, len(window)):
            byte = window[index]
            if not self._object and byte != 0x7B:
                if byte in b" \t\r\n:":
                    continue
                self._is_open = False  # null, or no object at all
                return index
            self._object.append(byte)
            if self._is_over(byte):
                self._is_open = False
                self._read()
                return index + 1
            if len(self._object) > MAX_OBJECT_BYTES:
                self._is_open = False
                return index + 1
        return len(window)

    def _is_over(self, byte: int) -> bool:
        if self._is_in_string:
            if self._was_escape:
                self._was_escape = False
            elif byte == 0x5C:
                self._was_escape = True
            elif byte == 0x22:
                self._is_in_string = False
        elif byte == 0x22:
            self._is_in_string = True
        elif byte == 0x7B:
            self._depth += 1
        elif byte == 0x7D:
            self._depth -= 1
            return self._depth == 0
        return False

    def _read(self) -> None:
        try:
            said: Any = json.loads(bytes(self._object))
        except (ValueError, RecursionError):
            return
        for name in (*_INPUT, _OPENAI_INPUT, *_OUTPUT):
            number = said.get(name)
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                self._found[name] = max(number, self._found.get(name, 0))


def tokens_used(
    usage: UsageReader | None, *, method: str, status: int | None, request_bytes: int, is_whole: bool
) -> int:
    """Of one exchange. Only what a model was asked for counts where the reply does not say anything."""
    if usage is None:
        return 0
    was_paid_for = method == "POST" and (status is None or status // 100 == 2)
    if not usage.says and not was_paid_for:
        return 0
    return usage.tokens(request_bytes=request_bytes, is_whole=is_whole)


class MeteringScrubber(Scrubber):
    """A scrubber that also reads what the reply says it used: every byte of a swapped reply passes here."""

    __slots__ = ("usage",)

    def __init__(self, needles: Needles) -> None:
        super().__init__(needles)
        self.usage = UsageReader()

    def whole(self, data: bytes) -> bytes:
        self.usage.feed(data)
        return super().whole(data)

    def feed(self, data: bytes) -> bytes:
        self.usage.feed(data)
        return super().feed(data)

    def last(self, data: bytes) -> bytes:
        self.usage.feed(data)
        return super().last(data)
