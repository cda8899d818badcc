"""The proxy and control plane of the egress proxy's own tests."""

from tests.egress_proxy.conftest import control_plane, upstream_ca, world

__all__ = ["control_plane", "upstream_ca", "world"]
