"""The image: built from what is committed and locked, and started as nobody. (No Docker is needed to know that.)"""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.mutants.tree import NOT_COPIED

ROOT = Path(__file__).parents[2]
PACKAGES = ("control_plane", "egress_proxy", "runtime", "coatcheck")


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile and its argument, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def last(name: str) -> str:
    return [argument for instruction, argument in instructions() if instruction == name][-1]


@pytest.mark.guards("Dockerfile", "USER 10001:10001", "USER root")
def test_the_image_runs_as_a_numbered_user_that_is_not_root() -> None:
    user = last("USER")

    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)


def test_the_image_is_the_command() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["python", "-I", "-m", "coatcheck"]


@pytest.mark.guards("Dockerfile", "--require-hashes", "")
def test_every_package_in_the_image_is_locked_by_hash() -> None:
    installs = [argument for name, argument in instructions() if name == "RUN" and " install " in argument]

    for install in installs:
        assert "--no-deps" in install
        assert "--require-hashes" in install or re.search(r"--no-build-isolation \.( |$)", install)


def test_whatever_the_image_copies_exists_and_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {
        source
        for name, argument in instructions()
        if name == "COPY" and not argument.startswith("--from")
        for source in argument.split()[:-1]
    }

    assert sources == kept
    assert [source for source in sources if not (ROOT / source).exists()] == []


@pytest.mark.long
def test_what_is_built_holds_every_module_and_every_data_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=NOT_COPIED)

    subprocess.run(
        [sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('..')"],
        cwd=source,
        check=True,
        capture_output=True,
    )

    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(file.relative_to(source))
        for package in PACKAGES
        for file in (source / package).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert expected - held == set()
