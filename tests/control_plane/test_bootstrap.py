"""Starting and stopping: as a process, again on the same files, with wrong keys, with TLS."""

import json
import os
import resource
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme

from control_plane.adapters.keyring import KeyFileError
from control_plane.clients_file import ClientsFileError
from control_plane.contract.refusal import RefusedError
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import ADMIN_TOKEN, PROXY, private_file, settings_in
from tests.control_plane.workspace import SECRET, Workspace

PROGRAM = """
import os, uvloop
from control_plane.bootstrap import serve
from control_plane.config import Settings
uvloop.run(serve(Settings.from_environment(os.environ)))
"""


def test_everything_is_there_again_after_a_restart(own_control_plane: OwnControlPlane) -> None:
    first = Workspace(own_control_plane(), "acme")
    first.add_credential()
    first.grant()
    session = first.open_session()
    issued = first.exchange(session)
    first.control_plane.stop()

    plane = own_control_plane(issuer_url=first.control_plane.url)
    first.control_plane = plane

    assert first.resolve(issued)["secret"] == SECRET
    assert first.renew(issued)["access_token"] == issued["access_token"]
    assert plane.http.get("/.well-known/jwks.json").json()["keys"]


def test_a_missing_key_does_not_start(own_control_plane: OwnControlPlane, tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot read"):
        own_control_plane(kek_files=(tmp_path / "nothing.hex",))


def test_with_the_wrong_key_it_is_alive_not_ready_and_mints_nothing(
    own_control_plane: OwnControlPlane, tmp_path: Path
) -> None:
    first = Workspace(own_control_plane(), "acme")
    first.add_credential()
    first.grant()
    session, right_key = first.open_session(), (tmp_path / "kek.hex").read_text()
    issued = first.exchange(session)
    first.control_plane.stop()

    wrong = private_file(tmp_path / "wrong.hex", os.urandom(32).hex())
    first.control_plane = own_control_plane(kek_files=(wrong,))
    http = first.control_plane.http

    ready = http.get("/readyz")
    assert http.get("/healthz").status_code == 200
    assert (ready.status_code, ready.json()["code"]) == (503, "credential_unavailable")
    assert "COATCHECK_CONTROL_PLANE_KEK_FILES" in ready.json()["hint"]
    assert http.get("/internal/tag-keys", auth=PROXY).status_code == 503
    assert http.get("/.well-known/jwks.json").status_code == 503
    assert first.renewal(issued).json()["error"] == "temporarily_unavailable"
    assert first.resolve(issued)["code"] == "credential_unavailable"
    assert right_key not in ready.text
    first.control_plane.stop()

    # Beside the wrong one, the right one opens everything again; the newest seals.
    first.control_plane = own_control_plane(kek_files=(wrong, tmp_path / "kek.hex"))
    assert first.resolve(issued)["secret"] == SECRET
    first.rotate("a-new-key")
    keks = first.control_plane.made("GET", "/v1/keks")["items"]
    assert [(kek["seals"], kek["envelopes"]) for kek in keks] == [(True, 1), (False, 3)]


def test_the_clients_file_says_which_clients_there_are(own_control_plane: OwnControlPlane, tmp_path: Path) -> None:
    def start(*names: str) -> Workspace:
        settings_in(tmp_path)
        private_file(tmp_path / "secret", "s" * 43)
        entries = [
            {"id": name, "kind": "runtime", "tenant": "acme", "scopes": [], "secret_file": "secret"} for name in names
        ]
        (tmp_path / "more.json").write_text(json.dumps(entries))
        workspace = Workspace.__new__(Workspace)
        workspace.control_plane = own_control_plane(clients_file=tmp_path / "more.json")
        workspace.tenant, workspace.runtime, workspace.runtime_secret = "acme", "one", "s" * 43
        return workspace

    def names(workspace: Workspace) -> list[tuple[str, str]]:
        listed = workspace.control_plane.made("GET", "/v1/clients")["items"]
        return [(client["id"], client["source"]) for client in listed]

    first = start("one", "two")
    first.add_client("by-hand", "runtime")
    first.add_credential()
    first.grant()
    session = first.open_session()
    issued = first.exchange(session)
    before = names(first)
    first.control_plane.stop()
    second = start("two")
    after = names(second)

    assert before == [("by-hand", "api"), ("one", "file"), ("two", "file")]
    assert after == [("by-hand", "api"), ("two", "file")]
    assert second.control_plane.look("SELECT revoked_at IS NULL FROM tokens WHERE id = ?", issued["id"]) == [(0,)]


def test_a_clients_file_that_gives_a_runtime_too_much_does_not_start(
    own_control_plane: OwnControlPlane, tmp_path: Path
) -> None:
    settings_in(tmp_path)
    entry = {
        "id": "sneaky",
        "kind": "runtime",
        "tenant": "acme",
        "scopes": ["subject:assert"],
        "secret_file": "proxy-secret",
    }
    (tmp_path / "more.json").write_text(json.dumps([entry]))

    with pytest.raises(RefusedError):
        own_control_plane(clients_file=tmp_path / "more.json")


def test_an_admin_token_that_others_can_read_does_not_start(own_control_plane: OwnControlPlane, tmp_path: Path) -> None:
    token = private_file(tmp_path / "open-token", "t" * 43)
    token.chmod(0o644)

    with pytest.raises(ClientsFileError, match="chmod 600"):
        own_control_plane(admin_token_file=token)


@pytest.mark.guards("control_plane/access.py", "if self._admin_digest is None:", "if False:")
def test_without_an_admin_token_nobody_is_the_administrator(own_control_plane: OwnControlPlane) -> None:
    plane = own_control_plane(admin_token_file=None)

    for token in (ADMIN_TOKEN, "", "None"):
        response = plane.http.get("/v1/tenants", headers={"Authorization": f"Bearer {token}".strip()})
        assert response.status_code == 401


def test_over_tls_its_certificate_is_the_one_that_was_given(own_control_plane: OwnControlPlane, tmp_path: Path) -> None:
    ca = trustme.CA()
    leaf = ca.issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
    context = ssl.create_default_context()
    ca.configure_trust(context)

    plane = own_control_plane(tls_cert_file=tmp_path / "cert.pem", tls_key_file=tmp_path / "key.pem")

    assert plane.url.startswith("https://127.0.0.1:")
    assert httpx.get(plane.url + "/readyz", verify=context, trust_env=False).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(plane.url + "/readyz", trust_env=False)


def environment(folder: Path, **more: str) -> dict[str, str]:
    settings = settings_in(folder)
    return {
        "PATH": os.environ["PATH"],
        "COATCHECK_CONTROL_PLANE_LISTEN": "127.0.0.1:0",
        "COATCHECK_CONTROL_PLANE_DATABASE_URL": settings.database_url,
        "COATCHECK_CONTROL_PLANE_KEK_FILES": str(folder / "kek.hex"),
        "COATCHECK_CONTROL_PLANE_ADMIN_TOKEN_FILE": str(folder / "admin-token"),
        "COATCHECK_CONTROL_PLANE_CLIENTS_FILE": str(folder / "clients.json"),
        "COATCHECK_CONTROL_PLANE_PROXY_BASE_URL": settings.proxy_base_url,
    } | more


@pytest.mark.guards(
    "control_plane/hardening.py", "    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n", "    pass\n"
)
def test_a_process_leaves_no_image_of_its_memory(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()

        core_limit = resource.prlimit(process.pid, resource.RLIMIT_CORE)

        process.send_signal(signal.SIGTERM)
    assert core_limit == (0, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_says_where_it_listens_and_ends_when_told(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    listening = json.loads(process.stderr.readline())
    ready = httpx.get(f"{listening['url']}/readyz", trust_env=False)

    process.send_signal(number)

    assert process.wait(10) == 0
    assert (listening["event"], listening["port"]) == ("listening", int(listening["url"].rpartition(":")[2]))
    assert ready.status_code == 200
    process.stderr.close()
