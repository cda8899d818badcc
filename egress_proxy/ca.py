"""The interception CA: one leaf certificate per host, minted when a client first asks for it.

Rules: the CA's key is read once and never leaves this file; leaves are what strict clients accept (RFC 5280 §4.2:
authority and subject key ids, key usage, an address as an address); one leaf key a process, because making a key costs
more than signing; everything that signs or loads runs off the event loop, and a bounded number of contexts is kept
(an SSLContext with its chain costs about a millisecond to make).
"""

import asyncio
import ipaddress
import os
import ssl
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from control_plane.contract.destination import is_ip_literal

CA_CERT_NAME: Final = "ca.pem"
CA_KEY_NAME: Final = "ca.key"
CA_DAYS: Final = 3650
LEAF_DAYS: Final = 30
"""CAs and browsers cap leaves at 398 days; ours live in memory only, so much less will do."""
BACKDATED: Final = timedelta(hours=1)
"""For clients whose clock is slow."""
_RENEW_BEFORE_END: Final = timedelta(days=LEAF_DAYS // 2)
_MAX_COMMON_NAME: Final = 64  # ub-common-name, RFC 5280 appendix A
_KEY_MODE: Final = 0o600


class UnusableCaError(Exception):
    """The CA's files are missing, do not fit together, or have run out."""


def create_ca(directory: Path, *, now: datetime, common_name: str = "Coatcheck interception CA") -> None:
    """A new CA in `directory`: `ca.pem` and `ca.key` (mode 0600). Raises `FileExistsError` rather than replace one."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_new(directory / CA_KEY_NAME, _key_pem(key), mode=_KEY_MODE)
    _write_new(directory / CA_CERT_NAME, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)


class CertificateAuthority:
    """Signs leaves. Thread-safe: holds no state but keys and certificates."""

    def __init__(self, *, certificates: list[x509.Certificate], key: ec.EllipticCurvePrivateKey) -> None:
        self._issuer = certificates[0]
        self._key = key
        self._intermediates = [each for each in certificates if each.subject != each.issuer]
        self._issuer_key_id = self._issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())

    @classmethod
    def load(cls, *, cert_file: Path, key_file: Path) -> "CertificateAuthority":
        """From PEM files: the issuing certificate first, then any above it. Raises `UnusableCaError`."""
        try:
            certificates = x509.load_pem_x509_certificates(cert_file.read_bytes())
            key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise UnusableCaError(f"cannot read the CA: {type(error).__name__}") from None
        if key_file.stat().st_mode & 0o007:
            raise UnusableCaError(f"{key_file} can be read by everybody; its mode must be 0600 (or 0640)")
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise UnusableCaError("the CA's key must be an elliptic-curve key")
        issuer = certificates[0]
        if key.public_key() != issuer.public_key():
            raise UnusableCaError("the CA's key does not belong to its certificate")
        try:
            constraints = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value
            usage = issuer.extensions.get_extension_for_class(x509.KeyUsage).value
            issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        except x509.ExtensionNotFound as error:
            raise UnusableCaError(f"the CA certificate lacks {error.oid._name}, which strict clients demand") from None
        if not constraints.ca or not usage.key_cert_sign:
            raise UnusableCaError("the certificate is not one of a CA that may sign")
        return cls(certificates=certificates, key=key)

    def leaf(self, host: str, *, now: datetime) -> x509.Certificate:
        """A leaf for one canonical host. Raises `UnusableCaError` once the CA itself has run out."""
        end = min(now + timedelta(days=LEAF_DAYS), self._issuer.not_valid_after_utc)
        if end <= now:
            raise UnusableCaError("the CA certificate has expired")
        # RFC 5280 §4.1.2.6: a name that does not fit the subject stands in the alternative name alone, then critical.
        fits = len(host) <= _MAX_COMMON_NAME
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)] if fits else [])
        key = self._leaf_key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._issuer.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(max(now - BACKDATED, self._issuer.not_valid_before_utc))
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=not fits)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._issuer_key_id), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )

    def context(self, host: str, *, now: datetime) -> ssl.SSLContext:
        """A server's TLS context for one host. Takes about a millisecond: not for the event loop."""
        chain = [self.leaf(host, now=now), *self._intermediates]
        pem = b"".join(each.public_bytes(serialization.Encoding.PEM) for each in chain) + _key_pem(self._leaf_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        harden_server_context(context)
        with _as_file(pem) as path:
            context.load_cert_chain(path)
        return context


def harden_server_context(context: ssl.SSLContext) -> None:
    """TLS ≥ 1.2, HTTP/1.1 only, no tickets.

    A session ticket makes the socket readable before any answer; botocore takes that for the answer to its
    `Expect: 100-continue`, and hangs.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION


class LeafContexts:
    """TLS contexts by host, at most `limit`, the least used dropped first; each host minted once, in a thread."""

    def __init__(self, ca: CertificateAuthority, *, limit: int, clock: Callable[[], datetime]) -> None:
        self._ca = ca
        self._limit = limit
        self._clock = clock
        self._contexts: OrderedDict[str, tuple[ssl.SSLContext, datetime]] = OrderedDict()
        self._minting: dict[str, asyncio.Future[ssl.SSLContext]] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def cached(self, host: str) -> ssl.SSLContext | None:
        """The context for a host, if it is there and not about to run out."""
        found = self._contexts.get(host)
        if found is None or found[1] <= self._clock():
            return None
        self._contexts.move_to_end(host)
        return found[0]

    async def context_for(self, host: str) -> ssl.SSLContext:
        """Raises `UnusableCaError`."""
        found = self.cached(host)
        if found is not None:
            return found
        minting = self._minting.get(host)
        if minting is None:
            loop = asyncio.get_running_loop()
            ca = self._ca
            minting = asyncio.ensure_future(loop.run_in_executor(None, self._mint, ca, host))
            self._minting[host] = minting
            minting.add_done_callback(lambda done: self._minted(ca, host, done))
        # Shielded: one client that leaves does not take the context from the others that wait for it.
        return await asyncio.shield(minting)

    def use(self, ca: CertificateAuthority) -> None:
        """From now on leaves are this CA's; connections that are open keep the ones they have."""
        self._ca = ca
        self._contexts.clear()
        self._minting.clear()

    def _mint(self, ca: CertificateAuthority, host: str) -> ssl.SSLContext:
        return ca.context(host, now=self._clock())

    def _minted(self, ca: CertificateAuthority, host: str, done: "asyncio.Future[ssl.SSLContext]") -> None:
        if ca is not self._ca:
            return
        self._minting.pop(host, None)
        if done.cancelled() or done.exception() is not None:
            return
        self._contexts[host] = (done.result(), self._clock() + timedelta(days=LEAF_DAYS) - _RENEW_BEFORE_END)
        while len(self._contexts) > self._limit:
            self._contexts.popitem(last=False)


def _general_name(host: str) -> x509.GeneralName:
    if is_ip_literal(host):
        return x509.IPAddress(ipaddress.ip_address(host))
    return x509.DNSName(host)


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_new(path: Path, content: bytes, *, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


@contextmanager
def _as_file(pem: bytes) -> Iterator[str]:
    """`load_cert_chain` wants a path. Where the system has memory files, the key never touches a disk."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("leaf", os.MFD_CLOEXEC), "wb") as file:
            file.write(pem)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:  # mode 0600
            file.write(pem)
            file.flush()
            yield file.name


def utc_now() -> datetime:
    return datetime.now(UTC)
