"""Ways through a proxy that is described by a file, for a run against any of them. README.md has the format."""

import json
import ssl
from pathlib import Path
from typing import Any

import trustme

from tests.attacks.ways import Listener, Place, Way
from tests.support.raw_client import Line, TunnelRefusedError, dial
from tests.support.upstream import Upstream


class UnusableTargetError(ValueError):
    """The file does not say what is needed; the message says what."""


def origins(described: dict[str, Any], ca: trustme.CA) -> dict[str, Upstream]:
    """The kit's own servers, on the ports that the proxy was told of; not entered yet."""
    try:
        return {
            name: Upstream(ca if each["tls"] else None, host=each.get("host", "127.0.0.1"), port=each["port"])
            for name, each in described["origins"].items()
        }
    except KeyError as missing:
        raise UnusableTargetError(f"each of 'origins' needs 'port' and 'tls'; {missing} is missing") from None


def ways(described: dict[str, Any], servers: dict[str, Upstream]) -> list[Way]:
    """Raises `UnusableTargetError`."""
    context = _context(described.get("ca_file"))
    return [_way(each, servers, context) for each in described.get("ways", [])]


def ca_of(folder: Path) -> trustme.CA:
    """The CA of the kit's servers, made once and kept there."""
    certificate, key = folder / "origin-ca.pem", folder / "origin-ca.key"
    if certificate.exists():
        return trustme.CA.from_pem(certificate.read_bytes(), key.read_bytes())
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(certificate))
    key.touch(mode=0o600)
    ca.private_key_pem.write_to_path(str(key))
    return ca


def described_in(file: Path) -> dict[str, Any]:
    try:
        described = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UnusableTargetError(f"{file}: {error}") from None
    if not isinstance(described, dict):
        raise UnusableTargetError(f"{file} is to hold one JSON object")
    return described


def _way(each: dict[str, Any], servers: dict[str, Upstream], context: ssl.SSLContext) -> Way:
    try:
        host, _, port = each["proxy"].rpartition(":")
        return Way(
            listener=Listener(each["listener"]),
            place=Place(each["place"]),
            placeholder=each["placeholder"],
            secret=each["secret"],
            origin=servers[each["origin"]],
            other_origin=servers[each["other_origin"]],
            dial=lambda: dial(int(port), host=host),
            enter=entered_by(context),
            prefix=each.get("prefix", ""),
            other_prefix=each.get("other_prefix", ""),
            host=each["host"],
            proof=tuple(each.get("proof", ())),
            stranger=tuple(each.get("stranger", ())),
            dead=each.get("dead", {}),
            own_ports=tuple(each.get("own_ports", ())),
        )
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise UnusableTargetError(f"a way is not whole: {type(error).__name__}: {error}") from None


def entered_by(context: ssl.SSLContext) -> Any:
    """CONNECT with these lines, then TLS verified by this context."""

    def enter(line: Line, authority: str, proof: tuple[str, ...], server_name: str | None) -> Line:
        head = "\r\n".join([f"CONNECT {authority} HTTP/1.1", f"Host: {authority}", *proof, "", ""])
        response = line.ask(head.encode("latin-1"))
        if response.status != 200:
            raise TunnelRefusedError(response)
        line.start_tls(context, server_name or authority.rpartition(":")[0].removesuffix("."))
        return line

    return enter


def _context(ca_file: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    context.check_hostname = False  # what is asked for is what is judged, not what the proxy's leaf says
    return context
