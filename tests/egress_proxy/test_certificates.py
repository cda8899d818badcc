"""Certificates that change while the proxy runs, and when they end."""

import asyncio
import datetime
import logging
import ssl
import threading
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trustme
from cryptography import x509

from egress_proxy import certificates
from egress_proxy.ca import CertificateAuthority, create_ca
from egress_proxy.certificates import LOOK_SECONDS, Certificates, Source
from egress_proxy.core.proofs import parse_accepted
from egress_proxy.metrics import Counters
from egress_proxy.workers import summed
from tests.egress_proxy.test_workload_identity import is_heard, secure_world, token, write_listener
from tests.egress_proxy.world import World, get
from tests.support.control_plane_simulator import ControlPlaneSimulator
from tests.support.upstream import Upstream, plain

CERTIFICATES = "egress_proxy/certificates.py"


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> list[MutableMapping[str, Any]]:
    """What the module logs, whatever level another test has set for the process."""
    captured = structlog.testing.LogCapture()
    everything = structlog.make_filtering_bound_logger(logging.NOTSET)
    logger = structlog.wrap_logger(None, processors=[captured], wrapper_class=everything)
    monkeypatch.setattr(certificates, "log", logger)
    return captured.entries


def seen(fact: Callable[[], bool], *, within: float = 15) -> bool:
    deadline = time.monotonic() + within
    while not fact():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.05)
    return True


def reloads(world: World, outcome: str) -> int:
    return int(world.metric(f'certificate_reloads_total{{outcome="{outcome}"}}'))


def replaced(file: Path, content: bytes) -> None:
    """As an operator should: at once."""
    other = file.with_suffix(".new")
    other.write_bytes(content)
    other.chmod(file.stat().st_mode)
    other.replace(file)


# --- in a running proxy ----------------------------------------------------------------------------------------------


