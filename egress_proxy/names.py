"""Asking what a name means: the machine's own resolver settings, asked without a thread for each question.

c-ares (by pycares) reads what the machine's own programs go by (hosts file, `resolv.conf` with its search domains and
options, the order in `nsswitch.conf`, and changes of these while we run) and, other than `getaddrinfo`, says for how
long an answer holds. Rule: only what was answered is given back; that a name means nothing is told apart from not being
able to ask, because the first is an answer and the second is none (RFC 8767 §4). ADR 0029.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pycares

_NOTHING = frozenset((pycares.errno.ARES_ENOTFOUND, pycares.errno.ARES_ENODATA))


class NoSuchNameError(Exception):
    """The name means nothing, and somebody who knows has said so."""


class NotAnsweredError(Exception):
    """Nobody said what it means."""


@dataclass(frozen=True, slots=True)
class Meaning:
    addresses: tuple[str, ...]
    """In the order in which they are to be tried (RFC 6724); with the scope id, which makes one link-local."""
    seconds: float
    """For how long they hold."""


class Names(Protocol):
    async def meaning(self, host: str) -> Meaning:
        """Raises `NoSuchNameError` and `NotAnsweredError`."""
        ...


class SystemNames:
    """This machine's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, servers: Sequence[str] = ()) -> None:
        """`servers`: asked instead of the machine's, each `address` or `address:port`. Raises `ValueError`."""
        self._loop = loop
        try:
            self._channel = pycares.Channel(servers=servers or None)
        except pycares.AresError as error:
            raise ValueError(f"cannot ask these name servers: {', '.join(servers)}") from error

    async def meaning(self, host: str) -> Meaning:
        answered: asyncio.Future[Meaning] = self._loop.create_future()

        def told(result: Any, error: int | None) -> None:  # in c-ares' own thread
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_settle, answered, result, error)

        self._channel.getaddrinfo(host, None, type=socket.SOCK_STREAM, callback=told)
        return await answered

    def close(self) -> None:
        """Whoever still waits is not answered."""
        self._channel.close()


def _settle(answered: "asyncio.Future[Meaning]", result: Any, error: int | None) -> None:
    if answered.done():  # who asked has gone
        return
    if error in _NOTHING:
        answered.set_exception(NoSuchNameError())
    elif error or result is None:
        answered.set_exception(NotAnsweredError(error))
    else:
        addresses = tuple(dict.fromkeys(_address(node.addr) for node in result.nodes))
        lives = [node.ttl for node in result.nodes] + [alias.ttl for alias in result.cnames]
        answered.set_result(Meaning(addresses, float(min(lives, default=0))))


def _address(found: tuple[Any, ...]) -> str:
    text = found[0].decode("ascii")
    has_scope = len(found) == 4 and found[3] and "%" not in text
    return f"{text}%{found[3]}" if has_scope else text
