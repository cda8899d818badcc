"""Each kind of credential as data: its settings, the form of its secret, and what a change of settings means.

Rule: settings hold nothing secret and are part of what the secret is sealed to. A secret is brought into one form when
it is submitted, so that what is opened later is never a surprise. A kind that is not in `KINDS` does not exist.

| kind                       | its secret                                         | what is resolved              |
|----------------------------|----------------------------------------------------|-------------------------------|
| `static`                   | the key itself                                     | the key                       |
| `oauth_refresh_token`      | refresh token, and what its client proves itself by| access token (RFC 6749 §6)    |
| `oauth_client_credentials` | client secret or private key                       | access token (RFC 6749 §4.4)  |
| `jwt_bearer`               | private key                                        | access token (RFC 7523 §2.1)  |
| `google_service_account`   | the account's key file                             | access token or ID token      |
| `github_app`               | the app's private key                              | installation access token     |
| `aws_assume_role`          | an access key                                      | the role's temporary keys     |
| `hmac`                     | a signing key                                      | the key and how to sign       |
| `client_certificate`       | certificate chain and private key, PEM             | both                          |

The last three are resolved as JSON documents, the others as text.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Annotated, Any, Final, Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from control_plane.contract.kinds import CredentialKind
from control_plane.contract.secret import Secret, UnusableSecretError
from control_plane.core.probe import SETTING as PROBE_SETTING
from control_plane.core.urls import OutboundUrlText

MAX_ITEMS: Final = 64
MIN_RSA_BITS: Final = 2048


class InvalidSettingsError(ValueError):
    """`field` is the setting at fault (or empty); the message says what was expected and repeats nothing."""

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(expected)
        self.field = field


class InvalidSecretError(ValueError):
    """The secret is not of its kind's form; the message says what was expected and repeats nothing."""


# --- settings --------------------------------------------------------------------------------------------------------


def _whole(value: Any) -> Any:
    # JSON Schema counts 5.0 among the integers; strict validation would not.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Token = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,255}$")]
Text = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]{1,1024}$")]
ScopeText = Annotated[
    str, StringConstraints(pattern=r"^[\x21\x23-\x5b\x5d-\x7e]+( [\x21\x23-\x5b\x5d-\x7e]+)*$", max_length=4096)
]
"""RFC 6749 §3.3: names, separated by single spaces."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
Algorithm = Literal["RS256", "PS256", "ES256", "EdDSA"]


class KindSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class StaticSettings(KindSettings):
    """None."""


class _TokenClient(KindSettings):
    """A client at a token endpoint, and how it proves itself there (RFC 6749 §2.3, RFC 7523 §2.2)."""

    token_url: OutboundUrlText
    client_id: Text
    client_authentication: Literal["client_secret_basic", "client_secret_post", "private_key_jwt", "none"] = (
        "client_secret_basic"
    )
    algorithm: Algorithm = "RS256"
    """Of `private_key_jwt`."""
    key_id: Token | None = None
    """`kid` of `private_key_jwt`."""
    assertion_audience: Text | None = None
    """`aud` of `private_key_jwt`; the token URL if left out."""
    scope: ScopeText | None = None


class RefreshTokenSettings(_TokenClient):
    refresh_token_use: Literal["once", "many"] | None = None
    """Whether a refresh token may be sent again where it is not known what became of it. Left out: once, until the
    provider has answered without a new one."""


class ClientCredentialsSettings(_TokenClient):
    client_authentication: Literal["client_secret_basic", "client_secret_post", "private_key_jwt"] = (
        "client_secret_basic"
    )
    audience: Text | None = None
    resource: Text | None = None
    """RFC 8707. Named to the provider, never fetched."""


class JwtBearerSettings(KindSettings):
    token_url: OutboundUrlText
    issuer: Text
    subject: Text | None = None
    """The issuer if left out."""
    audience: Text | None = None
    """The token URL if left out."""
    algorithm: Algorithm = "RS256"
    key_id: Token | None = None
    scope: ScopeText | None = None


class GoogleServiceAccountSettings(KindSettings):
    token: Literal["access_token", "id_token"] = "access_token"
    scopes: Annotated[list[Token], Field(min_length=1, max_length=MAX_ITEMS)] | None = None
    """Of access tokens."""
    target_audience: Text | None = None
    """Of ID tokens."""
    subject: Text | None = None
    """Whom the account stands for, where its domain lets it."""
    token_url: OutboundUrlText = "https://oauth2.googleapis.com/token"


class GithubAppSettings(KindSettings):
    app_id: Name
    """The app's id or client id."""
    installation_id: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,20}$")]
    repositories: Annotated[list[Name], Field(min_length=1, max_length=MAX_ITEMS)] | None = None
    permissions: dict[Name, Literal["read", "write", "admin"]] | None = None
    api_url: OutboundUrlText = "https://api.github.com/"


