"""The load generator: one closed loop per connection, the next request as soon as the reply is whole.

The same one drives every row, so that ratios compare proxies and not generators. Runs as a process of its own, pinned
to the core the proxy does not have: `python -m bench.load` reads one `Plan` as JSON and prints one `Measured`.

Rule: only a whole 200 counts, and the origin answers 200 to nothing but the real key. One other answer, one broken
connection, and the run fails: a fast refusal must never look like a fast swap.

Hot path: epoll over plain non-blocking sockets, no event loop, no task, no future. OpenSSL reads and writes the socket
itself, without memory BIOs between: with an event loop's TLS this end took three times as long as the proxy measured.
"""

import gc
import json
import re
import select
import socket
import ssl
import sys
import time
from array import array
from dataclasses import asdict, dataclass, field

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
ACCEPTED = b"HTTP/1.1 200"
READ_BYTES = 65536
FIRST_REPLY_SECONDS = 30.0
_CPUCLOCK_SCHED = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send, where, and for how long."""

    host: str
    port: int
    request: str
    """One whole head, Latin-1."""
    body_bytes: int = 0
    """The body that the head announces; it is made here."""
    connections: int = 0
    warm_up_seconds: float = 0.0
    seconds: float = 0.0
    connect: str | None = None
    """A whole CONNECT request, when the first hop is a forward proxy."""
    server_name: str | None = None
    """TLS to this name, after CONNECT if there is one; None for clear text."""
    ca_file: str | None = None
    watch_pids: list[int] = field(default_factory=list)
    """Whose processor time is measured over the same window."""


@dataclass(frozen=True, slots=True)
class Measured:
    requests_per_second: float
    p50_microseconds: float
    p99_microseconds: float
    requests: int
    watched_cpu_share: float
    """Of one core, 0 to 1 for a single-threaded program: well below 1 means the load, not the proxy, was the limit."""
    cpu_microseconds_per_request: float


class NotARunToCountError(Exception):
    """Something else than a whole 200 came back."""


class Lane:
    """One connection, one request at a time."""

    def __init__(self, sock: socket.socket, request: bytes) -> None:
        self.sock = sock
        self._request = request
        self._pending = b""
        self._sent_at = 0
        self.unsent = 0
        """How many of the request's last bytes the socket has not taken yet."""

    def send(self) -> None:
        self._sent_at = time.perf_counter_ns()
        self.unsent = len(self._request)
        self.send_on()

    def send_on(self) -> None:
        """As much as the socket takes."""
        while self.unsent:
            try:
                self.unsent -= self.sock.send(memoryview(self._request)[-self.unsent :])
            except (ssl.SSLWantWriteError, BlockingIOError):
                return

    def receive(self, buffer: memoryview) -> int:
        """Nanoseconds from request to whole reply, the next request sent; 0 while the reply is not whole."""
        try:
            count = self.sock.recv_into(buffer)
        except (ssl.SSLWantReadError, BlockingIOError):  # a session ticket, or half a record
            return 0
        data = self._pending + bytes(buffer[:count])
        head_end = data.find(b"\r\n\r\n")
        length = CONTENT_LENGTH.search(data, 0, head_end + 2) if head_end > 0 else None
        if not count or (head_end > 0 and length is None) or not data.startswith(ACCEPTED[: len(data)]):
            raise NotARunToCountError(data[:400].decode("latin-1") or "connection closed")
        if length is None or len(data) < head_end + 4 + int(length[1]):
            self._pending = data
            return 0
        self._pending = b""
        taken = time.perf_counter_ns() - self._sent_at
        self.send()
        return taken


def prove(plan: Plan) -> None:
    """One request, however long its first reply takes. Raises `NotARunToCountError`."""
    lane = _open(plan, _context(plan))
    with lane.sock:
        lane.sock.settimeout(FIRST_REPLY_SECONDS)
        lane.send()
        while not lane.receive(memoryview(bytearray(READ_BYTES))):
            pass


def measure(plan: Plan) -> Measured:
    """Raises `NotARunToCountError`."""
    context = _context(plan)
    lanes = {lane.sock.fileno(): lane for lane in (_open(plan, context) for _ in range(plan.connections))}
    poll = select.epoll()
    for descriptor, lane in lanes.items():
        lane.send()
        poll.register(descriptor, _awaited(lane))
    _drive(poll, lanes, plan.warm_up_seconds)
    gc.collect()
    gc.disable()
    before, started = cpu_seconds(plan.watch_pids), time.perf_counter()
    nanoseconds = _drive(poll, lanes, plan.seconds)
    elapsed, used = time.perf_counter() - started, cpu_seconds(plan.watch_pids) - before
    if not nanoseconds:
        raise NotARunToCountError("no reply at all")
    return _summary(nanoseconds, elapsed, used)


def _drive(poll: select.epoll, lanes: dict[int, Lane], seconds: float) -> "array[int]":
    taken = array("q")
    buffer = memoryview(bytearray(READ_BYTES))
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for descriptor, events in poll.poll(0.1):
            lane = lanes[descriptor]
            if events & select.EPOLLOUT:
                lane.send_on()
                poll.modify(descriptor, _awaited(lane))
            if events & ~select.EPOLLOUT and (nanoseconds := lane.receive(buffer)):
                taken.append(nanoseconds)
                if lane.unsent:
                    poll.modify(descriptor, _awaited(lane))
    return taken


def _awaited(lane: Lane) -> int:
    return select.EPOLLIN | (select.EPOLLOUT if lane.unsent else 0)


def _context(plan: Plan) -> ssl.SSLContext | None:
    return ssl.create_default_context(cafile=plan.ca_file) if plan.server_name else None


def _open(plan: Plan, context: ssl.SSLContext | None) -> Lane:
    sock = socket.create_connection((plan.host, plan.port), timeout=10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if plan.connect is not None:
        sock.sendall(plan.connect.encode("latin-1"))
        answer = sock.recv(READ_BYTES)
        if not answer.startswith(ACCEPTED) or not answer.endswith(b"\r\n\r\n"):
            raise NotARunToCountError(f"CONNECT was answered {answer[:200]!r}")
    if context is not None:
        sock = context.wrap_socket(sock, server_hostname=plan.server_name)
    sock.setblocking(False)
    return Lane(sock, plan.request.encode("latin-1") + body(plan.body_bytes))


def body(length: int) -> bytes:
    """JSON of so many bytes, as one asks a model."""
    if not length:
        return b""
    before, after = b'{"messages":[{"role":"user","content":"', b'"}]}'
    words = b"What does a cloakroom attendant know of the coats? "
    room = length - len(before) - len(after)
    return before + (words * (room // len(words) + 1))[:room] + after


def _summary(nanoseconds: "array[int]", elapsed: float, cpu_seconds: float) -> Measured:
    ordered = sorted(nanoseconds)
    count = len(ordered)
    return Measured(
        requests_per_second=count / elapsed,
        p50_microseconds=ordered[count // 2] / 1000,
        p99_microseconds=ordered[min(count - 1, count * 99 // 100)] / 1000,
        requests=count,
        watched_cpu_share=cpu_seconds / elapsed,
        cpu_microseconds_per_request=cpu_seconds / count * 1e6,
    )


def cpu_seconds(pids: list[int]) -> float:
    """User and system time so far, of all their threads: the clock that clock_getcpuclockid(3) names for a process."""
    return sum(time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED) for pid in pids)


def main() -> None:
    print(json.dumps(asdict(measure(Plan(**json.load(sys.stdin))))))


if __name__ == "__main__":
    main()
