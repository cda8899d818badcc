"""The certificates that CMD trusts: the system's roots *and* our CA.

Rule: never our CA alone. A variable such as `SSL_CERT_FILE` replaces a client's roots, and a bundle without the public
ones would break every host that the proxy does not intercept.
"""

import contextlib
import os
import re
import ssl
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

TRUST_STORE_PASSWORD: Final = "changeit"  # Java's own default: the store holds public certificates only
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----\s.+?-----END CERTIFICATE-----", re.DOTALL)
_USUAL_PLACES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # Alpine, macOS
)


def bundle(ca_certificate: Path, environment: Mapping[str, str]) -> str:
    """System roots, what the shell's own `SSL_CERT_FILE` adds to them, and our CA: PEM, each certificate once."""
    files = [system_roots(), *_existing([environment.get("SSL_CERT_FILE", "")]), ca_certificate]
    found: dict[str, None] = {}
    for file in files:
        for certificate in _CERTIFICATE.findall(file.read_text(encoding="latin-1")):
            found.setdefault(certificate)
    return "".join(f"{certificate}\n" for certificate in found)


def system_roots() -> Path:
    """The machine's own bundle; where it has none, the one that certifi carries."""
    import certifi

    compiled_in = ssl.get_default_verify_paths().openssl_cafile
    found = _existing([*_USUAL_PLACES, compiled_in])
    return found[0] if found else Path(certifi.where())


def java_trust_store(pem_bundle: str) -> bytes:
    """The same certificates as Java wants them (PKCS #12)."""
    # Slow to import, and wanted only where there is a Java.
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption
    from cryptography.hazmat.primitives.serialization.pkcs12 import PKCS12Certificate, serialize_java_truststore

    certificates = [
        PKCS12Certificate(certificate, f"ca{number}".encode())
        for number, certificate in enumerate(_readable(_CERTIFICATE.findall(pem_bundle)))
    ]
    return serialize_java_truststore(certificates, BestAvailableEncryption(TRUST_STORE_PASSWORD.encode()))


def _readable(pems: Iterable[str]) -> Iterator["Certificate"]:
    """Without those that only OpenSSL puts up with."""
    from cryptography.x509 import load_pem_x509_certificate

    with warnings.catch_warnings(action="ignore"):  # old roots bend the rules, and are still in use
        for pem in pems:
            with contextlib.suppress(ValueError):
                yield load_pem_x509_certificate(pem.encode("ascii"))


def _existing(files: Iterable[str]) -> list[Path]:
    return [Path(file) for file in files if file and os.access(file, os.R_OK) and Path(file).is_file()]
