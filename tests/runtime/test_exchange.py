"""The exchange as the runtime asks for it: what it sends, and that an odd answer is an error and never a key in use."""

from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from control_plane.contract.caller import ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.credential import PlaceholderCredential
from control_plane.contract.placement import HeaderPlacement
from control_plane.contract.refusal import RefusalCode, RefusedError
from control_plane.contract.secret import Secret
from runtime.adapters.client_proof import BySecret
from runtime.adapters.control_plane import Exchange
from runtime.core.subject import Owner
from runtime.core.turn import Holder, Placeholder
from runtime.ports import PlaceholderRefusedError

FILE = "runtime/adapters/control_plane.py"

C = RefusalCode
NOW = 1_800_000_000.0
HOLDER = Holder(Owner(TenantId("acme"), SubjectId("alice")), SessionId("ses_1"), "anthropic")
PLACEHOLDER = "sk-ant-api03-coatchk1" + "A" * 28
REAL = "sk-real-0123456789"

GOOD_ANSWER: dict[str, Any] = {
    "access_token": PLACEHOLDER,
    "issued_token_type": "urn:coatcheck:token-type:placeholder",
    "token_type": "N_A",
    "expires_in": 900,
    "scope": "",
    "upstream_credential": {"mode": "placeholder", "value": PLACEHOLDER},
    "proxy_credential": "coat_coatprx1" + "B" * 28,
    "base_url": "http://127.0.0.1:8472/anthropic/",
    "placement": {"kind": "header", "name": "x-api-key", "format": "{secret}"},
    "subject": "alice",
    "tenant": "acme",
    "session_id": "ses_1",
}


class ControlPlane:
    """Answers as told, and remembers what it was asked."""

    def __init__(self, answer: httpx.Response | Exception) -> None:
        self.answer = answer
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def exchange_with(control_plane: ControlPlane) -> Exchange:
    return Exchange(
        httpx.AsyncClient(transport=httpx.MockTransport(control_plane)),
        control_plane_url="http://control-plane.test",
        proof=BySecret(ClientId("runtime-1"), Secret("client-secret")),
        clock=lambda: NOW,
    )


async def ask(answer: httpx.Response | Exception) -> Placeholder:
    return await exchange_with(ControlPlane(answer)).exchange("the.session.token", HOLDER)


async def refusal_of(answer: httpx.Response | Exception) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        await ask(answer)
    return refused.value


async def test_a_placeholder_is_asked_for_and_nothing_else() -> None:
    control_plane = ControlPlane(httpx.Response(200, json=GOOD_ANSWER))

    await exchange_with(control_plane).exchange("the.session.token", HOLDER)

    (request,) = control_plane.requests
    assert str(request.url) == "http://control-plane.test/oauth/token"
    assert request.headers["authorization"].startswith("Basic ")
    assert parse_qs(request.content.decode()) == {
        "grant_type": ["urn:ietf:params:oauth:grant-type:token-exchange"],
        "subject_token": ["the.session.token"],
        "subject_token_type": ["urn:ietf:params:oauth:token-type:jwt"],
        "requested_token_type": ["urn:coatcheck:token-type:placeholder"],
        "audience": ["anthropic"],
    }


async def test_a_good_answer_is_a_placeholder_with_all_it_takes_to_use_it() -> None:
    assert await ask(httpx.Response(200, json=GOOD_ANSWER)) == Placeholder(
        credential=PlaceholderCredential(PLACEHOLDER),
        placement=HeaderPlacement("x-api-key"),
        proxy_credential="coat_coatprx1" + "B" * 28,
        base_url="http://127.0.0.1:8472/anthropic",
        expires_at=NOW + 900,
    )


async def test_a_placeholder_does_not_show_itself() -> None:
    shown = repr(await ask(httpx.Response(200, json=GOOD_ANSWER)))

    assert "coatchk1" not in shown
    assert "coatprx1" not in shown


