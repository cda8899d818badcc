"""A runtime wired from settings alone: alive before its control plane is, and closed until then."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import trustme

from control_plane.contract.secret import UnusableSecretError
from runtime.bootstrap import running
from runtime.config import Settings
from tests.runtime.keys import SigningKey, token
from tests.support.processes import free_port, private_file
from tests.support.upstream import Upstream


def settings(folder: Path, control_plane_url: str, *, secret: str = "client-secret\n") -> Settings:
    return Settings(
        listen=("127.0.0.1", 0),
        control_plane_url=control_plane_url,
        client_id="runtime-1",
        client_secret_file=private_file(folder / "secret", secret),
        model="coat-1",
    )


async def test_without_its_control_plane_a_runtime_is_alive_not_ready_and_does_nothing(tmp_path: Path) -> None:
    async with (
        running(settings(tmp_path, f"http://127.0.0.1:{free_port()}")) as runtime,
        httpx.AsyncClient(base_url=runtime.url, trust_env=False) as client,
    ):
        health, ready = await client.get("/healthz"), await client.get("/readyz")
        bearer = {"authorization": f"Bearer {token(SigningKey())}"}
        turn = await client.post("/v1/turn", json={"input": "x"}, headers=bearer)

    assert (health.status_code, ready.status_code) == (200, 503)
    assert (turn.status_code, turn.json()["code"]) == (503, "credential_unavailable")
    assert turn.headers["retry-after"] == "2"


async def test_environment_proxies_are_not_used_for_our_own_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Upstream(None) as trap, Upstream(None) as control_plane:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{trap.port}")
        async with (
            running(settings(tmp_path, f"http://127.0.0.1:{control_plane.port}")) as runtime,
            httpx.AsyncClient(base_url=runtime.url, trust_env=False) as client,
        ):
            await client.get("/readyz")

        assert trap.accepted == 0
        assert control_plane.accepted > 0


async def test_a_port_that_is_taken_stops_the_start(tmp_path: Path) -> None:
    with Upstream(None) as other:
        taken = settings(tmp_path, "http://127.0.0.1:9").model_copy(update={"listen": ("127.0.0.1", other.port)})

        with pytest.raises(OSError, match="in use"):
            async with running(taken):
                pass


async def test_an_empty_client_secret_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(UnusableSecretError):
        async with running(settings(tmp_path, "http://127.0.0.1:9", secret="\n")):
            pass


async def test_a_missing_certificate_stops_the_start(tmp_path: Path) -> None:
    odd = settings(tmp_path, "http://127.0.0.1:9").model_copy(
        update={"tls_cert_file": tmp_path / "none.pem", "tls_key_file": tmp_path / "none.key"}
    )

    with pytest.raises(FileNotFoundError):
        async with running(odd):
            pass


async def test_it_shows_until_when_the_certificate_is_good_that_proves_it(tmp_path: Path) -> None:
    ca = trustme.CA()

    def put_certificate(days: int) -> None:
        leaf = ca.issue_cert("runtime.test", not_after=datetime.now(UTC) + timedelta(days=days))
        leaf.private_key_pem.write_to_path(tmp_path / "tls.key")
        leaf.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")

    put_certificate(3)
    with Upstream(ca) as control_plane:
        ca.cert_pem.write_to_path(tmp_path / "ca.pem")
        proving = settings(tmp_path, f"https://127.0.0.1:{control_plane.port}").model_copy(
            update={
                "client_secret_file": None,
                "client_cert_file": tmp_path / "tls.crt",
                "client_key_file": tmp_path / "tls.key",
                "control_plane_ca_file": tmp_path / "ca.pem",
                "erase_grace_seconds": 1,  # so it asks often
            }
        )
        async with running(proving) as runtime, httpx.AsyncClient(base_url=runtime.url, trust_env=False) as client:
            before = (await client.get("/metrics")).text
            put_certificate(9)
            async with asyncio.timeout(20):
                while days_left((await client.get("/metrics")).text) < 8:
                    await asyncio.sleep(0.05)

    assert days_left(before) == pytest.approx(3, abs=0.01)
    assert "listener" not in before


def days_left(page: str) -> float:
    (line,) = [line for line in page.splitlines() if line.startswith("coatcheck_runtime_certificate_ends_in_seconds{")]
    assert 'source="client"' in line
    return float(line.rpartition(" ")[2]) / 86_400


PROGRAM = """
import os, uvloop
from runtime.bootstrap import serve
from runtime.config import settings_from_environment
uvloop.run(serve(settings_from_environment(os.environ)))
"""


@pytest.mark.guards("runtime/hardening.py", "    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n", "    pass\n")
def test_a_process_leaves_no_image_of_its_memory(tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "COATCHECK_RUNTIME_LISTEN": "127.0.0.1:0",
        "COATCHECK_RUNTIME_CONTROL_PLANE_URL": "http://127.0.0.1:9",
        "COATCHECK_RUNTIME_CLIENT_ID": "runtime-1",
        "COATCHECK_RUNTIME_CLIENT_SECRET_FILE": str(private_file(tmp_path / "secret", "client-secret")),
        "COATCHECK_RUNTIME_MODEL": "coat-1",
    }
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()

        core_limit = resource.prlimit(process.pid, resource.RLIMIT_CORE)

        process.send_signal(signal.SIGTERM)
    assert core_limit == (0, 0)
