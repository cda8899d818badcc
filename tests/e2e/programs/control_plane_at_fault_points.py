"""The control plane as it is served, and a folder that says what is to happen at its fault points.

    python control_plane_at_fault_points.py FOLDER

`reached` in the folder gets the name of every point. `at` holds the point at which something happens, once, and what:
`kill` ends this process like a power cut, `wait` stops all of it until somebody makes `go_on`. For tests that kill.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import uvloop

from control_plane import logs
from control_plane.bootstrap import running
from control_plane.config import Settings


class FaultPoints:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, point: str) -> None:
        with (self._folder / "reached").open("a") as reached:
            reached.write(point + "\n")
        wanted = self._folder / "at"
        if not wanted.exists():
            return
        at, what = wanted.read_text().split()
        if at == point:
            wanted.unlink()
            self._happens(what)

    def _happens(self, what: str) -> None:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        (self._folder / "waiting").touch()
        go_on = self._folder / "go_on"
        while not go_on.exists():
            time.sleep(0.002)
        go_on.unlink()


async def main(folder: Path) -> None:
    settings = Settings.from_environment(os.environ)
    logs.configure(settings.log_level)
    async with running(settings, at_fault_point=FaultPoints(folder)) as control_plane:
        print(json.dumps({"event": "listening", "url": control_plane.url}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1])))