@pytest.mark.guards(
    FILE,
    'raise _refused(RefusalCode.DIRECT_NOT_ALLOWED, "this runtime works with placeholders only", "")',
    "return PlaceholderCredential(credential.value.reveal())",
)
async def test_a_key_is_never_taken_for_a_placeholder() -> None:
    answer = GOOD_ANSWER | {"upstream_credential": {"mode": "direct", "value": REAL}, "access_token": REAL}

    refused = await refusal_of(httpx.Response(200, json=answer))

    assert refused.refusal.code is C.DIRECT_NOT_ALLOWED
    assert REAL not in f"{refused!r} {refused.refusal!r}"


ODD_ANSWERS: dict[str, Any] = {
    "an unknown mode": {"upstream_credential": {"mode": "raw", "value": PLACEHOLDER}},
    "a mode in another case": {"upstream_credential": {"mode": "Placeholder", "value": PLACEHOLDER}},
    "no mode": {"upstream_credential": {"value": PLACEHOLDER}},
    "no value": {"upstream_credential": {"mode": "placeholder"}},
    "a credential that is text": {"upstream_credential": PLACEHOLDER},
    "only an access token": {"upstream_credential": None},
    "no proxy credential": {"proxy_credential": None},
    "an empty proxy credential": {"proxy_credential": ""},
    "no base_url": {"base_url": None},
    "a base_url of another scheme": {"base_url": "ftp://x"},
    "no expiry": {"expires_in": None},
    "an expiry of true": {"expires_in": True},
    "an expiry in the past": {"expires_in": 0},
    "an unknown placement": {"placement": {"kind": "body", "field": "key"}},
    "a placement in a log sink": {"placement": {"kind": "header", "name": "user-agent"}},
    "a placement that is text": {"placement": "header"},
    "no placement": {"placement": None},
}


@pytest.mark.parametrize("what", ODD_ANSWERS)
async def test_an_odd_answer_is_an_error_and_never_a_fallback(what: str) -> None:
    refused = await refusal_of(httpx.Response(200, json=GOOD_ANSWER | ODD_ANSWERS[what]))

    assert refused.refusal.code is C.INTERNAL_ERROR
    assert PLACEHOLDER not in f"{refused!r} {refused.refusal!r}"


@pytest.mark.parametrize(
    "other", [{"subject": "bob"}, {"tenant": "globex"}, {"session_id": "ses_2"}, {"subject": None}]
)
@pytest.mark.guards(FILE, '        raise _wrong_answer("is about somebody else")', "        pass")
async def test_an_answer_about_somebody_else_is_an_error(other: dict[str, Any]) -> None:
    refused = await refusal_of(httpx.Response(200, json=GOOD_ANSWER | other))

    assert refused.refusal.code is C.INTERNAL_ERROR


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"<html>", b'"text"'])
async def test_an_answer_that_is_no_json_object_is_an_error(body: bytes) -> None:
    assert (await refusal_of(httpx.Response(200, content=body))).refusal.code is C.INTERNAL_ERROR


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, {"error": "invalid_target", "code": "credential_not_found"}, C.CREDENTIAL_NOT_FOUND),
        (400, {"error": "invalid_target", "code": "credential_ambiguous"}, C.CREDENTIAL_AMBIGUOUS),
        (400, {"error": "invalid_target", "code": "endpoint_unresolved"}, C.ENDPOINT_UNRESOLVED),
        (400, {"error": "invalid_request", "code": "token_expired"}, C.TOKEN_EXPIRED),
        (400, {"error": "invalid_request", "code": "token_invalid"}, C.TOKEN_INVALID),
        (429, {"error": "temporarily_unavailable", "code": "rate_limited"}, C.RATE_LIMITED),
        (503, {"code": "store_unavailable"}, C.STORE_UNAVAILABLE),
        (401, {"error": "invalid_client", "code": "token_invalid"}, C.CREDENTIAL_UNAVAILABLE),
        (400, {"error": "invalid_request", "code": "malformed_request"}, C.CREDENTIAL_UNAVAILABLE),
        (403, {"code": "forbidden"}, C.CREDENTIAL_UNAVAILABLE),
        (400, {"error": "invalid_grant"}, C.CREDENTIAL_UNAVAILABLE),
        (400, {"code": "not_a_code"}, C.CREDENTIAL_UNAVAILABLE),
        (500, {}, C.CREDENTIAL_UNAVAILABLE),
        (302, {}, C.CREDENTIAL_UNAVAILABLE),
    ],
)
async def test_a_refused_exchange_is_told_as_what_it_means_for_the_turn(
    status: int, body: dict[str, str], code: RefusalCode
) -> None:
    assert (await refusal_of(httpx.Response(status, json=body))).refusal.code is code


