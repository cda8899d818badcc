"""`.ci/run`, with a `make` that only says what it was asked: every step is taken, no failure is passed over."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MAKE = """#!/bin/sh
for target; do :; done
echo "$target CI=$CI stdin=$(wc -c)" >> "{log}"
echo "=== $target: 3 passed in 0.12s ==="
case " {failing} " in *" $target "*) echo "make: *** [$target] Error 1" >&2; exit 2 ;; esac
"""


def run_ci(tmp_path: Path, *, failing: str = "") -> tuple[int, list[str], list[str]]:
    """Exit status, what was asked of make, and the lines printed."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("git", "curl", "bwrap", "nginx", "pgbouncer", "make"):
        text = MAKE.format(log=tmp_path / "log", failing=failing) if name == "make" else "#!/bin/sh\n"
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    python = tools / "python3"  # has pip, whatever else it is asked
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    answer = subprocess.run(
        ["bash", str(ROOT / ".ci/run")],
        cwd=tmp_path,
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        input="something on standard input",
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.returncode, (tmp_path / "log").read_text().splitlines(), answer.stdout.splitlines()


def test_check_test_and_the_long_tests_are_run_under_ci_without_input(tmp_path: Path) -> None:
    status, asked, _ = run_ci(tmp_path)

    assert status == 0
    assert asked == [f"{target} CI=true stdin=0" for target in ("check", "test", "test-long")]


def test_pytests_own_closing_lines_come_last(tmp_path: Path) -> None:
    _, _, printed = run_ci(tmp_path)

    assert printed[-2:] == ["=== test: 3 passed in 0.12s ===", "=== test-long: 3 passed in 0.12s ==="]


@pytest.mark.parametrize("failing", ["check", "test", "test-long", "check test"])
def test_a_step_that_fails_fails_the_run_and_the_others_are_still_taken(tmp_path: Path, failing: str) -> None:
    status, asked, printed = run_ci(tmp_path, failing=failing)

    assert status != 0
    assert len(asked) == 3
    assert f"== failed: {failing}" in printed
    assert printed[-1] == "=== test-long: 3 passed in 0.12s ==="
