"""Every attack of the corpus, over every listener and placement, against this proxy."""

import base64
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import trustme

from control_plane.contract.placement import (
    BEARER,
    BasicPlacement,
    HeaderPlacement,
    PathPlacement,
    Placement,
    QueryPlacement,
)
from tests.attacks import corpus, target
from tests.attacks.plugin import PROPERTY
from tests.attacks.ways import HEADER, PARAMETER, USER, Listener, Place, Way
from tests.egress_proxy.world import World
from tests.support.control_plane_simulator import Ticket
from tests.support.processes import free_port
from tests.support.upstream import Upstream, plain

PLACEMENTS: Final[dict[Place, Placement]] = {
    Place.BEARER: BEARER,
    Place.HEADER: HeaderPlacement(HEADER.lower()),
    Place.BASIC: BasicPlacement(USER),
    Place.QUERY: QueryPlacement(PARAMETER),
    Place.PATH: PathPlacement(),
}
DECISION = "egress_proxy/core/decision.py"
ROOT: Final = Path(__file__).parents[2]


def proof_of(ticket: Ticket) -> tuple[str, ...]:
    return ("Proxy-Authorization: Basic " + base64.b64encode(f"x:{ticket.proxy_credential}".encode()).decode(),)


def dead_placeholders(world: World, ticket: Ticket, url: str) -> dict[str, str]:
    of = (ticket.caller, ticket.proxy_credential)
    expired = world.ticket(url, of=of, credential="expired", lives_seconds=-1.0)
    other = world.ticket(url, credential="others")
    turned = ticket.placeholder[:-1] + ("A" if ticket.placeholder[-1] != "A" else "B")
    return {"expired": expired.placeholder, "another tenant's": other.placeholder, "forged": turned}


class Ways:
    """Through one proxy, to two clear origins and two behind TLS; each with a tenant of its own."""

    def __init__(self, world: World, clear: tuple[Upstream, Upstream], tls: tuple[Upstream, Upstream]) -> None:
        self._world = world
        self._clear = clear
        self._tls = tls
        self._enter = target.entered_by(world.client_context())

    def way(self, listener: Listener, place: Place) -> Way:
        world, placement = self._world, PLACEMENTS[place]
        origin, other = self._clear if listener is Listener.ABSOLUTE else self._tls
        ticket = world.ticket(origin.url, placements=(placement,), credential="api")
        world.ticket(
            other.url, of=(ticket.caller, ticket.proxy_credential), placements=(placement,), credential="other"
        )
        is_reverse = listener is Listener.REVERSE
        return Way(
            listener=listener,
            place=place,
            placeholder=ticket.placeholder,
            secret=ticket.secret,
            origin=origin,
            other_origin=other,
            dial=world.reverse if is_reverse else world.forward,
            enter=self._enter,
            prefix={Listener.ABSOLUTE: origin.url, Listener.TUNNEL: "", Listener.REVERSE: "/api"}[listener],
            other_prefix={Listener.ABSOLUTE: other.url, Listener.REVERSE: "/other"}.get(listener, ""),
            host="proxy" if is_reverse else origin.authority,
            proof=proof_of(ticket),
            stranger=proof_of(world.ticket(origin.url, credential="api")),
            dead=dead_placeholders(world, ticket, origin.url),
            own_ports=(world.forward_port, world.reverse_port, world.admin_port),
            fresh=lambda: self.way(listener, place),
        )


@pytest.fixture(scope="module")
def ways(world: World, upstream_ca: trustme.CA) -> Iterator[Ways]:
    with ExitStack() as stack:
        origins = [stack.enter_context(Upstream(ca)) for ca in (None, None, upstream_ca, upstream_ca)]
        for origin in origins:
            origin.default = plain()
        yield Ways(world, (origins[0], origins[1]), (origins[2], origins[3]))


