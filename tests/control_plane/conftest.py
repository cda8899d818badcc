"""What the tests of the control plane share: one server a worker, one tenant a test."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.control_plane.databases import database, empty_postgresql  # noqa: F401 (fixtures)
from tests.control_plane.postgresql import postgresql
from tests.control_plane.serving import ControlPlane, control_plane_in
from tests.control_plane.workspace import Workspace

_numbers = count(1)

OwnControlPlane = Callable[..., ControlPlane]


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """PostgreSQL: its URL up to the database's name."""
    with postgresql() as url:
        yield url


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Shared by the tests of one worker: for those that neither touch its clock nor its files."""
    with control_plane_in(tmp_path_factory.mktemp("control-plane")) as serving:
        yield serving


@pytest.fixture
def workspace(control_plane: ControlPlane) -> Workspace:
    """A tenant of this test's own."""
    return Workspace(control_plane, f"tenant-{next(_numbers)}")


@pytest.fixture
def other_workspace(control_plane: ControlPlane) -> Workspace:
    return Workspace(control_plane, f"other-{next(_numbers)}")


@pytest.fixture
def own_control_plane(tmp_path: Path) -> Iterator[OwnControlPlane]:
    """Starts a control plane for this test alone, with settings of its own."""
    with ExitStack() as stack:

        def start(folder: Path = tmp_path, **settings: Any) -> ControlPlane:
            manager: AbstractContextManager[ControlPlane] = control_plane_in(folder, **settings)
            return stack.enter_context(manager)

        yield start


@pytest.fixture
def granted(workspace: Workspace) -> Workspace:
    """With the credential `example`, granted to `alice`."""
    workspace.add_credential()
    workspace.grant()
    return workspace
