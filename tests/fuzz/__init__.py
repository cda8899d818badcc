"""Fuzzing: what no table of cases thought of.

- `path`: the proxy's own path from a client's bytes to an upstream's, and back, in memory
- `readers`: other people's HTTP parsers, and what they make of bytes
- `framing`, `finding`, `scrubbing`: what has to hold for any bytes, as functions that raise where it does not
- `messages`: HTTP as Hypothesis writes it, well formed and not
- `differences`: where readers are known to differ, and why nothing follows from it
- `targets`: the same functions for a coverage-guided fuzzer (`make fuzz`), which knows nothing but bytes
- `examples/<target>/`: what was found once, and beginnings for the fuzzer; every one is replayed by `make test`
"""
