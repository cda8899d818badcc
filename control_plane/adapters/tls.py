"""TLS of our own listener, and which client certificates it lets through the handshake (RFC 8705).

Rule: a certificate is optional, and who it is is for `access` to say. The handshake accepts one that an authority of
ours vouches for, and those of clients' own making that are registered; any other ends it. Sessions are not resumed: a
resumed one would not show again what vouched for the certificate.
"""

import ssl
from collections.abc import Sequence
from pathlib import Path

from control_plane.core.certificates import InvalidCertificateError, fingerprints_in


class UnusableClientCaError(ValueError):
    """Names the file."""


class ClientTrust:
    """What a client's certificate has to lead to."""

    def __init__(self, ca_files: Sequence[Path]) -> None:
        """Raises `UnusableClientCaError`."""
        self._ca_files = tuple(ca_files)
        self.authorities = frozenset().union(*(_fingerprints(path) for path in self._ca_files))
        self._self_signed: set[str] = set()
        self._context: ssl.SSLContext | None = None

    def applied_to(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """The server's context, asking for a certificate."""
        context.verify_mode = ssl.CERT_OPTIONAL
        # What is trusted is trusted as it stands. Otherwise OpenSSL looks for its issuer by name, and of two
        # certificates of one name (a client's old one and its new one) finds the other.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        for path in self._ca_files:
            context.load_verify_locations(cafile=path)
        for pem in self._self_signed:
            context.load_verify_locations(cadata=pem)
        self._context = context
        return context

    def admit(self, certificates: Sequence[str]) -> None:
        """Certificates of clients' own making, as PEM. (One that was taken back still ends at `access`.)"""
        for pem in set(certificates) - self._self_signed:
            self._self_signed.add(pem)
            if self._context is not None:
                self._context.load_verify_locations(cadata=pem)


def _fingerprints(path: Path) -> frozenset[str]:
    try:
        return fingerprints_in(path.read_bytes())
    except OSError as error:
        raise UnusableClientCaError(f"cannot read {path}: {error.strerror}") from None
    except InvalidCertificateError as error:
        raise UnusableClientCaError(f"{path}: {error}") from None
