"""A database that takes connections and says nothing: frozen, or behind a connection that leads nowhere any more."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from sqlalchemy.engine import make_url

from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import PROXY
from tests.control_plane.workspace import SECRET, Workspace, sha256


class Relay:
    """Passes bytes on to a server, both ways, unless it is told to keep them."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._passes = threading.Event()
        self._passes.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._passes.clear()

    def thaw(self) -> None:
        self._passes.set()

    def close(self) -> None:
        self._passes.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self._passes.wait()
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)


@pytest.fixture
def relay(server: str) -> Iterator[Relay]:
    url = make_url(server + "postgres")
    assert url.host is not None
    assert url.port is not None
    with closing(Relay(url.host, url.port)) as relay:
        yield relay


@pytest.mark.guards("control_plane/adapters/sql/store.py", "asyncio.timeout(READ_SECONDS)", "asyncio.timeout(None)")
@pytest.mark.guards("control_plane/adapters/sql/store.py", "asyncio.timeout(WRITE_SECONDS)", "asyncio.timeout(None)")
def test_a_database_that_says_nothing_is_unavailable_and_then_there_again(
    own_control_plane: OwnControlPlane, empty_postgresql: str, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = make_url(empty_postgresql).set(port=relay.port).render_as_string(hide_password=False)
    plane = own_control_plane(database_url=through)
    workspace = Workspace(plane, "silent")
    workspace.add_credential()
    workspace.grant()
    issued = workspace.exchange()
    ask = {"kind": "caller", "proxy_credential_sha256": sha256(issued["proxy_credential"])}
    plane.http.timeout = 15

    with monkeypatch.context() as quick:
        quick.setattr("control_plane.adapters.sql.store.READ_SECONDS", 1.0)
        quick.setattr("control_plane.adapters.sql.store.WRITE_SECONDS", 1.0)
        relay.freeze()
        began = time.monotonic()
        read = plane.http.post("/internal/resolve", json={"ask": ask}, auth=PROXY)
        written = plane.admin("PUT", "/v1/tenants/another")
        took = time.monotonic() - began
        relay.thaw()

    assert (read.status_code, read.json()["code"]) == (503, "store_unavailable")
    assert (written.status_code, written.json()["code"]) == (503, "store_unavailable")
    assert took < 15
    assert workspace.resolve(issued)["secret"] == SECRET
