"""What a proxy hears when it asks (`POST /internal/resolve`)."""

from typing import Any

import pytest

from control_plane.contract.wire import RESOLVE_ANSWER, ResolvedPlaceholder, read
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import PROXY
from tests.control_plane.workspace import ENDPOINT, HOST, SECRET, Json, Workspace, sha256


def test_a_placeholder_resolves_to_its_secret_and_its_whole_binding(granted: Workspace) -> None:
    issued = granted.exchange()

    answer = granted.ask(
        {
            "kind": "placeholder",
            "placeholder_sha256": sha256(issued["access_token"]),
            "caller": granted.caller(issued),
            "endpoint": ENDPOINT,
        }
    )

    binding = answer["answer"]["binding"]
    assert answer["answer"]["secret"] == SECRET
    assert binding["placeholder_id"] == issued["id"]
    assert binding["caller"] == granted.caller(issued)
    assert (binding["credential_id"], binding["credential_name"]) == (granted.credential()["id"], "example")
    assert binding["version"] == 1
    assert [destination["endpoint"]["host"] for destination in binding["destinations"]] == [HOST]
    assert binding["placements"] == issued["placements"]
    assert len(binding["scopes"]) == len(binding["grant_ids"]) == 1
    assert answer["contract"] == 1


def test_an_answer_is_what_the_contract_says(granted: Workspace) -> None:
    issued = granted.exchange()
    response = granted.control_plane.http.post(
        "/internal/resolve",
        json={
            "ask": {
                "kind": "placeholder",
                "placeholder_sha256": sha256(issued["access_token"]),
                "caller": granted.caller(issued),
                "endpoint": ENDPOINT,
            }
        },
        auth=PROXY,
    )

    answer = read(RESOLVE_ANSWER, response.content)

    assert isinstance(answer.answer, ResolvedPlaceholder)
    assert answer.answer.secret == SECRET


def test_a_proxy_credential_resolves_to_its_caller(granted: Workspace) -> None:
    issued = granted.exchange()

    facts = granted.who(issued["proxy_credential"])

    assert facts["caller"] == granted.caller(issued)
    assert facts["expires_at"] == pytest.approx(granted.resolve(issued)["binding"]["expires_at"], abs=1)


@pytest.mark.parametrize("token", ["coatprx1" + "0" * 28, "", "nothing like it"])
def test_a_proxy_credential_that_is_not_there_is_unauthenticated(granted: Workspace, token: str) -> None:
    answer = granted.who(token)

    assert (answer["code"], answer["true_code"]) == ("proxy_authentication_required", "token_invalid")


@pytest.mark.guards(
    "control_plane/resolution.py",
    "if facts is None or facts.token.kind is not TokenKind.PLACEHOLDER:",
    "if facts is None:",
)
@pytest.mark.guards("control_plane/resolution.py", "facts.token.kind is not TokenKind.PROXY_CREDENTIAL or ", "")
def test_neither_kind_of_token_is_taken_for_the_other(granted: Workspace) -> None:
    issued = granted.exchange()

    as_caller = granted.who(issued["access_token"])
    as_placeholder = granted.resolve(issued | {"access_token": issued["proxy_credential"]})

    assert as_caller["code"] == "proxy_authentication_required"
    assert as_placeholder["code"] == "unknown_placeholder"


@pytest.mark.guards(
    "control_plane/resolution.py",
    "if facts.token.caller != ask.caller:\n            return replace(_CALLER_MISMATCH",
    "if False:\n            return replace(_CALLER_MISMATCH",
)
@pytest.mark.parametrize("field", ["client", "subject", "session", "no session"])
def test_another_caller_of_the_tenant_hears_caller_mismatch(granted: Workspace, field: str) -> None:
    issued = granted.exchange()
    changed: Json = {"session": None} if field == "no session" else {field: "somebody-else"}

    answer = granted.resolve(issued, caller=granted.caller(issued) | changed)

    assert answer["code"] == "caller_mismatch"
    assert answer["binding"]["caller"] == granted.caller(issued)
    assert SECRET not in str(answer)


