"""Names on the wire: header fields, token types, media types."""

from typing import Final

SUBJECT_HEADER: Final = "X-SH-Subject"
REFUSAL_HEADER: Final = "Coatcheck-Refusal"
REQUEST_ID_HEADER: Final = "Coatcheck-Request-Id"
AUDIT_HEADER: Final = "Coatcheck-Audit"
"""`unavailable`: it was done, and the audit trail could not take it yet."""
SHOULD_RETRY_HEADER: Final = "x-should-retry"
OWN_HEADER_PREFIX: Final = "coatcheck-"
"""No header with this prefix comes in from an upstream or goes out to one."""

PROBLEM_JSON: Final = "application/problem+json"  # RFC 9457
REFUSAL_TYPE_PREFIX: Final = "urn:coatcheck:refusal:"

GRANT_TYPE_TOKEN_EXCHANGE: Final = "urn:ietf:params:oauth:grant-type:token-exchange"  # RFC 8693 §2.1
GRANT_TYPE_CLIENT_CREDENTIALS: Final = "client_credentials"  # RFC 6749 §4.4
TOKEN_TYPE_JWT: Final = "urn:ietf:params:oauth:token-type:jwt"  # RFC 8693 §3
TOKEN_TYPE_ID_TOKEN: Final = "urn:ietf:params:oauth:token-type:id_token"
TOKEN_TYPE_ACCESS_TOKEN: Final = "urn:ietf:params:oauth:token-type:access_token"
TOKEN_TYPE_PLACEHOLDER: Final = "urn:coatcheck:token-type:placeholder"
TOKEN_TYPE_PROXY_CREDENTIAL: Final = "urn:coatcheck:token-type:proxy-credential"
TOKEN_TYPE_DIRECT: Final = "urn:coatcheck:token-type:direct"
TOKEN_TYPE_SESSION: Final = "urn:coatcheck:token-type:session"

SESSION_TOKEN_TYP: Final = "coatcheck-session+jwt"
CLIENT_TOKEN_TYP: Final = "coatcheck-client+jwt"

UNUSED_VARIABLE_SENTINEL: Final = "coatcheck-unused-see-authorization-header"
"""What an SDK's variable holds when the SDK insists on one and the key travels elsewhere."""
