"""`coatcheck why REQUEST_ID`: what a decision was, and for a refusal what was expected and what to do.

Rule: exhaustive over the closed list of refusals. What to do comes with the very command where one exists; names from
the trail are quoted for the shell, because they come from requests.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, assert_never

import typer

from coatcheck.allow import is_internal
from coatcheck.audit import where
from coatcheck.client import Json
from coatcheck.stack import control_plane_of
from coatcheck.terminal import CommandError, invocation, local_time, show_fields, show_json, typed
from control_plane.contract.destination import DEFAULT_PORTS
from control_plane.contract.refusal import RefusalCode as C
from control_plane.contract.refusal import status_of

_RENEW: Final = "renew it: POST /oauth/token with the placeholder as subject_token ('coatcheck run' does so by itself)"
_ANEW: Final = "exchange anew; 'coatcheck run -- CMD' does it for a command"


@dataclass(frozen=True, slots=True)
class Explanation:
    expected: str
    todo: str
    command: str = ""
    """What to type, where a command helps."""


def why(
    context: typer.Context, request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", show_default=False)]
) -> None:
    """Explain a refusal. The id is in its Coatcheck-Request-Id header."""
    with control_plane_of(context) as control_plane:
        found = control_plane.audit_of_request(request_id)
    if not found:
        raise CommandError(
            f"the trail has no request {request_id}", "check the id; it takes about a second until an event arrives"
        )
    if invocation(context).as_json:
        show_json([{**event, "explanation": _explanation_to_json(event)} for event in found])
        return
    for event in found:
        show_fields(_fields(event, invocation(context).home))


def explain(code: C, event: Json) -> Explanation:
    """What was expected where this refusal came, and what to do."""
    host, credential = _host(event), _credential(event)
    match code:
        case C.MALFORMED_REQUEST:
            return Explanation("a request as HTTP/1.1 defines it (RFC 9112)", "correct what the client sends")
        case C.AMBIGUOUS_FRAMING:
            return Explanation(
                "exactly one way to tell where the message ends",
                "send either Content-Length or Transfer-Encoding: chunked, once",
            )
        case C.SUBJECT_CONFLICT:
            return Explanation("a subject header that agrees with the session token", "leave X-SH-Subject out")
        case C.SESSION_MISMATCH:
            return Explanation("the session that the token is for", "send the session_id of the token, or leave it out")
        case C.CREDENTIAL_REQUIRED:
            return Explanation(
                "the credential's placeholder in the request: its operator allows nothing without it",
                "let the client send its placeholder",
                f"coatcheck credential show {credential}" if credential else "coatcheck credential list",
            )
        case C.CREDENTIAL_AMBIGUOUS:
            return Explanation(
                "an audience that names one credential", "name the credential itself", "coatcheck credential list"
            )
        case C.ENDPOINT_UNRESOLVED:
            return Explanation(
                "a credential with a destination that a base URL can lead to",
                "give the credential a destination, or tell the control plane where its proxy listens",
                f"coatcheck credential show {credential}" if credential else "coatcheck credential list",
            )
        case C.TOKEN_REQUIRED:
            return Explanation(
                "a proxy credential with the request",
                "send the proxy_credential of an exchange as 'Proxy-Authorization: Bearer …', or use 'coatcheck run'",
            )
        case C.TOKEN_INVALID:
            return Explanation("a token that we signed or issued, unaltered", _ANEW)
        case C.TOKEN_EXPIRED:
            return Explanation("a token that is still alive", _ANEW)
        case C.PROXY_AUTHENTICATION_REQUIRED:
            return Explanation(
                "a live proxy credential on the connection",
                "put the proxy_credential of an exchange into the proxy URL as its password, or use 'coatcheck run'; "
                "one such answer before the real request is normal for git and Java",
            )
        case C.UNKNOWN_PLACEHOLDER:
            return Explanation(
                "a placeholder that was issued here, whole and unaltered, to this workspace",
                f"check that nothing shortened, encoded or retyped it; otherwise {_ANEW}",
            )
        case C.EXPIRED_PLACEHOLDER:
            return Explanation("a placeholder that is still alive", _RENEW)
        case C.REVOKED_PLACEHOLDER:
            return Explanation(
                "a placeholder that was not revoked (with its session, its grant or its credential)", _ANEW,
                "coatcheck placeholder list",
            )  # fmt: skip
        case C.CALLER_MISMATCH:
            return Explanation(
                "the caller that the placeholder was issued to: same client, subject and session",
                "if the client got it from somewhere else, find out how: a stolen placeholder looks like this; "
                "otherwise exchange one for this session",
            )
        case C.DESTINATION_DENIED if event.get("placeholder_id"):
            return Explanation(
                f"one of the destinations of {credential or 'the credential'}",
                "if the secret may go there, store the credential anew with that destination too",
                f"coatcheck credential show {credential}" if credential else "coatcheck credential list",
            )
        case C.DESTINATION_DENIED:
            return Explanation(
                "a destination of a granted credential, or a host that is allowed",
                "find out why a program goes there: it is an internal address"
                if is_internal(event.get("host"))
                else "allow the host, if workloads should reach it without a credential",
                "coatcheck allow list" if not host or is_internal(event.get("host")) else f"coatcheck allow add {host}",
            )
        case C.DESTINATION_PRIVATE:
            return Explanation(
                "a public address; this host leads to a private, loopback, link-local or metadata address",
                "find out why a program goes there; only where an operator means it to, a rule or a destination "
                "may have --allow-private",
            )
        case C.PLAINTEXT_CREDENTIAL:
            return Explanation(
                "https: this host has a credential, and http would show it to everybody on the way",
                "use https:// in the client's base URL",
            )
        case C.PLACEMENT_DENIED:
            return Explanation(
                "the placeholder once, as it is, in the credential's own placement",
                "see where the credential goes, and let the client send it there",
                f"coatcheck credential show {credential}" if credential else "coatcheck credential list",
            )
        case C.METHOD_DENIED:
            return Explanation(
                "a method that the destination, its grant or its allow rule covers",
                "widen the grant or the rule, if the method should be allowed",
                "coatcheck grant list",
            )
        case C.PATH_DENIED:
            return Explanation(
                "a path that the destination and its grant cover, in plain form (no '..', '//', ';', encoded slashes)",
                "correct the path, or widen the grant",
                "coatcheck grant list",
            )
        case C.DIRECT_NOT_ALLOWED:
            return Explanation(
                "an exchange for a placeholder: a proxy is there to swap it", "leave requested_token_type out"
            )
        case C.FOREIGN_CREDENTIAL:
            return Explanation(
                "no credential of the client's own for this destination",
                "remove the key that the client sends by itself, and let it use its placeholder",
            )
        case C.FORBIDDEN:
            return Explanation(
                "a caller of the kind that this route is for", "use the client that is registered for it"
            )
        case C.SESSION_NOT_FOUND:
            return Explanation("a session of this subject that has not ended", "open a new one")
        case C.CREDENTIAL_NOT_FOUND:
            return Explanation(
                "a credential that is granted to this subject (without a grant it looks as if there were none)",
                "store it, or grant it",
                f"coatcheck grant add {credential} --subject {_subject(event)}"
                if credential
                else "coatcheck grant list",
            )
        case C.NOT_FOUND:
            return Explanation("something that is there", "check its name or id against the lists")
        case C.METHOD_NOT_ALLOWED:
            return Explanation("a method other than TRACE and TRACK: those echo secrets", "use another method")
        case C.REQUEST_TIMEOUT:
            return Explanation("a whole request in time", "try again; look at the client's network if it comes back")
        case C.BODY_TOO_LARGE:
            return Explanation("a smaller body", "send less at once")
        case C.URI_TOO_LONG:
            return Explanation("a shorter request line", "move parameters into the body")
        case C.ENCODING_DENIED:
            return Explanation("a body in an encoding that can be looked into", "send it uncompressed")
        case C.HEADERS_TOO_LARGE:
            return Explanation("smaller header fields", "send fewer or shorter ones (cookies, as a rule)")
        case C.SESSION_BUSY | C.TURN_IN_PROGRESS:
            return Explanation("a session without a turn under way", "wait for it to end, or cancel it")
        case C.TURN_NOT_RUNNING:
            return Explanation("a turn under way", "start one first")
        case C.ROTATION_IN_PROGRESS:
            return Explanation("one rotation of a credential at a time", "see 'coatcheck credential rotation NAME'")
        case C.ROTATION_NOT_RUNNING:
            return Explanation("a rotation under way", "see 'coatcheck credential rotation NAME'")
        case C.MISDIRECTED_REQUEST:
            return Explanation(
                "one place named by the CONNECT target, the TLS server name and the Host field alike",
                "open a connection of its own for each host",
            )
        case C.PROTOCOL_DENIED:
            return Explanation("HTTP/1.1", "let the client speak HTTP/1.1")
        case C.INVALID_FIELD:
            return Explanation("fields as the API describes them", "correct the field that the answer names")
        case C.SECRET_REQUIRED:
            return Explanation(
                "the secret together with a change that lets it go further", "submit the secret again in the same call"
            )
        case C.IDEMPOTENCY_CONFLICT:
            return Explanation("the same request under the same idempotency key", "use a new key for another request")
        case C.RATE_LIMITED:
            return Explanation("fewer requests in that time", "wait as long as Retry-After says")
        case C.SPEND_LIMIT_EXCEEDED:
            return Explanation("spending below the limit", "raise the limit, or wait for it to be reset")
        case C.OVERLOADED:
            return Explanation("a free place to work on the request", "wait as long as Retry-After says")
        case C.INTERNAL_ERROR:
            return Explanation("no error of ours", "report it with this request id", "coatcheck doctor")
        case C.LOOP_DETECTED:
            return Explanation("a destination other than the proxy itself", "correct the client's base URL")
        case C.UPSTREAM_UNREACHABLE:
            return Explanation(
                "an upstream that answers",
                f"check that {host or 'it'} is right and can be reached from here",
                "coatcheck doctor",
            )
        case C.UPSTREAM_UNVERIFIED:
            return Explanation(
                "a certificate of the upstream that a trusted CA signed, for that host",
                "if the upstream has a CA of its own, trust it",
                "coatcheck down && coatcheck up --detach --upstream-ca FILE",
            )
        case C.UPSTREAM_PROTOCOL_ERROR:
            return Explanation(
                "an answer as HTTP/1.1 defines it", "look at the upstream: its answer was broken off or malformed"
            )
        case C.RESPONSE_LEAK_BLOCKED:
            return Explanation(
                "an answer without the key in it",
                "find out why the upstream sends the key back; rotate it if others may have seen that",
                f"coatcheck credential rotate {credential} --compromised"
                if credential
                else "coatcheck credential list",
            )
        case C.CREDENTIAL_UNAVAILABLE:
            return Explanation(
                "the credential's secret from the control plane", "try again shortly", "coatcheck doctor"
            )
        case C.CA_UNAVAILABLE:
            return Explanation("a usable interception CA", "see what is wrong with it", "coatcheck doctor")
        case C.STORE_UNAVAILABLE:
            return Explanation("an answer of the control plane's database", "try again shortly", "coatcheck doctor")
        case C.AUDIT_UNAVAILABLE:
            return Explanation(
                "room in the audit spool: what cannot be recorded does not happen",
                "see why events do not reach the control plane",
                "coatcheck doctor",
            )
        case C.SANDBOX_UNAVAILABLE:
            return Explanation(
                "a working sandbox (bubblewrap)", "install bubblewrap, or run with --sandbox off", "coatcheck doctor"
            )
        case C.DRAINING:
            return Explanation("a proxy that is not shutting down", "try again shortly")
        case C.UPSTREAM_TIMEOUT:
            return Explanation("an answer of the upstream in time", "try again; look at the upstream if it comes back")
        case _:
            assert_never(code)


def _fields(event: Json, home: Path) -> Iterator[tuple[str, object]]:
    code, true_code = _code(event, "code"), _code(event, "true_code")
    yield "request", event["request_id"]
    yield "when", local_time(event["at"])
    yield "what", where(event)
    yield "who", _who(event)
    yield "decision", _decision(event, code)
    if code is None:
        return
    if true_code is not None and true_code is not code:
        yield "in truth", f"{true_code.value}; the caller was told less, so that it learns nothing of others"
    explanation = explain(true_code or code, event)
    yield "found", event.get("detail")
    yield "expected", explanation.expected
    yield "what to do", explanation.todo
    yield "command", typed(home, explanation.command)


def _decision(event: Json, code: C | None) -> str:
    if code is not None:
        return f"refused: {status_of(code)} {code.value}"
    if event["action"] == "swap":
        answered = f"; answered {event['status']}" if event.get("status") else ""
        return f"allowed: {event.get('credential')} version {event.get('version')} swapped in{answered}"
    if event["action"] == "forward":
        answered = f"; answered {event['status']}" if event.get("status") else ""
        return f"allowed: passed on without a credential{answered}"
    return str(event["action"])


def _explanation_to_json(event: Json) -> Json | None:
    code = _code(event, "true_code") or _code(event, "code")
    if code is None:
        return None
    explanation = explain(code, event)
    return {"expected": explanation.expected, "todo": explanation.todo, "command": explanation.command or None}


def _code(event: Json, name: str) -> C | None:
    try:
        return C(event[name]) if event.get(name) else None
    except ValueError:  # of a newer control plane
        return None


def _who(event: Json) -> str:
    parts = [(name, event.get(name)) for name in ("tenant", "subject", "session", "client")]
    return ", ".join(f"{name} {value}" for name, value in parts if value) or "nobody we know"


def _host(event: Json) -> str:
    host, port = event.get("host"), event.get("port")
    if not host:
        return ""
    shown = f"[{host}]" if ":" in host else host
    is_default = port is None or port == DEFAULT_PORTS.get(event.get("scheme") or "https")
    return shlex.quote(shown if is_default else f"{shown}:{port}")


def _credential(event: Json) -> str:
    return shlex.quote(event["credential"]) if event.get("credential") else ""


def _subject(event: Json) -> str:
    return shlex.quote(event["subject"]) if event.get("subject") else "S"
