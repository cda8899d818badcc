"""What is written waits for the end of the turn: in order, together, and never past the end of its connection."""

import asyncio
import socket
from contextlib import contextmanager
from typing import Any

import pytest

from egress_proxy.outlet import LARGE_BYTES, MOST_PIECES, Outlet, Turn

OUTLET = "egress_proxy/outlet.py"


class Far:
    """The other end of a connection, and what is sent to it."""

    def __init__(self, outlet: Outlet, sock: socket.socket) -> None:
        self.outlet = outlet
        self.sock = sock

    def got(self) -> bytes:
        """What has arrived by now."""
        self.sock.setblocking(False)
        try:
            return self.sock.recv(65_536)
        except BlockingIOError:
            return b""

    async def got_to_its_end(self) -> bytes:
        self.sock.setblocking(False)
        data = b""
        async with asyncio.timeout(5):
            while piece := await asyncio.get_running_loop().sock_recv(self.sock, 65_536):
                data += piece
        return data


async def connection(turn: Turn) -> Far:
    near, far = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
    return Far(Outlet(transport, turn), far)


@contextmanager
def here(*ends: Far) -> Any:
    yield
    for end in ends:
        end.outlet.abort()
        end.sock.close()


async def the_turn_to_end() -> None:
    for _ in range(2):
        await asyncio.sleep(0)


async def test_what_is_written_in_a_turn_leaves_at_its_end_in_order() -> None:
    turn = Turn(asyncio.get_running_loop())
    one, other = await connection(turn), await connection(turn)
    with here(one, other):
        one.outlet.write(b"a")
        other.outlet.write(b"x")
        one.outlet.write(b"b")
        before = one.got(), other.got()
        await the_turn_to_end()
        after = one.got(), other.got()
        one.outlet.write(b"c")
        await the_turn_to_end()

        assert before == (b"", b"")
        assert after == (b"ab", b"x")
        assert one.got() == b"c"


async def test_a_large_piece_leaves_at_once_after_what_was_written_before_it() -> None:
    end = await connection(Turn(asyncio.get_running_loop()))
    with here(end):
        end.outlet.write(b"a")
        end.outlet.write(b"b" * LARGE_BYTES)
        at_once = end.got()
        end.outlet.write(b"c")
        await the_turn_to_end()

        assert at_once == b"a" + b"b" * LARGE_BYTES
        assert end.got() == b"c"


@pytest.mark.guards(OUTLET, " or len(pieces) >= MOST_PIECES:", ":")
async def test_not_more_than_a_few_pieces_wait() -> None:
    end = await connection(Turn(asyncio.get_running_loop()))
    with here(end):
        for _ in range(MOST_PIECES):
            end.outlet.write(b"a")

        assert end.got() == b"a" * MOST_PIECES


@pytest.mark.guards(OUTLET, "    def close(self) -> None:\n        self.flush()\n", "    def close(self) -> None:\n")
async def test_what_was_written_before_the_close_arrives_before_the_end() -> None:
    end = await connection(Turn(asyncio.get_running_loop()))
    with here(end):
        end.outlet.write(b"the last reply")
        end.outlet.close()

        assert await end.got_to_its_end() == b"the last reply"


async def test_what_was_written_before_the_end_of_ours_arrives_before_it() -> None:
    end = await connection(Turn(asyncio.get_running_loop()))
    with here(end):
        end.outlet.write(b"a refusal")
        end.outlet.write_eof()

        assert await end.got_to_its_end() == b"a refusal"


@pytest.mark.guards(
    OUTLET, "        self._pieces.clear()\n        self.transport.abort()", "        self.transport.abort()"
)
async def test_an_aborted_connection_keeps_no_bytes() -> None:
    turn = Turn(asyncio.get_running_loop())
    end = await connection(turn)
    with here(end):
        end.outlet.write(b"a key on its way")
        end.outlet.abort()

        assert end.outlet.__getattribute__("_pieces") == []
        await the_turn_to_end()
        assert await end.got_to_its_end() == b""


@pytest.mark.guards(
    OUTLET, "            self.transport.abort()\n\n    def write_eof", "            raise\n\n    def write_eof"
)
async def test_one_connections_failure_is_not_anothers() -> None:
    turn = Turn(asyncio.get_running_loop())
    bad, good = await connection(turn), await connection(turn)
    with here(bad, good):
        bad.outlet.write("not bytes")  # type: ignore[arg-type]
        good.outlet.write(b"bytes")
        await the_turn_to_end()

        assert good.got() == b"bytes"
        assert bad.outlet.is_closing()
