"""`make setup` on a machine that is not ours: no ensurepip, and somebody else's settings of pip and Python."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.tree import NOT_COPIED

ROOT = Path(__file__).parents[2]

# Debian splits ensurepip off: there, a venv with pip cannot be made, and that is all this stand-in says.
PYTHON_WITHOUT_ENSUREPIP = """#!/bin/sh
case "$*" in
  *--without-pip*) ;;
  *"-m venv"*|*ensurepip*) echo "No module named ensurepip" >&2; exit 1 ;;
esac
exec {python} "$@"
"""

IN_THE_WAY = {
    "PIP_USER": "1",
    "PIP_TARGET": "/nonexistent/target",
    "PIP_PREFIX": "/nonexistent/prefix",
    "PIP_REQUIRE_VIRTUALENV": "1",
    "PIP_REQUIRE_HASHES": "1",
    "PIP_NO_BINARY": ":all:",
    "PIP_CONSTRAINT": "/nonexistent/constraints.txt",
    "PYTHONPATH": "/nonexistent/path",
    "PYTHONHOME": "/nonexistent/home",
    "VIRTUAL_ENV": "/nonexistent/venv",
}

TEXT = {".py", ".md", ".yaml", ".tpl", ".json", ".toml", ".txt", ".in", ".mjs", ".go", ".ini"}

REACHES_AN_INDEX = re.compile(r"(?i)(PIP_(INDEX_URL|EXTRA_INDEX_URL|CERT|TRUSTED_HOST|FIND_LINKS|PROXY)|https?_proxy)")


@pytest.fixture
def fresh_copy(tmp_path: Path) -> Path:
    copy = tmp_path / "coatcheck"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    return copy


@pytest.fixture
def strange_machine(tmp_path: Path) -> dict[str, str]:
    """Its environment: only what a login gives, what reaches a package index, and what stands in our way."""
    tools = tmp_path / "bin"
    tools.mkdir()
    python = tools / "python3"
    python.write_text(PYTHON_WITHOUT_ENSUREPIP.format(python=sys._base_executable))  # type: ignore[attr-defined]
    python.chmod(0o755)
    index = {name: value for name, value in os.environ.items() if REACHES_AN_INDEX.fullmatch(name)}
    return {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), **index, **IN_THE_WAY}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_set_up_needs_neither_ensurepip_nor_a_clean_environment(
    fresh_copy: Path, strange_machine: dict[str, str]
) -> None:
    answer = subprocess.run(["make", "setup"], cwd=fresh_copy, env=strange_machine, capture_output=True, text=True)

    assert answer.returncode == 0, answer.stderr
    command = fresh_copy / ".venv/bin/coatcheck"
    assert subprocess.run([command, "--help"], env={}, capture_output=True).returncode == 0
    again = subprocess.run(["make", "setup"], cwd=fresh_copy, env=strange_machine, capture_output=True, text=True)
    assert "install" not in again.stdout, "what is set up is not set up again"


def test_make_alone_lists_every_command() -> None:
    answer = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)

    phony = set(re.findall(r"^\.PHONY: (\S+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    listed = set(re.findall(r"^  make (\S+)", answer.stdout, flags=re.MULTILINE))
    assert listed == phony
    assert {
        "setup",
        "demo",
        "check",
        "test",
        "test-long",
        "bench",
        "fuzz",
        "soak",
        "mutants",
        "lock",
        "clean",
    } <= listed


@pytest.mark.parametrize("name", ["run", "test", "dev", "fuzz", "bench"])
def test_locked_requirements_carry_hashes_and_no_address(name: str) -> None:
    text = (ROOT / f"requirements/{name}.txt").read_text()

    pins = re.findall(r"^\S+==\S+", text, flags=re.MULTILINE)
    hashed = re.findall(r"^\S+==\S+ \\\n +--hash=sha256:", text, flags=re.MULTILINE)
    assert len(pins) == len(hashed) > 0
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text


def test_what_runs_is_what_is_tested_is_what_is_checked() -> None:
    pins = {
        name: set(re.findall(r"^\S+==\S+", (ROOT / f"requirements/{name}.txt").read_text(), flags=re.MULTILINE))
        for name in ("run", "test", "dev")
    }

    assert pins["run"] < pins["test"] < pins["dev"]


def test_no_address_of_a_package_registry_is_written_down() -> None:
    """Where packages come from is the machine's to say."""
    hosts = [
        "py" + "pi.org",
        "python" + "hosted.org",
        "npm" + "js.org",
        "docker" + ".io",
        "ghcr" + ".io",
        "quay" + ".io",
    ]
    folders = (
        "control_plane",
        "egress_proxy",
        "runtime",
        "coatcheck",
        "charts",
        "docs",
        "tests",
        "bench",
        "requirements",
    )
    files = [
        *(path for path in ROOT.iterdir() if path.is_file()),
        *(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXT),
    ]

    named = {
        f"{file.relative_to(ROOT)}: {host}"
        for file in files
        for host in hosts
        if host in file.read_text(errors="replace").lower()
    }

    assert named == set()
