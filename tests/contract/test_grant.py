"""A grant only narrows; an empty selector is an error and never means "any"."""

from typing import Any

import pytest

from control_plane.contract.destination import Endpoint
from control_plane.contract.grant import GrantScope

FILE = "control_plane/contract/grant.py"

HERE, THERE = Endpoint("https", "a.example", 443), Endpoint("https", "b.example", 443)


@pytest.mark.parametrize(
    "selectors",
    [
        {"endpoints": frozenset()},
        {"methods": frozenset()},
        {"path_prefixes": frozenset()},
        {"methods": frozenset({"get"})},
        {"path_prefixes": frozenset({""})},
        {"path_prefixes": frozenset({"v1"})},
        {"path_prefixes": frozenset({"/v1", "/v1/../v2"})},
        {"path_prefixes": frozenset({"//"})},
    ],
)
@pytest.mark.guards(FILE, "            check_path_prefix(prefix)", "            pass")
def test_an_empty_or_odd_selector_is_an_error(selectors: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"left out|begins with|upper-case"):
        GrantScope(**selectors)


@pytest.mark.guards(FILE, "if self.endpoints is not None and not self.endpoints:", "if False:")
def test_an_empty_set_of_destinations_is_an_error() -> None:
    with pytest.raises(ValueError, match="destinations"):
        GrantScope(endpoints=frozenset())


@pytest.mark.guards(FILE, "if self.path_prefixes is not None and not self.path_prefixes:", "if False:")
def test_an_empty_set_of_paths_is_an_error() -> None:
    with pytest.raises(ValueError, match="paths"):
        GrantScope(path_prefixes=frozenset())


def test_a_grant_without_selectors_leaves_the_credential_as_it_is() -> None:
    scope = GrantScope()

    assert scope.admits_endpoint(HERE)
    assert scope.admits_method("DELETE")
    assert scope.admits_path("/a/../b")
    assert scope.is_live(1e12)


def test_each_selector_admits_what_it_names_and_nothing_else() -> None:
    scope = GrantScope(
        endpoints=frozenset({HERE}),
        methods=frozenset({"GET"}),
        path_prefixes=frozenset({"/v1", "/v2/x"}),
        until=100.0,
    )

    assert (scope.admits_endpoint(HERE), scope.admits_endpoint(THERE)) == (True, False)
    assert (scope.admits_method("GET"), scope.admits_method("POST")) == (True, False)
    assert [scope.admits_path(path) for path in ("/v1", "/v2/x/y", "/v2", "/v1/../v3")] == [True, True, False, False]
    assert [scope.is_live(now) for now in (99.9, 100.0, 100.1)] == [True, False, False]


@pytest.mark.guards(
    FILE, "return self.until is None or now < self.until", "return self.until is None or not now >= self.until"
)
def test_a_grant_until_no_time_at_all_is_not_alive() -> None:
    assert not GrantScope(until=float("nan")).is_live(0.0)
