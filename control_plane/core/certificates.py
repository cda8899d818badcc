"""Certificates that clients present: by which names they can be known (RFC 5280, RFC 8705).

Rule: a name counts only in a certificate that an authority of ours vouches for. A certificate of a client's own making
is known by its digest alone, whatever names stand in it.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

_MAX_NAMES: Final = 64


class InvalidCertificateError(ValueError):
    """The message says what was expected."""


@dataclass(frozen=True, slots=True)
class SelfSigned:
    pem: str
    thumbprint_name: str


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """What the other end of a TLS connection proved to hold the key of."""

    leaf: bytes
    """DER."""
    anchor: bytes | None
    """DER of what the chain ended in when it was verified."""

    def names(self, *, authorities: frozenset[str]) -> tuple[str, ...]:
        """Every name that it may be looked up by. `authorities` are fingerprints of those that vouch for clients."""
        thumbprint = name_of("x5t#S256", fingerprint(self.leaf))
        if self.anchor is None or self.anchor == self.leaf or fingerprint(self.anchor) not in authorities:
            return (thumbprint,)
        return (thumbprint, *names_in(self.leaf))


def name_of(kind: str, value: str) -> str:
    return f"{kind}:{value.lower() if kind in ('dns', 'email') else value}"


def fingerprint(der: bytes) -> str:
    return sha256(der).hexdigest()


def fingerprints_in(pem: bytes) -> frozenset[str]:
    """Of every certificate in a file. Raises `InvalidCertificateError`."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise InvalidCertificateError("it holds no certificates in PEM form") from None
    return frozenset(fingerprint(each.public_bytes(serialization.Encoding.DER)) for each in found)


def read_self_signed(pem: str) -> SelfSigned:
    """Raises `InvalidCertificateError`."""
    try:
        (certificate,) = x509.load_pem_x509_certificates(pem.encode("ascii"))
    except ValueError:
        raise InvalidCertificateError("one certificate in PEM form, and not its key") from None
    try:
        certificate.verify_directly_issued_by(certificate)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise InvalidCertificateError("the certificate is not self-signed; register one of its names instead") from None
    der = certificate.public_bytes(serialization.Encoding.DER)
    return SelfSigned(
        pem=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        thumbprint_name=name_of("x5t#S256", fingerprint(der)),
    )


def end_of(der: bytes) -> float:
    """Unix seconds. Raises `InvalidCertificateError`."""
    try:
        return x509.load_der_x509_certificate(der).not_valid_after_utc.timestamp()
    except ValueError:
        raise InvalidCertificateError("it is no certificate in DER form") from None


def names_in(der: bytes) -> tuple[str, ...]:
    """The names in a certificate whose chain was verified: of any other they say nothing."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        subject = certificate.subject.rfc4514_string()
        alternative = _alternative_names(certificate)
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return ()
    found = dict.fromkeys([*([name_of("dn", subject)] if subject else []), *alternative])
    # Nobody is registered by a name with a NUL in it, and a database that is asked for one refuses the whole question.
    return tuple(name for name in found if "\0" not in name)[:_MAX_NAMES]


def _alternative_names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    found = [name_of("dns", name) for name in names.get_values_for_type(x509.DNSName)]
    found += [name_of("uri", name) for name in names.get_values_for_type(x509.UniformResourceIdentifier)]
    found += [name_of("email", name) for name in names.get_values_for_type(x509.RFC822Name)]
    return found + [name_of("ip", str(address)) for address in names.get_values_for_type(x509.IPAddress)]
