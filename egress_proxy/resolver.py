"""The connection to the control plane: questions, tag keys, events, the audit trail.

Rules: each question is asked once at a time, however many requests wait for it; an outage is an answer (`credential_
unavailable`), never "unknown"; the event stream is read for as long as the worker lives, and taken up again where it
broke off.
"""

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

import httpx
import structlog

from control_plane.contract.wire import (
    EVENT,
    INJECTOR_SECONDS,
    QUOTA_ANSWER,
    QUOTA_REQUEST,
    RESOLVE_ANSWER,
    RESOLVE_REQUEST,
    SILENCE_SECONDS,
    TAG_KEYS,
    Ask,
    Event,
    QuotaAnswer,
    QuotaEntry,
    QuotaRequest,
    Refused,
    ResolveAnswer,
    ResolveRequest,
    WireError,
    join_audit_batch,
    read,
    write,
)
from egress_proxy.cache import Cache, UnexpectedAnswerError
from egress_proxy.client_proof import ByCertificate, ClientProof, ProofMissingError
from egress_proxy.metrics import Counters

ASK_SECONDS: Final = 5.0
MAX_ATTEMPTS: Final = 4
"""An answer may be overtaken by an event; after so many the control plane counts as unavailable."""
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 2.0

log = structlog.get_logger("egress_proxy.resolver")


class ControlPlaneError(Exception):
    """It did not answer, or not as the contract says."""


