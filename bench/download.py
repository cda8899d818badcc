"""A gigabyte of model's messages, and the processor time that it costs whoever forwards it."""

import socket
from pathlib import Path
from typing import Final

from bench.load import ACCEPTED, CONTENT_LENGTH, NotARunToCountError, Plan, cpu_seconds
from bench.origin import REPLY

GIGABYTE: Final = 10**9
READ_BYTES: Final = 1 << 20


def write_download(path: Path) -> None:
    line = f"{REPLY}\n".encode()
    block = line * (READ_BYTES // len(line))
    with path.open("wb") as file:
        while file.tell() < GIGABYTE:
            file.write(block)


def cpu_seconds_per_gigabyte(plan: Plan) -> float:
    """Of the watched processes. Raises `NotARunToCountError` unless all of it comes."""
    buffer = bytearray(READ_BYTES)
    with socket.create_connection((plan.host, plan.port), timeout=60) as sock:
        before = cpu_seconds(plan.watch_pids)
        sock.sendall(plan.request.encode("latin-1"))
        head = sock.recv(READ_BYTES)
        end, length = head.find(b"\r\n\r\n"), CONTENT_LENGTH.search(head)
        if not head.startswith(ACCEPTED) or end < 0 or length is None:
            raise NotARunToCountError(head[:400].decode("latin-1"))
        missing = int(length[1]) - (len(head) - end - 4)
        while missing > 0:
            count = sock.recv_into(buffer)
            if not count:
                raise NotARunToCountError(f"the download ended {missing} bytes early")
            missing -= count
        return (cpu_seconds(plan.watch_pids) - before) / (int(length[1]) / 10**9)
