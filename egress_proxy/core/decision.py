"""The heart of the proxy: may this request go, where, and with which secrets?

Rule: pure and synchronous, and the only place that decides, for every listener and mode. It answers `Forward` (or
`Tunnel`, for a CONNECT), `Resolve` (ask the control plane this one question, then decide again) or `Refuse`. Whatever
is not clearly allowed is refused. Toward a caller of another tenant every refusal is `unknown_placeholder`; the true
reason goes to the audit trail alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final, NoReturn, TypeVar

from control_plane.contract.admission import (
    Handling,
    admit_bare,
    admit_swap,
    admit_tunnel,
    refuse_foreign_key,
    refuse_placement,
    refuse_used_up,
    refuse_websocket,
)
from control_plane.contract.caller import Caller
from control_plane.contract.destination import (
    DEFAULT_PORTS,
    Endpoint,
    InvalidDestinationError,
    climbs,
    split_authority,
)
from control_plane.contract.grant import GrantScope
from control_plane.contract.kinds import is_placed
from control_plane.contract.placeholder import (
    MARKER_LENGTH,
    MAX_BODY,
    MAX_PREFIX,
    ForgedTokenError,
    GenuineToken,
    Sighting,
    TokenKind,
    genuine_at,
    has_marker,
    parse,
)
from control_plane.contract.placement import HeaderPlacement, QueryPlacement
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import (
    Ask,
    AskCaller,
    AskPlaceholder,
    AskPolicy,
    Binding,
    BoundLimit,
    CallerFacts,
    Policy,
    Refused,
    Route,
    WorkloadFacts,
    client_of,
    issuer_of,
)
from egress_proxy.core.fields import MAX_MARKS, Mark, Slot, decode_basic, target_marks
from egress_proxy.core.http1 import RequestHead
from egress_proxy.core.places import seen_in
from egress_proxy.core.proofs import (
    BY_PROXY_CREDENTIAL,
    Accepted,
    Presented,
    ProofKind,
    in_words,
    presented_token,
)
from egress_proxy.core.quota import Standing
from egress_proxy.core.substitution import (
    REFERRERS,
    FoundMark,
    RouteBase,
    Swap,
    find_marks,
    known_characters,
    names_host,
    placement_of,
    query_pairs,
)
from egress_proxy.core.view import AskQuota, CacheView, Resolved

MAX_AUDITED_PATH_BYTES: Final = 256
MAX_TOKEN_BYTES: Final = MAX_PREFIX + MARKER_LENGTH + MAX_BODY
REASK_SECONDS: Final = 1.0
"""An expired entry younger than this was just asked for: it is refused, not asked again."""


class Mode(StrEnum):
    """How clients talk to a listener."""

    FORWARD = "forward"
    """As a proxy: CONNECT, and absolute-form http://."""
    REVERSE = "reverse"
    """As a base URL: /<credential name>/…"""


@dataclass(frozen=True, slots=True)
class Connection:
    """The facts of a client connection."""

    mode: Mode
    proxy_credential: GenuineToken | None = None
    """Given once for the connection: by the opener of a session's listener, or with the CONNECT."""
    tunnel: Endpoint | None = None
    """Set inside an intercepted CONNECT. Its TLS server name was checked at the handshake."""
    path_credential_allowed: bool = False
    token: Presented | None = None
    """A workload's, given with the CONNECT."""
    certificate: Presented | None = None
    """Of the TLS handshake with this listener."""
    accepts: Accepted = BY_PROXY_CREDENTIAL
    """By what its listener lets a caller be proven."""


# What a decision is made of is built for every request, and so not frozen: freezing doubles what building costs.


@dataclass(slots=True)
class Proof:
    """What proved a caller."""

    credential: GenuineToken | None
    token: Presented | None = None
    """A workload's."""
    vouchers: frozenset[str] = frozenset()
    """Ids in events that touch what vouches for the workload: its client, and who issued its token."""


@dataclass(slots=True)
class Tunnel:
    """A CONNECT that may be answered with 200: and then intercepted, or carried on unopened."""

    caller: Caller
    endpoint: Endpoint
    proof: Proof
    unopened: "Forward | None" = None
    """What is carried on where nothing is looked at."""


