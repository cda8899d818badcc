"""What a coverage-guided fuzzer calls: one function for each subject, from bytes alone.

The first bytes say how the rest is cut and used, so that an example is one file and means the same for ever. Replayed
by `test_examples`, run by `run`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from egress_proxy.core.decision import Mode
from tests.attacks.framing import CHUNKED_BODIES, DOUBTFUL_FIELDS, DOUBTFUL_LENGTHS, DOUBTFUL_LINES, DOUBTFUL_REPLIES
from tests.fuzz.finding import ONE, check_decision, check_hidden, check_stream
from tests.fuzz.framing import check_reply, check_requests
from tests.fuzz.path import HOST, ROUTE
from tests.fuzz.scrubbing import check_reply_is_scrubbed

Target = Callable[[bytes], None]
EXAMPLES: Final = Path(__file__).parent / "examples"
_CUTS: Final = 4
_METHODS: Final = ("GET", "HEAD", "POST", "OPTIONS")


def requests(data: bytes) -> None:
    how, cuts, stream = _taken(data)
    check_requests(stream, cuts, mode=Mode.FORWARD if how & 1 else Mode.REVERSE)


def replies(data: bytes) -> None:
    how, cuts, raw = _taken(data)
    check_reply(raw, cuts, method=_METHODS[how & 3], ends=bool(how & 4), swapped=bool(how & 8))


def finder(data: bytes) -> None:
    how, cuts, text = _taken(data)
    check_stream(text.replace(b"{placeholder}", ONE.placeholder), cuts)
    half = len(text) // 2
    check_hidden(text[:half], text[half:], cuts[: how & 3], in_target=bool(how & 4))
    check_decision(text)


def scrubber(data: bytes) -> None:
    how, cuts, rest = _taken(data)
    letters, _, reply = rest.partition(b"\n")
    secret = letters.decode("latin-1")
    if len(secret) < 4:
        return
    check_reply_is_scrubbed(secret, how & 7, reply.replace(b"{secret}", secret.encode()), cuts)


TARGETS: Final[dict[str, Target]] = {each.__name__: each for each in (requests, replies, finder, scrubber)}


def beginnings(target: str) -> list[bytes]:
    """What a fuzzer begins with: the corpus of attacks, and something well formed."""
    first = f"POST /{ROUTE}/x HTTP/1.1\r\nHost: {HOST}\r\n"
    second = f"GET /{ROUTE}/y HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {{placeholder}}\r\n\r\n".encode()
    match target:
        case "requests":
            headed = [("\r\n".join([*lines, "", ""]), body) for lines, body in DOUBTFUL_LENGTHS.values()]
            headed += [(line + "\r\n\r\n", b"") for line in DOUBTFUL_FIELDS.values()]
            headed += [("Transfer-Encoding: chunked\r\n\r\n", body) for body in CHUNKED_BODIES.values()]
            headed += [
                ("Content-Length: 3\r\n\r\n", b"abc"),
                ("Expect: 100-continue\r\nContent-Length: 1\r\n\r\n", b"a"),
            ]
            lines = [
                line.format(target=f"/{ROUTE}/x") + f"\r\nHost: {HOST}\r\n\r\n" for line in DOUBTFUL_LINES.values()
            ]
            streams = [(first + head).encode("latin-1") + body + second for head, body in headed]
            streams += [line.encode("latin-1") + second for line in lines]
            streams += [stream.replace(f"/{ROUTE}/".encode(), f"http://{HOST}/".encode()) for stream in streams[:8]]
            return [bytes((0, 7, 90, 3, 40)) + stream for stream in streams]
        case "replies":
            leak = b"26\r\n{secret}\r\n"
            whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n" + leak + b"0\r\n\r\n"
            by_length = b"HTTP/1.1 200 OK\r\nX: {secret}\r\nContent-Length: 40\r\n\r\n {secret} "
            raws = (whole, by_length, b"HTTP/1.1 200 OK\r\n\r\n {secret} ", *DOUBTFUL_REPLIES.values())
            return [bytes((how, 7, 90, 3, 40)) + raw for raw in raws for how in (0, 8, 13)]
        case "finder":
            hows = [
                (how, *steps) for how in range(8) for steps in ((4, 4, 4, 4), (1, 3, 4, 4), (2, 2, 1, 7), (4, 5, 3, 9))
            ]
            texts = (second, b"", b"key=/more", b"ab" + b"cdef", b"coat%2563hk1")
            return [bytes(how) + text for how in hows for text in texts]
        case _:
            secrets = (
                b"sk-real-aabaabaacdefghij/+klmn%op",
                b"hunter2",
                b"a" * 40,
                b'qu"ote\\d and long enough to pass',
            )
            return [bytes((how, 1, 9, 30, 3)) + secret + b"\nx {secret} y" for secret in secrets for how in (0, 5)]


def _taken(data: bytes) -> tuple[int, list[int], bytes]:
    """What the first bytes say: a number, and where to cut (by steps, so that places far behind are reached, too)."""
    how, steps, rest = data[:1], data[1 : 1 + _CUTS], data[1 + _CUTS :]
    places, at = [], 0
    for step in steps:
        at += step
        places.append(at)
    return how[0] if how else 0, places, rest
