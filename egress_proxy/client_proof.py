"""By what this proxy proves to the control plane which client it is: a secret, a workload's token, or a certificate.

Rule: what is in a file is used as it is there now. A platform turns tokens and certificates while we run (Kubernetes: a
token at four fifths of its life), and nobody restarts us for it. RFC 6749 §2.3.1, RFC 7523 §2.2, RFC 8705 §2.
"""

import base64
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from cryptography import x509

from control_plane.contract.secret import Secret
from control_plane.contract.workload_token import described_token, described_until, is_one_token


class ProofMissingError(Exception):
    """There is nothing to prove ourselves with. The message names the file."""


class ClientProof(Protocol):
    """Asked for each request."""

    def headers(self) -> Mapping[str, str]:
        """Raises `ProofMissingError`."""
        ...

    def described(self) -> str:
        """For the log, where the control plane does not know us by it: what it is, and what can be seen to be wrong."""
        ...


class BySecret:
    """`Authorization: Basic`."""

    def __init__(self, client_id: str, file: Path) -> None:
        """Raises `OSError` and `UnusableSecretError`."""
        secret = Secret.submitted(file.read_text("utf-8"))
        pair = base64.b64encode(f"{client_id}:{secret.reveal()}".encode()).decode()
        self._headers = {"Authorization": f"Basic {pair}"}
        self._file = file

    def headers(self) -> Mapping[str, str]:
        return self._headers

    def described(self) -> str:
        return f"the client secret in {self._file}"


class ByToken:
    """A workload's token, such as a projected ServiceAccount token, as `Authorization: Bearer`."""

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock

    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._token()}"}

    def described(self) -> str:
        try:
            return described_token(f"the workload token in {self._file}", self._token(), now=self._clock())
        except ProofMissingError as error:
            return str(error)

    def _token(self) -> str:
        # A small file in memory, and turned by renaming: it is whole whenever it is read.
        try:
            token = self._file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ProofMissingError(f"cannot read the workload token in {self._file}: {type(error).__name__}") from None
        if not is_one_token(token):
            raise ProofMissingError(f"there is no token in {self._file}")
        return token


class ByCertificate:
    """In the TLS handshake."""

    def __init__(self, cert_file: Path, key_file: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._cert_file = cert_file
        self._key_file = key_file
        self._clock = clock

    def shown_by(self, context: ssl.SSLContext) -> None:
        """Connections of this context from now on show what the files hold. Raises `OSError`."""
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self._cert_file, self._key_file)  # do they fit?
        context.load_cert_chain(self._cert_file, self._key_file)

    def headers(self) -> Mapping[str, str]:
        return {}

    def described(self) -> str:
        what = f"the client certificate in {self._cert_file}"
        try:
            end = x509.load_pem_x509_certificates(self._cert_file.read_bytes())[0].not_valid_after_utc.timestamp()
        except (OSError, ValueError):
            return f"{what}, which cannot be read"
        return described_until(what, end, now=self._clock())