@pytest.mark.guards("control_plane/resolution.py", "if facts.token.tenant != ask.caller.tenant:", "if False:")
@pytest.mark.parametrize("state", ["live", "revoked", "its session is over", "elsewhere bound"])
def test_a_caller_of_another_tenant_hears_unknown_whatever_the_state(
    granted: Workspace, other_workspace: Workspace, state: str
) -> None:
    other_workspace.add_credential()
    other_workspace.grant()
    thief = other_workspace.caller(other_workspace.exchange())
    session = granted.open_session()
    issued = granted.exchange(session)
    if state == "revoked":
        granted.control_plane.made("DELETE", granted.path(f"placeholders/{issued['id']}"))
    if state == "its session is over":
        granted.end_session(session)
    endpoint = ENDPOINT | {"host": "evil.example"} if state == "elsewhere bound" else ENDPOINT

    stolen = granted.resolve(issued, caller=thief, endpoint=endpoint)
    never_there = granted.resolve(issued | {"access_token": "coat_coatchk1" + "0" * 28}, caller=thief)

    told = ("code", "detail", "hint")
    assert [stolen[name] for name in told] == [never_there[name] for name in told]
    assert (stolen["code"], stolen["true_code"]) == ("unknown_placeholder", "caller_mismatch")
    assert stolen["binding"]["caller"]["tenant"] == granted.tenant  # for the audit trail alone
    assert SECRET not in str(stolen)


ELSEWHERE: dict[str, Json] = {
    "another host": {"host": "evil.example"},
    "a host that ends the same": {"host": f"evil-{HOST}"},
    "a subdomain": {"host": f"x.{HOST}"},
    "another port": {"port": 8443},
    "http": {"scheme": "http", "port": 80},
    "http on the same port": {"scheme": "http"},
}