class AwsAssumeRoleSettings(KindSettings):
    role_arn: Annotated[
        str, StringConstraints(pattern=r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9+=,.@_/-]{1,512}$")
    ]
    region: Annotated[str, StringConstraints(pattern=r"^[a-z]{2}(-[a-z]{2,12}){1,3}-[0-9]{1,2}$")]
    service: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")] | None = None
    """What requests are signed for; from the host if left out."""
    external_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+=,.@:/_-]{2,1224}$")] | None = None
    session_name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+=,.@_-]{2,64}$")] = "coatcheck"
    duration_seconds: Annotated[int, BeforeValidator(_whole), Field(ge=900, le=43_200)] = 3600
    sts_url: OutboundUrlText | None = None
    """The region's own if left out."""

    @property
    def sts_endpoint(self) -> str:
        # https://docs.aws.amazon.com/general/latest/gr/sts.html: China has a suffix of its own.
        suffix = "amazonaws.com.cn" if self.region.startswith("cn-") else "amazonaws.com"
        return self.sts_url or f"https://sts.{self.region}.{suffix}/"


class HmacSettings(KindSettings):
    algorithm: Literal["sha256", "sha384", "sha512", "sha1"] = "sha256"
    encoding: Literal["text", "hex", "base64"] = "text"
    """How the key is written."""
    key_id: Text | None = None


class ClientCertificateSettings(KindSettings):
    """None."""


def _check_google(settings: GoogleServiceAccountSettings) -> None:
    if settings.token == "access_token" and not settings.scopes:
        raise InvalidSettingsError("scopes", "an access token is for at least one scope")
    if settings.token == "access_token" and settings.target_audience is not None:
        raise InvalidSettingsError("target_audience", "it is an ID token's; set token to 'id_token'")
    if settings.token == "id_token" and settings.target_audience is None:
        raise InvalidSettingsError("target_audience", "an ID token is for one audience, such as a service's URL")
    if settings.token == "id_token" and settings.scopes:
        raise InvalidSettingsError("scopes", "an ID token has none; set target_audience")


# --- secrets ---------------------------------------------------------------------------------------------------------


def _plain(_settings: Any, text: str) -> str:
    try:
        return Secret.submitted(text).reveal()
    except UnusableSecretError as error:
        raise InvalidSecretError(str(error)) from None


def _refresh_token(settings: RefreshTokenSettings, text: str) -> str:
    match settings.client_authentication:
        case "none":
            return _members(text, "refresh_token")
        case "private_key_jwt":
            found = _members(text, "refresh_token", "private_key")
            return _with_key(found, settings.algorithm)
        case _:
            return _members(text, "refresh_token", "client_secret")


def _client_credentials(settings: ClientCredentialsSettings, text: str) -> str:
    if settings.client_authentication == "private_key_jwt":
        return _with_key(_members(text, "private_key"), settings.algorithm)
    return _members(text, "client_secret")


def _jwt_bearer(settings: JwtBearerSettings, text: str) -> str:
    return _with_key(_members(text, "private_key"), settings.algorithm)


def _google_key_file(settings: GoogleServiceAccountSettings, text: str) -> str:
    found = _object(text, "the account's key file, a JSON object")
    if found.get("type") != "service_account":
        raise InvalidSecretError("expected a service account's key file: its 'type' is 'service_account'")
    kept = {
        name: _text(found.get(name), f"the key file has no '{name}'")
        for name in ("type", "client_email", "private_key", "private_key_id")
    }
    # The key file does not decide where an assertion goes: the settings do, and they are what it is sealed to.
    if found.get("token_uri") not in (None, settings.token_url):
        raise InvalidSecretError("the key file's 'token_uri' is not the setting 'token_url'; set it to the same")
    return _with_key(_document(kept), "RS256")


def _github_key(_settings: GithubAppSettings, text: str) -> str:
    return _with_key(_members(text, "private_key"), "RS256")


