"""Who may do what: every route against every kind of caller, and what odd requests get (field cases C32 and C47)."""

import base64
import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import ADMIN_TOKEN, PROXY, ControlPlane
from tests.control_plane.workspace import GRANT_TYPE, Workspace

OPEN = {
    "/healthz",
    "/readyz",
    "/.well-known/jwks.json",
    "/.well-known/coatcheck-audit-keys.json",
    "/.well-known/oauth-authorization-server",
    "/openapi.json",
}
INTERNAL = [
    *(("POST", "/internal/resolve"), ("GET", "/internal/tag-keys"), ("POST", "/internal/audit")),
    ("POST", "/internal/quota"),
]
OAUTH = [("POST", "/oauth/token"), ("POST", "/oauth/revoke")]
SESSIONS = {
    *("/v1/sessions", "/v1/sessions/{session}", "/v1/sessions/{session}/token"),
    *("/v1/sessions/ended", "/v1/sessions/{session}/erased"),
}


def routes(control_plane: ControlPlane) -> list[tuple[str, str]]:
    """Every documented route, its parameters filled in."""
    paths = control_plane.http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def filled(path: str) -> str:
    for name, value in {
        "{tenant}": "acme",
        "{name}": "example",
        "{client}": "somebody",
        "{session}": "ses_0",
        "{grant}": "gr_0",
        "{rule}": "ar_0",
        "{placeholder}": "ph_0",
    }.items():
        path = path.replace(name, value)
    return path