@dataclass(slots=True)
class Forward:
    """A request that may go. Empty `swaps`: it goes without a credential."""

    caller: Caller
    proof: Proof
    endpoint: Endpoint
    handling: Handling
    target: bytes
    """Origin-form (or `*`), still with its placeholder."""
    head: RequestHead
    """What to render: the head without the proxy's own path credential and referrers."""
    swaps: tuple[Swap, ...]
    bindings: tuple[Binding, ...]
    route: RouteBase | None
    """The reverse route, for what the reply says about where things are."""
    until: float
    """Unix seconds: when the first of what this rests on ends."""
    limits: tuple[BoundLimit, ...] = ()
    """What it counts against: taken from when it goes."""

    @property
    def allow_private(self) -> bool:
        return self.handling.allow_private

    @property
    def path(self) -> str:
        """For the audit trail."""
        return audited_path(self.target)


@dataclass(slots=True)
class Resolve:
    """Ask this, then decide again."""

    ask: Ask | AskQuota


@dataclass(slots=True)
class Refuse:
    """A "no", with what is known about the request for the audit trail."""

    refusal: Refusal
    caller: Caller | None = None
    endpoint: Endpoint | None = None
    path: str = ""
    """For the audit trail."""
    binding: Binding | None = None


class _AskFirst(Exception):  # noqa: N818 (not an error: the decision needs one more fact)
    def __init__(self, ask: Ask | AskQuota) -> None:
        self.ask = ask


class _Facts:
    """What has been established so far: the trail's half of a refusal."""

    __slots__ = ("binding", "caller", "endpoint", "target")

    def __init__(self) -> None:
        self.caller: Caller | None = None
        self.endpoint: Endpoint | None = None
        self.target = b""
        self.binding: Binding | None = None


def decide_connect(head: RequestHead, connection: Connection, view: CacheView, now: float) -> Tunnel | Resolve | Refuse:
    """May a tunnel to this authority be opened (and intercepted) for this caller?"""
    facts = _Facts()
    try:
        # (1) No marker anywhere but in the proxy's own slot, so that nothing below can echo one.
        marks = find_marks(head)
        if marks:
            _refuse_mark(marks[0], head.target, view)

        # (2) One authority, and Host agrees with it if it is there at all.
        host, port = _authority(head.target, default_port=None)
        facts.endpoint = endpoint = Endpoint("https", host, port)
        if head.host is not None and _authority(head.host, default_port=DEFAULT_PORTS["https"]) != (host, port):
            _refuse(RefusalCode.MISDIRECTED_REQUEST, "The CONNECT target and the Host field name different places.")

        # (3) Who is asking?
        proof, known = _identify(head, connection, view, now, path_credential=None)
        facts.caller = known.caller

        # (4) Default deny.
        policy = _policy(known.caller, view)
        rule = admit_tunnel(policy, endpoint)
        if rule is None:
            return Tunnel(known.caller, endpoint, proof)
        handling = Handling(allow_private=rule.allow_private)
        until = known.expires_at
        unopened = Forward(known.caller, proof, endpoint, handling, b"", head, (), (), None, until)
        return Tunnel(known.caller, endpoint, proof, unopened)
    except _AskFirst as question:
        return Resolve(question.ask)
    except RefusedError as refused:
        return Refuse(refused.refusal, facts.caller, facts.endpoint, audited_path(facts.target), facts.binding)


