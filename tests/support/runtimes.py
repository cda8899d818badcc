"""A runtime as it runs: a process of its own, beside the deployment that it is a client of.

Rule: as in `processes`, nothing is shared with the test but loopback ports and files.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from tests.support.api import RuntimeClient
from tests.support.processes import COMMAND, Deployment, Served, clean_environment, private_file
from tests.support.upstream import Upstream

AUDIENCE: Final = "model"


@dataclass(slots=True)
class Workspace:
    """One tenant whose subject `alice` may use the model, with the tenant's own key."""

    deployment: Deployment
    client: RuntimeClient
    tenant: str
    key: str
    credential: dict[str, Any]
    grant: dict[str, Any]

    def session(self, subject: str = "alice") -> dict[str, Any]:
        return self.deployment.api.open_session(runtime=self.client.id, tenant=self.tenant, subject=subject)


@dataclass(slots=True)
class Runtime:
    """One runtime process that serves several tenants."""

    served: Served
    client: RuntimeClient
    deployment: Deployment

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.served.listening['port']}"

    def is_ready(self) -> bool:
        return httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200

    def turn(self, session: dict[str, Any] | None, text: str = "hello", **headers: str) -> httpx.Response:
        if session is not None:
            headers["authorization"] = f"Bearer {session['session_token']}"
        return httpx.post(f"{self.url}/v1/turn", json={"input": text}, headers=headers, trust_env=False, timeout=30)

    def end(self, session: dict[str, Any], **headers: str) -> httpx.Response:
        """As the session's owner."""
        headers["authorization"] = f"Bearer {session['session_token']}"
        url = f"{self.url}/v1/sessions/{session['session_id']}"
        return httpx.delete(url, headers=headers, trust_env=False, timeout=30)

    def start_again(self) -> None:
        """The same, with the same environment, after it was killed."""
        old = self.served
        self.served = Served(old.command, old.environment, cwd=self.deployment.folder).wait_until_listening()

    def workspace(self, upstream: Upstream, key: str) -> Workspace:
        api, tenant = self.deployment.api, f"t-{secrets.token_hex(4)}"
        api.put_tenant(tenant)
        credential = api.add_credential(
            tenant,
            AUDIENCE,
            secret=key,
            destinations=[{"url": f"https://localhost:{upstream.port}", "allow_private": True}],
            placements=[{"kind": "header", "name": "x-api-key", "format": "{secret}"}],
        )
        grant = api.add_grant(tenant, AUDIENCE, subject="alice")
        return Workspace(self.deployment, self.client, tenant, key, credential, grant)


def start_runtime(
    deployment: Deployment, folder: Path, *, client: RuntimeClient | None = None, **settings: str
) -> Runtime:
    """`coatcheck serve runtime`, as a client of no tenant in particular."""
    client = client or deployment.api.add_client(f"runtime-{secrets.token_hex(4)}", kind="runtime", tenant=None)
    own = {
        "LISTEN": "127.0.0.1:0",
        "CONTROL_PLANE_URL": deployment.api.url,
        "CLIENT_ID": client.id,
        "CLIENT_SECRET_FILE": str(private_file(folder / "client-secret", client.secret + "\n")),
        "MODEL_AUDIENCE": AUDIENCE,
        "MODEL": "coat-1",
        "LOG_LEVEL": "debug",
    } | settings
    # One that is given empty is left out.
    environment = clean_environment(**{f"COATCHECK_RUNTIME_{name}": value for name, value in own.items() if value})
    served = Served([str(COMMAND), "serve", "runtime"], environment, cwd=folder).wait_until_listening()
    return Runtime(served, client, deployment)
