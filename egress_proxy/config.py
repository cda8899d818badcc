"""Every setting of the egress proxy: `COATCHECK_PROXY_*`. Secrets come as files, never as values.

Rule: a setting nobody knows stops the start. A misspelt `COATCHECK_PROXY_UPSTREAM_CA_FILE` that is silently ignored
looks, from outside, exactly like one that works.
"""

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from control_plane.contract.destination import InvalidDestinationError, is_ip_literal, split_authority
from control_plane.contract.settings import PROXY_PREFIX, refuse_unclear_proof, refuse_unknown_settings
from egress_proxy.core.proofs import BY_PROXY_CREDENTIAL, Accepted, asks_for_certificates, parse_accepted
from egress_proxy.listen import ListenAddress, parse_listen

PREFIX: Final = PROXY_PREFIX
DNS_PORT: Final = 53


class AuditMode(StrEnum):
    STRICT = "strict"
    """A swap that cannot be recorded does not happen."""
    BEST_EFFORT = "best_effort"
    """Lost events are counted and shown as a gap."""


class PlaintextListener(StrEnum):
    REFUSED = ""
    ACCEPTED_RISK = "accepted-risk"
    """Something in front (a mesh sidecar) encrypts, or the operator takes the risk."""


def _listen(value: object) -> ListenAddress:
    return value if isinstance(value, ListenAddress) else parse_listen(str(value))


