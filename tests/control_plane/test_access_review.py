"""Who can use what, and what one request would get: the same as resolve and the proxy say, whatever is asked."""

import base64
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from control_plane.contract.caller import Caller, ClientId, SessionId, SubjectId, TenantId
from control_plane.contract.destination import split_authority
from control_plane.contract.placeholder import parse
from control_plane.contract.secret import Secret
from control_plane.contract.wire import RESOLVE_ANSWER, CallerFacts, Policy, Refused, ResolvedPlaceholder
from egress_proxy.core.decision import Connection, Forward, Mode, Refuse, Tunnel, decide, decide_connect
from egress_proxy.core.http1 import parse_request_head
from egress_proxy.core.quota import Standing
from egress_proxy.core.view import KnownCaller, Resolved
from tests.control_plane.serving import PROXY, ControlPlane, control_plane_in
from tests.control_plane.workspace import JWT, Json, Workspace, sha256
from tests.egress_proxy.core.world import World

HOSTS = ["api.example.com", "API.example.com:443", "api.example.com:8443", "second.example", "open.example"]
HOSTS += ["10.0.0.7", "[::1]:8080", "nobody.example", "strict.example"]
PATHS = ["", "/", "/v1", "/v1/", "/v1/chat", "/v1/../admin", "/v10", "/v1//x", "/%2e%2e/x", "/v1/chat?x=1&path=/v2"]
CREDENTIALS = [None, "example", "narrow", "plain", "strict", "internal", "ungranted", "nothing-like-it"]
SCOPES = ["", "read", "method:POST", "path:/v1", "method:GET path:/v1/chat"]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with control_plane_in(tmp_path_factory.mktemp("reviewed")) as serving:
        yield serving


@pytest.fixture(scope="module")
def world(plane: ControlPlane) -> "Compared":
    workspace = Workspace(plane, "acme")
    workspace.add_credential()
    workspace.grant()
    workspace.add_credential("narrow", destinations=[{"url": "https://second.example/v1", "methods": ["GET", "POST"]}])
    workspace.grant("narrow", subject="alice", methods=["GET", "HEAD", "OPTIONS"], path_prefixes=["/v1/chat"])
    workspace.grant("narrow", role="engineers", methods=["POST"])
    workspace.add_credential("plain", destinations=[{"url": "http://second.example"}])
    workspace.grant("plain", subject="alice", methods=["GET"])
    workspace.add_credential("strict", destinations=[{"url": "https://strict.example"}], credential_required=True)
    workspace.grant("strict")
    workspace.add_credential("internal", destinations=[{"url": "https://10.0.0.7"}])
    workspace.grant("internal")
    workspace.add_credential(
        "placed",
        destinations=[
            {"url": "https://placed.example/strict", "strict": True, "methods": ["GET"]},
            {"url": "https://placed.example/talks", "websocket": True, "ranges": True},
        ],
        placements=PLACED,
    )
    workspace.grant("placed")
    workspace.add_credential("ungranted", destinations=[{"url": "https://open.example"}])
    for rule in (
        {"host": "open.example", "methods": ["GET"]},
        {"host": "::1", "port": 8080, "allow_private": True},
        {"host": "second.example", "port": 443, "methods": ["DELETE"]},
    ):
        plane.made("POST", workspace.path("allow-rules"), rule)
    return Compared(workspace)


BEARER: Json = {"kind": "header", "name": "authorization", "format": "Bearer {secret}"}
PLACED: list[Json] = [
    {"kind": "header", "name": "x-api-key", "format": "{secret}"},
    {"kind": "basic", "username": "service"},
    {"kind": "query", "parameter": "key"},
]
OPENS_WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


def stands_in(placement: Json, token: str, url: str) -> tuple[list[str], str]:
    """Header lines and URL of a request with the placeholder there."""
    match placement:
        case {"kind": "header", "name": name, "format": value}:
            return [f"{name}: {value.replace('{secret}', token)}"], url
        case {"kind": "basic", "username": username}:
            return [f"Authorization: Basic {base64.b64encode(f'{username}:{token}'.encode()).decode()}"], url
        case {"kind": "query", "parameter": parameter}:
            return [], f"{url}?{parameter}={token}"
        case other:
            raise AssertionError(other)


