"""The soak itself, short; and that its judge would see what it is there for."""

from pathlib import Path

import pytest

from tests.soak.run import soak
from tests.soak.samples import MEBIBYTE, Bounds, Sample, Series, table


def series(*descriptors: int, tasks: int = 6, mebibytes: int = 70) -> Series:
    samples = [Sample(float(at), n, tasks, mebibytes * MEBIBYTE) for at, n in enumerate(descriptors)]
    return Series("proxy 0", 1, samples, before=samples[0], after=samples[0])


def test_what_goes_up_and_down_is_no_growth() -> None:
    assert series(*[20, 60, 40, 20] * 10).faults(Bounds()) == []


def test_what_fills_up_in_the_first_half_is_no_growth() -> None:
    assert series(*range(20, 120), *[120] * 100).faults(Bounds()) == []


def test_a_descriptor_lost_now_and_then_is_growth() -> None:
    found = series(*(20 + at // 2 for at in range(120))).faults(Bounds())

    assert found == ["proxy 0: descriptors grew by 15 in the second half"]


def test_memory_that_grows_steadily_is_growth() -> None:
    leaking = series(*[20] * 120)
    leaking.samples = [Sample(s.at, s.descriptors, s.tasks, int(70 + s.at / 4) * MEBIBYTE) for s in leaking.samples]

    found = leaking.faults(Bounds())

    assert len(found) == 1
    assert "resident_bytes grew" in found[0]


def test_what_is_left_over_after_the_clients_is_a_fault() -> None:
    left = series(*[20] * 20)
    left.after = Sample(21.0, 20, 30, 70 * MEBIBYTE)

    assert left.faults(Bounds()) == ["proxy 0: 24 tasks are left over after all clients have gone"]


def test_too_few_samples_prove_nothing() -> None:
    assert series(20, 20, 20).faults(Bounds()) == ["proxy 0: only 3 samples"]


def test_the_table_shows_every_process_and_measure() -> None:
    shown = table([series(*[20] * 20)])

    assert [row.split()[2] for row in shown.splitlines()[1:]] == ["descriptors", "tasks", "resident"]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("embedded", [False, True], ids=["PostgreSQL and Valkey", "SQLite alone"])
def test_a_short_soak_holds(tmp_path: Path, embedded: bool) -> None:
    verdict = soak(tmp_path, seconds=40, embedded=embedded)

    print(verdict.shown())
    assert verdict.faults == []
    assert verdict.done["rotation"] + verdict.done["rotation (not taken)"] > 0
