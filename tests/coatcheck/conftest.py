"""A local stack that the tests of one worker share, started by its own command, and an upstream that it trusts."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from tests.support.local_stack import LocalStack
from tests.support.upstream import Upstream, plain


@dataclass(frozen=True, slots=True)
class Machine:
    """A user's machine: a running stack, and one credential with an upstream that wants its key."""

    stack: LocalStack
    upstream: Upstream
    secret: str
    """The real key of the credential `weather`."""


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
    secret = f"sk-real-{secrets.token_hex(20)}"
    shared_stack.add_credential("weather", url=upstream.url, secret=secret)
    yield Machine(shared_stack, upstream, secret)
    for credential in shared_stack.json("credential", "list"):
        shared_stack.coatcheck("credential", "delete", credential["name"])
