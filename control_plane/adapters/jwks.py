"""The public keys of issuers and clients: pinned, or fetched and kept for a while (`ports.PublicKeys`).

Rule: where a set is fetched from is what the platform's administrator said, never what a token says. How often is
bounded, whoever sends what: at most `FETCHES_A_WINDOW` of one source in `WINDOW_SECONDS`, one at a time.

- Younger than `max_age_seconds`: the kept set answers. A key id that it does not hold is looked up again.
- Older: it is fetched again before it answers, so that a key which was taken out verifies nothing any more.
- The fetch fails (also: no answer of status 200, no key set): the last good set serves until it is `max_stale_seconds`
  old, and then nothing verifies. An empty set is an answer: all keys were taken out.
"""

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from control_plane.core.identity import KeySource
from control_plane.core.jwk import UnusableKeyError, VerificationKey, named, read_jwks, usable
from control_plane.ports import Clock, KeysUnavailableError, Outbound, OutboundError, OutboundReply, OutboundRequest

WINDOW_SECONDS: Final = 60.0
FETCHES_A_WINDOW: Final = 2
DISCOVERY_SECONDS: Final = 3_600.0
"""How long a discovery document says where the keys are, unless they are not there any more."""
MAX_SOURCES: Final = 1_024
_OK: Final = 200

_log = structlog.get_logger("control_plane.jwks")


@dataclass(slots=True)
class _Kept:
    """What is known of one source."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    fetches: deque[float] = field(default_factory=lambda: deque(maxlen=FETCHES_A_WINDOW))
    keys: tuple[VerificationKey, ...] = ()
    fetched_at: float | None = None
    """When the kept set came; None where none ever came."""
    jwks_url: str | None = None
    discovered_at: float = 0.0

    def age(self, now: float) -> float:
        return float("inf") if self.fetched_at is None else now - self.fetched_at

    def may_fetch(self, now: float) -> bool:
        return len(self.fetches) < FETCHES_A_WINDOW or now - self.fetches[0] >= WINDOW_SECONDS


class FetchedKeys:
    def __init__(self, outbound: Outbound, *, clock: Clock) -> None:
        self._outbound = outbound
        self._clock = clock
        self._sources: dict[tuple[str | None, str | None], _Kept] = {}

    async def of(self, source: KeySource, *, key_id: str | None) -> Sequence[VerificationKey]:
        """Raises `KeysUnavailableError`."""
        if source.pinned:
            return usable(source.pinned)
        kept = self._kept(source)
        # (1) What is kept is young enough, and knows the key.
        if self._answers(kept, source, key_id):
            return kept.keys
        # (2) It is fetched again, by one caller for all who wait, and not too often.
        async with kept.lock:
            if not self._answers(kept, source, key_id) and kept.may_fetch(self._clock()):
                await self._refresh(kept, source)
        # (3) What is kept now is good, or was and the source is away: up to the stated limit.
        if kept.age(self._clock()) < max(source.max_stale_seconds, source.max_age_seconds):
            return kept.keys
        raise KeysUnavailableError("the issuer's keys cannot be fetched, and no kept ones are young enough")

    def _answers(self, kept: _Kept, source: KeySource, key_id: str | None) -> bool:
        return kept.age(self._clock()) < source.max_age_seconds and bool(named(kept.keys, key_id))

    def _kept(self, source: KeySource) -> _Kept:
        name = (source.discovery, source.jwks_url)
        kept = self._sources.pop(name, None) or _Kept()
        self._sources[name] = kept  # the one used last stands last
        while len(self._sources) > MAX_SOURCES:
            del self._sources[next(iter(self._sources))]
        return kept

    async def _refresh(self, kept: _Kept, source: KeySource) -> None:
        kept.fetches.append(self._clock())
        try:
            url = source.jwks_url or await self._discovered(kept, str(source.discovery))
            keys = read_jwks((await self._fetched(url)).body)
        except (OutboundError, UnusableKeyError, KeysUnavailableError) as error:
            kept.jwks_url = None  # it may be published elsewhere by now
            _log.warning("keys_not_fetched", source=_host(source), reason=str(error))
            return
        kept.keys, kept.fetched_at = keys, self._clock()

    async def _discovered(self, kept: _Kept, issuer: str) -> str:
        """OpenID Connect Discovery 1.0 §4. Raises `KeysUnavailableError`, `OutboundError`."""
        now = self._clock()
        if kept.jwks_url is not None and now - kept.discovered_at < DISCOVERY_SECONDS:
            return kept.jwks_url
        reply = await self._fetched(issuer.rstrip("/") + "/.well-known/openid-configuration")
        document = _json_object(reply.body)
        # §4.3: the document is this issuer's own, or somebody else's keys would become its keys.
        if document.get("issuer") != issuer:
            raise KeysUnavailableError("the discovery document is not this issuer's")
        url = document.get("jwks_uri")
        if not isinstance(url, str):
            raise KeysUnavailableError("the discovery document names no key set")
        kept.jwks_url, kept.discovered_at = url, now
        return url

    async def _fetched(self, url: str) -> OutboundReply:
        reply = await self._outbound.send(OutboundRequest("GET", url, headers={"Accept": "application/json"}))
        if reply.status != _OK:
            raise KeysUnavailableError(f"status {reply.status}")
        return reply


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise KeysUnavailableError("the discovery document is not a JSON object")
    return found


def _host(source: KeySource) -> str | None:
    return urlsplit(source.jwks_url or source.discovery or "").hostname
