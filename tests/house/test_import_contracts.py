"""Every import contract bites: one forbidden import, planted in a copy of the packages, and the contract is broken.

`make check` holds the contracts on the product itself.
"""

import configparser
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("control_plane", "egress_proxy", "runtime", "coatcheck")

VIOLATIONS = {
    "the proxy imports the runtime": ("programs", "egress_proxy/planted.py", "import runtime.core"),
    "the runtime imports the proxy": ("programs", "runtime/planted.py", "import egress_proxy.core"),
    "the control plane imports the proxy": ("programs", "control_plane/planted.py", "import egress_proxy"),
    "the proxy imports the command line": ("programs", "egress_proxy/planted.py", "import coatcheck"),
    "the proxy imports the control plane's core": (
        "only-the-contract-crosses",
        "egress_proxy/core/planted.py",
        "from control_plane.core import records",
    ),
    "the runtime imports the control plane's store": (
        "only-the-contract-crosses",
        "runtime/planted.py",
        "import control_plane.adapters.sql.tables",
    ),
    "the contract imports the core": (
        "control-plane-layers",
        "control_plane/contract/planted.py",
        "import control_plane.core.records",
    ),
    "the core imports a port": ("control-plane-layers", "control_plane/core/planted.py", "import control_plane.ports"),
    "the api imports an adapter": (
        "control-plane-layers",
        "control_plane/api/planted.py",
        "import control_plane.adapters.sql.tables",
    ),
    "an adapter imports the api": (
        "control-plane-layers",
        "control_plane/adapters/planted.py",
        "import control_plane.api",
    ),
    "a shared step imports a use case": (
        "control-plane-layers",
        "control_plane/custody.py",
        "import control_plane.exchange",
    ),
    "an adapter imports a use case": (
        "adapters-know-ports-alone",
        "control_plane/adapters/planted.py",
        "import control_plane.exchange",
    ),
    "a module stands in no layer": ("control-plane-layers", "control_plane/shortcut.py", ""),
    "the contract asks the clock": ("core-is-pure", "control_plane/contract/planted.py", "import time"),
    "the control plane's core opens the store": ("core-is-pure", "control_plane/core/planted.py", "import sqlalchemy"),
    "the proxy's core reads the environment": (
        "core-is-pure",
        "egress_proxy/core/planted.py",
        "from os import environ",
    ),
    "the proxy's core opens a socket": ("core-is-pure", "egress_proxy/core/planted.py", "import socket"),
    "the runtime's core rolls dice": ("core-is-pure", "runtime/core/planted.py", "import secrets"),
    "a core does I/O through another module": (
        "core-is-pure",
        "egress_proxy/core/planted.py",
        "import egress_proxy.ca",
    ),
    "the api makes a request": ("one-http-client", "control_plane/api/planted.py", "import httpx"),
    "another adapter makes a request": (
        "one-http-client",
        "control_plane/adapters/planted.py",
        "from httpx import get",
    ),
    "a use case drives a provider's library": ("one-http-client", "control_plane/planted.py", "import botocore.auth"),
    "the proxy serves by a framework": ("no-framework-in-the-data-path", "egress_proxy/planted.py", "import fastapi"),
}


@pytest.fixture(scope="module")
def copied_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packages")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", root)
    return root


@contextmanager
def planted(file: Path, line: str) -> Iterator[None]:
    before = file.read_text() if file.exists() else None
    file.write_text(f"{before or ''}\n{line}\n")
    try:
        yield
    finally:
        file.unlink() if before is None else file.write_text(before)


def lint(root: Path, contract: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--contract", contract]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def contracts() -> set[str]:
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / ".importlinter")
    return {section.rpartition(":")[2] for section in configuration.sections() if ":contract:" in section}


def test_every_contract_has_a_violation_that_breaks_it() -> None:
    assert {contract for contract, _, _ in VIOLATIONS.values()} == contracts()


@pytest.mark.parametrize("contract", sorted(contracts()))
def test_the_product_keeps_the_contract(contract: str, copied_packages: Path) -> None:
    answer = lint(copied_packages, contract)

    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_forbidden_import_is_refused(case: str, copied_packages: Path) -> None:
    contract, file, line = VIOLATIONS[case]

    with planted(copied_packages / file, line):
        answer = lint(copied_packages, contract)

    assert answer.returncode == 1, answer.stdout
    assert "0 kept, 1 broken" in answer.stdout
    assert file.removesuffix(".py").replace("/", ".") in answer.stdout
