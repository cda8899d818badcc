"""What every connection of one worker shares, wired by `bootstrap`."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from control_plane.contract.destination import Endpoint
from control_plane.contract.wire import Ask
from egress_proxy.audit import AuditSpool
from egress_proxy.ca import LeafContexts
from egress_proxy.core.decision import Mode
from egress_proxy.core.proofs import Accepted
from egress_proxy.core.quota import Quotas
from egress_proxy.core.view import AskQuota, CacheView
from egress_proxy.leaks import LeakWatch
from egress_proxy.load import Loads
from egress_proxy.metrics import Counters
from egress_proxy.outlet import Turn
from egress_proxy.replies import ReplyTally
from egress_proxy.upstream import Lane, UpstreamConnection

if TYPE_CHECKING:
    from egress_proxy.client import ClientConnection
    from egress_proxy.exchange import Exchange


class Pool(Protocol):
    """Where exchanges get their upstream connections from; see `upstream.Upstreams`."""

    def lane(self, tenant: str, endpoint: Endpoint, ca_pem: str | None) -> Lane: ...

    def take(self, lane: Lane, *, allow_private: bool) -> UpstreamConnection | None: ...

    async def connect(self, lane: Lane, *, allow_private: bool, unopened: bool = False) -> UpstreamConnection: ...

    def give_back(self, connection: UpstreamConnection) -> None: ...


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. Watched by one coarse tick for all connections, not by a timer for each."""

    header: float = 15.0
    idle: float = 75.0
    silence: float = 900.0
    total: float = 86_400.0


class RequestIds:
    """Names for requests and events: random once for the process, and once more for each.

    Not counted: everybody sees the names of his own, and how many came between would say how busy all others are. The
    random part is taken from a store of it, since asking for it each time costs ten times as much.
    """

    __slots__ = ("_at", "_process", "_store")

    def __init__(self) -> None:
        self._process = secrets.token_hex(8)
        self._store, self._at = "", 0

    def next(self) -> str:
        if self._at >= len(self._store):
            self._store, self._at = secrets.token_hex(_IDS_AT_ONCE * _ID_CHARACTERS // 2), 0
        begin = self._at
        self._at = begin + _ID_CHARACTERS
        return f"{self._process}-{self._store[begin : self._at]}"


_ID_CHARACTERS: Final = 24  # 96 bits
_IDS_AT_ONCE: Final = 512


@dataclass(slots=True)
class Services:
    """Mutable only in its registries and in `is_draining`."""

    loop: asyncio.AbstractEventLoop
    turn: Turn
    view: CacheView
    ask: Callable[[Ask | AskQuota], Awaitable[None]]
    """Has the control plane answer a question into the view. Never raises for an outage: the view then refuses."""
    upstreams: Pool
    audit: AuditSpool
    leaf_contexts: LeafContexts
    counters: Counters
    clock: Callable[[], float]
    """Unix seconds."""
    proxy_id: str
    quotas: Quotas
    leaks: LeakWatch
    loads: Loads
    client_limit: int
    """How many client connections are taken at once."""
    tally: ReplyTally | None = None
    """Of replies to credentials that are being rotated."""
    timeouts: Timeouts = Timeouts()
    path_credential_allowed: bool = False
    accepts: Mapping[Mode, Accepted] = field(default_factory=dict)
    """By what callers may be proven at the listeners of a mode; where it says nothing, by a proxy credential."""
    request_ids: RequestIds = field(default_factory=RequestIds)
    clients: "set[ClientConnection]" = field(default_factory=set)
    unproven: "dict[ClientConnection, None]" = field(default_factory=dict)
    """Those of them that have not proven yet for whom they come, in the order of their coming."""
    is_draining: bool = False
    all_gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while draining, once the last client connection is closed."""

    @property
    def exchanges(self) -> "list[Exchange]":
        """Those under way now."""
        return [client.exchange for client in self.clients if client.exchange is not None]

    def make_room(self) -> None:
        """End the first connection that came and has proven nothing; at last, the one that came just now."""
        first = next(iter(self.unproven))
        self.client_closed(first)  # it counts no longer, although its transport has yet to hear of it
        first.abort()

    def client_closed(self, client: "ClientConnection") -> None:
        self.clients.discard(client)
        self.unproven.pop(client, None)
        if self.is_draining and not self.clients:
            self.all_gone.set()
