"""One placeholder, followed from its exchange to its audit event, with every part a process of its own.

The order is the one a newcomer reads the code in: session, exchange, proxy, decision, resolve, swap, upstream, scrub,
audit. After that, what must not happen on the way, and what a change of mind does to a request that is under way.
"""

import base64
import contextlib
import functools
import secrets
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.api import ApiError, Ticket
from tests.support.processes import Deployment, Proxy, Workspace, wait_for
from tests.support.raw_client import Response, TunnelRefusedError, connected
from tests.support.upstream import Gate, Upstream, chunk, endless_sse, gated, mirror_headers, plain
from tests.support.ways import Kind, Way, way

TAKES_EFFECT_WITHIN_SECONDS = 5.0
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


# --- the way ---------------------------------------------------------------------------------------------------------


@pytest.mark.guards("egress_proxy/core/substitution.py", "wire_value(swap.placement, swap.secret)))", "b''))")
def test_a_placeholder_is_exchanged_swapped_scrubbed_and_audited(
    workspace: Workspace, upstream: Upstream, secret: str, kind: Kind
) -> None:
    api, tenant, client = workspace.api, workspace.tenant, workspace.client
    workspace.credential("weather", url=upstream.url, secret=secret)
    upstream.on("/v1/today", mirror_headers())

    # (1) The client of the runtime opens a session for its user, and exchanges the session's token.
    session = api.open_session(runtime=client.id, tenant=tenant, subject="alice")
    ticket = api.exchange(client, session_token=session["session_token"], audience="weather")
    assert ticket.answer["upstream_credential"] == {"mode": "placeholder", "value": ticket.placeholder}
    assert (ticket.answer["subject"], ticket.answer["tenant"]) == ("alice", tenant)
    assert ticket.answer["session_id"] == session["session_id"]
    assert secret not in str(ticket.answer)

    # (2) The request carries the placeholder; the proxy asks what it stands for, and swaps.
    through = way(workspace, upstream, ticket, kind, credential="weather")
    with through.open() as line:
        response = line.ask(through.request("GET", "/v1/today?city=Bern"))
        received = bytes(line.received)

    # (3) The upstream saw the key and nothing of ours.
    (seen,) = upstream.requests
    assert seen.values("authorization") == [f"Bearer {secret}"]
    assert seen.target == "/v1/today?city=Bern"
    assert seen.values("host") == [upstream.authority]
    assert b"coatchk1" not in upstream.received().lower()
    assert b"coatprx1" not in upstream.received().lower()
    assert b"proxy-" not in seen.head.lower()

    # (4) What it mirrored came back without the key.
    assert response.status == 200
    assert secret.encode() not in received
    assert not [name for name, _ in response.headers if name == "coatcheck-refusal"]

    # (5) The trail has one event: who, what, where; no value.
    event = wait_for(lambda: [e for e in api.audit(tenant) if e["action"] == "swap"])[0]
    expected = {
        "tenant": tenant,
        "subject": "alice",
        "session": session["session_id"],
        "client": client.id,
        "credential": "weather",
        "version": 1,
        "placeholder_id": ticket.id,
    }
    assert {name: event[name] for name in expected} == expected
    assert (event["method"], event["host"], event["port"]) == ("GET", "localhost", upstream.port)
    assert event["path"] == "/v1/today"
    assert secret not in str(event)
    assert "Bern" not in str(event), "no query string"


def test_the_base_url_of_the_exchange_leads_to_the_reverse_route(
    workspace: Workspace, upstream: Upstream, ticket: Ticket, secret: str
) -> None:
    response = httpx.get(
        f"{ticket.base_url}/v1/today",
        headers={
            "Authorization": f"Bearer {ticket.placeholder}",
            "Proxy-Authorization": f"Bearer {ticket.proxy_credential}",
        },
        trust_env=False,
    )

    assert response.status_code == 200
    assert upstream.requests[0].header("authorization") == f"Bearer {secret}"
    assert ticket.proxy_credential not in ticket.base_url


# --- another's placeholder --------------------------------------------------------------------------------------------


@pytest.fixture
def other(deployment: Deployment) -> Workspace:
    """Another customer of the same control plane and proxy."""
    return deployment.workspace()


