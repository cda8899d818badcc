"""A local stack that the tests of one worker share, started by its own command, and an upstream that it trusts.

Rule: what depends on being a process of its own (`up`, `run`, pipes, signals) is tested as one. What only talks to the
control plane is typed in this process, by the same function that the command calls: that takes a tenth of the time.
"""

import contextlib
import io
import json
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from coatcheck.cli import run_command
from tests.support.local_stack import LocalStack
from tests.support.upstream import Upstream, plain


@dataclass(frozen=True, slots=True)
class Said:
    """What a command wrote, and how it ended."""

    status: int
    out: str
    err: str


def type_command(*arguments: str, given: str = "") -> Said:
    """One command in this process, `given` piped to it."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run_command(arguments)
    finally:
        sys.stdin = before
    return Said(status, out.getvalue(), err.getvalue())


@dataclass(frozen=True, slots=True)
class Machine:
    """A user's machine: a running stack, and one credential with an upstream that wants its key."""

    stack: LocalStack
    upstream: Upstream
    secret: str
    """The real key of the credential `weather`."""

    def typed(self, *arguments: str, given: str = "", status: int = 0) -> Said:
        """One command. Raises `AssertionError` with its words when it ends with another status."""
        said = type_command("--home", str(self.stack.home), *arguments, given=given)
        assert said.status == status, f"{arguments[:2]} ended with {said.status}: {said.out}{said.err}"
        return said

    def json(self, *arguments: str) -> Any:
        return json.loads(self.typed("--json", *arguments).out)

    def add(self, name: str, *, url: str = "", secret: str = "k", more: tuple[str, ...] = ()) -> None:
        self.typed("credential", "add", name, "--destination", url or self.upstream.url, "--allow-private", *more,
                   given=secret)  # fmt: skip


@pytest.fixture(scope="session")
def upstream_ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def upstream_ca_file(upstream_ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("upstream") / "ca.pem"
    upstream_ca.cert_pem.write_to_path(file)
    return file


@pytest.fixture(scope="session")
def shared_stack(upstream_ca_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("machine"), upstream_ca=upstream_ca_file) as stack:
        yield stack


@pytest.fixture
def upstream(upstream_ca: trustme.CA) -> Iterator[Upstream]:
    with Upstream(upstream_ca) as running:
        running.default = plain(b"sunny\n")
        yield running


@pytest.fixture
def machine(shared_stack: LocalStack, upstream: Upstream) -> Iterator[Machine]:
    """The shared stack with the credential `weather`, and with nothing else."""
    machine = Machine(shared_stack, upstream, f"sk-real-{secrets.token_hex(20)}")
    machine.add("weather", secret=machine.secret)
    yield machine
    for credential in machine.json("credential", "list"):
        machine.typed("credential", "delete", credential["name"])
