"""One proxy and one simulated control plane for the whole package; each test makes its own upstream and tenant."""

from collections.abc import Iterator

import pytest
import trustme

from tests.egress_proxy.world import World
from tests.support.control_plane_simulator import ControlPlaneSimulator
from tests.support.upstream import Upstream


@pytest.fixture(scope="session")
def upstream_ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlaneSimulator]:
    with ControlPlaneSimulator() as simulator:
        yield simulator


@pytest.fixture(scope="session")
def world(
    tmp_path_factory: pytest.TempPathFactory, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA
) -> Iterator[World]:
    """The proxy that tests share as long as they do not change its settings."""
    with World.start(tmp_path_factory.mktemp("world"), control_plane, upstream_ca) as world:
        yield world


@pytest.fixture
def upstream(upstream_ca: trustme.CA) -> Iterator[Upstream]:
    with Upstream(upstream_ca) as upstream:
        yield upstream


@pytest.fixture
def other_upstream(upstream_ca: trustme.CA) -> Iterator[Upstream]:
    """A second one, for what must stay silent."""
    with Upstream(upstream_ca) as upstream:
        yield upstream
