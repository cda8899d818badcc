"""Every setting of the runtime: `COATCHECK_RUNTIME_*`. Secrets come as files, never as values.

Rule: a setting nobody knows stops the start (`control_plane.contract.settings`).
"""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from control_plane.contract.settings import RUNTIME_PREFIX, refuse_unclear_proof, refuse_unknown_settings

PREFIX: Final = RUNTIME_PREFIX


def _host_and_port(value: object) -> object:
    if not isinstance(value, str):
        return value
    host, colon, port = value.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        raise ValueError("a listener is host:port, such as 127.0.0.1:8474")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)  # noqa: S104 - what `:8474` means


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError("a URL is https://host[:port][/path], without user, query or fragment")
    return value.rstrip("/")


Listen = Annotated[tuple[str, Annotated[int, Field(ge=0, le=65535)]], BeforeValidator(_host_and_port), NoDecode]
Url = Annotated[str, AfterValidator(_url)]
Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Constructible in code with these names, or from `COATCHECK_RUNTIME_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    listen: Listen = ("127.0.0.1", 8474)
    """Port 0 means any free port."""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    plaintext_listener: Literal["", "accepted-risk"] = ""
    """`accepted-risk`: other machines may reach the listener without TLS, since something in front encrypts."""

    control_plane_url: Url
    control_plane_ca_file: Path | None = None
    """Trusted for the control plane alone, instead of the system's roots."""
    issuer_url: Url | None = None
    """`iss` of session tokens, where the control plane is reached under another URL than its own."""
    proxy_ca_file: Path | None = None
    """Trusted for the egress proxy's reverse listener alone, instead of the system's roots."""
    client_id: Annotated[str, Field(min_length=1)]
    client_secret_file: Path | None = None
    client_token_file: Path | None = None
    """Instead: a workload's token, read anew for each request."""
    client_cert_file: Path | None = None
    """Instead: the certificate that is shown to the control plane; goes with its key."""
    client_key_file: Path | None = None

    model_audience: Annotated[str, Field(min_length=1)] = "anthropic"
    """The credential the model is called with: its name, provider or host."""
    model: Annotated[str, Field(min_length=1)]
    model_max_tokens: Annotated[int, Field(ge=1)] = 4_096
    model_timeout_seconds: Seconds = 600.0
    """Without a byte from the model. They think for minutes."""

    erase_grace_seconds: Seconds = 30.0
    """An ended session is confirmed as erased so long after a replica saw its end, so that the others see it too."""
    drain_grace_seconds: Seconds = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def issuer(self) -> str:
        return self.issuer_url or self.control_plane_url

    @model_validator(mode="after")
    def _one_proof(self) -> Self:
        refuse_unclear_proof(
            "the runtime",
            prefix=PREFIX,
            secret=self.client_secret_file is not None,
            token=self.client_token_file is not None,
            certificate=self.client_cert_file is not None,
            key=self.client_key_file is not None,
            control_plane_url=self.control_plane_url,
        )
        return self

    @model_validator(mode="after")
    def _certificate_and_key_go_together(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError(f"{PREFIX}TLS_CERT_FILE and {PREFIX}TLS_KEY_FILE go together")
        return self

    @model_validator(mode="after")
    def _private_or_encrypted(self) -> Self:
        host = self.listen[0]
        if self.tls_cert_file is None and self.plaintext_listener != "accepted-risk" and not _is_loopback(host):
            raise ValueError(
                f"{PREFIX}LISTEN is reachable from other machines without TLS: set {PREFIX}TLS_CERT_FILE and "
                f"{PREFIX}TLS_KEY_FILE, or {PREFIX}PLAINTEXT_LISTENER=accepted-risk where something in front encrypts"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def settings_from_environment(environment: Mapping[str, str] | None = None) -> Settings:
    """What a process started as `coatcheck serve runtime` runs with.

    Raises `UnknownSettingError` for a `COATCHECK_*` name nobody knows, `ValueError` (pydantic's) for a bad value.
    """
    given = os.environ if environment is None else environment
    refuse_unknown_settings(given, prefix=PREFIX, names=Settings.model_fields)
    values = {name: given[PREFIX + name.upper()] for name in Settings.model_fields if PREFIX + name.upper() in given}
    return Settings(**values)  # type: ignore[arg-type]  # pydantic parses the texts
