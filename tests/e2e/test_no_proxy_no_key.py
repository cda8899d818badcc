"""All proxies killed: an exchange says that nothing would swap, and never hands out the key instead."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from tests.control_plane.serving import PROXY, ControlPlane, control_plane_in
from tests.control_plane.test_direct_mode import asked
from tests.control_plane.test_exchange import assert_oauth_error
from tests.control_plane.workspace import SECRET, Workspace
from tests.support.processes import COMMAND, Proxy, Served, clean_environment, private_file, wait_for


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """For one tenant, so that direct mode is as near as it ever is."""
    with control_plane_in(tmp_path, platform_tenancy="single") as plane:
        yield plane


@pytest.fixture
def proxies(plane: ControlPlane) -> Iterator[list[Proxy]]:
    """Two, each a process of its own."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(plane.folder / "ca.pem"))
    private_file(plane.folder / "ca.key", ca.private_key_pem.bytes().decode())
    environment = {
        "CONTROL_PLANE_URL": plane.url,
        "CLIENT_ID": PROXY[0],
        "CLIENT_SECRET_FILE": str(plane.folder / "proxy-secret"),
        **{f"{listener}_LISTEN": "127.0.0.1:0" for listener in ("FORWARD", "REVERSE", "ADMIN")},
        "CA_CERT_FILE": str(plane.folder / "ca.pem"),
        "CA_KEY_FILE": str(plane.folder / "ca.key"),
    }
    named = clean_environment(**{f"COATCHECK_PROXY_{name}": value for name, value in environment.items()})
    with ExitStack() as stack:
        started = []
        for _ in range(2):
            served = Served([str(COMMAND), "serve", "proxy"], named, cwd=plane.folder)
            stack.callback(served.stop)
            started.append(Proxy(served.wait_until_listening()))
        yield started


@pytest.mark.guards("control_plane/exchange.py", "await self._injectors.require_heard()", "pass")
@pytest.mark.guards(
    "egress_proxy/bootstrap.py", "asyncio.create_task(stay_registered(client))", "asyncio.create_task(asyncio.sleep(0))"
)
def test_with_every_proxy_killed_an_exchange_is_503_and_never_the_key(
    plane: ControlPlane, proxies: list[Proxy]
) -> None:
    workspace = Workspace(plane, "acme")
    workspace.add_credential(allow_direct=True)
    workspace.grant()
    wait_for(lambda: plane.made("GET", "/v1/injectors")["items"])
    while_alive = workspace.exchange()
    for proxy in proxies:
        proxy.served.kill()
    plane.clock.advance(3_600)

    answers = [asked(workspace), asked(workspace, requested_token_type="")]

    assert while_alive["upstream_credential"]["mode"] == "placeholder"
    for answer in answers:
        assert_oauth_error(answer, "temporarily_unavailable", "credential_unavailable", status=503)
        assert SECRET not in answer.text
    (injector,) = plane.made("GET", "/v1/injectors")["items"]
    assert (injector["id"], injector["silent"]) == (PROXY[0], True)