def decide(head: RequestHead, connection: Connection, view: CacheView, now: float) -> Forward | Resolve | Refuse:
    """May this request go, where, and with which secrets?"""
    facts = _Facts()
    try:
        # (1) The path credential of reverse mode is taken off before anything looks at the target.
        asked = head.target
        target, path_credential = _split_path_credential(head, connection, view)
        if connection.mode is Mode.REVERSE:
            head = _without_traces_of_the_proxy(head, target)

        # (2) Where the request says it goes (reverse mode knows only after it knows the caller).
        endpoint = None if connection.mode is Mode.REVERSE else _forward_endpoint(head, connection)
        facts.endpoint, facts.target = endpoint, head.target

        # (3) Who is asking?
        proof, known = _identify(head, connection, view, now, path_credential=path_credential)
        facts.caller = caller = known.caller

        # (4) What this caller may reach.
        policy = _policy(caller, view)
        route: RouteBase | None = None
        origin_target = _origin_form(head.method, head.target, connection)
        if endpoint is None:
            chosen, origin_target = _reverse_route(head.target, policy)
            facts.endpoint = endpoint = chosen.destinations[0].endpoint
            route = RouteBase(endpoint, asked.partition(b"?")[0].removesuffix(origin_target.partition(b"?")[0]))
        raw_path = origin_target.partition(b"?")[0].decode("latin-1")
        facts.target = origin_target

        # (5) The placeholders in its head. None: it goes bare, if its destination is allowed at all.
        marks = find_marks(head)
        if len(marks) > MAX_MARKS:
            refuse_placement(f"more than {MAX_MARKS} places")
        if not marks:
            handling = admit_bare(policy, endpoint, head.method, raw_path, now)
            if handling.strict:
                _refuse_foreign_keys(head, origin_target, policy, endpoint)
            scopes = [scope for route_ in policy.routes for scope in route_.scopes]
            until = _first_end(known.expires_at, scopes)
            return Forward(caller, proof, endpoint, handling, origin_target, head, (), (), route, until)

        # (6) Each placeholder: genuine, this caller's, alive, for this destination, in its own placement.
        swaps: list[Swap] = []
        bindings: list[Binding] = []
        handlings: list[Handling] = []
        until = known.expires_at
        for found in marks:
            token = _genuine(found, head.target, view)
            resolved = _resolve(token, caller, endpoint, view)
            facts.binding = resolved.binding
            if isinstance(resolved, Refused):
                _pass_on(resolved)
            binding = resolved.binding
            _check_caller(binding, caller)
            _check_expiry(resolved, token, caller, endpoint, now)
            _check_secret(resolved, token, caller, endpoint, now)
            handlings.append(admit_swap(binding.destinations, binding.scopes, endpoint, head.method, raw_path, now))
            swaps.append(_swap(found, head.target, token, resolved))
            bindings.append(binding)
            until = _first_end(min(until, binding.expires_at), binding.scopes)
            if binding.secret_expires_at is not None:
                until = min(until, binding.secret_expires_at)

        # (7) One secret a place, one place a placeholder.
        if len(swaps) > 1 and not _are_apart(swaps, bindings):
            seen = ", ".join(seen_in(found, head.target) for found in marks)
            _refuse(RefusalCode.PLACEMENT_DENIED, f"A placeholder stands in the request more than once: in {seen}.")
        # One credential does not vouch for where another's secret goes, nor for what may come back of it.
        handling = Handling.of_all(handlings)
        if head.opens_websocket and not handling.websocket:
            refuse_websocket()
        if handling.strict:
            _refuse_foreign_keys(head, origin_target, policy, endpoint)

        # (8) Within its limits: of each there is something left here.
        limits = tuple(limit for binding in bindings for limit in binding.limits)
        for limit in limits:
            _check_quota(limit, view)
        return Forward(
            caller,
            proof,
            endpoint,
            handling,
            origin_target,
            head,
            tuple(swaps),
            tuple(bindings),
            route,
            until,
            limits,
        )
    except _AskFirst as question:
        return Resolve(question.ask)
    except RefusedError as refused:
        return Refuse(refused.refusal, facts.caller, facts.endpoint, audited_path(facts.target), facts.binding)


def audited_path(target: bytes) -> str:
    """The path as the trail has it: before the swap, no query, placeholders named, at most 256 bytes."""
    path = target.partition(b"?")[0].partition(b"#")[0]
    if b"://" in path[:8]:
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    marks = target_marks(path)
    if any(mark.slot is Slot.HIDDEN for mark in marks):
        return "/{placeholder}"  # encoded, so that where it begins and ends cannot be shown
    text = path.decode("latin-1")
    if marks:
        # An altered one may go on behind any character, so nothing after it is shown.
        text = text[: text.rfind("/", 0, marks[0].sighting.start) + 1] + "{placeholder}"
    return text if len(text) <= MAX_AUDITED_PATH_BYTES else text[: MAX_AUDITED_PATH_BYTES - 1] + "…"


# --- (1), (2): where to ----------------------------------------------------------------------------------------------


