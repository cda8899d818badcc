"""CMD itself: started, signalled, waited for; on a relayed pseudo-terminal where it is sandboxed and ours is one.

Rules. A sandboxed CMD never gets our own terminal: whoever holds that can type into the shell behind it (TIOCSTI).
Without a sandbox CMD shares our terminal and process group, so that job control works as without us; what the terminal
then sends to the whole group is not sent a second time.
"""

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import subprocess
import termios
import threading
import tty
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from coatcheck.terminal import CommandError

PASSED_ON: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGWINCH,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_FROM_THE_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})
_SIGNAL_STATUS: Final = 128
_READ_BYTES: Final = 65_536
_LAST_OUTPUT_SECONDS: Final = 2.0
_LAST_WORDS_SECONDS: Final = 3.0


class NotRunnableError(CommandError):
    """CMD could not be started at all: 127 when it is not there, 126 when it is not a program (as shells have it)."""

    def __init__(self, command: str, error: OSError) -> None:
        super().__init__(f"cannot run {command}: {error.strerror}", "check its name, or give its full path")
        self.exit_code = 127 if isinstance(error, FileNotFoundError) else 126


@dataclass(frozen=True, slots=True)
class Child:
    """A started CMD."""

    process: "subprocess.Popen[bytes]"
    send: Callable[[int], None]
    """Deliver a signal to CMD itself."""
    shares_our_terminal: bool
    on_resize: Callable[[], None] | None = None

    async def wait(self) -> int:
        """CMD's own status; 128 + n when signal n ended it."""
        status = await asyncio.to_thread(self.process.wait)
        return status if status >= 0 else _SIGNAL_STATUS - status

    def end(self) -> None:
        """For the case that we cannot go on: CMD does not run on unattended."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_LAST_WORDS_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def take(self, number: signal.Signals) -> None:
        """A signal that we got."""
        if number is signal.SIGWINCH and self.on_resize is not None:
            self.on_resize()
        elif not (self.shares_our_terminal and number in _FROM_THE_TERMINAL and _in_foreground()):
            with contextlib.suppress(ProcessLookupError):
                self.send(number)


class PassedOnSignals:
    """From before CMD starts until it has ended: what comes too early waits for it, what comes later for nobody."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._early: list[signal.Signals] = []

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in PASSED_ON:
            loop.add_signal_handler(number, self._take, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Held back from here to our own end: what is left to do is to revoke, and no signal may come before that.
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        loop = asyncio.get_running_loop()
        for number in PASSED_ON:
            loop.remove_signal_handler(number)

    def to(self, child: Child) -> None:
        self._child = child
        while self._early:
            child.take(self._early.pop(0))

    def _take(self, number: signal.Signals) -> None:
        if self._child is None:
            self._early.append(number)
        else:
            self._child.take(number)


def start_beside_us(command: Sequence[str], environment: dict[str, str]) -> Child:
    """CMD without a sandbox. Raises `NotRunnableError`."""
    try:
        process = subprocess.Popen(list(command), env=environment)  # noqa: S603 - what the user asked for
    except OSError as error:
        raise NotRunnableError(command[0], error) from None
    return Child(process, process.send_signal, shares_our_terminal=True)


class RelayedTerminal:
    """A pseudo-terminal for CMD, its bytes carried to and from ours."""

    def __init__(self) -> None:
        self._ours = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        self._master, self._slave = os.openpty()
        self._before: list[int | list[bytes | int]] | None = None
        self._stop_reading, self._stop_writing = os.pipe()
        self._output: threading.Thread | None = None
        attributes = termios.tcgetattr(self._ours[0])
        if not self._is_interactive:
            attributes[1] &= ~termios.OPOST  # our terminal, left as it is, does that already
        termios.tcsetattr(self._slave, termios.TCSANOW, attributes)
        self.resize()

    @staticmethod
    def is_wanted() -> bool:
        return any(os.isatty(descriptor) for descriptor in (0, 1, 2))

    @property
    def _is_interactive(self) -> bool:
        return 0 in self._ours and _in_foreground()

    def stream(self, descriptor: int) -> int | None:
        """What CMD gets as this standard stream: the pseudo-terminal instead of ours, else what we have (None)."""
        return self._slave if descriptor in self._ours else None

    def resize(self) -> None:
        size = fcntl.ioctl(self._ours[0], termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)  # the kernel tells CMD with SIGWINCH

    def __enter__(self) -> Self:
        return self

    def relay(self) -> None:
        """Begin, once CMD holds its end."""
        os.close(self._slave)
        self._slave = -1
        if self._is_interactive:
            self._before = termios.tcgetattr(0)
            tty.setraw(0, termios.TCSADRAIN)
            threading.Thread(target=self._carry_input, daemon=True, name="terminal input").start()
        self._output = threading.Thread(target=self._carry_output, daemon=True, name="terminal output")
        self._output.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._slave >= 0:
            os.close(self._slave)
        os.close(self._stop_writing)
        if self._output is not None:
            self._output.join(_LAST_OUTPUT_SECONDS)
        if self._before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def _carry_output(self) -> None:
        target = next((descriptor for descriptor in (1, 2) if descriptor in self._ours), self._ours[0])
        with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more
            while data := os.read(self._master, _READ_BYTES):
                _write_all(target, data)

    def _carry_input(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                readable, _, _ = select.select([0, self._stop_reading], [], [])
                if self._stop_reading in readable or not (data := os.read(0, _READ_BYTES)):
                    return
                _write_all(self._master, data)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _in_foreground() -> bool:
    """Whether the terminal sends its signals to our process group."""
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            return os.tcgetpgrp(descriptor) == os.getpgrp()
    return False
