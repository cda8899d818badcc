"""How a grant narrows what its credential may do. Who it is for stays in the control plane; only this travels."""

from dataclasses import dataclass

from control_plane.contract.destination import Endpoint, check_methods, check_path_prefix, path_is_within


@dataclass(frozen=True, slots=True)
class GrantScope:
    """Every field narrows; None leaves it as the credential has it. Empty sets are invalid, never "any"."""

    endpoints: frozenset[Endpoint] | None = None
    methods: frozenset[str] | None = None
    path_prefixes: frozenset[str] | None = None
    until: float | None = None
    """Unix seconds."""

    def __post_init__(self) -> None:
        check_methods(self.methods)
        if self.endpoints is not None and not self.endpoints:
            raise ValueError("a grant's destinations are left out or not empty")
        if self.path_prefixes is not None and not self.path_prefixes:
            raise ValueError("a grant's paths are left out or not empty")
        for prefix in self.path_prefixes or ():
            check_path_prefix(prefix)

    def admits_endpoint(self, endpoint: Endpoint) -> bool:
        return self.endpoints is None or endpoint in self.endpoints

    def admits_method(self, method: str) -> bool:
        return self.methods is None or method in self.methods

    def admits_path(self, raw_path: str) -> bool:
        return self.path_prefixes is None or any(path_is_within(raw_path, prefix) for prefix in self.path_prefixes)

    def is_live(self, now: float) -> bool:
        return self.until is None or now < self.until
