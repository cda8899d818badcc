"""Where in a head a marker was seen, in words: for whoever has to find out why a placeholder was refused.

Rule: names and numbers, never what stands there. A name that a marker is in, that is long, or that is not spelt like a
name is not repeated. Only asked when a request is refused.
"""

import re
from typing import Final

from egress_proxy.core.fields import Field, Mark, Slot, name_holds_marker, target_marks
from egress_proxy.core.substitution import FoundMark, query_pairs

TARGET: Final = "the request target"
_FIELD_NAME: Final = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_PARAMETER: Final = re.compile(r"[A-Za-z0-9_.~\[\]-]{1,64}")


def seen_in(found: FoundMark, target: bytes) -> str:
    """Such as `the header x-api-key`, `the query parameter key`, `path segment 3`; says so where it is encoded."""
    mark, field = found
    if field is not None and mark.slot is Slot.HIDDEN and name_holds_marker(field.line.partition(b":")[0]):
        return "the name of a header"
    place = _in_target(mark, target) if field is None else _in_field(mark, field)
    return f"{place}, encoded" if mark.slot is Slot.HIDDEN else place


def _in_field(mark: Mark, field: Field) -> str:
    named = f"the header {field.name.decode()}" if _FIELD_NAME.fullmatch(field.name) else "a header"
    return f"the Basic credentials in {named}" if mark.slot is Slot.BASIC else named


def _in_target(mark: Mark, target: bytes) -> str:
    scheme, found, rest = target.partition(b"://")
    if found and b"/" not in scheme:
        target = b"/" + rest.partition(b"/")[2]
    path, _, query = target.partition(b"#")[0].partition(b"?")
    for number, segment in enumerate(path.removeprefix(b"/").split(b"/"), 1):
        if _holds(segment, mark):
            return f"path segment {number}"
    for number, pair in enumerate(query.split(b"&"), 1):
        if _holds(pair, mark):
            name, value = next(query_pairs(pair.decode("latin-1")))
            is_plain_name = _PARAMETER.fullmatch(name) and _holds(value.encode("latin-1"), mark)
            return f"the query parameter {name}" if is_plain_name else f"query parameter {number}"
    return TARGET


def _holds(piece: bytes, mark: Mark) -> bool:
    """Whether this mark is in there: the same one, however it is spelt."""
    seen = mark.text[mark.sighting.start : mark.sighting.end]
    return any(
        other.slot is mark.slot and other.text[other.sighting.start : other.sighting.end] == seen
        for other in target_marks(piece)
    )
