"""The runner on a product of one rule: it tells a test that guards from one that does not, and cleans up."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mutants.run import PROJECT, main
from tests.mutants.tree import copy_project

SET_UP = """[pytest]
addopts = --strict-markers --import-mode=importlib
pythonpath = .
markers =
    guards(path, old, new): as in the product
"""
RULE = """def allowed(caller: str, owner: str) -> bool:
    if caller != owner:
        return False
    return True
"""
TESTS = """import pytest
from rule import allowed

@pytest.mark.guards("rule.py", "if caller != owner:", "if False:")
@pytest.mark.parametrize("caller", ["another", "the owner"])
def test_only_the_owner_is_allowed(caller):
    assert allowed(caller, "the owner") == (caller == "the owner")
"""
HOLLOW = """
@pytest.mark.guards("rule.py", "        return False", "        return True")
def test_that_looks_at_nothing():
    assert allowed("the owner", "the owner")
"""
MISSPELT = """
@pytest.mark.guards("rule.py", "if caller is not owner:", "if False:")
def test_that_names_a_line_of_the_past():
    assert allowed("the owner", "the owner")
"""
RED = """
@pytest.mark.guards("rule.py", "if caller != owner:", "if False:")
def test_that_is_red_already():
    assert allowed("another", "the owner")
"""


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """A project of one rule."""
    root = tmp_path / "product"
    shutil.copytree(PROJECT / "tests/mutants", root / "tests/mutants", ignore=shutil.ignore_patterns("test_*"))
    (root / "tests/conftest.py").write_text('pytest_plugins = ["tests.mutants.plugin"]')
    (root / "pytest.ini").write_text(SET_UP)
    (root / "rule.py").write_text(RULE)
    (root / "tests/__init__.py").touch()
    return root


def run_on(product: Path, tests: str) -> int:
    (product / "tests/test_rule.py").write_text(tests)
    return main(["--jobs", "1"], project=product)


@pytest.mark.long
def test_a_test_that_notices_its_change_passes(product: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run_on(product, TESTS)

    assert status == 0
    assert "1 changes: 1 killed, 0 SURVIVED, 0 ERROR" in capsys.readouterr().out
    assert (product / "rule.py").read_text() == RULE


@pytest.mark.long
def test_a_test_that_does_not_notice_its_change_is_told(product: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run_on(product, TESTS + HOLLOW)

    assert status == 1
    assert "SURVIVED: tests/test_rule.py::test_that_looks_at_nothing" in capsys.readouterr().out


@pytest.mark.long
def test_a_change_that_cannot_be_made_is_an_error(product: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run_on(product, TESTS + MISSPELT)

    assert status == 1
    assert "holds 'if caller is not owner:' 0 times, not once" in capsys.readouterr().out


@pytest.mark.long
def test_a_test_that_is_red_before_any_change_proves_nothing(product: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run_on(product, TESTS + RED)

    assert status == 1
    assert "red, or cannot be run, before any change" in capsys.readouterr().out


def test_a_copy_imports_nothing_from_the_original_even_with_an_empty_environment(tmp_path: Path) -> None:
    tree = copy_project(PROJECT, tmp_path / "copy")

    answer = subprocess.run(
        [
            tree.python,
            "-c",
            "import coatcheck, control_plane, pydantic; print(coatcheck.__file__, control_plane.__file__)",
        ],
        env={},
        cwd=os.sep,
        capture_output=True,
        text=True,
        check=True,
    )

    assert answer.stdout.split() == [
        str(tree.root / "coatcheck/__init__.py"),
        str(tree.root / "control_plane/__init__.py"),
    ]