@pytest.mark.guards("egress_proxy/core/decision.py", "if binding.caller.tenant != caller.tenant:", "if False:")
def test_two_tenants_placeholders_are_refused_to_each_other_both_ways(
    workspace: Workspace, other: Workspace, upstream: Upstream, kind: Kind
) -> None:
    """The same destination, the same proxy, the same credential name: only the callers differ."""
    keys = {w.tenant: f"sk-real-{secrets.token_hex(16)}" for w in (workspace, other)}
    tickets = {}
    for each in (workspace, other):
        each.credential("api", url=upstream.url, secret=keys[each.tenant])
        tickets[each.tenant] = each.ticket("api")
    mine, theirs = tickets[workspace.tenant], tickets[other.tenant]
    for at, own in ((workspace, mine), (other, theirs)):  # the proxy knows both by now: it must not serve from memory
        assert way(at, upstream, own, kind).ask("GET", "/own").status == 200
    seen = len(upstream.requests)

    refused = [
        way(at, upstream, with_the_others_placeholder(own, stolen), kind).ask("GET", "/stolen")
        for at, own, stolen in ((workspace, mine, theirs), (other, theirs, mine))
    ]

    assert [(r.status, r.refusal) for r in refused] == [(403, "unknown_placeholder")] * 2
    assert len(upstream.requests) == seen
    for at, own in ((workspace, mine), (other, theirs)):
        assert way(at, upstream, own, kind).ask("GET", "/own").status == 200
        assert upstream.requests[-1].header("authorization") == f"Bearer {keys[at.tenant]}"
    # Each tenant's trail says what its own were told, and that its own placeholder turned up elsewhere.
    true_codes = wait_for(lambda: [e.get("true_code") for e in workspace.api.audit(workspace.tenant) if e.get("code")])
    assert true_codes == ["unknown_placeholder"]
    for at, own in ((workspace, mine), (other, theirs)):
        wait_for(functools.partial(alarms_of, at))
        assert [event["placeholder_id"] for event in alarms_of(at)] == [own.id]


def alarms_of(workspace: Workspace) -> list[dict[str, Any]]:
    """Its own placeholders that were seen elsewhere."""
    return [e for e in workspace.api.audit(workspace.tenant) if e["action"] == "alarm.stolen_placeholder"]


@pytest.mark.guards("control_plane/resolution.py", "if facts.token.tenant != ask.caller.tenant:", "if False:")
def test_another_tenants_placeholder_is_unknown_also_when_nobody_used_it_yet(
    workspace: Workspace, other: Workspace, upstream: Upstream, ticket: Ticket, kind: Kind
) -> None:
    """The proxy knows nothing of it: the control plane is the one that refuses, before anything is dialled."""
    other.credential("api", url=upstream.url, secret=f"sk-real-{secrets.token_hex(16)}")
    thief = with_the_others_placeholder(other.ticket("api"), ticket)

    response = way(other, upstream, thief, kind).ask("GET", "/stolen")

    assert (response.status, response.refusal) == (403, "unknown_placeholder")
    assert upstream.accepted == 0


@pytest.mark.guards("egress_proxy/core/decision.py", "if binding.caller != caller:", "if False:")
@pytest.mark.parametrize("difference", ["another subject", "another session", "another client"])
def test_a_placeholder_of_another_caller_of_the_same_tenant_is_refused(
    workspace: Workspace, upstream: Upstream, ticket: Ticket, kind: Kind, difference: str
) -> None:
    api = workspace.api
    if difference == "another subject":
        api.add_grant(workspace.tenant, "api", subject="bob")
        own = workspace.ticket("api", subject="bob")
    elif difference == "another session":
        own = workspace.ticket("api")
    else:
        second = Workspace(
            workspace.deployment,
            workspace.tenant,
            api.add_client(f"{workspace.tenant}-second", kind="runtime", tenant=workspace.tenant),
        )
        own = second.ticket("api")
    assert way(workspace, upstream, ticket, kind).ask("GET", "/own").status == 200
    seen = len(upstream.requests)

    response = way(workspace, upstream, with_the_others_placeholder(own, ticket), kind).ask("GET", "/stolen")

    assert (response.status, response.refusal) == (403, "caller_mismatch")
    assert len(upstream.requests) == seen


