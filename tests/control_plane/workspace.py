"""One tenant, as tests use it: its runtime, its sessions, its exchanges, and what a proxy hears about it.

Rule: a method that answers a response asserts nothing; one that answers data asserts success.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import httpx

from tests.control_plane.serving import PROXY, ControlPlane

GRANT_TYPE = "urn:ietf:params:oauth:grant-type:token-exchange"
JWT = "urn:ietf:params:oauth:token-type:jwt"
PLACEHOLDER = "urn:coatcheck:token-type:placeholder"
PROXY_CREDENTIAL = "urn:coatcheck:token-type:proxy-credential"
SESSION = "urn:coatcheck:token-type:session"

HOST = "api.example.com"
SECRET = "real-key-of-example-0123456789"
ENDPOINT = {"scheme": "https", "host": HOST, "port": 443}

Json = dict[str, Any]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Workspace:
    """A tenant with a runtime `<tenant>-runtime`, and nothing else yet."""

    def __init__(self, control_plane: ControlPlane, tenant: str) -> None:
        self.control_plane = control_plane
        self.tenant = tenant
        self.runtime = f"{tenant}-runtime"
        control_plane.made("PUT", f"/v1/tenants/{tenant}")
        self.runtime_secret = self.add_client(self.runtime, "runtime")

    # --- as the administrator

    def path(self, rest: str) -> str:
        return f"/v1/tenants/{self.tenant}/{rest}"

    def add_client(self, client: str, kind: str, *, scopes: list[str] | None = None, **fields: Any) -> str:
        """Its secret."""
        body = {"id": client, "kind": kind, "tenant": self.tenant, "scopes": scopes or []} | fields
        secret = self.control_plane.made("POST", "/v1/clients", body)["client_secret"]
        assert isinstance(secret, str)
        return secret

    def add_credential(self, name: str = "example", **fields: Any) -> Json:
        body: Json = {"name": name, "destinations": [{"url": f"https://{HOST}"}], "secret": SECRET}
        return self.control_plane.made("POST", self.path("credentials"), body | fields)

    def post_credential(self, body: Json) -> httpx.Response:
        return self.control_plane.admin("POST", self.path("credentials"), body)

    def patch_credential(self, body: Json, name: str = "example") -> httpx.Response:
        return self.control_plane.admin("PATCH", self.path(f"credentials/{name}"), body)

    def rotate(self, secret: str, *, name: str = "example", **fields: Any) -> Json:
        return self.control_plane.made("POST", self.path(f"credentials/{name}/rotate"), {"secret": secret} | fields)

    def credential(self, name: str = "example") -> Json:
        return self.control_plane.made("GET", self.path(f"credentials/{name}"))

    def grant(self, credential: str = "example", **fields: Any) -> Json:
        body = {"credential": credential} | (fields or {"subject": "alice"})
        return self.control_plane.made("POST", self.path("grants"), body)

    def remove_grant(self, grant: Json) -> None:
        self.control_plane.made("DELETE", self.path(f"grants/{grant['id']}"))

    def audit(self, **query: Any) -> list[Json]:
        response = self.control_plane.admin("GET", self.path("audit"), params={"limit": 1000} | query)
        items: list[Json] = response.json()["items"]
        return items

    def open_session(self, subject: str = "alice", **fields: Any) -> Json:
        body = {"tenant": self.tenant, "subject": subject, "runtime": self.runtime} | fields
        return self.control_plane.made("POST", "/v1/sessions", body)

    def end_session(self, session: Json) -> None:
        self.control_plane.made("DELETE", f"/v1/sessions/{session['session_id']}")

    # --- as the runtime

    def token(self, **form: str) -> httpx.Response:
        """`POST /oauth/token` as the runtime, with exactly this form besides the grant type."""
        return self.token_as((self.runtime, self.runtime_secret), **form)

    def token_as(self, client: tuple[str, str], **form: str) -> httpx.Response:
        return self.control_plane.http.post("/oauth/token", data={"grant_type": GRANT_TYPE} | form, auth=client)

    def exchange(self, session: Json | None = None, audience: str = "example") -> Json:
        session = session or self.open_session()
        return self._issued(
            self.token(subject_token=session["session_token"], subject_token_type=JWT, audience=audience)
        )

    def renew(self, issued: Json, **form: str) -> Json:
        return self._issued(self.renewal(issued, **form))

    def renewal(self, issued: Json, **form: str) -> httpx.Response:
        return self.token(subject_token=issued["access_token"], subject_token_type=PLACEHOLDER, **form)

    def _issued(self, response: httpx.Response) -> Json:
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    # --- as a proxy

    def caller(self, issued: Json) -> Json:
        return {
            "client": self.runtime,
            "tenant": issued["tenant"],
            "subject": issued["subject"],
            "session": issued["session_id"],
        }

    def ask(self, ask: Json, **fields: Any) -> Json:
        response = self.control_plane.http.post("/internal/resolve", json={"ask": ask} | fields, auth=PROXY)
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    def resolve(self, issued: Json, *, caller: Json | None = None, endpoint: Mapping[str, Any] = ENDPOINT) -> Json:
        """The answer to what this placeholder stands for, asked on behalf of its own caller unless told otherwise."""
        answer: Json = self.ask(
            {
                "kind": "placeholder",
                "placeholder_sha256": sha256(issued["access_token"]),
                "caller": caller or self.caller(issued),
                "endpoint": dict(endpoint),
            }
        )["answer"]
        return answer

    def who(self, proxy_credential: str) -> Json:
        answer: Json = self.ask({"kind": "caller", "proxy_credential_sha256": sha256(proxy_credential)})["answer"]
        return answer

    def policy(self, caller: Json) -> Json:
        answer: Json = self.ask({"kind": "policy", "caller": caller})["answer"]
        return answer
