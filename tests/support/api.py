"""The control plane's HTTP API as its callers see it: an operator, and a registered client.

Rule: black box. Nothing here imports the product; what it knows are paths, fields and status codes.
"""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

TOKEN_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
JWT = "urn:ietf:params:oauth:token-type:jwt"
PLACEHOLDER = "urn:coatcheck:token-type:placeholder"

TRUSTS_NOBODY: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For plain HTTP on loopback: reading the system's authorities takes longer than the requests."""

Json = dict[str, Any]


class ApiError(Exception):
    """An answer that was not the one asked for."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(
            f"{response.request.method} {response.request.url.path}: {response.status_code} {response.text}"
        )
        self.response = response

    @property
    def code(self) -> str:
        return str(self.response.json().get("code", ""))


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an exchange gave: a placeholder, and the proof of the caller it is bound to."""

    placeholder: str
    proxy_credential: str
    base_url: str
    answer: Json

    @property
    def id(self) -> str:
        return str(self.answer["id"])


@dataclass(frozen=True, slots=True)
class RuntimeClient:
    """A registered client of kind `runtime`."""

    id: str
    secret: str


class ControlPlaneApi:
    """One control plane, with the operator's token."""

    def __init__(self, url: str, admin_token: str, *, trust: ssl.SSLContext | None = None) -> None:
        """`trust`: for a control plane that speaks TLS."""
        verify = trust or TRUSTS_NOBODY
        self.url = url
        self._admin = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {admin_token}"},
            verify=verify,
            trust_env=False,
            timeout=20,
        )
        self._plain = httpx.Client(base_url=url, verify=verify, trust_env=False, timeout=20)

    def close(self) -> None:
        self._admin.close()
        self._plain.close()

    def ask(self, method: str, path: str, body: Json | None = None, **query: Any) -> Any:
        """As the operator. Raises `ApiError` for 4xx and 5xx."""
        response = self._admin.request(method, path, json=body, params=query or None)
        if response.is_error:
            raise ApiError(response)
        return response.json() if response.content else None

    # --- operator -----------------------------------------------------------------------------------------------------

    def put_tenant(self, tenant: str) -> None:
        self.ask("PUT", f"/v1/tenants/{tenant}")

    def add_client(self, client_id: str, *, kind: str, tenant: str | None, scopes: Sequence[str] = ()) -> RuntimeClient:
        answer = self.ask(
            "POST", "/v1/clients", {"id": client_id, "kind": kind, "tenant": tenant, "scopes": list(scopes)}
        )
        return RuntimeClient(client_id, answer["client_secret"])

    def add_credential(self, tenant: str, name: str, *, secret: str, **fields: Any) -> Json:
        answer: Json = self.ask("POST", f"/v1/tenants/{tenant}/credentials", {"name": name, "secret": secret, **fields})
        return answer

    def rotate(self, tenant: str, name: str, *, secret: str, compromised: bool = False) -> Json:
        answer: Json = self.ask(
            "POST",
            f"/v1/tenants/{tenant}/credentials/{name}/rotate",
            {"secret": secret, "compromised": compromised},
        )
        return answer

    def add_grant(self, tenant: str, credential: str, **fields: Any) -> Json:
        answer: Json = self.ask("POST", f"/v1/tenants/{tenant}/grants", {"credential": credential, **fields})
        return answer

    def allow(self, tenant: str, host: str, **fields: Any) -> Json:
        answer: Json = self.ask("POST", f"/v1/tenants/{tenant}/allow-rules", {"host": host, **fields})
        return answer

    def audit(self, tenant: str, **query: Any) -> list[Json]:
        """Every event of the tenant, oldest first."""
        items: list[Json] = self.ask("GET", f"/v1/tenants/{tenant}/audit", None, **({"limit": 1000} | query))["items"]
        return items

    # --- a client of the tenant ---------------------------------------------------------------------------------------

    def open_session(self, *, runtime: str, tenant: str, subject: str) -> Json:
        answer: Json = self.ask("POST", "/v1/sessions", {"runtime": runtime, "tenant": tenant, "subject": subject})
        return answer

    def token(self, client: RuntimeClient, **form: str) -> Json:
        """`POST /oauth/token` with `client_secret_basic`. Raises `ApiError`."""
        response = self._plain.post(
            "/oauth/token", data={"grant_type": TOKEN_EXCHANGE, **form}, auth=(client.id, client.secret)
        )
        if response.is_error:
            raise ApiError(response)
        answer: Json = response.json()
        return answer

    def exchange(self, client: RuntimeClient, *, session_token: str, audience: str) -> Ticket:
        return ticket(self.token(client, subject_token=session_token, subject_token_type=JWT, audience=audience))

    def renew(self, client: RuntimeClient, held: Ticket) -> Ticket:
        """In place: the same strings, for longer."""
        form = {"subject_token": held.placeholder, "proxy_credential": held.proxy_credential}
        return ticket(self.token(client, subject_token_type=PLACEHOLDER, **form))

    def revoke(self, client: RuntimeClient, placeholder: str) -> int:
        return self._plain.post(
            "/oauth/revoke", data={"token": placeholder}, auth=(client.id, client.secret)
        ).status_code


def ticket(answer: Json) -> Ticket:
    return Ticket(answer["access_token"], answer["proxy_credential"], answer["base_url"], answer)
