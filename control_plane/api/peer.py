"""The client certificate of a connection: taken from the server's own TLS, handed on with each request (RFC 8705 §2).

Rule: only what the handshake proved. A header that names a certificate is somebody's word, and is not read.
"""

import ssl
from typing import Any, Final

from fastapi import Request

from control_plane.core.certificates import PeerCertificate

PEER_CERTIFICATE: Final = "coatcheck.peer_certificate"
_DER: Final = 2  # OpenSSL's own number for it, in Python's _ssl


def verified_peer(ssl_object: ssl.SSLObject | None) -> PeerCertificate | None:
    """None without TLS, or where the client showed no certificate."""
    leaf = ssl_object.getpeercert(binary_form=True) if ssl_object is not None else None
    if ssl_object is None or leaf is None:
        return None
    chain = _verified_chain(ssl_object)
    return PeerCertificate(leaf=leaf, anchor=chain[-1] if chain else None)


def _verified_chain(ssl_object: Any) -> list[bytes]:
    if hasattr(ssl_object, "get_verified_chain"):  # from Python 3.13 on
        return list(ssl_object.get_verified_chain())
    return [each.public_bytes(_DER) for each in ssl_object._sslobj.get_verified_chain() or ()]


def peer_certificate(request: Request) -> PeerCertificate | None:
    """The client certificate of the connection, as the server's own TLS verified it. Never a header's word."""
    found = request.scope.get(PEER_CERTIFICATE)
    return found if isinstance(found, PeerCertificate) else None
