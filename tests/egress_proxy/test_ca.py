"""The interception CA: what strict clients say of its leaves, and what its files must be like."""

import asyncio
import ssl
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from egress_proxy.ca import CertificateAuthority, LeafContexts, UnusableCaError, create_ca

NOW = datetime.now(UTC)
LONG_HOST = ".".join(["a" * 49] * 4) + ".test"  # 204 characters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ca")
    create_ca(folder, now=NOW)
    return folder


@pytest.fixture(scope="module")
def ca(folder: Path) -> CertificateAuthority:
    return CertificateAuthority.load(cert_file=folder / "ca.pem", key_file=folder / "ca.key")


def verify(folder: Path, leaf: x509.Certificate, *options: str) -> str:
    path = folder / "leaf.pem"
    path.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", str(folder / "ca.pem")]
    done = subprocess.run([*command, *options, str(path)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else "OK"


@pytest.mark.guards("egress_proxy/ca.py", "critical=not fits", "critical=False")
@pytest.mark.parametrize(
    ("host", "option", "asked"),
    [
        ("api.u.test", "-verify_hostname", "api.u.test"),
        ("api.u.test", "-verify_hostname", "API.U.TEST"),
        ("*.u.test", "-verify_hostname", "deep.u.test"),
        ("under_score.u.test", "-verify_hostname", "under_score.u.test"),
        ("xn--bcher-kva.test", "-verify_hostname", "xn--bcher-kva.test"),
        (LONG_HOST, "-verify_hostname", LONG_HOST),
        ("127.0.0.1", "-verify_ip", "127.0.0.1"),
        ("::1", "-verify_ip", "::1"),
    ],
)
def test_a_strict_verifier_accepts_the_leaf(
    folder: Path, ca: CertificateAuthority, host: str, option: str, asked: str
) -> None:
    leaf = ca.leaf(host, now=NOW)

    assert verify(folder, leaf, option, asked) == "OK"


def test_a_leaf_is_not_valid_for_another_host(folder: Path, ca: CertificateAuthority) -> None:
    leaf = ca.leaf("api.u.test", now=NOW)

    assert "hostname mismatch" in verify(folder, leaf, "-verify_hostname", "evil.test")


def test_a_client_whose_clock_is_ten_minutes_slow_accepts_the_leaf(folder: Path, ca: CertificateAuthority) -> None:
    leaf = ca.leaf("api.u.test", now=NOW)

    assert verify(folder, leaf, "-attime", str(int((NOW - timedelta(minutes=10)).timestamp()))) == "OK"


def test_a_leaf_lives_at_most_398_days(ca: CertificateAuthority) -> None:
    leaf = ca.leaf("api.u.test", now=NOW)

    assert leaf.not_valid_after_utc - leaf.not_valid_before_utc <= timedelta(days=398)


def test_a_long_name_stands_in_the_critical_alternative_name_alone(ca: CertificateAuthority) -> None:
    leaf = ca.leaf(LONG_HOST, now=NOW)

    assert leaf.subject.rfc4514_string() == ""
    assert leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).critical


def test_the_ca_key_is_readable_by_its_owner_alone(folder: Path) -> None:
    assert stat.S_IMODE((folder / "ca.key").stat().st_mode) == 0o600


@pytest.mark.guards("egress_proxy/ca.py", "if key_file.stat().st_mode & 0o007:", "if False:")
def test_a_ca_key_that_everybody_can_read_is_not_used(tmp_path: Path) -> None:
    create_ca(tmp_path, now=NOW)
    (tmp_path / "ca.key").chmod(0o644)

    with pytest.raises(UnusableCaError, match="0600"):
        CertificateAuthority.load(cert_file=tmp_path / "ca.pem", key_file=tmp_path / "ca.key")


def test_an_existing_ca_is_not_replaced(tmp_path: Path) -> None:
    create_ca(tmp_path, now=NOW)

    with pytest.raises(FileExistsError):
        create_ca(tmp_path, now=NOW)


def test_a_key_of_another_ca_is_not_used(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        create_ca(tmp_path / name, now=NOW)

    with pytest.raises(UnusableCaError, match="does not belong"):
        CertificateAuthority.load(cert_file=tmp_path / "one/ca.pem", key_file=tmp_path / "two/ca.key")


def test_an_expired_ca_signs_nothing(ca: CertificateAuthority) -> None:
    with pytest.raises(UnusableCaError, match="expired"):
        ca.leaf("api.u.test", now=NOW + timedelta(days=4000))


async def test_contexts_are_shared_by_host_and_bounded(ca: CertificateAuthority) -> None:
    contexts = LeafContexts(ca, limit=2, clock=lambda: NOW)

    same = await asyncio.gather(*(contexts.context_for("a.test") for _ in range(5)))
    await contexts.context_for("b.test")
    await contexts.context_for("c.test")

    assert len({id(context) for context in same}) == 1
    assert len(contexts) == 2
    assert contexts.cached("a.test") is None


async def test_a_context_is_minted_anew_before_its_leaf_runs_out(ca: CertificateAuthority) -> None:
    now = [NOW]
    contexts = LeafContexts(ca, limit=2, clock=lambda: now[0])
    first = await contexts.context_for("a.test")

    now[0] += timedelta(days=20)

    assert await contexts.context_for("a.test") is not first


async def test_no_session_tickets_are_sent(ca: CertificateAuthority) -> None:
    context = ca.context("a.test", now=NOW)

    assert context.num_tickets == 0
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
