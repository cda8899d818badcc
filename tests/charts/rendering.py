"""Rendering the chart, and finding things in what comes out."""

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[2] / "charts/coatcheck"
COMPONENTS = ("control-plane", "proxy", "runtime")
CASES = tuple(sorted(file.name.removesuffix("-values.yaml") for file in (CHART / "ci").glob("*-values.yaml")))

Manifest = dict[str, Any]


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def case_values(case: str) -> dict[str, Any]:
    """One of the complete sets of values under `ci/`."""
    values: dict[str, Any] = yaml.safe_load((CHART / f"ci/{case}-values.yaml").read_text())
    return values


def with_values(changes: dict[str, Any], *, case: str = "sqlite") -> dict[str, Any]:
    """A complete set of values, some of them changed: `{"proxy": {"replicas": 3}}`."""
    return _overlaid(case_values(case), changes)


def render_text(values: dict[str, Any]) -> dict[str, str]:
    """Template path to text, as `helm install tickets` in the namespace `agents` would send it."""
    return chart().render(values, name="tickets", namespace="agents")


def render(values: dict[str, Any]) -> list[Manifest]:
    return [
        manifest
        for path, text in sorted(render_text(values).items())
        if path.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def of_component(manifests: list[Manifest], kind: str, component: str) -> Manifest:
    """The one object of this kind that belongs to the component."""
    (found,) = [
        manifest
        for manifest in of_kind(manifests, kind)
        if manifest["metadata"]["labels"]["app.kubernetes.io/component"] == component
    ]
    return found


def pod(deployment: Manifest) -> dict[str, Any]:
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def container(deployment: Manifest) -> dict[str, Any]:
    (only,) = pod(deployment)["containers"]
    found: dict[str, Any] = only
    return found


def environment(deployment: Manifest) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container(deployment)["env"]}


def egress_blocks(policy: Manifest) -> Iterator[dict[str, Any]]:
    for rule in policy["spec"].get("egress", []):
        for peer in rule["to"]:
            if "ipBlock" in peer:
                yield peer["ipBlock"]


def _overlaid(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = deepcopy(values)
    for name, change in changes.items():
        if isinstance(change, dict) and isinstance(result.get(name), dict):
            result[name] = _overlaid(result[name], change)
        else:
            result[name] = change
    return result
