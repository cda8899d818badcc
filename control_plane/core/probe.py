"""A probe: one harmless request that shows whether an upstream accepts a secret. How it is declared, and how it looks.

Rule: a probe goes where its credential may go anyway, in one of its placements. It is declared by the provider's
preset, or on the credential: there it is one of the `settings`, and so part of what envelopes are sealed to.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from control_plane.contract.destination import Destination, is_plain_path
from control_plane.contract.grant import GrantScope
from control_plane.contract.placement import SECRET_FIELD, BasicPlacement, HeaderPlacement, Placement, QueryPlacement
from control_plane.core.rotation import AUTHENTICATION_ERROR

SETTING: Final = "probe"
METHODS: Final = ("GET", "HEAD", "POST")
WITHOUT_PROBE: Final = frozenset({"aws_assume_role", "hmac", "client_certificate"})
"""Kinds whose secret is no text in the request: a proxy signs with it, or shows it in a handshake."""
MAX_PATH: Final = 1024
_PATH: Final = re.compile(r"/[^\x00-\x20?#\x7f-\U0010ffff]*")


class InvalidProbeError(ValueError):
    """Not a request that could be made; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Probe:
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """What the provider wants on every request, such as a version. A preset's alone."""
    rejected: frozenset[int] = frozenset({AUTHENTICATION_ERROR})
    """Statuses that say "wrong secret" to this very request. A preset's alone."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidProbeError(f"a probe's method is one of {', '.join(METHODS)}")
        if not _PATH.fullmatch(self.path) or not is_plain_path(self.path) or len(self.path) > MAX_PATH:
            raise InvalidProbeError("a probe's path begins with '/', without query, dot segments or encoded slashes")
        if not all(400 <= status < 500 for status in self.rejected):
            raise InvalidProbeError("a secret is rejected with a status from 400 to 499")

    @property
    def scope(self) -> GrantScope:
        """What a probe may do, and nothing else."""
        return GrantScope(methods=frozenset({self.method}), path_prefixes=frozenset({self.path}))

    def is_within(self, destination: Destination) -> bool:
        return destination.admits_method(self.method) and destination.admits_path(self.path)

    def to_setting(self) -> dict[str, str]:
        return {"method": self.method, "path": self.path}


def declared(settings: Mapping[str, Any]) -> Probe | None:
    """The credential's own. Raises `InvalidProbeError`."""
    found = settings.get(SETTING)
    if found is None:
        return None
    try:
        return Probe(method=found["method"], path=found["path"])
    except (TypeError, KeyError, AttributeError):
        raise InvalidProbeError("a probe is {method, path}") from None


@dataclass(frozen=True, slots=True, repr=False)
class ProbeRequest:
    """What is sent to the proxy's reverse route. Not shown: it holds a placeholder."""

    method: str
    target: str
    """Path and query below the route."""
    headers: Mapping[str, str]


def request_of(probe: Probe, placement: Placement, *, placeholder: str) -> ProbeRequest:
    """The probe with the placeholder where the secret goes."""
    headers, target = dict(probe.headers), probe.path
    match placement:
        case HeaderPlacement(name=name, format=format_):
            headers[name] = format_.replace(SECRET_FIELD, placeholder)
        case BasicPlacement(username=username):
            headers["authorization"] = "Basic " + base64.b64encode(f"{username}:{placeholder}".encode()).decode()
        case QueryPlacement(parameter=parameter):
            target = f"{target}?{quote(parameter, safe='')}={quote(placeholder, safe='')}"
    return ProbeRequest(probe.method, target, headers)
