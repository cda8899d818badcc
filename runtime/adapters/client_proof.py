"""By what this runtime proves to the control plane which client it is."""

import base64
from collections.abc import Mapping
from typing import Protocol

from control_plane.contract.caller import ClientId
from control_plane.contract.secret import Secret


class ClientProof(Protocol):
    """Asked for each request, so that what changes while we run is used as it is now."""

    def headers(self) -> Mapping[str, str]:
        """For every route but those under `/oauth`. Raises `RefusedError` where there is no proof at hand."""
        ...

    def oauth_headers(self) -> Mapping[str, str]:
        """For `/oauth`, beside `form` (RFC 6749 §2.3)."""
        ...

    def form(self) -> Mapping[str, str]:
        """Parameters of a request to `/oauth`. Raises `RefusedError` where there is no proof at hand."""
        ...


class BySecret:
    """`client_secret_basic` (RFC 6749 §2.3.1)."""

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