def _split_path_credential(
    head: RequestHead, connection: Connection, view: CacheView
) -> tuple[bytes, GenuineToken | None]:
    """Reverse mode's `/~<proxy credential>/…`, taken apart."""
    if connection.mode is not Mode.REVERSE or not head.target.startswith(b"/~"):
        return head.target, None
    segment, slash, rest = head.target[2:].partition(b"/")
    if not connection.path_credential_allowed:
        _refuse(
            RefusalCode.TOKEN_REQUIRED,
            "This listener takes no proxy credential in the path.",
            "Send it in Proxy-Authorization, or have the operator enable path credentials for this listener.",
        )
    token = _parse(segment, view.tag_keys)
    if token is None or token.kind is not TokenKind.PROXY_CREDENTIAL or not slash:
        _refuse(RefusalCode.TOKEN_INVALID, "The first path segment is not a proxy credential.", _RENEW)
    return b"/" + rest, token


def _without_traces_of_the_proxy(head: RequestHead, target: bytes) -> RequestHead:
    """`Referer` and `Origin` that name the proxy itself, and its path credential, tell the upstream about us."""
    own = [field for field in head.special if field.name in REFERRERS and names_host(field, head.host or b"")]
    if not own and target is head.target:
        return head
    return replace(
        head,
        target=target,
        fields=[field for field in head.fields if field not in own],
        special=[field for field in head.special if field not in own],
    )


def _forward_endpoint(head: RequestHead, connection: Connection) -> Endpoint:
    if connection.tunnel is not None:
        if not (head.target.startswith(b"/") or head.target == b"*"):
            _refuse(RefusalCode.MALFORMED_REQUEST, "Inside a tunnel the target is a path.")
        expected = connection.tunnel
    else:
        scheme, found, rest = head.target.partition(b"://")
        if not found or scheme.lower() != b"http":
            _refuse(
                RefusalCode.MALFORMED_REQUEST,
                "This is a proxy's port: it takes CONNECT for https and an absolute http:// URL otherwise.",
                "Set HTTPS_PROXY and HTTP_PROXY to this address; for base URLs use the reverse listener.",
            )
        host, port = _authority(_until(rest, b"/?#"), default_port=DEFAULT_PORTS["http"])
        expected = Endpoint("http", host, port)
    named = _authority(head.host or b"", default_port=DEFAULT_PORTS[expected.scheme])
    if named != (expected.host, expected.port):
        _refuse(
            RefusalCode.MISDIRECTED_REQUEST,
            "The Host field names another place than the connection goes to.",
            "Open a connection of its own for each host.",
        )
    return expected


def _authority(text: bytes, *, default_port: int | None) -> tuple[str, int]:
    try:
        # Names beyond ASCII come as IDNA on the wire (RFC 9110 §4.2.3); other bytes are read differently by everyone.
        host, port = split_authority(text.decode("ascii"), default_port=default_port or 0)
    except UnicodeDecodeError:
        _refuse(RefusalCode.MALFORMED_REQUEST, "The host is not usable: a host is letters, digits, hyphens and dots.")
    except InvalidDestinationError as error:
        _refuse(RefusalCode.MALFORMED_REQUEST, f"The host is not usable: {error}.")
    if port == 0:
        _refuse(RefusalCode.MALFORMED_REQUEST, "A CONNECT target is host:port.")
    if has_marker(text):  # before the host is shown anywhere
        refuse_placement("the host")
    return host, port


def _origin_form(method: str, target: bytes, connection: Connection) -> bytes:
    """The target as an origin server gets it (RFC 9112 §3.2.1, §3.2.4)."""
    if connection.mode is Mode.REVERSE or connection.tunnel is not None:
        return target
    rest = target.partition(b"://")[2]
    path = rest[len(_until(rest, b"/?#")) :]
    if method == "OPTIONS" and not path:
        return b"*"  # about the server, not about what is at its root
    return path if path.startswith(b"/") else b"/" + path


def _until(text: bytes, stops: bytes) -> bytes:
    at = min((place for place in (text.find(stop) for stop in stops) if place >= 0), default=len(text))
    return text[:at]


