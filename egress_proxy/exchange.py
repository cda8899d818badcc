"""One request and its reply: bytes carried both ways, as they come, with the pace of the slower side.

This is the hot path: no task, no timer, no buffer of its own beyond a head or a piece of a chunk line (`make bench`
shows what these cost). It is driven by the client's connection on one side and the upstream's on the other.

Rules:
- The secret leaves in one write, and is kept nowhere.
- Whatever of a swapped reply reaches the client went through the scrubber, its head included. Coded bodies cannot be
  scrubbed, and are refused.
- A reply that breaks off is never ended cleanly: the client's connection is aborted (RFC 9112 §8).
- A client that is gone takes its upstream connection with it, at once; but where both sides are carried as they come
  (WebSocket, unopened tunnels), what a side sent before it ended is still sent on (RFC 9110 §9.3.6).
- Trailers are dropped, both ways. A half-closed client counts as gone.
- `Expect: 100-continue` is the upstream's to answer; when it says nothing for `CONTINUE_SECONDS`, the proxy does,
  because clients wait a second or for ever (RFC 9110 §10.1.1).
"""

import asyncio
from typing import TYPE_CHECKING, Final

from control_plane.contract.refusal import Refusal, RefusalCode
from control_plane.contract.wire import Measure
from egress_proxy.core.decision import Forward
from egress_proxy.core.http1 import (
    HEAD_END,
    LAST_CHUNK,
    MAX_HEAD_BYTES,
    ChunkedReader,
    ChunkError,
    Framing,
    ResponseHead,
    UpstreamProtocolError,
    chunk,
    parse_response_head,
)
from egress_proxy.core.plan import MAX_REMEMBERED_REPLY_BYTES, Plan, RepeatedReply
from egress_proxy.core.quota import Taken
from egress_proxy.core.scrub import LeakError, Scrubber
from egress_proxy.core.substitution import render_response
from egress_proxy.core.usage import MeteringScrubber, tokens_used
from egress_proxy.upstream import UpstreamConnection

if TYPE_CHECKING:
    from egress_proxy.client import ClientConnection
    from egress_proxy.services import Services

CONTINUE_SECONDS: Final = 0.4
MAX_INTERIM_REPLIES: Final = 16
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_REPEATABLE: Final = frozenset(("GET", "HEAD", "OPTIONS"))


class UnsearchableReplyError(Exception):
    """A swapped request was answered in a coding that hides what is in it."""