async def test_the_control_planes_wish_to_be_asked_later_is_passed_on() -> None:
    busy = httpx.Response(429, json={"code": "rate_limited"}, headers={"retry-after": "7"})

    assert (await refusal_of(busy)).refusal.retry_after_seconds == 7


@pytest.mark.parametrize("failure", [httpx.ConnectError("x"), httpx.ReadTimeout("x"), httpx.RemoteProtocolError("x")])
async def test_a_control_plane_that_does_not_answer_is_unavailable_and_nothing_else(failure: Exception) -> None:
    assert (await refusal_of(failure)).refusal.code is C.CREDENTIAL_UNAVAILABLE


# --- for longer ------------------------------------------------------------------------------------------------------

HELD = Placeholder(
    PlaceholderCredential(PLACEHOLDER), HeaderPlacement("x-api-key"), "coat_coatprx1" + "B" * 28, "http://p", NOW + 5
)


async def renew(answer: httpx.Response | Exception) -> Placeholder:
    return await exchange_with(ControlPlane(answer)).renew(HELD, HOLDER)


async def test_a_renewal_names_the_placeholder_and_its_proxy_credential_and_no_session_token() -> None:
    control_plane = ControlPlane(httpx.Response(200, json=GOOD_ANSWER))

    renewed = await exchange_with(control_plane).renew(HELD, HOLDER)

    assert parse_qs(control_plane.requests[0].content.decode()) == {
        "grant_type": ["urn:ietf:params:oauth:grant-type:token-exchange"],
        "subject_token": [PLACEHOLDER],
        "subject_token_type": ["urn:coatcheck:token-type:placeholder"],
        "requested_token_type": ["urn:coatcheck:token-type:placeholder"],
        "audience": ["anthropic"],
        "proxy_credential": [HELD.proxy_credential],
    }
    assert renewed.expires_at == NOW + 900


@pytest.mark.guards(
    FILE,
    "(renewed.credential, renewed.proxy_credential) != (placeholder.credential, placeholder.proxy_credential)",
    "False",
)
@pytest.mark.parametrize(
    "other",
    [
        {"upstream_credential": {"mode": "placeholder", "value": "another"}},
        {"proxy_credential": "another"},
        {"subject": "bob"},
        {"tenant": "evil"},
        {"session_id": "ses_2"},
    ],
)
async def test_a_renewal_that_answers_with_something_else_is_an_error(other: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as refused:
        await renew(httpx.Response(200, json=GOOD_ANSWER | other))

    assert refused.value.refusal.code is C.INTERNAL_ERROR


@pytest.mark.parametrize("code", ["revoked_placeholder", "unknown_placeholder", "expired_placeholder"])
async def test_a_placeholder_that_is_over_is_not_renewed(code: str) -> None:
    with pytest.raises(PlaceholderRefusedError):
        await renew(httpx.Response(400, json={"error": "invalid_request", "code": code}))


async def test_a_renewal_that_nobody_answers_says_nothing_of_the_placeholder() -> None:
    for failure in (httpx.ConnectError("away"), httpx.Response(503, json={"code": "store_unavailable"})):
        with pytest.raises(RefusedError):
            await renew(failure)
