"""Callers proven by a client certificate or a signed token, over real TLS: with and without a proxy credential."""

import base64
import contextlib
import datetime
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from control_plane.contract.wire import issuer_of
from egress_proxy.core.proofs import parse_accepted
from tests.egress_proxy.world import World, get
from tests.support.control_plane_simulator import ControlPlaneSimulator, Ticket
from tests.support.raw_client import Line, NoReplyError, dial
from tests.support.upstream import Upstream, endless_sse, plain

SIGNING_KEY = generate_private_key(SECP256R1())


@dataclass
class Identity:
    """A client certificate."""

    der: bytes
    context: ssl.SSLContext


@dataclass
class SecureWorld:
    """A proxy whose listeners are TLS, and who may call it."""

    world: World
    listener_ca: trustme.CA
    client_ca: trustme.CA

    def identity(
        self,
        name: str = "spiffe://mesh.test/ns/agents/sa/ci",
        *,
        ca: trustme.CA | None = None,
        usage: x509.ObjectIdentifier = ExtendedKeyUsageOID.CLIENT_AUTH,
    ) -> Identity:
        key, issuer = generate_private_key(SECP256R1()), ca or self.client_ca
        certificate = svid(name, key, issuer, usage)
        context = self.context()
        file = self.world.folder / f"identity-{certificate.serial_number:x}.pem"
        file.write_bytes(
            certificate.public_bytes(Encoding.PEM)
            + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        context.load_cert_chain(file)
        return Identity(certificate.public_bytes(Encoding.DER), context)

    def context(self) -> ssl.SSLContext:
        """A client without a certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.listener_ca.configure_trust(context)
        return context

    def line(self, port: int, identity: Identity | None = None) -> Line:
        line = dial(port)
        line.start_tls(identity.context if identity else self.context(), "proxy.test")
        return line

    def reverse(self, identity: Identity | None = None) -> Line:
        return self.line(self.world.reverse_port, identity)

    def forward(self, identity: Identity | None = None) -> Line:
        return self.line(self.world.forward_port, identity)

    def workload(self, upstream: Upstream, **more: Any) -> Ticket:
        """A client of one subject with a placeholder, which has no session."""
        return self.world.ticket(upstream.url, session=None, client="ci", subject="ci-job", **more)


def svid(name: str, key: EllipticCurvePrivateKey, ca: trustme.CA, usage: x509.ObjectIdentifier) -> x509.Certificate:
    """An X.509-SVID (SPIFFE X509-SVID §2): its one name is a URI."""
    issuer = x509.load_pem_x509_certificate(ca.cert_pem.bytes())
    signer = load_pem_private_key(ca.private_key_pem.bytes(), None)
    assert isinstance(signer, EllipticCurvePrivateKey)
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name)]), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .sign(signer, hashes.SHA256())
    )


@contextlib.contextmanager
def secure_world(
    folder: Path, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA, **settings: Any
) -> Iterator[SecureWorld]:
    listener_ca, client_ca = trustme.CA(), trustme.CA()
    folder.mkdir(exist_ok=True)
    write_listener(folder, listener_ca)
    client_ca.cert_pem.write_to_path(str(folder / "client-ca.pem"))
    usual: dict[str, Any] = {
        "listener_tls_cert_file": folder / "listener.pem",
        "listener_tls_key_file": folder / "listener.key",
        "client_ca_files": (folder / "client-ca.pem",),
    }
    with World.start(folder, control_plane, upstream_ca, **(usual | settings)) as world:
        yield SecureWorld(world, listener_ca, client_ca)


def write_listener(folder: Path, ca: trustme.CA) -> None:
    leaf = ca.issue_cert("proxy.test")
    leaf.private_key_pem.write_to_path(str(folder / "listener.key.new"))
    (folder / "listener.key.new").replace(folder / "listener.key")
    leaf.cert_chain_pems[0].write_to_path(str(folder / "listener.pem.new"))
    (folder / "listener.pem.new").replace(folder / "listener.pem")


@pytest.fixture(scope="module")
def secure(
    tmp_path_factory: pytest.TempPathFactory, control_plane: ControlPlaneSimulator, upstream_ca: trustme.CA
) -> Iterator[SecureWorld]:
    """Takes every proof, one at a time, on the reverse listener; on the forward one a certificate and one more."""
    settings = {
        "reverse_identity": parse_accepted("proxy_credential,mtls,workload_token"),
        "forward_identity": parse_accepted("mtls+proxy_credential,mtls+workload_token"),
    }
    with secure_world(tmp_path_factory.mktemp("secure"), control_plane, upstream_ca, **settings) as secure:
        yield secure


def token(**claims: Any) -> str:
    payload = {
        "iss": "https://kubernetes.default.svc.cluster.local",
        "sub": "system:serviceaccount:agents:ci",
        "aud": ["coatcheck-proxy"],
        "exp": int(time.time()) + 300,
        "jti": f"{time.monotonic_ns()}",
    }
    return jwt.encode(payload | claims, SIGNING_KEY, algorithm="ES256")


def knows(secure: SecureWorld, proof: bytes | str, ticket: Ticket, **facts: Any) -> None:
    """The control plane knows this proof as the ticket's client of one subject."""
    usual = {"client": ticket.caller.client, "tenant": ticket.caller.tenant, "subject": ticket.caller.subject}
    secure.world.control_plane.workload(proof.encode() if isinstance(proof, str) else proof, **(usual | facts))


def asked(ticket: Ticket, path: str = "/x", **headers: str) -> bytes:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return get(f"/{ticket.credential}{path}", headers={"Authorization": ticket.bearer} | names)


# --- certificates ----------------------------------------------------------------------------------------------------


def test_a_client_of_one_subject_is_a_caller_by_its_certificate_alone(secure: SecureWorld, upstream: Upstream) -> None:
    ticket, identity = secure.workload(upstream), secure.identity()
    knows(secure, identity.der, ticket)

    with secure.reverse(identity) as line:
        responses = [line.ask(asked(ticket)) for _ in range(3)]

    assert [response.status for response in responses] == [200] * 3
    assert [seen.header("authorization") for seen in upstream.requests] == [f"Bearer {ticket.secret}"] * 3
    event = secure.world.control_plane.wait_for(
        lambda plane: next(
            (each for each in plane.audited if each.placeholder_id == ticket.binding.placeholder_id), None
        )
    )
    assert (event.client, event.subject, event.session) == ("ci", "ci-job", None)


def test_a_placeholder_of_a_session_is_not_the_sessionless_workloads(secure: SecureWorld, upstream: Upstream) -> None:
    ticket = secure.world.ticket(upstream.url, client="ci", subject="ci-job")
    identity = secure.identity()
    knows(secure, identity.der, ticket)
    secure.workload(upstream, tenant=ticket.caller.tenant)

    with secure.reverse(identity) as line:
        response = line.ask(asked(ticket))

    assert (response.status, response.refusal) == (403, "caller_mismatch")
    assert upstream.requests == []


def test_a_client_of_several_subjects_needs_the_sessions_proxy_credential_too(
    secure: SecureWorld, upstream: Upstream
) -> None:
    ticket, identity = secure.world.ticket(upstream.url), secure.identity("spiffe://mesh.test/runtime")
    knows(secure, identity.der, ticket, tenant=None, subject=None)

    with secure.reverse(identity) as line:
        alone = line.ask(asked(ticket))
        together = line.ask(asked(ticket, Proxy_Authorization=f"Bearer {ticket.proxy_credential}"))

    assert (alone.status, alone.refusal) == (401, "token_required")
    assert together.status == 200
    assert len(upstream.requests) == 1


def test_another_clients_proxy_credential_on_a_certified_connection_is_a_mismatch(
    secure: SecureWorld, upstream: Upstream
) -> None:
    ticket, thief = secure.world.ticket(upstream.url), secure.identity("spiffe://mesh.test/thief")
    knows(secure, thief.der, ticket, client="thief", tenant=None, subject=None)

    with secure.reverse(thief) as line:
        response = line.ask(asked(ticket, Proxy_Authorization=f"Bearer {ticket.proxy_credential}"))

    assert (response.status, response.refusal) == (403, "caller_mismatch")
    assert upstream.requests == []


def is_heard(connect: Callable[[], Line]) -> bool:
    """Whether a request on such a connection gets an answer, whatever that says."""
    try:
        with connect() as line:
            line.ask(get("/api/x"))
    except (OSError, NoReplyError):
        return False
    return True


@pytest.mark.guards(
    "egress_proxy/server.py",
    "ssl.CERT_REQUIRED if demands_certificates(accepted) else ssl.CERT_OPTIONAL",
    "ssl.CERT_NONE",
)
def test_a_certificate_of_another_ca_gets_no_connection(secure: SecureWorld) -> None:
    stranger = secure.identity(ca=trustme.CA())

    assert not is_heard(lambda: secure.reverse(stranger))
    assert is_heard(lambda: secure.reverse(secure.identity()))


def test_a_verified_certificate_that_is_nobodys_is_refused(secure: SecureWorld, upstream: Upstream) -> None:
    ticket = secure.world.ticket(upstream.url)

    with secure.reverse(secure.identity("spiffe://mesh.test/unknown")) as line:
        response = line.ask(asked(ticket, Proxy_Authorization=f"Bearer {ticket.proxy_credential}"))

    assert (response.status, response.refusal) == (401, "token_invalid")


@pytest.mark.guards("egress_proxy/server.py", "ssl.CERT_REQUIRED if demands_certificates(accepted) else ", "")
def test_where_every_proof_begins_with_a_certificate_nobody_is_heard_without(secure: SecureWorld) -> None:
    assert not is_heard(secure.forward)
    assert is_heard(secure.reverse)


def test_a_servers_certificate_is_none_for_clients(secure: SecureWorld) -> None:
    usage = secure.identity(usage=ExtendedKeyUsageOID.SERVER_AUTH)

    assert not is_heard(lambda: secure.reverse(usage))


def test_two_proofs_open_a_tunnel_and_hold_for_what_is_in_it(secure: SecureWorld, upstream: Upstream) -> None:
    ticket, identity = secure.workload(upstream), secure.identity("spiffe://mesh.test/both")
    knows(secure, identity.der, ticket)
    proof = token()
    knows(secure, proof, ticket)
    connect = f"CONNECT {upstream.authority} HTTP/1.1\r\nHost: {upstream.authority}\r\n"

    with secure.forward(identity) as line:
        alone = line.ask(f"{connect}\r\n".encode())
        opened = line.ask(f"{connect}Proxy-Authorization: Bearer {proof}\r\n\r\n".encode())
        inner = TunnelledLine(line, secure.world, upstream)
        responses = [
            inner.ask(get("/x", host=upstream.authority, headers={"Authorization": ticket.bearer})) for _ in range(3)
        ]

    assert (alone.status, alone.refusal) == (407, "proxy_authentication_required")
    assert opened.status == 200
    assert responses == [200] * 3
    assert {seen.header("authorization") for seen in upstream.requests} == {f"Bearer {ticket.secret}"}


class TunnelledLine:
    """TLS inside TLS: a client's own, through a tunnel of a listener that is TLS itself."""

    def __init__(self, line: Line, world: World, upstream: Upstream) -> None:
        self._line = line
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = world.client_context().wrap_bio(
            self._incoming, self._outgoing, server_hostname=upstream.authority.partition(":")[0]
        )
        self._do(self._tls.do_handshake)

    def ask(self, request: bytes) -> int:
        """The status of the reply, which is read to the end of its head."""
        self._do(lambda: self._tls.write(request))
        reply = b""
        while b"\r\n\r\n" not in reply:
            reply += self._do(lambda: self._tls.read(65_536))
        lines = reply.lower().split(b"\r\n")
        length = int(next(each for each in lines if each.startswith(b"content-length:")).partition(b":")[2])
        while len(reply.partition(b"\r\n\r\n")[2]) < length:
            reply += self._do(lambda: self._tls.read(65_536))
        return int(reply.split(b" ", 2)[1])

    def _do(self, step: Any) -> Any:
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                self._line.send(self._outgoing.read())
                self._incoming.write(self._line.sock.recv(65_536))
            else:
                self._line.send(self._outgoing.read())
                return done


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["bearer", "proxy url"])
def test_a_client_of_one_subject_is_a_caller_by_its_token_alone(
    secure: SecureWorld, upstream: Upstream, way: str
) -> None:
    ticket, proof = secure.workload(upstream), token()
    knows(secure, proof, ticket)
    basic = base64.b64encode(f"workload:{proof}".encode()).decode()
    value = f"Bearer {proof}" if way == "bearer" else f"Basic {basic}"

    with secure.reverse() as line:
        statuses = [line.ask(asked(ticket, Proxy_Authorization=value)).status for _ in range(3)]

    assert statuses == [200] * 3
    assert secure.world.control_plane.asked_for(proof) == 1
    assert all(proof not in str(list(seen.headers)) for seen in upstream.requests)


