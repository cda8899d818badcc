"""The connection to Redis or Valkey: asked briefly, and left alone for a moment after it did not answer.

Rule: Redis is a hint, never authority (ADR 0012). Nothing here raises to its caller; no answer is an answer too, and
whoever asked goes on without. So Redis that is away costs one short wait every few seconds, not one a request.
"""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from control_plane.contract.caller import TenantId
from control_plane.contract.secret import Secret

T = TypeVar("T")

ANSWERS_WITHIN_SECONDS: Final = 0.5
LEFT_ALONE_SECONDS: Final = 2.0

_log = structlog.get_logger("control_plane.redis")


class SharedRedis:
    def __init__(
        self, url: str, *, password: Secret | None = None, ca_file: Path | None = None, namespace: str
    ) -> None:
        self._options: dict[str, Any] = {"password": password.reveal() if password else None}
        if ca_file is not None:
            self._options["ssl_ca_certs"] = str(ca_file)
        self._url = url
        self._namespace = namespace
        self._client = self._connected(socket_timeout=ANSWERS_WITHIN_SECONDS)
        self._left_alone_until = 0.0

    def key(self, topic: str, *, tenant: TenantId | None = None, name: str = "") -> str:
        """Its installation, its tenant, what it is."""
        # A tenant's id has no colon in it, so that no name reaches into another tenant's keys.
        return f"coatcheck:{self._namespace}:{topic}:{tenant if tenant is not None else ''}:{name}"

    async def ask(self, question: Callable[[Any], Awaitable[T]]) -> T | None:
        """The answer; None where there is none."""
        if time.monotonic() < self._left_alone_until:
            return None
        try:
            return await question(self._client)
        except (ResponseError, ValueError, TypeError) as error:
            # It answers, but nothing that we asked for: somebody else wrote under that name.
            _log.warning("redis_refused", error=type(error).__name__)
        except (RedisError, OSError, TimeoutError) as error:
            self._left_alone_until = time.monotonic() + LEFT_ALONE_SECONDS
            _log.warning("redis_away", error=type(error).__name__)
        return None

    def listener(self) -> Any:
        """A client of its own for waiting: it has no time limit, and notices a dead connection by pings."""
        return self._connected(socket_timeout=None, health_check_interval=5)

    async def close(self) -> None:
        await self._client.aclose()

    def _connected(self, **options: Any) -> Any:
        # Its own retries (ten, each with a longer pause) would keep a request waiting for seconds.
        pool = BlockingConnectionPool.from_url(
            self._url,
            **self._options,
            **options,
            socket_connect_timeout=ANSWERS_WITHIN_SECONDS,
            retry=Retry(NoBackoff(), 0),
            max_connections=32,
            timeout=ANSWERS_WITHIN_SECONDS,
            client_name="coatcheck",
        )
        return Redis.from_pool(pool)
