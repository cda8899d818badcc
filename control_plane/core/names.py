"""The grammar of names and ids, and how new ids are made.

Rule: an id is only ever made here, from entropy that is passed in; a name from outside is checked against its pattern
at the edge and is never "repaired".
"""

import re
from collections.abc import Mapping
from typing import Final

from control_plane.contract.placeholder import BASE62

CREDENTIAL_NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
TENANT_ID: Final = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
CLIENT_ID: Final = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
OBJECT_ID: Final = r"^[0-9A-Za-z_]{1,64}$"
"""Ids that were made here, such as `ses_…` and `req_…`."""
PRINTABLE: Final = r"^[^\x00-\x1f\x7f]{1,255}$"
"""Subjects and roles: an identity provider's own strings, without control characters."""
SOURCE_NAME: Final = CREDENTIAL_NAME
NAME_IN_SOURCE: Final = r"^[A-Za-z0-9_-]{1,64}$"
"""What a tenant may say about a place inside a source: no separators, so that it never leads elsewhere."""
NOTE: Final = r"^[^\x00-\x1f\x7f]{0,200}$"
"""A person's own words."""
VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"

IN_WORDS: Final[Mapping[str, str]] = {
    CREDENTIAL_NAME: "1 to 40 lower-case letters, digits and '-', beginning and ending with a letter or digit",
    TENANT_ID: "1 to 64 lower-case letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
    OBJECT_ID: "an id: 1 to 64 letters, digits and '_'",
    NOTE: "0 to 200 characters without control characters",
    PRINTABLE: "1 to 255 characters without control characters",
    NAME_IN_SOURCE: "1 to 64 letters, digits, '_' and '-'",
    VARIABLE: "an environment variable: 1 to 128 letters, digits and '_', not beginning with a digit",
}
"""What a pattern lets through, for whoever wrote something else. (A client's id is like a tenant's.)"""

ID_ENTROPY_BYTES: Final = 16


def new_id(kind: str, entropy: bytes) -> str:
    """`<kind>_<22 characters of base62>`, such as `cred_0Xy…`. `entropy` is `ID_ENTROPY_BYTES` long."""
    number, digits = int.from_bytes(entropy), []
    for _ in range(22):
        number, rest = divmod(number, 62)
        digits.append(BASE62[rest])
    return f"{kind}_{''.join(digits)}"


def is_object_id(text: str) -> bool:
    return re.fullmatch(OBJECT_ID, text) is not None


def is_printable(text: str) -> bool:
    return re.fullmatch(PRINTABLE, text) is not None


def is_client_id(text: str) -> bool:
    return re.fullmatch(CLIENT_ID, text) is not None


def default_variable(credential_name: str) -> str:
    """The environment variable of a credential that names none: `my-api` becomes `MY_API_API_KEY`."""
    stem = credential_name.upper().replace("-", "_")
    return ("_" if stem[0].isdigit() else "") + stem + "_API_KEY"
