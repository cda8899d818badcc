"""Server-sent events at an even pace, and how long each of them took from the origin's write to the client's read.

    python -m bench.stream emit PORT          the key comes by standard input
    python -m bench.stream read               a plan comes by standard input; prints one `Delays` as JSON

Rule: an event holds the moment of its writing (CLOCK_MONOTONIC, which all processes of a machine share), and the origin
emits nothing to anybody but the real key. What a proxy adds is the difference to no proxy at all, in the same round.
"""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Final

from bench.load import ACCEPTED, NotARunToCountError, Plan

EVENTS_PATH: Final = "/v1/events"
EVENTS_PER_SECOND: Final = 2000
EVENTS_OF_A_RUN: Final = 3000
SKIPPED: Final = 500
"""The first ones, while connections and caches get warm."""
_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_AT: Final = re.compile(rb'"at":(\d+)')
_BETWEEN_CHUNKS: Final = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")


@dataclass(frozen=True, slots=True)
class Delays:
    p50_microseconds: float
    p99_microseconds: float
    events: int


def start_events(*, key: str, port: int) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-m", "bench.stream", "emit", str(port)], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(key.encode())
    process.stdin.close()
    return process


def emit(port: int, key: bytes) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_serve, args=(sock, key), daemon=True).start()


def _serve(sock: socket.socket, key: bytes) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, contextlib.suppress(ConnectionError):  # whoever forwarded it has gone
        while head := _head(sock):
            if b": Bearer " + key + b"\r\n" not in head:
                sock.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
                continue
            sock.sendall(_HEAD)
            begun = time.monotonic()
            for number in range(EVENTS_OF_A_RUN):
                time.sleep(max(0.0, begun + number / EVENTS_PER_SECOND - time.monotonic()))
                event = (
                    b'data: {"type":"content_block_delta","delta":{"text":" coat"},"at":%d}\n\n' % time.monotonic_ns()
                )
                sock.sendall(b"%x\r\n%b\r\n" % (len(event), event))
            sock.sendall(b"0\r\n\r\n")


def _head(sock: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = sock.recv(65536)
        if not data:
            return b""
        head += data
    return head


def read(plan: Plan) -> Delays:
    """Raises `NotARunToCountError`."""
    with socket.create_connection((plan.host, plan.port), timeout=20) as sock:
        sock.sendall(plan.request.encode("latin-1"))
        taken: list[int] = []
        pending = b""
        while not pending.endswith(b"0\r\n\r\n"):
            data = sock.recv(65536)
            now, is_first = time.monotonic_ns(), not taken
            pending += data
            if not data or (is_first and not pending.startswith(ACCEPTED)):
                raise NotARunToCountError(pending[:400].decode("latin-1") or "connection closed")
            *whole, pending = pending.split(b"\n\n")
            # Whoever forwards it may cut it into other chunks.
            taken += [now - int(_AT.findall(_BETWEEN_CHUNKS.sub(b"", event))[0]) for event in whole]
    ordered = sorted(taken[SKIPPED:])
    if len(taken) != EVENTS_OF_A_RUN:
        raise NotARunToCountError(f"{len(taken)} events of {EVENTS_OF_A_RUN}")
    return Delays(ordered[len(ordered) // 2] / 1000, ordered[len(ordered) * 99 // 100] / 1000, len(ordered))


if __name__ == "__main__":
    if sys.argv[1] == "emit":
        emit(int(sys.argv[2]), sys.stdin.buffer.read())
    else:
        print(json.dumps(asdict(read(Plan(**json.load(sys.stdin))))))
