"""Connections that have had one reply and then say nothing: what they cost, and which worker has them."""

import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.contestants import Way
from bench.load import ACCEPTED, NotARunToCountError, Plan

FIRST: Final = 250
"""Connections that are open before it is weighed: what is set up once is no connection's cost."""
MORE: Final = 1000
PAUSE_SECONDS: Final = 3.0
"""After each `FIRST` of them: connections are opened over a while, and then say nothing."""
AT_ONCE: Final = 16


def kibibytes_a_connection(way: Way) -> float:
    """Resident memory (RSS) of the watched processes, over `MORE` further connections."""
    with ExitStack() as stack:
        _open(stack, way, FIRST)
        time.sleep(PAUSE_SECONDS)
        before = _resident_kibibytes(way.watch_pids)
        for _ in range(MORE // FIRST):
            _open(stack, way, FIRST)
            time.sleep(PAUSE_SECONDS)
        return (_resident_kibibytes(way.watch_pids) - before) / MORE


def share_of_the_busiest(way: Way, pids: list[int], *, connections: int) -> float:
    """Which part of the connections one process has, 0 to 1."""
    with ExitStack() as stack:
        _open(stack, way, connections)
        accepted = _accepted_sockets(way.port)
        counts = [len(accepted & _sockets_of(pid)) for pid in pids]
    if sum(counts) != connections:
        raise NotARunToCountError(f"{sum(counts)} of {connections} connections were found")
    return max(counts) / connections


def _open(stack: ExitStack, way: Way, count: int) -> None:
    plan = way.get()
    context = ssl.create_default_context(cafile=plan.ca_file) if plan.server_name else None
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for sock in pool.map(lambda _: _opened(plan, context), range(count)):
            stack.callback(sock.close)


def _opened(plan: Plan, context: ssl.SSLContext | None) -> socket.socket:
    sock = socket.create_connection((plan.host, plan.port), timeout=20)
    if plan.connect is not None:
        _ask(sock, plan.connect)
    if context is not None:
        sock = context.wrap_socket(sock, server_hostname=plan.server_name)
    _ask(sock, plan.request)
    return sock


def _ask(sock: socket.socket, request: str) -> None:
    """The reply is read as far as it comes at once; nobody asks for the rest."""
    sock.sendall(request.encode("latin-1"))
    reply = sock.recv(65536)
    if not reply.startswith(ACCEPTED):
        raise NotARunToCountError(reply[:400].decode("latin-1") or "connection closed")


def _resident_kibibytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return total


def _accepted_sockets(port: int) -> set[str]:
    """Inodes of established connections to this port (proc(5): `/proc/net/tcp`)."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {fields[9] for fields in lines if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "01"}


def _sockets_of(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found