def _reverse_route(target: bytes, policy: Policy) -> tuple[Route, bytes]:
    """`/<credential name>/rest` into the caller's own route and `/rest`."""
    if not target.startswith(b"/"):
        _refuse(RefusalCode.MALFORMED_REQUEST, "On the reverse listener a target is /<credential name>/….")
    path, question, query = target.partition(b"?")
    name, _, rest = path[1:].partition(b"/")
    route = next((r for r in policy.routes if r.credential_name.encode() == name), None)
    if route is None or not route.destinations:
        _refuse(
            RefusalCode.CREDENTIAL_NOT_FOUND,
            "No credential of this name is granted to this caller.",
            "Use the base_url of the exchange answer; check 'coatcheck credential list' and 'coatcheck grant list'.",
        )
    if climbs("/" + rest.decode("latin-1")):
        _refuse(RefusalCode.PATH_DENIED, "The path climbs out of its route with dot segments.")
    return route, b"/" + rest + question + query


# --- (3), (4): for whom ----------------------------------------------------------------------------------------------

_RENEW: Final = "Exchange or renew, and use the proxy_credential of the answer; or a fresh workload token."


def _identify(
    head: RequestHead, connection: Connection, view: CacheView, now: float, *, path_credential: GenuineToken | None
) -> tuple[Proof, CallerFacts]:
    """The caller, from every proof that the connection and the request give; they must agree."""
    # (1) Every proof there is, and enough of them for this listener.
    header_credential, header_token = _header_proofs(head, connection, view)
    credential = _the_only(connection.proxy_credential, path_credential, header_credential)
    token, certificate = _the_only(connection.token, header_token), connection.certificate
    _require_enough(connection, credential, token, certificate)
    # (2) The client that a workload is, by each of its own proofs.
    if token is None and certificate is None:
        assert credential is not None
        return Proof(credential), _caller_of(credential, connection, view, now)
    facts = [_client_of(each, connection, view, now) for each in (certificate, token) if each is not None]
    workload = facts[0]
    if any(other.client != workload.client for other in facts[1:]):
        _refuse(RefusalCode.CALLER_MISMATCH, "The client certificate and the token are two different clients'.")
    vouchers = frozenset([client_of(workload.client), *(issuer_of(each.issuer) for each in facts if each.issuer)])
    # (3) For whom it acts: the proxy credential says so, if it is this client's own, or the client has one subject.
    if credential is not None:
        known = _caller_of(credential, connection, view, now)
        if not _is_own(known.caller, workload):
            _refuse(
                RefusalCode.CALLER_MISMATCH,
                "The proxy credential is of another client, tenant or subject than the workload that sends it.",
                "Send the proxy_credential of this client's own exchange.",
            )
    elif workload.subject is not None and workload.tenant is not None:
        known = CallerFacts(Caller(workload.client, workload.tenant, workload.subject, None), workload.expires_at)
    else:
        _refuse_missing(
            connection,
            "This client acts for several subjects, so that its own proof does not say for whom it asks.",
            "Send the proxy_credential of the session, too.",
        )
    ends = min(known.expires_at, *(each.expires_at for each in facts))
    return Proof(credential, token, vouchers), CallerFacts(known.caller, ends)


T = TypeVar("T", GenuineToken, Presented)


def _the_only(*given: T | None) -> T | None:
    """What is given in several places must be one and the same."""
    there = [each for each in given if each is not None]
    if any(other != there[0] for other in there[1:]):
        _refuse(RefusalCode.CALLER_MISMATCH, "The request carries another proof of its caller than its connection.")
    return there[0] if there else None


def _require_enough(
    connection: Connection, credential: GenuineToken | None, token: Presented | None, certificate: Presented | None
) -> None:
    kinds = [
        *([ProofKind.PROXY_CREDENTIAL] if credential is not None else []),
        *([each.kind for each in (token, certificate) if each is not None]),
    ]
    if any(together.issubset(kinds) for together in connection.accepts):
        return
    if connection.accepts == BY_PROXY_CREDENTIAL:
        hint = "Put the proxy_credential of an exchange into the proxy URL's password, or use 'coatcheck run'."
        if connection.mode is Mode.REVERSE:
            hint = "Send the proxy_credential of an exchange as 'Proxy-Authorization: Bearer …'."
    else:
        hint = (
            "A workload token goes where a proxy credential does: 'Proxy-Authorization', or the proxy URL's password."
        )
    _refuse_missing(connection, f"This listener needs {in_words(connection.accepts)}.", hint)


