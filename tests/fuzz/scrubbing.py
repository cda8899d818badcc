"""What has to hold of scrubbing, for any secret, any reply and any cuts.

Rule: no form of the secret comes out whole; of one that was cut early no more comes out than could pass before anything
was held back; nothing else is changed, nothing is lost; a short secret blocks every reply that it stands in, and no
other.
"""

from collections.abc import Sequence

from egress_proxy.core.needles import Needles
from egress_proxy.core.scrub import LeakError, Scrubber
from tests.fuzz.path import cut


def check_reply_is_scrubbed(secret: str, known: int, data: bytes, cuts: Sequence[int]) -> None:
    needles = Needles.of((secret, min(known, len(secret))))
    stands = [
        (at, form) for form in needles.forms for at in range(len(data)) if data.startswith(form.text, at)
    ]  # every one, also those that overlap
    for by_last in (False, True):
        scrubber = Scrubber(needles)
        try:
            out = _through(scrubber, cut(data, cuts), by_last=by_last)
        except LeakError:
            assert stands, "blocked for nothing"
            assert not needles.are_guarded
            continue
        assert len(out) == len(data), f"{len(data)} bytes became {len(out)}"
        assert needles.are_guarded or not stands, "a short secret passed"
        assert scrubber.hits == len(stands), f"{scrubber.hits} hits, it stands there {len(stands)} times"
        _check_bytes(data, out, [(at, at + len(form.text), form.decisive) for at, form in stands])
        assert not any(form.text in out for _, form in stands), "it came out whole"


def _through(scrubber: Scrubber, pieces: list[bytes], *, by_last: bool) -> bytes:
    if by_last and pieces:
        return b"".join([*map(scrubber.feed, pieces[:-1]), scrubber.last(pieces[-1])])
    return b"".join(map(scrubber.feed, pieces)) + scrubber.finish()


def _check_bytes(data: bytes, out: bytes, stands: list[tuple[int, int, int]]) -> None:
    may = {at for begin, end, _ in stands for at in range(begin, end)}
    must = {at for begin, end, decisive in stands for at in range(begin + decisive - 1, end)}
    for at, (came, went) in enumerate(zip(data, out, strict=True)):
        assert went == came or (went == 0x2A and at in may), f"byte {at} was changed"
        assert went == 0x2A or at not in must, f"byte {at} of the secret came out"
