"""What kinds of credential there are, and which of them a proxy can place as text.

Rule: whoever does not know a kind does not use it. A signing key or a certificate is a document: put into a header as
if it were a token, it would be a key given away.
"""

from enum import StrEnum
from typing import Final


class CredentialKind(StrEnum):
    STATIC = "static"
    OAUTH_REFRESH_TOKEN = "oauth_refresh_token"
    OAUTH_CLIENT_CREDENTIALS = "oauth_client_credentials"
    JWT_BEARER = "jwt_bearer"
    GOOGLE_SERVICE_ACCOUNT = "google_service_account"
    GITHUB_APP = "github_app"
    AWS_ASSUME_ROLE = "aws_assume_role"
    HMAC = "hmac"
    CLIENT_CERTIFICATE = "client_certificate"


PLACED: Final = frozenset(
    {
        CredentialKind.STATIC,
        CredentialKind.OAUTH_REFRESH_TOKEN,
        CredentialKind.OAUTH_CLIENT_CREDENTIALS,
        CredentialKind.JWT_BEARER,
        CredentialKind.GOOGLE_SERVICE_ACCOUNT,
        CredentialKind.GITHUB_APP,
    }
)
"""Their secret, as resolved, is a text for a placement. The others' is a JSON document to sign or prove with."""


_PLACED_NAMES: Final = frozenset(kind.value for kind in PLACED)


def is_placed(kind: str) -> bool:
    """Whether that (perhaps unknown) kind's secret is a text for a placement."""
    return kind in _PLACED_NAMES
