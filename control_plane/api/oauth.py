"""`/oauth`: token exchange (RFC 8693) and revocation (RFC 7009), for runtimes by HTTP Basic.

Rule: errors are OAuth's own, with a `code` from our list beside; nothing here is ever cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from control_plane.access import Access
from control_plane.api.errors import refusal_headers, request_id
from control_plane.api.messages import ExchangeOut, ProxyCredentialOut
from control_plane.contract.refusal import RefusedError
from control_plane.core.oauth import (
    PARAMETERS,
    OAuthRefusedError,
    error_of,
    invalid_request,
    read_token_request,
    single,
)
from control_plane.core.records import Client
from control_plane.exchange import Exchange
from control_plane.issuance import IssuedProxyCredential
from control_plane.trail import Actor

FORM: Final = "application/x-www-form-urlencoded"
_MAX_PARAMETERS: Final = 64


@dataclass(frozen=True, slots=True)
class OAuthApi:
    access: Access
    exchange: Exchange

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/oauth", tags=["oauth"])
        router.add_api_route(
            "/token",
            self.token,
            methods=["POST"],
            summary="Exchange a session token for a placeholder or a proxy credential, or renew one in place",
            openapi_extra=_form_schema(PARAMETERS),
            responses={200: {"model": ExchangeOut | ProxyCredentialOut}, **_RESPONSES},
        )
        router.add_api_route(
            "/revoke",
            self.revoke,
            methods=["POST"],
            summary="Revoke a placeholder or a proxy credential",
            openapi_extra=_form_schema(("token", "token_type_hint")),
            responses=_RESPONSES,
        )
        return router

    async def token(self, request: Request) -> Response:
        try:
            client, pairs = await self._client_and_form(request)
            by = Actor(client.id, request_id(request))
            issued = await self.exchange(read_token_request(pairs), client=client, by=by)
        except RefusedError as refused:
            return oauth_error(refused)
        if isinstance(issued, IssuedProxyCredential):
            return JSONResponse(ProxyCredentialOut.of(issued).model_dump())
        return JSONResponse(ExchangeOut.of(issued).model_dump())

    async def revoke(self, request: Request) -> Response:
        try:
            client, pairs = await self._client_and_form(request)
            token = single(pairs, "token")
            if token is None:
                raise invalid_request("token is missing")
            await self.exchange.revoke(token, client=client, by=Actor(client.id, request_id(request)))
        except RefusedError as refused:
            return oauth_error(refused)
        return Response(status_code=200)

    async def _client_and_form(self, request: Request) -> tuple[Client, Sequence[tuple[str, str]]]:
        client = await self.access.client(request.headers.get("authorization"))
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
            raise invalid_request(f"the body is {FORM} (RFC 6749 §4.1.3), not JSON")
        try:
            body = (await request.body()).decode("ascii")
            return client, parse_qsl(body, keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS)
        except ValueError:
            raise invalid_request("the form cannot be read") from None


def oauth_error(refused: RefusedError) -> JSONResponse:
    """RFC 6749 §5.2: `error` and `error_description`, and our `code`."""
    refusal = refused.refusal
    status, error = error_of(refusal.code)
    if isinstance(refused, OAuthRefusedError):
        status, error = 400, refused.error
    headers = refusal_headers(refusal)
    if status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="coatcheck"'
    return JSONResponse(
        {
            "error": error.value,
            "error_description": refusal.detail + (f". {refusal.hint}" if refusal.hint else ""),
            "code": refusal.code.value,
        },
        status_code=status,
        headers=headers,
    )


def _form_schema(names: Sequence[str]) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in names}
    return {
        "requestBody": {
            "required": True,
            "content": {FORM: {"schema": {"type": "object", "properties": properties}}},
        }
    }


_ERROR_SCHEMA: Final = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("error", "error_description", "code")},
    "required": ["error", "error_description", "code"],
}
_ERROR: Final[dict[str, Any]] = {
    "description": "An OAuth error",
    "content": {"application/json": {"schema": _ERROR_SCHEMA}},
}
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {400: _ERROR, 401: _ERROR, 503: _ERROR}
