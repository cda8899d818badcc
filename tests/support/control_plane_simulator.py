"""The control plane's `/internal`, as a small real HTTP server whose store is a few dictionaries.

Rule: it speaks the wire of `control_plane.contract.wire` and nothing else; what the proxy makes of it is what the proxy
would make of the real one. It can be slow, silent or away, which the real one cannot be told to be.

It runs an event loop in a thread of its own. Everything a test calls is safe to call from the test's thread.
"""

import asyncio
import base64
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from aiohttp import web

from control_plane.contract.caller import Caller, ClientId, CredentialId, GrantId, PlaceholderId, SessionId
from control_plane.contract.caller import SubjectId as Subject
from control_plane.contract.caller import TenantId as Tenant
from control_plane.contract.destination import AllowRule, Destination, parse_destination
from control_plane.contract.grant import GrantScope
from control_plane.contract.placeholder import ENTROPY_BYTES, Shape, TokenKind, fingerprint, mint
from control_plane.contract.placement import BEARER, Placement
from control_plane.contract.refusal import RefusalCode
from control_plane.contract.wire import (
    AUDIT_BATCH,
    EVENT,
    QUOTA_ANSWER,
    QUOTA_REQUEST,
    RESOLVE_ANSWER,
    RESOLVE_REQUEST,
    TAG_KEYS,
    Answer,
    Ask,
    AskCaller,
    AskPlaceholder,
    AskPolicy,
    AskWorkload,
    AuditEvent,
    Binding,
    BoundLimit,
    CallerFacts,
    Event,
    Policy,
    QuotaAnswer,
    QuotaEntry,
    QuotaGrant,
    Refused,
    ResolveAnswer,
    ResolvedPlaceholder,
    Route,
    TagKeys,
    WorkloadFacts,
    client_of,
    read,
    write,
)

T = TypeVar("T")