@pytest.mark.guards("control_plane/resolution.py", "if not facts.credential.reaches(ask.endpoint):", "if False:")
@pytest.mark.parametrize("endpoint", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_a_placeholder_resolves_for_its_own_destination_alone(granted: Workspace, endpoint: Json) -> None:
    answer = granted.resolve(granted.exchange(), endpoint=ENDPOINT | endpoint)

    assert answer["code"] == ("plaintext_credential" if "scheme" in endpoint else "destination_denied")
    assert SECRET not in str(answer)


@pytest.mark.guards(
    "control_plane/resolution.py",
    "# (5) Not expired.\n        if now >= facts.token.expires_at:",
    "# (5)\n        if False:",
)
@pytest.mark.guards("control_plane/resolution.py", "if self._clock() >= facts.token.expires_at:", "if False:")
def test_what_has_expired_resolves_to_nothing(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(placeholder_ttl_seconds=60), "acme")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()
    workspace.control_plane.clock.advance(61)

    assert workspace.resolve(issued)["code"] == "expired_placeholder"
    assert workspace.who(issued["proxy_credential"])["true_code"] == "token_expired"


@pytest.mark.guards(
    "control_plane/resolution.py",
    "facts.token.revoked_at is not None or _session_is_over(facts, now) or",
    "_session_is_over(facts, now) or",
)
@pytest.mark.guards(
    "control_plane/resolution.py",
    "if facts.token.revoked_at is not None or _session_is_over(facts, self._clock()):",
    "if False:",
)
def test_what_was_revoked_resolves_to_nothing(granted: Workspace) -> None:
    issued = granted.exchange()
    granted.control_plane.made("DELETE", granted.path(f"placeholders/{issued['id']}"))
    (proxy_credential,) = granted.control_plane.made("GET", granted.path("placeholders?kind=proxy_credential"))["items"]
    granted.control_plane.made("DELETE", granted.path(f"placeholders/{proxy_credential['id']}"))

    assert granted.resolve(issued)["code"] == "revoked_placeholder"
    assert granted.who(issued["proxy_credential"])["code"] == "proxy_authentication_required"


@pytest.mark.guards(
    "control_plane/resolution.py", "return facts.session is None or not facts.session.is_live(now)", "return False"
)
def test_a_session_that_is_over_takes_its_tokens_though_they_stand_unrevoked(granted: Workspace) -> None:
    session = granted.open_session()
    issued = granted.exchange(session)
    granted.control_plane.edit("UPDATE sessions SET ended_at = 1 WHERE id = ?", session["session_id"])

    assert granted.resolve(issued)["code"] == "revoked_placeholder"
    assert granted.who(issued["proxy_credential"])["code"] == "proxy_authentication_required"
    assert granted.policy(granted.caller(issued))["code"] == "proxy_authentication_required"


@pytest.mark.guards(
    "control_plane/resolution.py",
    " or not _is_known_client(facts):\n            return replace",
    ":\n            return replace",
)
def test_a_client_that_is_gone_takes_its_tokens_with_it(granted: Workspace) -> None:
    issued = granted.exchange()
    granted.control_plane.edit("DELETE FROM clients WHERE id = ?", granted.runtime)

    assert granted.resolve(issued)["code"] == "revoked_placeholder"
    assert granted.who(issued["proxy_credential"])["code"] == "proxy_authentication_required"
    assert granted.policy(granted.caller(issued))["code"] == "proxy_authentication_required"


def test_a_client_removed_by_the_administrator_has_its_tokens_revoked(granted: Workspace) -> None:
    issued = granted.exchange()

    granted.control_plane.made("DELETE", f"/v1/clients/{granted.runtime}")

    assert granted.resolve(issued)["code"] == "revoked_placeholder"


def test_a_removed_tenant_takes_everything(granted: Workspace) -> None:
    issued = granted.exchange()

    granted.control_plane.made("DELETE", f"/v1/tenants/{granted.tenant}?confirm={granted.tenant}")

    assert granted.resolve(issued)["code"] == "unknown_placeholder"
    assert granted.who(issued["proxy_credential"])["code"] == "proxy_authentication_required"
    for table in ("credentials", "credential_versions", "grants", "sessions", "tokens", "allow_rules"):
        left = granted.control_plane.look(f"SELECT * FROM {table} WHERE tenant = ?", granted.tenant)
        assert left == [], table
    assert [event["action"] for event in granted.audit()][-1] == "tenant.delete"


@pytest.mark.guards("control_plane/api/admin.py", "        if confirm != tenant:", "        if False:")
@pytest.mark.parametrize("confirm", ["", "?confirm=", "?confirm=yes", "?confirm=true", "?confirm={other}"])
def test_a_tenant_is_not_removed_without_its_id_said_twice(
    granted: Workspace, other_workspace: Workspace, confirm: str
) -> None:
    query = confirm.format(other=other_workspace.tenant)

    refused = granted.control_plane.admin("DELETE", f"/v1/tenants/{granted.tenant}{query}")

    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_field")
    assert refused.json()["detail"].startswith("confirm: ")
    assert "?confirm=" in refused.json()["hint"]
    assert granted.resolve(granted.exchange())["kind"] == "placeholder"


@pytest.mark.guards("control_plane/resolution.py", "and session.subject == caller.subject", "")
@pytest.mark.guards("control_plane/resolution.py", "and session.tenant == caller.tenant", "")
@pytest.mark.guards("control_plane/resolution.py", "and session.runtime == caller.client", "")
@pytest.mark.parametrize("field", ["client", "tenant", "subject", "session"])
def test_a_policy_is_only_for_a_caller_that_there_is(
    granted: Workspace, other_workspace: Workspace, field: str
) -> None:
    somebody = {
        "client": other_workspace.runtime,
        "tenant": other_workspace.tenant,
        "subject": "bob",
        "session": "ses_0",
    }
    # Served by a client of all tenants, so that only the tuple itself can be what is wrong.
    shared = f"{granted.tenant}-shared"
    granted.add_client(shared, "runtime", tenant=None)
    session = granted.open_session(runtime=shared)
    caller = {
        "client": shared,
        "tenant": granted.tenant,
        "subject": "alice",
        "session": session["session_id"],
    }
    another_shared = f"{granted.tenant}-shared-2"
    granted.add_client(another_shared, "runtime", tenant=None)
    changed = {"client": another_shared} if field == "client" else {field: somebody[field]}

    assert granted.policy(caller)["kind"] == "policy"
    assert granted.policy(caller | changed)["code"] == "proxy_authentication_required"


def test_a_policy_has_no_route_of_another_tenant(granted: Workspace, other_workspace: Workspace) -> None:
    other_workspace.add_credential("theirs")
    other_workspace.grant("theirs")

    policy = granted.policy(granted.caller(granted.exchange()))

    assert [route["credential_name"] for route in policy["routes"]] == ["example"]


# --- the protocol ----------------------------------------------------------------------------------------------------


def post(workspace: Workspace, body: Any = None, *, content: bytes | None = None) -> Any:
    if content is not None:
        return workspace.control_plane.http.post("/internal/resolve", content=content, auth=PROXY)
    return workspace.control_plane.http.post("/internal/resolve", json=body, auth=PROXY)


ASK = {"kind": "caller", "proxy_credential_sha256": "0" * 64}


def test_unknown_fields_are_ignored(workspace: Workspace) -> None:
    response = post(workspace, {"ask": ASK | {"new": 1}, "newer": {"x": 2}, "contract": 1})

    assert response.status_code == 200


@pytest.mark.guards(
    "control_plane/contract/wire.py",
    'if not UNDERSTOOD.issuperset(getattr(message, "must_understand", ())):',
    "if False:",
)
@pytest.mark.guards(
    "control_plane/contract/wire.py", 'if getattr(message, "contract", CONTRACT) not in SERVED_CONTRACTS:', "if False:"
)
@pytest.mark.parametrize("fields", [{"must_understand": ["newer"]}, {"contract": 0}, {"contract": 2}], ids=str)
def test_what_must_be_understood_and_is_not_is_an_error(workspace: Workspace, fields: Json) -> None:
    response = post(workspace, {"ask": ASK} | fields)

    assert (response.status_code, response.json()["code"]) == (400, "malformed_request")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"ask": {}}', b'{"ask": {"kind": "other"}}', b"\xff", b'{"ask": 1}', b"[" * 100_000],
    ids=["nothing", "cut", "a list", "null", "no kind", "unknown kind", "no text", "a number", "deep"],
)
def test_what_is_no_question_is_an_error(workspace: Workspace, content: bytes) -> None:
    response = post(workspace, content=content)

    assert (response.status_code, response.json()["code"]) == (400, "malformed_request")


