"""Session tokens: good ones become claims, every other kind is one and the same 401, and nothing is fetched for it."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from control_plane.contract.caller import ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.refusal import RefusalCode, RefusedError
from runtime.adapters.control_plane import (
    KEYS_FRESH_SECONDS,
    KEYS_STALE_SECONDS,
    REFETCH_SECONDS,
    SessionTokens,
)
from runtime.core.subject import SessionClaims
from tests.runtime.keys import CLIENT, ISSUER, NOW, SigningKey, claims, encoded, hmac_with_the_public_key, signed, token

CORE = "runtime/core/session_token.py"
ADAPTER = "runtime/adapters/control_plane.py"

KEY = SigningKey()
FOREIGN_KEY = SigningKey()
GOOD = SessionClaims(TenantId("acme"), SubjectId("alice"), SessionId("ses_1"), NOW + 43_200)


class ControlPlane:
    """Publishes keys, as a real one does; remembers how often it was asked."""

    def __init__(self, *keys: SigningKey) -> None:
        self.keys = list(keys)
        self.asked: list[str] = []
        self.broken: httpx.Response | Exception | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        if isinstance(self.broken, Exception):
            raise self.broken
        return self.broken or httpx.Response(200, json={"keys": [key.jwk for key in self.keys]})


class Time:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def verifier(control_plane: Callable[[httpx.Request], httpx.Response], clock: Callable[[], float]) -> SessionTokens:
    return SessionTokens(
        httpx.AsyncClient(transport=httpx.MockTransport(control_plane)),
        control_plane_url=ISSUER,
        issuer=ISSUER,
        client_id=ClientId(CLIENT),
        clock=clock,
    )


async def test_a_good_token_becomes_claims() -> None:
    assert await verifier(ControlPlane(KEY), Time()).verify(token(KEY)) == GOOD


async def test_any_key_of_the_ring_is_good_so_that_rotation_has_no_flag_day() -> None:
    newer = SigningKey()
    tokens = verifier(ControlPlane(newer, KEY), Time())

    assert await tokens.verify(token(KEY)) == GOOD
    assert await tokens.verify(token(newer)) == GOOD


CHANGED = token(KEY).split(".")[0] + f".{encoded(json.dumps(claims(sub='bob')).encode())}." + token(KEY).split(".")[2]
UNSIGNED = token(KEY, alg="none").rpartition(".")[0] + "."

BAD_TOKENS: dict[str, str] = {
    "empty": "",
    "not a token": "abc",
    "dots": "...",
    "two parts": "a.b",
    "not base64": "%%%.%%%.%%%",
    "a placeholder": "sk-ant-api03-coatchk1" + "A" * 28,
    "non-ASCII": "é.ü.ß",
    "a control character": token(KEY)[:20] + "\x00" + token(KEY)[20:],
    "very long": "a" * 9_000,
    "header is no object": signed([], claims(), KEY),  # type: ignore[arg-type]
    "payload is no object": signed({"typ": "coatcheck-session+jwt", "alg": "EdDSA", "kid": KEY.id}, [1], KEY),
    "signed by a foreign key": token(FOREIGN_KEY, kid=KEY.id),
    "of an unknown key": token(FOREIGN_KEY),
    "cut signature": token(KEY)[:-4],
    "changed payload": CHANGED,
    "alg none": UNSIGNED,
    "alg none, signed": token(KEY, alg="none"),
    "alg None in odd case": token(KEY, alg="nOnE"),
    "HS256 with the public key": hmac_with_the_public_key(KEY),
    "RS256 in name": token(KEY, alg="RS256"),
    "no alg": token(KEY, alg=...),
    "typ JWT": token(KEY, typ="JWT"),
    "typ of a client's token": token(KEY, typ="coatcheck-client+jwt"),
    "typ at+jwt": token(KEY, typ="at+jwt"),
    "no typ": token(KEY, typ=...),
    "no kid": token(KEY, kid=...),
    "kid is a path": token(KEY, kid="../../../dev/null"),
    "kid is a number": token(KEY, kid=7),
    "crit": token(KEY, crit=["exp"]),
    "a key of its own": token(FOREIGN_KEY, kid=KEY.id, jwk=FOREIGN_KEY.jwk),
}
BAD_CLAIMS: dict[str, dict[str, Any]] = {
    "another issuer": {"iss": "http://evil.test"},
    "an issuer that begins like ours": {"iss": ISSUER + ".evil.test"},
    "an issuer with a final slash": {"iss": ISSUER + "/"},
    "no issuer": {"iss": ...},
    "another audience": {"aud": "runtime-2"},
    "an audience that contains ours": {"aud": CLIENT + "0"},
    "several audiences": {"aud": [CLIENT, "runtime-2"]},
    "no audience": {"aud": ...},
    "another scope": {"scope": "turn:read"},
    "a wider scope": {"scope": "turn:write admin"},
    "no scope": {"scope": ...},
    "no subject": {"sub": ...},
    "an empty subject": {"sub": ""},
    "a subject that is a number": {"sub": 1},
    "no tenant": {"tenant": ...},
    "an empty tenant": {"tenant": ""},
    "no session": {"sid": ...},
    "a session that is null": {"sid": None},
    "no expiry": {"exp": ...},
    "an expiry that is text": {"exp": str(NOW + 300)},
    "an expiry that is true": {"exp": True},
    "an expiry that is not a number": {"exp": float("nan")},
    "no end of the session": {"session_exp": ...},
    "no time of issue": {"iat": ...},
    "issued in the future": {"iat": NOW + 120},
}


@pytest.mark.parametrize("what", BAD_TOKENS)
@pytest.mark.guards(CORE, 'if unverified_header.get("typ") != SESSION_TOKEN_TYP:', "if False:")
async def test_a_bad_token_is_invalid_and_says_no_more(what: str) -> None:
    tokens = verifier(ControlPlane(KEY), Time())

    with pytest.raises(RefusedError) as refused:
        await tokens.verify(BAD_TOKENS[what])

    assert refused.value.refusal.code is RefusalCode.TOKEN_INVALID
    assert refused.value.refusal.detail == "the session token is not valid here"


@pytest.mark.parametrize("what", BAD_CLAIMS)
@pytest.mark.guards(
    CORE, 'if _text(signed_payload, "aud") != audience:', 'if audience not in _text(signed_payload, "aud"):'
)
async def test_a_bad_claim_is_invalid_and_says_no_more(what: str) -> None:
    tokens = verifier(ControlPlane(KEY), Time())

    with pytest.raises(RefusedError) as refused:
        await tokens.verify(token(KEY, claims(**BAD_CLAIMS[what])))

    assert refused.value.refusal.code is RefusalCode.TOKEN_INVALID
    assert refused.value.refusal.detail == "the session token is not valid here"


@pytest.mark.guards(CORE, 'if _text(signed_payload, "iss") != issuer:', "if False:")
async def test_a_token_of_another_control_plane_is_invalid() -> None:
    with pytest.raises(RefusedError):
        await verifier(ControlPlane(KEY), Time()).verify(token(KEY, claims(iss="http://other.test")))


@pytest.mark.guards(
    ADAPTER,
    "signed = jwt.PyJWS().decode(unverified_token, key, algorithms=[ALGORITHM])",
    'signed = jwt.PyJWS().decode(unverified_token, options={"verify_signature": False})',
)
async def test_a_token_with_a_wrong_signature_is_invalid() -> None:
    with pytest.raises(RefusedError):
        await verifier(ControlPlane(KEY), Time()).verify(token(FOREIGN_KEY, kid=KEY.id))


@pytest.mark.parametrize("over", [{"exp": NOW}, {"exp": NOW - 1}, {"session_exp": NOW}, {"session_exp": NOW - 1}])
@pytest.mark.guards(CORE, 'if now >= _seconds(signed_payload, "exp") or now >= claims.session_expires_at:', "if False:")
async def test_a_token_that_is_over_says_that_it_is(over: dict[str, float]) -> None:
    with pytest.raises(RefusedError) as refused:
        await verifier(ControlPlane(KEY), Time()).verify(token(KEY, claims(**over)))

    assert refused.value.refusal.code is RefusalCode.TOKEN_EXPIRED


@pytest.mark.parametrize("header", ["jku", "x5u", "jwk", "x5c"])
async def test_nothing_is_fetched_from_where_a_token_says(header: str) -> None:
    control_plane = ControlPlane(KEY)

    pointing_elsewhere: dict[str, Any] = {header: "http://evil.test/keys"}
    await verifier(control_plane, Time()).verify(token(KEY, **pointing_elsewhere))

    assert control_plane.asked == [f"{ISSUER}/.well-known/jwks.json"]


# --- keys ------------------------------------------------------------------------------------------------------------


async def test_keys_are_asked_for_once_while_they_are_fresh() -> None:
    control_plane, time = ControlPlane(KEY), Time()
    tokens = verifier(control_plane, time)

    for _ in range(5):
        await tokens.verify(token(KEY))
        time.now += KEYS_FRESH_SECONDS / 10

    assert len(control_plane.asked) == 1


async def test_a_new_key_is_found_at_its_first_token() -> None:
    control_plane, time = ControlPlane(KEY), Time()
    tokens = verifier(control_plane, time)
    await tokens.verify(token(KEY))
    newer = SigningKey()
    control_plane.keys.insert(0, newer)
    time.now += REFETCH_SECONDS

    assert await tokens.verify(token(newer)) == GOOD


@pytest.mark.guards(ADAPTER, "if self._clock() - self._asked_at < REFETCH_SECONDS:", "if False:")
async def test_made_up_key_ids_do_not_make_us_flood_the_control_plane() -> None:
    control_plane = ControlPlane(KEY)
    tokens = verifier(control_plane, Time())

    for number in range(50):
        with pytest.raises(RefusedError):
            await tokens.verify(token(KEY, kid=f"{number:016x}"))

    assert len(control_plane.asked) == 1


async def test_a_key_that_is_no_longer_published_is_not_good() -> None:
    control_plane, time = ControlPlane(KEY), Time()
    tokens = verifier(control_plane, time)
    await tokens.verify(token(KEY))
    control_plane.keys = [SigningKey()]
    time.now += KEYS_FRESH_SECONDS

    with pytest.raises(RefusedError) as refused:
        await tokens.verify(token(KEY, claims(exp=time.now + 300, iat=time.now)))

    assert refused.value.refusal.code is RefusalCode.TOKEN_INVALID


BROKEN: dict[str, httpx.Response | Exception] = {
    "away": httpx.ConnectError("refused"),
    "slow": httpx.ReadTimeout("slow"),
    "failing": httpx.Response(500, text="oops"),
    "redirecting": httpx.Response(302, headers={"location": "http://evil.test/keys"}),
    "not JSON": httpx.Response(200, text="<html>"),
    "a list": httpx.Response(200, json=[]),
    "no keys": httpx.Response(200, json={"keys": []}),
    "odd keys": httpx.Response(200, json={"keys": [1, {}, {"kty": "oct", "k": "AAAA", "kid": KEY.id}]}),
    "a broken key": httpx.Response(200, json={"keys": [KEY.jwk | {"x": "AAAA"}]}),
    "a key for another use": httpx.Response(200, json={"keys": [KEY.jwk | {"use": "enc"}]}),
    "keys that are text": httpx.Response(200, json={"keys": "all"}),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_without_any_key_a_token_is_neither_good_nor_bad(how: str) -> None:
    control_plane = ControlPlane()
    control_plane.broken = BROKEN[how]

    with pytest.raises(RefusedError) as refused:
        await verifier(control_plane, Time()).verify(token(KEY))

    assert refused.value.refusal.code is RefusalCode.CREDENTIAL_UNAVAILABLE
    assert len(control_plane.asked) == 1


@pytest.mark.parametrize("how", BROKEN)
async def test_known_keys_serve_on_through_a_short_outage_and_no_longer(how: str) -> None:
    control_plane, time = ControlPlane(KEY), Time()
    tokens = verifier(control_plane, time)
    await tokens.verify(token(KEY))
    control_plane.broken = BROKEN[how]

    time.now = NOW + KEYS_STALE_SECONDS - 1
    during = await tokens.verify(token(KEY, claims(iat=time.now, exp=time.now + 300)))
    time.now = NOW + KEYS_STALE_SECONDS
    with pytest.raises(RefusedError) as refused:
        await tokens.verify(token(KEY, claims(iat=time.now, exp=time.now + 300)))

    assert during == GOOD
    assert refused.value.refusal.code is RefusalCode.CREDENTIAL_UNAVAILABLE
    assert not tokens.knows_keys