UNKNOWN = Refused(RefusalCode.UNKNOWN_PLACEHOLDER, "No such placeholder.")
UNKNOWN_WORKLOAD = Refused(
    RefusalCode.PROXY_AUTHENTICATION_REQUIRED, "No such workload.", true_code=RefusalCode.TOKEN_INVALID
)
INVALID = Refused(RefusalCode.TOKEN_INVALID, "No such proxy credential.")
_HEARTBEAT_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an exchange hands out."""

    placeholder: str
    proxy_credential: str
    secret: str
    caller: Caller
    credential: str
    binding: Binding

    @property
    def bearer(self) -> str:
        return f"Bearer {self.placeholder}"


@dataclass(slots=True)
class _State:
    callers: dict[str, CallerFacts] = field(default_factory=dict)
    workloads: dict[str, WorkloadFacts] = field(default_factory=dict)
    routes: dict[Caller, list[Route]] = field(default_factory=dict)
    rules: dict[str, list[AllowRule]] = field(default_factory=dict)
    placeholders: dict[str, ResolvedPlaceholder | Refused] = field(default_factory=dict)


class ControlPlaneSimulator:
    """See the module."""

    def __init__(self, *, client_id: str = "proxy-1", client_secret: str | None = None) -> None:
        self.client_id = client_id
        self.client_secret = client_secret or secrets.token_urlsafe(24)
        self.tag_key = secrets.token_bytes(32)
        self.epoch = secrets.token_hex(4)
        self.events: list[Event] = []
        self.questions: list[Ask] = []
        self.audited: list[AuditEvent] = []
        self.audit_gaps = 0
        self.quota: dict[str, int] = {}
        """What is left of each limit. What is not in here does not exist."""
        self.quota_slice = 1
        self.quota_entries: list[QuotaEntry] = []
        self.answers_quota = True
        self.takes_audit = True
        self.is_silent = False
        """Neither events nor heartbeats; the connection stays."""
        self.answers = True
        """False: 503 to everything."""
        self.before_answer: Callable[[Ask], None] | None = None
        """Called after the store was read and before the answer leaves, in the server's thread."""
        self.hold_answers = threading.Event()
        self.hold_answers.set()
        self.port = 0
        self._sequence = 0
        self._state = _State()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="control-plane", daemon=True)
        self._started = threading.Event()
        self._runner: web.AppRunner | None = None
        self._streams: dict[asyncio.Event, int] = {}
        """Each open event stream, with the last sequence written to it."""

    # --- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def stop(self) -> None:
        """Be away: connections are refused, open ones end."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)

    # --- what it knows ------------------------------------------------------------------------------------------------

    def caller(
        self,
        *,
        tenant: str = "acme",
        subject: str = "alice",
        session: str | None = "",
        client: str = "runtime-1",
        lives_seconds: float = 900,
    ) -> tuple[Caller, str]:
        """A caller with a proxy credential. `session` "" makes a new one."""
        session_id = SessionId(session or f"s-{secrets.token_hex(4)}") if session is not None else None
        caller = Caller(ClientId(client), Tenant(tenant), Subject(subject), session_id)
        credential = self._mint(TokenKind.PROXY_CREDENTIAL)
        self._state.callers[fingerprint(credential)] = CallerFacts(caller, time.time() + lives_seconds)
        return caller, credential

    def workload(
        self,
        proof: bytes,
        *,
        client: str = "runtime-1",
        tenant: str | None = None,
        subject: str | None = None,
        issuer: str = "",
        lives_seconds: float = 900,
    ) -> WorkloadFacts:
        """The client that a token's text, or a certificate's DER, proves from now on."""
        facts = WorkloadFacts(
            ClientId(client),
            time.time() + lives_seconds,
            Tenant(tenant) if tenant is not None else None,
            Subject(subject) if subject is not None else None,
            issuer,
        )
        self._state.workloads[hashlib.sha256(proof).hexdigest()] = facts
        return facts

    def forget_client(self, client: str) -> None:
        """It is not registered any more, and every proxy is told."""
        workloads = self._state.workloads
        for key in [key for key, facts in workloads.items() if facts.client == client]:
            del workloads[key]
        self.publish("proxy_credential", id=client_of(client), revoked=True)

    def ticket(
        self,
        url: str,
        *,
        credential: str = "api",
        secret: str | None = None,
        placements: tuple[Placement, ...] = (BEARER,),
        allow_private: bool = True,
        methods: frozenset[str] | None = None,
        scopes: tuple[GrantScope, ...] = (GrantScope(),),
        credential_required: bool = False,
        lives_seconds: float = 900,
        max_stale_seconds: float = 0.0,
        more_urls: Iterable[str] = (),
        traits: Mapping[str, Any] = MappingProxyType({}),
        limits: tuple[BoundLimit, ...] = (),
        of: tuple[Caller, str] | None = None,
        **who: Any,
    ) -> Ticket:
        """A credential for that destination, granted, exchanged: its placeholder and proxy credential."""
        caller, proxy_credential = of or self.caller(**who)
        destinations: tuple[Destination, ...] = tuple(
            replace(parse_destination(each, methods=methods, allow_private=allow_private), **traits)
            for each in (url, *more_urls)
        )
        credential_id = CredentialId(f"c-{secrets.token_hex(4)}")
        binding = Binding(
            placeholder_id=PlaceholderId(f"p-{secrets.token_hex(4)}"),
            caller=caller,
            credential_id=credential_id,
            credential_name=credential,
            version=1,
            grant_ids=(GrantId(f"g-{secrets.token_hex(4)}"),),
            destinations=destinations,
            placements=placements,
            scopes=scopes,
            expires_at=time.time() + lives_seconds,
            max_stale_seconds=max_stale_seconds,
            limits=limits,
        )
        placeholder = self._mint(TokenKind.PLACEHOLDER)
        value = secret if secret is not None else f"real-{secrets.token_urlsafe(24)}"
        self._state.placeholders[fingerprint(placeholder)] = ResolvedPlaceholder(binding, value)
        route = Route(credential, credential_id, destinations, scopes, placements, credential_required)
        self._state.routes.setdefault(caller, []).append(route)
        return Ticket(placeholder, proxy_credential, value, caller, credential, binding)

    def allow(self, tenant: str, host: str, port: int | None = None, **rule: Any) -> None:
        """A host that needs no credential."""
        self._state.rules.setdefault(tenant, []).append(AllowRule(host, port, **rule))
        self.publish("policy", tenant=tenant)

    def disallow(self, tenant: str) -> None:
        """Takes back every rule of the tenant."""
        self._state.rules.pop(tenant, None)
        self.publish("policy", tenant=tenant, revoked=True)

    def change(self, ticket: Ticket, *, secret: str | None = None, **binding: Any) -> None:
        """What the placeholder stands for from now on. Tells nobody: see `publish`."""
        changed = replace(ticket.binding, **binding)
        self._state.placeholders[fingerprint(ticket.placeholder)] = ResolvedPlaceholder(
            changed, secret or ticket.secret
        )

    def revoke(self, ticket: Ticket, *, silently: bool = False) -> None:
        """The placeholder, with its event unless it is to get lost."""
        self._state.placeholders[fingerprint(ticket.placeholder)] = Refused(
            RefusalCode.REVOKED_PLACEHOLDER, "The placeholder was revoked.", binding=ticket.binding
        )
        if not silently:
            self.publish("placeholder", tenant=ticket.caller.tenant, id=ticket.binding.placeholder_id, revoked=True)

    def publish(self, kind: Any, *, tenant: str = "", id: str = "", revoked: bool = False, skip: int = 0) -> Event:
        """An event to every stream. `skip` leaves a gap before it."""
        self._sequence += 1 + skip
        event = Event(self._sequence, self.epoch, kind, tenant, id, revoked)
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._wake)
        return event

    def restore(self) -> None:
        """As after a restored database: another epoch, and a sequence that begins again."""
        self.epoch, self._sequence, self.events = secrets.token_hex(4), 0, []
        self._loop.call_soon_threadsafe(self._wake)

    def forged(self) -> str:
        """A placeholder whose tag is of no known key."""
        entropy = secrets.token_bytes(ENTROPY_BYTES)
        return mint(Shape(), TokenKind.PLACEHOLDER, tag_key=bytes(32), entropy=entropy)

    def unknown(self) -> str:
        """A genuine placeholder that the store does not know."""
        return self._mint(TokenKind.PLACEHOLDER)

    # --- what it saw --------------------------------------------------------------------------------------------------

    def asked_for(self, token: str) -> int:
        """How often the store was asked for this token."""
        key = fingerprint(token)
        return sum(1 for ask in self.questions if key in (_key(ask), None))

    def audit_of(self, request_id: str, *, timeout_seconds: float = 5) -> AuditEvent:
        """The event of that request. Raises `TimeoutError`."""
        return self.wait_for(
            lambda plane: next((e for e in plane.audited if e.request_id == request_id), None),
            timeout_seconds=timeout_seconds,
        )

    def wait_for(self, fact: "Callable[[ControlPlaneSimulator], T | None]", *, timeout_seconds: float = 10) -> T:
        """Until `fact` is true. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_seconds
        while not (found := fact(self)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not seen within {timeout_seconds} s")
            time.sleep(0.01)
        return found

    # --- the server ---------------------------------------------------------------------------------------------------

    def _mint(self, kind: TokenKind) -> str:
        return mint(Shape(), kind, tag_key=self.tag_key, entropy=secrets.token_bytes(ENTROPY_BYTES))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self) -> None:
        application = web.Application()
        application.add_routes(
            [
                web.post("/internal/resolve", self._resolve),
                web.get("/internal/tag-keys", self._tag_keys),
                web.get("/internal/events", self._events),
                web.post("/internal/audit", self._audit),
                web.post("/internal/injector", self._injector),
                web.post("/internal/quota", self._quota),
            ]
        )
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            self._wake()
            await runner.cleanup()

    def _check(self, request: web.Request) -> None:
        expected = base64.b64encode(f"{self.client_id}:{self.client_secret}".encode()).decode()
        if request.headers.get("Authorization") != f"Basic {expected}":
            raise web.HTTPUnauthorized
        if not self.answers:
            raise web.HTTPServiceUnavailable

    async def _tag_keys(self, request: web.Request) -> web.Response:
        self._check(request)
        return _json(write(TAG_KEYS, TagKeys((self.tag_key.hex(),), self.epoch, self._sequence)))

    async def _resolve(self, request: web.Request) -> web.Response:
        self._check(request)
        ask = read(RESOLVE_REQUEST, await request.read()).ask
        self.questions.append(ask)
        answer, epoch, as_of = self._answer(ask), self.epoch, self._sequence
        while not self.hold_answers.is_set():
            await asyncio.sleep(0.005)
        if self.before_answer is not None:
            self.before_answer(ask)
            while any(last < self._sequence for last in self._streams.values()):
                await asyncio.sleep(0.001)  # what it published leaves before the answer
        return _json(write(RESOLVE_ANSWER, ResolveAnswer(answer, epoch, as_of)))

    def _answer(self, ask: Ask) -> Answer:
        match ask:
            case AskCaller(proxy_credential_sha256=key):
                return self._state.callers.get(key, INVALID)
            case AskWorkload(proof_sha256=key, token=token, certificate=certificate):
                # What is asked about has to be shown; the real one verifies it.
                assert key == hashlib.sha256(token.encode() or base64.b64decode(certificate)).hexdigest()
                return self._state.workloads.get(key, UNKNOWN_WORKLOAD)
            case AskPolicy(caller=caller):
                rules = self._state.rules.get(caller.tenant, [])
                return Policy(caller, tuple(self._state.routes.get(caller, [])), tuple(rules))
            case AskPlaceholder(placeholder_sha256=key, caller=caller):
                found = self._state.placeholders.get(key, UNKNOWN)
                if isinstance(found, ResolvedPlaceholder) and found.binding.caller.tenant != caller.tenant:
                    return replace(UNKNOWN, true_code=RefusalCode.CALLER_MISMATCH, binding=found.binding)
                return found

    async def _events(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        last = int(request.query.get("after", "0"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        woken = asyncio.Event()
        self._streams[woken] = last
        try:
            await response.write(_message(Event(min(last, self._sequence), self.epoch, "heartbeat")))
            while self._runner is not None:
                for event in [each for each in self.events if each.sequence > last]:
                    if not self.is_silent:
                        last = event.sequence
                        await response.write(_message(event))
                        self._streams[woken] = last
                woken.clear()
                try:
                    await asyncio.wait_for(woken.wait(), _HEARTBEAT_SECONDS)
                except TimeoutError:
                    if not self.is_silent:
                        last = min(last, self._sequence)
                        await response.write(_message(Event(last, self.epoch, "heartbeat")))
        except ConnectionError:
            pass
        finally:
            self._streams.pop(woken, None)
        return response

    async def _injector(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.Response(status=204)

    async def _audit(self, request: web.Request) -> web.Response:
        self._check(request)
        if not self.takes_audit:
            raise web.HTTPServiceUnavailable
        batch = read(AUDIT_BATCH, await request.read())
        known = {event.event_id for event in self.audited}
        self.audited.extend(event for event in batch.events if event.event_id not in known)
        self.audit_gaps += batch.dropped
        return web.Response(status=204)

    async def _quota(self, request: web.Request) -> web.Response:
        self._check(request)
        asked = read(QUOTA_REQUEST, await request.read())
        if not self.answers_quota:
            raise web.HTTPServiceUnavailable
        return _json(write(QUOTA_ANSWER, QuotaAnswer(tuple(self._grant(entry) for entry in asked.entries))))

    def _grant(self, entry: QuotaEntry) -> QuotaGrant:
        self.quota_entries.append(entry)
        left = self.quota.get(entry.limit_id)
        if left is None:
            return QuotaGrant(entry.limit_id, entry.bucket, 0, 0, 1.0, exists=False)
        left += entry.returned - entry.used
        granted = max(0, min(left, max(entry.wanted, self.quota_slice))) if entry.wanted else 0
        self.quota[entry.limit_id] = left - granted
        return QuotaGrant(entry.limit_id, entry.bucket, granted, 1, 60.0)

    def _wake(self) -> None:
        for woken in self._streams:
            woken.set()


def _key(ask: Ask) -> str:
    match ask:
        case AskCaller(proxy_credential_sha256=key) | AskPlaceholder(placeholder_sha256=key):
            return key
        case AskWorkload(proof_sha256=key):
            return key
        case AskPolicy():
            return ""


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _message(event: Event) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.sequence, event.kind.encode(), write(EVENT, event))
