"""By what this runtime proves to the control plane which client it is: a secret, a workload's token, or a certificate.

Rule: what is in a file is used as it is there now. A platform turns tokens and certificates while we run (Kubernetes: a
token at four fifths of its life), and nobody restarts us for it. RFC 6749 §2.3.1, RFC 7523 §2.2, RFC 8705 §2.
"""

import base64
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import structlog
from cryptography import x509

from control_plane.contract.caller import ClientId
from control_plane.contract.refusal import Refusal, RefusalCode
from control_plane.contract.secret import Secret
from control_plane.contract.workload_token import described_token, described_until, is_one_token
from runtime.ports import ClientUnknownError

CLIENT_ASSERTION_TYPE: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"

Clock = Callable[[], float]
"""Unix seconds."""

log = structlog.get_logger("runtime.client_proof")


class ClientProof(Protocol):
    """Asked for each request. The first three raise `ClientUnknownError` where there is nothing at hand."""

    def headers(self) -> Mapping[str, str]:
        """For every route but those under `/oauth`."""
        ...

    def oauth_headers(self) -> Mapping[str, str]:
        """For `/oauth`, beside `form`: a request brings one proof (RFC 6749 §2.3)."""
        ...

    def form(self) -> Mapping[str, str]:
        """Parameters of a request to `/oauth`."""
        ...

    def described(self) -> str:
        """For the log, where the control plane does not know us by it: what it is, and what can be seen to be wrong."""
        ...

    def certificate_ends_at(self) -> float | None:
        """Unix seconds; None where it is no certificate."""
        ...


class BySecret:
    """`client_secret_basic`."""

    def __init__(self, client_id: ClientId, secret: Secret) -> None:
        self._client_id = client_id
        self._secret = secret

    def headers(self) -> Mapping[str, str]:
        pair = base64.b64encode(f"{self._client_id}:{self._secret.reveal()}".encode()).decode()
        return {"Authorization": f"Basic {pair}"}

    def oauth_headers(self) -> Mapping[str, str]:
        return self.headers()

    def form(self) -> Mapping[str, str]:
        return {}

    def described(self) -> str:
        return "its client secret"

    def certificate_ends_at(self) -> float | None:
        return None


class ByToken:
    """A workload's token, such as a projected ServiceAccount token: as a bearer, and at `/oauth` as an assertion."""

    def __init__(self, client_id: ClientId, file: Path, *, clock: Clock) -> None:
        self._client_id = client_id
        self._file = file
        self._clock = clock

    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._token()}"}

    def oauth_headers(self) -> Mapping[str, str]:
        return {}

    def form(self) -> Mapping[str, str]:
        return {
            "client_id": self._client_id,
            "client_assertion_type": CLIENT_ASSERTION_TYPE,
            "client_assertion": self._token(),
        }

    def described(self) -> str:
        try:
            return described_token(f"the workload token in {self._file}", self._token(), now=self._clock())
        except ClientUnknownError as error:
            return error.reason

    def certificate_ends_at(self) -> float | None:
        return None

    def _token(self) -> str:
        # A small file in memory, and turned by renaming: it is whole whenever it is read.
        try:
            token = self._file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise client_unknown(f"cannot read the workload token in {self._file}: {type(error).__name__}") from None
        if not is_one_token(token):
            raise client_unknown(f"there is no token in {self._file}")
        return token


class ByCertificate:
    """In the TLS handshake. New connections show what the files hold when a request is made."""

    def __init__(
        self, client_id: ClientId, cert_file: Path, key_file: Path, *, context: ssl.SSLContext, clock: Clock
    ) -> None:
        """`context`: of the connections to the control plane. Raises `OSError` where the files are of no use."""
        self._client_id = client_id
        self._files = (cert_file, key_file)
        self._context = context
        self._clock = clock
        self._signature = self._dates()
        self._ends_at: float | None = None
        self._show()

    def headers(self) -> Mapping[str, str]:
        if (dates := self._dates()) != self._signature:
            self._signature = dates  # a bad pair is not tried twice
            try:
                self._show()
            except OSError as error:
                log.error("certificates_refused", source="client", reason=type(error).__name__)  # noqa: TRY400
            else:
                log.info("certificates_adopted", source="client")
        return {}

    def oauth_headers(self) -> Mapping[str, str]:
        return self.headers()

    def form(self) -> Mapping[str, str]:
        return {"client_id": self._client_id}

    def described(self) -> str:
        what, end = f"the client certificate in {self._files[0]}", certificate_end(self._files[0])
        if end is None:
            return f"{what}, which cannot be read"
        return described_until(what, end, now=self._clock())

    def certificate_ends_at(self) -> float | None:
        """Of the one that is shown, also where its file holds another one by now that is of no use."""
        return self._ends_at

    def _show(self) -> None:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(*self._files)  # do they fit?
        self._context.load_cert_chain(*self._files)
        self._ends_at = certificate_end(self._files[0])

    def _dates(self) -> tuple[tuple[int, int], ...]:
        try:
            found = [file.stat() for file in self._files]
        except OSError:
            return ()  # while they are being replaced
        return tuple((each.st_ino, each.st_mtime_ns) for each in found)


def certificate_end(file: Path) -> float | None:
    """Unix seconds, of the first certificate in it; None where there is none."""
    try:
        return x509.load_pem_x509_certificates(file.read_bytes())[0].not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None


def client_unknown(reason: str) -> ClientUnknownError:
    refusal = Refusal(
        RefusalCode.CREDENTIAL_UNAVAILABLE,
        detail="the control plane does not serve this runtime",
        hint="try again shortly; the runtime's log says more",
        retry_after_seconds=2,
    )
    return ClientUnknownError(refusal, reason=reason)
