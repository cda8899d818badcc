"""How much is under way: client connections in all and of each tenant, and requests of each tenant.

Rule: a limit refuses before any work is done (`overloaded`, with Retry-After), and what one tenant has under way is
counted for that tenant alone, so that none can take the others' share. Whoever has not proven yet for whom they come
makes room for those who come after them, the first first: nobody shuts the door by standing in it. Descriptors are the
hard limit: each connection may need two, so a worker takes no more clients than it can also serve.
"""

import resource
from typing import Final
from weakref import WeakValueDictionary

from control_plane.contract.refusal import Refusal, RefusalCode

DESCRIPTORS_ELSEWHERE: Final = 128
"""For listeners, the control plane, files."""
DESCRIPTORS_PER_CLIENT: Final = 2
OVERLOADED: Final = Refusal(
    RefusalCode.OVERLOADED,
    "The tenant has as many requests under way as it may have at this proxy.",
    "Try again in a moment, with fewer at once; the operator's limit is COATCHECK_PROXY_TENANT_REQUESTS.",
    retry_after_seconds=1,
)

TOO_MANY_CONNECTIONS: Final = Refusal(
    RefusalCode.OVERLOADED,
    "The tenant has as many connections to this proxy as it may have.",
    "Use connections again, or close them; the operator's limit is COATCHECK_PROXY_TENANT_CONNECTIONS.",
    retry_after_seconds=1,
)


class Load:
    """One tenant's requests under way, and its connections."""

    __slots__ = ("__weakref__", "connection_limit", "connections", "count", "limit")

    def __init__(self, limit: int, connection_limit: int) -> None:
        self.count = 0
        self.limit = limit
        self.connections = 0
        self.connection_limit = connection_limit

    @property
    def is_full(self) -> bool:
        return self.count >= self.limit


class Loads:
    def __init__(self, *, requests_per_tenant: int, connections_per_tenant: int) -> None:
        self._limit = requests_per_tenant
        self._connection_limit = connections_per_tenant
        self._loads: WeakValueDictionary[str, Load] = WeakValueDictionary()

    def of(self, tenant: str) -> Load:
        """The same for as long as anybody holds it."""
        load = self._loads.get(tenant)
        if load is None:
            load = self._loads[tenant] = Load(self._limit, self._connection_limit)
        return load


def client_limit(wanted: int | None) -> int:
    """How many clients a worker takes: as many as wanted, or as its descriptors are enough for.

    The soft limit of descriptors is raised to the hard one first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = max(1, (hard - DESCRIPTORS_ELSEWHERE) // DESCRIPTORS_PER_CLIENT)
    return most if wanted is None else min(wanted, most)


def tenant_connection_limit(wanted: int | None, *, clients: int) -> int:
    """How many of them one tenant may have: left to us, half, so that one tenant never has them all."""
    return min(wanted, clients) if wanted is not None else max(1, clients // 2)
