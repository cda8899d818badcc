"""How a registered client proves that it is itself, beside a secret: keys, a workload token, a certificate.

Rule: each way is written down on the client; what is not written down proves nothing. Names of workloads and
certificates are one namespace for all tenants, so that two clients never answer to the same proof by oversight.
(RFC 7523 `private_key_jwt`; RFC 8705 `tls_client_auth` and `self_signed_tls_client_auth`.)
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from cryptography import x509
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from control_plane.core.certificates import InvalidCertificateError, name_of, read_self_signed
from control_plane.core.names import CREDENTIAL_NAME
from control_plane.core.patterns import Pattern

_CLOSED = ConfigDict(extra="forbid", hide_input_in_errors=True)


def _narrow(text: str) -> str:
    pattern = Pattern(text)
    if pattern.takes_a_value:
        raise ValueError("{value} has no meaning here")
    if pattern.is_open:
        raise ValueError("it would fit every workload of the issuer; name the ones that are this client")
    return text


def _dn(text: str) -> str:
    try:
        return x509.Name.from_rfc4514_string(text).rfc4514_string()
    except ValueError:
        raise ValueError("a distinguished name (RFC 4514), such as CN=proxy,O=Acme") from None


def _ip(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError("an IP address") from None


_Text = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,255}$")]


@dataclass(frozen=True, slots=True)
class WorkloadProof:
    """Tokens of a trusted issuer (use `client`) whose subject fits the pattern."""

    __pydantic_config__ = _CLOSED

    issuer: Annotated[str, StringConstraints(pattern=CREDENTIAL_NAME)]
    subject: Annotated[str, AfterValidator(_narrow)]


@dataclass(frozen=True, slots=True)
class CertificateProof:
    """A certificate that an authority of ours for clients vouches for, by one name in it (RFC 8705 §2.1.2)."""

    __pydantic_config__ = _CLOSED

    subject_dn: Annotated[str, StringConstraints(max_length=512), AfterValidator(_dn)] | None = None
    san_dns: _Text | None = None
    san_uri: _Text | None = None
    san_email: _Text | None = None
    san_ip: Annotated[str, AfterValidator(_ip)] | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in self._named().values()) != 1:
            raise ValueError("give exactly one of subject_dn, san_dns, san_uri, san_email and san_ip")

    def _named(self) -> dict[str, str | None]:
        return {
            "dn": self.subject_dn,
            "dns": self.san_dns,
            "uri": self.san_uri,
            "email": self.san_email,
            "ip": self.san_ip,
        }

    @property
    def name(self) -> str:
        kind, value = next((kind, value) for kind, value in self._named().items() if value is not None)
        return name_of(kind, value)


def _self_signed(pem: str) -> str:
    try:
        return read_self_signed(pem).pem
    except InvalidCertificateError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True, slots=True)
class ClientProofs:
    """None of them: the client has a secret."""

    __pydantic_config__ = _CLOSED

    keys: Annotated[tuple[Mapping[str, Any], ...], Field(max_length=16)] = ()
    jwks_url: Annotated[str, StringConstraints(max_length=512)] | None = None
    workload: WorkloadProof | None = None
    certificate: CertificateProof | None = None
    self_signed: Annotated[str, StringConstraints(max_length=16_384), AfterValidator(_self_signed)] | None = None
    """A certificate of the client's own making, as PEM: this very one and no other."""

    def __post_init__(self) -> None:
        if self.keys and self.jwks_url is not None:
            raise ValueError("give either 'keys' or 'jwks_url'")
        if self.certificate is not None and self.self_signed is not None:
            raise ValueError("give either 'certificate' or 'self_signed'")

    @property
    def has_keys(self) -> bool:
        return bool(self.keys) or self.jwks_url is not None

    @property
    def is_empty(self) -> bool:
        return not self.has_keys and self.workload is None and self.certificate_name is None

    @property
    def certificate_name(self) -> str | None:
        """What a presented certificate is looked up by."""
        if self.self_signed is not None:
            return read_self_signed(self.self_signed).thumbprint_name
        return self.certificate.name if self.certificate is not None else None

    @property
    def methods(self) -> tuple[str, ...]:
        """As RFC 8414 and RFC 8705 name them."""
        return tuple(
            method
            for method, has in {
                "private_key_jwt": self.has_keys,
                "workload_token": self.workload is not None,
                "tls_client_auth": self.certificate is not None,
                "self_signed_tls_client_auth": self.self_signed is not None,
            }.items()
            if has
        )


NO_PROOFS: Final = ClientProofs()
