"""`host:port` of a listener."""

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Port 0 means any free port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> ListenAddress:
    """`127.0.0.1:8471`, `[::1]:8471` or `:8471` (every address). Raises `ValueError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError("a listener is host:port, such as 127.0.0.1:8471")
    host = host.removeprefix("[").removesuffix("]")
    return ListenAddress(host or "0.0.0.0", int(port))  # noqa: S104 - refused without TLS by `Settings`
