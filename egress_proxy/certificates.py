"""Certificates that change while we run: read again when their files do, all of a set or none of it.

Rules: a set of files that cannot be used is refused with a line in the log and a count, and what was there stays; what
is read is swapped in whole; reading, parsing and checking happen off the event loop, and only the files' own dates are
looked at on its tick. When each certificate ends is shown (`/metrics`) and said aloud before it bites.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import structlog
from cryptography import x509

from egress_proxy.ca import UnusableCaError
from egress_proxy.metrics import Counters

LOOK_SECONDS: Final = 2.0
DUE_DAYS: Final = 14
"""So long before its end a certificate is warned about, once a day."""
_DAY_SECONDS: Final = 86_400.0

Signature = tuple[tuple[int, int, int], ...]

log = structlog.get_logger("egress_proxy")


@dataclass(frozen=True, slots=True)
class Source:
    """Files, and what is made of them."""

    name: str
    """For logs and metrics: `listener`, `client_ca`, …"""
    files: tuple[Path, ...]
    certificate_files: tuple[Path, ...]
    """Those of them that hold certificates."""
    load: Callable[[], Any] | None
    """Raises `OSError` (`ssl.SSLError` is one), `ValueError` or `UnusableCaError`. None: it is looked at, no more."""
    adopt: Callable[[Any], None]
    """Takes what was loaded, at once and whole."""
    is_shown: bool = False
    """Whether its first certificate is shown to others, and so is of no use once it has ended."""


@dataclass(frozen=True, slots=True)
class Expiry:
    """When one certificate ends."""

    source: str
    number: int
    """In its source, from 0."""
    ends_at: datetime
    serial: int


@dataclass(slots=True)
class _Watched:
    source: Source
    signature: Signature
    expiries: Sequence[Expiry] = ()
    warned_at: dict[int, float] = field(default_factory=dict)
    """By number: when its end was last said."""


class Certificates:
    """Every source that one worker uses. `tick` is called now and then."""

    def __init__(
        self,
        sources: Sequence[Source],
        counters: Counters,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives unix seconds. Make it before the sources are loaded for the first time, which others do: what
        changes in between is then seen by the first look."""
        self._counters = counters
        self._loop = loop
        self._clock = clock
        self._looked_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._watched = [_Watched(source, _signature(source.files), _expiries(source)) for source in sources]
        self._warn()

    @property
    def seconds_left(self) -> list[tuple[str, int, float]]:
        """(source, number, seconds until it ends) of each certificate; negative once it has ended."""
        now = self._clock()
        return [
            (expiry.source, expiry.number, expiry.ends_at.timestamp() - now)
            for watched in self._watched
            for expiry in watched.expiries
        ]

    @property
    def is_reading(self) -> bool:
        return self._reading is not None

    def tick(self, now: float) -> None:
        """`now` is the loop's."""
        if now - self._looked_at < LOOK_SECONDS or self._reading is not None:
            return
        self._looked_at = now
        self._warn()
        changed = [each for each in self._watched if _signature(each.source.files) != each.signature]
        if changed:
            self._reading = self._loop.create_task(self._read(changed))

    def stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, changed: Sequence[_Watched]) -> None:
        try:
            for watched in changed:
                await self._reread(watched)
        finally:
            self._reading = None

    async def _reread(self, watched: _Watched) -> None:
        source = watched.source
        # Noted before it is read: what changes meanwhile is seen by the next look. A bad set is not read twice.
        watched.signature = _signature(source.files)
        try:
            loaded, expiries = await self._loop.run_in_executor(None, _load, source, self._clock())
        except (OSError, ValueError, UnusableCaError) as error:
            self._counters.certificate_reloads["refused"] += 1
            reason = str(error) if isinstance(error, UnusableCaError) else type(error).__name__
            log.error("certificates_refused", source=source.name, reason=reason)  # noqa: TRY400 - no message of OpenSSL's
            return
        if source.load is not None:
            source.adopt(loaded)
        watched.expiries, watched.warned_at = expiries, {}
        self._counters.certificate_reloads["adopted"] += 1
        log.info("certificates_adopted", source=source.name, certificates=len(expiries))
        self._warn()

    def _warn(self) -> None:
        now = self._clock()
        for watched in self._watched:
            for expiry in watched.expiries:
                left = expiry.ends_at.timestamp() - now
                last = watched.warned_at.get(expiry.number)
                if left > DUE_DAYS * _DAY_SECONDS or (last is not None and now - last < _DAY_SECONDS):
                    continue
                watched.warned_at[expiry.number] = now
                log.warning(
                    "certificate_ends_soon" if left > 0 else "certificate_has_ended",
                    source=expiry.source,
                    serial=f"{expiry.serial:x}",
                    ends_at=expiry.ends_at.isoformat(),
                    days_left=int(left // _DAY_SECONDS),
                )


def _load(source: Source, now: float) -> tuple[Any, Sequence[Expiry]]:
    """In a thread."""
    loaded = source.load() if source.load is not None else None
    expiries = _expiries(source)
    if source.is_shown and expiries and expiries[0].ends_at.timestamp() <= now:
        raise UnusableCaError("it has ended already")
    return loaded, expiries


def _signature(files: Sequence[Path]) -> Signature:
    """Of a mounted Secret, too: there a link is turned, and the file at its end is another one."""
    return tuple(_stat(file) for file in files)


def _stat(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError:
        return (0, 0, 0)  # while it is being replaced
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _expiries(source: Source) -> Sequence[Expiry]:
    """None for files that are no good: whoever loads them says what is wrong."""
    try:
        certificates = [
            certificate
            for file in source.certificate_files
            for certificate in x509.load_pem_x509_certificates(file.read_bytes())
        ]
    except (OSError, ValueError):
        return ()
    return [
        Expiry(source.name, number, certificate.not_valid_after_utc, certificate.serial_number)
        for number, certificate in enumerate(certificates)
    ]
