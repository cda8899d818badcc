"""`python -m tests.attacks FILE`: the corpus against the proxy that FILE describes. Status 1 where one did not hold."""

import argparse
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.attacks import corpus, target
from tests.attacks.ways import Way


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("file", type=Path, help="what the proxy is and how to get through it (README.md)")
    parser.add_argument("--only", default="", help="attacks whose class or name holds this text")
    parser.add_argument(
        "--write-ca", action="store_true", help="only write origin-ca.pem beside FILE, for the proxy to trust"
    )
    options = parser.parse_args()
    try:
        described = target.described_in(options.file)
        ca = target.ca_of(options.file.parent)
        if options.write_ca:
            print(options.file.parent / "origin-ca.pem")
            return 0
        with ExitStack() as stack:
            servers = {name: stack.enter_context(each) for name, each in target.origins(described, ca).items()}
            return _run(target.ways(described, servers), options.only)
    except target.UnusableTargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(ways: list[Way], only: str) -> int:
    chosen = [each for each in corpus.ATTACKS if only in each.kind or only in each.name]
    held: Counter[corpus.Cell] = Counter()
    tried: Counter[corpus.Cell] = Counter()
    for result in corpus.run(ways, chosen):
        tried[corpus.cell(result.attack, result.way)] += 1
        held[corpus.cell(result.attack, result.way)] += not result.verdict
        if result.verdict:
            print(f"BROKE  {result}")
    print("\n".join(corpus.grid(held, tried)))
    return 0 if held == tried and tried else 1


if __name__ == "__main__":
    sys.exit(main())
