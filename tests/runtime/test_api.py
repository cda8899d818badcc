"""The runtime's door: who gets through, in which order things are looked at, and how a "no" looks."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import httpx
import pytest

from control_plane.contract.caller import SessionId, SubjectId, TenantId
from control_plane.contract.credential import PlaceholderCredential
from control_plane.contract.placement import HeaderPlacement
from runtime.adapters.control_plane import unavailable
from runtime.adapters.memory import SessionsInMemory
from runtime.api import MAX_BODY_BYTES, Parts, make_app
from runtime.core.session_token import token_invalid
from runtime.core.subject import Owner, SessionClaims
from runtime.core.turn import Conversation, Holder, Placeholder
from runtime.endings import Endings
from runtime.runner import Runner

FILE = "runtime/api.py"

CLAIMS = {
    "alice-token": SessionClaims(TenantId("acme"), SubjectId("alice"), SessionId("ses_1"), 2_000.0),
    "bob-token": SessionClaims(TenantId("acme"), SubjectId("bob"), SessionId("ses_2"), 2_000.0),
    "forged-owner-token": SessionClaims(TenantId("globex"), SubjectId("alice"), SessionId("ses_1"), 2_000.0),
}
ALICE = {"authorization": "Bearer alice-token"}


class World:
    """Everything behind the door; remembers what was asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_ready = True
        self.failure: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def verify(self, unverified_token: str) -> SessionClaims:
        self.log.append("verify")
        if unverified_token not in CLAIMS:
            raise token_invalid()
        return CLAIMS[unverified_token]

    async def placeholder(self, holder: Holder, *, session_token: str) -> Placeholder:
        self.log.append(f"exchange {holder.owner.tenant}/{holder.owner.subject}")
        return Placeholder(PlaceholderCredential("p"), HeaderPlacement("x-api-key"), "proof", "http://p", 9e9)

    @asynccontextmanager
    async def in_use(self, owner: Owner, session: SessionId) -> AsyncIterator[None]:
        yield

    def forget(self, owner: Owner, session: SessionId) -> None:
        self.log.append("forget")

    async def answer(self, conversation: Conversation, placeholder: Placeholder) -> str:
        self.log.append("model")
        if self.failure:
            raise self.failure
        if self.gate:
            await self.gate.wait()
        return f"heard {conversation.messages[-1].text}"

    async def end(self, session: SessionId) -> None:
        self.log.append(f"end {session}")
        if self.failure:
            raise self.failure

    async def ended(self) -> Sequence[SessionId]:
        return []

    async def is_over(self, session: SessionId) -> bool:
        return False

    async def erased(self, session: SessionId) -> None:
        self.log.append(f"erased {session}")

    async def ready(self) -> bool:
        return self.is_ready

    def app(self) -> Any:
        sessions, numbers = SessionsInMemory(clock=lambda: 1_000.0), count(1)
        runner = Runner(sessions=sessions, placeholders=self, model=self, audience="anthropic")
        endings = Endings(self, sessions, self, grace_seconds=30, monotonic=lambda: 0.0)
        return make_app(Parts(self, sessions, runner, endings, self.ready, lambda: b"", lambda: f"req_{next(numbers)}"))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(world.app()), base_url="http://runtime.test") as client:
        yield client


async def post(client: httpx.AsyncClient, body: Any = None, headers: Any = None, **options: Any) -> httpx.Response:
    options = options or {"json": {"input": "hello"} if body is None else body}
    return await client.post("/v1/turn", headers=headers or [], **options)


async def test_a_turn_is_answered_with_its_session_and_the_models_words(client: httpx.AsyncClient) -> None:
    answer = await post(client, {"input": "hello"}, ALICE)

    assert (answer.status_code, answer.json()) == (200, {"session_id": "ses_1", "output": "heard hello"})
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["coatcheck-request-id"] == "req_1"


async def test_without_a_token_nothing_is_looked_at(world: World, client: httpx.AsyncClient) -> None:
    for options in ({"json": {"input": "x"}}, {"content": b"{not json"}, {"content": b"x" * (MAX_BODY_BYTES + 1)}):
        answer = await post(client, headers={"x-sh-subject": "alice"}, **options)
        assert (answer.status_code, answer.json()["code"]) == (401, "token_required")
        assert answer.headers["www-authenticate"] == "Bearer"

    assert world.log == []


