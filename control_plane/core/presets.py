"""What we know of well-known providers: hosts, placements, the look of a key, the variables that their SDKs read.

Rule: a preset is data (`presets.toml`), read and checked once at import; a wrong one stops the process, it is never
skipped. A preset only fills in what the operator left out: it grants nothing and holds no secret.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

from control_plane.contract.destination import Destination, parse_destination
from control_plane.contract.placeholder import Shape
from control_plane.contract.placement import Placement, placement_from_json, placement_to_json
from control_plane.core.probe import Probe, declared
from control_plane.core.records import Credential
from control_plane.core.rotation import AUTHENTICATION_ERROR, NEVER_AN_AUTHENTICATION_ERROR

BASE_FIELD: Final = "{base}"

_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_BASE_URL_TEMPLATE = re.compile(r"\{base\}(/[a-z0-9/._-]*[a-z0-9])?")
_REQUIRED: Final = frozenset({"title", "destinations", "placements", "shape", "variables", "documentation"})
_OPTIONAL: Final = frozenset({"base_url_variables", "authentication_errors", "probe"})


class InvalidPresetError(ValueError):
    """`presets.toml` is wrong; the message names the preset and what was expected."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One provider."""

    id: str
    """Also the only credential name that may equal a provider's id."""
    title: str
    destinations: tuple[Destination, ...]
    """The first is where the reverse route leads. Empty: the host differs per account, the operator must name it."""
    placements: tuple[Placement, ...]
    """Never empty; the first is the one an exchange suggests."""
    shape: Shape
    variables: tuple[str, ...]
    """Environment variables that hold the key (for us: the placeholder). All of them hold the same value."""
    base_url_variables: Mapping[str, str]
    """Variable → template; `{base}` is the URL of the reverse route, without a final slash."""
    documentation: str
    """The provider's own page on authentication."""
    authentication_errors: frozenset[int] = frozenset({AUTHENTICATION_ERROR})
    """The statuses by which it says "wrong secret", and that no workload brings about otherwise."""
    probe: Probe | None = None
    """A request that costs nothing and needs the secret."""

    def base_urls(self, base: str) -> dict[str, str]:
        """What each base-URL variable holds when the reverse route is at `base`."""
        route = base.rstrip("/")
        return {name: template.replace(BASE_FIELD, route) for name, template in self.base_url_variables.items()}


def probe_of(credential: Credential) -> Probe | None:
    """The request that shows whether its upstream accepts its secret: its own, or its provider's."""
    own = declared(credential.settings)
    preset = PRESETS.get(credential.preset) if credential.preset else None
    if own is None or preset is None or preset.probe is None:
        return own or (preset.probe if preset else None)
    # What the provider wants on every request, and how it says no, does not change with the path.
    return replace(own, headers=preset.probe.headers, rejected=preset.probe.rejected)


def preset_to_json(preset: Preset) -> dict[str, Any]:
    """As `GET /v1/presets` shows it."""
    return {
        "id": preset.id,
        "title": preset.title,
        "destinations": [destination.url for destination in preset.destinations],
        "placements": [placement_to_json(placement) for placement in preset.placements],
        "shape": {"prefix": preset.shape.prefix, "length": preset.shape.length},
        "variables": list(preset.variables),
        "base_url_variables": dict(preset.base_url_variables),
        "documentation": preset.documentation,
        "authentication_errors": sorted(preset.authentication_errors),
        "probe": preset.probe.to_setting() if preset.probe is not None else None,
    }


def read_presets(text: str) -> Mapping[str, Preset]:
    """Every preset of a TOML text by its id. Raises `InvalidPresetError` for what is unknown, missing or impossible."""
    tables = tomllib.loads(text)
    if not tables:
        raise InvalidPresetError("there is no preset")
    return MappingProxyType({preset_id: _read(preset_id, table) for preset_id, table in tables.items()})


def _read(preset_id: str, table: dict[str, Any]) -> Preset:
    missing, unknown = _REQUIRED - table.keys(), table.keys() - _REQUIRED - _OPTIONAL
    if missing or unknown:
        raise InvalidPresetError(f"{preset_id}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    try:
        preset = Preset(
            id=preset_id,
            title=table["title"],
            destinations=tuple(parse_destination(url) for url in table["destinations"]),
            placements=tuple(placement_from_json(placement) for placement in table["placements"]),
            shape=Shape(**table["shape"]),
            variables=tuple(table["variables"]),
            base_url_variables=MappingProxyType(dict(table.get("base_url_variables", {}))),
            documentation=table["documentation"],
            authentication_errors=frozenset(table.get("authentication_errors", {AUTHENTICATION_ERROR})),
            probe=_probe(table["probe"]) if "probe" in table else None,
        )
    except (TypeError, ValueError) as error:
        raise InvalidPresetError(f"{preset_id}: {error}") from error
    _check(preset)
    return preset


def _probe(table: dict[str, Any]) -> Probe:
    fields = {**table, "rejected": frozenset(table.get("rejected", {AUTHENTICATION_ERROR}))}
    return Probe(**fields)


def _check(preset: Preset) -> None:
    expectations = {
        "an id of lower-case letters, digits and hyphens": bool(_ID.fullmatch(preset.id)),
        "a title": bool(preset.title.strip()),
        "https destinations": all(destination.endpoint.scheme == "https" for destination in preset.destinations),
        "at least one placement, each once": 0 < len(preset.placements) == len(set(preset.placements)),
        "at least one variable, each once": 0 < len(preset.variables) == len(set(preset.variables)),
        "upper-case variable names": all(
            _VARIABLE.fullmatch(name) for name in (*preset.variables, *preset.base_url_variables)
        ),
        "base URLs of the form {base}/path": all(
            _BASE_URL_TEMPLATE.fullmatch(template) for template in preset.base_url_variables.values()
        ),
        "an https page of documentation": preset.documentation.startswith("https://"),
        # A 403 is for anybody to bring about: rotations would turn back at a workload's will.
        "authentication errors of 4xx, never 403": bool(preset.authentication_errors)
        and all(400 <= status < 500 for status in preset.authentication_errors)
        and NEVER_AN_AUTHENTICATION_ERROR not in preset.authentication_errors,
        "a probe within its destinations": preset.probe is None
        or all(preset.probe.is_within(destination) for destination in preset.destinations[:1]),
    }
    for expectation, met in expectations.items():
        if not met:
            raise InvalidPresetError(f"{preset.id}: needs {expectation}")


PRESETS: Final[Mapping[str, Preset]] = read_presets(
    resources.files("control_plane.core").joinpath("presets.toml").read_text("utf-8")
)