def test_an_answer_is_of_the_moment_that_its_as_of_says(granted: Workspace) -> None:
    issued = granted.exchange()
    ask = {
        "kind": "placeholder",
        "placeholder_sha256": sha256(issued["access_token"]),
        "caller": granted.caller(issued),
        "endpoint": ENDPOINT,
    }
    before = granted.ask(ask)

    granted.rotate("a-new-key")
    after = granted.ask(ask)

    assert after["epoch"] == before["epoch"]
    assert after["as_of"] >= before["as_of"] + 2
    assert (before["answer"]["secret"], after["answer"]["secret"]) == (SECRET, "a-new-key")


def test_the_tag_keys_verify_what_was_minted(granted: Workspace) -> None:
    from control_plane.contract.placeholder import parse

    issued = granted.exchange()

    keys = granted.control_plane.http.get("/internal/tag-keys", auth=PROXY).json()

    ring = [bytes.fromhex(key) for key in keys["keys_hex"]]
    assert all(len(key) == 32 for key in ring)
    for name in ("access_token", "proxy_credential"):
        assert parse(issued[name], ring).text == issued[name]


@pytest.mark.guards("control_plane/adapters/sql/store.py", "if error is not None and _is_away(error):", "if False:")
def test_a_database_that_does_not_answer_is_unavailable_never_unknown(own_control_plane: OwnControlPlane) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()
    plane = workspace.control_plane
    plane.edit("ALTER TABLE tokens RENAME TO tokens_away")
    plane.edit("ALTER TABLE outbox RENAME TO outbox_away")

    question = {
        "ask": {
            "kind": "placeholder",
            "placeholder_sha256": sha256(issued["access_token"]),
            "caller": workspace.caller(issued),
            "endpoint": ENDPOINT,
        }
    }
    away = plane.http.post("/internal/resolve", json=question, auth=PROXY)
    not_ready = plane.http.get("/readyz")
    alive = plane.http.get("/healthz")
    plane.edit("ALTER TABLE tokens_away RENAME TO tokens")
    plane.edit("ALTER TABLE outbox_away RENAME TO outbox")
    back = plane.http.post("/internal/resolve", json=question, auth=PROXY)

    assert (away.status_code, away.json()["code"]) == (503, "store_unavailable")
    assert away.headers["retry-after"] == "1"
    assert (not_ready.status_code, alive.status_code) == (503, 200)
    assert back.json()["answer"]["secret"] == SECRET