NOT_A_GOOD_TOKEN: dict[str, Any] = {
    "an unknown token": [("authorization", "Bearer nobody")],
    "no scheme": [("authorization", "alice-token")],
    "another scheme": [("authorization", "Basic YWxpY2U6cHc=")],
    "no token": [("authorization", "Bearer")],
    "an empty token": [("authorization", "Bearer ")],
    "an empty header": [("authorization", "")],
    "bytes": [("authorization", b"Bearer \xe9\xff")],
    "two headers, a bad one first": [("authorization", "Bearer nobody"), ("authorization", "Bearer alice-token")],
    "two headers, a good one first": [("authorization", "Bearer alice-token"), ("authorization", "Bearer nobody")],
    "a token in a list": [("authorization", "Bearer alice-token, Bearer nobody")],
}


@pytest.mark.parametrize("what", NOT_A_GOOD_TOKEN)
@pytest.mark.guards(FILE, "    if len(values) != 1 or scheme", "    if scheme")
async def test_a_bad_token_is_never_taken_for_none(world: World, client: httpx.AsyncClient, what: str) -> None:
    headers = [*NOT_A_GOOD_TOKEN[what], ("x-sh-subject", "alice")]

    answer = await post(client, headers=headers)

    assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")
    assert "model" not in world.log


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer "])
async def test_the_scheme_is_read_as_http_has_it(client: httpx.AsyncClient, scheme: str) -> None:
    assert (await post(client, headers={"authorization": f"{scheme} alice-token"})).status_code == 200


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        ({"input": "x"}, [("x-sh-subject", "bob")], 400, "subject_conflict"),
        ({"input": "x"}, [("x-sh-subject", "alice"), ("x-sh-subject", "bob")], 400, "subject_conflict"),
        ({"input": "x", "session_id": "ses_2"}, [], 400, "session_mismatch"),
        ({"input": "x", "session_id": ""}, [], 400, "session_mismatch"),
    ],
)
async def test_the_subject_rules_hold_at_the_door(
    world: World, client: httpx.AsyncClient, body: Any, headers: Any, status: int, code: str
) -> None:
    answer = await post(client, body, [*ALICE.items(), *headers])

    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert world.log == ["verify"]


@pytest.mark.guards(
    FILE,
    "body.session_id,\n        recorded_owner=parts.sessions.owner(claims.session),",
    "body.session_id,\n        recorded_owner=None,",
)
async def test_a_session_of_another_tenant_is_not_found(world: World, client: httpx.AsyncClient) -> None:
    await post(client, headers=ALICE)

    answer = await post(client, headers={"authorization": "Bearer forged-owner-token"})

    assert (answer.status_code, answer.json()["code"]) == (404, "session_not_found")
    assert world.log.count("model") == 1
    assert answer.json()["hint"] == "open one at the control plane"


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 400, "malformed_request"),
        (b"{", 400, "malformed_request"),
        (b"\xff", 400, "malformed_request"),
        (b"[]", 422, "invalid_field"),
        (b'"x"', 422, "invalid_field"),
        (b"{}", 422, "invalid_field"),
        (b'{"input": ""}', 422, "invalid_field"),
        (b'{"input": 1}', 422, "invalid_field"),
        (b'{"input": null}', 422, "invalid_field"),
        (b'{"input": "x", "session_id": 1}', 422, "invalid_field"),
        (b'{"input": "x", "subject": "Q7z"}', 422, "invalid_field"),
        (b'{"input": "x", "coatchk1AAAAAAAAAAAAAAAAAAAAAAAAAAAA": 1}', 422, "invalid_field"),
        (b'{"input": "' + b"x" * 200_001 + b'"}', 422, "invalid_field"),
        (b'{"input": "' + b"x" * MAX_BODY_BYTES + b'"}', 413, "body_too_large"),
    ],
)
async def test_a_body_is_read_strictly_and_never_quoted(
    world: World, client: httpx.AsyncClient, content: bytes, status: int, code: str
) -> None:
    answer = await post(client, headers=ALICE, content=content)

    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert "Q7z" not in answer.text
    assert "coatchk1" not in answer.text
    assert world.log == ["verify"]


