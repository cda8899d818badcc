"""Names into addresses that may be dialled.

Rule: a name is resolved once, every address of the answer is judged, and only a judged address is dialled. What a name
means may change between two look-ups (DNS rebinding); what was judged is what is dialled. The proxy's own listeners are
never a destination, whatever a rule says.
"""

import asyncio
import ipaddress
import socket
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from control_plane.contract.address import is_public
from control_plane.contract.destination import is_ip_literal
from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError

FRESH_SECONDS: Final = 10.0
"""`getaddrinfo` gives no time to live; within this one a name is not asked again."""
STALE_SECONDS: Final = 60.0
"""Until then an answer is used while it is asked again beside."""
MAX_NAMES: Final = 4096

judge = lru_cache(maxsize=8192)(is_public)


@dataclass(frozen=True, slots=True)
class _Known:
    addresses: tuple[str, ...]
    asked_at: float


class AddressBook:
    """What names mean, for a short while."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._asking: dict[str, asyncio.Future[tuple[str, ...]]] = {}

    def cached(self, host: str) -> tuple[str, ...] | None:
        """The addresses of a canonical host, if they are known well enough; may ask again beside."""
        known = self._known.get(host)
        if known is None:
            return (host,) if is_ip_literal(host) else None
        age = self._loop.time() - known.asked_at
        if age > STALE_SECONDS:
            return None
        if age > FRESH_SECONDS and host not in self._asking:
            self._ask(host)
        return known.addresses

    async def look_up(self, host: str) -> tuple[str, ...]:
        """Raises `RefusedError` (`upstream_unreachable`) for a name that means nothing."""
        cached = self.cached(host)
        if cached is not None:
            return cached
        asking = self._asking.get(host) or self._ask(host)
        try:
            return await asyncio.shield(asking)
        except (OSError, UnicodeError):
            raise RefusedError(
                Refusal(
                    RefusalCode.UPSTREAM_UNREACHABLE,
                    "The destination's name could not be resolved.",
                    "Check the spelling of the host, and the proxy's own DNS.",
                )
            ) from None

    def _ask(self, host: str) -> "asyncio.Future[tuple[str, ...]]":
        asking = asyncio.ensure_future(self._resolve(host))
        self._asking[host] = asking
        asking.add_done_callback(lambda done: self._asked(host, done))
        return asking

    async def _resolve(self, host: str) -> tuple[str, ...]:
        found = await self._loop.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(_with_zone(entry[4]) for entry in found))

    def _asked(self, host: str, done: "asyncio.Future[tuple[str, ...]]") -> None:
        self._asking.pop(host, None)
        if done.cancelled() or done.exception() is not None:
            return
        self._known[host] = _Known(done.result(), self._loop.time())
        self._known.move_to_end(host)
        while len(self._known) > MAX_NAMES:
            self._known.popitem(last=False)


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


def _with_zone(address: tuple[object, ...]) -> str:
    """`getaddrinfo`'s address as text; a scope id makes it link-local, which the judge must see."""
    text = str(address[0])
    has_scope = len(address) == 4 and address[3] and "%" not in text
    return f"{text}%{address[3]}" if has_scope else text