class Exchange:
    """Begins when an upstream connection is there; ends with `client.exchange_ended` or `client.exchange_failed`."""

    __slots__ = (
        "_chunks_in",
        "_chunks_out",
        "_client",
        "_continue_timer",
        "_interim_replies",
        "_is_on_used_connection",
        "_is_opaque",
        "_is_whole",
        "_loop",
        "_may_continue",
        "_reply",
        "_reply_buffer",
        "_reply_framing",
        "_reply_left",
        "_request_left",
        "_scrubber",
        "_services",
        "_upstream",
        "active_at",
        "began_at",
        "closes_client",
        "head",
        "plan",
        "request_id",
        "taken",
        "wants_body",
        "was_retried",
    )

    def __init__(
        self,
        client: "ClientConnection",
        plan: Plan,
        *,
        request_id: str,
        services: "Services",
    ) -> None:
        head = plan.head
        self._client = client
        self._services = services
        self._loop = services.loop
        self._upstream: UpstreamConnection | None = None
        self._is_on_used_connection = False
        self._scrubber = _scrubber_of(plan)
        # the request's body
        self.wants_body = head.framing is Framing.CHUNKED or head.content_length > 0
        self._request_left = head.content_length
        self._chunks_in = ChunkedReader() if head.framing is Framing.CHUNKED else None
        self._may_continue = head.expects_continue and self.wants_body
        self._continue_timer: asyncio.TimerHandle | None = None
        # the reply
        self._is_whole = False
        self._is_opaque = False
        self._interim_replies = 0
        self._reply: ResponseHead | None = None
        self._reply_buffer = b""
        self._reply_framing = Framing.NONE
        self._reply_left = 0
        self._chunks_out: ChunkedReader | None = None
        self.active_at = self.began_at = 0.0
        self.closes_client = not head.keep_alive
        self.head = head
        self.plan = plan
        self.request_id = request_id
        self.was_retried = False
        self.taken: Taken | None = None
        """What it took of its limits."""

    @property
    def forward(self) -> Forward:
        """What was decided."""
        return self.plan.forward

    @property
    def status(self) -> int | None:
        """The reply's, once its head is there; what is carried unopened had its 200 before."""
        if self._reply is not None:
            return self._reply.status
        return 200 if self._is_opaque else None

    @property
    def hits(self) -> int:
        """How often the secret was overwritten in the reply."""
        return self._scrubber.hits if self._scrubber is not None else 0

    def tokens_used(self, *, is_whole: bool) -> int:
        """What it cost, for limits that count tokens."""
        return tokens_used(
            self._scrubber.usage if isinstance(self._scrubber, MeteringScrubber) else None,
            method=self.head.method,
            status=self.status,
            request_bytes=self.head.content_length,
            is_whole=is_whole,
        )

    # --- the request ---

    def again(self, request_id: str, upstream: UpstreamConnection, wire: bytes) -> None:
        """The same plan once more, all of the request in `wire`: only where `served_whole` said so of the last time."""
        self.request_id = request_id
        self.was_retried = False
        self._is_whole = False
        self._interim_replies = 0
        self._reply = None
        self._upstream = upstream
        self._is_on_used_connection = upstream.was_used
        self.active_at = self.began_at = self._loop.time()
        upstream.reader = self
        upstream.write(wire)

    def carry(self, upstream: UpstreamConnection, *, client_is_slow: bool) -> None:
        """Nothing of a request or a reply: bytes both ways, as they come, until one side ends."""
        self._upstream = upstream
        self.active_at = self.began_at = self._loop.time()
        self._is_opaque = self.wants_body = self.closes_client = True
        upstream.reader = self
        if client_is_slow:
            self.client_pause_writing()

    @property
    def served_whole(self) -> bool:
        """Whether request and reply were whole pieces, and nothing but the two is left of them here."""
        return self._is_whole and not self.hits

    def begin(self, upstream: UpstreamConnection, *, client_is_slow: bool) -> None:
        """Send the head; the body follows through `request_data`."""
        self._upstream = upstream
        self._is_on_used_connection = upstream.was_used
        self.active_at = self.began_at = self._loop.time()
        upstream.reader = self
        if client_is_slow:
            self.client_pause_writing()
        upstream.write(self.plan.render())
        if self._may_continue:
            self._continue_timer = self._loop.call_later(CONTINUE_SECONDS, self._continue_ourselves)

    def request_data(self, data: bytes) -> bytes:
        """Send what of `data` belongs to this request's body; gives back the bytes after it."""
        upstream = self._upstream
        if upstream is None:
            return data
        self.active_at = self._loop.time()
        if self._is_opaque:
            upstream.write(data)
            return b""
        self._no_continue()
        if self._chunks_in is None:
            body, rest = data[: self._request_left], data[self._request_left :]
            self._request_left -= len(body)
            self.wants_body = self._request_left > 0
            upstream.write(body)
            return rest
        try:
            pieces = [chunk(piece) for piece in self._chunks_in.feed(data)]
        except ChunkError:
            self._fail(RefusalCode.AMBIGUOUS_FRAMING, "The chunked body is not well formed.")
            return b""
        if self._chunks_in.complete:
            self.wants_body = False
            pieces.append(LAST_CHUNK)
        upstream.write(b"".join(pieces))
        return self._chunks_in.rest

    # --- the reply: what the upstream connection calls ---

    def upstream_data(self, data: bytes) -> None:
        self.active_at = self._loop.time()
        try:
            if self._reply is not None or self._is_opaque:
                out = self._reply_body(data)
            elif out := self._whole_reply(data):
                self._client.write(out)
                self._served()
                return
            else:
                out = self._reply_head(data)
        except UpstreamProtocolError as error:
            self._fail(RefusalCode.UPSTREAM_PROTOCOL_ERROR, f"The upstream's reply cannot be passed on: {error}.")
            return
        except UnsearchableReplyError:
            self._fail(
                RefusalCode.RESPONSE_LEAK_BLOCKED,
                "The upstream answered in a content coding that was not asked for, so the reply cannot be searched.",
            )
            return
        except LeakError:
            self._fail(
                RefusalCode.RESPONSE_LEAK_BLOCKED,
                "The upstream's reply held the credential's secret, which is too short to be cut out of it.",
                "Use a longer secret; and see why the upstream sends it back.",
            )
            return
        except Exception as error:  # border: called by the upstream's transport, which would only log it
            self._client.internal_error(error)
            return
        if out:
            self._client.write(out)
        if self._is_opaque:
            self._client.exchange_takes_more()
        elif self._reply is not None and self._reply_framing is Framing.NONE:
            self._reply_is_complete()

    def upstream_ended(self, *, cleanly: bool) -> None:
        self._upstream = None
        if self._is_opaque:
            # It may be sending still: closed at once, it might get a reset in the place of the last bytes.
            self._client.exchange_ended(self, body_is_unread=True)
        elif self._reply is not None and self._reply_framing is Framing.UNTIL_CLOSE and cleanly:
            self._client.write(self._last_of_reply())
            self._reply_is_complete()
        elif self._reply is None and not self._reply_buffer and self._may_be_repeated():
            self.was_retried = True
            self._client.exchange_to_be_repeated(self)
        else:
            self._fail(
                RefusalCode.UPSTREAM_PROTOCOL_ERROR,
                "The upstream closed the connection before its reply was complete.",
                "The request may have been carried out; look before you repeat it.",
            )

    def upstream_pause_writing(self) -> None:
        self._client.pause_reading()

    def upstream_resume_writing(self) -> None:
        self._client.resume_reading()

    # --- what the client connection calls ---

    def client_pause_writing(self) -> None:
        if self._upstream is not None:
            self._upstream.pause_reading()

    def client_resume_writing(self) -> None:
        if self._upstream is not None:
            self._upstream.resume_reading()

    def client_gone(self) -> None:
        if self._is_opaque and self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.end()
        else:
            self._release(reusable=False)

    @property
    def outlives_its_client(self) -> bool:
        """Whether a client that sends no more is still to be read to its last byte."""
        return self._is_opaque

    async def recheck(self) -> None:
        """Cut it if it would be refused by now."""
        refusal = await self._client.taken_back()
        if refusal is not None and self._client.exchange is self:
            self._services.counters.streams_cut += 1
            self.cut(refusal)

    def cut(self, refusal: Refusal) -> None:
        """End it now, whatever its state: with this refusal, or by breaking off a reply that has begun."""
        self._release(reusable=False)
        self._client.exchange_failed(self, refusal)

    # --- the reply's head ---

    def _whole_reply(self, data: bytes) -> bytes:
        """What to send on, where the last reply's head comes again with all of its body; else empty."""
        known = self.plan.reply
        if known is None or self._reply_buffer or self.closes_client or self.wants_body or self._services.is_draining:
            return b""
        head, raw = known.head, known.raw
        is_whole = head.framing is Framing.LENGTH and len(data) == len(raw) + head.content_length
        if not is_whole or not head.content_length or not data.startswith(raw):
            return b""
        if self._scrubber is None:
            body = data[len(raw) :]
        elif head.is_coded:
            return b""
        else:
            body = self._scrubber.whole(data[len(raw) :])
        self._reply = head
        self._is_whole = True
        return known.rendered + body

    def _reply_head(self, data: bytes) -> bytes:
        """What to send on, from bytes that hold (a part of) a head. Raises `UpstreamProtocolError` and `LeakError`."""
        try:
            return self._beginning(data)
        except (UpstreamProtocolError, LeakError):
            # Of what came with the head nothing has gone to the client: it can still be told.
            self._reply, self._is_opaque = None, False
            raise

    def _beginning(self, data: bytes) -> bytes:
        data = self._reply_buffer + data if self._reply_buffer else data
        self._reply_buffer = b""
        interim = b""
        while True:
            end = data.find(HEAD_END)
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise UpstreamProtocolError("the reply's head is too large")
                if not b"HTTP/1.".startswith(data[:7]):
                    raise UpstreamProtocolError("the reply is not HTTP/1.1")
                self._reply_buffer = data
                return interim
            end += len(HEAD_END)
            raw, data = data[:end], data[end:]
            known = self.plan.reply
            if known is not None and known.raw == raw:
                return interim + self._final_head(known.head, data, known=known)
            head = parse_response_head(raw, request_method=self.head.method, websocket_asked=self.head.opens_websocket)
            if head.status >= 200:
                return interim + self._final_head(head, data, raw=raw)
            if head.status == 101:
                return interim + self._switch(head) + data
            interim += self._interim_head(head)

    def _switch(self, head: ResponseHead) -> bytes:
        """From here on both sides are carried as they come, until one of them ends (RFC 6455): frames are opaque."""
        self._no_continue()
        self._reply = head
        self._is_opaque = self.wants_body = self.closes_client = True
        return self._scrubbed_head(render_response(head, framing=Framing.NONE, close=False))

    def _interim_head(self, head: ResponseHead) -> bytes:
        self._interim_replies += 1
        if self._interim_replies > MAX_INTERIM_REPLIES:
            raise UpstreamProtocolError("the upstream sends interim replies without end")
        if head.status == 100:
            if not self._may_continue:
                return b""  # not asked for, or the proxy was quicker
            self._no_continue()
        return self._scrubbed_head(render_response(head, framing=Framing.NONE, close=False))

    def _final_head(
        self, head: ResponseHead, body: bytes, *, raw: bytes = b"", known: RepeatedReply | None = None
    ) -> bytes:
        self._no_continue()
        cannot_be_searched = self._scrubber is not None and head.is_coded and head.framing is not Framing.NONE
        if cannot_be_searched and not self.plan.forward.handling.unsearchable:
            raise UnsearchableReplyError
        self._reply = head
        self._reply_left = head.content_length
        if head.framing is Framing.CHUNKED:
            self._chunks_out = ChunkedReader()
        # A body without a length goes on in chunks, so that the client can tell its end from a cut.
        to_client = Framing.CHUNKED if head.framing is Framing.UNTIL_CLOSE else head.framing
        # The rest of a body that the upstream no longer wants cannot be told from a next request.
        self.closes_client = self.closes_client or self.wants_body or self._client.is_draining
        if known is not None and not self.closes_client:
            rendered = known.rendered
        else:
            route = self.plan.forward.route
            unscrubbed = render_response(head, framing=to_client, close=self.closes_client, route=route)
            rendered = self._scrubbed_head(unscrubbed)
            if rendered == unscrubbed and not self.closes_client and len(raw) <= MAX_REMEMBERED_REPLY_BYTES:
                self.plan.reply = RepeatedReply(raw, head, rendered)
        has_no_body = head.framing is Framing.LENGTH and head.content_length == 0
        self._reply_framing = Framing.NONE if has_no_body else head.framing
        if self._reply_framing is not Framing.NONE:
            return rendered + self._reply_body(body) if body else rendered
        self._note_unasked(body)
        return rendered

    def _scrubbed_head(self, rendered: bytes) -> bytes:
        return rendered if self._scrubber is None else self._scrubber.whole(rendered)

    # --- the reply's body ---

    def _reply_body(self, data: bytes) -> bytes:
        """What to send on, from bytes that hold (a part of) the body. Raises `UpstreamProtocolError`."""
        if self._is_opaque:
            return data
        if self._reply_framing is Framing.LENGTH:
            left = self._reply_left
            if len(data) < left:
                self._reply_left = left - len(data)
                return data if self._scrubber is None else self._scrubber.feed(data)
            body, unasked = data[:left], data[left:]
            self._reply_framing = Framing.NONE
            self._note_unasked(unasked)
            return body if self._scrubber is None else self._scrubber.last(body)
        if self._reply_framing is Framing.UNTIL_CLOSE:
            body = data if self._scrubber is None else self._scrubber.feed(data)
            return chunk(body) if body else b""
        if self._chunks_out is None:
            self._note_unasked(data)
            return b""
        try:
            body = b"".join(self._chunks_out.feed(data))
        except ChunkError as error:
            raise UpstreamProtocolError(str(error)) from None
        if self._scrubber is not None:
            body = self._scrubber.feed(body)
        out = chunk(body) if body else b""
        if self._chunks_out.complete:
            self._reply_framing = Framing.NONE
            self._note_unasked(self._chunks_out.rest)
            out += self._last_of_reply()
        return out

    def _last_of_reply(self) -> bytes:
        held = self._scrubber.finish() if self._scrubber is not None else b""
        return (chunk(held) if held else b"") + LAST_CHUNK

    def _note_unasked(self, data: bytes) -> None:
        """Bytes after the reply's end: whatever they are, the connection is not used again."""
        if data and self._upstream is not None:
            upstream, self._upstream = self._upstream, None
            upstream.close()

    # --- ends ---

    def _served(self) -> None:
        """Request and reply were one whole piece each. Hot path: `_reply_is_complete`, where nothing else is left."""
        if self.taken is not None or self._upstream is None or self.hits or self._continue_timer is not None:
            self._reply_is_complete()
            return
        upstream, self._upstream = self._upstream, None
        upstream.reader = None
        assert self._reply is not None
        if self._reply.keep_alive:
            self._services.upstreams.give_back(upstream)
        else:
            upstream.close()
        self._client.exchange_served(self, self._reply.status)

    def _reply_is_complete(self) -> None:
        reply = self._reply
        assert reply is not None
        was_read_whole = not self.wants_body
        self._release(reusable=reply.keep_alive and was_read_whole)
        self._client.exchange_ended(self, body_is_unread=not was_read_whole)

    def _fail(self, code: RefusalCode, detail: str, hint: str = "") -> None:
        self._release(reusable=False)
        self._client.exchange_failed(self, Refusal(code, detail, hint))

    def _release(self, *, reusable: bool) -> None:
        if self._may_continue or self._continue_timer is not None:
            self._no_continue()
        upstream, self._upstream = self._upstream, None
        if upstream is None:
            return
        upstream.reader = None
        if reusable:
            self._services.upstreams.give_back(upstream)
        else:
            upstream.close()

    def _may_be_repeated(self) -> bool:
        """A pooled connection may have been closed at the other end just as it was taken. Only what is safe to carry
        out twice is sent again, and only when nothing of a reply came (RFC 9110 §9.2.2, RFC 9112 §9.3.1)."""
        head = self.head
        is_stale = self._is_on_used_connection and not self.was_retried
        return is_stale and head.method in _REPEATABLE and head.framing is Framing.NONE

    def _continue_ourselves(self) -> None:
        self._continue_timer = None
        if self._may_continue and self._reply is None:
            self._may_continue = False
            self._client.write(CONTINUE)

    def _no_continue(self) -> None:
        self._may_continue = False
        if self._continue_timer is not None:
            self._continue_timer.cancel()
            self._continue_timer = None


def _scrubber_of(plan: Plan) -> Scrubber | None:
    """What the reply passes through. Only where its tokens count it is read, too."""
    if not plan.needles:
        return None
    if any(limit.measure is Measure.TOKENS for limit in plan.forward.limits):
        return MeteringScrubber(plan.needles)
    return Scrubber(plan.needles)
