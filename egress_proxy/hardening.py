"""A process that holds secrets leaves no image of its memory behind, and no file that others can read."""

import ctypes
import os
import resource
import sys
from typing import Final

_PR_SET_DUMPABLE: Final = 4


def forbid_core_dumps() -> None:
    """No core file, and on Linux no reading of our memory by other processes of the same user (`ptrace`, /proc/mem).

    For a process of its own: not for one that shares it with the local stack, whose owner may look where he likes.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def keep_files_private() -> None:
    """Whatever this process makes, sockets too, is its own user's alone."""
    os.umask(0o077)
