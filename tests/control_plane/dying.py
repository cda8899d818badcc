"""A control plane that ends, as if killed, at a named point: `python -m tests.control_plane.dying FOLDER POINT COUNT`.

Rule: it is a process of its own, and dies by `os._exit`, so that nothing is tidied up.
"""

import asyncio
import os
import sys
from pathlib import Path

from control_plane.bootstrap import running
from tests.control_plane.serving import settings_in

DIED = 86


async def serve(folder: Path, point: str, count: int) -> None:
    """Prints its URL; dies when `point` is reached for the `count`-th time after that."""
    left, is_serving = count, False

    def at_point(reached: str) -> None:
        nonlocal left
        if is_serving and reached == point:
            left -= 1
            if left == 0:
                os._exit(DIED)

    async with running(settings_in(folder), at_fault_point=at_point) as control_plane:
        print(control_plane.url, flush=True)
        is_serving = True
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
