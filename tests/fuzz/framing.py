"""What has to hold of framing, for any bytes: whoever reads what the proxy took for a message reads the same message.

Rule: of a client's stream, each request that goes on is the same request to every reader, at the same place in the
stream; what leaves for the upstream is, to every reader, those requests and no more; and the same of a reply on its way
back. What the proxy refuses is nobody's concern. Known differences of the readers: `differences`.
(RFC 9112 §6.3 and §11.2.)
"""

import re
from collections.abc import Sequence
from typing import Final

from structlog.testing import capture_logs

from egress_proxy.client import TUNNEL_OPEN
from egress_proxy.core.decision import Mode
from tests.fuzz.differences import excuse, is_dropped, is_our_own
from tests.fuzz.path import HOST, ROUTE, SECRET, Path
from tests.fuzz.readers import REPLY_READERS, REQUEST_READERS, Message, Reading

_REPLY_LINE: Final = re.compile(rb"HTTP/1\.1 ([0-9]{3}) [^\r]*\r\n((?:[^\r]+\r\n)*)\r\n")


_MASKED: Final = b"*" * len(SECRET)


class ReadDifferentlyError(AssertionError):
    """Two readers of the same bytes."""


def check_requests(stream: bytes, cuts: Sequence[int], *, mode: Mode = Mode.REVERSE) -> int:
    """One client's stream, cut at these places. Returns how many of its requests went on."""
    path = Path(mode)
    stream = stream.replace(b"{placeholder}", path.placeholder.encode())
    with capture_logs() as logs:
        path.send(stream, cuts)
        left, replied, begun, answered = path.sent_upstream, path.replied, path.requests, path.answered
        path.close()
    broken = [entry for entry in logs if entry["event"] == "internal_error"]
    _hold(not broken, f"the proxy broke: {broken}")

    went = _went_upstream(left, begun=begun, whole=answered)
    before_tunnel = replied.partition(TUNNEL_OPEN)[0]
    outcomes = [b"Coatcheck-Refusal" in head for status, head in _REPLY_LINE.findall(before_tunnel) if status != b"100"]
    for name, read in REQUEST_READERS.items():
        _compare_with_what_came(name, read(stream), went, outcomes)
    return len(went)


def _went_upstream(left: list[bytes], *, begun: int, whole: int) -> list[Message]:
    """What every upstream read, which is the same to all readers."""
    readings = {name: [read(data) for data in left] for name, read in REQUEST_READERS.items()}
    found = []
    for name, each in readings.items():
        errors = [reading.error for reading in each if reading.error]
        _hold(all(excuse(name, error, leaving=True) for error in errors), f"{name} cannot read what left: {errors}")
        messages = [message for reading in each for message in reading.messages]
        if not errors:
            # Of one whose body was refused at once, nothing may have left.
            is_none_of_last = begun == whole + 1 and len(messages) == whole
            _hold(len(messages) == begun or is_none_of_last, f"{begun} left, {name} reads {len(messages)}: {left}")
            _hold(sum(message.is_whole for message in messages) == whole, f"{name} does not read {whole} whole: {left}")
        found.append(messages)
    one, other = found
    for ours, theirs in zip(one, other, strict=False):
        _same("what left", ours, theirs)
    return max(found, key=len)


def _compare_with_what_came(name: str, reading: Reading, went: list[Message], outcomes: list[bool]) -> None:
    """Each of the requests that went is the one at its place in the client's stream."""
    waiting = list(went)
    for at, was_refused in enumerate([*outcomes, False]):
        if not waiting:
            return
        is_last = len(waiting) == 1
        if was_refused and not (is_last and not waiting[0].is_whole and at == len(outcomes) - 1):
            continue
        sent = waiting.pop(0)
        if at >= len(reading.messages):
            known = not reading.is_told_apart or excuse(name, reading.error)
            _hold(known, f"{name} reads {at} requests, then: {reading.error!r}; {sent.first} went on")
            return
        _compare(name, reading.messages[at], sent)


def _compare(name: str, came: Message, sent: Message) -> None:
    where = f"{name} of {came.first}"
    _hold(came.first[0] == sent.first[0], f"{where}: {sent.first[0]!r} went on")
    _hold(_target(*came.first) == sent.first[1], f"{where}: {sent.first[1]!r} went on")
    if sent.is_whole:
        _hold(came.is_whole and came.body == sent.body, f"{where}: another body went on: {came.body!r} {sent.body!r}")
    else:
        _hold(came.body.startswith(sent.body) or sent.body.startswith(came.body), f"{where}: another body began")
    _compare_fields(where, came.fields, sent.fields)


def _target(method: bytes, came: bytes) -> bytes:
    """As it goes on. Without path and query it is the server itself that `OPTIONS` is about (RFC 9112 §3.2.4)."""
    path = came.removeprefix(b"/" + ROUTE.encode())
    if b"://" in came[:8]:
        path = came.partition(b"://")[2]
        ends = [at for at in (path.find(b"/"), path.find(b"?")) if at >= 0]
        if not ends and method == b"OPTIONS":
            return b"*"
        path = path[min(ends) :] if ends else b""
    return path if path.startswith(b"/") else b"/" + path


