"""Searches everything that a control plane leaves behind, at debug level, for what must not be in it."""

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.control_plane.issuing import Provider, SigningKey, bearer
from tests.control_plane.serving import ADMIN_TOKEN, PROXY_SECRET, ControlPlane, ManualClock, settings_in
from tests.control_plane.test_bootstrap import PROGRAM, environment
from tests.control_plane.test_client_authentication import JWT_BEARER, add_client
from tests.control_plane.workspace import ENDPOINT, JWT, PLACEHOLDER, Workspace

SECRETS = ["first-real-key-8f14e45fceea167a", "second-real-key-c9f0f895fb98ab91", "third-real-key-45c48cce2e2d7fbd"]
REFUSED_SECRETS = ["refused-real-key-d3d9446802a44259\r\nX: y", "refused-real-key-6512bd43d9caa6e0-ü"]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[ControlPlane, Path]]:
    """A control plane as a process of its own, logging everything it would ever log."""
    log = tmp_path / "log"
    variables = environment(tmp_path, COATCHECK_CONTROL_PLANE_LOG_LEVEL="debug")
    with log.open("w") as file:
        running = subprocess.Popen([sys.executable, "-X", "dev", "-c", PROGRAM], env=variables, stderr=file)
    while not (lines := [line for line in log.read_text().splitlines(keepends=True) if '"listening"' in line]):
        assert running.poll() is None, log.read_text()
        time.sleep(0.05)
    plane = ControlPlane(json.loads(lines[0])["url"], tmp_path, settings_in(tmp_path), ManualClock(), lambda: None)
    with plane.http:
        yield plane, log
    running.terminate()
    running.wait(10)


def spellings(secret: str) -> list[bytes]:
    """The forms in which a careless program would have let it out."""
    raw = secret.encode()
    return [raw, base64.b64encode(raw)[:-4], raw.hex().encode(), json.dumps(secret).strip('"').encode(), raw[::-1]]


def test_neither_the_database_nor_a_log_nor_an_answer_holds_a_secret_or_a_placeholder(
    process: tuple[ControlPlane, Path], tmp_path: Path
) -> None:
    plane, log = process
    answers: list[httpx.Response] = []
    plane.http.event_hooks["response"] = [lambda response: answers.append(response)]
    workspace = Workspace(plane, "acme")
    url = {"url": f"https://{ENDPOINT['host']}"}

    # Everything that takes a secret, succeeding and failing.
    workspace.post_credential({"name": "example", "destinations": [url], "secret": SECRETS[0]})
    workspace.post_credential({"name": "example", "destinations": [url], "secret": SECRETS[0]})
    workspace.post_credential({"name": "x", "destinations": [url], "secret": SECRETS[0], "unknown": SECRETS[0]})
    workspace.post_credential({"name": SECRETS[0], "destinations": [url], "secret": SECRETS[0], SECRETS[0]: 1})
    for refused in REFUSED_SECRETS:
        workspace.post_credential({"name": "y", "destinations": [url], "secret": refused})
    workspace.rotate(SECRETS[1])
    workspace.patch_credential({"destinations": [url, {"url": "https://more.example"}]})
    workspace.patch_credential({"destinations": [url, {"url": "https://more.example"}], "secret": SECRETS[2]})
    workspace.grant()

    # Everything that takes or gives a token.
    session = workspace.open_session()
    issued = workspace.exchange(session)
    workspace.renew(issued, proxy_credential=issued["proxy_credential"])
    workspace.token(subject_token=issued["access_token"], subject_token_type=JWT, audience=issued["access_token"])
    workspace.token(subject_token=session["session_token"], subject_token_type=PLACEHOLDER, audience="x")
    plane.http.get("/v1/tenants", headers={"Authorization": f"Bearer {issued['access_token']}"})
    plane.http.get(f"/{issued['access_token']}/x?key={issued['proxy_credential']}&secret={SECRETS[0]}")
    plane.http.get(f"/v1/sessions/{issued['access_token']}?secret={SECRETS[0]}")
    plane.http.post("/internal/resolve", content=SECRETS[0], auth=("test-proxy", PROXY_SECRET))
    plane.http.post("/oauth/revoke", data={"token": issued["access_token"]}, auth=("acme-runtime", "wrong"))
    resolved = [workspace.resolve(issued) for _ in range(2)]
    assert [answer["secret"] for answer in resolved] == [SECRETS[2]] * 2
    workspace.end_session(session)

    # Everything that believes somebody else's token, or does not.
    provider, key = Provider("corp"), SigningKey("own")
    provider.register(plane, tenant="acme", uses=["session"])
    keyed = add_client(workspace, proofs={"keys": [key.jwk]})
    theirs = [provider.token("alice"), provider.token("alice", extra=1), provider.token("alice", exp=1)]
    for token in theirs:
        plane.http.post("/v1/sessions", json={"runtime": workspace.runtime}, headers=bearer(token))
        plane.http.get("/v1/tenants", headers=bearer(token))
        workspace.token(subject_token=token, subject_token_type=JWT, audience="example")
        plane.made("POST", "/v1/issuers/corp/test", {"token": token, "use": "session"})
    now = int(time.time())
    assertion = key.sign({"iss": keyed, "sub": keyed, "aud": plane.url, "exp": now + 60, "jti": "one-time-id-of-this"})
    for _ in range(2):
        form = {"client_assertion_type": JWT_BEARER, "client_assertion": assertion, "token": "x"}
        plane.http.post("/oauth/revoke", data=form)

    hidden = [*SECRETS, *REFUSED_SECRETS, *(secret.partition("\r")[0] for secret in REFUSED_SECRETS)]
    tokens = [issued["access_token"], issued["proxy_credential"], session["session_token"], workspace.runtime_secret]
    tokens += [*theirs, assertion, "one-time-id-of-this", *(token.rpartition(".")[2] for token in theirs)]
    own = [ADMIN_TOKEN, PROXY_SECRET, (tmp_path / "kek.hex").read_text()]
    files = [path for path in tmp_path.iterdir() if path.name.startswith("control-plane.sqlite")] + [log]

    assert {path.name for path in files} >= {"control-plane.sqlite", "control-plane.sqlite-wal", "log"}
    for path in files:
        content = path.read_bytes()
        assert len(content) > 1_000
        for secret in [*hidden, *tokens, *own]:
            for spelling in spellings(secret):
                assert spelling not in content, f"{path.name} holds {secret[:12]}…"
    for answer in answers:
        if answer.request.url.path != "/internal/resolve":
            assert not any(secret in answer.text for secret in hidden), answer.request.url.path
            assert not any(token in answer.text for token in own)


def test_the_log_says_what_was_asked_without_a_query(process: tuple[ControlPlane, Path]) -> None:
    plane, log = process

    response = plane.http.get("/v1/tenants?token=something-private")
    plane.http.get("/healthz")  # answered once the line of the request before it is written

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == response.headers["coatcheck-request-id"]]
    assert (line["event"], line["method"], line["path"], line["status"]) == ("request", "GET", "/v1/tenants", 401)
    assert "something-private" not in log.read_text()
