"""`/oauth`: token exchange (RFC 8693), client tokens (RFC 6749 §4.4), revocation (RFC 7009), introspection (RFC 7662).

Rule: errors are OAuth's own, with a `code` from our list beside; nothing here is ever cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, assert_never
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from control_plane.access import UNAUTHENTICATED, Access, bearer
from control_plane.api.errors import refusal_headers, request_id
from control_plane.api.messages import ClientTokenOut, DirectOut, ExchangeOut, IntrospectionOut, ProxyCredentialOut
from control_plane.api.peer import peer_certificate
from control_plane.client_assertions import ClientAssertion
from control_plane.client_tokens import ClientTokens
from control_plane.contract.headers import GRANT_TYPE_CLIENT_CREDENTIALS
from control_plane.contract.refusal import RefusedError
from control_plane.core.oauth import (
    PARAMETERS,
    OAuthRefusedError,
    error_of,
    invalid_request,
    read_token_request,
    single,
)
from control_plane.core.policy import Principal
from control_plane.core.records import Client
from control_plane.exchange import Exchange, Exchanged
from control_plane.introspection import Introspection
from control_plane.issuance import Issued, IssuedDirect, IssuedProxyCredential
from control_plane.trail import Actor

FORM: Final = "application/x-www-form-urlencoded"
_MAX_PARAMETERS: Final = 64


@dataclass(frozen=True, slots=True)
class OAuthApi:
    access: Access
    exchange: Exchange
    client_tokens: ClientTokens
    introspection: Introspection

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/oauth", tags=["oauth"])
        router.add_api_route(
            "/token",
            self.token,
            methods=["POST"],
            summary="Exchange a session token for a placeholder or a proxy credential, or renew one in place",
            openapi_extra=_form_schema(PARAMETERS),
            responses={200: {"model": ExchangeOut | ProxyCredentialOut | DirectOut | ClientTokenOut}, **_RESPONSES},
        )
        router.add_api_route(
            "/revoke",
            self.revoke,
            methods=["POST"],
            summary="Revoke a placeholder, a proxy credential, or a session by its token or id",
            openapi_extra=_form_schema(("token", "token_type_hint")),
            responses=_RESPONSES,
        )
        router.add_api_route(
            "/introspect",
            self.introspect,
            methods=["POST"],
            summary="What a token is, for whom it was issued to and for administrators",
            openapi_extra=_form_schema(("token", "token_type_hint")),
            responses={200: {"model": IntrospectionOut}, **_RESPONSES},
        )
        return router

    async def token(self, request: Request) -> Response:
        try:
            client, pairs = await self._client_and_form(request)
            by = Actor(client.id, request_id(request))
            asked = read_token_request(pairs)
            if asked.grant_type == GRANT_TYPE_CLIENT_CREDENTIALS:
                text = await self.client_tokens(asked, client=client, by=by)
                return JSONResponse(ClientTokenOut.of(text).model_dump())
            return _exchanged(await self.exchange(asked, client=client, by=by))
        except RefusedError as refused:
            return oauth_error(refused)

    async def revoke(self, request: Request) -> Response:
        try:
            client, pairs = await self._client_and_form(request)
            by = Actor(client.id, request_id(request))
            await self.introspection.revoke(_token(pairs), client=client, by=by)
        except RefusedError as refused:
            return oauth_error(refused)
        return Response(status_code=200)

    async def introspect(self, request: Request) -> Response:
        """RFC 7662 §2.1. A token that is nobody's business of the caller's is inactive."""
        try:
            viewer, pairs = await self._viewer_and_form(request)
            described = await self.introspection.describe(_token(pairs), viewer)
        except RefusedError as refused:
            return oauth_error(refused)
        return JSONResponse(described)

    async def _viewer_and_form(self, request: Request) -> tuple[Client | Principal, Sequence[tuple[str, str]]]:
        authorization = request.headers.get("authorization")
        if bearer(authorization) is not None:
            return await self.access.principal(authorization), await _form(request)
        return await self._client_and_form(request)

    async def _client_and_form(self, request: Request) -> tuple[Client, Sequence[tuple[str, str]]]:
        authorization = request.headers.get("authorization")
        # A secret or a certificate is looked at before anything of the body is; an assertion stands in it.
        if authorization is not None:
            client = await self.access.client(authorization)
            pairs = await _form(request)
            if single(pairs, "client_assertion") or single(pairs, "client_id") not in (None, client.id):
                raise RefusedError(UNAUTHENTICATED)  # RFC 6749 §2.3: one proof a request
            return client, pairs
        try:
            pairs = await _form(request)
            assertion = _assertion(pairs)
        except OAuthRefusedError:
            raise RefusedError(UNAUTHENTICATED) from None
        client = await self.access.client(
            None,
            certificate=peer_certificate(request),
            assertion=assertion,
            client_id=single(pairs, "client_id"),
        )
        return client, pairs


def _token(pairs: Sequence[tuple[str, str]]) -> str:
    token = single(pairs, "token")
    if token is None:
        raise invalid_request("token is missing")
    single(pairs, "token_type_hint")  # RFC 7009 §2.1: a hint, and a wrong one changes nothing
    return token


def _exchanged(issued: Exchanged) -> Response:
    out: ExchangeOut | ProxyCredentialOut | DirectOut
    match issued:
        case Issued():
            out = ExchangeOut.of(issued)
        case IssuedProxyCredential():
            out = ProxyCredentialOut.of(issued)
        case IssuedDirect():
            out = DirectOut.of(issued)
        case _:
            assert_never(issued)
    return Response(out.model_dump_json(), media_type="application/json")


async def _form(request: Request) -> Sequence[tuple[str, str]]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise invalid_request(f"the body is {FORM} (RFC 6749 §4.1.3), not JSON")
    try:
        body = (await request.body()).decode("ascii")
        return parse_qsl(body, keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS)
    except ValueError:
        raise invalid_request("the form cannot be read") from None


def _assertion(pairs: Sequence[tuple[str, str]]) -> ClientAssertion | None:
    """RFC 7521 §4.2."""
    text = single(pairs, "client_assertion")
    if text is None:
        return None
    return ClientAssertion(single(pairs, "client_assertion_type") or "", text, client_id=single(pairs, "client_id"))


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