def test_a_path_credential_narrows_a_token_to_its_session(secure: SecureWorld, upstream: Upstream) -> None:
    ticket, proof = secure.world.ticket(upstream.url), token()
    knows(secure, proof, ticket, tenant=None, subject=None)
    line_of = {"Authorization": ticket.bearer, "Proxy-Authorization": f"Bearer {proof}"}

    with secure.reverse() as line:
        response = line.ask(get(f"/~{ticket.proxy_credential}/{ticket.credential}/x", headers=line_of))

    assert response.status == 200


def test_a_token_that_the_control_plane_does_not_believe_is_refused_and_never_shown(
    secure: SecureWorld, upstream: Upstream
) -> None:
    ticket, proof = secure.workload(upstream), token(aud=["https://coatcheck.test"])

    with secure.reverse() as line:
        response = line.ask(asked(ticket, Proxy_Authorization=f"Bearer {proof}"))

    assert (response.status, response.refusal) == (401, "token_invalid")
    assert proof not in line.received.decode("latin-1")
    event = secure.world.control_plane.audit_of(response.header("coatcheck-request-id"))
    assert proof not in repr(event)
    assert upstream.requests == []


def test_a_token_is_good_until_its_own_end_and_no_longer_on_the_same_connection(
    secure: SecureWorld, upstream: Upstream
) -> None:
    ticket, proof = secure.workload(upstream), token()
    knows(secure, proof, ticket, lives_seconds=4)
    upstream.on("/x", plain())

    with secure.reverse() as line:
        first = line.ask(asked(ticket, Proxy_Authorization=f"Bearer {proof}"))
        deadline = time.monotonic() + 20
        while (last := line.ask(asked(ticket, Proxy_Authorization=f"Bearer {proof}"))).status == 200:
            assert time.monotonic() < deadline
            threading.Event().wait(0.1)

    assert first.status == 200
    assert (last.status, last.refusal) == (401, "token_expired")


