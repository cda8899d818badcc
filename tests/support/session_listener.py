"""A listener opened for one session, as `coatcheck run` opens it: whoever connects to it needs no proxy credential.

The product's own relay, in a thread with a loop of its own, so that clients can be started by blocking code.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from coatcheck.relay import Way, loopback_listener, relaying


@contextlib.contextmanager
def session_listener(*, proxy_port: int, proxy_credential: str) -> Iterator[str]:
    """The URL to name as the proxy, while it is open."""
    listener = loopback_listener()
    loop, closing = asyncio.new_event_loop(), asyncio.Event()

    async def credential() -> str:
        return proxy_credential

    async def serve() -> None:
        async with relaying(listener, Way(port=lambda: proxy_port, proxy_credential=credential)):
            await closing.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(closing.set)
        thread.join(10)
        loop.close()
