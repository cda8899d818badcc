"""Where a secret stands in a request. A credential declares one or more placements; a request uses exactly one."""

import re
from dataclasses import dataclass
from typing import Any, Final, Literal

SECRET_FIELD: Final = "{secret}"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")  # RFC 9110 §5.6.2
_PARAMETER = re.compile(r"[A-Za-z0-9_.~-]{1,64}")
_SEGMENT = re.compile(r"[A-Za-z0-9_.~-]{0,64}")
_PRINTABLE = re.compile(r"[\x20-\x7e]{0,128}")

FRAMING_AND_ROUTING_HEADERS: Final = frozenset(
    "host content-length transfer-encoding connection keep-alive te trailer upgrade expect proxy-authorization "
    "proxy-authenticate proxy-connection accept-encoding content-encoding range".split()
)
LOG_SINK_HEADERS: Final = frozenset("user-agent referer origin from via forwarded x-forwarded-for cookie".split())
"""Headers that upstreams log or echo as a matter of course: a secret never goes there."""


class InvalidPlacementError(ValueError):
    """The placement is not one a secret can have; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class HeaderPlacement:
    """A header field whose value is `format` with the secret in the place of `{secret}`. Bearer is one of these."""

    name: str
    """Lower case."""
    format: str = SECRET_FIELD
    kind: Literal["header"] = "header"

    def __post_init__(self) -> None:
        if not _TOKEN.fullmatch(self.name) or self.name != self.name.lower():
            raise InvalidPlacementError("a header name is letters, digits and hyphens, such as 'x-api-key'")
        if self.name in FRAMING_AND_ROUTING_HEADERS or self.name.startswith("coatcheck-"):
            raise InvalidPlacementError(f"the header '{self.name}' frames or routes messages; a secret cannot go there")
        if self.name in LOG_SINK_HEADERS:
            raise InvalidPlacementError(f"the header '{self.name}' ends up in logs; a secret cannot go there")
        if self.format.count(SECRET_FIELD) != 1 or not _PRINTABLE.fullmatch(self.format):
            raise InvalidPlacementError("a header format is printable ASCII with exactly one '{secret}' in it")
        if self.format != self.format.strip():
            raise InvalidPlacementError("a header format neither begins nor ends with white space")

    @property
    def prefix(self) -> str:
        return self.format.partition(SECRET_FIELD)[0]

    @property
    def suffix(self) -> str:
        return self.format.partition(SECRET_FIELD)[2]


@dataclass(frozen=True, slots=True)
class BasicPlacement:
    """`Authorization: Basic base64(username:secret)` (RFC 7617). The credential names the user."""

    username: str
    kind: Literal["basic"] = "basic"

    def __post_init__(self) -> None:
        if ":" in self.username or not _PRINTABLE.fullmatch(self.username):
            raise InvalidPlacementError("a Basic user name is at most 128 printable ASCII characters without ':'")


@dataclass(frozen=True, slots=True)
class QueryPlacement:
    """The value of one query parameter, percent-encoded on its way out."""

    parameter: str
    kind: Literal["query"] = "query"

    def __post_init__(self) -> None:
        if not _PARAMETER.fullmatch(self.parameter):
            raise InvalidPlacementError("a query parameter is letters, digits, '_', '.', '~' and '-', such as 'key'")


@dataclass(frozen=True, slots=True)
class PathPlacement:
    """One whole segment of the path: `format` with the secret, percent-encoded, in the place of `{secret}`."""

    format: str = SECRET_FIELD
    kind: Literal["path"] = "path"

    def __post_init__(self) -> None:
        if self.format.count(SECRET_FIELD) != 1 or not _SEGMENT.fullmatch(self.format.replace(SECRET_FIELD, "")):
            raise InvalidPlacementError("a path format is letters, digits, '_', '.', '~', '-' and one '{secret}'")

    @property
    def prefix(self) -> str:
        return self.format.partition(SECRET_FIELD)[0]

    @property
    def suffix(self) -> str:
        return self.format.partition(SECRET_FIELD)[2]


Placement = HeaderPlacement | BasicPlacement | QueryPlacement | PathPlacement

BEARER: Final = HeaderPlacement(name="authorization", format="Bearer {secret}")


def placement_to_json(placement: Placement) -> dict[str, str]:
    match placement:
        case HeaderPlacement(name=name, format=format_):
            return {"kind": "header", "name": name, "format": format_}
        case BasicPlacement(username=username):
            return {"kind": "basic", "username": username}
        case QueryPlacement(parameter=parameter):
            return {"kind": "query", "parameter": parameter}
        case PathPlacement(format=format_):
            return {"kind": "path", "format": format_}


def placement_from_json(data: dict[str, Any]) -> Placement:
    """Raises `InvalidPlacementError` for an unknown kind or unknown, missing or impossible fields."""
    fields = {key: value for key, value in data.items() if key != "kind"}
    if any(not isinstance(value, str) for value in fields.values()):
        raise InvalidPlacementError("every field of a placement is a string")
    try:
        match data.get("kind"):
            case "header":
                return HeaderPlacement(**fields)
            case "basic":
                return BasicPlacement(**fields)
            case "query":
                return QueryPlacement(**fields)
            case "path":
                return PathPlacement(**fields)
            case _:
                raise InvalidPlacementError("a placement's kind is 'header', 'basic', 'query' or 'path'")
    except TypeError:
        raise InvalidPlacementError(
            "a placement is {kind: header, name, format}, {kind: basic, username}, {kind: query, parameter} or "
            "{kind: path, format}"
        ) from None


def fits(secret_text: str, placement: Placement) -> bool:
    """Whether the secret can be carried there unaltered: a header takes ASCII (RFC 9110 §5.5), the others any text
    that does not mean something else there."""
    match placement:
        case HeaderPlacement():
            return secret_text.isascii()
        case BasicPlacement() | QueryPlacement():
            return True
        case PathPlacement():
            # RFC 3986 §3.3: these two segments are a direction, and no encoding makes them anything else.
            return placement.prefix + secret_text + placement.suffix not in (".", "..")