@pytest.mark.guards(
    "egress_proxy/cache.py", 'yield ("proxy_credential", client_of(client))', 'yield ("proxy_credential", "")'
)
@pytest.mark.guards("egress_proxy/server.py", "if event.id in each.forward.proof.vouchers]", "if False]")
def test_when_its_client_is_removed_open_streams_end_and_requests_are_refused(
    secure: SecureWorld, upstream: Upstream
) -> None:
    ticket, identity = secure.workload(upstream), secure.identity("spiffe://mesh.test/removed")
    ticket = secure.world.ticket(upstream.url, session=None, client="removed", subject="ci-job")
    knows(secure, identity.der, ticket)
    upstream.on("/s", endless_sse())
    with secure.reverse(identity) as streaming, secure.reverse(identity) as idle:
        assert idle.ask(asked(ticket)).status == 200
        streaming.send(asked(ticket, "/s"))
        streaming.read_until(b"data: 1")

        secure.world.control_plane.forget_client("removed")

        assert streaming.is_closed_by_peer(timeout_seconds=5)
        refused = idle.ask(asked(ticket))
    assert (refused.status, refused.refusal) == (401, "token_invalid")


def test_a_change_of_its_issuer_is_asked_about_and_ends_nothing_that_still_holds(
    secure: SecureWorld, upstream: Upstream
) -> None:
    ticket, proof = secure.workload(upstream), token()
    knows(secure, proof, ticket, issuer="cluster-a")
    upstream.on("/x", plain())
    plane = secure.world.control_plane
    with secure.reverse() as line:
        line.ask(asked(ticket, Proxy_Authorization=f"Bearer {proof}"))

        plane.publish("proxy_credential", id=issuer_of("cluster-a"), revoked=True)
        plane.wait_for(
            lambda each: (
                line.ask(asked(ticket, Proxy_Authorization=f"Bearer {proof}")).status == 200
                and each.asked_for(proof) == 2
            )
        )

    assert plane.asked_for(proof) == 2


