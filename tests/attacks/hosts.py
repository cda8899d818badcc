"""The host: spelled, split, contradicted; and addresses that must not be dialled."""

import contextlib
from collections.abc import Callable, Iterator

from tests.attacks.attack import Attack, Verdict, attacks, refuses, same_or_refused
from tests.attacks.ways import Listener, Seen, Way, head
from tests.support.raw_client import Line, NoReplyError, TunnelRefusedError

_ODD_BYTES = {
    "NUL before a suffix": "{name}\x00.example.com:{port}",
    "NUL after": "{name}\x00:{port}",
    "a space": "{name} .example.com:{port}",
    "a tab": "{name}\t:{port}",
    "a byte above ASCII": "{name}\xff:{port}",
    "a percent-encoded NUL": "{name}%00:{port}",
    "a percent-encoded letter": "%6cocalhost:{port}",
    "a slash": "{name}/:{port}",
    "a backslash": "{name}\\.example.com:{port}",
    "a question mark": "{name}?:{port}",
    "a fragment": "{name}#.example.com:{port}",
    "a comma": "{name},example.com:{port}",
    "an underscore": "local_host:{port}",
    "a leading hyphen": "-{name}:{port}",
    "two dots": "{name}..:{port}",
    "user information": "example.com@{name}:{port}",
    "user information with a password": "a:b@{name}:{port}",
    "two ports": "{name}:{port}:{port}",
    "a signed port": "{name}:+{port}",
    "a hexadecimal port": "{name}:0x1bb",
    "a port beyond 65535": "{name}:99999",
    "port 0": "{name}:0",
    "a bracket too few": "[::1:{port}",
    "brackets around a name": "[{name}]:{port}",
    "an address without brackets": "::1:{port}",
    "a zone": "[fe80::1%25lo]:{port}",
    "nothing": ":{port}",
}
_SPELLINGS = {
    "upper case": "LOCALHOST:{port}",
    "mixed case": "LocalHost:{port}",
    "a final dot": "localhost.:{port}",
    "a leading zero in the port": "localhost:0{port}",
}
_ADDRESSES = {
    "decimal": "2130706433",
    "hexadecimal": "0x7f000001",
    "octal": "0177.0.0.1",
    "short": "127.1",
    "zero": "0",
    "unspecified": "0.0.0.0",
    "unspecified, IPv6": "[::]",
    "loopback, IPv6": "[::1]",
    "IPv4-mapped": "[::ffff:127.0.0.1]",
    "IPv4-mapped, hexadecimal": "[::ffff:7f00:1]",
    "IPv4-compatible": "[::127.0.0.1]",
    "NAT64": "[64:ff9b::7f00:1]",
    "6to4": "[2002:7f00:1::]",
    "link-local": "169.254.1.1",
    "metadata": "169.254.169.254",
    "metadata, IPv6": "[fd00:ec2::254]",
    "metadata, by name": "metadata.google.internal",
    "private, 10/8": "10.0.0.1",
    "private, 172.16/12": "172.16.0.1",
    "private, 192.168/16": "192.168.0.1",
    "carrier-grade NAT": "100.64.0.1",
    "unique local": "[fc00::1]",
    "link-local, IPv6": "[fe80::1]",
    "multicast": "224.0.0.1",
    "broadcast": "255.255.255.255",
}


def _to_authority(authority: str, verdict: Callable[..., Verdict]) -> Callable[[Way], Verdict]:
    """A request that names its origin so: in CONNECT, in the target, or (reverse) in Host."""

    def run(way: Way) -> Verdict:
        named = authority.format(name=way.origin.authority.rpartition(":")[0], port=way.origin.port)
        match way.listener:
            case Listener.TUNNEL:
                connect = head(f"CONNECT {named} HTTP/1.1", f"Host: {named}", *way.proof)
                if verdict is refuses:
                    return refuses(way, connect, line=way.dial())
                with _inside(way, named) as line:
                    return "" if line is None else verdict(way, way.request(host=named), line=line)
            case Listener.ABSOLUTE:
                target = f"http://{named}{way.target().removeprefix(way.prefix)}"
                return verdict(way, head(f"GET {target} HTTP/1.1", *way.lines(host=named)))
        return verdict(way, way.request(host=named))

    return run


@contextlib.contextmanager
def _inside(way: Way, authority: str, *, server_name: str | None = None) -> Iterator[Line | None]:
    """Inside a tunnel to that authority; None where it is not opened."""
    line = way.dial()
    try:
        inside = way.enter(line, authority, way.proof, server_name)
    except (NoReplyError, TunnelRefusedError, OSError, UnicodeError):
        inside = None
    try:
        yield inside
    finally:
        line.close()