async def test_a_second_turn_of_a_session_waits_its_turn(world: World, client: httpx.AsyncClient) -> None:
    world.gate = asyncio.Event()
    first = asyncio.create_task(post(client, headers=ALICE))
    while "model" not in world.log:
        await asyncio.sleep(0)

    second = await post(client, headers=ALICE)
    world.gate.set()

    assert (second.status_code, second.json()["code"]) == (409, "session_busy")
    assert second.headers["retry-after"] == "1"
    assert (await first).status_code == 200


async def test_what_nobody_expected_is_an_internal_error_without_a_word_of_it(
    world: World, client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    world.failure = KeyError("sk-real-Q7z")

    answer = await post(client, headers=ALICE)

    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert answer.headers["coatcheck-request-id"] == answer.json()["request_id"]
    said = capsys.readouterr()
    assert "Q7z" not in answer.text + said.out + said.err


async def test_a_refusal_is_a_problem_that_sdks_do_not_retry_in_vain(client: httpx.AsyncClient) -> None:
    answer = await post(client)

    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["coatcheck-refusal"] == "token_required"
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["request_id"] == answer.headers["coatcheck-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/turn", 405, "method_not_allowed"),
        ("TRACE", "/v1/turn", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/", 404, "not_found"),
    ],
)
async def test_a_route_that_does_not_exist_is_a_problem_too(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await client.request(method, path)

    assert (answer.status_code, answer.json()["code"]) == (status, code)


async def test_readiness_is_the_worlds_and_health_is_our_own(world: World, client: httpx.AsyncClient) -> None:
    assert (await client.get("/readyz")).status_code == 200
    world.is_ready = False

    assert (await client.get("/readyz")).status_code == 503
    assert (await client.get("/healthz")).status_code == 200


async def test_the_description_of_the_interface_has_the_turns_body(client: httpx.AsyncClient) -> None:
    whole = (await client.get("/openapi.json")).json()
    described = whole["paths"]["/v1/turn"]["post"]

    assert [list(needed) for needed in described["security"]] == [list(whole["components"]["securitySchemes"])]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {"input", "session_id"}
    assert {"200", "400", "401", "503"} <= set(described["responses"])


# --- the end of a session ---------------------------------------------------------------------------------------------


async def test_its_owner_ends_a_session_and_no_turn_of_it_begins_any_more(
    world: World, client: httpx.AsyncClient
) -> None:
    await post(client, headers=ALICE)

    ended = await client.delete("/v1/sessions/ses_1", headers=ALICE)
    again = await client.delete("/v1/sessions/ses_1", headers=ALICE)
    turn = await post(client, headers=ALICE)

    assert [ended.status_code, again.status_code] == [204, 204]
    assert (turn.status_code, turn.json()["code"]) == (404, "session_not_found")
    assert world.log == ["verify", "exchange acme/alice", "model", *["verify", "end ses_1", "forget"] * 2, "verify"]


@pytest.mark.parametrize("session", ["ses_2", "ses_unknown"])
@pytest.mark.guards(FILE, "if session != claims.session:", "if False:")
async def test_another_session_than_the_tokens_is_not_found_whether_or_not_there_is_one(
    world: World, client: httpx.AsyncClient, session: str
) -> None:
    await post(client, headers={"authorization": "Bearer bob-token"})

    answer = await client.delete(f"/v1/sessions/{session}", headers=ALICE)

    assert (answer.status_code, answer.json()["code"]) == (404, "session_not_found")
    assert "end ses_2" not in world.log


async def test_ending_needs_a_good_token(world: World, client: httpx.AsyncClient) -> None:
    answers = [
        await client.delete("/v1/sessions/ses_1", headers=headers)
        for headers in ({}, {"authorization": "Bearer nobody"}, ALICE | {"x-sh-subject": "bob"})
    ]

    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [
        (401, "token_required"),
        (401, "token_invalid"),
        (400, "subject_conflict"),
    ]
    assert "end ses_1" not in world.log


async def test_while_the_control_plane_is_away_nothing_is_forgotten(world: World, client: httpx.AsyncClient) -> None:
    await post(client, headers=ALICE)
    world.failure = unavailable("the control plane does not answer")

    answer = await client.delete("/v1/sessions/ses_1", headers=ALICE)
    world.failure = None
    turn = await post(client, headers=ALICE)

    assert (answer.status_code, answer.json()["code"]) == (503, "credential_unavailable")
    assert turn.status_code == 200
    assert "forget" not in world.log