# --- what proves nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        "X-Forwarded-Client-Cert",
        "X-SSL-Client-Cert",
        "Client-Cert",
        "X-Client-Cert",
        "X-Forwarded-User",
        "X-SH-Subject",
        "Coatcheck-Client",
        "Forwarded",
    ],
)
def test_a_header_proves_nobody(secure: SecureWorld, upstream: Upstream, header: str) -> None:
    ticket, identity = secure.workload(upstream), secure.identity("spiffe://mesh.test/header")
    knows(secure, identity.der, ticket)
    pem = ssl.DER_cert_to_PEM_cert(identity.der).replace("\n", "")

    with secure.reverse() as line:
        response = line.ask(asked(ticket, **{header: f'Cert="{pem}";URI=spiffe://mesh.test/header'}))

    assert (response.status, response.refusal) == (401, "token_required")
    assert upstream.requests == []


def test_a_placeholder_is_no_proof_of_a_workload(secure: SecureWorld, upstream: Upstream) -> None:
    ticket = secure.workload(upstream)

    with secure.reverse() as line:
        response = line.ask(asked(ticket, Proxy_Authorization=f"Bearer {ticket.placeholder}"))

    assert (response.status, response.refusal) == (401, "token_invalid")


def test_a_workload_without_a_placeholder_reaches_what_its_tenant_allows(
    secure: SecureWorld, upstream: Upstream
) -> None:
    ticket, identity = secure.workload(upstream), secure.identity("spiffe://mesh.test/bare")
    knows(secure, identity.der, ticket)
    host, _, port = upstream.authority.partition(":")
    secure.world.control_plane.allow(ticket.caller.tenant, host, int(port), allow_private=True)

    with secure.reverse(identity) as line:
        response = line.ask(get(f"/{ticket.credential}/bare"))

    assert response.status == 200