def _aws_key(_settings: AwsAssumeRoleSettings, text: str) -> str:
    found = json.loads(_members(text, "access_key_id", "secret_access_key", optional=("session_token",)))
    if not re.fullmatch(r"[A-Z0-9]{16,128}", found["access_key_id"]):
        raise InvalidSecretError("'access_key_id' is 16 or more capital letters and digits, such as AKIA…")
    return _document(found)


def _hmac_key(settings: HmacSettings, text: str) -> str:
    key = json.loads(_members(text, "key"))["key"]
    try:
        raw = _key_bytes(key, settings.encoding)
    except (ValueError, binascii.Error):
        raise InvalidSecretError(f"the key is not {settings.encoding}, as the setting 'encoding' says") from None
    if len(raw) < 16:
        raise InvalidSecretError("a signing key has at least 16 bytes")
    return _document({"key": key})


def _key_bytes(key: str, encoding: str) -> bytes:
    match encoding:
        case "hex":
            return bytes.fromhex(key)
        case "base64":
            return base64.b64decode(key, validate=True)
        case _:
            return key.encode()


def _certificate(_settings: ClientCertificateSettings, text: str) -> str:
    if text.lstrip().startswith("{"):
        found = json.loads(_members(text, "certificate", "private_key"))
        chain, key = found["certificate"], found["private_key"]
    else:
        chain = key = text
    try:
        certificates = x509.load_pem_x509_certificates(chain.encode())
    except ValueError:
        raise InvalidSecretError("expected a certificate chain and a private key, both PEM") from None
    private_key = _private_key(key)
    if private_key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) != certificates[
        0
    ].public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo):
        raise InvalidSecretError("the private key is not the first certificate's")
    return _document(
        {
            "certificate": "".join(certificate.public_bytes(Encoding.PEM).decode() for certificate in certificates),
            "private_key": _pem_block(key, "PRIVATE KEY-----"),
        }
    )


def certificate_end(secret_text: str) -> float:
    """Unix seconds: when the first of a `client_certificate`'s certificates ends."""
    chain = json.loads(secret_text)["certificate"]
    return min(
        certificate.not_valid_after_utc.astimezone(UTC).timestamp()
        for certificate in x509.load_pem_x509_certificates(chain.encode())
    )


def _members(text: str, *required: str, optional: tuple[str, ...] = ()) -> str:
    """A JSON object with exactly these texts, in one spelling. Where there is only one, it may stand by itself."""
    if len(required) == 1 and not text.lstrip().startswith("{"):
        return _document({required[0]: text.strip("\n") if "-----BEGIN" in text else _plain(None, text)})
    expected = " and ".join(f"'{name}'" for name in required)
    found = _object(text, f"a JSON object with {expected}")
    if unknown := set(found) - {*required, *optional}:
        raise InvalidSecretError(f"expected a JSON object with {expected} alone; it has {len(unknown)} more")
    kept = {name: _text(found.get(name), f"expected a JSON object with {expected}") for name in required}
    kept |= {name: _text(found[name], f"'{name}' is no text") for name in optional if found.get(name) is not None}
    return _document(kept)


