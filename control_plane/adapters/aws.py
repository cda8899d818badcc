"""AWS, as `boto3` speaks it: for secrets (Secrets Manager) and for key-encryption keys (KMS).

Rule: every request leaves through the one outbound client (botocore's `before-send` event answers in its stead), and
nothing comes from the environment: no profile, no instance metadata, no configured endpoint. We prove ourselves with
keys in a file, or with a projected token and a role (AssumeRoleWithWebIdentity).
"""

import configparser
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar
from uuid import uuid4

import botocore.session
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.credentials import CredentialProvider, CredentialResolver, Credentials, DeferredRefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError

from control_plane.adapters.sources.asking import BlockingOutbound, why_not
from control_plane.adapters.sources.auth_files import ReadAuthFile
from control_plane.core.sources import AwsAuth
from control_plane.ports import Outbound, OutboundError, OutboundRequest, SourceError, SourceFailure

T = TypeVar("T")

_ONCE: Final = Config(
    retries={"mode": "standard", "total_max_attempts": 1},
    ignore_configured_endpoint_urls=True,
    parameter_validation=True,
)
_FROM_NOWHERE: Final[dict[str, tuple[None, None, str | None, None]]] = {
    "profile": (None, None, None, None),
    "config_file": (None, None, "/dev/null", None),
    "credentials_file": (None, None, "/dev/null", None),
}
_NOT_THERE: Final = frozenset({"ResourceNotFoundException", "NotFoundException"})
_DENIED: Final = frozenset(
    "AccessDenied AccessDeniedException ExpiredTokenException ExpiredToken InvalidClientTokenId "
    "UnrecognizedClientException InvalidSignatureException SignatureDoesNotMatch InvalidIdentityToken "
    "IncompleteSignature MissingAuthenticationToken OptInRequired".split()
)


class AwsDoor:
    """One service in one region, as one identity. `ask` blocks: it runs in threads."""

    def __init__(
        self,
        outbound: Outbound,
        *,
        service: str,
        region: str,
        endpoint: str | None,
        sts_endpoint: str | None = None,
        auth: AwsAuth,
        read_auth_file: ReadAuthFile,
    ) -> None:
        self._outbound = BlockingOutbound(outbound)
        self._service = service
        self._region = region
        self._endpoint = endpoint
        self._sts_endpoint = sts_endpoint
        self._auth = auth
        self._read_auth_file = read_auth_file
        self._made: Any = None
        self._one_at_a_time = threading.Lock()

    def ask(self, question: Callable[[Any], T], *, gone: Iterable[str] = ()) -> T:
        """What `question` gets from a client. Codes in `gone` mean that there is nothing. Raises `SourceError`."""
        try:
            return question(self._client())
        except ClientError as error:
            raise _said(error, frozenset(gone)) from None
        except OutboundError as error:
            raise why_not(error) from None
        except (BotoCoreError, TimeoutError) as error:
            raise SourceError(SourceFailure.UNAVAILABLE, f"AWS does not serve ({type(error).__name__})") from None
        except (KeyError, TypeError, ValueError, RecursionError):
            raise SourceError(SourceFailure.UNAVAILABLE, "what answers does not answer as AWS does") from None

    def _client(self) -> Any:
        with self._one_at_a_time:  # making a client reads its service's model, once
            if self._made is None:
                self._made = self._session(_Known(self._credentials())).create_client(
                    self._service, region_name=self._region, endpoint_url=self._endpoint, config=_ONCE
                )
            return self._made

    def _session(self, provider: CredentialProvider) -> botocore.session.Session:
        session = botocore.session.Session(session_vars=_FROM_NOWHERE)
        session.register_component("credential_provider", CredentialResolver([provider]))
        session.register("before-send", self._send)
        return session

    def _send(self, request: AWSPreparedRequest, **_event: Any) -> AWSResponse:
        body = request.body
        reply = self._outbound.send(
            OutboundRequest(
                request.method,
                request.url,
                headers={name: _text(value) for name, value in request.headers.items()},
                body=body.encode() if isinstance(body, str) else body,
            )
        )
        return AWSResponse(request.url, reply.status, dict(reply.headers), _Raw(reply.body))

    def _credentials(self) -> Credentials:
        """Asked for again by botocore when they are about to end."""
        if self._auth.method == "keys":
            return DeferredRefreshableCredentials(self._from_file, "keys file")
        return DeferredRefreshableCredentials(self._from_web_identity, "web identity")

    def _from_file(self) -> dict[str, str]:
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(self._read_auth_file(self._auth.keys_file or "").reveal())
            found = parser[parser.sections()[0]]
            return {
                "access_key": found["aws_access_key_id"],
                "secret_key": found["aws_secret_access_key"],
                "token": found.get("aws_session_token", ""),
                # Files are replaced while we run: read again before long.
                "expiry_time": _in_seconds(1200),
            }
        except (configparser.Error, KeyError, IndexError):
            raise SourceError(
                SourceFailure.MISCONFIGURED, "the file with AWS keys does not have the form of ~/.aws/credentials"
            ) from None

    def _from_web_identity(self) -> dict[str, str]:
        sts = self._session(_Known(None)).create_client(
            "sts",
            region_name=self._region,
            endpoint_url=self._sts_endpoint or f"https://sts.{self._region}.{_domain(self._region)}",
            config=_ONCE,
        )
        answer = sts.assume_role_with_web_identity(
            RoleArn=self._auth.role_arn,
            RoleSessionName=f"coatcheck-{uuid4().hex[:12]}",
            WebIdentityToken=self._read_auth_file(self._auth.token_file or "").reveal(),
        )["Credentials"]
        return {
            "access_key": answer["AccessKeyId"],
            "secret_key": answer["SecretAccessKey"],
            "token": answer["SessionToken"],
            "expiry_time": answer["Expiration"].isoformat(),
        }


class _Known(CredentialProvider):  # type: ignore[misc]
    """Credentials that are given, none that are looked for."""

    METHOD = CANONICAL_NAME = "given"

    def __init__(self, credentials: Credentials | None) -> None:
        super().__init__()
        self._credentials = credentials

    def load(self) -> Credentials | None:
        return self._credentials


class _Raw:
    """What botocore reads a body from."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> Iterable[bytes]:
        yield self._body


def _said(error: ClientError, gone: frozenset[str]) -> SourceError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    if code in _NOT_THERE or code in gone:
        return SourceError(SourceFailure.NOT_FOUND, "AWS has nothing of that name")
    if code in _DENIED:
        return SourceError(SourceFailure.DENIED, "AWS denies it: see the policy of our role or user")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return SourceError(SourceFailure.UNAVAILABLE, f"AWS does not serve (status {status})")


def _in_seconds(seconds: float) -> str:
    return datetime.fromtimestamp(datetime.now(UTC).timestamp() + seconds, UTC).isoformat()


def _domain(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
