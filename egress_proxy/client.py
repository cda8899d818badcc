"""One client connection: heads, one request at a time, refusals, keep-alive; how it begins: `opening`.

Everything warm happens inside `data_received`: a head is parsed, decided, and begun on a pooled connection before it
returns. What has to wait (a question to the control plane, a new upstream connection, a certificate) runs in one task,
which ends as soon as the wait is over.

Rules:
- Requests that a client pipelines are held, up to `MAX_HELD_BYTES`, and answered one after the other.
- A client that half-closes counts as gone: it cannot be told from one that hung up, and upstreams cost money.
- The connection is kept after a refusal only where it is certain where the next request begins.
- Whatever goes wrong inside refuses; the client never learns what it was.
"""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import structlog

from control_plane.contract.placeholder import ForgedTokenError, GenuineToken, TokenKind, parse
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from control_plane.contract.wire import LEAK_BLOCKED, Binding
from egress_proxy.audit import RepeatedEvent, Room
from egress_proxy.ca import UnusableCaError
from egress_proxy.core.decision import Connection, Forward, Mode, Refuse, Resolve, Tunnel, decide, decide_connect
from egress_proxy.core.http1 import (
    HEAD_END,
    Framing,
    RequestHead,
    judge_partial_head,
    parse_request_head,
)
from egress_proxy.core.plan import PLAN_SECONDS, Plan
from egress_proxy.core.proofs import BY_PROXY_CREDENTIAL, presented_certificate
from egress_proxy.exchange import Exchange
from egress_proxy.load import OVERLOADED, TOO_MANY_CONNECTIONS, Load
from egress_proxy.logs import place_of
from egress_proxy.opening import Hello, Preamble
from egress_proxy.outlet import Outlet
from egress_proxy.record import event_of
from egress_proxy.refusals import render_refusal
from egress_proxy.services import Services
from egress_proxy.tls import Lower, TlsLayer
from egress_proxy.upstream import Lane, UpstreamConnection

REMEMBERS_SECONDS: Final = 2 * PLAN_SECONDS
"""So long an idle connection keeps what its last request was."""
MAX_HELD_BYTES: Final = 65_536
WRITE_HIGH_WATER_BYTES: Final = 262_144
LINGER_SECONDS: Final = 2.0
"""How long a client may go on sending what nobody reads, so that it gets to read its refusal (RFC 9112 §9.6)."""
MAX_ROUNDS: Final = 24
"""Questions for one request: its caller, its policy, its placeholders, and each once more after an event."""
_NO_REASON_TO_CUT: Final = frozenset(
    {
        RefusalCode.EXPIRED_PLACEHOLDER,  # it was alive when the request began
        RefusalCode.TOKEN_EXPIRED,
        RefusalCode.CREDENTIAL_UNAVAILABLE,
        RefusalCode.STORE_UNAVAILABLE,
        RefusalCode.RATE_LIMITED,  # it was counted when it went
        RefusalCode.SPEND_LIMIT_EXCEEDED,
    }
)
TOOK_TOO_LONG: Final = Refusal(
    RefusalCode.UPSTREAM_TIMEOUT,
    "The request took longer than any may take.",
    "The operator's limit is COATCHECK_PROXY_TOTAL_TIMEOUT_SECONDS.",
)
TUNNEL_OPEN: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"

