"""Who can use what, where, and when it was last used; and what one request would get, without making it.

Rule: nothing here decides by rules of its own. Grants are read as the exchange reads them, a policy is made as resolve
makes it, and a request is judged by what the proxy judges by (`contract.admission`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from control_plane.contract.address import is_public
from control_plane.contract.admission import (
    Handling,
    admit_bare,
    admit_placement,
    admit_swap,
    admit_tunnel,
    refuse_foreign_key,
    refuse_used_up,
    refuse_websocket,
)
from control_plane.contract.caller import Caller, ClientId, CredentialId, SessionId, SubjectId, TenantId
from control_plane.contract.destination import (
    DEFAULT_PORTS,
    Endpoint,
    InvalidDestinationError,
    is_ip_literal,
    split_authority,
)
from control_plane.contract.grant import GrantScope
from control_plane.contract.placement import Placement, placement_to_json
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.core.records import ClientKind, Credential, Grant, Session, Use
from control_plane.core.scopes import InvalidScopeError, covers, narrowed, read_scope
from control_plane.core.targeting import Target
from control_plane.credentials import invalid_field, require_tenant
from control_plane.issuance import Granted, Issuance, Mandate
from control_plane.ports import Clock, Records, Store, TenantScope
from control_plane.resolution import policy_for

MIRRORING: Final = frozenset({"TRACE", "TRACK"})


@dataclass(frozen=True, slots=True)
class Entitlement:
    """One grant, with what it is of and when it was used."""

    grant: Grant
    credential: Credential
    is_live: bool
    uses: Sequence[Use]

    @property
    def last_used_at(self) -> float | None:
        return max((use.last_used_at for use in self.uses), default=None)


@dataclass(frozen=True, slots=True)
class Question:
    """One request that nobody makes."""

    subject: SubjectId
    method: str
    url: str
    client: ClientId | None
    """None: the tenant's only runtime."""
    credential: str | None
    """Name, provider or host, as an exchange takes it. None: the request goes without one."""
    roles: tuple[str, ...]
    """Of a session that is not named."""
    session: SessionId | None
    scope: str
    placement: Placement | None = None
    """Where the placeholder stands. None: in the credential's first placement."""
    websocket: bool = False
    """It would open a WebSocket."""
    other_key: bool = False
    """It would carry a key of its own, which is no placeholder."""


class Step(StrEnum):
    """In the order in which a request meets them."""

    METHOD_ALLOWED = "method_served"
    CLIENT = "client"
    SESSION = "session"
    CREDENTIAL = "credential"
    SCOPE = "scope"
    DESTINATION = "destination"
    PATH = "path"
    METHOD = "method"
    PLACEMENT = "placement"
    WEBSOCKET = "websocket"
    OTHER_KEY = "other_key"
    LIMITS = "limits"
    ADDRESS = "address"


class Outcome(StrEnum):
    PASSED = "passed"
    REFUSED = "refused"
    NOT_REACHED = "not_reached"
    NOT_ASKED = "not_asked"
    """Nothing in the question is about it."""


@dataclass(frozen=True, slots=True)
class Explained:
    step: Step
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    refusal: Refusal | None
    """None: it would go."""
    steps: Sequence[Explained]
    client: ClientId
    credential: str | None
    """The name of the one whose secret would go along."""
    grants: Sequence[Grant]
    placement: Placement | None
    """Where its placeholder would stand."""
    handling: Handling | None
    """How it would be treated on its way and back. None where nothing admits it."""