def _compare_fields(where: str, came: list[tuple[bytes, bytes]], sent: list[tuple[bytes, bytes]]) -> None:
    """What went on came, in that order; what did not go on is of those that never do."""
    kept = [item for item in sent if not is_our_own(item[0])]
    waiting = list(kept)
    nominated = {token.strip().lower() for name, value in came if name == b"connection" for token in value.split(b",")}
    for name, value in came:
        if waiting and waiting[0] == (name, value):
            waiting.pop(0)
        else:
            _hold(is_dropped(name) or name in nominated or is_our_own(name), f"{where}: {name!r} did not go on")
    _hold(not waiting, f"{where}: what went on had not come so: {waiting}")


# --- replies ----------------------------------------------------------------------------------------------------------


def check_reply(
    raw: bytes, cuts: Sequence[int], *, method: str = "GET", ends: bool = False, swapped: bool = True
) -> bool:
    """One upstream's answer, cut at these places. Returns whether the client got all of it.

    `swapped`: the reply is searched for the secret on its way.
    """
    raw = raw.replace(b"{secret}", SECRET.encode())
    path = Path(Mode.REVERSE, reply=raw, reply_cuts=cuts, reply_ends=ends)
    with capture_logs() as logs:
        proof = f"Authorization: Bearer {path.placeholder}\r\n" if swapped else ""
        path.send(f"{method} /{ROUTE}/x HTTP/1.1\r\nHost: {HOST}\r\n{proof}\r\n".encode())
        got, socket = path.replied, path.client_socket
        is_aborted, is_ended = socket.is_aborted, socket.is_ended
        is_pooled = any(connection.is_reusable for connection in path.pool.idle)
        is_under_way = path.client.exchange is not None
        path.close()
    broken = [entry for entry in logs if entry["event"] == "internal_error"]
    _hold(not broken, f"the proxy broke: {broken}")

    _hold(not (swapped and SECRET.encode() in got), f"the secret came back: {got!r}")
    was_refused = b"Coatcheck-Refusal: " in got
    is_whole = not (is_under_way or is_aborted or was_refused)
    ends_for_client = is_ended and not is_aborted
    readings = {name: read(got, method, ends_for_client) for name, read in REPLY_READERS.items()}
    for name, reading in readings.items():
        _hold(not reading.error, f"{name} cannot read what the client got: {reading.error} in {got!r}")
        final = [message for message in reading.messages if not message.is_interim]
        _hold(len(final) <= 1, f"{name} reads {len(final)} replies: {got!r}")
        is_read_whole = bool(final) and final[0].is_whole
        _hold(is_read_whole == (is_whole or was_refused), f"{name}: whole {is_read_whole}, sent {is_whole}: {got!r}")
        _hold(not reading.rest, f"{name}: bytes behind the reply: {reading.rest!r}")
    one, other = (reading.messages for reading in readings.values())
    _hold(len(one) == len(other), f"what the client got is read as {len(one)} and {len(other)} messages: {got!r}")
    for ours, theirs in zip(one, other, strict=True):
        _same("what the client got", ours, theirs)
    if was_refused:
        return False
    for name, read in REPLY_READERS.items():
        reading = read(raw, method, ends)
        if swapped:
            _mask(reading)
        _compare_reply(name, reading, one, is_pooled=is_pooled, is_whole=is_whole)
    return is_whole


def _compare_reply(name: str, reading: Reading, got: list[Message], *, is_pooled: bool, is_whole: bool) -> None:
    if is_pooled:
        _hold(not reading.rest, f"{name}: the connection goes on, with {reading.rest!r} unread")
    came = [message for message in reading.messages if message.first != (b"100",)]
    passed = [message for message in got if message.first != (b"100",)]
    for at, message in enumerate(passed):
        if at >= len(came):
            known = excuse(name, reading.error)
            _hold(known, f"{name} reads {len(came)} messages, then: {reading.error!r}; {message.first} was passed on")
            return
        where = f"{name} of {came[at].first}"
        _hold(came[at].first == message.first, f"{where}: {message.first} was passed on")
        _compare_fields(where, came[at].fields, message.fields)
        if message.is_whole:
            known = came[at].is_whole or excuse(name, reading.error)
            _hold(known, f"{where}: was passed on as whole; {reading.error}")
            is_same = len(came[at].body) == len(message.body) and _begins_alike(came[at].body, message.body)
            _hold(is_same or bool(reading.error), f"{where}: another body was passed on")
        else:
            _hold(_begins_alike(came[at].body, message.body), f"{where}: another body was begun")


def _mask(reading: Reading) -> None:
    """As the secret is in what the client gets."""
    secret = SECRET.encode()
    for message in reading.messages:
        message.body = message.body.replace(secret, _MASKED)
        message.fields = [
            (name.replace(secret, _MASKED), value.replace(secret, _MASKED)) for name, value in message.fields
        ]


def _begins_alike(came: bytes, got: bytes) -> bool:
    """Of a secret that was cut early the beginning may stand there still."""
    begins = zip(came, got, strict=False)
    return len(got) <= len(came) and all(one == other or one == _MASKED[0] for one, other in begins)


def _same(what: str, one: Message, other: Message) -> None:
    _hold(one.first == other.first, f"{what}: {one.first} and {other.first}")
    _hold(one.fields == other.fields, f"{what}: {one.fields} and {other.fields}")
    _hold(one.is_whole == other.is_whole, f"{what}: whole for one reader alone: {one} {other}")
    if one.is_whole:
        _hold(one.body == other.body, f"{what}: {one.body!r} and {other.body!r}")


def _hold(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ReadDifferentlyError(otherwise)