log = structlog.get_logger("egress_proxy")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A plan, and what it takes to carry it out again: its audit event, where that goes, and the way upstream."""

    plan: Plan
    event: RepeatedEvent
    room: Room
    lane: Lane
    load: Load


class ClientConnection(asyncio.Protocol):
    """See the module. `mode` is its listener's."""

    __slots__ = (
        "_awaits_hello",
        "_facts",
        "_has_partial_head",
        "_head",
        "_held",
        "_is_busy",
        "_is_done",
        "_is_paused",
        "_is_reading_heads",
        "_is_retired",
        "_is_slow",
        "_lingers",
        "_listener_context",
        "_listener_tls",
        "_load",
        "_misdirected",
        "_opener_credential",
        "_out",
        "_outlet",
        "_prepared",
        "_raw",
        "_request_id",
        "_since",
        "_spare",
        "_stage",
        "_task",
        "_tenancy",
        "_tls",
        "_unopened",
        "exchange",
        "services",
        "write",
    )

    def __init__(self, services: Services, mode: Mode, *, listener_context: ssl.SSLContext | None = None) -> None:
        self.services = services
        self._facts = Connection(
            mode=mode,
            accepts=services.accepts.get(mode, BY_PROXY_CREDENTIAL),
            path_credential_allowed=services.path_credential_allowed,
        )
        self._listener_context = listener_context
        self._outlet: Outlet | None = None
        self._listener_tls: TlsLayer | None = None
        self._tls: TlsLayer | None = None
        self._out: Lower | None = None
        self.write: Callable[[bytes], object] = _nothing_more
        """Toward the client: what is below, without a call between, until the connection ends."""
        self._stage: Callable[[bytes], None] = Preamble(self).feed
        self._held = bytearray()
        self._opener_credential: str | None = None
        self._unopened: Forward | None = None
        """What is carried on inside a CONNECT that is not looked into."""
        self._awaits_hello = False
        self._misdirected = False
        self.exchange: Exchange | None = None
        """The one under way."""
        self._task: asyncio.Task[None] | None = None
        self._head: RequestHead | None = None
        self._raw = b""
        """The head of the request under way, as it came."""
        self._prepared: _Prepared | None = None
        self._load: Load | None = None
        """What the exchange under way is counted in."""
        self._tenancy: Load | None = None
        """What the connection itself is counted in, once it is known whose it is."""
        self._spare: Exchange | None = None
        """The last exchange, where the next one may be the same object."""
        self._has_partial_head = False
        self._request_id = ""
        self._is_busy = False
        self._is_done = False
        self._is_reading_heads = False
        self._is_retired = False
        self._is_paused = False
        self._is_slow = False
        self._lingers = False
        self._since = 0.0
        """When the connection last began to wait for its client: for a first byte, a head, a handshake."""

    @property
    def is_draining(self) -> bool:
        """Whether the reply under way is the last."""
        return self._is_retired or self.services.is_draining

    @property
    def is_certified(self) -> bool:
        """Whether a client certificate stands for its caller."""
        return self._facts.certificate is not None

    def retire(self) -> None:
        """What it was opened on has changed: it ends as in a drain."""
        self._is_retired = True
        self.drain()

    # --- what the transport calls -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop has classes of its own
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._outlet = self._out = outlet = Outlet(transport, self.services.turn)
        self.write = outlet.write
        self._since = self.services.loop.time()
        self.services.clients.add(self)
        self.services.unproven[self] = None
        self.services.counters.connections += 1
        if self._listener_context is not None:
            self._listener_tls = self._out = TlsLayer(
                loop=self.services.loop,
                lower=outlet,
                context=self._listener_context,
                server_hostname=None,
                on_established=self._listener_established,
                on_data=self._below_listener_tls,
                on_end=self._client_ended,
                on_failure=self._tls_failed,
            )
            self.write = self._listener_tls.write
        if len(self.services.clients) > self.services.client_limit:
            self.services.counters.connections_refused += 1
            self.services.make_room()
        if self.services.is_draining:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            if self._lingers:
                return
            if self._listener_tls is not None:
                self._listener_tls.feed(data)
            else:
                self._stage(data)
        except Exception as error:  # border: whatever it was, this connection ends and nothing of it is shown
            self.internal_error(error)

    def eof_received(self) -> bool:
        self._client_ended(False)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.write = _nothing_more
        self.services.client_closed(self)
        if self._tenancy is not None:
            self._tenancy.connections -= 1
            self._tenancy = None
        self._drop_work()
        self._let_go()

    def pause_writing(self) -> None:
        self._is_slow = True
        if self.exchange is not None:
            self.exchange.client_pause_writing()

    def resume_writing(self) -> None:
        self._is_slow = False
        if self.exchange is not None:
            self.exchange.client_resume_writing()
        elif self._held and not self._is_busy and not self._is_done:
            self.resume_reading()
            self._next()

    # --- before the first request -------------------------------------------------------------------------------------

    def _listener_established(self) -> None:
        assert self._listener_tls is not None
        der = self._listener_tls.peer_certificate
        if der is not None:
            self._facts = replace(self._facts, certificate=presented_certificate(der))

    def _below_listener_tls(self, data: bytes) -> None:
        self._stage(data)

    def begin_requests(self, opener_credential: str | None, data: bytes) -> None:
        """The opener has said what it says, if there is one; `data` follows."""
        self._opener_credential = opener_credential
        self._stage = self._http
        if data:
            self._http(data)

    def refuse_opening(self, refusal: Refusal, *, forward: Forward | None = None) -> None:
        """What the connection began with is none of what may begin one."""
        self._task = None
        self._refuse(refusal, close=True, forward=forward)

    def end_tunnel(self, last: bytes) -> None:
        self.write(last)
        self._close()

    def wait_inside(self, waiting: Coroutine[Any, Any, None], opening: bytes) -> None:
        """For where an unopened tunnel leads; what it began with is kept until then."""
        self._awaits_hello = False
        self._is_busy = True
        self._stage = self._http
        self._held += opening
        self._task = self.services.loop.create_task(waiting)

    def carry(self, unopened: Forward, upstream: UpstreamConnection) -> None:
        """Whatever comes inside the tunnel, to there and back."""
        self._task = None
        assert self._head is not None
        self._unopened = unopened
        prepared = self._prepare(unopened, self._head)
        if prepared.load.is_full:
            upstream.close()
            self._refuse(OVERLOADED, close=True, forward=unopened)
            return
        self._load = prepared.load
        prepared.load.count += 1
        self.exchange = exchange = Exchange(self, prepared.plan, request_id=self._request_id, services=self.services)
        self._record_again(prepared)
        self.services.counters.forwards += 1
        exchange.carry(upstream, client_is_slow=self._is_slow)
        self._after_wait()

    def intercept(self, context: ssl.SSLContext, opening: bytes, *, is_misdirected: bool) -> None:
        """Speak TLS inside the tunnel, as the host that its client asked for."""
        assert self._out is not None
        self._misdirected = is_misdirected
        layer = TlsLayer(
            loop=self.services.loop,
            lower=self._out,
            context=context,
            server_hostname=None,
            on_established=self._tunnel_established,
            on_data=self._http,
            on_end=self._client_ended,
            on_failure=self._tls_failed,
        )
        self._tls = self._out = layer
        self.write = layer.write
        self._stage = layer.feed
        layer.feed(opening)

    def _tunnel_established(self) -> None:
        self._awaits_hello = False
        self._since = self.services.loop.time()

    # --- heads --------------------------------------------------------------------------------------------------------

    def _http(self, data: bytes) -> None:
        is_at_rest = not (self._is_busy or self._held or self._is_done or self._is_slow)
        if is_at_rest and self._prepared is not None and self._repeat(data, self._prepared):
            return
        exchange = self.exchange
        if exchange is not None and exchange.wants_body:
            data = exchange.request_data(data)
            if not data:
                return
        if self._is_busy or self._is_done or self._is_slow:
            self._hold(data)
        elif self._held:
            searched = max(0, len(self._held) - len(HEAD_END))
            self._held += data
            if self._held.find(HEAD_END, searched) >= 0:
                self._next()
            else:
                self._judge_partial_head(searched)
        else:
            self._next(data)

    def _hold(self, data: bytes) -> None:
        """Bytes that come before their turn: pipelined requests, or a body whose upstream is not there yet."""
        if self._is_done:
            return
        self._held += data
        if len(self._held) > MAX_HELD_BYTES:
            self.pause_reading()

    def _next(self, data: bytes = b"") -> None:
        """Requests one after the other, until one of them has to wait."""
        if self._held:
            data = bytes(self._held) + data
            self._held.clear()
        at = 0
        self._is_reading_heads = True
        while at < len(data) and not self._is_busy and not self._is_done and not self._is_slow:
            if data.startswith(b"\r\n", at):
                at += 2  # RFC 9112 §2.2: one empty line before a request is taken
            end = data.find(HEAD_END, at)
            if end < 0:
                break
            end += len(HEAD_END)
            self._begin_request(data[at:end])
            at = end
            exchange = self.exchange
            if exchange is not None and exchange.wants_body and at < len(data):
                data, at = exchange.request_data(data[at:]), 0
            if self._awaits_hello:
                break
        self._is_reading_heads = False
        rest = data[at:]
        if not rest or self._is_done:
            return
        if self._awaits_hello:
            self._stage(rest)
        elif self._is_busy or self._is_slow:
            self._hold(rest)
        else:
            self._held += rest
            self._judge_partial_head(0)

    def _judge_partial_head(self, new_at: int) -> None:
        """What will never become a head is refused now, not when the time is over. `new_at`: not looked at before."""
        if not self._has_partial_head:
            self._has_partial_head = True
            self._since = self.services.loop.time()
        try:
            judge_partial_head(self._held, new_at=new_at)
        except RefusedError as refused:
            self._request_id = self.services.request_ids.next()
            self._refuse(refused.refusal, close=True)

    # --- one request --------------------------------------------------------------------------------------------------

    def _begin_request(self, raw: bytes) -> None:
        self._is_busy = True
        self._has_partial_head = False
        self._request_id = self.services.request_ids.next()
        self._head = None
        try:
            decision = self._decided(raw)
        except RefusedError as refused:
            self._refuse(refused.refusal, close=True)
            return
        if type(decision) is Forward:
            upstream = self._warm_upstream(decision)
            if upstream is not None:
                self._start(decision, upstream)
                return
        elif type(decision) is Refuse:
            self._refuse(decision.refusal, decided=decision)
            return
        elif type(decision) is Tunnel:
            context = self.services.leaf_contexts.cached(decision.endpoint.host)
            if context is not None or decision.unopened is not None:
                self._open_tunnel(decision, context)
                return
        self._task = self.services.loop.create_task(self._wait(decision))

    def _decided(self, raw: bytes) -> Forward | Tunnel | Resolve | Refuse:
        """What is to be done with a head; remembered, where it is the last one again. Raises `RefusedError`."""
        self._raw = raw
        prepared, view, now = self._prepared, self.services.view, self.services.clock()
        if prepared is not None:
            plan, revision = prepared.plan, view.revision
            if plan.repeated_by(raw, revision=revision, now=now) == len(raw):
                self._head = plan.head
                return plan.forward
            self._head = head = parse_request_head(raw)
            if plan.fits(head, revision=revision, now=now):
                plan.adopt(raw, head)
                return plan.forward
            self._prepared = None
        else:
            self._head = head = parse_request_head(raw)
        self._check_connection(head)
        decision = self._decide(head)
        if prepared is not None and type(decision) is Forward:
            plan = prepared.plan
            if plan.renewed_by(raw, head, decision, revision=view.revision, now=now):
                self._prepared = prepared
                return plan.forward
        return decision

    def _check_connection(self, head: RequestHead) -> None:
        """What is wrong with the connection is said in answer to its first request. Raises `RefusedError`."""
        if not self.services.view.tag_keys:
            raise RefusedError(
                Refusal(
                    RefusalCode.CREDENTIAL_UNAVAILABLE,
                    "The proxy has not reached its control plane yet.",
                    "Try again shortly.",
                    retry_after_seconds=1,
                )
            )
        if self._misdirected:
            detail = "The TLS server name is not the host of the CONNECT."
            raise RefusedError(Refusal(RefusalCode.MISDIRECTED_REQUEST, detail, "Open a connection for each host."))
        if self._opener_credential is not None and self._facts.proxy_credential is None:
            self._facts = replace(self._facts, proxy_credential=self._opener_token(self._opener_credential))
        if head.method == "CONNECT" and (self._facts.mode is Mode.REVERSE or self._facts.tunnel is not None):
            raise RefusedError(Refusal(RefusalCode.MALFORMED_REQUEST, "CONNECT goes to the forward listener alone."))

    def _opener_token(self, text: str) -> GenuineToken:
        try:
            token = parse(text, self.services.view.tag_keys)
        except ForgedTokenError:
            token = None
        if token is None or token.kind is not TokenKind.PROXY_CREDENTIAL:
            is_forward = self._facts.mode is Mode.FORWARD
            code = RefusalCode.PROXY_AUTHENTICATION_REQUIRED if is_forward else RefusalCode.TOKEN_INVALID
            raise RefusedError(Refusal(code, "The opener of this session's listener sent no valid proxy credential."))
        return token

    def _decide(self, head: RequestHead) -> Forward | Tunnel | Resolve | Refuse:
        services = self.services
        if head.method == "CONNECT":
            return decide_connect(head, self._facts, services.view, services.clock())
        return decide(head, self._facts, services.view, services.clock())

    def _repeat(self, data: bytes, prepared: "_Prepared") -> bool:
        """The connection's last request once more, all of it in `data`, to an upstream that is there: carried out.

        Hot path (`make bench`): what `_begin_request` does step by step, for the case that nothing has to be decided,
        parsed or waited for. False: it is another case, and nothing has happened.
        """
        services, plan = self.services, prepared.plan
        forward, now = plan.forward, services.clock()
        head_length = plan.repeated_by(data, revision=services.view.revision, now=now)
        if not head_length or not plan.is_plain or len(data) != head_length + plan.head.content_length:
            return False
        if forward.swaps and not services.audit.admits_swap(prepared.room):
            return False
        load = prepared.load
        if load.is_full:
            return False
        exchange = self._spare
        if exchange is None or exchange.plan is not plan:
            return False
        upstream = services.upstreams.take(prepared.lane, allow_private=forward.allow_private)
        if upstream is None:
            return False
        self._is_busy = True
        self._request_id = request_id = services.request_ids.next()
        self._head = plan.head
        self._spare = None
        self.exchange = exchange
        self._load = load
        load.count += 1
        event = prepared.event
        services.audit.record_again(prepared.room, event.beginning(request_id, now), event.rest)
        counters = services.counters
        if forward.swaps:
            counters.swaps += 1
        else:
            counters.forwards += 1
        if upstream.was_used:
            counters.upstream_reuses += 1
        if head_length == len(data):
            self._raw = data
            exchange.again(request_id, upstream, plan.render())
        else:
            self._raw = data[:head_length]
            exchange.again(request_id, upstream, plan.render() + data[head_length:])
        return True

    def _lane(self, forward: Forward) -> Lane:
        prepared = self._prepared
        if prepared is not None and prepared.plan.forward is forward:
            return prepared.lane
        return self.services.upstreams.lane(forward.caller.tenant, forward.endpoint, forward.handling.ca_pem)

    def _warm_upstream(self, forward: Forward) -> UpstreamConnection | None:
        return self.services.upstreams.take(self._lane(forward), allow_private=forward.allow_private)

    async def _wait(self, decision: Forward | Tunnel | Resolve | Refuse, *, is_retry: bool = False) -> None:
        """The cold path: wait for what is missing, decide again, until the request can begin or is refused."""
        services = self.services
        upstream: UpstreamConnection | None = None
        try:
            # A head of its own: that of a plan is changed by the next repetition.
            self._head = head = parse_request_head(self._raw)
            for _ in range(MAX_ROUNDS):
                match decision:
                    case Resolve(ask=ask):
                        await services.ask(ask)
                    case Tunnel(unopened=Forward()):
                        self._task = None
                        self._open_tunnel(decision, None)
                        return
                    case Tunnel(endpoint=endpoint):
                        context = await services.leaf_contexts.context_for(endpoint.host)
                        self._task = None
                        self._open_tunnel(decision, context)
                        return
                    case Forward():
                        if upstream is not None and upstream.suits(decision):
                            self._task = None
                            ready, upstream = upstream, None
                            self._start(decision, ready, is_retry=is_retry)
                            self._after_wait()
                            return
                        if upstream is not None:  # the request goes elsewhere now
                            services.upstreams.give_back(upstream)
                        upstream = None if is_retry else self._warm_upstream(decision)
                        if upstream is None:
                            upstream = await services.upstreams.connect(
                                self._lane(decision), allow_private=decision.allow_private
                            )
                    case Refuse():
                        self._task = None
                        self._refuse(decision.refusal, decided=decision)
                        return
                # Whatever was waited for, authority may have changed meanwhile.
                decision = self._decide(head)
            self._refuse(Refusal(RefusalCode.INTERNAL_ERROR, "The request could not be decided."))
        except RefusedError as refused:
            self._task = None
            facts = decision if isinstance(decision, Forward) else None
            self._refuse(refused.refusal, forward=facts)
        except UnusableCaError:
            self._task = None
            self._refuse(
                Refusal(RefusalCode.CA_UNAVAILABLE, "The interception CA cannot sign.", "See the proxy's log.")
            )
        except Exception as error:  # border, as in `data_received`
            self._task = None
            self.internal_error(error)
        finally:
            if upstream is not None:
                services.upstreams.give_back(upstream)

    def _prepare(self, forward: Forward, head: RequestHead) -> "_Prepared":
        """What was decided, ready to be carried out; remembered for the connection's next request."""
        prepared = self._prepared
        if prepared is None or prepared.plan.forward is not forward:
            services = self.services
            prepared = self._prepared = _Prepared(
                plan=Plan(self._raw, head, forward, revision=services.view.revision, now=services.clock()),
                event=RepeatedEvent(
                    event_of(
                        "swap" if forward.swaps else "forward",
                        services,
                        connection=self._facts,
                        request_id=self._request_id,
                        head=self._head,
                        forward=forward,
                    )
                ),
                room=services.audit.room_for_requests(forward.caller.tenant),
                lane=services.upstreams.lane(forward.caller.tenant, forward.endpoint, forward.handling.ca_pem),
                load=services.loads.of(forward.caller.tenant),
            )
        return prepared

    def _start(self, forward: Forward, upstream: UpstreamConnection, *, is_retry: bool = False) -> None:
        services = self.services
        assert self._head is not None
        prepared = self._prepare(forward, self._head)
        if forward.swaps and not services.audit.admits_swap(prepared.room):
            services.upstreams.give_back(upstream)
            self._refuse(
                Refusal(
                    RefusalCode.AUDIT_UNAVAILABLE,
                    "The audit trail cannot take another swap of this tenant now.",
                    "Try again shortly.",
                    retry_after_seconds=2,
                ),
                forward=forward,
            )
            return
        if self._tenancy is not prepared.load and not self._belongs_to(prepared.load):
            services.upstreams.give_back(upstream)
            self._refuse(TOO_MANY_CONNECTIONS, forward=forward, close=True)
            return
        if prepared.load.is_full:
            services.upstreams.give_back(upstream)
            self._refuse(OVERLOADED, forward=forward)
            return
        if not upstream.is_reusable:  # it died between the dial and now
            self._refuse(Refusal(RefusalCode.UPSTREAM_UNREACHABLE, "The destination hung up."), forward=forward)
            return
        taken = None
        if forward.limits:
            taken = services.quotas.take(forward.limits, services.loop.time())
            if taken is None:  # used up between the decision and now
                services.upstreams.give_back(upstream)
                self._task = services.loop.create_task(self._wait(self._decide(self._head), is_retry=is_retry))
                return
        exchange = Exchange(self, prepared.plan, request_id=self._request_id, services=services)
        exchange.was_retried = is_retry
        exchange.taken = taken
        self.exchange = exchange
        self._load = prepared.load
        prepared.load.count += 1
        if not is_retry:
            self._record_again(prepared)
            if forward.swaps:
                services.counters.swaps += 1
            else:
                services.counters.forwards += 1
        if upstream.was_used:
            services.counters.upstream_reuses += 1
        exchange.begin(upstream, client_is_slow=self._is_slow)

    def _after_wait(self) -> None:
        """The beginning of the body may have come meanwhile."""
        exchange = self.exchange
        if exchange is not None and exchange.wants_body and self._held:
            data = bytes(self._held)
            self._held.clear()
            self._held += exchange.request_data(data)
        if len(self._held) <= MAX_HELD_BYTES:
            self.resume_reading()

    def _belongs_to(self, load: Load) -> bool:
        """Count the connection for whom it comes. False: there are too many of theirs."""
        if self._tenancy is load:
            return True
        if load.connections >= load.connection_limit:
            return False
        if self._tenancy is not None:
            self._tenancy.connections -= 1
        self._tenancy = load
        load.connections += 1
        self.services.unproven.pop(self, None)
        return True

    def _open_tunnel(self, tunnel: Tunnel, context: ssl.SSLContext | None) -> None:
        if not self._belongs_to(self.services.loads.of(tunnel.caller.tenant)):
            self._refuse(TOO_MANY_CONNECTIONS, close=True)
            return
        self.services.counters.tunnels += 1
        self.write(TUNNEL_OPEN)
        proof = tunnel.proof
        self._facts = replace(self._facts, proxy_credential=proof.credential, token=proof.token, tunnel=tunnel.endpoint)
        self._prepared = None  # made of other facts
        self._awaits_hello = True
        self._is_busy = False
        self._since = self.services.loop.time()
        hello = Hello(self, endpoint=tunnel.endpoint, context=context, unopened=tunnel.unopened)
        self._stage = hello.feed
        if self._held and not self._is_reading_heads:
            data = bytes(self._held)
            self._held.clear()
            hello.feed(data)
        self.resume_reading()

    # --- what an exchange calls ---------------------------------------------------------------------------------------

    def exchange_takes_more(self) -> None:
        """It became a WebSocket: what the client sent before that was known belongs to it."""
        if self._held:
            self._after_wait()

    def exchange_ended(self, exchange: Exchange, *, body_is_unread: bool) -> None:
        """The reply is complete."""
        if exchange.taken is not None:
            self._settle(exchange, is_whole=True)
        self._forget_exchange(exchange)
        if exchange.closes_client:
            self._linger() if body_is_unread else self._close()
            return
        if exchange.served_whole:
            self._spare = exchange
        self._become_ready()

    def exchange_served(self, exchange: Exchange, status: int) -> None:
        """The reply is complete, and nothing of it is to be said or counted but that. Hot path (`make bench`)."""
        services = self.services
        if exchange.plan.counts_replies:
            self.exchange_ended(exchange, body_is_unread=False)
            return
        self._count_out()
        self.exchange = None
        self._spare = exchange
        services.counters.replies[status // 100] += 1
        self._become_ready()

    def exchange_failed(self, exchange: Exchange, refusal: Refusal) -> None:
        """It ended otherwise: with this refusal, if no reply has begun; else by breaking off."""
        self._forget_exchange(exchange)
        if exchange.status is None:
            self._refuse(refusal, forward=exchange.forward, close=exchange.wants_body)
            return
        self.services.counters.broken += 1
        log.info("reply_broken_off", request_id=exchange.request_id, code=refusal.code.value)
        self.abort()

    async def taken_back(self) -> Refusal | None:
        """Why the request under way would be refused now; None where it would not, or nobody can say."""
        head = self._head
        if head is None:
            return None
        for _ in range(MAX_ROUNDS):
            decision = self._decide(head)
            if not isinstance(decision, Resolve):
                break
            await self.services.ask(decision.ask)
        if isinstance(decision, Refuse) and decision.refusal.audited_code not in _NO_REASON_TO_CUT:
            return decision.refusal
        if self._unopened is not None and isinstance(decision, Tunnel) and decision.unopened is None:
            return Refusal(RefusalCode.DESTINATION_DENIED, "What goes there is looked into from now on.")
        return None

    def exchange_to_be_repeated(self, exchange: Exchange) -> None:
        """Its pooled connection had died: once more, on a new one."""
        self.services.counters.retries += 1
        if exchange.taken is not None:
            self.services.quotas.put_back(exchange.taken)
        self._count_out()
        self.exchange = None
        self._prepared = None
        assert self._head is not None
        # Decided anew, like a request that had to wait: what allowed it may have been taken back meanwhile.
        self._task = self.services.loop.create_task(self._wait(self._decide(self._head), is_retry=True))

    def _settle(self, exchange: Exchange, *, is_whole: bool) -> None:
        """What it cost counts against its limits."""
        assert exchange.taken is not None
        services = self.services
        services.quotas.settle(exchange.taken, exchange.tokens_used(is_whole=is_whole), services.loop.time())
        exchange.taken = None

    def _forget_exchange(self, exchange: Exchange) -> None:
        services = self.services
        self._count_out()
        self.exchange = None
        if exchange.taken is not None:
            self._settle(exchange, is_whole=False)
        if exchange.status is not None:
            services.counters.replies[exchange.status // 100] += 1
            for binding in exchange.plan.forward.bindings:
                if binding.reports_replies and services.tally is not None:
                    services.tally.count(binding, exchange.status)
        if exchange.hits:
            services.counters.secrets_scrubbed += exchange.hits
            # Of several secrets it is not known which one came back.
            for binding in exchange.forward.bindings:
                self._record(LEAK_BLOCKED, forward=exchange.forward, status=exchange.status, binding=binding)
                services.leaks.note(binding.placeholder_id, services.loop.time())

    def _count_out(self) -> None:
        load, self._load = self._load, None
        if load is not None:
            load.count -= 1

    def pause_reading(self) -> None:
        """The upstream is slower than the client, or the client is ahead of its turn."""
        if not self._is_paused and self._out is not None and not self._out.is_closing():
            self._is_paused = True
            self._out.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused and self._out is not None and not self._out.is_closing():
            self._is_paused = False
            self._out.resume_reading()

    # --- saying no ----------------------------------------------------------------------------------------------------

    def _refuse(
        self,
        refusal: Refusal,
        *,
        close: bool = False,
        decided: Refuse | None = None,
        forward: Forward | None = None,
    ) -> None:
        """Answer, record, and go on with the next request where it is certain where that begins."""
        head = self._head
        has_body = head is None or head.framing is Framing.CHUNKED or head.content_length > 0
        close = close or has_body or head is None or not head.keep_alive or self.is_draining
        self._record("refuse", refusal=refusal, decided=decided, forward=forward)
        self.services.counters.refusals[refusal.code.value] += 1
        self.write(
            render_refusal(
                refusal,
                request_id=self._request_id,
                close=close,
                is_head=head is not None and head.method == "HEAD",
            )
        )
        self._linger() if close else self._become_ready()

    def internal_error(self, error: Exception) -> None:
        """Its message stays here: it may quote what was being handled. Even in the log only its place is named."""
        log.error("internal_error", error=type(error).__name__, where=place_of(error), request_id=self._request_id)
        exchange = self.exchange
        if self._is_done or (exchange is not None and exchange.status is not None):
            self.abort()
            return
        if exchange is not None:
            exchange.client_gone()
            self._forget_exchange(exchange)
        try:
            self._refuse(
                Refusal(RefusalCode.INTERNAL_ERROR, "The proxy failed; the request was not sent on."), close=True
            )
        except Exception:  # the border's border
            self.abort()

    def _record(
        self,
        action: str,
        *,
        refusal: Refusal | None = None,
        decided: Refuse | None = None,
        forward: Forward | None = None,
        status: int | None = None,
        binding: Binding | None = None,
    ) -> None:
        """The audit event of this decision; and for a refusal the log line. `binding`: which of several it is about."""
        event = event_of(
            action,
            self.services,
            connection=self._facts,
            request_id=self._request_id,
            head=self._head,
            refusal=refusal,
            decided=decided,
            forward=forward,
            status=status,
            binding=binding,
        )
        self.services.audit.record(event)
        if refusal is not None:
            log.info(
                "refused",
                code=refusal.code.value,
                true_code=refusal.audited_code.value,
                request_id=self._request_id,
                tenant=event.tenant,
                method=event.method,
                host=event.host,
                path=event.path,
                listener=event.listener,
            )

    def _record_again(self, prepared: _Prepared) -> None:
        event, services = prepared.event, self.services
        services.audit.record_again(prepared.room, event.beginning(self._request_id, services.clock()), event.rest)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _become_ready(self) -> None:
        self._is_busy = False
        self._since = self.services.loop.time()
        if self.is_draining:
            self._close()
            return
        if self._is_paused:
            self.resume_reading()
        if self._held and not self._is_reading_heads:
            self._next()

    def _close(self) -> None:
        """What was written is still delivered."""
        self._is_done = True
        self.write = _nothing_more
        self._since = self.services.loop.time()
        if self._out is not None:
            self._out.close()

    def _linger(self) -> None:
        """Close so that the client can read what was written even while it still sends (else it may get a reset)."""
        self._is_done = True
        self._held.clear()
        if self._out is None or self._out.is_closing():
            return
        self.resume_reading()
        self._lingers = True
        self.write = _nothing_more
        self._since = self.services.loop.time()
        self._out.write_eof()

    def abort(self) -> None:
        """At once and uncleanly: the client sees an incomplete message."""
        self._drop_work()
        self.write = _nothing_more
        if self._out is not None:
            self._out.abort()

    def drain(self) -> None:
        """Close now if no request is being answered; else after its reply, which says so if it has not begun."""
        if not self._is_busy and not self._is_done:
            self._close()

    def _client_ended(self, _cleanly: bool) -> None:
        was_busy = self._is_busy
        self._drop_work()
        if self._outlet is not None:
            self._outlet.abort() if was_busy else self._outlet.close()

    def _tls_failed(self, error: ssl.SSLError) -> None:
        log.debug("client_tls_failed", reason=error.reason)
        self._drop_work()
        if self._outlet is not None:
            self._outlet.close()  # after the alert

    def _drop_work(self) -> None:
        self._is_done = True
        self._held.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        exchange = self.exchange
        if exchange is not None:
            self.services.counters.client_gone += 1
            exchange.client_gone()
            self._forget_exchange(exchange)

    def _let_go(self) -> None:
        """Nothing of it refers to itself any more, so that its memory, and OpenSSL's for it, is free at once: cycles
        are looked for seldom (`bootstrap.collect_garbage_seldom`)."""
        self._stage = _nothing_more
        self._spare = self._prepared = None
        for layer in (self._listener_tls, self._tls):
            if layer is not None:
                layer.release()

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Called about twice a second: what has taken too long ends."""
        limits = self.services.timeouts
        if self._is_done:
            self._end_linger(now)
        elif self.exchange is not None:
            if now - self.exchange.began_at > limits.total:
                self.exchange.cut(TOOK_TOO_LONG)
            elif now - self.exchange.active_at > limits.silence:
                self.exchange.cut(self._silence_refusal(self.exchange))
        elif self._is_busy:
            return  # its waits have limits of their own
        elif self._has_partial_head:
            if now - self._since > limits.header:
                self._request_id = self.services.request_ids.next()
                self._head = None
                self._refuse(Refusal(RefusalCode.REQUEST_TIMEOUT, "The head did not arrive in time."), close=True)
        elif now - self._since > (limits.header if self._awaits_hello else limits.idle):
            self._close()
        elif self._prepared is not None and now - self._since > REMEMBERS_SECONDS:
            self._forget_last_request()

    def _forget_last_request(self) -> None:
        """It holds a key, and most of what an idle connection costs. What it said would be decided anew by now."""
        self._prepared = self._spare = self._head = None
        self._raw = b""

    def _end_linger(self, now: float) -> None:
        """A client that does not read its last reply either is not waited for without end."""
        is_read = self._outlet is None or not self._outlet.transport.get_write_buffer_size()
        if now - self._since > (LINGER_SECONDS if is_read else self.services.timeouts.silence):
            self.abort()

    @staticmethod
    def _silence_refusal(exchange: Exchange) -> Refusal:
        if exchange.wants_body:
            return Refusal(RefusalCode.REQUEST_TIMEOUT, "The request's body stopped coming.")
        return Refusal(RefusalCode.UPSTREAM_TIMEOUT, "The destination fell silent.", "Try again, or ask for a stream.")

    @property
    def paused_descriptor(self) -> int | None:
        """The socket to look at for a hang-up while nothing is read from it; None while it is read."""
        if not self._is_paused or self._outlet is None or self._outlet.is_closing():
            return None
        sock = self._outlet.transport.get_extra_info("socket")
        return sock.fileno() if sock is not None else None

    @property
    def may_send_no_more(self) -> bool:
        """Whether the end of what it sends is not yet its own: what came before is still to be read."""
        return self.exchange is not None and self.exchange.outlives_its_client

    def hung_up(self) -> None:
        """The client left while it was not being read."""
        self._client_ended(False)


def _nothing_more(_data: bytes) -> None:
    pass
