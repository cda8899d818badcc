"""Where readers are known to differ, each with the reason why nothing follows from it."""

import re
from dataclasses import dataclass
from typing import Final

from egress_proxy.core.fields import HOP_BY_HOP


@dataclass(frozen=True, slots=True)
class Stricter:
    """A reader refuses what the proxy passes: there is no second reading of it."""

    reader: str
    error: "re.Pattern[str]"
    reason: str
    leaving: bool = False
    """Whether it stops at what leaves the proxy, too."""


STRICTER: Final = (
    Stricter(
        "h11",
        re.compile("^no request line received$"),
        "RFC 9112 §2.2 has a server take an empty line before a request; it goes no further",
    ),
    Stricter(
        "aiohttp",
        re.compile(
            "^BadHttpMessage: Duplicate "
            "'(?i:content-location|content-range|content-type|etag|max-forwards|server|user-agent)'"
        ),
        "twice a field that RFC 9110 has once; none of them frames a message, and the proxy believes none of them",
        leaving=True,
    ),
)

OUR_OWN: Final = {
    b"host": "names the destination that was decided on",
    b"transfer-encoding": "a chunked body is chunked anew",
    b"accept-encoding": "of a swapped request: what is compressed cannot be searched on its way back",
    b"authorization": "the placement that is swapped",
    b"connection": "one for each hop",
    b"upgrade": "to WebSocket alone, in our own words",
    b"location": "on a base URL in the words of that URL",
    b"content-length": "a reply without content states none (RFC 9110 §8.6)",
}
DROPPED: Final = {
    **dict.fromkeys(HOP_BY_HOP, "one hop's own (RFC 9110 §7.6.1)"),
    b"range": "of a swapped request: a secret cut into parts is not found",
    b"if-range": "as range",
    b"alt-svc": "would lead the client past the proxy",
    b"strict-transport-security": "would bind the proxy's own name",
    b"referer": "where it names the proxy itself",
    b"origin": "where it names the proxy itself",
    b"via": "docs/adr/0025",
    b"forwarded": "docs/adr/0025",
}
_DROPPED_PREFIXES: Final = (b"coatcheck-", b"x-forwarded-", b"x-sh-subject")


def excuse(reader: str, error: str, *, leaving: bool = False) -> bool:
    """Whether it is known that this reader stops there."""
    known = [each for each in STRICTER if each.reader == reader and (each.leaving or not leaving)]
    return any(each.error.search(error) for each in known)


def is_our_own(name: bytes) -> bool:
    """Fields that the proxy writes itself."""
    return name in OUR_OWN


def is_dropped(name: bytes) -> bool:
    """Fields that do not go on."""
    return name in DROPPED or name.replace(b"_", b"-").startswith(_DROPPED_PREFIXES)