class ControlPlaneClient:
    """`/internal`, as a client of kind `egress_proxy`."""

    def __init__(self, *, url: str, proof: ClientProof, verify: ssl.SSLContext | bool) -> None:
        self._proof = proof
        self.is_known = True
        """False once it said that it does not know us, until it does: an outage changes nothing."""
        self._http = httpx.AsyncClient(
            base_url=url,
            verify=verify,
            timeout=httpx.Timeout(ASK_SECONDS),
            trust_env=False,  # a proxy variable of this process's environment must not route this
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def tag_keys(self) -> tuple[tuple[bytes, ...], str, int]:
        """(ring, epoch, sequence). Raises `ControlPlaneError`."""
        answer = await self._send("GET", "/internal/tag-keys")
        try:
            keys = read(TAG_KEYS, answer)
            return tuple(bytes.fromhex(key) for key in keys.keys_hex), keys.epoch, keys.as_of
        except (WireError, ValueError) as error:
            raise ControlPlaneError("unreadable tag keys") from error

    async def resolve(self, ask: Ask) -> ResolveAnswer:
        """Raises `ControlPlaneError`."""
        answer = await self._send("POST", "/internal/resolve", write(RESOLVE_REQUEST, ResolveRequest(ask)))
        try:
            return read(RESOLVE_ANSWER, answer)
        except WireError as error:
            raise ControlPlaneError(str(error)) from error

    async def register(self) -> None:
        """Says that this proxy is there and swaps. Raises `ControlPlaneError`."""
        await self._send("POST", "/internal/injector")

    async def deliver(self, pieces: Sequence[bytes], dropped: int) -> None:
        """Raises `ControlPlaneError` unless the batch was taken."""
        await self._send("POST", "/internal/audit", join_audit_batch(pieces, dropped=dropped))

    async def quota(self, entries: Sequence[QuotaEntry]) -> QuotaAnswer:
        """Raises `ControlPlaneError`."""
        answer = await self._send("POST", "/internal/quota", write(QUOTA_REQUEST, QuotaRequest(tuple(entries))))
        try:
            return read(QUOTA_ANSWER, answer)
        except WireError as error:
            raise ControlPlaneError(str(error)) from error

    async def events(self, *, after: int) -> AsyncGenerator[Event]:
        """Until the stream breaks or falls silent; then raises `ControlPlaneError`."""
        timeout = httpx.Timeout(ASK_SECONDS, read=SILENCE_SECONDS)
        try:
            async with self._http.stream(
                "GET", "/internal/events", params={"after": after}, headers=self._proof.headers(), timeout=timeout
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise self._refused(response.status_code)
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        yield read(EVENT, line[len("data:") :].strip())
        except WireError as error:
            raise ControlPlaneError(str(error)) from error
        except (ProofMissingError, httpx.HTTPError) as error:
            raise self._failed(error) from error
        raise ControlPlaneError("the event stream ended")

    async def _send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            headers |= self._proof.headers()
            response = await self._http.request(method, path, content=body, headers=headers)
        except (ProofMissingError, httpx.HTTPError) as error:
            raise self._failed(error) from error
        if not response.is_success:
            raise self._refused(response.status_code)
        self.is_known = True
        return response.content

    def _refused(self, status: int) -> ControlPlaneError:
        if status not in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            return ControlPlaneError(f"answered {status}")
        self.is_known = False
        return ControlPlaneError(f"answered {status}: it does not know this proxy by {self._proof.described()}")

    def _failed(self, error: Exception) -> ControlPlaneError:
        if isinstance(error, ProofMissingError):
            self.is_known = False
            return ControlPlaneError(str(error))
        if isinstance(self._proof, ByCertificate) and isinstance(error, httpx.ReadError | httpx.RemoteProtocolError):
            # In TLS 1.3 our side of the handshake is over before a server says so, and many just end the connection.
            return ControlPlaneError(f"{type(error).__name__}: perhaps it does not take {self._proof.described()}")
        return ControlPlaneError(type(error).__name__)


async def stay_registered(client: ControlPlaneClient, *, every_seconds: float = INJECTOR_SECONDS) -> None:
    """Registers, and says again and again that we are there; for ever.

    What it is good for: a control plane that knows of a proxy never hands out a key itself, whether or not it hears of
    the proxy. Nothing here waits for it.
    """
    was_heard = True
    while True:
        try:
            await client.register()
            was_heard = True
        except ControlPlaneError as error:
            if was_heard:
                log.warning("registration_failed", reason=str(error))
            was_heard = False
        await asyncio.sleep(every_seconds)


class Resolver:
    """Keeps one worker's cache filled and true."""

    def __init__(
        self,
        client: ControlPlaneClient,
        cache: Cache,
        counters: Counters,
        *,
        on_revoked: Callable[[Event], None],
        on_missed: Callable[[], None],
    ) -> None:
        """`on_revoked` is called for every event that ends what is under way; `on_missed` when one may be lost."""
        self._client = client
        self._cache = cache
        self._counters = counters
        self._on_revoked = on_revoked
        self._on_missed = on_missed
        self._asking: dict[Ask, asyncio.Future[None]] = {}

    async def ask(self, ask: Ask) -> None:
        """Have the question answered into the cache, also with a refusal. Raises nothing for an outage."""
        asking = self._asking.get(ask)
        if asking is None:
            asking = self._asking[ask] = asyncio.ensure_future(self._ask(ask))
        # Shielded: one client that leaves does not take the answer from the others that wait for it.
        await asyncio.shield(asking)

    async def run(self) -> None:
        """Fetch the tag keys, then follow the events; for ever."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self.refresh_tag_keys()
                async with contextlib.aclosing(self._client.events(after=self._cache.sequence)) as events:
                    async for event in events:
                        pause = FIRST_PAUSE_SECONDS
                        if not await self._hear(event):
                            break
            except ControlPlaneError as error:
                log.warning("control_plane_unreachable", reason=str(error), retry_in_seconds=round(pause, 1))
            except Exception as error:  # border: whatever it was, the next attempt begins anew
                log.error("event_stream_failed", error=type(error).__name__)  # noqa: TRY400 - no message of it
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads the replicas, no more
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def refresh_tag_keys(self) -> None:
        """Raises `ControlPlaneError`."""
        keys, epoch, as_of = await self._client.tag_keys()
        # Events after the sequence we have are still to come: only a new or restored outbox moves us.
        self._cache.set_tag_keys(keys, epoch=epoch, as_of=as_of)
        self._note_drops()

    async def _hear(self, event: Event) -> bool:
        """False: something was missed; begin anew."""
        in_order = self._cache.hear(event)
        self._note_drops()
        if event.revoked:
            self._on_revoked(event)
        if event.kind == "tag_keys":
            await self.refresh_tag_keys()
        if not in_order:
            log.warning("events_missed", sequence=event.sequence)
        return in_order

    def _note_drops(self) -> None:
        if self._counters.cache_drops != self._cache.drops:
            self._counters.cache_drops = self._cache.drops
            self._on_missed()

    async def _ask(self, ask: Ask) -> None:
        try:
            for _ in range(MAX_ATTEMPTS):
                answer = await self._client.resolve(ask)
                if answer.epoch != self._cache.epoch:
                    await self.refresh_tag_keys()
                taken = self._cache.take(ask, answer)
                self._note_drops()
                if taken:
                    outcome = "refused" if isinstance(answer.answer, Refused) else "answered"
                    self._counters.resolves[outcome] += 1
                    return
            reason = "overtaken by events"
        except (ControlPlaneError, UnexpectedAnswerError) as error:
            reason = str(error)
        finally:
            # Before anybody goes on: who finds the answer gone again asks anew, and does not wait for this one.
            del self._asking[ask]
        self._counters.resolves["failed"] += 1
        log.warning("resolve_failed", question=ask.kind, reason=reason)
        self._cache.could_not_ask(ask)
