"""Key-encryption keys that never leave AWS KMS or a Vault, from end to end: a whole control plane and its proxy.

Real processes, real TLS to a KMS (moto's server) and to a Vault. An operator begins under one of them, moves everything
to the other, retires the first, and switches it off.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.support.fake_aws import KEYS_FILE, serving_aws
from tests.support.fake_vault import serving_vault
from tests.support.processes import (
    Deployment,
    Served,
    Workspace,
    private_file,
    start_deployment,
    wait_for,
)
from tests.support.upstream import Upstream, plain
from tests.support.ways import Kind, way

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

Settings = dict[str, str]
PREFIX = "COATCHECK_CONTROL_PLANE_"


@dataclass(slots=True)
class Place:
    """Where a key is kept."""

    provider: str
    shown_as: str
    port: int
    settings: Settings


@contextmanager
def in_kms(ca: trustme.CA, ca_file: Path) -> Iterator[Place]:
    with serving_aws(ca, str(ca_file)) as aws:
        arn = aws.client("kms").create_key()["KeyMetadata"]["Arn"]
        keys_file = private_file(ca_file.parent / "aws-keys", KEYS_FILE)
        settings = {"KEK_AWS_KEY_ARN": arn, "KEK_AWS_ENDPOINT": aws.url, "KEK_AWS_KEYS_FILE": str(keys_file)}
        yield Place("aws_kms", "AWS KMS", int(aws.url.rpartition(":")[2]), settings)


@contextmanager
def in_vault(ca: trustme.CA, ca_file: Path) -> Iterator[Place]:
    with serving_vault(ca) as vault:
        vault.transit["coatcheck"] = [os.urandom(32)]
        token_file = private_file(ca_file.parent / "vault-token", vault.issue_token("transit/"))
        settings = {
            "KEK_VAULT_ADDRESS": vault.url,
            "KEK_VAULT_KEY": "coatcheck",
            "KEK_VAULT_TOKEN_FILE": str(token_file),
        }
        yield Place("vault_transit", "Vault transit", vault.port, settings)


def sealing_in(ca_file: Path, place: Place, *others: Place) -> Settings:
    """What an operator would write: `place` seals, the others only open."""
    found = {"KEK_PROVIDER": place.provider, "KEK_FILES": "", "OUTBOUND_CA_FILES": str(ca_file)}
    found["OUTBOUND_ALLOW"] = ",".join(f"127.0.0.1:{each.port}" for each in (place, *others))
    for each in (place, *others):
        found |= each.settings
    return found


@dataclass(slots=True)
class Stand:
    deployment: Deployment

    def restart(self, settings: Settings) -> None:
        """The control plane with other settings of its keys."""
        old = self.deployment.control_plane
        old.stop()
        kept = {
            name: value
            for name, value in old.environment.items()
            if not name.startswith((f"{PREFIX}KEK_", f"{PREFIX}OUTBOUND_"))
        }
        given = {f"{PREFIX}{name}": value for name, value in settings.items() if value}
        self.deployment.control_plane = Served(
            old.command, kept | given, cwd=self.deployment.folder
        ).wait_until_listening()

    def keks(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.deployment.api.ask("GET", "/v1/keks")["items"]
        return items

    def rewrap(self) -> dict[str, Any]:
        """To its end."""
        self.deployment.api.ask("POST", "/v1/keks/rewrap")
        wait_for(lambda: self._status()["state"] == "done", timeout_seconds=20)
        return self._status()

    def readiness(self) -> httpx.Response:
        return httpx.get(f"{self.deployment.api.url}/readyz", trust_env=False)

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.deployment.api.ask("GET", "/v1/keks/rewrap")
        return status


def is_swapped(workspace: Workspace, upstream: Upstream, key: str) -> bool:
    """With a placeholder that no proxy has seen: the secret is opened for it."""
    answer = way(workspace, upstream, workspace.ticket("api"), Kind.TUNNEL).ask("GET", "/x")
    return answer.status == 200 and upstream.requests[-1].header("authorization") == f"Bearer {key}"


PLACES: dict[str, Callable[[trustme.CA, Path], AbstractContextManager[Place]]] = {"kms": in_kms, "vault": in_vault}


@pytest.mark.parametrize(("first", "then"), [("kms", "vault"), ("vault", "kms")])
def test_a_control_plane_lives_under_a_key_elsewhere_and_moves_to_another_one(
    first: str, then: str, tmp_path: Path
) -> None:
    ca, ca_file = trustme.CA(), tmp_path / "keks-ca.pem"
    ca.cert_pem.write_to_path(str(ca_file))
    key, new_key = (f"sk-real-{secrets.token_hex(20)}" for _ in range(2))
    with ExitStack() as switched_off, ExitStack() as stack:
        new = stack.enter_context(PLACES[then](ca, ca_file))
        old = switched_off.enter_context(PLACES[first](ca, ca_file))
        stand = Stand(start_deployment(tmp_path, control_plane_settings=sealing_in(ca_file, old)))
        stack.callback(stand.deployment.stop)
        upstream = stack.enter_context(Upstream(stand.deployment.upstream_ca))
        upstream.default = plain(b"ok")

        # (1) Born under a key that is elsewhere: a secret is stored and opened, also after a restart.
        workspace = stand.deployment.workspace()
        workspace.credential("api", url=upstream.url, secret=key)
        (born_under,) = stand.keks()
        assert is_swapped(workspace, upstream, key)
        stand.restart(sealing_in(ca_file, old))
        assert is_swapped(workspace, upstream, key)

        # (2) The other one seals from now on, the first one still opens; everything is brought under the new one.
        stand.restart(sealing_in(ca_file, new, old))
        assert is_swapped(workspace, upstream, key)
        done = stand.rewrap()
        seals = [kek for kek in stand.keks() if kek["seals"]]

        # (3) The first one holds nothing any more, and retires.
        retiring = next(kek for kek in stand.keks() if kek["kek_id"] == born_under["kek_id"])
        stand.deployment.api.ask("POST", f"/v1/keks/{born_under['kek_id']}/retire", {})

        # (4) It is switched off, and nobody misses it.
        stand.restart(sealing_in(ca_file, new))
        switched_off.close()
        is_open = is_swapped(workspace, upstream, key)
        stand.deployment.api.rotate(workspace.tenant, "api", secret=new_key)
        is_rotated = is_swapped(workspace, upstream, new_key)
        ready = stand.readiness().status_code

        assert (born_under["provider"], [kek["provider"] for kek in seals]) == (old.shown_as, [new.shown_as])
        assert (done["unopenable"], done["remaining"], done["rewrapped"] > 0) == (0, 0, True)
        assert (retiring["seals"], retiring["envelopes"]) == (False, 0)
        assert (is_open, is_rotated, ready) == (True, True, 200)
        assert not any(text in stand.deployment.logs() for text in (key, new_key))


@pytest.mark.parametrize("place", PLACES)
def test_with_its_key_out_of_reach_a_control_plane_that_starts_is_not_ready_and_opens_nothing(
    place: str, tmp_path: Path
) -> None:
    ca, ca_file = trustme.CA(), tmp_path / "keks-ca.pem"
    ca.cert_pem.write_to_path(str(ca_file))
    key = f"sk-real-{secrets.token_hex(20)}"
    with ExitStack() as switched_off, ExitStack() as stack:
        held = switched_off.enter_context(PLACES[place](ca, ca_file))
        settings = sealing_in(ca_file, held)
        stand = Stand(start_deployment(tmp_path, control_plane_settings=settings))
        stack.callback(stand.deployment.stop)
        upstream = stack.enter_context(Upstream(stand.deployment.upstream_ca))
        workspace = stand.deployment.workspace()
        workspace.credential("api", url=upstream.url, secret=key)
        through = way(workspace, upstream, workspace.ticket("api"), Kind.TUNNEL)
        switched_off.close()

        stand.restart(settings)
        ready, answer = stand.readiness(), through.ask("GET", "/x", timeout_seconds=20)

        assert (ready.status_code, ready.json()["code"]) == (503, "credential_unavailable")
        assert held.shown_as in ready.json()["detail"]
        assert answer.status == 503
        assert upstream.requests == [], "nothing went upstream, and above all no ciphertext"