def _refuse_missing(connection: Connection, detail: str, hint: str) -> NoReturn:
    is_forward = connection.mode is Mode.FORWARD
    _refuse(
        RefusalCode.PROXY_AUTHENTICATION_REQUIRED if is_forward else RefusalCode.TOKEN_REQUIRED,
        detail,
        hint,
    )


def _is_own(caller: Caller, workload: WorkloadFacts) -> bool:
    return (
        caller.client == workload.client
        and workload.tenant in (None, caller.tenant)
        and workload.subject in (None, caller.subject)
    )


def _caller_of(credential: GenuineToken, connection: Connection, view: CacheView, now: float) -> CallerFacts:
    known = view.caller(credential.fingerprint)
    if known is None:
        raise _AskFirst(AskCaller(credential.fingerprint))
    if isinstance(known, Refused):
        _refuse_credential(connection, known.true_code or known.code, known.code)
    if known.facts.expires_at <= now:
        if now - known.asked_at > REASK_SECONDS:
            raise _AskFirst(AskCaller(credential.fingerprint))
        _refuse_credential(connection, RefusalCode.TOKEN_EXPIRED, RefusalCode.TOKEN_EXPIRED)
    return known.facts


def _client_of(presented: Presented, connection: Connection, view: CacheView, now: float) -> WorkloadFacts:
    known = view.workload(presented.fingerprint)
    if known is None:
        raise _AskFirst(presented.ask)
    if isinstance(known, Refused):
        _refuse_credential(connection, known.true_code or known.code, known.code)
    if now >= known.facts.expires_at:
        _refuse_credential(connection, RefusalCode.TOKEN_EXPIRED, RefusalCode.TOKEN_EXPIRED)
    return known.facts


def _header_proofs(
    head: RequestHead, connection: Connection, view: CacheView
) -> tuple[GenuineToken | None, Presented | None]:
    """The proxy credential and the workload's token of `Proxy-Authorization`: one of them, or neither. As Basic they
    are the password; beside a token the user name may be a proxy credential."""
    fields = [field.value for field in head.special if field.name == b"proxy-authorization"]
    if not fields:
        return None, None
    if len(fields) > 1:
        _refuse(RefusalCode.MALFORMED_REQUEST, "The request has more than one Proxy-Authorization field.")
    scheme, _, rest = fields[0].partition(b" ")
    text, user = rest.strip(), b""
    if scheme.lower() == b"basic":
        user, _, password = (decode_basic(fields[0]) or b"").partition(b":")
        text = password or user  # proxy URLs carry it as the password, some as a lone user name
    elif scheme.lower() != b"bearer":
        _refuse_credential(connection, RefusalCode.TOKEN_INVALID, RefusalCode.TOKEN_INVALID)
    token = presented_token(text)
    if token is None:
        return _credential(text, connection, view), None
    if not any(ProofKind.WORKLOAD_TOKEN in together for together in connection.accepts):
        _refuse_credential(connection, RefusalCode.TOKEN_INVALID, RefusalCode.TOKEN_INVALID)
    return _credential(user, connection, view) if has_marker(user) else None, token


def _credential(text: bytes, connection: Connection, view: CacheView) -> GenuineToken:
    token = _parse(text, view.tag_keys)
    if token is None or token.kind is not TokenKind.PROXY_CREDENTIAL:
        _refuse_credential(connection, RefusalCode.TOKEN_INVALID, RefusalCode.TOKEN_INVALID)
    return token


def _refuse_credential(connection: Connection, true_code: RefusalCode, code: RefusalCode) -> NoReturn:
    """A proof that is not good, or no longer. In forward mode every such case is one 407, as clients expect."""
    unavailable = code in (RefusalCode.CREDENTIAL_UNAVAILABLE, RefusalCode.STORE_UNAVAILABLE)
    if unavailable:
        _refuse(code, "The control plane could not be asked.", "Try again shortly.", retry_after_seconds=1)
    if connection.mode is Mode.FORWARD:
        shown = RefusalCode.PROXY_AUTHENTICATION_REQUIRED
    else:
        shown = RefusalCode.TOKEN_EXPIRED if true_code is RefusalCode.TOKEN_EXPIRED else RefusalCode.TOKEN_INVALID
    _refuse(shown, "The proof of the caller is not valid (any more).", _RENEW, true_code=true_code)


