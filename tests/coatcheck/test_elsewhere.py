"""A control plane that is not this machine's own, administered by the same commands: over TLS, for any tenant."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from control_plane.contract.settings import PROXY_PREFIX, refuse_unknown_settings
from tests.coatcheck.conftest import Said, type_command
from tests.control_plane.serving import ADMIN_TOKEN, control_plane_in

ELSEWHERE = "coatcheck/elsewhere.py"


class Remote:
    """A production control plane, and the machine of somebody who administers it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.home = folder / "home"
        self.ca_file = folder / "ca.pem"
        self.token_file = folder / "admin-token.txt"
        self.token_file.write_text(ADMIN_TOKEN + "\n")

    def typed(self, *arguments: str, given: str = "", trusting: bool = True, tenant: str = "acme") -> Said:
        trust = ("--ca-file", str(self.ca_file)) if trusting else ()
        return type_command(
            "--home", str(self.home), "--control-plane", self.url, "--admin-token-file", str(self.token_file),
            *trust, "--tenant", tenant, *arguments, given=given,
        )  # fmt: skip

    def json(self, *arguments: str, **how: Any) -> Any:
        said = self.typed("--json", *arguments, **how)
        assert said.status == 0, said.err
        return json.loads(said.out)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    ca = trustme.CA()
    certificate = ca.issue_cert("127.0.0.1", "localhost")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    key, chain = tmp_path / "tls.key", tmp_path / "tls.pem"
    key.touch(mode=0o600)
    certificate.private_key_pem.write_to_path(str(key))
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    with control_plane_in(tmp_path, tls_cert_file=chain, tls_key_file=key) as control_plane:
        yield Remote(control_plane.url.replace("http://", "https://"), tmp_path)


def test_a_tenants_things_are_made_and_seen_there(remote: Remote) -> None:
    for tenant in ("acme", "other"):
        remote.typed("tenant", "add", tenant)
    added = remote.typed(
        "credential", "add", "weather", "--destination", "https://api.example.com", given="a-secret-that-is-long-enough"
    )
    granted = remote.typed("grant", "add", "weather", "--subject", "alice")

    assert (added.status, granted.status) == (0, 0), added.err + granted.err
    assert [each["name"] for each in remote.json("credential", "list")] == ["weather"]
    assert remote.json("credential", "list", tenant="other") == []
    assert {each["purpose"] for each in remote.json("key", "list")} >= {"signing", "tag"}
    assert not remote.home.exists()


def test_the_variables_of_the_command_line_stop_no_program(remote: Remote) -> None:
    names = ("URL", "ADMIN_TOKEN_FILE", "CA_FILE", "TENANT")

    refuse_unknown_settings({f"COATCHECK_{name}": "x" for name in names}, prefix=PROXY_PREFIX, names=())

    assert all(f"COATCHECK_{name}" in remote.typed("--help").out for name in names)


@pytest.mark.guards(ELSEWHERE, 'if parts.scheme == "http" and parts.hostname not in _LOOPBACK:', "if False:")
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--control-plane", "http://coatcheck.example.com", "--admin-token-file", "x"), "https"),
        (("--control-plane", "coatcheck.example.com", "--admin-token-file", "x"), "URL"),
        (("--control-plane", "https://user@coatcheck.example.com", "--admin-token-file", "x"), "URL"),
        (("--control-plane", "https://coatcheck.example.com"), "--admin-token-file"),
        (("--ca-file", "x"), "--control-plane"),
    ],
)
def test_what_is_missing_or_unsafe_is_wrong_usage(tmp_path: Path, options: tuple[str, ...], word: str) -> None:
    said = type_command("--home", str(tmp_path / "home"), *options, "credential", "list")

    assert said.status == 2
    assert word in said.err
    assert not (tmp_path / "home").exists()


@pytest.mark.guards(ELSEWHERE, "ssl.create_default_context(cafile=self.ca_file)", "ssl._create_unverified_context()")
def test_who_is_not_trusted_gets_no_token(remote: Remote) -> None:
    said = remote.typed("credential", "list", trusting=False)

    assert said.status == 1
    assert "--ca-file" in said.err


def test_a_token_that_is_not_believed_there_is_named_by_its_file(remote: Remote) -> None:
    remote.token_file.write_text("another-token-that-nobody-knows-0123456789\n")

    said = remote.typed("credential", "list")

    assert said.status == 1
    assert remote.token_file.read_text().strip() not in said.err + said.out


def test_an_exchange_by_hand_is_the_local_stacks(remote: Remote) -> None:
    said = remote.typed("exchange", "--audience", "weather")

    assert said.status == 2
    assert "docs/exchange.md" in said.err
