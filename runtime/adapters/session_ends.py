"""The control plane's side of a session's end: `/v1/sessions/…` as a client of kind `runtime`.

Rule: what is unknown there (404) is over; every other answer than the expected one is "not now", never "it is done".
"""

from collections.abc import Sequence
from typing import Any, Final

import httpx
import structlog

from control_plane.contract.caller import SessionId
from runtime.adapters.client_proof import ByCertificate, ClientProof, client_unknown
from runtime.adapters.control_plane import unavailable

PAGE: Final = 1000

log = structlog.get_logger("runtime.session_ends")


class SessionEndsOverHttp:
    """See `runtime.ports.SessionEnds`."""

    def __init__(self, http: httpx.AsyncClient, *, control_plane_url: str, proof: ClientProof) -> None:
        self._http = http
        self._url = f"{control_plane_url}/v1/sessions"
        self._proof = proof

    async def end(self, session: SessionId) -> None:
        await self._send("DELETE", f"/{session}", accepted=(httpx.codes.NO_CONTENT, httpx.codes.NOT_FOUND))

    async def ended(self) -> Sequence[SessionId]:
        found: list[SessionId] = []
        while True:
            query = {"limit": str(PAGE)} | ({"after": found[-1]} if found else {})
            page = _ids(await self._send("GET", "/ended", query=query))
            found += page
            if len(page) < PAGE:
                return found

    async def is_over(self, session: SessionId) -> bool:
        response = await self._send("GET", f"/{session}", accepted=(httpx.codes.OK, httpx.codes.NOT_FOUND))
        return response.status_code == httpx.codes.NOT_FOUND or _member(response, "ended_at") is not None

    async def erased(self, session: SessionId) -> None:
        await self._send("POST", f"/{session}/erased", accepted=(httpx.codes.NO_CONTENT, httpx.codes.NOT_FOUND))

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        accepted: Sequence[int] = (httpx.codes.OK,),
    ) -> httpx.Response:
        try:
            response = await self._http.request(method, self._url + path, params=query, headers=self._proof.headers())
        except httpx.HTTPError as error:
            if isinstance(self._proof, ByCertificate) and isinstance(
                error, httpx.ReadError | httpx.RemoteProtocolError
            ):
                # In TLS 1.3 our side of the handshake is over before a server says so; many just end it.
                log.warning("connection_ended", reason=f"perhaps it does not take {self._proof.described()}")
            raise unavailable("the control plane does not answer") from None
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise client_unknown(
                f"it answered {response.status_code}: it does not know this runtime by {self._proof.described()}"
            )
        if response.status_code not in accepted:
            raise unavailable(f"the control plane answered {response.status_code} about sessions that end")
        return response


def _ids(response: httpx.Response) -> list[SessionId]:
    items = _member(response, "items")
    found: list[SessionId] = []
    for item in items if isinstance(items, list) else (None,):
        session_id = item.get("session_id") if isinstance(item, dict) else None
        if not isinstance(session_id, str):
            raise unavailable("the control plane's list of ended sessions cannot be read")
        found.append(SessionId(session_id))
    return found


def _member(response: httpx.Response, name: str) -> Any:
    """Raises `RefusedError` where the answer has no such member: nothing is concluded from what is not there."""
    try:
        answer = response.json()
        return answer[name]
    except (ValueError, KeyError, TypeError):
        raise unavailable("the control plane's answer about a session cannot be read") from None
