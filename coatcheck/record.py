"""`stack.json`: which process is this folder's stack, where it listens, and whether it still is that process.

Rule: a secret goes to nobody but the stack of this folder. Ports outlive their process: whoever binds one after the
stack has ended would be sent the admin token. So the record counts only while `stack.lock` is held and the process it
names is the very one that wrote it (its start, not its number alone). Asked anew whenever something secret is to be
sent; that also finds a stack that was started again on other ports.
"""

import fcntl
import json
import os
import ssl
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import httpx

from coatcheck.state import StateFolder, write_private
from coatcheck.terminal import CommandError

TRUSTS_NOBODY: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For plain HTTP on loopback: reading the machine's authorities would take longer than the command itself."""

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_START_FIELD: Final = 22  # proc_pid_stat(5): in clock ticks since boot


@dataclass(frozen=True, slots=True)
class RunningStack:
    """What `stack.json` says while a stack is ready."""

    pid: int
    control_plane_url: str
    forward_port: int
    reverse_port: int
    admin_port: int
    started_at: float
    until_unused: bool
    """Started for a command, and ends with the last one that uses it."""
    upstream_ca: tuple[str, ...] = ()
    start_identity: str = ""
    """Tells the process from a later one of the same number."""

    @property
    def forward_url(self) -> str:
        return f"http://127.0.0.1:{self.forward_port}"

    @property
    def reverse_url(self) -> str:
        return f"http://127.0.0.1:{self.reverse_port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def is_ready(self) -> bool:
        """Whether the proxy says that it swaps."""
        try:
            ready = httpx.get(f"{self.admin_url}/readyz", verify=TRUSTS_NOBODY, trust_env=False, timeout=3)
        except httpx.HTTPError:
            return False
        return ready.status_code == httpx.codes.OK


def read_record(state: StateFolder) -> RunningStack | None:
    """What `stack.json` says, true or stale."""
    try:
        found: dict[str, Any] = json.loads(state.stack_file.read_text())
        known = {field.name for field in fields(RunningStack)}
        record = {name: value for name, value in found.items() if name in known}
        return RunningStack(**{**record, "upstream_ca": tuple(record.get("upstream_ca", ()))})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def write_record(state: StateFolder, stack: RunningStack) -> None:
    write_private(state.stack_file, json.dumps(asdict(stack), indent=2) + "\n")


def living_stack(state: StateFolder) -> RunningStack | None:
    """The stack of this folder, as long as it is the process that wrote its record."""
    stack = read_record(state)
    if stack is None or is_unlocked(state.stack_lock):
        return None
    return stack if stack.start_identity == start_identity(stack.pid) else None


def own_stack(state: StateFolder) -> RunningStack:
    """Raises `CommandError` where there is none: then nothing may be sent to its ports."""
    stack = living_stack(state)
    if stack is None:
        raise CommandError(
            f"the local stack of {state.home} has ended, and nothing was sent to whoever has its port now",
            "start it with 'coatcheck up --detach'",
        )
    return stack


def start_identity(pid: int) -> str:
    """When a process started, and on which boot; "ended" for one that is not there."""
    try:
        _, _, after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        return f"{_BOOT.read_text().strip()}/{after_name.split()[_START_FIELD - 3]}"
    except (OSError, IndexError):
        return _without_proc(pid)


def is_unlocked(lock: Path) -> bool:
    """Whether nobody holds this lock."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _without_proc(pid: int) -> str:
    """Where there is no /proc, a living process of ours is all that can be told."""
    if Path("/proc/self").exists():
        return "ended"
    try:
        os.kill(pid, 0)
    except OSError:
        return "ended"
    return "unknown"
