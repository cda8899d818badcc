"""Runs the targets under a coverage-guided fuzzer (atheris, which is libFuzzer for Python): `make fuzz`.

    python -m tests.fuzz.run --seconds 300 [--only requests]

Each target has its time in a process of its own. What breaks it is kept under `examples/<target>/`, where `make test`
replays it from then on; what only led somewhere new is kept under `build/fuzz/`, for the next run to begin with.
Exit status: 1 when anything broke.
"""

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SLOWEST_SECONDS = 20
"""One input may take no longer."""
LONGEST_BYTES = 4096
WATCHED = ["egress_proxy", "control_plane.contract"]
"""Packages whose branches lead the fuzzer."""


def main() -> int:
    arguments = _arguments()
    if arguments.target:
        _fuzz(arguments.target, arguments.rest)
        return 0
    from tests.fuzz.targets import TARGETS

    names = arguments.only or list(TARGETS)
    broken = [name for name in names if not _holds(name, seconds=arguments.seconds)]
    for name in names:
        print(f"{name:10} {'BROKEN: see tests/fuzz/examples/' + name if name in broken else 'held'}")
    return 1 if broken else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description="Coverage-guided fuzzing.")
    parser.add_argument("--seconds", type=int, default=300, help="for each target")
    parser.add_argument("--only", action="append", metavar="TARGET")
    parser.add_argument("--target", help=argparse.SUPPRESS)  # this process is the fuzzer
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def _holds(name: str, *, seconds: int) -> bool:
    from tests.fuzz.targets import EXAMPLES, beginnings

    corpus, kept = ROOT / "build/fuzz" / name, EXAMPLES / name
    corpus.mkdir(parents=True, exist_ok=True)
    kept.mkdir(parents=True, exist_ok=True)
    for seed in beginnings(name):
        (corpus / hashlib.sha256(seed).hexdigest()[:20]).write_bytes(seed)
    print(f"== {name}: {seconds} s", flush=True)
    libfuzzer = [
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST_BYTES}",
        f"-timeout={SLOWEST_SECONDS}",
        f"-artifact_prefix={kept}/",
        f"-dict={ROOT / 'tests/fuzz/http.dict'}",
        "-verbosity=0",
        "-print_final_stats=1",
    ]
    command = [sys.executable, "-m", "tests.fuzz.run", "--target", name, "--", *libfuzzer, str(corpus), str(kept)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def _fuzz(name: str, libfuzzer: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=WATCHED, enable_loader_override=False):
        from tests.fuzz.targets import TARGETS
    target: Callable[[bytes], None] = TARGETS[name]
    atheris.Setup([sys.argv[0], *libfuzzer], target)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