def _elsewhere(way: Way, raw: bytes, *, server_name: str | None = None) -> Verdict:
    """In a tunnel to this origin: whatever the request says, the other origin gets nothing, nor does this one."""
    seen, elsewhere = Seen(way.origin), Seen(way.other_origin)
    with _inside(way, way.origin.authority, server_name=server_name) as line:
        if line is None:
            return ""
        verdict = refuses(way, raw, line=line)
    if elsewhere.bytes.strip(b"-\n"):
        return "the other origin was spoken to"
    return verdict if not seen.requests or verdict != "reached an origin" else "went on to the tunnel's origin"


_CONTRADICTIONS: list[tuple[str, Callable[[Way], Verdict]]] = [
    ("another Host inside a tunnel", lambda way: _elsewhere(way, way.request(host=way.other_origin.authority))),
    (
        "an absolute target inside a tunnel",
        lambda way: _elsewhere(way, head(f"GET {way.other_origin.url}/x HTTP/1.1", *way.lines())),
    ),
    (
        "another server name than the tunnel's host",
        lambda way: _elsewhere(way, way.request(), server_name="elsewhere.example.com"),
    ),
    ("CONNECT inside a tunnel", lambda way: _elsewhere(way, head("CONNECT 127.0.0.1:1 HTTP/1.1", *way.lines()))),
]


def _other_host(way: Way) -> Verdict:
    return same_or_refused(way, way.request(host=way.other_origin.authority))


def _off_its_host(way: Way) -> Verdict:
    """The placeholder sent to a destination that it is not bound to."""
    other = way.other_origin
    match way.listener:
        case Listener.TUNNEL:
            with _inside(way, other.authority) as line:
                return "" if line is None else refuses(way, way.request(host=other.authority), line=line)
        case Listener.ABSOLUTE:
            target = f"{way.other_prefix}{way.target().removeprefix(way.prefix)}"
            return refuses(way, head(f"GET {target} HTTP/1.1", *way.lines(host=other.authority)))
    target = f"{way.other_prefix}{way.target().removeprefix(way.prefix)}"
    return refuses(way, head(f"GET {target} HTTP/1.1", *way.lines()))


def _other_scheme(way: Way) -> Verdict:
    """The bound host and port, by http where it is bound by https."""
    target = f"http://{way.origin.authority}{way.target().removeprefix(way.prefix)}"
    lines = [f"Host: {way.origin.authority}", *way.proof, *way.slot()]
    return refuses(way, head(f"GET {target} HTTP/1.1", *lines), line=way.dial())


def _own_listener(way: Way) -> Verdict:
    for port in way.own_ports:
        verdict = _to_authority(f"127.0.0.1:{port}", refuses)(way)
        verdict = verdict or _to_authority(f"localhost:{port}", refuses)(way)
        if verdict:
            return f"port {port}: {verdict}"
    return ""


_NAMING = (Listener.ABSOLUTE, Listener.TUNNEL)

ATTACKS: list[Attack] = [
    *attacks(
        "host parsed two ways", [(n, _to_authority(a, refuses)) for n, a in _ODD_BYTES.items()], listeners=_NAMING
    ),
    *attacks("spelling of the host", [(n, _to_authority(a, same_or_refused)) for n, a in _SPELLINGS.items()]),
    *attacks("Host decides the route", _CONTRADICTIONS, listeners=(Listener.TUNNEL,)),
    *attacks(
        "Host decides the route",
        [
            (
                "another Host than the target's",
                lambda way: same_or_refused(way, way.request(host=way.other_origin.authority)),
            ),
            ("two hosts in Host", lambda way: refuses(way, way.request(host="localhost, example.com"))),
            ("no Host", lambda way: refuses(way, way.request().replace(b"Host: ", b"X-Host: ", 1))),
            ("two Hosts", lambda way: refuses(way, way.request(f"Host: {way.other_origin.authority}"))),
        ],
        listeners=(Listener.ABSOLUTE, Listener.REVERSE),
    ),
    *attacks("placeholder off its host", [("another destination", _off_its_host)]),
    *attacks("placeholder off its host", [("http for https", _other_scheme)], listeners=(Listener.TUNNEL,)),
    *attacks(
        "odd addresses",
        [(n, _to_authority(f"{a}:443", refuses)) for n, a in _ADDRESSES.items()],
        listeners=_NAMING,
    ),
    *attacks("SSRF to itself", [("the proxy's own listeners", _own_listener)], listeners=_NAMING),
]