class Compared:
    """Alice's session, and what a proxy would do with her requests, by its own decision on the real answers."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.session = workspace.open_session("alice", roles=["engineers"])
        self.way_out = workspace.exchange(self.session)
        self.caller = Caller(
            ClientId(workspace.runtime),
            TenantId(workspace.tenant),
            SubjectId("alice"),
            SessionId(self.session["session_id"]),
        )
        keys = workspace.control_plane.http.get("/internal/tag-keys", auth=PROXY).json()["keys_hex"]
        self.tag_keys = tuple(bytes.fromhex(key) for key in keys)
        self.issued: dict[tuple[str, str], Json] = {}

    def dry(self, method: str, url: str, credential: str | None, scope: str, **more: Any) -> Json:
        body = {"tenant": self.workspace.tenant, "subject": "alice", "method": method, "url": url}
        body |= {"session": self.session["session_id"]} | ({"credential": credential} if credential else {})
        body |= ({"scope": scope} if credential else {}) | more
        return self.workspace.control_plane.made("POST", "/v1/access/check", body)

    def real(
        self,
        method: str,
        url: str,
        credential: str | None,
        scope: str,
        *,
        placement: Json = BEARER,
        websocket: bool = False,
        other_key: bool = False,
        used_up: Json | None = None,
    ) -> str | None:
        """The code of the refusal, None where the request would go."""
        headers = list(OPENS_WEBSOCKET) if websocket else []
        if other_key:
            headers.append("Private-Token: a-key-of-its-own")
        view = World(tag_keys=self.tag_keys)
        if used_up is not None:
            view.quotas[used_up["id"]] = Standing.USED_UP
        now = self.workspace.control_plane.clock()
        if credential is not None:
            issued = self.exchanged(credential, scope)
            if "error" in issued:
                return str(issued["code"])
            placed, url = stands_in(placement, issued["access_token"], url)
            headers += placed
        proof = parse(self.way_out["proxy_credential"], self.tag_keys)
        view.callers[proof.fingerprint] = KnownCaller(CallerFacts(self.caller, now + 60), now)
        policy = self.answer({"kind": "policy", "caller": self.wire_caller()})
        assert isinstance(policy, Policy)
        view.policies[self.caller] = policy
        parts = urlsplit(url)
        host, port = split_authority(parts.netloc, default_port=443 if parts.scheme == "https" else 80)
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        target = url.removeprefix(f"{parts.scheme}://{parts.netloc}") or "/"
        if credential is not None:
            endpoint = {"scheme": parts.scheme, "host": host, "port": port}
            self.resolve(view, issued["access_token"], endpoint, now)
        connection = Connection(Mode.FORWARD, proof)
        if parts.scheme == "https":
            connect = parse_request_head(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
            tunnel = decide_connect(connect, connection, view, now)
            if isinstance(tunnel, Refuse):
                return tunnel.refusal.code.value
            assert isinstance(tunnel, Tunnel)
            connection = Connection(Mode.FORWARD, proof, tunnel.endpoint)
        else:
            target = f"http://{parts.netloc}{target}"
        raw = "\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {authority}", *headers, "", ""]).encode()
        decision = decide(parse_request_head(raw), connection, view, now)
        if isinstance(decision, Refuse):
            return decision.refusal.code.value
        assert isinstance(decision, Forward), decision
        return None

    def exchanged(self, credential: str, scope: str) -> Json:
        key = (credential, scope)
        if key not in self.issued:
            form = {"subject_token": self.fresh_token(), "subject_token_type": JWT, "audience": credential}
            self.issued[key] = self.workspace.token(**form, **({"scope": scope} if scope else {})).json()
        return self.issued[key]

    def fresh_token(self) -> str:
        path = f"/v1/sessions/{self.session['session_id']}/token"
        token: str = self.workspace.control_plane.made("POST", path)["session_token"]
        return token

    def wire_caller(self) -> Json:
        return self.workspace.caller(self.way_out)

    def answer(self, ask: Json) -> Any:
        return RESOLVE_ANSWER.validate_python(self.workspace.ask(ask)).answer

    def resolve(self, view: World, placeholder: str, endpoint: Json, now: float) -> None:
        fingerprint = sha256(placeholder)
        ask = {
            "kind": "placeholder",
            "placeholder_sha256": fingerprint,
            "caller": self.wire_caller(),
            "endpoint": endpoint,
        }
        match self.answer(ask):
            case ResolvedPlaceholder(binding=binding, secret=secret):
                view.placeholders[fingerprint] = Resolved(binding, Secret(secret), now)
            case Refused() as refused:
                view.placeholders[fingerprint] = refused
            case other:
                raise AssertionError(other)


BEFORE_DIALLING = {"destination_private"}
"""The proxy's decision leaves addresses to the one who dials, who judges every address the same way."""