class AccessReview:
    def __init__(self, store: Store, issuance: Issuance, *, clock: Clock) -> None:
        self._store = store
        self._issuance = issuance
        self._clock = clock

    async def list(self, tenant: TenantId, subject: SubjectId | None) -> Sequence[Entitlement]:
        """Every grant of the tenant; of a subject, those that apply to it, by its live sessions' roles too."""
        now = self._clock()
        async with self._store.read(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            grants = await records.grants.list()
            credentials = {credential.id: credential for credential in await records.credentials.list()}
            uses = await records.uses.list(subject)
            roles = await self._roles(records, subject, now)
        return [
            Entitlement(
                grant, credentials[grant.credential_id], grant.scope.is_live(now), _uses_of(grant, grants, uses)
            )
            for grant in grants
            if grant.credential_id in credentials and _concerns(grant, subject, roles)
        ]

    async def _roles(self, records: Records, subject: SubjectId | None, now: float) -> frozenset[str]:
        if subject is None:
            return frozenset()
        sessions = await records.sessions.live_of_subject(subject, now)
        return frozenset(role for session in sessions for role in session.roles)

    async def check(self, tenant: TenantId, question: Question) -> Answer:
        """What the request would get. Raises `RefusedError` for a question that cannot be read."""
        if question.method == "CONNECT":
            raise invalid_field("method", "CONNECT opens a tunnel; ask about the request that goes through it")
        if question.placement is not None and question.credential is None:
            raise invalid_field("placement", "a request without a credential has no placeholder; name the credential")
        endpoint, raw_path = _place(question.url)
        async with self._store.read(TenantScope(tenant)) as records:
            await require_tenant(records, tenant)
            client = await self._client(records, tenant, question.client)
            walk, refusal = _Walk(), None
            try:
                await self._walked(records, tenant, question, client, endpoint, raw_path, walk)
            except RefusedError as refused:
                if refused.refusal.code is RefusalCode.INVALID_FIELD:
                    raise
                refusal = refused.refusal
        granted = walk.granted
        return Answer(
            refusal=refusal,
            steps=walk.explained(refusal),
            client=client,
            credential=granted.credential.name if granted else None,
            grants=granted.grants if granted else (),
            placement=walk.placement,
            handling=walk.handling,
        )

    async def _walked(
        self,
        records: Records,
        tenant: TenantId,
        question: Question,
        client: ClientId,
        endpoint: Endpoint,
        raw_path: str,
        walk: "_Walk",
    ) -> None:
        now = self._clock()
        # (1) What no proxy passes on, to anybody.
        walk.at(Step.METHOD_ALLOWED)
        if question.method in MIRRORING:
            raise RefusedError(MIRRORS)
        # (2) Who asks, and in which session.
        walk.at(Step.CLIENT, f"{question.subject} through {client}")
        walk.at(Step.SESSION)
        session = await self._session(records, question, client, now)
        roles = session.roles if session is not None else question.roles
        walk.passed(f"roles: {', '.join(roles)}" if roles else "no roles")
        caller = Caller(client, tenant, question.subject, session.id if session is not None else None)
        policy = await policy_for(records, caller, roles, now)
        # (3) The credential, as an exchange would choose it, and the scope, if it were asked for.
        granted: Granted | None = None
        scopes: Sequence[GrantScope] = ()
        if question.credential is not None:
            walk.at(Step.CREDENTIAL)
            mandate = Mandate(caller, roles, session.not_after if session is not None else None)
            granted = walk.granted = await self._issuance.granted(records, mandate, Target(question.credential, None))
            walk.passed(f"{granted.credential.name}, by {len(granted.grants)} grant(s)")
            walk.at(Step.SCOPE, question.scope)
            scopes = _narrowed(question.scope, granted)
        # (4) The place: over https the tunnel first, then the request in it; as the proxy decides.
        walk.at(Step.DESTINATION, endpoint.url)
        if endpoint.scheme == "https":
            admit_tunnel(policy, endpoint)
        if granted is None:
            handling = admit_bare(policy, endpoint, question.method, raw_path, now)
        else:
            handling = admit_swap(granted.credential.destinations, scopes, endpoint, question.method, raw_path, now)
        walk.handling = handling
        walk.at(Step.PATH, raw_path)
        walk.at(Step.METHOD, question.method)
        # (5) What else is in the request.
        if granted is not None:
            _admit_rest(granted.credential, question, handling, walk)
        if question.other_key:
            walk.at(Step.OTHER_KEY)
            if handling.strict:
                refuse_foreign_key()
        # (6) What is left of limits. A proxy may hold some of what was given out, and would still let it go.
        if granted is not None:
            walk.at(Step.LIMITS)
            walk.passed(await self._within_limits(records, caller, granted.credential, now))
        # (7) The address, as far as it is known before a name is resolved.
        walk.at(Step.ADDRESS)
        _require_public(endpoint, allows_private=handling.allow_private)
        walk.passed("" if is_ip_literal(endpoint.host) else "looked at when the name is resolved")

    async def _within_limits(self, records: Records, caller: Caller, credential: Credential, now: float) -> str:
        """What there is left of each, in words. Raises `RefusedError`."""
        said = []
        for limit in await records.limits.of_tenant(caller.tenant):
            if limit.applies_to(subject=caller.subject, credential=credential.id):
                bound = limit.bound(caller.subject)
                left = limit.amount - await records.limits.granted(limit, bucket=bound.bucket, now=now)
                if left <= 0:
                    refuse_used_up(bound, resets_in_seconds=limit.window(now)[1])
                said.append(f"{left} of {limit.amount} {limit.measure.value} left in {limit.window_seconds} s")
        return ", ".join(said) or "none"

    async def _client(self, records: Records, tenant: TenantId, named: ClientId | None) -> ClientId:
        runtimes = [client for client in await records.clients.list() if client.kind is ClientKind.RUNTIME]
        serving = [client for client in runtimes if client.serves(tenant)]
        if named is not None:
            if named not in {client.id for client in serving}:
                raise invalid_field("client", "not a client of kind 'runtime' that serves this tenant")
            return named
        own = [client for client in serving if client.tenant == tenant]
        for only in (own, serving):
            if len(only) == 1:
                return only[0].id
        raise invalid_field("client", "name the client: there is not exactly one of kind 'runtime'")

    async def _session(self, records: Records, question: Question, client: ClientId, now: float) -> Session | None:
        if question.session is None:
            return None
        session = await records.sessions.get(question.session)
        if session is None or session.subject != question.subject or session.runtime != client:
            raise RefusedError(NO_SUCH_SESSION)
        if not session.is_live(now):
            raise RefusedError(NO_SUCH_SESSION)
        return session


class _Walk:
    """How far a question came: every step before the last one that was reached has passed."""

    def __init__(self) -> None:
        self._reached: dict[Step, str] = {}
        self._at = Step.METHOD_ALLOWED
        self.granted: Granted | None = None
        self.placement: Placement | None = None
        self.handling: Handling | None = None

    def at(self, step: Step, detail: str = "") -> None:
        self._at = step
        self._reached[step] = detail

    def passed(self, detail: str) -> None:
        self._reached[self._at] = detail

    def explained(self, refusal: Refusal | None) -> Sequence[Explained]:
        failed = None if refusal is None else self._failed(refusal)
        steps, is_over = [], False
        for step in Step:
            if step is failed:
                assert refusal is not None
                steps.append(Explained(step, Outcome.REFUSED, refusal.detail))
                is_over = True
            elif is_over:
                steps.append(Explained(step, Outcome.NOT_REACHED))
            elif step in self._reached:
                steps.append(Explained(step, Outcome.PASSED, self._reached[step]))
            else:
                # Before the step that refused: either nothing was asked about it, or one judgement passed it by.
                is_judged = step in (Step.PATH, Step.METHOD) and failed in (Step.PATH, Step.METHOD)
                steps.append(Explained(step, Outcome.PASSED if is_judged else Outcome.NOT_ASKED))
        return steps

    def _failed(self, refusal: Refusal) -> Step:
        """Where it failed. Destination, path and method are one judgement, in that order; its code says which."""
        if self._at is not Step.DESTINATION:
            return self._at
        match refusal.code:
            case RefusalCode.PATH_DENIED:
                return Step.PATH
            case RefusalCode.METHOD_DENIED:
                return Step.METHOD
            case _:
                return Step.DESTINATION


def _place(url: str) -> tuple[Endpoint, str]:
    scheme, found, rest = url.partition("://")
    scheme = scheme.lower()
    if not found or scheme not in DEFAULT_PORTS:
        raise invalid_field("url", "https://host[:port]/path, or http://")
    if not url.isascii() or "#" in rest or any(char <= " " or char == "\x7f" for char in url):
        raise invalid_field("url", "a URL as it goes over the wire: ASCII, no white space and no fragment")
    authority = rest[: min((at for at in map(rest.find, "/?") if at >= 0), default=len(rest))]
    target = rest[len(authority) :]
    try:
        host, port = split_authority(authority, default_port=DEFAULT_PORTS[scheme])
    except InvalidDestinationError as error:
        raise invalid_field("url", str(error)) from None
    path = target.partition("?")[0]
    return Endpoint(scheme, host, port), path if path.startswith("/") else "/" + path


def _narrowed(scope: str, granted: Granted) -> Sequence[GrantScope]:
    scopes = [grant.scope for grant in granted.grants]
    try:
        narrowing = read_scope(scope)
    except InvalidScopeError as error:
        raise invalid_field("scope", str(error)) from None
    if not covers(narrowing, grants=scopes, destinations=granted.credential.destinations):
        raise RefusedError(SCOPE_TOO_WIDE)
    return narrowed(scopes, narrowing)


def _admit_rest(credential: Credential, question: Question, handling: Handling, walk: _Walk) -> None:
    """In the order in which the proxy looks. Raises `RefusedError`."""
    placement = question.placement or next(iter(credential.placements), None)
    if placement is not None:
        walk.at(Step.PLACEMENT, _in_words(placement))
        admit_placement(credential.placements, placement)
        walk.placement = placement
    if question.websocket:
        walk.at(Step.WEBSOCKET)
        if not handling.websocket:
            refuse_websocket()


def _in_words(placement: Placement) -> str:
    return " ".join(placement_to_json(placement).values())


def _require_public(endpoint: Endpoint, *, allows_private: bool) -> None:
    if is_ip_literal(endpoint.host) and not allows_private and not is_public(endpoint.host):
        raise RefusedError(PRIVATE)


def _concerns(grant: Grant, subject: SubjectId | None, roles: frozenset[str]) -> bool:
    if subject is None:
        return True
    return grant.subject == subject if grant.subject is not None else grant.role in roles


def _uses_of(grant: Grant, grants: Sequence[Grant], uses: Sequence[Use]) -> Sequence[Use]:
    """What was used by this grant, as far as one can tell: by a role's, what subjects without one of their own used."""
    own = {(other.subject, other.credential_id) for other in grants if other.subject is not None}
    return [
        use
        for use in uses
        if use.credential_id == grant.credential_id
        and grant.client in (None, use.client)
        and (
            use.subject == grant.subject
            if grant.subject is not None
            else (use.subject, CredentialId(use.credential_id)) not in own
        )
    ]


MIRRORS: Final = Refusal(
    RefusalCode.METHOD_NOT_ALLOWED, "TRACE and TRACK mirror the request, and with it the credential"
)
NO_SUCH_SESSION: Final = Refusal(
    RefusalCode.SESSION_NOT_FOUND,
    "there is no such session of this subject and client, or it is over",
    "leave session out to ask without one",
)
SCOPE_TOO_WIDE: Final = Refusal(
    RefusalCode.MALFORMED_REQUEST, "the grants do not cover all of the scope", "an exchange answers invalid_scope"
)
PRIVATE: Final = Refusal(
    RefusalCode.DESTINATION_PRIVATE,
    "the address is an internal one, and nobody named it as a destination that may be",
)
