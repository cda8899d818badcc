"""What fuzzing found once stays found: every kept example is replayed, and a short seeded run goes on from there."""

import random

import pytest

from tests.fuzz.targets import EXAMPLES, TARGETS, beginnings

RUNS = 150


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_once_holds_now(name: str) -> None:
    kept = sorted((EXAMPLES / name).iterdir())

    for example in kept:
        TARGETS[name](example.read_bytes())

    assert kept


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.guards("egress_proxy/core/scrub.py", "(end in data or end in border)", "(end in data)")
@pytest.mark.guards(
    "egress_proxy/core/fields.py", "            for offset in range(4):", "            for offset in (0,):"
)
@pytest.mark.guards("egress_proxy/core/fields.py", "MAX_PERCENT_LAYERS: Final = 3", "MAX_PERCENT_LAYERS: Final = 1")
@pytest.mark.guards("egress_proxy/exchange.py", "            body = self._scrubber.feed(body)\n", "            pass\n")
def test_bytes_changed_at_random_hold_too(name: str) -> None:
    dice, target, seeds = random.Random(7), TARGETS[name], beginnings(name)

    for seed in seeds:
        target(seed)
    for _ in range(RUNS):
        target(changed(dice.choice(seeds), dice))


def changed(data: bytes, dice: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(out))
        match dice.randrange(4):
            case 0:
                out[at] = dice.randrange(256)
            case 1:
                out.insert(at, dice.choice(b"\r\n\t :,;0\x00\x0b\x85\xff%+="))
            case 2 if len(out) > 8:
                del out[at : at + dice.randint(1, 5)]
            case _:
                out[at:at] = out[at : at + dice.randint(1, 40)]
    return bytes(out)
