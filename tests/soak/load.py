"""The clients of a soak: threads, each of which does one thing over and over, well or badly.

Rule: what a client does is its name; how each time ended is counted. Whatever is wrong in any weather raises
`WrongError`: another's answer, a body that is not the one sent, a placeholder that was let through where it may not be.
"""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import httpx

from tests.soak.origin import BIG_BYTES, FRAME, Origin
from tests.soak.place import Place
from tests.support.api import ApiError, RuntimeClient, Ticket
from tests.support.processes import Proxy, Workspace
from tests.support.raw_client import Line, NoReplyError, TunnelRefusedError
from tests.support.ways import Kind, Way

CREDENTIAL: Final = "api"
TICKET_SECONDS: Final = 40.0
"""How long a client keeps a placeholder before it opens another session."""


class WrongError(Exception):
    """Something that no fault excuses."""


@dataclass
class Load:
    place: Place
    origin: Origin
    workspace: Workspace
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        steps: dict[str, tuple[Step, float]] = {
            "small, kept alive": (kept_alive, 0.02),
            "small, in a tunnel": (one_tunnel, 0.05),
            "upload": (upload, 0.1),
            "upload in chunks": (upload_in_chunks, 0.1),
            "slow download": (slow_download, 0.1),
            "event stream": (event_stream, 0.05),
            "WebSocket": (websocket, 0.1),
            "wrong placeholder": (wrong_placeholder, 0.05),
            "bad client": (bad_client, 0.05),
            "bad upstream": (bad_upstream, 0.05),
            "taken back": (taken_back, 0.3),
        }
        for number, (name, (step, pause)) in enumerate(steps.items()):
            worker = Worker(self, name, step, pause, random.Random(number))
            self._threads.append(threading.Thread(target=worker.run, args=(self._stop,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(40)
        self.wrong += [f"{thread.name} does not end" for thread in self._threads if thread.is_alive()]


@dataclass
class Worker:
    """One client."""

    load: Load
    name: str
    step: "Step"
    pause: float
    dice: random.Random
    _way: Way | None = None
    _until: float = 0.0

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(self.pause):
            try:
                outcome = self.step(self)
            except WrongError as error:
                outcome = "WRONG"
                self.load.wrong.append(f"{self.name}: {error}")
            except (ApiError, httpx.HTTPError):
                outcome = "no ticket"
                self._way = None
                stop.wait(0.5)
            except TunnelRefusedError:
                outcome = "tunnel refused"
                self._way = None
            except (NoReplyError, OSError, ValueError):
                outcome = "broken off"
            self.load.outcomes[self.name, outcome] += 1

    def way(self) -> Way:
        """A placeholder that is good, at one proxy or another."""
        if self._way is None or time.monotonic() > self._until:
            self._way = self.fresh_way()
            self._until = time.monotonic() + TICKET_SECONDS
        return self._way

    def fresh_way(self, ticket: Ticket | None = None) -> Way:
        load = self.load
        held = ticket or load.workspace.ticket(CREDENTIAL)
        proxy: Proxy = self.dice.choice(load.place.proxies)
        kind = self.dice.choice(list(Kind))
        context = load.place.deployment.client_context()
        load.place.new_ca.configure_trust(context)
        return Way(kind, held, load.origin.authority, CREDENTIAL, proxy, context)

    @property
    def client(self) -> RuntimeClient:
        return self.load.workspace.client


Step = Callable[[Worker], str]


def kept_alive(worker: Worker) -> str:
    way = worker.way()
    with way.open() as line:
        answers = {line.ask(way.request("GET", "/small")).status for _ in range(20)}
    return _named(answers)


def one_tunnel(worker: Worker) -> str:
    response = worker.way().ask("GET", "/small")
    return _named({response.status})


def upload(worker: Worker) -> str:
    size = worker.dice.choice((10, 70_000, 1_500_000))
    response = worker.way().ask("POST", "/echo", body=bytes(size), timeout_seconds=30)
    if response.status == 200 and response.body != b"%d" % size:
        raise WrongError(f"{size} bytes became {response.body!r}")
    return _named({response.status})


def upload_in_chunks(worker: Worker) -> str:
    way = worker.way()
    with way.open() as line:
        line.send(way.head("POST", "/echo", [("Transfer-Encoding", "chunked"), ("Expect", "100-continue")]))
        for _ in range(8):
            line.send(b"1000\r\n" + bytes(0x1000) + b"\r\n")
        line.send(b"0\r\n\r\n")
        response = line.read_response(method="POST", timeout_seconds=30)
    if response.status == 200 and response.body != b"%d" % (8 * 0x1000):
        raise WrongError(f"{8 * 0x1000} bytes became {response.body!r}")
    return _named({response.status})


def slow_download(worker: Worker) -> str:
    """Reads a little, waits, and then the rest; or hangs up."""
    way = worker.way()
    with way.open() as line:
        line.send(way.request("GET", "/big"))
        line.sock.settimeout(30)
        line.read_exactly(30_000)
        time.sleep(worker.dice.choice((0.0, 0.2, 1.0)))
        if worker.dice.random() < 0.3:
            line.reset()
            return "hung up"
        return _named({200} if len(line.read_until(b"\r\n0\r\n\r\n")) > BIG_BYTES - 30_000 else {0})


def event_stream(worker: Worker) -> str:
    way = worker.way()
    path = worker.dice.choice(("/sse", "/sse-close"))
    with way.open() as line:
        line.send(way.request("GET", path))
        line.sock.settimeout(30)
        line.read_until(b"data: 2\n\n")
        if worker.dice.random() < 0.4:
            line.reset()
            return "hung up"
        line.read_until(b"0\r\n\r\n")
    return "200"


def websocket(worker: Worker) -> str:
    way = worker.way()
    asked = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")]
    with way.open() as line:
        line.send(way.head("GET", "/ws", [*asked, ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")]))
        response = line.read_response(timeout_seconds=30)
        if response.status != 101:
            return _named({response.status})
        for _ in range(10):
            line.send(FRAME)
            if line.read_exactly(len(FRAME)) != FRAME:
                raise WrongError("another frame came back")
        if worker.dice.random() < 0.3:
            line.reset()
    return "101"


def wrong_placeholder(worker: Worker) -> str:
    way = worker.way()
    good = way.ticket.placeholder
    last = "A" if good[-1] != "A" else "B"
    bad = worker.dice.choice((good[:-1] + last, good.upper(), good + "0"))
    with way.open() as line:
        response = line.ask(way.request("GET", "/small", [("Authorization", f"Bearer {bad}")], bearer=False))
    if response.status < 400:
        raise WrongError("a placeholder that is none was let through")
    return response.refusal or str(response.status)


def bad_client(worker: Worker) -> str:
    way = worker.way()
    match worker.dice.randrange(5):
        case 0:  # half of a head, and gone
            with way.open() as line:
                line.send(way.request("GET", "/small")[:40])
                line.reset()
            return "left in the head"
        case 1:  # closes its side, and waits
            with way.open() as line:
                line.send(way.request("GET", "/silent"))
                with contextlib.suppress(OSError):
                    line.sock.shutdown(1)
                line.is_closed_by_peer(timeout_seconds=5)
            return "half-closed"
        case 2:  # half of a body, and gone
            with way.open() as line:
                line.send(way.head("POST", "/echo", [("Content-Length", "100000")]) + bytes(500))
                line.reset()
            return "left in the body"
        case 3:
            return _refused(way.open(), b"GET / HTTP/1.1\nHost: x\n\n")
        case _:
            head = way.head("POST", "/echo", [("Content-Length", "3"), ("Transfer-Encoding", "chunked")])
            return _refused(way.open(), head + b"0\r\n\r\n")


def _refused(line: Line, data: bytes) -> str:
    with line:
        response = line.ask(data)
        if response.status != 400:
            raise WrongError(f"doubtful framing was answered {response.status}")
        return response.refusal


def bad_upstream(worker: Worker) -> str:
    """Does not wait for what never comes."""
    way = worker.way()
    path = worker.dice.choice(("/reset", "/cut", "/garbage", "/silent", "/half"))
    with way.open() as line:
        line.send(way.request("GET", path))
        line.sock.settimeout(0.3 if path in ("/silent", "/half") else 20)
        with contextlib.suppress(TimeoutError):
            response = line.read_response(timeout_seconds=0.3 if path in ("/silent", "/half") else 20)
            if response.status == 200 and response.complete:
                raise WrongError(f"a reply that broke off ({path}) looks whole")
            return response.refusal or "cut"
    return "left"


def taken_back(worker: Worker) -> str:
    """A placeholder of its own, used, and used again after it was revoked."""
    load = worker.load
    ticket = load.workspace.ticket(CREDENTIAL)
    way = worker.fresh_way(ticket)
    before = way.ask("GET", "/small").status
    load.workspace.api.revoke(worker.client, ticket.placeholder)
    deadline = time.monotonic() + 60
    while (response := way.ask("GET", "/small")).status == 200:
        if time.monotonic() > deadline:
            raise WrongError("a placeholder that was revoked is good a minute later")
        time.sleep(0.2)
    return f"{before}, then {response.refusal or response.status}"


def _named(statuses: set[int]) -> str:
    return ", ".join(map(str, sorted(statuses)))
