"""The sandbox's first process: opens the way out, then becomes CMD. Standard library only; run as a file.

    python -I -S launcher.py CHANNEL FORWARD_PORT REVERSE_PORT terminal|none CMD …

The sandbox has a network namespace of its own with nothing in it but loopback. The listeners are opened in there and
handed out through CHANNEL (SCM_RIGHTS): the relay outside accepts on them, so that connections keep every property of
TCP, and no process inside has to pass bytes on. With them goes a pidfd of CMD, to which signals are passed on.
"""

import array
import fcntl
import os
import signal
import socket
import sys
import termios

BACKLOG = 512
NOT_FOUND, NOT_RUNNABLE = 127, 126


def main(arguments: list[str]) -> int:
    channel, forward_port, reverse_port, terminal, *command = arguments
    _hand_out(int(channel), (int(forward_port), int(reverse_port)))
    if terminal == "terminal":
        _take_terminal()
    # Python ignores these; a program that is started expects the defaults.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - running what the user asked for is what this is for
    except OSError as error:
        sys.stderr.write(f"coatcheck: cannot run {command[0]} in the sandbox: {error.strerror}\n")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE


def _hand_out(descriptor: int, ports: tuple[int, ...]) -> None:
    with socket.socket(fileno=descriptor) as channel:
        listeners = [socket.create_server(("127.0.0.1", port), backlog=BACKLOG) for port in ports]
        handed_out = array.array("i", [*(listener.fileno() for listener in listeners), os.pidfd_open(os.getpid())])
        channel.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handed_out)])
        os.close(handed_out[-1])
        for listener in listeners:
            listener.close()


def _take_terminal() -> None:
    """Make the relayed pseudo-terminal the controlling one of a session of our own."""
    os.setsid()
    terminal = next(descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor))
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
