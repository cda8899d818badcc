"""What operators and machines do during a soak, one thing after the other."""

import random
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import trustme

from tests.soak.load import CREDENTIAL
from tests.soak.origin import Origin
from tests.soak.place import Place
from tests.support.api import ApiError
from tests.support.processes import Workspace, private_file

CALM_SECONDS = 2.0


@dataclass
class Faults:
    place: Place
    origin: Origin
    workspace: Workspace
    done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _certificates: int = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(90)

    def _run(self) -> None:
        dice = random.Random(11)
        kinds: dict[str, Callable[[], None]] = {
            "rotation": self.rotate,
            "the last control plane killed": self.kill_control_plane,
            "the first control plane silent": self.pause_control_plane,
            "idle upstream connections dropped": self.origin.drop_idle_connections,
            "interception CA changed": self.change_interception_ca,
            "upstream CAs changed": self.change_upstream_cas,
            "SIGHUP to a control plane": self.hang_up,
        }
        if self.place.hints is not None:
            kinds |= {"Valkey killed": self.kill_hints, "Valkey frozen": self.freeze_hints}
        while not self._stop.wait(CALM_SECONDS):
            order = list(kinds)
            dice.shuffle(order)
            for name in order:
                if self._stop.wait(CALM_SECONDS):
                    return
                try:
                    kinds[name]()
                    self.done[name] += 1
                except (ApiError, httpx.HTTPError):  # asked of a control plane that is away just now
                    self.done[f"{name} (not taken)"] += 1
                except Exception as error:
                    self.failed.append(f"{name}: {type(error).__name__}: {error}")

    # --- operators

    def rotate(self) -> None:
        key = f"sk-real-{secrets.token_hex(20)}"
        self.origin.keys.add(key)
        self.place.apis[0].rotate(self.workspace.tenant, CREDENTIAL, secret=key)

    def change_interception_ca(self) -> None:
        """Forth and back; the clients trust both."""
        deployment = self.place.deployment
        self._certificates += 1
        ca = self.place.new_ca if self._certificates % 2 else deployment.interception_ca
        private_file(deployment.folder / "interception-ca.key", ca.private_key_pem.bytes().decode())
        ca.cert_pem.write_to_path(str(deployment.ca_file))

    def change_upstream_cas(self) -> None:
        file = self.place.deployment.folder / "upstream-ca.pem"
        more = trustme.CA().cert_pem.bytes() if self._certificates % 2 else b""
        file.write_bytes(self.place.deployment.upstream_ca.cert_pem.bytes() + more)

    def hang_up(self) -> None:
        self.place.control_planes[0].signal(signal.SIGHUP)

    # --- machines

    def kill_control_plane(self) -> None:
        last = len(self.place.control_planes) - 1
        self.place.control_planes[last].kill()
        time.sleep(1)
        self.place.start_again(last)

    def pause_control_plane(self) -> None:
        first = self.place.control_planes[0]
        first.signal(signal.SIGSTOP)
        time.sleep(2)
        first.signal(signal.SIGCONT)

    def kill_hints(self) -> None:
        assert self.place.hints is not None
        self.place.hints.kill()
        time.sleep(1)
        self.place.hints.start()

    def freeze_hints(self) -> None:
        assert self.place.hints is not None
        self.place.hints.freeze()
        time.sleep(2)
        self.place.hints.thaw()
