"""Where a secret may stand in a request, and where never."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.placement import (
    BEARER,
    FRAMING_AND_ROUTING_HEADERS,
    LOG_SINK_HEADERS,
    BasicPlacement,
    HeaderPlacement,
    InvalidPlacementError,
    PathPlacement,
    Placement,
    QueryPlacement,
    fits,
    placement_from_json,
    placement_to_json,
)

FILE = "control_plane/contract/placement.py"

printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40)
header_names = st.from_regex(r"x-[a-z0-9-]{1,20}", fullmatch=True)
formats = st.tuples(printable, printable).map(lambda ends: f"{ends[0].lstrip()}{{secret}}{ends[1].rstrip()}")
placements = (
    st.builds(HeaderPlacement, name=header_names, format=formats.filter(lambda text: text.count("{secret}") == 1))
    | st.builds(BasicPlacement, username=printable.filter(lambda name: ":" not in name))
    | st.builds(QueryPlacement, parameter=st.from_regex(r"[A-Za-z0-9_.~-]{1,64}", fullmatch=True))
    | st.builds(
        PathPlacement, format=st.from_regex(r"[A-Za-z0-9_.~-]{0,30}\{secret\}[A-Za-z0-9_.~-]{0,30}", fullmatch=True)
    )
)


@given(placement=placements)
def test_a_placement_survives_the_trip_to_json_and_back(placement: Placement) -> None:
    assert placement_from_json(dict(placement_to_json(placement))) == placement


@pytest.mark.parametrize(
    ("data", "placement"),
    [
        ({"kind": "header", "name": "authorization", "format": "Bearer {secret}"}, BEARER),
        ({"kind": "header", "name": "x-api-key"}, HeaderPlacement("x-api-key", "{secret}")),
        (
            {"kind": "header", "name": "authorization", "format": "token {secret}"},
            HeaderPlacement("authorization", "token {secret}"),
        ),
        ({"kind": "basic", "username": "x-access-token"}, BasicPlacement("x-access-token")),
        ({"kind": "basic", "username": ""}, BasicPlacement("")),
        ({"kind": "query", "parameter": "key"}, QueryPlacement("key")),
        ({"kind": "path", "format": "bot{secret}"}, PathPlacement("bot{secret}")),
    ],
)
def test_the_wire_form_is_fixed(data: dict[str, Any], placement: Placement) -> None:
    assert placement_from_json(data) == placement


@pytest.mark.parametrize(
    "data",
    [
        *({}, {"kind": None}, {"kind": "body", "field": "x"}, {"kind": "cookie", "name": "x"}, {"kind": ["header"]}),
        *(
            {"name": "x-api-key"},
            {"kind": "header"},
            {"kind": "basic"},
            {"kind": "query"},
            {"kind": "Header", "name": "x"},
        ),
        *({"kind": "header", "name": 1}, {"kind": "header", "name": None}, {"kind": "header", "name": ["x"]}),
        {"kind": "header", "name": "x-api-key", "colour": "red"},
        {"kind": "query", "parameter": "key", "name": "x"},
        {"kind": "basic", "username": "u", "password": "p"},
    ],
)
def test_an_unknown_or_incomplete_placement_is_an_error(data: dict[str, Any]) -> None:
    with pytest.raises(InvalidPlacementError):
        placement_from_json(data)


@pytest.mark.parametrize("name", sorted(FRAMING_AND_ROUTING_HEADERS))
@pytest.mark.guards(FILE, "if self.name in FRAMING_AND_ROUTING_HEADERS or", "if")
def test_a_header_that_frames_or_routes_never_holds_a_secret(name: str) -> None:
    with pytest.raises(InvalidPlacementError, match="frames or routes"):
        HeaderPlacement(name)


@pytest.mark.parametrize("name", ["coatcheck-refusal", "coatcheck-request-id", "coatcheck-anything"])
def test_our_own_headers_never_hold_a_secret(name: str) -> None:
    with pytest.raises(InvalidPlacementError):
        HeaderPlacement(name)


@pytest.mark.parametrize("name", sorted(LOG_SINK_HEADERS))
@pytest.mark.guards(FILE, "if self.name in LOG_SINK_HEADERS:", "if False:")
def test_a_header_that_ends_up_in_logs_never_holds_a_secret(name: str) -> None:
    with pytest.raises(InvalidPlacementError, match="logs"):
        HeaderPlacement(name)


@pytest.mark.parametrize(
    "name",
    ["", "X-Api-Key", "x api", "x:api", "x-api\r", "x\r\nevil", "x\x00", "é", "x" * 65, "(x)", "x/y", "x,y", '"x"'],
)
def test_an_odd_header_name_is_an_error(name: str) -> None:
    with pytest.raises(InvalidPlacementError):
        HeaderPlacement(name)


@pytest.mark.parametrize(
    "format_",
    [
        *("", "Bearer", "Bearer secret", "{Secret}", "{ secret }", "{secret}{secret}", "{secret} {secret}"),
        *("Bearer {secret}\r\nx: y", "Bearer\n{secret}", "\x00{secret}", "\t{secret}", "Bearér {secret}"),
        *(" {secret}", "{secret} ", "x" * 130 + "{secret}"),
    ],
)
@pytest.mark.guards(FILE, "if self.format.count(SECRET_FIELD) != 1 or not _PRINTABLE", "if not _PRINTABLE")
def test_a_format_has_the_secret_exactly_once_and_no_control_character(format_: str) -> None:
    with pytest.raises(InvalidPlacementError):
        HeaderPlacement("authorization", format_)


@pytest.mark.parametrize("username", ["a:b", ":", "a\n", "a\r\nb", "\x00", "é", "u" * 129])
def test_an_odd_basic_user_is_an_error(username: str) -> None:
    with pytest.raises(InvalidPlacementError):
        BasicPlacement(username)


@pytest.mark.parametrize("parameter", ["", "a=b", "a&b", "a b", "a%20", "key#", "a[]", "é", "k\n", "k" * 65])
def test_an_odd_query_parameter_is_an_error(parameter: str) -> None:
    with pytest.raises(InvalidPlacementError):
        QueryPlacement(parameter)


def test_a_format_falls_into_what_stands_before_and_after_the_secret() -> None:
    placement = HeaderPlacement("authorization", 'Token token="{secret}", v=1')

    assert (placement.prefix, placement.suffix) == ('Token token="', '", v=1')


@pytest.mark.parametrize(
    ("secret_text", "placement", "fitting"),
    [
        ("plain", BEARER, True),
        ("schlüssel", BEARER, False),
        ("\u4e2d", HeaderPlacement("x-api-key"), False),
        ("schlüssel", BasicPlacement("u"), True),
        ("a&b=c#d/%2e ü", QueryPlacement("key"), True),
        ("a&b=c#d/%2e ü", PathPlacement("bot{secret}"), True),
        ("..", PathPlacement(), False),
        (".", PathPlacement(".{secret}"), False),
        ("..", PathPlacement("bot{secret}"), True),
    ],
)
def test_a_header_takes_ascii_only(secret_text: str, placement: Placement, fitting: bool) -> None:
    assert fits(secret_text, placement) == fitting
