"""`coatcheck serve proxy`, a process that holds keys: what it takes from its surroundings, and what it leaves there."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coatcheck.serve import is_serving
from egress_proxy.ca import create_ca
from tests.support.control_plane_simulator import ControlPlaneSimulator
from tests.support.processes import COMMAND, Served, clean_environment


@pytest.fixture
def control_plane() -> Iterator[ControlPlaneSimulator]:
    with ControlPlaneSimulator() as simulator:
        yield simulator


def started(folder: Path, control_plane: ControlPlaneSimulator, **environment: str) -> Served:
    create_ca(folder, now=datetime.now(UTC))
    (folder / "secret").write_text(control_plane.client_secret)
    settings = {
        "CONTROL_PLANE_URL": control_plane.url,
        "CLIENT_ID": control_plane.client_id,
        "CLIENT_SECRET_FILE": str(folder / "secret"),
        "FORWARD_LISTEN": "127.0.0.1:0",
        "REVERSE_LISTEN": "127.0.0.1:0",
        "ADMIN_LISTEN": "127.0.0.1:0",
        "CA_CERT_FILE": str(folder / "ca.pem"),
        "CA_KEY_FILE": str(folder / "ca.key"),
    }
    own = {f"COATCHECK_PROXY_{name}": value for name, value in settings.items()}
    return Served([str(COMMAND), "serve", "proxy"], clean_environment(**own, **environment), cwd=folder)


@pytest.mark.guards("coatcheck/serve.py", "if sys.flags.isolated and environment == dict(os.environ):", "if True:")
def test_a_proxy_takes_no_module_from_its_surroundings(tmp_path: Path, control_plane: ControlPlaneSimulator) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    # What serves imports it, and nothing that merely reads the command line does.
    (planted / "uvloop.py").write_text("import pathlib\npathlib.Path(__file__).with_name('loaded').touch()\n")

    served = started(tmp_path, control_plane, PYTHONPATH=str(planted))
    try:
        served.wait_until_listening()
        flags = Path(f"/proc/{served.pid}/cmdline").read_bytes().split(b"\0")
    finally:
        served.stop()

    assert not (planted / "loaded").exists()
    assert flags[1:4] == [b"-I", b"-m", b"coatcheck"]


@pytest.mark.guards("egress_proxy/bootstrap.py", "    forbid_core_dumps()\n", "")
@pytest.mark.guards("egress_proxy/bootstrap.py", "    keep_files_private()\n", "")
def test_a_proxy_leaves_no_core_and_no_file_for_others(tmp_path: Path, control_plane: ControlPlaneSimulator) -> None:
    served = started(tmp_path, control_plane)
    try:
        served.wait_until_listening()
        limits = Path(f"/proc/{served.pid}/limits").read_text()
        status = Path(f"/proc/{served.pid}/status").read_text()
    finally:
        served.stop()

    core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert core.split()[4:6] == ["0", "0"]
    assert "Umask:\t0077" in status


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "proxy"], True),
        (["--home", "x", "serve", "control-plane"], True),
        (["serve", "--help"], False),
        (["credential", "add", "serve"], False),
        ([], False),
    ],
)
def test_what_serves_is_told_from_what_asks(arguments: list[str], expected: bool) -> None:
    assert is_serving(arguments) is expected
