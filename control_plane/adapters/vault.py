"""HashiCorp Vault, as `hvac` speaks it: for secrets (KV) and for key-encryption keys (transit).

Rule: hvac gets a session that asks through the one outbound client, and nothing from the environment. A login is kept
until shortly before its lease ends; where Vault says no with it, there is one fresh login, and then no means no.
https://developer.hashicorp.com/vault/api-docs
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import hvac
from hvac.exceptions import Forbidden, InvalidPath, InvalidRequest, Unauthorized, VaultError

from control_plane.adapters.sources.asking import BlockingOutbound, why_not
from control_plane.adapters.sources.auth_files import ReadAuthFile
from control_plane.core.sources import VaultAuth
from control_plane.ports import Outbound, OutboundError, OutboundRequest, SourceError, SourceFailure

T = TypeVar("T")

_BEFORE_THE_END: Final = 0.9
"""Of a lease: then a new login is due."""
_LONGEST_LOGIN_SECONDS: Final = 3600.0


class VaultDoor:
    """One Vault, one way to log in. Its methods block: they run in threads."""

    def __init__(
        self,
        outbound: Outbound,
        *,
        address: str,
        namespace: str | None,
        auth: VaultAuth,
        read_auth_file: ReadAuthFile,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outbound = BlockingOutbound(outbound)
        self._address = address
        self._namespace = namespace
        self._auth = auth
        self._read_auth_file = read_auth_file
        self._monotonic = monotonic
        self._login: _Login | None = None
        self._one_login = threading.Lock()

    def ask(self, question: Callable[[hvac.Client], T]) -> T:
        """What `question` gets from a client that is logged in. Raises `SourceError`, in our own words."""
        try:
            login = self._logged_in()
            try:
                return question(self._client(login.token))
            except (Forbidden, Unauthorized):
                # The token may have been revoked, or have run out of uses, before its lease was over.
                return question(self._client(self._logged_in(instead_of=login).token))
        except InvalidPath:
            raise SourceError(SourceFailure.NOT_FOUND, "Vault has nothing at that path") from None
        except (Forbidden, Unauthorized):
            raise SourceError(SourceFailure.DENIED, "Vault denies it: see the policy of our role or token") from None
        except InvalidRequest:
            raise SourceError(SourceFailure.DENIED, "Vault refuses the request") from None
        except OutboundError as error:
            raise why_not(error) from None
        except (VaultError, TimeoutError) as error:
            raise SourceError(SourceFailure.UNAVAILABLE, f"Vault does not serve ({type(error).__name__})") from None
        except (KeyError, TypeError, ValueError, RecursionError):
            raise SourceError(SourceFailure.UNAVAILABLE, "what answers does not answer as Vault does") from None

    def _logged_in(self, *, instead_of: "_Login | None" = None) -> "_Login":
        with self._one_login:
            kept = self._login
            if kept is not None and kept is not instead_of and self._monotonic() < kept.until:
                return kept
            self._login = None
            self._login = self._fresh_login()
            return self._login

    def _fresh_login(self) -> "_Login":
        began = self._monotonic()
        client = self._client("")
        match self._auth.method:
            case "token":
                # Vault's agent renews the file; it is read anew often enough to follow.
                return _Login(self._file(self._auth.token_file), began + 60.0)
            case "kubernetes":
                answer = client.auth.kubernetes.login(
                    role=self._auth.role, jwt=self._file(self._auth.token_file), mount_point=self._auth.mount
                )
            case "approle":
                answer = client.auth.approle.login(
                    role_id=self._file(self._auth.role_id_file),
                    secret_id=self._file(self._auth.secret_id_file),
                    mount_point=self._auth.mount,
                )
            case _:
                raise SourceError(SourceFailure.MISCONFIGURED, "there is no such way to log in to Vault")
        lease = float(answer["auth"]["lease_duration"]) or _LONGEST_LOGIN_SECONDS
        return _Login(str(answer["auth"]["client_token"]), began + min(lease, _LONGEST_LOGIN_SECONDS) * _BEFORE_THE_END)

    def _file(self, name: str | None) -> str:
        return self._read_auth_file(name or "").reveal()

    def _client(self, token: str) -> hvac.Client:
        # An empty token, not None: None would be looked for in VAULT_TOKEN and ~/.vault-token.
        return hvac.Client(
            url=self._address,
            token=token,
            namespace=self._namespace,
            verify=True,
            allow_redirects=False,
            session=_OutboundSession(self._outbound),
        )


@dataclass(frozen=True, slots=True, repr=False)
class _Login:
    token: str
    until: float


class _OutboundSession:
    """What hvac needs of a `requests.Session`."""

    verify: bool | None = None
    cert: None = None
    proxies: None = None

    def __init__(self, outbound: BlockingOutbound) -> None:
        self._outbound = outbound

    def request(
        self,
        *,
        method: str,
        url: str,
        headers: Mapping[str, str],
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        **_options: Any,
    ) -> "_Answer":
        query = f"?{urlencode(params)}" if params else ""
        body, fields = None, dict(headers)
        if json is not None:
            body, fields["Content-Type"] = _to_json(json), "application/json"
        reply = self._outbound.send(OutboundRequest(method.upper(), url + query, headers=fields, body=body))
        return _Answer(reply.status, {"Content-Type": _media_type(reply.headers)}, reply.body)

    def close(self) -> None:
        """Every request has a connection of its own."""


@dataclass(frozen=True, slots=True, repr=False)
class _Answer:
    """What hvac needs of a `requests.Response`."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def ok(self) -> bool:
        return self.status_code < 400

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.content)


def _to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip()