def _policy(caller: Caller, view: CacheView) -> Policy:
    policy = view.policy(caller)
    if policy is None:
        raise _AskFirst(AskPolicy(caller))
    if isinstance(policy, Refused):
        _pass_on(policy)
    if policy.caller != caller:
        _refuse(RefusalCode.INTERNAL_ERROR, "The policy at hand is another caller's.")
    return policy


_KEY_FIELDS: Final = frozenset(
    b"authorization x-api-key api-key x-goog-api-key x-auth-token private-token x-amz-security-token cookie".split()
)
"""Where keys go by custom, beside the placements of the destination's own credentials."""


def _refuse_foreign_keys(head: RequestHead, target: bytes, policy: Policy, endpoint: Endpoint) -> None:
    """At a strict destination nothing goes under a key that is not ours: what it is sent with is whose it is."""
    placements = [
        placement
        for route in policy.routes
        if any(d.endpoint == endpoint for d in route.destinations)
        for placement in route.placements
    ]
    headers = {placement.name.encode() for placement in placements if isinstance(placement, HeaderPlacement)}
    names = {name.replace(b"_", b"-") for name in _KEY_FIELDS | headers}
    if any(field.name.replace(b"_", b"-") in names and field.value and not field.marks for field in head.fields):
        refuse_foreign_key()
    parameters = {placement.parameter for placement in placements if isinstance(placement, QueryPlacement)}
    query = target.partition(b"?")[2].decode("latin-1")
    given = [value for name, value in query_pairs(query) if name in parameters and value]
    if not all(has_marker(value.encode("latin-1")) for value in given):
        refuse_foreign_key()


# --- (6): with which secrets -----------------------------------------------------------------------------------------


def _genuine(found: FoundMark, target: bytes, view: CacheView) -> GenuineToken:
    mark = found[0]
    token = _token_of(mark, view.tag_keys)
    if token is None:
        _refuse(
            RefusalCode.UNKNOWN_PLACEHOLDER,
            "The request carries something that looks like a placeholder and is none.",
            "Use the placeholder exactly as the exchange gave it: whole, unaltered and unencoded.",
        )
    if token.kind is not TokenKind.PLACEHOLDER or mark.slot is Slot.HIDDEN:
        refuse_placement(seen_in(found, target))
    return token


def _refuse_mark(found: FoundMark, target: bytes, view: CacheView) -> NoReturn:
    _genuine(found, target, view)
    refuse_placement("the host" if found[1] is None else seen_in(found, target))


def _resolve(token: GenuineToken, caller: Caller, endpoint: Endpoint, view: CacheView) -> Resolved | Refused:
    resolved = view.placeholder(token.fingerprint, caller, endpoint)
    if resolved is None:
        raise _AskFirst(AskPlaceholder(token.fingerprint, caller, endpoint))
    return resolved


def _check_caller(binding: Binding, caller: Caller) -> None:
    if binding.caller.tenant != caller.tenant:
        _refuse(
            RefusalCode.UNKNOWN_PLACEHOLDER,
            _UNKNOWN_DETAIL,
            _UNKNOWN_HINT,
            true_code=RefusalCode.CALLER_MISMATCH,
        )
    if binding.caller != caller:
        _refuse(
            RefusalCode.CALLER_MISMATCH,
            "The placeholder was issued to another caller (client, subject or session).",
            "Exchange one for this session, and send it with the proxy credential of the same answer.",
        )


def _check_expiry(resolved: Resolved, token: GenuineToken, caller: Caller, endpoint: Endpoint, now: float) -> None:
    if resolved.binding.expires_at > now:
        return
    if now - resolved.asked_at > REASK_SECONDS:  # it may have been renewed in place
        raise _AskFirst(AskPlaceholder(token.fingerprint, caller, endpoint))
    _refuse(
        RefusalCode.EXPIRED_PLACEHOLDER,
        "The placeholder's time is over.",
        "Renew it in place with POST /oauth/token; its string stays the same.",
    )