@pytest.mark.guards(
    "control_plane/access_review.py",
    "handling = admit_bare(policy, endpoint, question.method, raw_path, now)",
    "handling = type('Any', (), {'allow_private': True})",
)
@pytest.mark.guards("control_plane/access_review.py", "    return narrowed(scopes, narrowing)\n", "    return scopes\n")
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    scheme=st.sampled_from(["https", "http"]),
    host=st.sampled_from(HOSTS),
    path=st.sampled_from(PATHS),
    method=st.sampled_from(["GET", "POST", "DELETE", "OPTIONS"]),
    credential=st.sampled_from(CREDENTIALS),
    scope=st.sampled_from(SCOPES),
)
@example("https", "second.example", "/v1/chat", "POST", "narrow", "")
@example("https", "second.example", "/v1/x", "GET", None, "")
@example("http", "api.example.com", "/", "GET", None, "")
@example("http", "second.example", "/", "POST", "plain", "")
@example("https", "strict.example", "/", "GET", None, "")
@example("https", "open.example", "/", "POST", None, "")
@example("https", "nobody.example", "/", "GET", None, "")
@example("https", "api.example.com", "/v1/chat", "POST", "example", "read")
@example("https", "api.example.com", "/v10", "GET", "example", "path:/v1")
def test_a_dry_run_says_what_resolve_and_the_proxy_would(
    world: Compared, scheme: str, host: str, path: str, method: str, credential: str | None, scope: str
) -> None:
    url = f"{scheme}://{host}{path}"

    dry = world.dry(method, url, credential, scope)

    real = world.real(method, url, credential, scope)
    if dry["code"] in BEFORE_DIALLING:
        assert real is None
    else:
        assert dry["code"] == real, (dry, real)
    assert dry["allowed"] == (dry["code"] is None)
    outcomes = [step["outcome"] for step in dry["steps"]]
    assert outcomes.count("refused") == (0 if dry["allowed"] else 1)
    if not dry["allowed"]:
        assert set(outcomes[outcomes.index("refused") + 1 :]) <= {"not_reached"}


@pytest.mark.guards("control_plane/contract/admission.py", "    if placement not in placements:", "    if False:")
@pytest.mark.guards("control_plane/access_review.py", "        if not handling.websocket:", "        if False:")
@pytest.mark.guards("control_plane/access_review.py", "            if handling.strict:", "            if False:")
@pytest.mark.parametrize("path", ["/strict", "/talks", "/strict/x"])
def test_where_the_placeholder_stands_and_what_else_is_in_the_request_is_judged_as_the_proxy_does(
    world: Compared, path: str
) -> None:
    url, compared = f"https://placed.example{path}", []

    for placement, websocket, other_key in product([*PLACED, BEARER], (False, True), (False, True)):
        question = {"placement": placement, "websocket": websocket, "other_key": other_key}
        dry = world.dry("GET", url, "placed", "", **question)
        compared.append((question, dry["code"], world.real("GET", url, "placed", "", **question)))

    assert [each for each in compared if each[1] != each[2]] == []
    assert {code for _, code, _ in compared} >= {None, "placement_denied"}
    assert ("foreign_credential" if "strict" in path else None) in {code for _, code, _ in compared}
    assert ("protocol_denied" in {code for _, code, _ in compared}) == ("strict" in path)


@pytest.mark.parametrize("other_key", [False, True])
def test_a_request_without_a_credential_carries_no_key_of_its_own_to_a_strict_place(
    world: Compared, other_key: bool
) -> None:
    url = "https://placed.example/strict"

    dry = world.dry("GET", url, None, "", other_key=other_key)

    assert dry["code"] == world.real("GET", url, None, "", other_key=other_key)
    assert dry["code"] == ("foreign_credential" if other_key else None)


def test_without_a_place_it_is_the_credentials_first_and_what_its_destination_allows_is_said(world: Compared) -> None:
    strict = world.dry("GET", "https://placed.example/strict", "placed", "")
    talks = world.dry("POST", "https://placed.example/talks", "placed", "")
    bare = world.dry("GET", "https://api.example.com/v1", None, "")

    assert (strict["placement"], strict["traits"]) == (PLACED[0], ["strict"])
    assert (talks["placement"], talks["traits"]) == (PLACED[0], ["ranges", "websocket"])
    assert (bare["placement"], bare["traits"]) == (None, [])


