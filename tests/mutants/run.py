"""`make mutants`: takes each security check out of a copy of the product, and shows that its test turns red.

    python -m tests.mutants.run [--only TEXT] [--jobs N]

Steps: copy the project once a job; collect the guards there; see every guarded test pass unchanged; then for each guard
make its change, run its test, expect it to fail, and take the change back. Exit status 0 only when every change was
noticed. A test that could not be run (status other than pytest's 0 and 1) is an error, never a success.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.guards import Guard, read_guards
from tests.mutants.tree import Tree, copy_project, planted

PROJECT = Path(__file__).resolve().parents[2]
TEST_SECONDS = 60
"""A change may make a test hang: that is red too, but soon."""
RUN_SECONDS = 300


class Outcome(StrEnum):
    KILLED = "killed"
    SURVIVED = "SURVIVED"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change, and all the cases of one test function that must notice it between them."""

    test: str
    cases: tuple[str, ...]
    guard: Guard


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    outcome: Outcome
    seconds: float
    report: str = ""


def main(arguments: Sequence[str] | None = None, *, project: Path = PROJECT) -> int:
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copy_project(project, Path(folder) / f"tree-{number}") for number in range(options.jobs)]
        mutants = [mutant for mutant in collect(trees[0]) if options.only in f"{mutant.test} {mutant.guard.path}"]
        if not mutants:
            print("no test guards anything")
            return 1
        if red := red_before_any_change(trees[0], mutants):
            print(f"{red}\nthese tests are red, or cannot be run, before any change")
            return 1
        verdicts = list(_shown(try_all(trees, mutants), total=len(mutants)))
    return conclude(verdicts)


def collect(tree: Tree) -> list[Mutant]:
    """What the tests of this tree guard, the cases of a parametrised test taken together."""
    listing = tree.root / "guards.json"
    answer = _pytest(tree, "--collect-only", "-q", f"--guards-to={listing}", "tests")
    if answer.returncode not in (0, 5):
        raise SystemExit(f"{answer.stdout}\nthe tests could not be collected")

    def key(guard: Guard) -> tuple[str, str, str, str]:
        return guard.test.partition("[")[0], guard.path, guard.old, guard.new

    grouped = [(test, list(guards)) for (test, *_), guards in groupby(sorted(read_guards(listing), key=key), key=key)]
    return [Mutant(test, tuple(guard.test for guard in guards), guards[0]) for test, guards in grouped]


def red_before_any_change(tree: Tree, mutants: Sequence[Mutant]) -> str | None:
    """pytest's report when a guarded test fails as the product stands; None when all are green."""
    cases = sorted({case for mutant in mutants for case in mutant.cases})
    answer = _pytest(tree, "-q", "-n", "2", *cases)
    return None if answer.returncode == 0 else answer.stdout


def try_all(trees: Sequence[Tree], mutants: Sequence[Mutant]) -> Iterator[Verdict]:
    """One verdict a mutant, in order; as many at a time as there are trees."""
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def try_in_a_free_tree(mutant: Mutant) -> Verdict:
        tree = free.get()
        try:
            return try_one(tree, mutant)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        yield from pool.map(try_in_a_free_tree, mutants)


def try_one(tree: Tree, mutant: Mutant) -> Verdict:
    """Make the change, run the test, take the change back."""
    begin = time.monotonic()
    if fault := mutant.guard.fault(tree.root):
        return Verdict(mutant, Outcome.ERROR, 0.0, fault)
    try:
        with planted(tree.root / mutant.guard.path, old=mutant.guard.old, new=mutant.guard.new):
            answer = _pytest(tree, "-q", "-x", f"--timeout={TEST_SECONDS}", *mutant.cases)
    except subprocess.TimeoutExpired:
        return Verdict(mutant, Outcome.ERROR, time.monotonic() - begin, f"no end after {RUN_SECONDS} s")
    outcome = {0: Outcome.SURVIVED, 1: Outcome.KILLED}.get(answer.returncode, Outcome.ERROR)
    return Verdict(mutant, outcome, time.monotonic() - begin, "" if outcome is Outcome.KILLED else answer.stdout)


def conclude(verdicts: Sequence[Verdict]) -> int:
    """Prints the reports of what went wrong and the totals; returns the exit status."""
    wrong = [verdict for verdict in verdicts if verdict.outcome is not Outcome.KILLED]
    for verdict in wrong:
        print(f"\n--- {verdict.outcome}: {verdict.mutant.test}\n{verdict.report[-3000:].strip()}")
    counts = {outcome: sum(verdict.outcome is outcome for verdict in verdicts) for outcome in Outcome}
    print(f"\n{len(verdicts)} changes: " + ", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    return 1 if wrong else 0


def _shown(verdicts: Iterator[Verdict], *, total: int) -> Iterator[Verdict]:
    """The table, a row as soon as it is known."""
    for number, verdict in enumerate(verdicts, start=1):
        guard = verdict.mutant.guard
        print(f"[{number}/{total}] {verdict.outcome:8} {verdict.seconds:5.1f} s  {verdict.mutant.test}")
        print(f"{'':18}{guard.path}: {_one_line(guard.old)}  →  {_one_line(guard.new)}", flush=True)
        yield verdict


def _one_line(fragment: str) -> str:
    return " ".join(fragment.split()) or "(nothing)"


def _pytest(tree: Tree, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PATH"] = f"{tree.python.parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return subprocess.run(
        [
            str(tree.python),
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--color=no",
            "--hypothesis-profile=mutants",
            *arguments,
        ],
        cwd=tree.root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS * (10 if "-n" in arguments else 1),
        check=False,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="changes whose test or file has this in its name")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
