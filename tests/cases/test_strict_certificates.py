"""Leaf certificates that the strictest clients take, for names of every shape and for addresses."""

import ssl
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from tests.support.api import Ticket
from tests.support.processes import Deployment, Workspace
from tests.support.raw_client import TunnelRefusedError

LONG = ".".join(["a" * 60] * 3) + ".u.example"
HOSTS = {
    "a name": "api.u.example",
    "IPv4": "127.0.0.1",
    "IPv6": "[::1]",
    "a name of 200 characters": "b" * 7 + "." + LONG,
    "a name of 64 characters": "c" * 54 + ".u.example",
    "a name of 65 characters": "c" * 55 + ".u.example",
    "an underscore": "my_bucket.u.example",
    "a Punycode label": "xn--bcher-kva.u.example",
}
MAX_DAYS = 398
SLOW_CLOCK = timedelta(minutes=10)


def presented(workspace: Workspace, ticket: Ticket, host: str, *, asked: str = "") -> tuple[bytes, bytes]:
    """The leaf (DER) that a client sees that verifies as strictly as Python 3.13 does by default, and what it asked."""
    context = workspace.deployment.client_context()
    context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    authority = f"{asked or host}:443"
    with workspace.connected(ticket, authority) as line:
        line.start_tls(context, host.strip("[]"))
        assert isinstance(line.sock, ssl.SSLSocket)
        leaf = line.sock.getpeercert(binary_form=True)
    assert leaf is not None
    return leaf, authority.encode()


@pytest.fixture
def allowed(workspace: Workspace, ticket: Ticket) -> Callable[[str], Ticket]:
    def allow(host: str) -> Ticket:
        workspace.api.allow(workspace.tenant, host.strip("[]"), port=443, allow_private=True)
        return ticket

    return allow


@pytest.mark.parametrize("what", HOSTS)
def test_a_strict_client_and_openssl_verify_the_leaf(
    deployment: Deployment,
    workspace: Workspace,
    allowed: Callable[[str], Ticket],
    tmp_path: Path,
    what: str,
) -> None:
    """Python 3.13 refused leaves without key ids; addresses stood in them as names."""
    host = HOSTS[what]
    der, _ = presented(workspace, allowed(host), host)
    leaf = x509.load_der_x509_certificate(der)
    (tmp_path / "leaf.pem").write_text(ssl.DER_cert_to_PEM_cert(der))
    bare = host.strip("[]")
    by = "-verify_ip" if bare in ("127.0.0.1", "::1") else "-verify_hostname"

    verified = subprocess.run(
        [
            *["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", str(deployment.ca_file)],
            *[by, bare, str(tmp_path / "leaf.pem")],
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert verified.returncode == 0, verified.stderr
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if by == "-verify_ip":
        assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == [bare]
        assert names.get_values_for_type(x509.DNSName) == []
    else:
        assert names.get_values_for_type(x509.DNSName) == [bare]
    for extension in (ExtensionOID.AUTHORITY_KEY_IDENTIFIER, ExtensionOID.SUBJECT_KEY_IDENTIFIER):
        leaf.extensions.get_extension_for_oid(extension)
    assert leaf.not_valid_before_utc <= datetime.now(UTC) - SLOW_CLOCK
    assert leaf.not_valid_after_utc - leaf.not_valid_before_utc <= timedelta(days=MAX_DAYS)


def test_an_upper_case_host_gets_the_leaf_of_its_one_spelling(
    workspace: Workspace, allowed: Callable[[str], Ticket]
) -> None:
    ticket = allowed("api.u.example")

    lower, _ = presented(workspace, ticket, "api.u.example")
    upper, _ = presented(workspace, ticket, "api.u.example", asked="API.U.Example")

    assert lower == upper


def test_a_wildcard_is_no_host(workspace: Workspace, ticket: Ticket) -> None:
    with pytest.raises(TunnelRefusedError) as refused:
        workspace.connected(ticket, "*.u.example:443")

    assert refused.value.response.status in (400, 403)


def test_no_leaf_is_made_for_a_host_that_nobody_allowed(workspace: Workspace, ticket: Ticket) -> None:
    with pytest.raises(TunnelRefusedError) as refused:
        workspace.connected(ticket, "not-allowed.u.example:443")

    assert (refused.value.response.status, refused.value.response.refusal) == (403, "destination_denied")