@pytest.mark.guards("control_plane/access_review.py", "                if left <= 0:", "                if False:")
@pytest.mark.parametrize(("measure", "code"), [("requests", "rate_limited"), ("tokens", "spend_limit_exceeded")])
def test_a_limit_that_is_used_up_now_refuses_as_the_proxy_does(world: Compared, measure: str, code: str) -> None:
    workspace, url = world.workspace, "https://api.example.com/v1"
    body = {"measure": measure, "amount": 5, "window_seconds": 86_400, "credential": "example", "each_subject": True}
    limit = workspace.control_plane.made("POST", workspace.path("limits"), body)

    def take(amount: int) -> None:
        bucket = sha256("alice")[:32]
        entry = {"limit_id": limit["id"], "bucket": bucket, "used": 0, "wanted": amount}
        response = workspace.control_plane.http.post("/internal/quota", json={"entries": [entry]}, auth=PROXY)
        assert response.status_code == 200, response.text

    try:
        before = world.dry("GET", url, "example", "")
        for _ in range(5):
            take(1)
        after, others = world.dry("GET", url, "example", ""), world.dry("GET", url, None, "")
        real = world.real("GET", url, "example", "", used_up=limit)
    finally:
        workspace.control_plane.made("DELETE", workspace.path(f"limits/{limit['id']}"))

    (said,) = [step["detail"] for step in before["steps"] if step["step"] == "limits"]
    assert (before["code"], said) == (None, f"5 of 5 {measure} left in 86400 s")
    assert (after["code"], refused_at(after)) == (code, "limits")
    assert after["code"] == real
    assert others["code"] is None


def refused_at(answer: Json) -> str | None:
    return next((step["step"] for step in answer["steps"] if step["outcome"] == "refused"), None)


EXPLAINED: dict[str, tuple[tuple[str, str, str | None, str], str | None, str | None]] = {
    "it would go": (("GET", "https://api.example.com/v1", "example", ""), None, None),
    "no such credential": (("GET", "https://api.example.com", "nothing", ""), "credential", "credential_not_found"),
    "not granted": (("GET", "https://open.example", "ungranted", ""), "credential", "credential_not_found"),
    "too wide a scope": (("GET", "https://second.example/v1", "narrow", "path:/"), "scope", "malformed_request"),
    "another host": (("GET", "https://second.example/v1", "example", ""), "destination", "destination_denied"),
    "a path": (("GET", "https://second.example/v2", "narrow", ""), "path", "path_denied"),
    "a method": (("DELETE", "https://second.example/v1/chat", "narrow", ""), "method", "method_denied"),
    "plain http": (("GET", "http://api.example.com/", None, ""), "destination", "plaintext_credential"),
    "nobody's host": (("GET", "https://nobody.example/", None, ""), "destination", "destination_denied"),
    "without what is required": (("GET", "https://strict.example/", None, ""), "destination", "credential_required"),
    "an internal address": (("GET", "https://10.0.0.7/", "internal", ""), "address", "destination_private"),
    "a mirror": (("TRACE", "https://api.example.com/", None, ""), "method_served", "method_not_allowed"),
}


@pytest.mark.parametrize(("question", "step", "code"), EXPLAINED.values(), ids=EXPLAINED.keys())
def test_the_answer_says_at_which_step_and_why(
    world: Compared, question: tuple[str, str, str | None, str], step: str | None, code: str | None
) -> None:
    answer = world.dry(*question)

    assert (answer["code"], refused_at(answer)) == (code, step), answer


def test_a_session_of_somebody_else_is_none(world: Compared) -> None:
    other = world.workspace.open_session("bob")
    body = {
        "tenant": world.workspace.tenant,
        "subject": "alice",
        "method": "GET",
        "url": "https://api.example.com",
        "session": other["session_id"],
    }

    answer = world.workspace.control_plane.made("POST", "/v1/access/check", body)

    assert (answer["code"], refused_at(answer)) == ("session_not_found", "session")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("url", value)
            for value in ("api.example.com", "ftp://x.example", "https://", "https://a b/", "https://x/#y")
        ),
        *(("url", value) for value in ("https://u@x.example/", "https://x.example/\u00e9", "https://x.example:0/")),
        *(("method", value) for value in ("", "get", "CONNECT")),
        ("client", "test-proxy"),
        ("client", "nobody"),
        ("scope", "everything"),
        ("placement", {"kind": "cookie"}),
        ("websocket", "yes"),
    ],
)
def test_a_question_that_cannot_be_read_names_its_field(world: Compared, field: str, value: str) -> None:
    body = {
        "tenant": world.workspace.tenant,
        "subject": "alice",
        "method": "GET",
        "url": "https://api.example.com",
        "credential": "example",
    } | {field: value}

    response = world.workspace.control_plane.admin("POST", "/v1/access/check", body)

    assert (response.status_code, response.json()["code"]) == (422, "invalid_field"), response.text
    assert field in response.json()["detail"]


