"""Settings, key files and the clients file: what is wrong with them stops the start, with a sentence that helps."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from control_plane.adapters.keyring import KeyFileError, generate_kek_file, read_kek_files
from control_plane.adapters.sql.engine import UnsupportedDatabaseError, open_database
from control_plane.clients_file import ClientsFileError, read_clients_file
from control_plane.config import PREFIX, Settings
from control_plane.contract.settings import UnknownSettingError, refuse_unknown_settings
from control_plane.core.sealing import Kek
from tests.control_plane.serving import private_file

# --- the environment -------------------------------------------------------------------------------------------------


def check(environment: dict[str, str]) -> None:
    refuse_unknown_settings(environment, prefix=PREFIX, names=Settings.model_fields)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("COATCHECK_CONTROL_PLANE_DATABSE_URL", "COATCHECK_CONTROL_PLANE_DATABASE_URL"),
        ("COATCHECK_CONTROLPLANE_LISTEN", "COATCHECK_CONTROL_PLANE_LISTEN"),
        ("COATCHECK_CONTROL_PLANE_KEK_FILE", "COATCHECK_CONTROL_PLANE_KEK_FILES"),
        ("COATCHECK_CONTROL_PLANE_ADMIN_TOKEN", "COATCHECK_CONTROL_PLANE_ADMIN_TOKEN_FILE"),
    ],
)
def test_a_misspelt_setting_refuses_to_start_and_suggests_the_right_one(wrong: str, meant: str) -> None:
    with pytest.raises(UnknownSettingError, match=f"{wrong} is not a setting; did you mean {meant}") as error:
        check({wrong: "a-secret-value"})

    assert "a-secret-value" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COATCHECK_CONTROL_PLANE_SERVICE_HOST", "10.0.0.1"),
        ("COATCHECK_CONTROL_PLANE_SERVICE_PORT", "8470"),
        ("COATCHECK_CONTROL_PLANE_SERVICE_PORT_HTTP", "8470"),
        ("COATCHECK_CONTROL_PLANE_PORT", "tcp://10.0.0.1:8470"),
        ("COATCHECK_CONTROL_PLANE_PORT_8470_TCP", "tcp://10.0.0.1:8470"),
        ("COATCHECK_CONTROL_PLANE_PORT_8470_TCP_ADDR", "10.0.0.1"),
        ("COATCHECK_EGRESS_PROXY_SERVICE_HOST", "10.0.0.2"),
        ("COATCHECK_PROXY_CLIENT_ID", "the proxy checks its own"),
        ("COATCHECK_RUNTIME_LISTEN", "so does the runtime"),
        ("COATCHECK_HOME", "/home/x"),
        ("PATH", "/bin"),
        *((PREFIX + name.upper(), "") for name in Settings.model_fields),
    ],
)
def test_names_of_others_and_of_kubernetes_are_not_our_business(name: str, value: str) -> None:
    check({name: value})


def test_a_port_that_is_no_service_link_is_a_misspelt_setting() -> None:
    with pytest.raises(UnknownSettingError):
        check({"COATCHECK_CONTROL_PLANE_PORT": "8470"})


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "COATCHECK_CONTROL_PLANE_DATABASE_URL": "sqlite+aiosqlite:////tmp/x",
        "COATCHECK_CONTROL_PLANE_KEK_FILES": "/keys/2.hex, /keys/1.hex",
        "COATCHECK_CONTROL_PLANE_LOG_LEVEL": "DEBUG",
        "COATCHECK_CONTROL_PLANE_PROXY_BASE_URL": "https://proxy.example/",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    settings = Settings.from_environment(os.environ)

    assert settings.kek_files == (Path("/keys/2.hex"), Path("/keys/1.hex"))
    assert (settings.log_level, settings.proxy_base_url) == ("debug", "https://proxy.example")
    assert (settings.session_seconds, settings.placeholder_ttl_seconds) == (43_200, 900)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kek_files": ()},
        {"session_seconds": 0},
        {"placeholder_ttl_seconds": -1},
        {"log_level": "loud"},
        {"tls_cert_file": Path("cert.pem")},
        {"unheard_of": 1},
    ],
    ids=str,
)
def test_a_setting_with_an_impossible_value_is_refused(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"database_url": "sqlite+aiosqlite:////tmp/x", "kek_files": (Path("k"),)}

    with pytest.raises(ValidationError):
        Settings(**(given | wrong))


# --- key-encryption keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["control-plane.sqlite", "sqlite:///x", "mysql://u:hunter2@h/d", "postgresql://u:hunter2@h/d", "://"]
)
def test_a_database_url_of_another_form_is_refused_with_the_right_ones_and_not_quoted(url: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(kek_files=(Path("kek"),), database_url=url)

    assert "sqlite+aiosqlite:////path/to/file or postgresql+asyncpg://" in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", ["postgresql+asyncpg://u:hunter2@h:port/d", "sqlite+aiosqlite:", "nowhere"])
def test_a_database_url_that_cannot_be_read_is_refused_too(url: str) -> None:
    with pytest.raises(UnsupportedDatabaseError) as refused:
        open_database(url)

    assert "sqlite+aiosqlite:////" in str(refused.value)
    assert "hunter2" not in str(refused.value)


OPEN_TO_OTHERS = ["0.0.0.0:8470", "[::]:8470", "10.0.0.1:8470", ":8470", "control-plane.internal:8470", "0.0.0.0"]


@pytest.mark.guards(
    "control_plane/config.py",
    'if self.tls_cert_file is None and self.plaintext_listener != "accepted-risk" and not _is_loopback(self.listen):',
    "if False:",
)
@pytest.mark.parametrize("listen", OPEN_TO_OTHERS)
def test_a_listener_for_other_machines_is_tls_or_an_accepted_risk(listen: str) -> None:
    fields: dict[str, Any] = {"kek_files": (Path("kek"),), "database_url": "sqlite+aiosqlite:////x", "listen": listen}

    with pytest.raises(ValidationError, match="PLAINTEXT_LISTENER=accepted-risk"):
        Settings(**fields)

    Settings(**fields, plaintext_listener="accepted-risk")
    Settings(**fields, tls_cert_file=Path("cert"), tls_key_file=Path("key"))


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.0.0.2:8470", "[::1]:8470", "localhost:8470", "127.0.0.1"])
def test_a_listener_for_this_machine_alone_needs_no_tls(listen: str) -> None:
    Settings(kek_files=(Path("kek"),), database_url="sqlite+aiosqlite:////x", listen=listen)


def test_the_ring_is_read_in_its_order(tmp_path: Path) -> None:
    keys = [bytes([number]) * 32 for number in (1, 2)]
    files = [private_file(tmp_path / f"{key[0]}.hex", key.hex() + "\n") for key in keys]

    assert read_kek_files(files) == tuple(Kek.of(key) for key in keys)


def test_a_generated_key_file_is_for_its_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    generate_kek_file(tmp_path / "1.hex", os.urandom(32))

    assert (tmp_path / "1.hex").stat().st_mode & 0o777 == 0o600
    assert len(read_kek_files([tmp_path / "1.hex"])) == 1
    with pytest.raises(FileExistsError):
        generate_kek_file(tmp_path / "1.hex", os.urandom(32))


@pytest.mark.guards("control_plane/adapters/keyring.py", "if open_to and not lent:", "if False:")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o666])
def test_a_key_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = private_file(tmp_path / "1.hex", "00" * 32)
    file.chmod(mode)

    with pytest.raises(KeyFileError, match="chmod 600"):
        read_kek_files([file])


@pytest.mark.parametrize("content", ["", "00" * 31, "00" * 33, "zz" * 32, "00" * 32 + "\n" + "11" * 32, "ü"])
def test_a_key_file_that_holds_no_key_is_refused_and_not_quoted(tmp_path: Path, content: str) -> None:
    file = private_file(tmp_path / "1.hex", content)

    with pytest.raises(KeyFileError) as error:
        read_kek_files([file])

    assert str(file) in str(error.value)
    assert not content or content not in str(error.value)


def test_a_missing_key_an_empty_ring_and_a_key_twice_are_refused(tmp_path: Path) -> None:
    file = private_file(tmp_path / "1.hex", "00" * 32)
    again = private_file(tmp_path / "2.hex", "00" * 32)

    (tmp_path / "empty").mkdir()

    for files, expected in (([tmp_path / "nothing"], "cannot read"), ([], "no key"), ([file, again], "the same key")):
        with pytest.raises(KeyFileError, match=expected):
            read_kek_files(files)
    with pytest.raises(KeyFileError, match="no key"):
        read_kek_files([tmp_path / "empty"])


def test_a_folder_stands_for_its_keys_newest_first_by_name(tmp_path: Path) -> None:
    for name in ("9.hex", "10.hex", "2.hex"):
        private_file(tmp_path / name, f"{int(name.removesuffix('.hex')):02x}" * 32)
    (tmp_path / "..2026_01_01").mkdir()
    (tmp_path / "..data").symlink_to("..2026_01_01")
    older = private_file(tmp_path.parent / f"{tmp_path.name}.hex", "ff" * 32)

    ring = read_kek_files([tmp_path, older])

    assert [kek.key[0] for kek in ring] == [10, 9, 2, 255]


# --- the clients file ------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"id": "proxy", "kind": "egress_proxy", "tenant": None, "scopes": [], "secret_file": "secret"}


def clients_file(folder: Path, content: Any, *, secret: str = "s" * 43) -> Path:
    private_file(folder / "secret", secret)
    file = folder / "clients.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_secret_file_is_looked_for_beside_the_clients_file(tmp_path: Path) -> None:
    (entry,) = read_clients_file(clients_file(tmp_path, [GOOD]))

    assert (entry.client.id, entry.client.kind, entry.client.tenant) == ("proxy", "egress_proxy", None)
    assert entry.secret is not None
    assert entry.secret.reveal() == "s" * 43


BAD_FILES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not JSON"),
    "no list": ({"clients": []}, "list"),
    "an unknown field": ([GOOD | {"secret": "x"}], "secret"),
    "an unknown kind": ([GOOD | {"kind": "admin"}], "kind"),
    "an unknown scope": ([GOOD | {"scopes": ["everything"]}], "scopes"),
    "an upper-case id": ([GOOD | {"id": "Proxy"}], "id"),
    "no secret file": ([{"id": "proxy", "kind": "egress_proxy"}], "secret_file"),
    "a secret file that is not there": ([GOOD | {"secret_file": "nothing"}], "cannot read"),
    "the same id twice": ([GOOD, GOOD], "same id"),
}


@pytest.mark.parametrize(("content", "expected"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_wrong_clients_file_is_refused_with_what_is_wrong(tmp_path: Path, content: Any, expected: str) -> None:
    with pytest.raises(ClientsFileError, match=expected):
        read_clients_file(clients_file(tmp_path, content))


@pytest.mark.guards("control_plane/clients_file.py", "        require_private(path)\n", "")
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = clients_file(tmp_path, [GOOD])
    (tmp_path / "secret").chmod(0o644)

    with pytest.raises(ClientsFileError, match="chmod 600"):
        read_clients_file(file)


@pytest.mark.guards("control_plane/clients_file.py", "if len(secret.reveal()) < min_characters:", "if False:")
def test_a_short_secret_is_refused_and_not_quoted(tmp_path: Path) -> None:
    with pytest.raises(ClientsFileError, match="shorter than 32") as error:
        read_clients_file(clients_file(tmp_path, [GOOD], secret="guessable"))

    assert "guessable" not in str(error.value)


@pytest.mark.parametrize("url", ["redis://host:6379/0", "rediss://host/1", "redis://user@host", ""])
def test_a_url_of_redis_is_taken(url: str, tmp_path: Path) -> None:
    Settings(database_url="sqlite+aiosqlite:////x", kek_files=(tmp_path,), redis_url=url)


@pytest.mark.parametrize("url", ["http://host", "host:6379", "redis://", "redis://user:password@host", "unix:///x"])
def test_another_url_is_refused_without_repeating_it(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="COATCHECK_CONTROL_PLANE_REDIS_URL") as refused:
        Settings(database_url="sqlite+aiosqlite:////x", kek_files=(tmp_path,), redis_url=url)

    assert "password@" not in str(refused.value)


def test_files_for_redis_go_with_its_url(tmp_path: Path) -> None:
    for fields in (
        {"redis_password_file": tmp_path},
        {"redis_ca_file": tmp_path},
        {"redis_ca_file": tmp_path, "redis_url": "redis://host"},
    ):
        with pytest.raises(ValidationError, match="REDIS_URL"):
            Settings(database_url="sqlite+aiosqlite:////x", kek_files=(tmp_path,), **fields)
