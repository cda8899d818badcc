"""A DNS server (RFC 1035) for tests: real UDP, a log of what it was asked, and answers that the test changes.

with NameServer() as names:
    names.answer("api.names.test", "127.0.0.1", ttl=60)
    … COATCHECK_PROXY_DNS_SERVERS=names.address …
    assert names.asked("api.names.test") == 1
"""

import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

A: Final = 1
CNAME: Final = 5
AAAA: Final = 28
NO_ERROR: Final = 0
SERVER_FAILURE: Final = 2
NO_SUCH_NAME: Final = 3


@dataclass(frozen=True, slots=True)
class Record:
    name: str
    kind: int
    data: bytes
    ttl: int


class NameServer:
    """See the module. Silent for names of `silent`; answers `NXDOMAIN` for what it does not know."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._records: dict[str, list[Record]] = {}
        self._failing: set[str] = set()
        self._asked: Counter[tuple[str, int]] = Counter()
        self._thread = threading.Thread(target=self._run, name="name-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    def answer(self, name: str, *addresses: str, ttl: int = 60, alias: tuple[str, int] | None = None) -> None:
        """`alias`: the name is one for this other name, for so many seconds, and that has the addresses."""
        owner = alias[0] if alias is not None else name
        records = [Record(name, CNAME, _encoded(owner), alias[1])] if alias is not None else []
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            records.append(Record(owner, AAAA if ":" in address else A, socket.inet_pton(family, address), ttl))
        self._failing.discard(name)
        self._records[name] = records

    def forget(self, name: str) -> None:
        self._records.pop(name, None)

    def fail(self, name: str) -> None:
        self._failing.add(name)

    def asked(self, name: str) -> int:
        """How often, for IPv4 addresses."""
        return self._asked[name, A]

    def _run(self) -> None:
        while True:
            try:
                query, peer = self._socket.recvfrom(4096)
                self._socket.sendto(self._reply(query), peer)
            except OSError:
                return

    def _reply(self, query: bytes) -> bytes:
        name, end = _decoded(query, 12)
        kind = struct.unpack("!H", query[end : end + 2])[0]
        self._asked[name, kind] += 1
        question = query[12 : end + 4]
        records = [each for each in self._records.get(name, []) if each.kind in (kind, CNAME)]
        code = NO_ERROR if name in self._records else NO_SUCH_NAME
        if name in self._failing:
            code, records = SERVER_FAILURE, []
        header = query[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, len(records), 0, 0)
        answers = b"".join(
            _encoded(each.name) + struct.pack("!HHIH", each.kind, 1, each.ttl, len(each.data)) + each.data
            for each in records
        )
        return header + question + answers


def _encoded(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def _decoded(message: bytes, at: int) -> tuple[str, int]:
    """The name there, lower case, and where it ends. Queries compress nothing."""
    labels = []
    while length := message[at]:
        labels.append(message[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    return ".".join(labels), at + 1