def _paths(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _servers(value: object) -> object:
    """A name server is an address: whom should one ask for the name of whom to ask?"""
    parts = _paths(value)
    for part in parts if isinstance(parts, list) else ():
        try:
            is_address = is_ip_literal(split_authority(part, default_port=DNS_PORT)[0])
        except InvalidDestinationError:
            is_address = False
        if not is_address:
            raise ValueError("a name server is an address, with a port or without: 10.0.0.10, 10.0.0.10:5353, [::1]:53")
    return parts


def _url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("a URL begins with https:// or http://")
    return value.rstrip("/")


def _accepted(value: object) -> object:
    return parse_accepted(value) if isinstance(value, str) else value


Identity = Annotated[Accepted, BeforeValidator(_accepted), NoDecode]
Listen = Annotated[ListenAddress, BeforeValidator(_listen), NoDecode]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_paths), NoDecode]
Servers = Annotated[tuple[str, ...], BeforeValidator(_servers), NoDecode]
Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Constructible in code with these names, or from `COATCHECK_PROXY_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, arbitrary_types_allowed=True, extra="forbid")

    control_plane_url: Annotated[str, AfterValidator(_url)]
    control_plane_ca_file: Path | None = None
    """Trusted for the control plane alone, instead of the system's roots."""
    client_id: str
    client_secret_file: Path | None = None
    client_token_file: Path | None = None
    """Instead: a workload's token, read anew for each request."""
    client_cert_file: Path | None = None
    """Instead: the certificate that is shown to the control plane; goes with its key."""
    client_key_file: Path | None = None

    forward_listen: Listen = ListenAddress("127.0.0.1", 8471)
    reverse_listen: Listen = ListenAddress("127.0.0.1", 8472)
    admin_listen: Listen = ListenAddress("127.0.0.1", 8473)
    listener_tls_cert_file: Path | None = None
    listener_tls_key_file: Path | None = None
    forward_identity: Identity = BY_PROXY_CREDENTIAL
    """By what callers of the forward listener are proven: `core.proofs`."""
    reverse_identity: Identity = BY_PROXY_CREDENTIAL
    client_ca_files: Paths = ()
    """What vouches for client certificates."""
    plaintext_listener: PlaintextListener = PlaintextListener.REFUSED
    reverse_path_credential: bool = False
    """Accept `/~<proxy credential>/…` on the reverse listener."""

    ca_cert_file: Path
    ca_key_file: Path
    upstream_ca_files: Paths = ()
    """Added to the system's roots."""
    dns_servers: Servers = ()
    """Asked for names instead of the machine's own: addresses, each with a port or without."""

    workers: Annotated[int, Field(ge=1, le=256)] = 1
    drain_grace_seconds: Seconds = 30.0
    connect_timeout_seconds: Seconds = 10.0
    """For an address to answer and TLS to be agreed."""
    header_timeout_seconds: Seconds = 15.0
    """For a client to send one whole request head, or to finish its TLS handshake."""
    idle_timeout_seconds: Seconds = 75.0
    """For a client connection between requests."""
    upstream_idle_seconds: Seconds = 30.0
    """For a pooled upstream connection between requests."""
    silence_timeout_seconds: Seconds = 900.0
    """For an exchange on which no byte moves: models think for minutes before the next token."""
    total_timeout_seconds: Seconds = 86_400.0
    """For an exchange in all, however busy it is."""
    client_connections: Annotated[int, Field(ge=1)] | None = None
    """How many a worker takes at once; left out: as many as its file descriptors are enough for."""
    tenant_connections: Annotated[int, Field(ge=1)] | None = None
    """How many of these one tenant may have; left out: half of them."""
    tenant_requests: Annotated[int, Field(ge=1)] = 1024
    """How many requests one tenant may have under way at a worker."""
    pool_connections_per_key: Annotated[int, Field(ge=0)] = 256
    leaf_contexts: Annotated[int, Field(ge=1)] = 1024
    cache_entries: Annotated[int, Field(ge=16)] = 65_536

    audit_spool_events: Annotated[int, Field(ge=1)] = 100_000
    audit_mode: AuditMode = AuditMode.STRICT
    log_level: str = "info"

    @model_validator(mode="after")
    def _one_proof(self) -> Self:
        refuse_unclear_proof(
            "the proxy",
            prefix=PREFIX,
            secret=self.client_secret_file is not None,
            token=self.client_token_file is not None,
            certificate=self.client_cert_file is not None,
            key=self.client_key_file is not None,
            control_plane_url=self.control_plane_url,
        )
        return self

    @model_validator(mode="after")
    def _certificates_can_be_verified(self) -> Self:
        wanted = [name for name in ("forward", "reverse") if asks_for_certificates(getattr(self, f"{name}_identity"))]
        for name in wanted:
            if not self.listener_tls_cert_file or not self.client_ca_files:
                raise ValueError(
                    f"{PREFIX}{name.upper()}_IDENTITY asks for client certificates: set {PREFIX}CLIENT_CA_FILES and "
                    f"{PREFIX}LISTENER_TLS_CERT_FILE with {PREFIX}LISTENER_TLS_KEY_FILE"
                )
        if self.client_ca_files and not wanted:
            raise ValueError(
                f"{PREFIX}CLIENT_CA_FILES is set and no listener asks for client certificates: name mtls in "
                f"{PREFIX}FORWARD_IDENTITY or {PREFIX}REVERSE_IDENTITY, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _listeners_are_private_or_encrypted(self) -> Self:
        if (self.listener_tls_cert_file is None) != (self.listener_tls_key_file is None):
            raise ValueError(f"{PREFIX}LISTENER_TLS_CERT_FILE and {PREFIX}LISTENER_TLS_KEY_FILE go together")
        if self.listener_tls_cert_file or self.plaintext_listener is PlaintextListener.ACCEPTED_RISK:
            return self
        for name, listen in (("FORWARD_LISTEN", self.forward_listen), ("REVERSE_LISTEN", self.reverse_listen)):
            if not listen.is_loopback:
                raise ValueError(
                    f"{PREFIX}{name}={listen} is reachable from other machines without TLS: set "
                    f"{PREFIX}LISTENER_TLS_CERT_FILE and {PREFIX}LISTENER_TLS_KEY_FILE, or "
                    f"{PREFIX}PLAINTEXT_LISTENER=accepted-risk where something in front encrypts"
                )
        return self


def settings_from_environment(environment: Mapping[str, str] | None = None) -> Settings:
    """What a process started as `coatcheck serve proxy` runs with.

    Raises `UnknownSettingError` for a `COATCHECK_*` name nobody knows, `ValueError` (pydantic's) for a bad value.
    """
    given_names = os.environ if environment is None else environment
    refuse_unknown_settings(given_names, prefix=PREFIX, names=Settings.model_fields)
    if environment is None:
        return Settings()
    given: dict[str, Any] = {
        name: environment[PREFIX + name.upper()]
        for name in Settings.model_fields
        if PREFIX + name.upper() in environment
    }
    return Settings(**given)