def _object(text: str, expected: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidSecretError(f"expected {expected}")
    return found


def _text(value: Any, otherwise: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidSecretError(otherwise)
    return value


def _document(members: Mapping[str, str]) -> str:
    return json.dumps(dict(members), separators=(",", ":"), ensure_ascii=True)


def _with_key(document: str, algorithm: str) -> str:
    members = json.loads(document)
    key = _private_key(members["private_key"])
    fits = {
        "RS256": isinstance(key, rsa.RSAPrivateKey) and key.key_size >= MIN_RSA_BITS,
        "PS256": isinstance(key, rsa.RSAPrivateKey) and key.key_size >= MIN_RSA_BITS,
        "ES256": isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1),
        "EdDSA": isinstance(key, ed25519.Ed25519PrivateKey),
    }[algorithm]
    if not fits:
        wanted = {"ES256": "an EC key on P-256", "EdDSA": "an Ed25519 key"}
        raise InvalidSecretError(f"{algorithm} needs {wanted.get(algorithm, 'an RSA key of 2048 bits or more')}")
    return document


def _private_key(pem: str) -> Any:
    try:
        return load_pem_private_key(pem.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InvalidSecretError("expected a private key, PEM, without a passphrase") from None


def _pem_block(text: str, label: str) -> str:
    """The one block whose label ends so."""
    found = re.search(rf"-----BEGIN [A-Z ]*{label}.*?-----END [A-Z ]*{label}", text, re.DOTALL)
    if found is None:
        raise InvalidSecretError("expected a private key, PEM, without a passphrase")
    return found.group(0) + "\n"


# --- the table -------------------------------------------------------------------------------------------------------


def _unchecked(_settings: Any) -> None:
    """Each setting is checked by itself."""


@dataclass(frozen=True, slots=True)
class KindFacts:
    settings: type[KindSettings]
    settle_secret: Callable[[Any, str], str]
    """The secret in its one form. Raises `InvalidSecretError`."""
    check: Callable[[Any], None] = _unchecked
    """What settings must be together. Raises `InvalidSettingsError`."""
    mints: bool = False
    """What is resolved comes from a provider and ends."""
    replaces_secret: bool = False
    """The provider may answer with a new secret that takes the place of ours."""


K = CredentialKind

KINDS: Final[Mapping[CredentialKind, KindFacts]] = {
    K.STATIC: KindFacts(StaticSettings, _plain),
    K.OAUTH_REFRESH_TOKEN: KindFacts(RefreshTokenSettings, _refresh_token, mints=True, replaces_secret=True),
    K.OAUTH_CLIENT_CREDENTIALS: KindFacts(ClientCredentialsSettings, _client_credentials, mints=True),
    K.JWT_BEARER: KindFacts(JwtBearerSettings, _jwt_bearer, mints=True),
    K.GOOGLE_SERVICE_ACCOUNT: KindFacts(GoogleServiceAccountSettings, _google_key_file, _check_google, mints=True),
    K.GITHUB_APP: KindFacts(GithubAppSettings, _github_key, mints=True),
    K.AWS_ASSUME_ROLE: KindFacts(AwsAssumeRoleSettings, _aws_key, mints=True),
    K.HMAC: KindFacts(HmacSettings, _hmac_key),
    K.CLIENT_CERTIFICATE: KindFacts(ClientCertificateSettings, _certificate),
}


def kind_named(name: str) -> CredentialKind:
    """Raises `InvalidSettingsError` for one that there is none of."""
    try:
        return CredentialKind(name)
    except ValueError:
        raise InvalidSettingsError("", f"one of {', '.join(KINDS)}") from None


def settled_settings(kind: CredentialKind, untrusted: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in their one form, without what is left out. Raises `InvalidSettingsError`."""
    settings: KindSettings = parsed_settings(kind, untrusted)
    return settings.model_dump(mode="json", exclude_none=True)


def parsed_settings(kind: CredentialKind, untrusted: Mapping[str, Any]) -> Any:
    """An instance of the kind's own class. Raises `InvalidSettingsError`."""
    own = {name: value for name, value in untrusted.items() if name != PROBE_SETTING}
    try:
        settings = KINDS[kind].settings.model_validate(own)
    except ValidationError as error:
        raise _invalid(error, kind) from None
    KINDS[kind].check(settings)
    return settings


def settled_secret(kind: CredentialKind, settings: Mapping[str, Any], submitted: Secret) -> Secret:
    """The secret in its kind's one form. `settings` are settled ones. Raises `InvalidSecretError`."""
    facts = KINDS[kind]
    return Secret(facts.settle_secret(parsed_settings(kind, settings), submitted.reveal()))


def is_replaced(kind: str) -> bool:
    """Whether that (perhaps unknown) kind's provider may put another secret in the place of ours."""
    return any(facts.replaces_secret for known, facts in KINDS.items() if known.value == kind)


def narrows(field: str, new: Any, *, old: Any) -> bool:
    """Whether that setting, changed so, lets the same secret reach no more than before. Unsure is no."""
    match field, old, new:
        case "scope", str(), str():
            return set(new.split()) <= set(old.split())
        case "scopes" | "repositories", list(), list():
            return set(new) <= set(old)
        case "repositories", None, list():
            return True  # without the setting it is all of the installation's
        case "permissions", dict(), dict():
            return bool(new) and new.items() <= old.items()
        case "permissions", None, dict():
            return bool(new)
        case "probe", dict(), None:
            return True
    return False


def _invalid(error: ValidationError, kind: CredentialKind) -> InvalidSettingsError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "missing":
            return InvalidSettingsError(place, f"a credential of kind '{kind}' needs it")
        case "extra_forbidden":
            known = ", ".join(KINDS[kind].settings.model_fields) or "no settings"
            return InvalidSettingsError(place, f"a credential of kind '{kind}' has {known}")
        case "string_pattern_mismatch":
            return InvalidSettingsError(place, "it has characters, or a form, that it cannot have")
        case _:
            return InvalidSettingsError(place, str(first["msg"]))