def _check_secret(resolved: Resolved, token: GenuineToken, caller: Caller, endpoint: Endpoint, now: float) -> None:
    """It is a text that can be placed, and not past its own end."""
    if not is_placed(resolved.binding.credential_kind):
        _refuse(
            RefusalCode.CREDENTIAL_UNAVAILABLE,
            "The credential is of a kind that requests are signed or proven with, which this proxy cannot do.",
            "See 'coatcheck credential show' for its kind; update the proxy, or use another credential.",
        )
    end = resolved.binding.secret_expires_at
    if end is None or end > now:
        return
    if now - resolved.asked_at > REASK_SECONDS:  # there may be a newer one
        raise _AskFirst(AskPlaceholder(token.fingerprint, caller, endpoint))
    _refuse(
        RefusalCode.CREDENTIAL_UNAVAILABLE,
        "The credential's token has expired, and there is no newer one.",
        "Try again shortly.",
    )


def _check_quota(limit: BoundLimit, view: CacheView) -> None:
    match view.quota(limit):
        case Standing.LEFT:
            return
        case Standing.UNKNOWN:
            raise _AskFirst(AskQuota(limit))
        case Standing.UNAVAILABLE:
            _refuse(
                RefusalCode.CREDENTIAL_UNAVAILABLE,
                "What is left of a limit could not be asked for, and nothing goes beyond what is known to be left.",
                "Try again shortly.",
                retry_after_seconds=1,
            )
        case Standing.USED_UP:
            refuse_used_up(limit, resets_in_seconds=view.quota_resets_in_seconds(limit))


def _first_end(until: float, scopes: Iterable[GrantScope]) -> float:
    """`until`, or the first end among the grants, whether or not the request rests on that one."""
    return min([until, *(scope.until for scope in scopes if scope.until is not None)])


def _swap(found: FoundMark, target: bytes, token: GenuineToken, resolved: Resolved) -> Swap:
    placement = placement_of(found, token, resolved.binding.placements)
    if placement is None:
        refuse_placement(seen_in(found, target))
    return Swap(placement, found[1], resolved.secret, token.text, known_characters(token, resolved.secret))


def _are_apart(swaps: list[Swap], bindings: list[Binding]) -> bool:
    places = {swap.field.name if swap.field else swap.placement for swap in swaps}
    return len(places) == len(swaps) and len({binding.placeholder_id for binding in bindings}) == len(bindings)


# --- tokens ----------------------------------------------------------------------------------------------------------
# Verified ones are remembered: a client sends the same two with every request, and a tag costs three microseconds.


def _parse(text: bytes, tag_keys: tuple[bytes, ...]) -> GenuineToken | None:
    return _remembered_parse(text, tag_keys) if len(text) <= MAX_TOKEN_BYTES else None


@lru_cache(maxsize=8192)
def _remembered_parse(text: bytes, tag_keys: tuple[bytes, ...]) -> GenuineToken | None:
    try:
        return parse(text.decode("latin-1"), tag_keys)
    except ForgedTokenError:
        return None


def _token_of(mark: Mark, tag_keys: tuple[bytes, ...]) -> GenuineToken | None:
    seen = mark.sighting
    begin = max(0, seen.start - MAX_PREFIX)
    return _remembered_token(mark.text[begin : seen.end], seen.start - begin, tag_keys)


@lru_cache(maxsize=8192)
def _remembered_token(text: bytes, marker_at: int, tag_keys: tuple[bytes, ...]) -> GenuineToken | None:
    return genuine_at(text, Sighting(marker_at, len(text)), tag_keys)


# --- saying no -------------------------------------------------------------------------------------------------------

_UNKNOWN_DETAIL: Final = "No such placeholder."
_UNKNOWN_HINT: Final = "Exchange a new one with POST /oauth/token."


def _refuse(
    code: RefusalCode,
    detail: str,
    hint: str = "",
    *,
    true_code: RefusalCode | None = None,
    retry_after_seconds: int | None = None,
) -> NoReturn:
    raise RefusedError(Refusal(code, detail, hint, retry_after_seconds, true_code))


def _pass_on(refused: Refused) -> NoReturn:
    """A "no" of the store, in the store's words."""
    retry = 1 if refused.code in (RefusalCode.CREDENTIAL_UNAVAILABLE, RefusalCode.STORE_UNAVAILABLE) else None
    _refuse(refused.code, refused.detail, refused.hint, true_code=refused.true_code, retry_after_seconds=retry)
