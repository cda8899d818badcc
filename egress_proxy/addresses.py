"""Names into addresses that may be dialled.

Rule: a name is resolved once, every address of the answer is judged, and only a judged address is dialled. What a name
means may change between two look-ups (DNS rebinding); what was judged is what is dialled. An answer is used for as long
as it holds, within bounds, and beyond that only while nobody can be asked (RFC 8767). The proxy's own listeners are
never a destination, whatever a rule says.
"""

import asyncio
import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from control_plane.contract.address import is_public
from control_plane.contract.destination import is_ip_literal
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError
from egress_proxy.names import Names, NoSuchNameError, NotAnsweredError

SHORTEST_SECONDS: Final = 5.0
"""So long every answer is used: what says 0, or stands in the hosts file, is not asked for with every request."""
LONGEST_SECONDS: Final = 300.0
"""And no answer longer than this, whatever it says: a server that moves is followed."""
AHEAD: Final = 0.8
"""After so much of its life an answer in use is asked for anew, beside: nobody waits for a name that is in use."""
STALE_SECONDS: Final = 60.0
"""So long beyond its end an answer is used where nobody answers."""
PATIENCE_SECONDS: Final = 1.8
"""So long an answer is waited for where an older one is there (RFC 8767 §5)."""
MAX_NAMES: Final = 4096

judge = lru_cache(maxsize=8192)(is_public)


@dataclass(frozen=True, slots=True)
class _Known:
    addresses: tuple[str, ...]
    ask_at: float
    ends_at: float
    stale_until: float


class AddressBook:
    """What names mean, for as long as that holds."""

    def __init__(self, names: Names, *, monotonic: Callable[[], float]) -> None:
        self._names = names
        self._monotonic = monotonic
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._asking: dict[str, asyncio.Future[tuple[str, ...]]] = {}

    def cached(self, host: str) -> tuple[str, ...] | None:
        """The addresses of a canonical host, if they are known and still hold; may ask again beside."""
        known = self._known.get(host)
        if known is None:
            return (host,) if is_ip_literal(host) else None
        now = self._monotonic()
        if now >= known.ask_at and host not in self._asking:
            self._ask(host)
        return known.addresses if now < known.ends_at else None

    async def look_up(self, host: str) -> tuple[str, ...]:
        """Raises `RefusedError` (`upstream_unreachable`) for a name that means nothing."""
        cached = self.cached(host)
        if cached is not None:
            return cached
        asking = self._asking.get(host) or self._ask(host)
        older = self._stale(host)
        try:
            return await asyncio.wait_for(asyncio.shield(asking), PATIENCE_SECONDS if older is not None else None)
        except TimeoutError:
            assert older is not None
            return older.addresses
        except (NoSuchNameError, NotAnsweredError):
            raise RefusedError(
                Refusal(
                    RefusalCode.UPSTREAM_UNREACHABLE,
                    "The destination's name could not be resolved.",
                    "Check the spelling of the host, and the proxy's own DNS.",
                )
            ) from None

    def _stale(self, host: str) -> _Known | None:
        """What may be used of it where nobody answers."""
        known = self._known.get(host)
        return known if known is not None and self._monotonic() < known.stale_until else None

    def _ask(self, host: str) -> "asyncio.Future[tuple[str, ...]]":
        asking = asyncio.ensure_future(self._answer(host))
        self._asking[host] = asking
        asking.add_done_callback(lambda done: self._asked(host, done))
        return asking

    async def _answer(self, host: str) -> tuple[str, ...]:
        try:
            meaning = await self._names.meaning(host)
        except NoSuchNameError:
            self._known.pop(host, None)
            raise
        except NotAnsweredError:
            older, now = self._stale(host), self._monotonic()
            if older is None:
                raise
            ends_at = min(now + SHORTEST_SECONDS, older.stale_until)
            self._known[host] = replace(older, ask_at=now + SHORTEST_SECONDS * AHEAD, ends_at=ends_at)
            return older.addresses
        life = min(max(meaning.seconds, SHORTEST_SECONDS), LONGEST_SECONDS)
        now = self._monotonic()
        self._known[host] = _Known(meaning.addresses, now + life * AHEAD, now + life, now + life + STALE_SECONDS)
        self._known.move_to_end(host)
        while len(self._known) > MAX_NAMES:
            self._known.popitem(last=False)
        return meaning.addresses

    def _asked(self, host: str, done: "asyncio.Future[tuple[str, ...]]") -> None:
        self._asking.pop(host, None)
        if not done.cancelled():
            done.exception()  # looked at: nobody may have waited for it


class OwnListeners:
    """Where this proxy itself listens: dialling there would loop, or reach the admin listener from outside."""

    def __init__(self) -> None:
        self._exact: set[tuple[str, int]] = set()
        self._everywhere: set[int] = set()

    def add(self, host: str, port: int) -> None:
        if ipaddress.ip_address(host).is_unspecified:
            self._everywhere.add(port)
        else:
            self._exact.add((host, port))

    def includes(self, address: str, port: int) -> bool:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(parsed, "ipv4_mapped", None)
        plain = str(mapped or parsed)
        if (plain, port) in self._exact:
            return True
        if port in self._everywhere and is_local(plain):
            return True
        # 0.0.0.0 and :: reach whatever listens on loopback.
        return (mapped or parsed).is_unspecified and (
            port in self._everywhere or any(p == port for _, p in self._exact)
        )


def is_local(address: str) -> bool:
    """Whether the address is this machine's: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def check_addresses(addresses: tuple[str, ...], *, port: int, allow_private: bool, own: OwnListeners) -> None:
    """Raises `RefusedError` unless every one of the addresses may be dialled."""
    if not addresses:
        raise RefusedError(Refusal(RefusalCode.UPSTREAM_UNREACHABLE, "The destination's name has no address."))
    for address in addresses:
        if own.includes(address, port):
            raise RefusedError(
                Refusal(
                    RefusalCode.LOOP_DETECTED, "The destination is this proxy itself.", "Use the upstream's own host."
                )
            )
        if not allow_private and not judge(address):
            raise RefusedError(
                Refusal(
                    RefusalCode.DESTINATION_PRIVATE,
                    "The destination resolves to a private, loopback, link-local or otherwise internal address.",
                    "An operator may name this destination with --allow-private.",
                )
            )
