"""`coatcheck demo` is what a newcomer runs first: it must hold, and soon."""

import subprocess
from pathlib import Path

import pytest

from tests.support.processes import COMMAND, clean_environment


@pytest.mark.long
def test_every_step_of_the_demo_holds(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(COMMAND), "demo"], env=clean_environment(HOME=str(tmp_path), TMPDIR=str(tmp_path)), cwd=tmp_path,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout
    assert "sk-demo-" not in done.stdout + done.stderr
    assert "coatchk1" not in done.stdout + done.stderr
    assert list(tmp_path.glob("coatcheck-*")) == [], "nothing is left behind"
