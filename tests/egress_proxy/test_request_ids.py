"""Names of requests and events: each once, and none says how many there were."""

import re
from itertools import pairwise

import pytest

from egress_proxy.services import RequestIds


def test_names_are_each_once_and_of_a_form_that_every_part_takes() -> None:
    ids, others = RequestIds(), RequestIds()

    made = [ids.next() for _ in range(3_000)] + [others.next() for _ in range(3_000)]

    assert len(set(made)) == len(made)
    assert all(re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{24}", name) for name in made)
    assert len({name.partition("-")[0] for name in made}) == 2


@pytest.mark.guards("egress_proxy/services.py", "{self._store[begin : self._at]}", "{begin:024x}")
def test_what_comes_between_two_names_of_ones_own_does_not_show() -> None:
    ids = RequestIds()

    parts = [int(ids.next().partition("-")[2], 16) for _ in range(64)]

    assert len({later - earlier for earlier, later in pairwise(parts)}) == 63