@pytest.mark.parametrize("listener", list(Listener), ids=[each.name.lower() for each in Listener])
@pytest.mark.parametrize("kind", corpus.KINDS)
@pytest.mark.guards(DECISION, "    if named != (expected.host, expected.port):\n", "    if False:\n")
@pytest.mark.guards("egress_proxy/core/fields.py", 'if b"\\\\u00" in layers[-1]:', "if False:")
@pytest.mark.guards("egress_proxy/core/fields.py", ' and _TOKEN68.fullmatch(encoded.strip(b" "))', "")
@pytest.mark.guards("egress_proxy/core/http1.py", "if host is not None and not _HOST.fullmatch(host):", "if False:")
@pytest.mark.guards("egress_proxy/core/http1.py", 'if b"#" in target:', "if False:")
def test_the_proxy_holds(
    ways: Ways, kind: str, listener: Listener, record_property: Callable[[str, object], None]
) -> None:
    held: Counter[corpus.Cell] = Counter()
    tried: Counter[corpus.Cell] = Counter()
    broke = []
    chosen = [attack for attack in corpus.ATTACKS if attack.kind == kind]

    for result in corpus.run([ways.way(listener, place) for place in Place], chosen):
        key = corpus.cell(result.attack, result.way)
        tried[key] += 1
        held[key] += not result.verdict
        if result.verdict:
            broke.append(str(result))

    record_property(PROPERTY, json.dumps([[*key, held[key], tried[key]] for key in tried]))
    assert not broke, "\n".join(broke)


def test_each_empty_cell_has_a_reason() -> None:
    full = {(a.kind, listener, a.direction) for a in corpus.ATTACKS for listener in a.listeners}

    for kind in corpus.KINDS:
        for listener, direction in corpus.COLUMNS:
            reasons = {(kind, listener, direction), (kind, None, direction)} & corpus.EMPTY.keys()
            assert ((kind, listener, direction) in full) != bool(reasons), (kind, listener, direction)


def described(way: Way, names: dict[Upstream, str], port: int) -> dict[str, Any]:
    """As README.md has it."""
    return {
        "listener": way.listener.value,
        "place": way.place.value,
        "placeholder": way.placeholder,
        "secret": way.secret,
        "proxy": f"127.0.0.1:{port}",
        "origin": names[way.origin],
        "other_origin": names[way.other_origin],
        "prefix": way.prefix,
        "other_prefix": way.other_prefix,
        "host": way.host,
        "proof": way.proof,
        "stranger": way.stranger,
        "dead": way.dead,
        "own_ports": way.own_ports,
    }


def test_the_kit_runs_against_a_proxy_that_a_file_describes(world: World, tmp_path: Path) -> None:
    world.upstream_ca.cert_pem.write_to_path(str(tmp_path / "origin-ca.pem"))
    world.upstream_ca.private_key_pem.write_to_path(str(tmp_path / "origin-ca.key"))
    origins = {name: {"port": free_port(), "tls": "tls" in name} for name in ("clear", "other", "tls", "other tls")}
    servers = target.origins({"origins": origins}, target.ca_of(tmp_path))
    made = Ways(world, (servers["clear"], servers["other"]), (servers["tls"], servers["other tls"]))
    names = {server: name for name, server in servers.items()}
    ways = [
        described(way, names, world.reverse_port if way.listener is Listener.REVERSE else world.forward_port)
        for way in (made.way(listener, Place.BEARER) for listener in Listener)
    ]
    for server in servers.values():
        server.stop()
    file = tmp_path / "proxy.json"
    file.write_text(json.dumps({"origins": origins, "ca_file": str(world.folder / "ca.pem"), "ways": ways}))

    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks", str(file), "--only", "identity of the caller"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    unusable = subprocess.run(
        [sys.executable, "-m", "tests.attacks", str(tmp_path / "nothing.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert "45 of 45 held" in done.stdout
    assert (unusable.returncode, "nothing.json" in unusable.stderr) == (2, True)
