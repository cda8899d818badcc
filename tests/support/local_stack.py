"""A user's own machine: one state folder, the `coatcheck` command, and nothing of the shell it was started from."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.support.processes import COMMAND, clean_environment

COMMAND_SECONDS: Final = 90.0
ANY_PORTS: Final = [part for name in ("control-plane", "proxy", "reverse", "admin") for part in (f"--{name}-port", "0")]


class LocalStack:
    """`with LocalStack(folder, …) as stack:` is up inside, and down after. `user_home` is what HOME names.

    Commands are typed in `project`, a folder below it.
    """

    def __init__(self, folder: Path, *, upstream_ca: Path, settings: Mapping[str, str] | None = None) -> None:
        self.home = folder / "state"
        self.user_home = folder / "user"
        self.project = self.user_home / "project"
        self.project.mkdir(parents=True, exist_ok=True)
        self._upstream_ca = upstream_ca
        self._settings = dict(settings or {})

    def __enter__(self) -> Self:
        self.coatcheck("up", "--detach", *ANY_PORTS, "--upstream-ca", str(self._upstream_ca))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(self._command("down"), env=self._environment(), timeout=COMMAND_SECONDS, check=False)

    def coatcheck(
        self, *arguments: str, given: str = "", status: int = 0, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run one command. Raises `AssertionError` with its words when it ends with another status."""
        done = subprocess.run(
            self._command(*arguments), env=self._environment(**variables), input=given, capture_output=True, text=True,
            timeout=COMMAND_SECONDS, cwd=self.project, check=False,
        )  # fmt: skip
        assert done.returncode == status, f"{arguments[:2]} exited {done.returncode}: {done.stdout}{done.stderr}"
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.coatcheck("--json", *arguments).stdout)

    def add_credential(self, name: str, *, url: str, secret: str, more: tuple[str, ...] = ()) -> None:
        """Stored from standard input, and granted to the local subject."""
        self.coatcheck("credential", "add", name, "--destination", url, "--allow-private", *more, given=secret)

    def files(self) -> list[Path]:
        """Everything the stack wrote."""
        return [path for path in self.home.rglob("*") if path.is_file()]

    def _command(self, *arguments: str) -> list[str]:
        return [str(COMMAND), "--home", str(self.home), *arguments]

    def _environment(self, **variables: str) -> dict[str, str]:
        kept = clean_environment(HOME=str(self.user_home), TERM="dumb") | self._settings | variables
        return kept | {"PATH": os.environ["PATH"]}


def has_working_bubblewrap() -> bool:
    """Whether sandboxes can be made here at all."""
    command = shutil.which("bwrap")
    if command is None:
        return False
    tried = [command, "--ro-bind", "/", "/", "--unshare-all", "true"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0