def test_a_listeners_new_certificate_is_shown_to_the_next_client_and_open_ones_stay(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    upstream.on("/x", plain())
    accepts = parse_accepted("proxy_credential,workload_token,mtls")
    with secure_world(tmp_path / "w", control_plane, upstream_ca, reverse_identity=accepts) as secure:
        ticket, proof = secure.world.ticket(upstream.url, session=None, client="ci", subject="ci"), token()
        control_plane.workload(proof.encode(), client="ci", tenant=ticket.caller.tenant, subject="ci")
        request = get(
            f"/{ticket.credential}/x",
            headers={"Authorization": ticket.bearer, "Proxy-Authorization": f"Bearer {proof}"},
        )
        with secure.reverse() as open_before:
            assert open_before.ask(request).status == 200
            new_ca = trustme.CA()

            write_listener(secure.world.folder, new_ca)

            assert seen(lambda: reloads(secure.world, "adopted") >= 1)
            assert open_before.ask(request).status == 200
        assert not is_heard(secure.reverse)
        secure.listener_ca = new_ca
        assert is_heard(secure.reverse)


def test_a_bad_certificate_file_is_refused_said_and_counted_and_the_old_one_stays(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA
) -> None:
    accepts = parse_accepted("proxy_credential,mtls")
    with secure_world(tmp_path / "w", control_plane, upstream_ca, reverse_identity=accepts) as secure:
        folder = secure.world.folder

        replaced(folder / "listener.pem", b"-----BEGIN CERTIFICATE-----\nbroken\n-----END CERTIFICATE-----\n")
        replaced(folder / "client-ca.pem", b"")
        replaced(folder / "ca.key", (folder / "listener.key").read_bytes())

        assert seen(lambda: reloads(secure.world, "refused") >= 3)
        assert is_heard(secure.reverse)
        assert is_heard(lambda: secure.reverse(secure.identity()))
        assert secure.world.admin("/readyz")[0] == 200


def test_a_client_ca_that_is_taken_out_vouches_for_nobody_any_more(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    upstream.on("/x", plain())
    with secure_world(tmp_path / "w", control_plane, upstream_ca, reverse_identity=parse_accepted("mtls")) as secure:
        ticket = secure.world.ticket(upstream.url, session=None, client="ci", subject="ci")
        identity = secure.identity()
        control_plane.workload(identity.der, client="ci", tenant=ticket.caller.tenant, subject="ci")
        request = get(f"/{ticket.credential}/x", headers={"Authorization": ticket.bearer})
        with secure.reverse(identity) as line:
            assert line.ask(request).status == 200

            replaced(secure.world.folder / "client-ca.pem", trustme.CA().cert_pem.bytes())

            assert line.is_closed_by_peer(timeout_seconds=15)
        assert not is_heard(lambda: secure.reverse(identity))


def test_the_interception_ca_is_replaced_for_new_tunnels_while_old_ones_go_on(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    upstream.on("/x", plain())
    with World.start(tmp_path / "w", control_plane, upstream_ca) as world:
        ticket = world.ticket(upstream.url)
        request = get("/x", host=upstream.authority, headers={"Authorization": ticket.bearer})
        trusts_old = world.client_context()
        with world.tunnel(ticket, upstream.authority) as open_before:
            assert open_before.ask(request).status == 200
            (tmp_path / "next").mkdir()
            create_ca(tmp_path / "next", now=datetime.datetime.now(datetime.UTC))

            replaced(world.folder / "ca.key", (tmp_path / "next/ca.key").read_bytes())
            replaced(world.folder / "ca.pem", (tmp_path / "next/ca.pem").read_bytes())

            assert seen(lambda: reloads(world, "adopted") >= 1)
            assert open_before.ask(request).status == 200
        with world.tunnel(ticket, upstream.authority) as line:  # trusts the new one
            assert line.ask(request).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            world.tunnel(ticket, upstream.authority, context=trusts_old)


@pytest.mark.long
def test_while_the_interception_ca_changes_whoever_trusts_both_is_never_cut_off(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    """As docs/configuration.md tells: the next is handed out beside the old one, then signs, then stands alone."""
    upstream.on("/x", plain())
    with World.start(tmp_path / "w", control_plane, upstream_ca) as world:
        (tmp_path / "next").mkdir()
        create_ca(tmp_path / "next", now=datetime.datetime.now(datetime.UTC))
        old, new = (world.folder / "ca.pem").read_bytes(), (tmp_path / "next/ca.pem").read_bytes()
        ticket = world.ticket(upstream.url)
        request = get("/x", host=upstream.authority, headers={"Authorization": ticket.bearer})

        def trusted_by(*authorities: bytes) -> bool:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.verify_flags |= ssl.VERIFY_X509_STRICT
            context.load_verify_locations(cadata=b"".join(authorities).decode())
            try:
                with world.tunnel(ticket, upstream.authority, context=context) as line:
                    return line.ask(request).status == 200
            except ssl.SSLCertVerificationError:
                return False

        stages = [(old + new, None), (new + old, tmp_path / "next/ca.key"), (new, None)]
        seen_by = []
        for number, (authorities, key) in enumerate(stages, 1):
            if key is not None:  # the certificate first: alone it does not fit, is refused, and the old one stays
                replaced(world.folder / "ca.pem", authorities)
                assert seen(lambda: reloads(world, "refused") >= 1)
                assert trusted_by(old, new)
                replaced(world.folder / "ca.key", key.read_bytes())
            else:
                replaced(world.folder / "ca.pem", authorities)
            assert seen(lambda number=number: reloads(world, "adopted") >= number)  # type: ignore[misc]
            seen_by.append((trusted_by(old), trusted_by(old, new), trusted_by(new)))

    assert seen_by == [(True, True, False), (False, True, True), (False, True, True)]


def test_an_upstream_ca_that_is_taken_out_ends_what_it_verified(
    tmp_path: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, upstream: Upstream
) -> None:
    upstream.on("/x", plain())
    with World.start(tmp_path / "w", control_plane, upstream_ca) as world:
        ticket = world.ticket(upstream.url)
        request = get("/x", host=upstream.authority, headers={"Authorization": ticket.bearer})
        with world.tunnel(ticket, upstream.authority) as line:
            assert line.ask(request).status == 200

            replaced(world.folder / "upstream-ca.pem", trustme.CA().cert_pem.bytes())

            assert seen(lambda: reloads(world, "adopted") >= 1)
            response = line.ask(request)
            assert (response.status, response.refusal) == (502, "upstream_unverified")

            replaced(world.folder / "upstream-ca.pem", upstream_ca.cert_pem.bytes())

            assert seen(lambda: reloads(world, "adopted") >= 2)
            assert line.ask(request).status == 200


def test_each_certificates_end_is_in_the_metrics(world: World) -> None:
    text = world.admin("/metrics")[1]

    found = world.metric('certificate_ends_in_seconds{number="0",source="interception_ca"}')
    assert 3_600 * 24 * 3_000 < found < 3_600 * 24 * 3_651
    assert 'source="upstream_ca"' in text


# --- the watcher itself ----------------------------------------------------------------------------------------------


class Watched:
    """A certificate in a file, and a watcher of it with a clock of its own."""

    def __init__(self, folder: Path, *, days: int = 100, is_shown: bool = True) -> None:
        self.file = folder / "it.pem"
        self.now = time.time()
        self.adopted: list[str] = []
        self.counters = Counters()
        self.write(days)
        source = Source("listener", (self.file,), (self.file,), self._load, self.adopted.append, is_shown=is_shown)
        self.certificates = Certificates(
            [source], self.counters, loop=asyncio.get_running_loop(), clock=lambda: self.now
        )
        self._tick = 0.0

    def write(self, days: float) -> None:
        end = datetime.datetime.fromtimestamp(self.now, datetime.UTC) + datetime.timedelta(days=days)
        trustme.CA().issue_cert("x.test", not_after=end).cert_chain_pems[0].write_to_path(str(self.file))

    def _load(self) -> str:
        if not self.file.read_bytes().startswith(b"-----BEGIN"):
            raise ValueError("s3cr3t")
        return f"{x509.load_pem_x509_certificate(self.file.read_bytes()).serial_number}"

    async def look(self) -> None:
        self._tick += LOOK_SECONDS
        self.certificates.tick(self._tick)
        while self.certificates.is_reading:
            await asyncio.sleep(0.001)


async def test_what_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path)

    await watched.look()

    assert watched.adopted == []


async def test_a_bad_file_is_refused_once_and_taken_when_it_is_good(
    tmp_path: Path, logs: list[MutableMapping[str, Any]]
) -> None:
    watched = Watched(tmp_path)
    watched.file.write_text("half of it")

    for _ in range(3):
        await watched.look()
    watched.write(100)
    await watched.look()

    assert watched.counters.certificate_reloads == {"refused": 1, "adopted": 1}
    assert len(watched.adopted) == 1
    assert "s3cr3t" not in str(logs)


async def test_a_file_that_is_gone_for_a_moment_changes_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    content = watched.file.read_bytes()

    watched.file.unlink()
    await watched.look()
    watched.file.write_bytes(content)
    await watched.look()

    assert watched.counters.certificate_reloads["refused"] == 1
    assert len(watched.adopted) == 1


@pytest.mark.guards(CERTIFICATES, "if source.is_shown and expiries and", "if False and")
async def test_a_certificate_that_has_ended_does_not_replace_one_that_has_not(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write(-1)

    await watched.look()

    assert watched.adopted == []
    assert watched.certificates.seconds_left[0][2] > 0


async def test_its_end_is_said_at_fourteen_days_once_a_day_and_counted_below_zero(
    tmp_path: Path, logs: list[MutableMapping[str, Any]]
) -> None:
    watched = Watched(tmp_path, days=15)

    for hours in (0, 25, 1, 24, 24 * 14):
        watched.now += hours * 3_600
        await watched.look()

    events = [(each["event"], each["days_left"]) for each in logs]
    assert events == [("certificate_ends_soon", 13), ("certificate_ends_soon", 12), ("certificate_has_ended", -2)]
    assert watched.certificates.seconds_left[0][2] < 0


async def test_a_turned_link_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes changes a mounted Secret."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        trustme.CA().issue_cert("x.test").cert_chain_pems[0].write_to_path(str(tmp_path / name / "it.pem"))
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/it.pem").symlink_to("../data/it.pem")
    file, adopted = tmp_path / "linked/it.pem", list[bytes]()
    source = Source("listener", (file,), (file,), file.read_bytes, adopted.append)
    certificates = Certificates([source], Counters(), loop=asyncio.get_running_loop(), clock=time.time)

    (tmp_path / "turned").symlink_to("two")
    (tmp_path / "turned").replace(tmp_path / "data")
    certificates.tick(LOOK_SECONDS)
    while certificates.is_reading:
        await asyncio.sleep(0.001)

    assert adopted == [(tmp_path / "two/it.pem").read_bytes()]


def test_of_several_workers_the_first_end_is_shown() -> None:
    name = "coatcheck_proxy_certificate_ends_in_seconds"
    line = f'# TYPE {name} gauge\n{name}{{{{source="listener"}}}} {{}}\n'

    text = summed([line.format(70), line.format(50), line.format(60)])

    assert text.splitlines()[-1].endswith(" 50")


def test_of_two_cas_in_the_file_the_first_signs_and_clients_may_trust_both(tmp_path: Path) -> None:
    """So the next CA can be handed out before it signs, and the last one after."""
    now = datetime.datetime.now(datetime.UTC)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        create_ca(tmp_path / name, now=now)
    both = (tmp_path / "old/ca.pem").read_bytes() + (tmp_path / "new/ca.pem").read_bytes()
    (tmp_path / "both.pem").write_bytes(both)

    ca = CertificateAuthority.load(cert_file=tmp_path / "both.pem", key_file=tmp_path / "old/ca.key")

    issuer = x509.load_pem_x509_certificates(both)[0]
    ca.leaf("api.test", now=now).verify_directly_issued_by(issuer)