def with_the_others_placeholder(own: Ticket, stolen: Ticket) -> Ticket:
    """What a thief has: their own caller proof, and a placeholder from somewhere else."""
    return Ticket(stolen.placeholder, own.proxy_credential, own.base_url, own.answer)


@pytest.mark.guards(
    "egress_proxy/core/decision.py",
    "if any(together.issubset(kinds) for together in connection.accepts):",
    "if True:",
)
def test_a_stolen_placeholder_without_any_caller_is_worthless(
    workspace: Workspace, upstream: Upstream, ticket: Ticket
) -> None:
    with pytest.raises(TunnelRefusedError) as in_forward_mode:
        connected(workspace.deployment.proxy.forward_port, upstream.authority, proxy_credential=None)
    with workspace.reverse() as line:
        in_reverse_mode = line.ask(
            f"GET /api/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ticket.placeholder}\r\n\r\n".encode()
        )

    assert in_forward_mode.value.response.status == 407
    assert in_forward_mode.value.response.header("proxy-authenticate")
    assert (in_reverse_mode.status, in_reverse_mode.refusal) == (401, "token_required")
    assert in_reverse_mode.header("www-authenticate")
    assert upstream.accepted == 0


# --- its life ---------------------------------------------------------------------------------------------------------


@pytest.mark.guards(
    "control_plane/contract/placeholder.py", "if hmac.compare_digest(_tag(stem, key), tag):", "if True:"
)
def test_an_altered_placeholder_is_refused_without_asking_anybody(
    workspace: Workspace, upstream: Upstream, ticket: Ticket, kind: Kind
) -> None:
    last = "A" if ticket.placeholder[-1] != "A" else "B"
    altered = Ticket(ticket.placeholder[:-1] + last, ticket.proxy_credential, ticket.base_url, ticket.answer)
    assert way(workspace, upstream, ticket, kind).ask("GET", "/own").status == 200
    asked = questions(workspace.deployment)

    response = way(workspace, upstream, altered, kind).ask("GET", "/forged")

    assert (response.status, response.refusal) == (403, "unknown_placeholder")
    assert questions(workspace.deployment) == asked
    assert upstream.seen("/forged") == []


def questions(deployment: Deployment) -> int:
    """How often the control plane has been asked to resolve something, up to now."""
    name = f"/v1/tenants/{secrets.token_hex(8)}"  # a line of our own in its log: what came before it is written
    with contextlib.suppress(ApiError):
        deployment.api.ask("GET", f"{name}/credentials")
    wait_for(lambda: name in deployment.control_plane.log)
    return deployment.control_plane.log.count('"/internal/resolve"')


TIME_IS_OVER = ("expired_placeholder", "token_expired", "token_invalid", "proxy_authentication_required")
"""Both strings of an exchange end at the same moment; which one is looked at first depends on the way."""


def test_an_expired_placeholder_is_refused_and_lives_again_by_renewal_in_place(
    workspace: Workspace, upstream: Upstream, secret: str, kind: Kind
) -> None:
    upstream.default = plain(b"ok")
    workspace.credential("api", url=upstream.url, secret=secret)
    issued = workspace.api.ask(
        "POST",
        f"/v1/tenants/{workspace.tenant}/placeholders",
        {"subject": "alice", "audience": "api", "ttl_seconds": 2, "client": workspace.client.id, "session": True},
    )
    ticket = Ticket(issued["access_token"], issued["proxy_credential"], issued["base_url"], issued)
    through = way(workspace, upstream, ticket, kind)
    alive = through.ask("GET", "/1")

    expired = wait_for(lambda: refused(through, *TIME_IS_OVER))
    renewed = workspace.api.renew(workspace.client, ticket)
    wait_for(lambda: status_of(through) == 200, timeout_seconds=TAKES_EFFECT_WITHIN_SECONDS)

    assert alive.status == 200
    assert expired
    assert renewed.placeholder == ticket.placeholder, "a running child's environment cannot be changed"
    assert renewed.proxy_credential == ticket.proxy_credential


def refused(through: Way, *codes: str) -> Response | None:
    """The refusal with one of these codes, once there is one."""
    try:
        response = through.ask("GET", "/again")
    except TunnelRefusedError as error:
        response = error.response
    return response if response.refusal in codes else None