def test_another_tenants_things_are_not_there(world: Compared) -> None:
    plane = world.workspace.control_plane
    body = {"tenant": "nobody-at-all", "subject": "alice", "method": "GET", "url": "https://api.example.com"}

    assert plane.admin("POST", "/v1/access/check", body).status_code == 404
    assert plane.admin("GET", "/v1/access", params={"tenant": "nobody-at-all"}).status_code == 404


# --- the list --------------------------------------------------------------------------------------------------------


def entitlements(workspace: Workspace, **query: str) -> list[Json]:
    response = workspace.control_plane.admin("GET", "/v1/access", params={"tenant": workspace.tenant} | query)
    assert response.status_code == 200, response.text
    items: list[Json] = response.json()["items"]
    return items


def report(workspace: Workspace, issued: Json, *, at: float, host: str = "api.example.com", event_id: str = "") -> None:
    event = {
        "event_id": event_id or f"ev{at}{host}",
        "at": at,
        "request_id": "req-1",
        "action": "swap",
        "tenant": workspace.tenant,
        "subject": issued["subject"],
        "client": workspace.runtime,
        "credential": issued["credential"],
        "placeholder_id": issued["id"],
        "host": host,
    }
    response = workspace.control_plane.http.post("/internal/audit", json={"events": [event]}, auth=PROXY)
    assert response.status_code == 204, response.text


@pytest.mark.guards("control_plane/core/uses.py", "if event.action != SWAP or not (", "if not (")
def test_who_can_use_what_and_when_it_was_last_used(granted: Workspace) -> None:
    granted.add_credential("for-engineers", destinations=[{"url": "https://second.example"}])
    granted.grant("for-engineers", role="engineers", methods=["GET"])
    issued = granted.exchange()
    for at, host in ((1_000.0, "api.example.com"), (3_000.0, "api.example.com"), (2_000.0, "api.example.com")):
        report(granted, issued, at=at, host=host)
    granted.control_plane.http.post(
        "/internal/audit",
        json={
            "events": [
                {"event_id": "refused1", "at": 9_000.0, "request_id": "r", "action": "refuse", "tenant": granted.tenant}
                | {"subject": "alice", "client": granted.runtime, "credential": "example"}
            ]
        },
        auth=PROXY,
    )

    found = {item["credential"]: item for item in entitlements(granted)}

    example, shared = found["example"], found["for-engineers"]
    assert (example["subject"], example["live"], example["last_used_at"]) == ("alice", True, 3_000.0)
    assert example["uses"] == [
        {
            "subject": "alice",
            "client": granted.runtime,
            "host": "api.example.com",
            "last_used_at": 3_000.0,
            "requests": 3,
        }
    ]
    assert (shared["role"], shared["methods"], shared["last_used_at"]) == ("engineers", ["GET"], None)


def test_what_a_subject_can_use_is_by_its_own_grants_and_its_live_sessions_roles(granted: Workspace) -> None:
    granted.add_credential("for-engineers", destinations=[{"url": "https://second.example"}])
    granted.grant("for-engineers", role="engineers")
    granted.grant("example", subject="bob", until=1)

    before = entitlements(granted, subject="bob")
    session = granted.open_session("bob", roles=["engineers"])
    during = entitlements(granted, subject="bob")
    granted.end_session(session)

    assert [(item["credential"], item["live"]) for item in before] == [("example", False)]
    assert {item["credential"] for item in during} == {"example", "for-engineers"}
    assert entitlements(granted, subject="bob") == before
    assert [item["subject"] for item in entitlements(granted, subject="alice")] == ["alice"]


def test_a_credential_that_is_gone_has_no_uses_and_its_report_is_taken_all_the_same(granted: Workspace) -> None:
    issued = granted.exchange()
    report(granted, issued, at=1_000.0)
    granted.control_plane.made("DELETE", granted.path("credentials/example"))

    report(granted, issued, at=2_000.0)

    assert granted.control_plane.look("SELECT * FROM uses WHERE tenant = ?", granted.tenant) == []
    assert entitlements(granted) == []


def test_one_tenants_uses_are_not_anothers(granted: Workspace, other_workspace: Workspace) -> None:
    other_workspace.add_credential()
    other_workspace.grant()
    report(granted, granted.exchange(), at=1_000.0)

    (theirs,) = entitlements(other_workspace)

    assert theirs["last_used_at"] is None
