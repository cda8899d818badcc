"""Whether a change makes a credential's reach wider, as a property over all changes."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from control_plane.contract.destination import Destination, Endpoint
from control_plane.contract.placement import BEARER, BasicPlacement, HeaderPlacement, Placement, QueryPlacement
from control_plane.core.reach import Reach, widened_fields

ENDPOINTS = [
    Endpoint(scheme, host, port)
    for scheme, host, port in [("https", "a.example", 443), ("https", "a.example", 8443), ("https", "b.example", 443)]
] + [Endpoint("http", "a.example", 443)]
PREFIXES = ["/", "/v1", "/v1/", "/v1/models", "/v10", "/v2"]
PATHS = ["/", "/v1", "/v1/", "/v1/x", "/v1/models", "/v1/models/y", "/v10", "/v10/x", "/v2", "/other", "/v1/../x"]
METHODS = ["GET", "POST", "DELETE"]
PLACEMENTS: list[Placement] = [
    BEARER,
    HeaderPlacement(name="x-api-key"),
    BasicPlacement(username="u"),
    QueryPlacement(parameter="key"),
]

destinations = st.builds(
    Destination,
    st.sampled_from(ENDPOINTS),
    st.sampled_from(PREFIXES),
    st.none() | st.frozensets(st.sampled_from(METHODS), min_size=1),
    st.booleans(),
    websocket=st.booleans(),
    ranges=st.booleans(),
    unsearchable=st.booleans(),
)
TRAITS = ["allow_private", "websocket", "ranges", "unsearchable"]
reaches = st.builds(
    Reach,
    st.lists(destinations, min_size=1, max_size=3).map(tuple),
    st.lists(st.sampled_from(PLACEMENTS), min_size=1, max_size=3, unique=True).map(tuple),
)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Reach, Reach]:
    """A reach, and the same with one thing about each destination changed."""
    old = draw(reaches)
    change = draw(st.sampled_from(["endpoint", "path_prefix", "methods", "placements", *TRAITS]))
    if change == "placements":
        return old, replace(old, placements=draw(reaches).placements)
    changed = [
        replace(destination, **{change: getattr(draw(destinations), change)}) for destination in old.destinations
    ]
    return old, replace(old, destinations=tuple(changed))


def reach_under(prefix: str) -> Reach:
    return Reach((Destination(ENDPOINTS[0], prefix),), (BEARER,))


def admitted(reach: Reach) -> set[tuple[object, ...]]:
    """Every (endpoint, method, path, trait, placement) that the reach lets a secret go by, or come back by."""
    return {
        (destination.endpoint, method, path, trait, placement)
        for destination in reach.destinations
        for method in METHODS
        if destination.admits_method(method)
        for path in PATHS
        if destination.admits_path(path)
        for trait in ["", *(name for name in TRAITS if getattr(destination, name))]
        for placement in reach.placements
    }


@pytest.mark.guards("control_plane/core/reach.py", 'new.startswith(old.rstrip("/") + "/")', "new.startswith(old)")
@pytest.mark.guards("control_plane/core/reach.py", "(new is not None and new <= old)", "new is None or new <= old")
@settings(max_examples=300)
@given(changes())
@example((reach_under("/v1"), reach_under("/v10")))
def test_what_counts_as_narrower_admits_nothing_new(change: tuple[Reach, Reach]) -> None:
    old, new = change

    if not widened_fields(new, old=old):
        assert admitted(new) <= admitted(old)


@pytest.mark.guards("control_plane/core/reach.py", "and new.ca_pem == old.ca_pem", "")
def test_another_ca_counts_as_wider() -> None:
    pem = "-----BEGIN CERTIFICATE-----AA==-----END CERTIFICATE-----"
    usual = Destination(ENDPOINTS[0])
    own = replace(usual, ca_pem=pem)

    for old, new in ((usual, own), (own, usual)):
        assert widened_fields(Reach((new,), (BEARER,)), old=Reach((old,), (BEARER,))) == ("destinations",)


@given(reach=reaches)
def test_the_same_reach_is_not_wider(reach: Reach) -> None:
    assert widened_fields(reach, old=reach) == ()


@given(reach=reaches)
def test_a_part_of_a_reach_is_not_wider(reach: Reach) -> None:
    part = Reach(reach.destinations[:1], reach.placements[-1:])

    assert widened_fields(part, old=reach) == ()