class Callers:
    """One of each kind."""

    def __init__(self, workspace: Workspace) -> None:
        self.operator = f"{workspace.tenant}-operator"
        operator_secret = workspace.add_client(self.operator, "operator", scopes=["subject:assert"])
        session = workspace.open_session()
        self.headers = {
            "administrator": {"Authorization": f"Bearer {ADMIN_TOKEN}"},
            "proxy": basic(*PROXY),
            "runtime": basic(workspace.runtime, workspace.runtime_secret),
            "operator": basic(self.operator, operator_secret),
            "session owner": {"Authorization": f"Bearer {session['session_token']}"},
            "nobody": {},
        }


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def ask(control_plane: ControlPlane, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    body: dict[str, Any] = {}
    if path.startswith("/oauth"):
        body = {"data": {"grant_type": GRANT_TYPE}}
    elif method in ("POST", "PATCH", "PUT"):
        body = {"json": {}}
    return control_plane.http.request(method, filled(path), headers=headers, **body)


@pytest.mark.guards("control_plane/access.py", "if client.kind is not kind:", "if False:")
def test_every_internal_route_is_for_proxies_alone(granted: Workspace) -> None:
    callers = Callers(granted)

    for method, path in INTERNAL:
        for kind, headers in callers.headers.items():
            response = ask(granted.control_plane, method, path, headers)
            expected = {"proxy": {200, 204, 400}, "runtime": {403}, "operator": {403}}.get(kind, {401})
            assert response.status_code in expected, (method, path, kind, response.text)
    for kind, headers in callers.headers.items():
        if kind != "proxy":
            response = granted.control_plane.http.get("/internal/events", headers=headers)
            assert response.status_code in (401, 403), kind


@pytest.mark.guards("control_plane/access.py", "if self._is_bootstrap_token(presented):", "if True:")
def test_every_administrators_route_is_for_the_administrator_alone(granted: Workspace) -> None:
    callers = Callers(granted)
    found = [
        (method, path)
        for method, path in routes(granted.control_plane)
        if path.startswith("/v1/") and path not in SESSIONS
    ]

    assert len(found) > 20
    for method, path in found:
        for kind, headers in callers.headers.items():
            if kind != "administrator":
                response = ask(granted.control_plane, method, path, headers)
                assert (response.status_code, response.json()["code"]) == (401, "token_invalid"), (method, path, kind)


def test_every_session_route_is_closed_to_proxies_and_to_nobody(granted: Workspace) -> None:
    callers = Callers(granted)
    found = [(method, path) for method, path in routes(granted.control_plane) if path in SESSIONS]

    assert len(found) == 6
    for method, path in found:
        for kind in ("proxy", "nobody"):
            response = ask(granted.control_plane, method, path, callers.headers[kind])
            # With a body that says nothing, the body may be refused first; a session is never found.
            assert response.status_code in (401, 403, 404, 422), (method, path, kind)
        good = {"runtime": granted.runtime, "subject": "alice", "tenant": granted.tenant}
        for kind in ("proxy", "nobody", "runtime", "session owner"):
            opened = granted.control_plane.http.post("/v1/sessions", json=good, headers=callers.headers[kind])
            assert opened.status_code in (401, 403), kind


def test_the_token_endpoint_is_for_clients_alone(granted: Workspace) -> None:
    callers = Callers(granted)

    for method, path in OAUTH:
        for kind in ("administrator", "session owner", "nobody"):
            response = ask(granted.control_plane, method, path, callers.headers[kind])
            assert (response.status_code, response.json()["error"]) == (401, "invalid_client")
    for kind in ("proxy", "operator"):
        response = ask(granted.control_plane, "POST", "/oauth/token", callers.headers[kind])
        assert (response.status_code, response.json()["error"]) == (400, "unauthorized_client")


def test_only_what_anybody_may_read_is_open(control_plane: ControlPlane) -> None:
    reachable = {
        path
        for method, path in [*routes(control_plane), *INTERNAL, ("GET", "/openapi.json")]
        if ask(control_plane, method, path, {}).status_code == 200
    }

    assert reachable == OPEN


# --- odd headers -----------------------------------------------------------------------------------------------------

ODD_AUTHORIZATIONS: dict[str, bytes] = {
    "empty": b"",
    "Bearer alone": b"Bearer",
    "Bearer and a blank": b"Bearer ",
    "Basic alone": b"Basic",
    "an unknown scheme": b"Digest username=x",
    "a Latin-1 byte": b"Bearer \xe9",
    "0xff": b"Basic \xff\xff",
    "an emoji": "Bearer 🎫".encode(),
    "an emoji in Basic": b"Basic " + base64.b64encode("🎫:🎫".encode()),
    "bad base64": b"Basic !!!!",
    "cut base64": b"Basic YTpi=",
    "base64 of no text": b"Basic " + base64.b64encode(b"\xff\xfe:\xff"),
    "base64 of a NUL": b"Basic " + base64.b64encode(b"a\0b:c\0d"),
    "no colon": b"Basic " + base64.b64encode(b"nothing"),
    "no password": b"Basic " + base64.b64encode(b"test-proxy:"),
    "64 KiB": b"Bearer " + b"x" * 65_536,
    "64 KiB of Basic": b"Basic " + base64.b64encode(b"x:" + b"y" * 49_000),
    "a wrong token": b"Bearer " + b"x" * 43,
    "a wrong password": b"Basic " + base64.b64encode(b"test-proxy:" + b"x" * 43),
    "a JWT of alg none": b"Bearer eyJhbGciOiJub25lIn0.e30.",
    "three dots": b"Bearer ...",
    "a JWT of garbage": b"Bearer " + b".".join([base64.b64encode(b"\xff" * 30)] * 3),
    "a deep JWT": b"Bearer " + base64.urlsafe_b64encode(b'{"typ":' + b"[" * 3_000) + b".e30.AA",
}


def raw(control_plane: ControlPlane, method: str, path: str, authorization: bytes) -> tuple[int, bytes]:
    """A request whose header is exactly these bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", int(control_plane.url.rpartition(":")[2]), timeout=10)
    connection.putrequest(method, path)
    connection.putheader("Authorization", authorization)
    body = b"{}" if method in ("POST", "PATCH", "PUT") else b""
    content_type = "application/x-www-form-urlencoded" if path.startswith("/oauth") else "application/json"
    connection.putheader("Content-Type", content_type)
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


@pytest.mark.parametrize("authorization", ODD_AUTHORIZATIONS.values(), ids=ODD_AUTHORIZATIONS.keys())
def test_an_odd_authorization_is_401_everywhere_with_one_body(
    control_plane: ControlPlane, authorization: bytes
) -> None:
    closed = [(method, filled(path)) for method, path in routes(control_plane) if path not in OPEN]
    closed += [*INTERNAL, ("GET", "/internal/events")]
    bodies = set()
    for method, path in closed:
        status, body = raw(control_plane, method, path, authorization)
        answer = json.loads(body)
        assert status == 401, (method, path, body)
        assert authorization[-20:] not in body or len(authorization) < 20
        bodies.add(answer.get("detail") or answer["error_description"].partition(". ")[0])
    assert len(bodies) == 1


def test_a_right_answer_needs_the_whole_token(control_plane: ControlPlane) -> None:
    for token in (ADMIN_TOKEN[:-1], ADMIN_TOKEN + "x", ADMIN_TOKEN.upper(), ""):
        response = control_plane.http.get("/v1/tenants", headers={"Authorization": f"Bearer {token}".strip()})
        assert response.status_code == 401


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kilobytes", [9, 17, 40])
def test_a_large_authorization_is_read_like_any_other(control_plane: ControlPlane, kilobytes: int) -> None:
    assert raw(control_plane, "GET", "/v1/tenants", b"Bearer " + b"x" * 1024 * kilobytes)[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        {f"x-filler-{number}": "v" * 1000 for number in range(140)},
        {"cookie": "c" * 140_000},
    ],
    ids=["many", "one huge"],
)
def test_a_head_that_is_too_large_is_431(control_plane: ControlPlane, headers: dict[str, str]) -> None:
    response = control_plane.http.get("/healthz", headers=headers)

    assert (response.status_code, response.json()["code"]) == (431, "headers_too_large")


@pytest.mark.guards("control_plane/api/http.py", "if self._head_bytes > MAX_OPEN_HEAD_BYTES:", "if False:")
def test_a_head_that_never_ends_is_431_before_it_fills_the_memory(control_plane: ControlPlane) -> None:
    with socket.create_connection(("127.0.0.1", int(control_plane.url.rpartition(":")[2])), timeout=10) as peer:
        peer.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Endless: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 50_000_000:
                sent += peer.send(b"x" * 65_536)
        assert sent < 20_000_000


@pytest.mark.long
def test_a_head_that_does_not_come_is_408(control_plane: ControlPlane) -> None:
    peers = [socket.create_connection(("127.0.0.1", int(control_plane.url.rpartition(":")[2]))) for _ in range(3)]
    beginnings = [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: x\r\n"]
    for peer, beginning in zip(peers, beginnings, strict=True):
        peer.settimeout(30)
        peer.sendall(beginning)

    answers = [peer.recv(65_536) for peer in peers]

    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers), answers
    for peer in peers:
        peer.close()


@pytest.mark.guards("control_plane/api/http.py", "self.loop.call_later(BODY_SECONDS, self._refuse_body)", "self._timer")
@pytest.mark.parametrize("path", ["/oauth/token", "/oauth/revoke", "/v1/sessions", "/nothing"])
def test_a_body_that_does_not_come_holds_no_connection(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("control_plane.api.http.BODY_SECONDS", 0.2)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nContent-Type: application/x-www-form-urlencoded"
    with socket.create_connection(("127.0.0.1", int(control_plane.url.rpartition(":")[2])), timeout=10) as peer:
        peer.sendall(head.encode() + b"\r\n\r\ngrant_type=")

        answer = b""
        while part := peer.recv(65_536):
            answer += part

    expected = b"HTTP/1.1 408 " if path.startswith("/oauth") else b"HTTP/1.1 4"
    assert answer.startswith(expected)
    assert answer.count(b"HTTP/1.1 ") == 1


def test_150_header_lines_and_200_cookies_are_fine(control_plane: ControlPlane) -> None:
    headers = {f"x-filler-{number}": "v" for number in range(150)}
    cookies = "; ".join(f"c{number}=v" for number in range(200))

    assert control_plane.http.get("/healthz", headers=headers | {"cookie": cookies}).status_code == 200


@pytest.mark.parametrize(("kilobytes", "status"), [(7, 404), (9, 414), (20, 414)])
def test_a_long_target_is_414(control_plane: ControlPlane, kilobytes: int, status: int) -> None:
    for path in ("/" + "x" * 1024 * kilobytes, "/nothing?" + "x" * 1024 * kilobytes):
        assert control_plane.http.get(path).status_code == status


def chunks(total: int) -> Iterator[bytes]:
    for _ in range(total // 10_000):
        yield b" " * 10_000


@pytest.mark.guards("control_plane/api/edge.py", "if seen > limit:", "if False:")
@pytest.mark.parametrize("path", ["/v1/tenants/acme/credentials", "/oauth/token", "/internal/resolve"])
def test_a_body_that_is_too_large_is_413_with_or_without_a_length(workspace: Workspace, path: str) -> None:
    headers = {
        "/v1": {"Authorization": f"Bearer {ADMIN_TOKEN}"},
        "/oauth": basic(workspace.runtime, workspace.runtime_secret),
        "/internal": basic(*PROXY),
    }["/" + path.split("/")[1]] | {
        "Content-Type": "application/x-www-form-urlencoded" if "oauth" in path else "application/json"
    }

    for content in (b" " * 300_000, chunks(300_000)):
        response = workspace.control_plane.http.post(path, content=content, headers=headers)
        assert response.status_code == 413, response.text
        assert response.json()["code"] == "body_too_large"


# --- the form of a refusal -------------------------------------------------------------------------------------------


def test_a_refusal_is_problem_details_with_a_request_id(control_plane: ControlPlane) -> None:
    response = control_plane.http.get("/v1/tenants")

    body = response.json()
    assert response.headers["content-type"] == "application/problem+json"
    assert body["type"] == "urn:coatcheck:refusal:token_invalid"
    assert set(body) == {"type", "title", "status", "code", "detail", "hint", "request_id"}
    assert body["request_id"] == response.headers["coatcheck-request-id"]
    assert response.headers["coatcheck-refusal"] == "token_invalid"
    assert response.headers["x-should-retry"] == "false"
    assert "Bearer" in response.headers["www-authenticate"]


def test_an_unknown_route_and_a_wrong_method_are_refusals_too(control_plane: ControlPlane) -> None:
    nowhere = control_plane.http.get("/nothing/here")
    wrong = control_plane.http.request("PUT", "/oauth/token")

    assert (nowhere.status_code, nowhere.json()["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")


@pytest.mark.parametrize("content", [b"{", b"\xff", b"nothing", b"[" * 50_000], ids=["cut", "bytes", "text", "deep"])
def test_a_body_that_is_no_json_is_malformed(control_plane: ControlPlane, content: bytes) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": "application/json"}

    response = control_plane.http.post("/v1/clients", content=content, headers=headers)

    assert (response.status_code, response.json()["code"]) == (400, "malformed_request"), response.text


def test_bytes_that_are_no_request_end_the_connection(control_plane: ControlPlane) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", int(control_plane.url.rpartition(":")[2])), timeout=5) as peer:
            peer.sendall(garbage + b"\r\n\r\n")
            answer = peer.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 400") or answer == b""
    assert control_plane.http.get("/healthz").status_code == 200


def test_what_nobody_expected_is_an_internal_error_without_its_message(own_control_plane: OwnControlPlane) -> None:
    plane = own_control_plane()
    plane.edit("DELETE FROM meta")

    response = plane.http.get("/internal/tag-keys", auth=PROXY)
    afterwards = plane.http.get("/healthz")

    assert (response.status_code, response.json()["code"]) == (500, "internal_error")
    assert response.json()["detail"] == "the control plane failed"
    assert "migrations" not in response.text
    assert response.headers["coatcheck-request-id"] == response.json()["request_id"]
    assert afterwards.status_code == 200
