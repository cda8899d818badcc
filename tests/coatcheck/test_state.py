"""The state folder: created closed, kept closed, never half replaced."""

import os
import stat
from pathlib import Path

import pytest

from coatcheck.state import StateFolder, prepare
from coatcheck.terminal import CommandError


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "home")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_the_owners_alone_and_so_is_every_secret_file(state: StateFolder) -> None:
    before = os.umask(0)  # the least helpful one
    try:
        prepare(state)
    finally:
        os.umask(before)

    assert {mode(folder) for folder in (state.home, *(f for f in state.home.iterdir() if f.is_dir()))} == {0o700}
    secrets = [*state.kek_files, state.admin_token_file, *(state.home / "secrets").iterdir(), state.ca_key]
    assert {mode(file) for file in secrets} == {0o600}


def test_every_secret_is_new_and_long(state: StateFolder) -> None:
    prepare(state)

    values = [secret.reveal() for secret in state.own_secrets()]
    assert len(set(values)) == len(values) == 4
    assert all(len(value) >= 43 for value in values)


def test_preparing_again_changes_no_secret(state: StateFolder) -> None:
    prepare(state)
    before = [secret.reveal() for secret in state.own_secrets()]

    prepare(state)

    assert [secret.reveal() for secret in state.own_secrets()] == before


@pytest.mark.guards("coatcheck/state.py", "if is_open_to_others(folder):", "if False:")
def test_a_folder_that_others_may_enter_is_refused(state: StateFolder) -> None:
    state.home.mkdir()
    state.home.chmod(0o755)

    with pytest.raises(CommandError, match="chmod 700"):
        prepare(state)


@pytest.mark.guards("coatcheck/state.py", "if is_open_to_others(file)]", "if False]")
def test_a_secret_file_that_others_may_read_is_refused(state: StateFolder) -> None:
    prepare(state)
    state.admin_token_file.chmod(0o644)

    with pytest.raises(CommandError, match="others may read"):
        prepare(state)


@pytest.mark.guards("coatcheck/state.py", "if found.st_nlink > 1:", "if False:")
def test_a_secret_file_with_another_name_is_refused(state: StateFolder, tmp_path: Path) -> None:
    prepare(state)
    (tmp_path / "another-name").hardlink_to(state.kek_files[0])

    with pytest.raises(CommandError, match="hard link"):
        prepare(state)


@pytest.mark.guards("coatcheck/state.py", "    if found.st_uid != os.getuid():", "    if False:")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_state_of_somebody_else_is_refused(state: StateFolder) -> None:
    prepare(state)
    os.chown(state.admin_token_file, 12345, 12345)
    with pytest.raises(CommandError, match="admin-token belongs to somebody else"):
        prepare(state)

    os.chown(state.home, 12345, 12345)
    with pytest.raises(CommandError, match=r"state folder .* belongs to somebody else"):
        prepare(state)


def test_a_symbolic_link_in_the_place_of_the_folder_is_refused(state: StateFolder, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    state.home.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CommandError, match="open to other users"):
        prepare(state)


@pytest.mark.guards("coatcheck/state.py", "if state.database.exists():", "if False:")
def test_a_lost_key_encryption_key_is_not_replaced_by_a_new_one(state: StateFolder) -> None:
    prepare(state)
    state.database.touch(mode=0o600)
    state.kek_files[0].unlink()

    with pytest.raises(CommandError, match="backup"):
        prepare(state)


def test_half_a_ca_is_not_completed_with_another_half(state: StateFolder) -> None:
    prepare(state)
    state.ca_key.unlink()

    with pytest.raises(CommandError, match=r"ca\.key is missing"):
        prepare(state)


def test_the_newest_key_encryption_key_comes_first(state: StateFolder) -> None:
    prepare(state)
    (state.home / "kek" / "10.hex").touch(mode=0o600)
    (state.home / "kek" / "2.hex").touch(mode=0o600)

    assert [file.name for file in state.kek_files] == ["10.hex", "2.hex", "1.hex"]
