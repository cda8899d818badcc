"""Settings of the control plane: `COATCHECK_CONTROL_PLANE_*`. Secrets are files, never values.

Rule: a name that is nobody's refuses to start and suggests the right one: a typing error never leaves a default in
force.
"""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from control_plane.contract.destination import InvalidDestinationError, split_authority
from control_plane.contract.settings import CONTROL_PLANE_PREFIX, refuse_unknown_settings

PREFIX: Final = CONTROL_PLANE_PREFIX


class DatabaseSettings(BaseSettings):
    """Where the database is: all that `coatcheck serve migrate` needs of the settings."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    database_url: str = ""
    """`sqlite+aiosqlite:////path/to/file`, or `postgresql+asyncpg://…`."""
    database_url_file: Path | None = None
    """Instead of `database_url`: a file that holds it, since a password may be in it."""
    migration_database_url: str = ""
    """PostgreSQL: the same database by the login that owns its tables, for migrations alone. Empty: they are applied
    by `coatcheck serve migrate`, and we start only on a database that has them."""
    migration_database_url_file: Path | None = None
    unbound_database_login: Literal["", "accepted-risk"] = ""
    """`accepted-risk`: PostgreSQL's row security may not bind our login (a superuser, the tables' owner). Then the
    scope in our own queries is the only wall between tenants."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_database(self) -> Self:
        if bool(self.database_url) == bool(self.database_url_file):
            raise ValueError(f"give one of {PREFIX}DATABASE_URL and {PREFIX}DATABASE_URL_FILE")
        if self.migration_database_url and self.migration_database_url_file:
            raise ValueError(
                f"give one of {PREFIX}MIGRATION_DATABASE_URL and {PREFIX}MIGRATION_DATABASE_URL_FILE, or neither"
            )
        return self

    @field_validator("database_url")
    @classmethod
    def _of_a_known_database(cls, value: str) -> str:
        if value and not value.startswith(("sqlite+aiosqlite:", "postgresql+asyncpg:")):
            # Not repeated: a password may be in it.
            raise ValueError(
                f"{PREFIX}DATABASE_URL is sqlite+aiosqlite:////path/to/file or "
                "postgresql+asyncpg://user:password@host/database"
            )
        return value

    @field_validator("migration_database_url")
    @classmethod
    def _of_postgresql(cls, value: str) -> str:
        if value and not value.startswith("postgresql+asyncpg:"):
            raise ValueError(f"{PREFIX}MIGRATION_DATABASE_URL is postgresql+asyncpg://user:password@host/database")
        return value

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Raises `UnknownSettingError`, or pydantic's own error for a bad value. `environment` is the process's own."""
        refuse_unknown_settings(environment, prefix=PREFIX, names=Settings.model_fields)
        return cls()


class Settings(DatabaseSettings):
    """Constructed from keywords, or by `from_environment`."""

    listen: str = "127.0.0.1:8470"
    """`host:port`. Port 0: any free one."""
    issuer_url: str | None = None
    """Our URL as others see it; `iss` of session tokens. None: made from `listen`."""
    kek_provider: Literal["files", "aws_kms", "vault_transit"] = "files"
    """Where the key-encryption key is that seals from now on. The others that are named here only open."""
    kek_files: Annotated[tuple[Path, ...], NoDecode] = ()
    """Key-encryption keys in files, newest first. A folder: the files in it, newest first by name. In the environment
    separated by commas."""
    kek_aws_key_arn: str = Field(default="", pattern=r"^(arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+)?$")
    kek_aws_endpoint: str = ""
    """None: AWS's own, of the key's region."""
    kek_aws_keys_file: Path | None = None
    """In the form of `~/.aws/credentials`. Instead: the next two."""
    kek_aws_role_arn: str = ""
    kek_aws_token_file: Path | None = None
    kek_vault_address: str = ""
    kek_vault_namespace: str = ""
    kek_vault_mount: str = "transit"
    kek_vault_key: str = ""
    kek_vault_token_file: Path | None = None
    """A Vault token; with a role, a service account token to log in with."""
    kek_vault_role: str = ""
    kek_vault_role_id_file: Path | None = None
    kek_vault_secret_id_file: Path | None = None
    kek_vault_auth_mount: str = ""
    """Where that way to log in is mounted. Empty: under its own name."""
    kek_cache_seconds: PositiveInt = 300
    """How long an unwrapped data key serves before a key elsewhere is asked again."""
    kek_max_stale_seconds: NonNegativeInt = 900
    """How much longer it serves while that key cannot be asked."""
    sources_folder: Path | None = None
    """The root of `file` sources. None: there are none."""
    sources_auth_folder: Path | None = None
    """Where sources find the files that they are asked with, by name."""
    admin_token_file: Path | None = None
    """None: there is no administrator, and the routes that need one refuse."""
    clients_file: Path | None = None
    platform_tenancy: Literal["single", "multi"] = "multi"
    """`single`: this installation is for one tenant, which is one of the conditions of handing out keys themselves."""
    proxy_base_url: str = ""
    """URL of the proxy's reverse listener, put in `base_url`."""
    session_seconds: PositiveInt = 43_200
    placeholder_ttl_seconds: PositiveInt = 900
    exchanges_per_minute: NonNegativeInt = 0
    """How many placeholders a subject may be issued in a minute. 0: as many as it likes."""
    redis_url: str = ""
    """`redis://host:port/0` or `rediss://…`: Redis or Valkey, for what replicas share. Empty: one process shares with
    itself."""
    redis_password_file: Path | None = None
    redis_ca_file: Path | None = None
    """What signed its certificate, instead of the system's roots."""
    outbound_allow: Annotated[tuple[str, ...], NoDecode] = ()
    """`host[:port]`, separated by commas: what the control plane may fetch from although its address is a private one.
    Without a port it is 443."""
    outbound_ca_files: Annotated[tuple[Path, ...], NoDecode] = ()
    """Certificate authorities of what it fetches from, beside the system's. In the environment separated by commas."""
    metrics_listen: str = ""
    """`host:port` of a listener that shows `/metrics` and nothing else, without TLS and to everybody who reaches it.
    Empty: they are shown to the platform's administrators and auditors alone, at `/v1/metrics`."""
    audit_retention_days: PositiveInt | None = None
    """After so many days events leave the audit trail, and a signed anchor stays. None: they stay."""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    client_ca_files: Annotated[tuple[Path, ...], NoDecode] = ()
    """Authorities that vouch for clients' certificates (RFC 8705). In the environment separated by commas."""
    client_self_signed: bool = False
    """Whether clients may be registered with certificates of their own making."""
    plaintext_listener: Literal["", "accepted-risk"] = ""
    """`accepted-risk`: other machines may reach the listener without TLS, since something in front encrypts."""

    @field_validator("kek_files", "outbound_allow", "outbound_ca_files", "client_ca_files", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("redis_url")
    @classmethod
    def _of_redis(cls, value: str) -> str:
        scheme, _, rest = value.partition("://")
        if value and (scheme not in ("redis", "rediss") or not rest):
            raise ValueError(f"{PREFIX}REDIS_URL is redis://host:port/0 or, with TLS, rediss://host:port/0")
        userinfo, at, _ = rest.partition("/")[0].rpartition("@")
        if at and ":" in userinfo:
            raise ValueError(f"{PREFIX}REDIS_URL holds no password: it is in a file, {PREFIX}REDIS_PASSWORD_FILE")
        return value

    @model_validator(mode="after")
    def _of_the_url(self) -> Self:
        for name, value in (("PASSWORD", self.redis_password_file), ("CA", self.redis_ca_file)):
            if value is not None and not self.redis_url:
                raise ValueError(f"{PREFIX}REDIS_{name}_FILE goes with {PREFIX}REDIS_URL")
        if self.redis_ca_file is not None and not self.redis_url.startswith("rediss:"):
            raise ValueError(f"{PREFIX}REDIS_CA_FILE is for TLS: {PREFIX}REDIS_URL then begins with rediss://")
        return self

    @field_validator("outbound_allow")
    @classmethod
    def _of_hosts_and_ports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            try:
                split_authority(entry, default_port=443)
            except InvalidDestinationError as error:
                raise ValueError(f"{PREFIX}OUTBOUND_ALLOW holds host[:port], separated by commas: {error}") from None
        return value

    @field_validator("issuer_url", "proxy_base_url")
    @classmethod
    def _without_final_slash(cls, value: str | None) -> str | None:
        return value.rstrip("/") if value else value

    @property
    def asks_for_certificates(self) -> bool:
        return bool(self.client_ca_files) or self.client_self_signed

    @model_validator(mode="after")
    def _a_key_that_seals(self) -> Self:
        if self.kek_provider == "files" and not self.kek_files:
            raise ValueError(f"{PREFIX}KEK_FILES names at least one file")
        if self.kek_provider == "aws_kms" and not self.kek_aws_key_arn:
            raise ValueError(f"{PREFIX}KEK_PROVIDER=aws_kms needs {PREFIX}KEK_AWS_KEY_ARN")
        if self.kek_provider == "vault_transit" and not self.kek_vault_key:
            raise ValueError(f"{PREFIX}KEK_PROVIDER=vault_transit needs {PREFIX}KEK_VAULT_KEY")
        return self

    @model_validator(mode="after")
    def _proven_to_aws(self) -> Self:
        ways = (self.kek_aws_keys_file is not None, bool(self.kek_aws_role_arn))
        if self.kek_aws_key_arn and sum(ways) != 1:
            raise ValueError(
                f"{PREFIX}KEK_AWS_KEY_ARN comes with one of {PREFIX}KEK_AWS_KEYS_FILE and {PREFIX}KEK_AWS_ROLE_ARN"
            )
        if bool(self.kek_aws_role_arn) != (self.kek_aws_token_file is not None):
            raise ValueError(f"{PREFIX}KEK_AWS_ROLE_ARN and {PREFIX}KEK_AWS_TOKEN_FILE come together")
        return self

    @model_validator(mode="after")
    def _proven_to_vault(self) -> Self:
        if bool(self.kek_vault_key) != bool(self.kek_vault_address):
            raise ValueError(f"{PREFIX}KEK_VAULT_KEY and {PREFIX}KEK_VAULT_ADDRESS come together")
        ways = (self.kek_vault_token_file is not None, self.kek_vault_role_id_file is not None)
        if self.kek_vault_key and sum(ways) != 1:
            raise ValueError(
                f"{PREFIX}KEK_VAULT_KEY comes with one of {PREFIX}KEK_VAULT_TOKEN_FILE and "
                f"{PREFIX}KEK_VAULT_ROLE_ID_FILE"
            )
        if (self.kek_vault_role_id_file is None) != (self.kek_vault_secret_id_file is None):
            raise ValueError(f"{PREFIX}KEK_VAULT_ROLE_ID_FILE and {PREFIX}KEK_VAULT_SECRET_ID_FILE come together")
        if self.kek_vault_role and self.kek_vault_token_file is None:
            raise ValueError(f"{PREFIX}KEK_VAULT_ROLE needs {PREFIX}KEK_VAULT_TOKEN_FILE")
        return self

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file come together")
        if self.asks_for_certificates and self.tls_cert_file is None:
            raise ValueError(
                f"{PREFIX}CLIENT_CA_FILES and {PREFIX}CLIENT_SELF_SIGNED need {PREFIX}TLS_CERT_FILE: clients show "
                "their certificates to this listener itself"
            )
        return self

    @model_validator(mode="after")
    def _private_or_encrypted(self) -> Self:
        if self.tls_cert_file is None and self.plaintext_listener != "accepted-risk" and not _is_loopback(self.listen):
            raise ValueError(
                f"{PREFIX}LISTEN is reachable from other machines without TLS: set {PREFIX}TLS_CERT_FILE and "
                f"{PREFIX}TLS_KEY_FILE, or {PREFIX}PLAINTEXT_LISTENER=accepted-risk where something in front encrypts"
            )
        return self


def _is_loopback(listen: str) -> bool:
    host = listen.rpartition(":")[0] if listen.rpartition(":")[2].isdigit() else listen
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