def status_of(through: Way) -> int:
    try:
        return through.ask("GET", "/again").status
    except TunnelRefusedError as error:
        return error.response.status


CALLER_GONE = ("proxy_authentication_required", "token_invalid")
NOT_GRANTED = ("revoked_placeholder", "unknown_placeholder", "destination_denied", "credential_not_found")
CHANGES = {
    "the placeholder is revoked": ("revoked_placeholder",),
    "the placeholder is revoked by the operator": ("revoked_placeholder",),
    "the session is deleted": ("revoked_placeholder", *CALLER_GONE),
    "the grant is deleted": NOT_GRANTED,
    "the credential is deleted": NOT_GRANTED,
    "the tenant is deleted": ("unknown_placeholder", *NOT_GRANTED, *CALLER_GONE),
}


def change(what: str, workspace: Workspace, ticket: Ticket) -> None:
    api, tenant = workspace.api, f"/v1/tenants/{workspace.tenant}"
    match what:
        case "the placeholder is revoked":
            assert api.revoke(workspace.client, ticket.placeholder) == 200
        case "the placeholder is revoked by the operator":
            api.ask("DELETE", f"{tenant}/placeholders/{ticket.id}")
        case "the session is deleted":
            api.ask("DELETE", f"/v1/sessions/{ticket.answer['session_id']}")
        case "the grant is deleted":
            for grant in api.ask("GET", f"{tenant}/grants")["items"]:
                api.ask("DELETE", f"{tenant}/grants/{grant['id']}")
        case "the credential is deleted":
            api.ask("DELETE", f"{tenant}/credentials/api")
        case "the tenant is deleted":
            api.ask("DELETE", f"{tenant}?confirm={workspace.tenant}")


@pytest.mark.parametrize("what", CHANGES)
def test_when_a_placeholder_loses_its_ground_new_requests_are_refused_and_open_streams_end(
    workspace: Workspace, upstream: Upstream, ticket: Ticket, kind: Kind, what: str
) -> None:
    upstream.on("/stream", endless_sse())
    through = way(workspace, upstream, ticket, kind)
    with through.open() as line:
        line.send(through.request("GET", "/stream"))
        line.read_until(b"data: 3")

        started = time.monotonic()
        change(what, workspace, ticket)

        assert line.is_closed_by_peer(timeout_seconds=TAKES_EFFECT_WITHIN_SECONDS), "the stream ran on"
        assert time.monotonic() - started < TAKES_EFFECT_WITHIN_SECONDS
    assert wait_for(lambda: refused(through, *CHANGES[what]), timeout_seconds=TAKES_EFFECT_WITHIN_SECONDS)
    seen = len(upstream.requests)
    assert status_of(through) >= 400
    assert len(upstream.requests) == seen, "and none ever again"


def test_after_a_rotation_new_requests_have_the_new_key_and_open_streams_finish(
    workspace: Workspace, upstream: Upstream, ticket: Ticket, secret: str, kind: Kind
) -> None:
    new_secret, gate = f"sk-new-{secrets.token_hex(16)}", Gate()
    last = chunk(f"data: {secret}\n\n".encode()) + b"0\r\n\r\n"
    upstream.on("/stream", gated(STREAM_HEAD + chunk(b"data: first\n\n"), gate, last))
    through = way(workspace, upstream, ticket, kind)
    with through.open() as line:
        line.send(through.request("GET", "/stream"))
        line.read_until(b"\r\n\r\n")
        line.read_until(b"data: first")

        workspace.api.rotate(workspace.tenant, "api", secret=new_secret)
        wait_for(
            lambda: asked_with(through, upstream) == f"Bearer {new_secret}", timeout_seconds=TAKES_EFFECT_WITHIN_SECONDS
        )
        gate.open()
        rest = line.read_until(b"0\r\n\r\n")

    assert upstream.seen("/stream")[0].header("authorization") == f"Bearer {secret}"
    assert secret.encode() not in rest, "the old key is still looked for in what it opened"


def asked_with(through: Way, upstream: Upstream) -> str:
    """What the upstream is shown now."""
    assert through.ask("GET", "/now").status == 200
    return upstream.seen("/now")[-1].header("authorization")


# --- two replicas -----------------------------------------------------------------------------------------------------


