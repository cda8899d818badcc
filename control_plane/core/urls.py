"""URLs that the control plane itself fetches: where a token is minted, where keys are published, where a hook listens.

Rule: one spelling and one scheme. https, a canonical host, no user, no fragment, printable ASCII; whatever has no such
spelling is an error, so that what was judged is what is asked. (RFC 3986; hosts: `contract.destination`.)
"""

import re
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import AfterValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from control_plane.contract.destination import Endpoint, InvalidDestinationError, authority, split_authority

MAX_URL_LENGTH: Final = 2048
_TARGET: Final = re.compile(r"/?(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*")


class InvalidUrlError(ValueError):
    """Not a URL that we fetch; the message says what was expected and quotes nothing."""


@dataclass(frozen=True, slots=True)
class OutboundUrl:
    endpoint: Endpoint
    target: str
    """Path and query as sent, beginning with `/`."""

    @property
    def text(self) -> str:
        return self.endpoint.url + self.target

    @property
    def authority(self) -> str:
        """As a `Host` header has it."""
        return authority(self.endpoint.host, self.endpoint.port, self.endpoint.scheme)


def parse_outbound_url(untrusted_url: str) -> OutboundUrl:
    """Raises `InvalidUrlError`."""
    if len(untrusted_url) > MAX_URL_LENGTH:
        raise InvalidUrlError(f"a URL has at most {MAX_URL_LENGTH} characters")
    scheme, found, rest = untrusted_url.partition("://")
    if not found or scheme.lower() != "https":
        raise InvalidUrlError("a URL begins with https://")
    authority_text, target = _split(rest)
    if "@" in authority_text:
        raise InvalidUrlError("a URL has no user and no password in it")
    if "#" in target:
        raise InvalidUrlError("a URL has no fragment")
    if not _TARGET.fullmatch(target):
        raise InvalidUrlError("a URL's path and query are printable ASCII, anything else percent-encoded")
    try:
        host, port = split_authority(authority_text, default_port=443)
    except InvalidDestinationError as error:
        raise InvalidUrlError(str(error)) from None
    return OutboundUrl(Endpoint("https", host, port), target if target.startswith("/") else "/" + target)


def _canonical(untrusted_url: str) -> str:
    try:
        return parse_outbound_url(untrusted_url).text
    except InvalidUrlError as error:
        raise PydanticCustomError("outbound_url", "{reason}", {"reason": str(error)}) from None


OutboundUrlText = Annotated[
    str,
    StringConstraints(max_length=MAX_URL_LENGTH),
    AfterValidator(_canonical),
    WithJsonSchema(
        {"type": "string", "format": "uri", "pattern": "^[hH][tT][tT][pP][sS]://", "maxLength": MAX_URL_LENGTH}
    ),
]
"""The type of every field of a message or a setting that holds a URL of ours: in its one spelling."""


def _split(rest: str) -> tuple[str, str]:
    """The authority ends where the path, the query or the fragment begins (RFC 3986 §3.2)."""
    end = next((at for at, char in enumerate(rest) if char in "/?#\\"), len(rest))
    return rest[:end], rest[end:]