@pytest.fixture
def second_proxy(deployment: Deployment) -> Iterator[Proxy]:
    """A replica: the same control plane, the same interception CA, nothing else in common."""
    proxy = deployment.start_proxy()
    yield proxy
    proxy.served.stop()
    deployment.proxies.remove(proxy)


def test_a_placeholder_works_and_ends_at_every_replica(
    workspace: Workspace, upstream: Upstream, ticket: Ticket, secret: str, second_proxy: Proxy, kind: Kind
) -> None:
    first = way(workspace, upstream, ticket, kind)
    second = Way(kind, ticket, upstream.authority, "api", second_proxy, first.context)

    assert [replica.ask("GET", "/alive").status for replica in (first, second)] == [200, 200]
    assert workspace.api.revoke(workspace.client, ticket.placeholder) == 200

    for replica in (first, second):
        assert wait_for(
            lambda at=replica: refused(at, "revoked_placeholder"),  # type: ignore[misc]
            timeout_seconds=TAKES_EFFECT_WITHIN_SECONDS,
        )


# --- nothing of it is anywhere else -----------------------------------------------------------------------------------


def test_no_secret_and_no_placeholder_is_in_any_file_log_metric_error_or_argument(
    workspace: Workspace, upstream: Upstream, ticket: Ticket, secret: str
) -> None:
    """After requests that were swapped, echoed, refused and failed, in both modes, at debug level."""
    deployment = workspace.deployment
    upstream.on("/mirror", mirror_headers())
    answers = [answer for kind in Kind for answer in misuse(way(workspace, upstream, ticket, kind))]
    workspace.api.rotate(workspace.tenant, "api", secret=secret + "2")
    wait_for(lambda: workspace.api.audit(workspace.tenant))
    metrics = httpx.get(f"http://127.0.0.1:{deployment.proxy.admin_port}/metrics", trust_env=False).content

    sinks = {
        "the database": b"".join(path.read_bytes() for path in deployment.database_files),
        "the logs": deployment.logs().encode(),
        "the metrics": metrics,
        "arguments": deployment.control_plane.arguments() + deployment.proxy.served.arguments(),
        "environments": deployment.control_plane.shown_environment() + deployment.proxy.served.shown_environment(),
        "answers": b"".join(answer.head + answer.body for answer in answers),
        "the trail": str(workspace.api.audit(workspace.tenant)).encode(),
    }
    found = [
        f"{name} in {sink}"
        for sink, text in sinks.items()
        for name, needle in needles(workspace, ticket, secret).items()
        if needle in text
    ]
    assert found == []
    assert all(sinks.values()), "an empty place was not looked at"
    assert upstream.received().count(secret.encode()) >= len(Kind), "the key was in use"


def misuse(through: Way) -> list[Response]:
    """Every kind of request that somebody may get wrong, and one that is right."""
    placeholder = through.ticket.placeholder
    basic = base64.b64encode(f"user:{placeholder}".encode()).decode()
    return [
        through.ask("GET", "/mirror"),
        through.ask("GET", f"/q?key={placeholder}"),
        through.ask("GET", f"/{placeholder}"),
        through.ask("GET", "/x", [("X-Debug", placeholder)]),
        through.ask("GET", "/x", [("Authorization", f"Basic {basic}")], bearer=False),
        through.ask("GET", "/x", [("Authorization", f"Bearer {placeholder[:-1]}")], bearer=False),
        through.ask("GET", "/x", [("Authorization", f"Bearer {placeholder.upper()}")], bearer=False),
        through.ask("TRACE", "/x"),
        through.ask("GET", "/x", [("Transfer-Encoding", "chunked"), ("Content-Length", "3")]),
    ]


def needles(workspace: Workspace, ticket: Ticket, secret: str) -> dict[str, bytes]:
    deployment = workspace.deployment
    values = {
        "the key": secret,
        "the placeholder": ticket.placeholder,
        "the proxy credential": ticket.proxy_credential,
        "the client's secret": workspace.client.secret,
        "the proxy's secret": deployment.proxy_secret,
        "the operator's token": deployment.admin_token,
    }
    plain = {name: value.encode() for name, value in values.items()}
    encoded = {f"{name}, in base64": base64.b64encode(value)[:-4] for name, value in plain.items()}
    return plain | encoded
